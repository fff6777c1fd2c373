"""Replication of a broker that is a member of a raft group (`enableDLegerCommitLog`).

RaftMember writes the log. The tables (topics, groups, offsets) are not in the log: a follower copies them
from the leader, as a slave does from its master. RaftTables ensures that no acknowledged change of the tables
is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from cometmq import logs
from cometmq.broker.base import advertised
from cometmq.broker.base.address import HA_OFFSET
from cometmq.broker.replication.raft_member import RaftMember
from cometmq.broker.replication.raft_tables import GroupSync, RaftTables
from cometmq.broker.replication.replication import ReplicationContext, status_of_master
from cometmq.errors import CometError, CommandError, RaftRefused
from cometmq.protocol.bodies.admin import (
    HaClientInfo,
    HaConnectionInfo,
    HaRuntimeInfo,
    RaftMemberInfo,
    RaftStatus,
)
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import ChangeRaftGroupHeader, CopySettingsHeader
from cometmq.raft import RaftOptions, Role
from cometmq.remoting import Connection
from cometmq.store import SYNC_MASTER

log = logs.logger(__name__)

OPTIONS = RaftOptions()
"""The options of the raft algorithm."""
SYNC_S = 1.0
"""The interval, in seconds, at which a follower copies the leader's tables.

The interval is short, because any follower may become the leader and then starts with its last copy of the
tables.
"""


class LeaderControl(Protocol):
    """The services of a broker that run only on the leader (see LeaderServices)."""

    async def prepare(self) -> None: ...

    def lead(self) -> None: ...

    def follow(self) -> None: ...

    async def stop(self) -> None: ...


class RaftReplication:
    """Replication in a raft group. It has the same interface as Replication.

    Must be created in a running event loop.
    """

    decide = True

    def __init__(
        self, context: ReplicationContext, end_tick: Callable[[], None], leader_services: LeaderControl
    ) -> None:
        """Create the replication. Raises StoreError or OSError if this member's state cannot be read.

        `end_tick` commits the messages of the current event-loop tick.
        """
        self._context = context
        self._leader_services = leader_services
        store, tables = context.store, context.tables
        self.sync = GroupSync(store, tables, context.client, SYNC_S)
        self.member = RaftMember(
            context.config, context.clock, store, context.tick,
            end_tick=end_tick, leader_role=self, options=OPTIONS,
        )  # fmt: skip
        self._tables = RaftTables(self.member, tables, context.client, self.sync)
        tables.replicas = self._tables
        self.sync.copied = self._resume_voting
        tables.versions.term, tables.versions.counts = 0, False
        self.hand_over: Callable[[], None] = lambda: None
        """Called when this leader begins to transfer its leadership, and again when it no longer leads."""
        self.leader_changed: Callable[[], None] = lambda: None
        """Called when this member may have another leader, or leads."""
        self.end_tick, self.wait_for = self.member.end_tick, self.member.waits.wait_for

    async def start(self) -> None:
        """Join the raft group. The broker's port must be known. Raises ConfigError for a port in use."""
        address = self._context.address
        # Name servers require an HA address, although no socket listens on the HA port in a raft group.
        address.ha_port = address.port + HA_OFFSET
        await self.member.start(address.interface, address.text)
        if warning := advertised.unguarded(address, self.member.peers.port, "members"):
            log.warning("%s", warning)
        self.sync.start()

    async def retire(self) -> None:
        await self.member.retire()

    async def stop(self) -> None:
        self.sync.stop()
        await self.member.stop()
        await self._leader_services.stop()

    # -- LeaderRole

    async def prepare(self) -> None:
        await self._tables.adopt_newest()
        await self._leader_services.prepare()

    def lead(self) -> None:
        self.sync.lead()
        self._tables.lead()
        self._leader_services.lead()
        self.leader_changed()

    def follow(self) -> None:
        self._tables.follow()
        self._leader_services.follow()
        self.met()

    def met(self) -> None:
        """Start to copy the leader's tables if its address is known, unless this member is the leader."""
        if not self.serves:
            self.sync.follow(self._leader_broker or "")
            self.leader_changed()

    async def copy_tables(self) -> None:
        try:
            await self._tables.confirm()
        except CommandError as error:
            raise RaftRefused(error.remark) from error

    @property
    def _leader_broker(self) -> str | None:
        """The broker address of the leader, if that is another member with a known address."""
        known = self.member.peers.learned.get(self.member.node.leader)
        return None if known is None else known.broker_addr

    # -- Successor, for the relay of sends

    @property
    def accepts(self) -> bool:
        return self.member.accepts

    @property
    def leader_addr(self) -> str | None:
        if self.member.failed:
            return None
        known = self._leader_broker
        return "" if known is None and not self.member.stopped else known

    def has_member(self, host: str) -> bool:
        """Return whether another member is connected from this host."""
        return self.member.peers.has(host)

    async def _resume_voting(self) -> None:
        """Allow a member that has lost its disk to vote again, once its tables are complete."""
        if self.member.suspect:
            term = self.member.node.term
            with contextlib.suppress(OSError):  # `TableFile` logs the error and retries the write
                if await self._tables.has_settings_of(term):
                    self.member.settled(term)

    @property
    def serves(self) -> bool:
        """Whether this member is the leader and accepts messages."""
        return self.member.leading

    # -- requests of tools

    def facts(self) -> dict[str, str]:
        status, member = self.status(), self.member
        facts = {
            "brokerRole": SYNC_MASTER if self.serves else "SLAVE",
            "raftRole": status.role,
            "raftTerm": str(status.term),
            "raftLeader": status.leader,
            "raftCommitted": str(status.committed),
            "raftLast": str(status.last),
            "raftSuspect": "true" if member.suspect else "false",
            "haProblem": member.peers.problem or "none",
        }
        if status.role == "leader":
            others = [each.match for each in status.members if each.member != status.member]
            furthest = min(others, default=status.last)
            lag = self._context.store.log.end - member.end_of(furthest)
            facts |= {"raftLag": str(status.last - furthest), "haLagBytes": str(max(lag, 0))}
        else:
            facts["raftLag"] = str(max(member.leader_last - status.last, 0))
        return facts

    def status(self) -> RaftStatus:
        """Return the state of the raft group as this member knows it."""
        found = self.member.node.status()
        peers = [
            RaftMemberInfo(
                member=name,
                voter=name in found.members.voters,
                match=found.peers[name].match if name in found.peers else -1,
                silent_ms=found.peers[name].silent_ms if name in found.peers else -1,
            )
            for name in sorted(found.members.all_ids)
        ]
        return RaftStatus(
            member=self.member.me, role="failed" if self.member.failed else found.role.value, term=found.term,
            leader=found.leader, first=found.first, last=found.last, durable=found.durable,
            committed=found.committed, members=peers,
        )  # fmt: skip

    @handles(RequestCode.GET_BROKER_HA_STATUS)
    def get_broker_ha_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the state of replication, which the tool `haStatus` shows."""
        return frame.response(body=self.ha_status().encode())

    def ha_status(self) -> HaRuntimeInfo:
        """Return the state of the raft group in the format in which `haStatus` shows a master and its slaves.

        Members are written as in `dLegerPeers`, for example `n0-host:port`.
        """
        member, end = self.member, self._context.store.log.end
        node, problem = member.node.status(), member.peers.problem or None
        if node.role is Role.LEADER and not member.failed:
            infos = [
                HaConnectionInfo(
                    addr=f"{name}-{member.address_of(name)}",
                    slave_ack_offset=(acked := member.end_of(peer.match)),
                    diff=end - acked,
                    in_sync=member.keeps_up(name),
                    transferred_byte_in_second=member.peers.bytes_a_second(name),
                    transfer_from_where=acked,
                )
                for name, peer in sorted(node.peers.items())
            ]
            return status_of_master(end, infos, problem)
        info = HaClientInfo(
            master_addr=f"{node.leader}-{member.address_of(node.leader)}" if node.leader else None,
            transferred_byte_in_second=member.received_bytes.bytes_a_second(self._context.clock.monotonic()),
            max_offset=end,
            last_read_timestamp=member.read_ms,
            last_write_timestamp=member.written_ms,
            master_flush_offset=member.end_of(node.committed),
            activated=bool(node.leader),
        )
        return HaRuntimeInfo(master=False, ha_client_runtime_info=info, problem=problem)

    @handles(RequestCode.GET_RAFT_STATUS)
    def get_raft_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the state of the raft group as this member knows it."""
        return frame.response(body=self.status().encode())

    @handles(RequestCode.COPY_SETTINGS)
    async def copy_settings(self, _connection: Connection, frame: Frame) -> Frame:
        """Handle a request of the leader: copy the leader's topics and groups to this member's disk."""
        header = frame.header(CopySettingsHeader)
        try:
            await self._tables.copy(header)
        except CommandError:
            raise
        except CometError as error:
            raise CommandError.failed(str(error)) from error
        except OSError as error:
            raise CommandError.failed(f"not written: {error.strerror or error}") from error
        return frame.response()

    @handles(RequestCode.CHANGE_RAFT_GROUP)
    async def change_raft_group(self, _connection: Connection, frame: Frame) -> Frame:
        """Transfer the leadership, or change the members of the group. Only the leader accepts this."""
        header, member = frame.header(ChangeRaftGroupHeader), self.member
        changes: dict[str, Callable[[str], Awaitable[None] | None]] = {
            "transfer": member.transfer, "addLearner": member.add_learner, "promote": member.promote,
            "remove": member.remove,
        }  # fmt: skip
        if header.action not in changes:
            return frame.response(ResponseCode.SYSTEM_ERROR, f"action is none of {', '.join(changes)}")
        try:
            if (change := changes[header.action](header.member)) is not None:
                await change
        except RaftRefused as refusal:
            return frame.response(ResponseCode.SYSTEM_ERROR, str(refusal))
        log.warning("raft: carried out action %s for member %s, as requested", header.action, header.member)
        return frame.response()
