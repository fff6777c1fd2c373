"""Known hard cases as scripts for a group or for one node. Each fails if its rule is broken."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from tests.raft.cluster import Cluster, hold
from tests.raft.solo import ELECTION_MS, Maker, Solo, append, has

from cometmq.errors import RaftRefused
from cometmq.raft import AnyMessage, AppendRequest, AppendResponse, RaftNode, VoteRequest


def figure_eight(make: Maker = RaftNode) -> None:
    """Of five members a majority has an old entry, which does not commit it; a newer term overwrites it.

    n0 and n1 have entry 1 of term 2, and n4 has one of term 3. n0 leads in term 4 and sends entry 1 to n2,
    but its own entry of term 4 to no member. It fails, and n4 leads.
    """
    cluster = Cluster(8, 5, make=make, terms=([1, 2], [1, 2], [1], [1], [1, 3]))
    for name in ("n3", "n4"):
        cluster.members[name].crash()

    def old_entries_only(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, AppendRequest) and message.entries_term > 3:
            return msgspec.structs.replace(message, count=0, entries_term=0, payload=None)
        others_stand = isinstance(message, VoteRequest) and message.sender != "n0"
        return None if others_stand else message

    cluster.filter = old_entries_only
    n0, n2, n4 = (cluster.members[name] for name in ("n0", "n2", "n4"))
    hold(cluster.run(20_000, until=lambda: len(n2.disk.log) == 2), "the old entry reaches a majority")
    cluster.run(500)
    hold(n0.committed < 1, "the old entry is not committed by counting")
    n0.crash()
    cluster.members["n1"].crash()
    cluster.filter = lambda message: message
    cluster.members["n3"].start()
    n4.start()
    cluster.put()
    hold(n4.disk.term_of(1) == 3, "the entry of the higher term has stayed")


def removed_leader_is_still_needed(make: Maker = RaftNode) -> None:
    """The leader of two members removes itself and fails before the other knows. Only it can lead again."""
    cluster = Cluster(1, 2, make=make)
    cluster.put()
    leader = cluster.lead()
    other = next(m for m in cluster.members.values() if m is not leader)
    cluster.blocked = {(leader.name, other.name)}
    hold(cluster.ask(leader, lambda node: node.remove(leader.name)) == "", "the removal is taken")
    cluster.run(100)
    leader.crash()
    leader.start()
    if leader.disk.last == other.disk.last:
        raise AssertionError("the script is wrong: the removal was lost")
    cluster.blocked.clear()
    cluster.put()
    hold(cluster.leader() is other, "the other one leads in the end")


def same_leader_in_a_later_term(make: Maker = RaftNode) -> None:
    """Entries that matched in a leader's former term are compared again in its next term."""
    solo = Solo([1], make=make)
    solo.step(append("n1", 1, (0, 1), 1, 1))
    said = solo.step(append("n1", 3, (1, 1), 3))
    answer = said[-1]
    hold(isinstance(answer, AppendResponse) and answer.match == 2, "what was written now is acknowledged")
    solo = Solo([1], make=make)
    solo.step(append("n1", 1, (0, 1), 1, 1))
    answer = solo.step(append("n1", 3, (0, 1)))[-1]
    hold(isinstance(answer, AppendResponse) and answer.match == 0, "nothing else is acknowledged")


def lower_leader_learns_of_a_higher_term(make: Maker = RaftNode) -> None:
    """A member with a higher term reports it to an old leader, since both would otherwise never agree."""
    solo = Solo([1], term=5, make=make)
    said = solo.step(append("n1", 3, (0, 1)))
    hold([(m.to, m.term) for m in said] == [("n1", 5)], "the leader is told the higher term")


def one_change_at_a_time(make: Maker = RaftNode) -> None:
    """Members change only after an entry of the leader's term is committed, one change at a time."""
    solo = Solo([1], make=make)
    solo.lead()
    changes = (lambda: solo.node.add_learner("n7"), lambda: solo.node.remove("n2"))
    hold(all(refused(change) for change in changes), "no change from another term's base")
    solo.step(has("n1", 2, 1))
    changes[0]()
    hold(refused(changes[1]), "no second change while one is pending")


def refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except RaftRefused:
        return True
    return False


def paused_leader_and_a_lost_disk(make: Maker = RaftNode) -> None:
    """A paused leader must not commit with a member that has lost its disk.

    While it is paused, another leader commits with a third member. That member loses its disk, the second
    leader is cut off, and the first leader resumes.
    """
    went_on = 0
    for seed in range(12):
        cluster = Cluster(seed, 3, make=make)
        cluster.put()
        first = cluster.lead()
        first.pause(60_000)
        cluster.blocked = cut_off(cluster, first.name)
        hold(cluster.run(20_000, until=lambda: cluster.leader() is not first), "another one leads")  # noqa: B023
        second = cluster.lead()
        cluster.put()
        cluster.run(1_000)
        (third,) = set(cluster.members.values()) - {first, second}
        third.lose_disk()
        cluster.blocked = cut_off(cluster, second.name)
        third.start()
        first.resume(first.run)
        went_on += cluster.leader() is not None and first.node is not None and first.node.ready
        cluster.ask(first, lambda node: node.propose(1))
        cluster.run(3_000)
        cluster.blocked.clear()
        cluster.put()
        whole = cluster.run(5_000, until=lambda: not third.disk.state.suspect)  # noqa: B023
        hold(whole, "with all others there the third one gets its vote again")
    if not went_on:
        raise AssertionError("the script is wrong: the paused leader has stepped down at once each time")


def cut_off(cluster: Cluster, name: str) -> set[tuple[str, str]]:
    return {pair for other in cluster.members for pair in ((name, other), (other, name))}


def candidate_without_leader(make: Maker = RaftNode) -> None:
    """A member that receives no messages does not raise its term."""
    solo = Solo([1], make=make)
    for _ in range(5):
        solo.step(ms=2 * ELECTION_MS)
    hold(solo.node.term == 1, "the term stays")
