"""A raft group of whole brokers in a run: its members, its leader, and its invariants."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast
from unittest import mock

from tests.simulation.cluster import BrokerMachine, Cluster
from tests.simulation.scheduler import OWNER

from cometmq.broker.replication.raft import RaftReplication
from cometmq.broker.replication.raft_peers import Peers
from cometmq.errors import CometError
from cometmq.message import SendResult
from cometmq.protocol.bodies.admin import RaftStatus
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import ChangeRaftGroupHeader, CreateTopicRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.raft import AnyMessage
from cometmq.remoting import Connection, RemotingClient
from cometmq.store.raft_log import RaftLog, TermAndVote, read_term

RAFT_PORT = 40911
LOOK_S = 0.05
"""Interval, in seconds, between two checks of the group."""

Tell = Callable[[str, str], None]
"""A function that gets the name of a broken guarantee and what happened."""


class RaftGroup:
    """The members n0, n1, ... of one group. `watch` starts regular checks of the group."""

    def __init__(self, cluster: Cluster, count: int, topic: str, tell: Tell, **settings: str) -> None:
        """Add the members to a cluster.

        Args:
            topic: Topic of the messages.
            tell: Reports a broken guarantee.
        """
        self._cluster = cluster
        self._topic = topic
        self._tell = tell
        own = {"enableDLegerCommitLog": "true", "dLegerGroup": "a", **settings}
        self.members = {
            f"n{number}": cluster.add_broker("a", dLegerSelfId=f"n{number}", **own) for number in range(count)
        }
        peers = ";".join(f"{name}-{machine.host}:{RAFT_PORT}" for name, machine in self.members.items())
        for machine in self.members.values():
            machine.settings["dLegerPeers"] = peers
        self._leaders: dict[int, str] = {}  # the member that accepted sends in each term
        self._entries: list[tuple[int, int]] = []  # end and checksum of each committed entry
        self._looked_at: dict[
            str, tuple[object, int]
        ] = {}  # per member: its store, and the number of compared entries
        self._topics: dict[str, int] = {}  # queue counts of the topics whose creation was confirmed
        self.logs_are_whole = True
        """Whether no disk has lost stored data."""
        self.disks_are_kept = True
        """Whether no machine has lost its disk so far."""

    def listening(self) -> AbstractContextManager[object]:
        """Compare the messages that members send with their saved state while the block runs."""
        send = Peers.send

        def listen(peers: Peers, messages: Sequence[AnyMessage]) -> None:
            owner = OWNER.get()
            for name, machine in self.members.items():
                if owner is not None and machine.host == owner.host and machine.broker is not None:
                    raft_log = machine.store.raft_log
                    assert raft_log is not None
                    saved = read_term(machine.disk, raft_log.directory) or TermAndVote()
                    said = max((each.term for each in messages if not getattr(each, "pre", False)), default=0)
                    if said > max(saved.term, 0):
                        self._tell("saved first", f"{name} speaks of term {said} and has saved {saved.term}")
            send(peers, messages)

        return mock.patch.object(Peers, "send", listen)

    def watch(self) -> None:
        """Check the group at intervals until the run ends."""
        self.look()
        self._cluster.scheduler.call_later(LOOK_S, self.watch)

    def look(self) -> None:
        """Compare the members."""
        for name, machine in self.members.items():
            broker = machine.broker
            if broker is None:
                continue
            replication, raft_log = broker.parts.replication, machine.store.raft_log
            assert isinstance(replication, RaftReplication)
            assert raft_log is not None
            if replication.serves:
                self._leads(name, replication.status())
            if self.logs_are_whole:
                self._compare(name, machine, raft_log)

    def _leads(self, name: str, status: RaftStatus) -> None:
        if status.role != "leader":
            self._tell("one leader", f"{name} is {status.role} in term {status.term} and takes sends")
        other = self._leaders.setdefault(status.term, name)
        if other != name:
            self._tell("one leader", f"{name} and {other} take sends in term {status.term}")

    def _compare(self, name: str, machine: BrokerMachine, raft_log: RaftLog) -> None:
        store, index = self._looked_at.get(name, (None, 0))
        if store is not machine.store:
            index = 0
        while index <= raft_log.committed:
            place = raft_log.location_of(index)
            data = raft_log.read(raft_log.range(index, index + 1, 1))
            found = place.end, zlib.crc32(data)
            if index == len(self._entries):
                self._entries.append(found)
            elif self._entries[index] != found:
                self._tell("committed for ever", f"entry {index} of {name} is another one")
            index += 1
        self._looked_at[name] = machine.store, index
        end = self._entries[raft_log.committed][0] if raft_log.committed >= 0 else 0
        for queue in machine.store.queues.of_topic(self._topic):
            unit = queue.unit(queue.max_offset - 1) if queue.max_offset else None
            if unit is not None and unit[0] >= end:
                self._tell("only committed is read", f"{name} shows {unit[0]}, committed is up to {end}")

    # -- queries of the run

    @property
    def serving(self) -> list[BrokerMachine]:
        """The members that accept sends: the leader, and one that is cut off and does not know its term."""
        return [
            machine
            for machine in self.members.values()
            if (broker := machine.broker) is not None
            and isinstance(broker.parts.replication, RaftReplication)
            and broker.parts.replication.serves
        ]

    @property
    def leader(self) -> BrokerMachine | None:
        """The member that accepts sends. If there are several, the one with the newest term."""
        return max(self.serving, key=lambda machine: self.status_of(machine).term, default=None)

    def status_of(self, machine: BrokerMachine) -> RaftStatus:
        assert machine.broker is not None
        replication = machine.broker.parts.replication
        assert isinstance(replication, RaftReplication)
        return replication.status()

    @property
    def taking_part(self) -> list[BrokerMachine]:
        """The members that the leader knows; all others were removed."""
        leader = self.leader
        if leader is None:
            return []
        return [self.members[each.member] for each in self.status_of(leader).members]

    def may_lose_disk(self, name: str) -> BrokerMachine | None:
        """Return this member if all members are intact: a group survives losing one minority at a time."""
        brokers = [each.broker for each in self.members.values()]
        whole = [each and each.parts.replication.facts().get("raftSuspect") == "false" for each in brokers]
        if not all(whole):
            return None
        self.disks_are_kept = False
        return self.members[name]

    def check_ack(self, result: SendResult) -> None:
        """Check that a majority has the acknowledged message."""
        leader = self.leader
        if leader is None or not self.logs_are_whole or not self.disks_are_kept:
            return
        position = decode_offset_id(result.offset_msg_id).physical_offset
        voters = [self.members[each.member] for each in self.status_of(leader).members if each.voter]
        have = sum(each.safe > position for each in voters)
        if 2 * have <= len(voters):
            self._tell("acknowledged is stored", f"{have} of {len(voters)} have a message at {position}")

    def caught_up(self) -> bool:
        """Return whether there is a leader and all members have its whole log, fully committed."""
        leader = self.leader
        if leader is None or any(each.broker is None for each in self.taking_part):
            return False
        found = {(s.last, s.committed) for s in map(self.status_of, self.taking_part)}
        return len(found) == 1 and all(last == committed for last, committed in found)

    def ask(self, action: str, member: str) -> None:
        """Let the leader handle CHANGE_RAFT_GROUP. `seen` counts the successful changes."""
        leader = self.leader
        if leader is None or leader.process is None or leader.process.paused or leader.broker is None:
            return
        replication = leader.broker.parts.replication
        assert isinstance(replication, RaftReplication)
        frame = Frame.request(
            RequestCode.CHANGE_RAFT_GROUP, ChangeRaftGroupHeader(action=action, member=member)
        )

        async def change() -> None:
            answer = await replication.change_raft_group(cast(Connection, None), frame)
            if answer.code == ResponseCode.SUCCESS:
                self._cluster.seen[action] += 1

        leader.process.spawn(change())

    def put_back(self) -> None:
        """Add the members that are not voters back to the group, one at a time, if the leader accepts."""
        leader = self.leader
        if leader is None:
            return
        known = {each.member: each.voter for each in self.status_of(leader).members}
        for name in self.members:
            if name not in known:
                self.ask("addLearner", name)
            elif not known[name]:
                self.ask("promote", name)

    async def make_topics(self, count: int, pause_s: float) -> None:
        """Request one topic after the other from the current leader."""
        client = RemotingClient()
        for number in range(count):
            await asyncio.sleep(pause_s)
            leader, queues = self.leader, 1 + number % 4
            if leader is None or leader.broker is None:
                continue
            header = CreateTopicRequestHeader(
                topic=f"S{number}", read_queue_nums=queues, write_queue_nums=queues, perm=6
            )
            frame = Frame.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            with contextlib.suppress(CometError):
                if (await client.call(leader.broker.addr, frame, 4.0)).code == ResponseCode.SUCCESS:
                    self._topics[f"S{number}"] = queues

    def check_topics(self, leader: BrokerMachine) -> None:
        """Check that the final leader has all topics whose creation was confirmed."""
        assert leader.broker is not None
        table = leader.broker.parts.tables.topics.table
        for name, queues in self._topics.items():
            if name not in table or table[name].read_queue_nums != queues:
                self._tell("settings are kept", f"{leader.host} has {table.get(name)} as {name}")

    @property
    def followers(self) -> list[BrokerMachine]:
        """The members of the group other than the leader."""
        return [each for each in self.taking_part if each is not self.leader]
