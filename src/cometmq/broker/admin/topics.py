"""Handlers of requests to create, change, show, purge and delete topics and consumer groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.attributes import changed, of_group
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.turns import Turns
from cometmq.broker.pull.pull import PullProcessor
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import BodyError, CommandError, ConfigError
from cometmq.protocol import bodies, headers
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.bodies.admin import PurgedQueue, PurgeResult
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import PurgeTopicRequestHeader
from cometmq.remoting import Connection
from cometmq.store import MessageStore

log = logs.logger(__name__)

B = TypeVar("B", bound=bodies.Body)
FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")


class TopicAdmin(msgspec.Struct, eq=False):
    """Creates, changes, shows, purges and deletes topics and groups. `registered` is Registrar.registered."""

    config: BrokerConfig
    store: MessageStore
    tables: DurableTables
    pulls: PullProcessor
    registered: Callable[[], Awaitable[None]]

    def _changeable(self, topic: str | None, version: int) -> str:
        """Check that a topic may be changed by a request, and return its name. Raises CommandError."""
        name = check_topic(topic, version)
        if self.tables.topics.is_system(name):
            raise CommandError(
                compat.invalid_parameter(version), f"The topic[{name}] is conflict with system topic."
            )
        return name

    def _known(self, topic: str) -> TopicConfig:
        config = self.tables.topics.get(topic)
        if config is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        return config

    def _check_queues(self, field: str, number: int, version: int) -> None:
        most = self.config.max_topic_queue_nums
        if not 0 <= number <= most:
            raise CommandError(
                compat.invalid_parameter(version),
                f"{field} {number} must be between 0 and {most} (maxTopicQueueNums)",
            )

    @handles(RequestCode.UPDATE_AND_CREATE_TOPIC)
    async def update_and_create_topic(self, connection: Connection, frame: Frame) -> Frame:
        """Create or replace a topic. The response is sent once the name servers have registered it."""
        header = frame.header(headers.CreateTopicRequestHeader)
        wanted = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type or FILTER_TYPES[0],
            topic_sys_flag=header.topic_sys_flag or 0,
            order=bool(header.order),
        )
        return await self._put_topics(connection, frame, [(wanted, header.attributes)])

    @handles(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST)
    async def update_and_create_topic_list(self, connection: Connection, frame: Frame) -> Frame:
        """Create or replace several topics (a request of 5.x). If one topic is invalid, change none."""
        found = _decoded(bodies.TopicConfigList, frame).topic_config_list
        wanted = []
        for each in found:
            words = (each.attributes or {}).items()
            text = ",".join(key if key.startswith("-") else f"{key}={value}" for key, value in words)
            wanted.append((each, text))
        return await self._put_topics(connection, frame, wanted)

    async def _put_topics(
        self, connection: Connection, frame: Frame, wanted: Sequence[tuple[TopicConfig, str | None]]
    ) -> Frame:
        """Create or replace topics. `wanted` holds each topic with its attribute changes (`+key=value`)."""
        since = self.tables.check_changeable()
        if not wanted:
            return frame.response()
        checked = [self._checked(each, text, frame.version) for each, text in wanted]
        async for config in Turns().each(checked):
            self.tables.topics.put(config)
            log.info("topic %s was changed by client %s: %s", config.topic_name, connection.peer, config)
        await self.registered()
        first = checked[0].topic_name
        what = f"topic {first} is set" if len(checked) == 1 else f"topic {first} and others are set"
        await _written(what, lambda: self.tables.topics_kept(since))
        return frame.response()

    def _checked(self, wanted: TopicConfig, attributes: str | None, version: int) -> TopicConfig:
        """Check a requested topic, and return it in the form to be stored. Raises CommandError."""
        name = self._changeable(wanted.topic_name, version)
        if wanted.topic_filter_type not in FILTER_TYPES:
            raise CommandError.failed(f"topicFilterType = [{wanted.topic_filter_type}] value invalid")
        self._check_queues("readQueueNums", wanted.read_queue_nums, version)
        self._check_queues("writeQueueNums", wanted.write_queue_nums, version)
        if not 0 <= wanted.perm <= 15:
            raise CommandError(
                compat.invalid_parameter(version), f"perm {wanted.perm} must be between 0 and 15"
            )
        known = self.tables.topics.get(name)
        try:
            found = changed(known.attributes if known else None, attributes, self.config.store)
        except ConfigError as error:
            raise CommandError(compat.invalid_parameter(version), str(error)) from error
        order = wanted.order if compat.is_5x(version) else known is not None and known.order
        return msgspec.structs.replace(wanted, topic_name=name, order=order, attributes=found or None)

    @handles(RequestCode.DELETE_TOPIC_IN_BROKER)
    async def delete_topic_in_broker(self, connection: Connection, frame: Frame) -> Frame:
        """Delete a topic, its queues and its consumer offsets. The response for an unknown topic is SUCCESS.

        The queues are deleted before the topic's entry in the table. If the entry were deleted first and the
        deletion of the queues failed, the old messages would reappear when the topic is created again.
        """
        tables = self.tables
        tables.check_changeable()
        name = self._changeable(frame.header(headers.DeleteTopicRequestHeader).topic, frame.version)
        await tables.confirm_changeable()
        try:
            await self.store.deletion.delete([name])
        except OSError as error:
            raise CommandError.failed(f"topic {name} was not deleted: {error.strerror or error}") from error
        since = tables.check_changeable()  # Another broker may have become the leader during the deletion
        if tables.topics.delete(name):
            log.info("topic %s deleted by %s", name, connection.peer)
        tables.offsets.remove_topic(name)
        self.pulls.topic_gone(name)
        await self.registered()
        await _written(f"topic {name} is deleted", lambda: tables.topics_kept(since))
        await _written(f"topic {name} is deleted", tables.offsets_file.save_now)
        return frame.response()

    @handles(RequestCode.GET_ALL_TOPIC_CONFIG)
    def get_all_topic_config(self, _connection: Connection, frame: Frame) -> Frame:
        """Return all topics and, for slaves, recently deleted topics.

        Messages of a deleted topic before its log position count as deleted.
        """
        topics, store = self.tables.topics, self.store
        body = bodies.TopicConfigTable(
            data_version=topics.version,
            topic_config_table=topics.table,
            deleted_topics=store.deleted.newest(store.log.min_position, store.log.end) or None,
        )
        return frame.response(body=body.encode())

    @handles(RequestCode.GET_TOPIC_CONFIG)
    def get_topic_config(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the configuration of one topic. RocketMQ 5.x's tools send this request first."""
        return frame.response(body=self._known(frame.header(headers.TopicRequestHeader).topic).encode())

    @handles(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def get_system_topic_list_from_broker(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the names of the broker's system topics."""
        return frame.response(body=bodies.TopicList(topic_list=sorted(self.tables.topics.system)).encode())

    @handles(RequestCode.PURGE_TOPIC)
    async def purge_topic(self, connection: Connection, frame: Frame) -> Frame:
        """Make messages of a topic permanently unreadable by raising minimum offsets (CometMQ's own request).

        The request may be limited to one queue, and to messages stored before a time. The response contains
        each queue's minimum offset before and after the request. Without `execute`, nothing is changed.
        """
        header = frame.header(PurgeTopicRequestHeader)
        name = self._changeable(header.topic, frame.version)
        self._known(name)
        plan = await self.store.topic_retention.plan_purge(name, header.queue_id, header.before)
        if header.execute:
            floors = {queue.queue_id: queue.target for queue in plan}
            try:
                await self.store.topic_retention.raise_min_offsets(name, floors)
            except OSError as error:
                raise CommandError.failed(
                    f"nothing was purged, because the table could not be written: {error}"
                ) from error
            log.info("topic %s purged by %s, minimum offsets %s", name, connection.peer, floors)
        queues = [
            PurgedQueue(
                queue_id=queue.queue_id,
                min_offset=queue.min_offset,
                purged_to=queue.target,
                max_offset=queue.max_offset,
            )
            for queue in plan
        ]
        return frame.response(body=PurgeResult(queues=queues).encode())

    @handles(RequestCode.CLEAN_UNUSED_TOPIC)
    async def clean_unused_topic(self, connection: Connection, frame: Frame) -> Frame:
        """Delete the queues of topics without configuration, except system topics: messages may wait."""
        await self.tables.confirm_changeable()  # Followers delete only what the leader deletes
        topics = self.tables.topics
        try:
            # Pass a function rather than a set of all topic names: deletions run one after the other, and
            # each waiting request would keep its own set in memory.
            gone = await self.store.deletion.delete_unknown(
                lambda name: name in topics.table or topics.is_system(name)
            )
        except OSError as error:
            raise CommandError.failed(f"not all topics were deleted: {error.strerror or error}") from error
        log.info(
            "topics without configuration deleted for %s: %s", connection.peer, ", ".join(gone) or "none"
        )
        return frame.response()

    # -- groups

    @handles(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    async def update_and_create_subscriptiongroup(self, connection: Connection, frame: Frame) -> Frame:
        """Create or replace a consumer group."""
        return await self._put_groups(connection, frame, [_decoded(SubscriptionGroupConfig, frame)])

    @handles(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST)
    async def update_and_create_subscriptiongroup_list(self, connection: Connection, frame: Frame) -> Frame:
        """Create or replace several consumer groups (a request of 5.x). If one is invalid, change none."""
        found = _decoded(bodies.SubscriptionGroupList, frame).group_config_list
        return await self._put_groups(connection, frame, found)

    async def _put_groups(
        self, connection: Connection, frame: Frame, wanted: list[SubscriptionGroupConfig]
    ) -> Frame:
        since = self.tables.check_changeable()
        for config in wanted:
            check_group(config.group_name, frame.version)
            self._check_queues("retryQueueNums", config.retry_queue_nums, frame.version)
            known = self.tables.groups.table.get(config.group_name)
            try:
                config.attributes = of_group(None if known is None else known.attributes, config.attributes)
            except ConfigError as error:
                raise CommandError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        async for config in Turns().each(wanted):
            self.tables.groups.put(config)
            log.info("settings of group %s were changed by client %s", config.group_name, connection.peer)
        names = ", ".join(config.group_name for config in wanted[:3])
        await _written(f"group {names} is set", lambda: self.tables.groups_kept(since))
        return frame.response()

    @handles(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def get_all_subscriptiongroup_config(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the configurations of all consumer groups."""
        groups = self.tables.groups
        body = bodies.SubscriptionGroupTable(
            data_version=groups.version, subscription_group_table=groups.table
        )
        return frame.response(body=body.encode())

    @handles(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def get_subscriptiongroup_config(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the configuration of one consumer group."""
        group = frame.header(headers.GetSubscriptionGroupConfigRequestHeader).group
        config = self.tables.groups.table.get(group)
        if config is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {group}"
            )
        return frame.response(body=config.encode())

    @handles(RequestCode.DELETE_SUBSCRIPTIONGROUP)
    async def delete_subscriptiongroup(self, connection: Connection, frame: Frame) -> Frame:
        """Delete a group and, if requested, its offsets. The response for an unknown group is SUCCESS."""
        since = self.tables.check_changeable()
        header = frame.header(headers.DeleteSubscriptionGroupRequestHeader)
        group, with_offsets = header.group_name, header.remove_offset or header.clean_offset
        self.tables.groups.delete(group)
        if with_offsets:
            self.tables.offsets.remove_group(group)
        log.info("group %s deleted by %s", group, connection.peer)
        await _written(f"group {group} is deleted", lambda: self.tables.groups_kept(since))
        if with_offsets:
            await _written(f"group {group} is deleted", self.tables.offsets_file.save_now)
        return frame.response()


def _decoded(kind: type[B], frame: Frame) -> B:
    """Return the body of a request, or refuse the request with the text of the BodyError."""
    try:
        return kind.decode(frame.body)
    except BodyError as error:
        raise CommandError.failed(str(error)) from error


async def _written(what: str, done: Callable[[], Awaitable[None]]) -> None:
    """Wait for the write of a table after a change, which `what` describes. Raises CommandError."""
    try:
        await done()
    except OSError as error:
        raise CommandError.failed(
            f"{what}, but the table could not be written. The write is retried; a restart before its "
            f"success would undo the change: {error.strerror or error}"
        ) from error
