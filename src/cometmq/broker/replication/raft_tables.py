"""The tables of a raft group, which are not in its log: what was answered outlives the leader.

A leader answers a change of topics or groups once a majority of the voters has both tables on its disks: it
asks them to copy (COPY_SETTINGS), and they do as long as they follow it in its term. Who is elected reads the
tables of a majority before it takes messages, keeps the newest of each, and counts their versions on with its
own term. The two majorities share a member, and that one is asked only after it has answered the new leader
in the new term, so it copies nothing from the old one any more.

Consumer and delay offsets are copied each second and waited for by nobody; a new leader takes the newest of a
majority, too, so that one which was away for long does not begin with those from before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from cometmq import logs
from cometmq.broker.replication.ha_client import success
from cometmq.broker.replication.metadata_sync import MetadataSync, Table
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.versions import order
from cometmq.errors import CometError, CommandError, RaftRefused
from cometmq.protocol.bodies import (
    ConsumerOffsetTable,
    DelayOffsetTable,
    SubscriptionGroupTable,
    TopicConfigTable,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers_admin import CopySettingsHeader
from cometmq.remoting import RemotingClient
from cometmq.store import MessageStore

log = logs.logger(__name__)

TIMEOUT_S = 3.0
"""A member is given so long to answer."""
AGAIN_S = 0.1
"""Between two looks whether more members can be asked."""
PATIENCE_S = 3.0
"""A majority is asked for so long; then a change is answered as failed, and another one may lead."""


class Group(Protocol):
    """What must be known of the group."""

    @property
    def me(self) -> str: ...

    @property
    def term(self) -> int: ...

    @property
    def leader(self) -> str: ...

    @property
    def leading(self) -> bool:
        """Whether it takes messages."""

    @property
    def voters(self) -> frozenset[str]: ...

    def answering(self) -> Mapping[str, str]:
        """The members that have answered this leader in its term, and where their brokers are."""


class GroupSync(MetadataSync):
    """A follower's copies of its leader's tables. Topics that the leader has deleted lose their queues."""

    def __init__(
        self,
        group: Group,
        store: MessageStore,
        tables: DurableTables,
        client: RemotingClient,
        period_s: float,
    ) -> None:
        super().__init__(store, tables, client, first_s=period_s, period_s=period_s, newer_only=True)
        self._group = group

    async def settings(self) -> None:
        """Copy topics and groups. Raises CometError."""
        ledger = self._store.ledger
        shown, term = 0 if ledger is None else ledger.shown, self._group.term
        await super().settings()
        if self._tables.topics.version.state_version == term == self._group.term and not self._group.leading:
            await self._forget_topics(shown)

    async def _forget_topics(self, shown: int) -> None:
        """Of messages in front of `shown` the leader knew the topics when it was asked: it makes a topic
        before the first message, and begins with those of all messages."""
        queues, topics = self._store.queues, self._tables.topics
        gone = [
            topic
            for topic in queues.topics()
            if topic not in topics.table
            and not topics.is_system(topic)
            and all(queue.max_physical <= shown for queue in queues.of_topic(topic))
        ]
        if gone:
            log.info("topics that the leader has deleted lose their queues: %s", ", ".join(gone))
            try:
                await self._store.deletion.delete(gone, before=shown)
            except OSError as error:
                log.error("queues of deleted topics are still there: %s", error)


class Copies(NamedTuple):
    """A member's tables."""

    topics: TopicConfigTable
    groups: SubscriptionGroupTable
    offsets: ConsumerOffsetTable
    delays: DelayOffsetTable


class RaftTables:
    """See above. Loop thread only."""

    def __init__(
        self, group: Group, tables: DurableTables, client: RemotingClient, sync: MetadataSync
    ) -> None:
        self._group = group
        self._tables = tables
        self._client = client
        self._sync = sync
        self._one_round = asyncio.Lock()
        self._asked = 0  # calls of `keep` so far
        self._done = 0  # those of them that a round has covered
        self._failure: CommandError | None = None  # of that round

    @property
    def member(self) -> str:
        """Whose tables these are."""
        return self._group.me

    # -- the leader

    def lead(self) -> None:
        """From now on changes are this leader's. Before its first one its tables are newer than all."""
        versions = self._tables.versions
        versions.counts, versions.term = True, self._group.term
        self._tables.topics.touch()
        self._tables.groups.touch()

    def follow(self) -> None:
        """Another one has the word."""
        self._tables.versions.counts = False

    def check(self) -> None:
        """See SettingsReplicas."""
        if not self._group.leading:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"{self._group.me} does not lead its raft group, {self._group.leader or 'nobody'} does: "
                "topics and groups are changed there",
            )

    async def keep(self) -> None:
        """See SettingsReplicas. Those who ask during a round share the next one."""
        self._asked += 1
        mine = self._asked
        async with self._one_round:
            if self._done < mine:
                covered = self._asked
                self._failure = await self._round()
                self._done = covered
        if self._failure is not None:
            raise self._failure

    async def _round(self) -> CommandError | None:
        group = self._group
        have, enough = int(group.me in group.voters), len(group.voters) // 2 + 1
        header = CopySettingsHeader(leader=group.me, term=self._tables.versions.term or 0)
        problems: dict[str, str] = {}
        others = group.voters - {group.me}
        asking = {asyncio.create_task(self._copied(each, header, problems)) for each in others}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while have < enough:
                    done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                    have += sum(task.exception() is None for task in done)
        except TimeoutError:
            return CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"it is done, but only {have} of {len(group.voters)} members are known to have it, and the "
                f"next leader may not: {'; '.join(problems.values()) or 'no other one answers'}",
            )
        finally:
            for task in asking:
                task.cancel()
        return None

    async def _copied(self, member: str, header: CopySettingsHeader, problems: dict[str, str]) -> None:
        """Have a member copy; it may just be coming."""
        while True:
            addr = self._group.answering().get(member)
            if addr is not None:
                try:
                    frame = Frame.request(RequestCode.COPY_SETTINGS, header)
                    success(await self._client.call(addr, frame, TIMEOUT_S))
                    return
                except CometError as error:
                    problems[member] = f"{member}: {error}"
            await asyncio.sleep(AGAIN_S)

    async def take_up(self) -> None:
        """Have the newest tables of a majority, before this leader takes messages. Raises RaftRefused if it
        does not learn them, or leads no more."""
        group, loop = self._group, asyncio.get_running_loop()
        term, end = group.term, loop.time() + PATIENCE_S
        found: dict[str, Copies] = {}
        problem = "no other one answers"
        while True:
            missing = {each: at for each, at in group.answering().items() if each not in found}
            for member, answer in zip(
                missing, await asyncio.gather(*map(self.read, missing.values())), strict=True
            ):
                if isinstance(answer, str):
                    problem = f"{member}: {answer}"
                else:
                    found[member] = answer
            if group.term != term or group.leader != group.me:
                raise RaftRefused(f"{group.me} leads no more", group.leader)
            have = int(group.me in group.voters) + len(found.keys() & group.voters)
            if have > len(group.voters) // 2:
                break
            if loop.time() >= end:
                raise RaftRefused(f"the tables of {have} members of {len(group.voters)} are known: {problem}")
            await asyncio.sleep(AGAIN_S)
        for copies in found.values():
            self._take(copies)

    async def read(self, addr: str) -> Copies | str:
        """A member's tables, or why they cannot be had."""

        async def ask(code: int, kind: type[Table]) -> Table:
            answer = success(await self._client.call(addr, Frame.request(code), TIMEOUT_S))
            return await asyncio.to_thread(kind.decode, bytes(answer.body))

        try:
            return Copies(
                await ask(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable),
                await ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable),
                await ask(RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable),
                await ask(RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsetTable),
            )
        except CometError as error:
            return str(error)

    def _take(self, given: Copies) -> None:
        """What is newer than the own."""
        tables = self._tables
        version = given.topics.data_version
        if version is not None and order(version) > order(tables.topics.version):
            tables.topics.replace(version, given.topics.topic_config_table)
        version = given.groups.data_version
        if version is not None and order(version) > order(tables.groups.version):
            tables.groups.replace(version, given.groups.subscription_group_table)
        if order(given.offsets.data_version) > order(tables.offsets.version):
            self._sync.merge(given.offsets)
        for level, offset in given.delays.offset_table.items():
            if offset > tables.delays.get(level):
                tables.delays.move(level, offset)

    # -- a follower

    async def copy(self, header: CopySettingsHeader) -> None:
        """Have the leader's topics and groups on the disk. Raises CometError, OSError."""
        group = self._group

        def check() -> None:
            if (group.leader, group.term) != (header.leader, header.term) or group.leading:
                raise CommandError(
                    ResponseCode.SYSTEM_ERROR,
                    f"{group.me} follows {group.leader or 'nobody'} in term {group.term}, "
                    f"not {header.leader} in {header.term}",
                )

        check()
        await self._sync.settings()
        await self._tables.topics_file.saved()
        await self._tables.groups_file.saved()
        check()
