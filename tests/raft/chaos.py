"""A seeded run of a group: faults, requests and changes of members; then no faults, and it must work."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.raft.cluster import Cluster, Faults, Member, hold

from cometmq.raft import RaftNode, Role

STEPS = 60


def live(seed: int, make: Callable[..., RaftNode] = RaftNode, steps: int = STEPS) -> Cluster:
    """Run `steps` steps. Raises Broken or an error of the core if a rule is violated."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 3, 3, 3, 4, 5, 5, 5))
    cluster = Cluster(seed, size, Faults.of(rng), make, past(rng, size) if rng.random() < 0.5 else ())
    actions = swarm(rng)
    for _ in range(steps):
        cluster.run(rng.choice((30, 100, 300, 1_000)))
        for member in list(cluster.members.values()):
            if rng.random() < 0.6:
                cluster.ask(member, lambda node: node.propose(rng.randint(1, 3)))
        rng.choice(actions)(cluster, rng)
    heal(cluster)
    settle(cluster)
    if seed % 3 == 0:
        stay(cluster, rng)
    return cluster


def past(rng: random.Random, size: int) -> list[list[int]]:
    """Return logs, as terms of their entries, left behind by leaders that failed one after the other."""
    logs: list[list[int]] = [[] for _ in range(size)]
    for term in range(1, rng.randint(2, 6)):
        voters = rng.sample(range(size), size // 2 + 1)
        leader = max(voters, key=lambda each: (logs[each][-1:], len(logs[each])))
        new = logs[leader] + [term] * rng.randint(1, 2)
        for follower in {leader, *rng.sample(range(size), rng.randint(0, (size - 1) // 2))}:
            if (logs[follower][-1:], len(logs[follower])) <= (new[-1:], len(new)):
                logs[follower] = (
                    new[: rng.randint(len(logs[leader]), len(new))] if follower != leader else new
                )
    return logs


def swarm(rng: random.Random) -> list[Action]:
    """Choose some of all kinds of faults, so that seeds differ in kind (swarm testing)."""
    kinds: list[Action] = [
        *(crash, crash, crash_leader, crash_leader, start, start, split, cut_leader_off, cut_leader_off),
        *(cut_one_way, mend, tick_apart, transfer, change, change, disk_fails, retain, rot, nothing),
        *(lose_disk, lose_disk, pause, pause),
    ]
    return [*rng.sample(kinds, rng.randint(3, len(kinds))), start, mend]


Action = Callable[[Cluster, random.Random], Any]


def some(cluster: Cluster, rng: random.Random) -> Member:
    return rng.choice(list(cluster.members.values()))


def nothing(cluster: Cluster, rng: random.Random) -> None:
    pass


def crash(cluster: Cluster, rng: random.Random) -> None:
    some(cluster, rng).crash()


def suspects(cluster: Cluster) -> bool:
    return any(m.disk.state.suspect for m in cluster.members.values())


def crash_leader(cluster: Cluster, rng: random.Random) -> None:
    leader = cluster.leader()
    if leader is not None:
        leader.crash()


def cut_leader_off(cluster: Cluster, rng: random.Random) -> None:
    """Leave the leader a few members; messages from or to the others may still pass in one direction."""
    leader = cluster.leader()
    if leader is not None:
        others = [name for name in cluster.members if name != leader.name]
        rng.shuffle(others)
        side = {leader.name, *others[: rng.randint(0, len(others) // 2)]}
        pairs = {(a, b) for a in side for b in others if b not in side}
        back = {(b, a) for a, b in pairs}
        cluster.blocked = rng.choice((pairs, back, pairs | back, pairs | back))


def rot(cluster: Cluster, rng: random.Random) -> None:
    """Damage at most one log at a time: with more, a majority may have lost committed entries.

    The others must be a majority, since the damaged member has no vote.
    """
    fewest = min(len(m.disk.members().voters) or 9 for m in cluster.members.values())
    if not suspects(cluster) and fewest > 2:
        some(cluster, rng).crash(rot=True)


def lose_disk(cluster: Cluster, rng: random.Random) -> None:
    """Lose the disk of a member, of a minority at a time, including members that have not recovered yet."""
    fewest = min(len(m.disk.members().voters) or 9 for m in cluster.members.values())
    lost = sum(m.disk.state.suspect for m in cluster.members.values())
    member = some(cluster, rng)
    if lost + 1 <= (fewest - 1) // 2 and not member.disk.state.suspect:
        member.lose_disk()
        cluster.at(rng.randint(1, 300), cluster.wake, member)


def pause(cluster: Cluster, rng: random.Random) -> None:
    member = cluster.leader() if rng.random() < 0.7 else some(cluster, rng)
    if member is not None:
        member.pause(rng.choice((100, 600, 3_000)))


def start(cluster: Cluster, rng: random.Random) -> None:
    for member in cluster.members.values():
        if member.node is None and rng.random() < 0.7:
            member.start()


def split(cluster: Cluster, rng: random.Random) -> None:
    """Split the group in two, perhaps with a member that is connected to both parts."""
    names = list(cluster.members)
    rng.shuffle(names)
    at = rng.randint(1, len(names))
    between = rng.choice(names) if rng.random() < 0.3 else ""
    cluster.blocked = {
        (a, b) for a in names[:at] for b in names[at:] if between not in (a, b)
    }  # fmt: skip
    cluster.blocked |= {(b, a) for a, b in cluster.blocked}


def cut_one_way(cluster: Cluster, rng: random.Random) -> None:
    cluster.blocked.add((some(cluster, rng).name, some(cluster, rng).name))


def mend(cluster: Cluster, rng: random.Random) -> None:
    cluster.blocked.clear()


def tick_apart(cluster: Cluster, rng: random.Random) -> None:
    """Step a member's clock."""
    some(cluster, rng).offset += rng.choice((-3_600_000, -1_000, 1_000, 3_600_000))


def disk_fails(cluster: Cluster, rng: random.Random) -> None:
    cluster.failing_disk = some(cluster, rng).name


def retain(cluster: Cluster, rng: random.Random) -> None:
    some(cluster, rng).retain()


def transfer(cluster: Cluster, rng: random.Random) -> None:
    leader = cluster.leader()
    if leader is not None:
        to = some(cluster, rng).name
        cluster.ask(leader, lambda node: node.transfer(to))


def change(cluster: Cluster, rng: random.Random) -> None:
    """Request changes of members from all leaders and former leaders, perhaps several concurrently."""
    kinds = [
        lambda node: node.promote(min(node.members.learners)),
        lambda node: node.add_learner(name),
        lambda node: node.remove(name),
    ]
    for member in [m for m in cluster.members.values() if m.node is not None and m.node.role is Role.LEADER]:
        for kind in rng.sample(kinds, 3)[: rng.randint(1, 3)]:
            assert member.node is not None
            name = some(cluster, rng).name
            if kind is kinds[0] and not member.node.members.learners:
                continue
            if kind is kinds[1] and len(cluster.members) < 7 and rng.random() < 0.5:
                name = cluster.join(f"n{len(cluster.members)}").name
            if kind is kinds[2] and suspects(cluster):
                continue
            cluster.ask(member, kind)
            if member.node is None:
                break


def heal(cluster: Cluster) -> None:
    cluster.blocked.clear()
    cluster.failing_disk = ""
    cluster.faults = Faults(lose_unsynced=cluster.faults.lose_unsynced)
    for member in cluster.members.values():
        member.resume(member.run)
        if member.node is None:
            member.start()


def settle(cluster: Cluster) -> None:
    """Without faults there is soon a leader, it commits, and all members of the group get the same log."""
    index = cluster.put()
    leader = cluster.lead()
    assert leader.node is not None
    group = [cluster.members[name] for name in leader.node.members.all_ids]
    same = cluster.run(20_000, until=lambda: all(m.committed >= index for m in group))
    hold(same, "all members catch up in time")


def stay(cluster: Cluster, rng: random.Random) -> None:
    """Check that a follower that was cut off for a while does not depose the leader when it comes back."""
    leader = cluster.lead()
    assert leader.node is not None
    term = leader.node.term
    if len(leader.node.members.voters) < 3:
        return
    other = rng.choice(sorted(leader.node.members.all_ids - {leader.name}))
    cluster.blocked = {pair for name in cluster.members for pair in ((other, name), (name, other))}
    cluster.run(4_000)
    cluster.blocked.clear()
    cluster.run(1_500)
    hold(leader.node is not None and leader.node.term == term, "a member that comes back deposes nobody")
