"""The tables of a raft group.

The tables are not in the group's log, but acknowledged changes survive a change of the leader.

A leader acknowledges a change of topics or groups only when a majority of the voters has both tables on its
disks. To achieve this, the leader requests each voter to copy the tables (COPY_SETTINGS). A voter does so
only while it follows that leader in its term.

A newly elected leader reads the tables of a majority before it accepts messages, and adopts the newest
version of each table. From then on, it creates further versions with its own term. Any two majorities have a
common member. The new leader does not read that member's tables before the member has answered in the new
term, and after this answer the member no longer copies from the old leader.

Consumer and delay offsets are copied every second, and no request waits for that. A new leader also uses the
newest offsets of a majority. Otherwise a member that was disconnected for a long time would continue with its
old offsets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from cometmq import logs
from cometmq.broker.replication.ha_client import success
from cometmq.broker.replication.metadata_sync import MetadataSync, NotTheMaster, Table
from cometmq.broker.replication.raft_member import RaftMember
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.versions import order
from cometmq.errors import BrokerError, CometError, CommandError, RaftRefused
from cometmq.protocol.bodies import (
    ConsumerOffsetTable,
    DelayOffsetTable,
    KVTable,
    MessageRequestModeTable,
    SubscriptionGroupTable,
    TopicConfigTable,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import Header
from cometmq.protocol.headers.admin import CopySettingsHeader
from cometmq.remoting import RemotingClient
from cometmq.store import SYNC_MASTER, MessageStore

log = logs.logger(__name__)

T = TypeVar("T")

REQUEST_TIMEOUT_S = 3.0
RETRY_INTERVAL_S = 0.1
MAJORITY_TIMEOUT_S = 3.0
"""The time, in seconds, within which a majority must answer. Otherwise the change of a table fails."""


class GroupSync(MetadataSync):
    """Copies the leader's tables to a follower."""

    def __init__(
        self, store: MessageStore, tables: DurableTables, client: RemotingClient, period_s: float
    ) -> None:
        super().__init__(store, tables, client, first_s=period_s, period_s=period_s, newer_only=True)
        # Called after each cycle in which all tables were copied.
        self.copied: Callable[[], Awaitable[None]] | None = None
        self._one_copy = asyncio.Lock()  # Prevents an older response from being applied after a newer one
        self._wanted = 0  # Number of calls of `settings` so far
        self._copied = 0  # Number of calls of `settings` for which a copy has finished

    async def sync(self) -> None:
        await super().sync()
        if self.master_addr and not self.failure and not self.offsets_wait and self.copied is not None:
            await self.copied()

    def lead(self) -> None:
        """Stop copying, because this member has become the leader.

        Forget the last leader's offsets: offsets may be reset before they would be sent to the next leader.
        """
        self.follow("")
        self._before = None

    async def _is_gone(self, topic: str) -> bool:
        # A new leader may not have committed all messages of this member yet.
        table = (await self._request_table(RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)).table
        if table.get("brokerRole") != SYNC_MASTER:
            raise NotTheMaster(f"{self.master_addr} does not accept messages yet")
        return await super()._is_gone(topic)

    async def settings(self) -> None:
        """Copy topics and groups. Calls made during a copy are all served by the next one."""
        self._wanted += 1
        mine = self._wanted
        async with self._one_copy:
            if self._copied < mine:
                covered = self._wanted
                await super().settings()
                self._copied = covered


class Copies(NamedTuple):
    """The tables of a member. A table is None if it was too long for a response."""

    topics: TopicConfigTable | None
    groups: SubscriptionGroupTable | None
    modes: MessageRequestModeTable | None
    offsets: ConsumerOffsetTable | None
    delays: DelayOffsetTable | None


class RaftTables:
    """Keeps the tables of a raft group's members consistent. Used only in the event loop's thread."""

    def __init__(
        self, member: RaftMember, tables: DurableTables, client: RemotingClient, sync: MetadataSync
    ) -> None:
        self._member = member
        self._tables = tables
        self._client = client
        self._sync = sync
        self._one_round = asyncio.Lock()
        self._asked = 0  # Number of calls of `_copy_to_majority` so far
        # Number of calls of `_copy_to_majority` for which a copy has ended, successfully or not.
        self._done = 0
        self._failure = ""  # Why the last copy to a majority failed, or ""

    @property
    def member(self) -> str:
        """The name of this member, as in `dLegerPeers`."""
        return self._member.me

    # -- the leader

    def lead(self) -> None:
        """Use this leader's term in the versions of the tables, and give each table a new version.

        So the tables count as newer than those of earlier leaders, even before their first change.
        """
        versions = self._tables.versions
        versions.counts, versions.term = True, self._member.node.term
        self._tables.topics.touch()
        self._tables.groups.touch()

    def follow(self) -> None:
        """Stop using this leader's term in the versions of the tables."""
        self._tables.versions.counts = False

    async def has_settings_of(self, term: int) -> bool:
        """Return whether this member has the topics and groups of the leader of `term` on its disk."""
        tables = self._tables
        if not tables.topics.version.state_version == tables.groups.version.state_version == term:
            return False
        await tables.settings_saved()
        return True

    def check(self) -> int:
        if not self._member.leading:
            raise CommandError.failed(
                f"{self.member} does not lead its raft group; change topics and groups at "
                f"its leader, {self._member.node.leader or 'which is unknown now'}"
            )
        return self._tables.versions.term or 0

    async def keep(self, since: int) -> None:
        problem = await self._copy_to_majority(since)
        if problem:
            raise CommandError.failed(f"it is done, but {problem}")

    async def confirm(self) -> int:
        since = self.check()
        problem = await self._copy_to_majority(since)
        if problem:
            raise CommandError.failed(f"nothing is done: {problem}")
        return since

    async def _copy_to_majority(self, since: int) -> str:
        """Make a majority copy this leader's tables. Return why that failed, or "".

        Calls made during a copy are all served by the next one.
        """
        self._asked += 1
        mine = self._asked
        async with self._one_round:
            if not self._member.leading or since != self._tables.versions.term:
                return "another member leads, or has led since"
            if self._done < mine:
                covered, self._failure = self._asked, ""
                header = CopySettingsHeader(leader=self.member, term=since)
                try:
                    await self._of_majority(lambda addr: self._call(addr, RequestCode.COPY_SETTINGS, header))
                except RaftRefused as refusal:
                    self._failure = f"the next leader may not know it: {refusal}"
                self._done = covered
            return self._failure

    async def adopt_newest(self) -> None:
        """Read the tables of a majority, and adopt the newest of each, before this leader accepts messages.

        Raises RaftRefused if no majority answers, or if this member is no longer the leader.
        """
        node = self._member.node
        term = node.term
        found = await self._of_majority(self.read)
        if node.term != term:
            raise RaftRefused(f"{self.member} is no longer the leader", node.leader)
        for copies in found:
            self._adopt_newer(copies)

    async def _of_majority(self, ask: Callable[[str], Awaitable[T]]) -> list[T]:
        """Call `ask` for the other voters until, with this member, a majority has answered.

        Return the results of `ask`. A voter is asked only after it has answered this leader's messages in the
        current term. Raises RaftRefused if too few have answered after MAJORITY_TIMEOUT_S.
        """
        voters = self._member.node.members.voters
        others = sorted(voters - {self.member})
        enough = len(voters) // 2 + 1 - int(self.member in voters)
        problems: dict[str, str] = {}

        async def answer(member: str) -> T:
            while True:
                addr = self._answering(member)
                if addr is not None:
                    try:
                        return await ask(addr)
                    except CometError as error:
                        problems[member] = f"{member}: {error}"
                await asyncio.sleep(RETRY_INTERVAL_S)

        asked = [asyncio.create_task(answer(member)) for member in others]
        pending = set(asked)
        found: list[T] = []
        try:
            async with asyncio.timeout(MAJORITY_TIMEOUT_S):
                while len(found) < enough:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    # The order of the results must be deterministic, so iterate over `asked`, not `done`.
                    found += [task.result() for task in asked if task in done]
        except TimeoutError:
            why = "; ".join(problems.values()) or "the others are unreachable"
            raise RaftRefused(f"{len(found)} of {len(others)} other members have answered: {why}") from None
        finally:
            for task in asked:
                task.cancel()
        return found

    def _answering(self, member: str) -> str | None:
        """Return the broker address of a voter that has answered this leader in its term, else None."""
        node, learned = self._member.node, self._member.peers.learned.get(member)
        peer = node.status().peers.get(member)
        if learned is None or peer is None or peer.match < 0 or member not in node.members.voters:
            return None
        return learned.broker_addr

    async def _call(self, addr: str, code: int, header: Header | None = None) -> bytes:
        return bytes(
            success(await self._client.call(addr, Frame.request(code, header), REQUEST_TIMEOUT_S)).body
        )

    async def read(self, addr: str) -> Copies:
        """Read the tables of the member with the broker address `addr`. Raises CometError."""

        async def table(code: int, kind: type[Table]) -> Table | None:
            try:
                return await asyncio.to_thread(kind.decode, await self._call(addr, code))
            except BrokerError as error:
                # A table of offsets may be too long for a response. The leader starts without that table,
                # because accepting messages is more important.
                log.error("the new leader could not read a table of member %s: %s", addr, error)
                return None

        return Copies(
            await table(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable),
            await table(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable),
            await table(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, MessageRequestModeTable),
            await table(RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable),
            await table(RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsetTable),
        )

    def _adopt_newer(self, given: Copies) -> None:
        """Adopt those tables of another member that are newer than this member's."""
        tables = self._tables
        topics, groups, modes, offsets, delays = given
        if topics:
            self._sync.take_deletions(topics)
        if topics and topics.data_version and order(topics.data_version) > order(tables.topics.version):
            tables.topics.replace(topics.data_version, topics.topic_config_table)
        if groups and groups.data_version and order(groups.data_version) > order(tables.groups.version):
            tables.groups.replace(groups.data_version, groups.subscription_group_table)
            if modes:
                tables.replace_modes(modes)
        if offsets and order(offsets.data_version) > order(tables.offsets.version):
            self._sync.merge(offsets)
        for level, offset in delays.offset_table.items() if delays else ():
            if offset > tables.delays.get(level):
                tables.delays.move(level, offset)

    # -- a follower

    async def copy(self, header: CopySettingsHeader) -> None:
        """Copy the leader's topics and groups to this member's disk. Raises CometError or OSError."""
        node = self._member.node

        def check() -> None:
            if (node.leader, node.term) != (header.leader, header.term) or self._member.leading:
                raise CommandError.failed(
                    f"{self.member} follows {node.leader or 'no leader'} in term {node.term}, "
                    f"but the request is from leader {header.leader} of term {header.term}"
                )

        check()
        await self._sync.settings()
        # Fail if this member has not yet applied all deletions of topics. If it became the leader without
        # them, the queues of deleted topics could reappear.
        if self._sync.deletions_wait:
            raise CommandError.failed(
                f"the log of {self.member} has not reached the position of the leader's deletions of topics "
                "yet"
            )
        await self._tables.settings_saved()
        check()
