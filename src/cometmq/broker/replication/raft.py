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
from cometmq.broker.base.members import peers_of, preferred_of
from cometmq.broker.replication.context import ReplicationContext
from cometmq.broker.replication.metadata_sync import Extent
from cometmq.broker.replication.raft_member import MemberConfig, RaftMember
from cometmq.broker.replication.raft_tables import GroupSync, RaftTables
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
        """Create the replication. `end_tick` commits the messages of the current event-loop tick."""
        config, store, tables, client = context.config, context.store, context.tables, context.client
        self._config = config
        self._clock = context.clock
        self._store = store
        self._address = context.address
        self._tick = context.tick
        self._commit_tick = end_tick
        self._leader_services = leader_services
        self.sync = GroupSync(store, tables, client, SYNC_S)
        self._tables = RaftTables(self, tables, client, self.sync)
        tables.replicas = self._tables
        self.sync.copied = self._resume_voting
        tables.versions.term, tables.versions.counts = 0, False
        self._addresses = dict(peers_of(config.store.d_leger_peers))
        self._member: RaftMember | None = None
        self.on_handoff: Callable[[], None] = lambda: None
        """Called when this leader begins to transfer its leadership, and again when it no longer leads."""

    async def start(self) -> None:
        """Join the raft group. The broker's port must be known. Raises OSError or StoreError."""
        config, settings = self._config, self._config.store
        # Name servers require an HA address, although no socket listens on the HA port in a raft group.
        self._address.ha_port = self._address.port + HA_OFFSET
        member_config = MemberConfig(
            me=settings.d_leger_self_id,
            group=settings.d_leger_group,
            addresses=self._addresses,
            broker_addr=self._address.text,
            joins=config.d_leger_join,
            preferred=preferred_of(settings.preferred_leader_id),
        )
        self._member = RaftMember(
            member_config,
            store=self._store,
            clock=self._clock,
            timeout_s=config.slave_timeout / 1000,
            tick=self._tick,
            end_tick=self._commit_tick,
            leader_role=self,
            options=OPTIONS,
        )
        await self._member.start(self._address.interface)
        if warning := advertised.unguarded(self._address, self._member.peers.port, "members"):
            log.warning("%s", warning)
        self.sync.start()

    def end_tick(self) -> None:
        """Handle the events of this event-loop tick: messages from other members, and writes of the store."""
        if self._member is not None:
            self._member.end_tick()

    async def retire(self) -> None:
        """Prepare for the broker's stop while the broker still serves requests (see `RaftMember.retire`)."""
        if self._member is not None:
            await self._member.retire()

    async def stop(self) -> None:
        """Stop the raft member and the leader services."""
        self.sync.stop()
        if self._member is not None:
            await self._member.stop()
        await self._leader_services.stop()

    def configure(self) -> None:
        """Do nothing, because no setting of a raft group can change while the broker runs."""

    def wait_for(self, position: int, waiter: Callable[[int], None]) -> None:
        if self._member is None:
            waiter(int(ResponseCode.SYSTEM_ERROR))
        else:
            self._member.waits.wait_for(position, waiter)

    # -- LeaderRole

    async def prepare(self) -> None:
        await self._tables.adopt_newest()
        await self._leader_services.prepare()

    def lead(self) -> None:
        self.sync.lead()
        self._tables.lead()
        self._leader_services.lead()

    def follow(self) -> None:
        self._tables.follow()
        self._leader_services.follow()
        self.met()

    def met(self) -> None:
        """Start to copy the leader's tables if its address is known, unless this member is the leader."""
        member = self._member
        if member is not None and not member.leading:
            known = member.peers.learned.get(member.node.leader)
            self.sync.follow("" if known is None else known.broker_addr)

    def hand_over(self) -> None:
        self.on_handoff()

    async def copy_tables(self) -> None:
        try:
            await self._tables.confirm()
        except CommandError as error:
            raise RaftRefused(error.remark) from error

    # -- requests of the relay of sends

    @property
    def accepts(self) -> bool:
        member = self._member
        return member is not None and member.accepts

    @property
    def leader_addr(self) -> str | None:
        member = self._member
        if member is None or member.failed:
            return None
        known = None if member.node.leader == member.me else member.peers.learned.get(member.node.leader)
        if known is None:
            return None if member.stopped else ""
        return known.broker_addr

    async def _resume_voting(self) -> None:
        """Allow a member that has lost its disk to vote again, once its tables are complete."""
        member = self._member
        if member is not None and member.suspect:
            term = member.node.term
            with contextlib.suppress(OSError):  # `TableFile` logs the error and retries the write
                if await self._tables.has_settings_of(term):
                    member.settled(term)

    # -- requests of this member's tables

    @property
    def me(self) -> str:
        """The name of this member, as in `dLegerPeers`."""
        return self._config.store.d_leger_self_id

    @property
    def term(self) -> int:
        return -1 if self._member is None else self._member.node.term

    @property
    def leader(self) -> str:
        return "" if self._member is None else self._member.node.leader

    @property
    def leading(self) -> bool:
        return self.serves

    @property
    def voters(self) -> frozenset[str]:
        return frozenset() if self._member is None else self._member.node.members.voters

    def answering(self) -> dict[str, str]:
        member = self._member
        if member is None:
            return {}
        learned, voters = member.peers.learned, self.voters
        return {
            name: learned[name].broker_addr
            for name, peer in member.node.status().peers.items()
            if name in voters and name in learned and peer.match >= 0
        }

    def leader_log(self) -> Extent:
        """Return the begin and end that the leader's log had when the leader's offsets were last copied."""
        return self.sync.master_log

    @property
    def serves(self) -> bool:
        """Whether this member is the leader and accepts messages."""
        return self._member is not None and self._member.leading

    # -- requests of tools

    @property
    def _problem(self) -> str:
        return "" if self._member is None else self._member.peers.problem

    def facts(self) -> dict[str, str]:
        """Return the runtime table's entries about replication."""
        status, member = self.status(), self._member
        leads = status.role == "leader"
        facts = {
            "brokerRole": SYNC_MASTER if self.serves else "SLAVE",
            "raftRole": status.role,
            "raftTerm": str(status.term),
            "raftLeader": status.leader,
            "raftCommitted": str(status.committed),
            "raftLast": str(status.last),
            "raftSuspect": "true" if member is not None and member.suspect else "false",
            "haProblem": self._problem or "none",
        }
        if leads:
            others = [each.match for each in status.members if each.member != status.member]
            furthest = min(others, default=status.last)
            lag = self._store.log.end - member.end_of(furthest) if member is not None else 0
            facts |= {"raftLag": str(status.last - furthest), "haLagBytes": str(max(lag, 0))}
        elif member is not None:
            facts["raftLag"] = str(max(member.received.last - status.last, 0))
        return facts

    def status(self) -> RaftStatus:
        """Return the state of the raft group as this member knows it."""
        if self._member is None:
            return RaftStatus()
        found = self._member.node.status()
        voters = found.members.voters
        peers = [
            RaftMemberInfo(
                member=name,
                voter=name in voters,
                match=found.peers[name].match if name in found.peers else -1,
                silent_ms=found.peers[name].silent_ms if name in found.peers else -1,
            )
            for name in sorted(found.members.all_ids)
        ]
        return RaftStatus(
            member=self._member.me,
            role="failed" if self._member.failed else found.role.value,
            term=found.term,
            leader=found.leader,
            first=found.first,
            last=found.last,
            durable=found.durable,
            committed=found.committed,
            members=peers,
        )

    @handles(RequestCode.GET_BROKER_HA_STATUS)
    def get_broker_ha_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the state of replication, which the tool `haStatus` shows."""
        return frame.response(body=self.ha_status().encode())

    def ha_status(self) -> HaRuntimeInfo:
        """Return the state of the raft group in the format in which `haStatus` shows a master and its slaves.

        Members are written as in `dLegerPeers`, for example `n0-host:port`.
        """
        member, end, now = self._member, self._store.log.end, self._clock.monotonic()
        if member is None:
            return HaRuntimeInfo(master=False)
        node = member.node.status()
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
            near = sum(info.in_sync for info in infos)
            return HaRuntimeInfo(
                master=True,
                master_commit_log_max_offset=end,
                in_sync_slave_nums=near,
                ha_connection_info=infos,
                problem=self._problem or None,
            )
        received = member.received
        info = HaClientInfo(
            master_addr=f"{node.leader}-{member.address_of(node.leader)}" if node.leader else None,
            transferred_byte_in_second=received.rate.bytes_a_second(now),
            max_offset=end,
            last_read_timestamp=received.read_ms,
            last_write_timestamp=received.written_ms,
            master_flush_offset=member.end_of(node.committed),
            activated=bool(node.leader),
        )
        return HaRuntimeInfo(master=False, ha_client_runtime_info=info, problem=self._problem or None)

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
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        except OSError as error:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"not written: {error.strerror or error}"
            ) from error
        return frame.response()

    @handles(RequestCode.CHANGE_RAFT_GROUP)
    async def change_raft_group(self, _connection: Connection, frame: Frame) -> Frame:
        """Transfer the leadership, or change the members of the group.

        Only the leader accepts this request.
        """
        header = frame.header(ChangeRaftGroupHeader)
        member = self._member
        changes: dict[str, Callable[[str], Awaitable[None] | None]] = {} if member is None else {
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
