"""Administration of topics and groups: 17, 215, 21, 351, 305 and 200, 201, 207, 352."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.attributes import changed
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.context import BrokerContext
from cometmq.broker.pull.pull import PullProcessor
from cometmq.errors import BodyError, CommandError, ConfigError
from cometmq.protocol.bodies import (
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicConfigTable,
    TopicList,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicRequestHeader,
    Header,
    TopicRequestHeader,
)
from cometmq.remoting import Connection, Handler

log = logs.logger(__name__)

FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")
SUCCESS = ResponseCode.SUCCESS


class GroupRequestHeader(Header, gc=False):
    """Code 352: any request whose only field is a group."""

    group: str


class TopicAdmin:
    """Creates, changes, shows and deletes topics and groups."""

    def __init__(self, context: BrokerContext, pulls: PullProcessor) -> None:
        self._context = context
        self._pulls = pulls

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.update_topic,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete_topic,
            RequestCode.GET_ALL_TOPIC_CONFIG: self.all_topics,
            RequestCode.GET_TOPIC_CONFIG: self.topic_config,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update_group,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all_groups,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.group_config,
        }

    def _changeable(self, topic: str | None, version: int) -> str:
        """A topic that administration may touch."""
        name = check_topic(topic, version)
        if self._context.topics.is_system(name):
            raise CommandError(
                compat.invalid_parameter(version), f"The topic[{name}] is conflict with system topic."
            )
        return name

    def _check_queues(self, field: str, number: int, version: int) -> None:
        most = self._context.config.max_topic_queue_nums
        if not 0 <= number <= most:
            raise CommandError(
                compat.invalid_parameter(version),
                f"{field} {number} is not within 0 to {most}, the setting maxTopicQueueNums",
            )

    async def update_topic(self, connection: Connection, frame: Frame) -> Frame:
        """17: create or replace a topic. Answered when the name servers know it, so that a route query may
        follow.
        """
        header = frame.header(CreateTopicRequestHeader)
        name = self._changeable(header.topic, frame.version)
        filter_type = header.topic_filter_type or FILTER_TYPES[0]
        if filter_type not in FILTER_TYPES:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"topicFilterType = [{filter_type}] value invalid")
        numbers = (("readQueueNums", header.read_queue_nums), ("writeQueueNums", header.write_queue_nums))
        for field, number in numbers:
            self._check_queues(field, number, frame.version)
        if not 0 <= header.perm <= 15:
            raise CommandError(
                compat.invalid_parameter(frame.version), f"perm {header.perm} is not within 0 to 15"
            )
        topics = self._context.topics
        known = topics.get(name)
        try:
            reserved = self._context.config.store.file_reserved_time
            attributes = changed(known.attributes if known else None, header.attributes, reserved)
        except ConfigError as error:
            raise CommandError(compat.invalid_parameter(frame.version), str(error)) from error
        order = bool(header.order) if compat.is_5x(frame.version) else known is not None and known.order
        topics.put(
            TopicConfig(
                topic_name=name,
                read_queue_nums=header.read_queue_nums,
                write_queue_nums=header.write_queue_nums,
                perm=header.perm,
                topic_filter_type=filter_type,
                topic_sys_flag=header.topic_sys_flag or 0,
                order=order,
                attributes=attributes or None,
            )
        )
        log.info("topic %s set by %s: %s", name, connection.peer, topics.get(name))
        await self._context.registered()
        await _written(f"topic {name} is set", topics.saved)
        return frame.response(SUCCESS)

    async def delete_topic(self, connection: Connection, frame: Frame) -> Frame:
        """215: forget a topic, its queues and its consumer offsets; success for an unknown one.

        The store comes first: a topic that is forgotten while its queues are still there would show its old
        messages when it is made again.
        """
        context = self._context
        name = self._changeable(frame.header(DeleteTopicRequestHeader).topic, frame.version)
        try:
            await context.store.deletion.delete([name])
        except OSError as error:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"topic {name} was not deleted: {error.strerror or error}"
            ) from error
        if context.topics.delete(name):
            log.info("topic %s deleted by %s", name, connection.peer)
        context.offsets.remove_topic(name)
        self._pulls.topic_gone(name)
        await context.registered()
        await _written(f"topic {name} is deleted", context.topics.saved)
        await _written(f"topic {name} is deleted", context.offsets.save)
        return frame.response(SUCCESS)

    def all_topics(self, _connection: Connection, frame: Frame) -> Frame:
        """21: the whole topic table."""
        topics = self._context.topics
        body = TopicConfigTable(data_version=topics.version, topic_config_table=topics.table)
        return frame.response(SUCCESS, body=body.encode())

    def topic_config(self, _connection: Connection, frame: Frame) -> Frame:
        """351: one topic (5.x tools ask it before everything else)."""
        topic = frame.header(TopicRequestHeader).topic
        config = self._context.topics.get(topic)
        if config is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        return frame.response(SUCCESS, body=config.encode())

    def system_topics(self, _connection: Connection, frame: Frame) -> Frame:
        """305: the topics that are the broker's own."""
        body = TopicList(topic_list=sorted(self._context.topics.system))
        return frame.response(SUCCESS, body=body.encode())

    async def update_group(self, connection: Connection, frame: Frame) -> Frame:
        """200: create or replace a group."""
        try:
            config = SubscriptionGroupConfig.decode(frame.body)
        except BodyError as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        check_group(config.group_name, frame.version)
        self._check_queues("retryQueueNums", config.retry_queue_nums, frame.version)
        self._context.groups.put(config)
        log.info("group %s set by %s", config.group_name, connection.peer)
        await _written(f"group {config.group_name} is set", self._context.groups.saved)
        return frame.response(SUCCESS)

    def all_groups(self, _connection: Connection, frame: Frame) -> Frame:
        """201: the whole group table."""
        groups = self._context.groups
        body = SubscriptionGroupTable(data_version=groups.version, subscription_group_table=groups.table)
        return frame.response(SUCCESS, body=body.encode())

    def group_config(self, _connection: Connection, frame: Frame) -> Frame:
        """352: one group."""
        group = frame.header(GroupRequestHeader).group
        config = self._context.groups.table.get(group)
        if config is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {group}"
            )
        return frame.response(SUCCESS, body=config.encode())

    async def delete_group(self, connection: Connection, frame: Frame) -> Frame:
        """207: forget a group, and its offsets if asked; success for an unknown one."""
        header = frame.header(DeleteSubscriptionGroupRequestHeader)
        context = self._context
        context.groups.delete(header.group_name)
        if header.remove_offset or header.clean_offset:
            context.offsets.remove_group(header.group_name)
        log.info("group %s deleted by %s", header.group_name, connection.peer)
        await _written(f"group {header.group_name} is deleted", context.groups.saved)
        if header.remove_offset or header.clean_offset:
            await _written(f"group {header.group_name} is deleted", context.offsets.save)
        return frame.response(SUCCESS)


async def _written(what: str, done: Callable[[], Awaitable[None]]) -> None:
    """Wait until a change is on the device; if it does not get there, the answer says so."""
    try:
        await done()
    except OSError as error:
        raise CommandError(
            ResponseCode.SYSTEM_ERROR,
            f"{what}, but the table could not be written and a restart would undo it (it is tried again): "
            f"{error.strerror or error}",
        ) from error
