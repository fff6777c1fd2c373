"""A seeded life of a group: faults, requests, changes of members; then a healed world in which it must
work."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.raft.cluster import Cluster, Faults, Member, hold

from cometmq.raft import RaftNode, Role

STEPS = 60


def live(seed: int, make: Callable[..., RaftNode] = RaftNode, steps: int = STEPS) -> Cluster:
    """One life of so many steps. Broken or an error of the core, if a rule does not hold."""
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
    """Logs, as terms of their entries, that leaders have left behind who failed one after the other."""
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
    """Some kinds of trouble of all there are, so that seeds differ in kind (swarm testing)."""
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
    """The leader keeps a few members; perhaps it hears the others, or they hear it."""
    leader = cluster.leader()
    if leader is not None:
        others = [name for name in cluster.members if name != leader.name]
        rng.shuffle(others)
        side = {leader.name, *others[: rng.randint(0, len(others) // 2)]}
        pairs = {(a, b) for a in side for b in others if b not in side}
        back = {(b, a) for a, b in pairs}
        cluster.blocked = rng.choice((pairs, back, pairs | back, pairs | back))


def rot(cluster: Cluster, rng: random.Random) -> None:
    """At most one log at a time is damaged: with more, a majority may have lost what it promised to keep. The
    others must be a majority, since the damaged one has no vote."""
    fewest = min(len(m.disk.members().voters) or 9 for m in cluster.members.values())
    if not suspects(cluster) and fewest > 2:
        some(cluster, rng).crash(rot=True)


def lose_disk(cluster: Cluster, rng: random.Random) -> None:
    """Of a minority at a time: who has not got back yet what it had is one of them."""
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
    """Two sides, and perhaps somebody who hears both."""
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
    """A clock steps."""
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
    """Changes of members, asked of everybody who leads or may believe so; several at once, perhaps."""
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
    """In a healed world there is a leader soon, it commits, and everybody in the group gets the same log."""
    index = cluster.put()
    leader = cluster.lead()
    assert leader.node is not None
    group = [cluster.members[name] for name in leader.node.members.all_ids]
    same = cluster.run(20_000, until=lambda: all(m.committed >= index for m in group))
    hold(same, "all members catch up in time")


def stay(cluster: Cluster, rng: random.Random) -> None:
    """A follower that was cut off for a while does not depose the leader when it comes back."""
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
