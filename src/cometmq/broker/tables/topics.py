"""The topic table: what exists, what is created by a send, and the file topics.json. No I/O in here.

Every change counts the data version up and is reported: the broker then writes the file and tells the name
servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.versions import Versions
from cometmq.errors import CommandError, MessageIllegal
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import DataVersion, TopicConfig
from cometmq.protocol.codes import (
    BENCHMARK_TOPIC,
    MAX_FRAME_LENGTH,
    OFFSET_MOVED_EVENT,
    REPLY_TOPIC_POSTFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    STORED_LENGTH_MAX,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
    TBW102,
    TOPIC_QUEUES_MAX,
    UNSENDABLE_TOPICS,
    Perm,
    ResponseCode,
    TopicSysFlag,
    check_topic_name,
    is_legal_name,
)

log = logs.logger(__name__)

READ_WRITE = Perm.READ | Perm.WRITE
# A registration names all topics and must fit a frame (16 MiB), or the broker drops out of every route. From
# so many bytes on, sends create no more topics, then groups no more retry and dead-letter topics, then
# administrators none either.
BYTES_BY_SEND = 11 << 20
BYTES_BY_GROUPS = 14 << 20
BYTES_MAX = MAX_FRAME_LENGTH - (256 << 10)
# What a topic takes of a registration beside its attributes and its name, which stands there twice. Numbers
# of any length fit. A full frame has fewer topics than the 100,000 that a name server accepts.
TOPIC_BYTES = 168


@dataclass(eq=False)
class TopicTable:
    """topic -> configuration, with the data version that name servers compare. changed: called after each
    change."""

    config: BrokerConfig
    versions: Versions
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.table: dict[str, TopicConfig] = {}
        self.version = self.versions.first()
        self.system: set[str] = set(SYSTEM_TOPICS)
        self.registered_bytes = 0  # what name servers are told of all topics, at most
        self._create_built_in()

    def _create_built_in(self) -> None:
        """The topics that a broker makes (docs/reference/storage.md, Topics and groups at start)."""
        config = self.config
        inherit = Perm.INHERIT
        of_cluster = inherit | READ_WRITE if config.cluster_topic_enable else inherit
        of_broker = inherit | READ_WRITE if config.broker_topic_enable else inherit
        built_in = [
            (SELF_TEST_TOPIC, 1, READ_WRITE),
            (BENCHMARK_TOPIC, 1024, READ_WRITE),
            (config.broker_cluster_name, 16, of_cluster),
            (config.broker_name, 1, of_broker),
            (OFFSET_MOVED_EVENT, 1, READ_WRITE),
            (SCHEDULE_TOPIC, 18, READ_WRITE),
            (config.broker_cluster_name + REPLY_TOPIC_POSTFIX, 1, READ_WRITE),
        ]
        if config.auto_create_topic_enable:
            built_in.append((TBW102, config.default_topic_queue_nums, inherit | READ_WRITE))
        if config.trace_topic_enable:
            built_in.append((config.msg_trace_topic_name, 1, READ_WRITE))
        for name, queues, perm in built_in:
            self.system.add(name)
            self.table[name] = topic_of(name, queues, perm)
        self._count_bytes()

    def _count_bytes(self) -> None:
        self.registered_bytes = sum(map(_bytes_of, self.table.values()))

    def _check_room(self, topic: str, most: int, code: int, more: int = 0) -> None:
        if self.registered_bytes + more > most:
            raise CommandError(
                code,
                f"topic[{topic}] not exist, and is not created: name servers are told "
                f"{self.registered_bytes} bytes of {len(self.table)} topics; from {most} on only "
                f"administrators make more, up to {BYTES_MAX}",
            )

    def get(self, topic: str) -> TopicConfig | None:
        """A topic's configuration."""
        return self.table.get(topic)

    def existing(self, topic: str) -> TopicConfig:
        """A topic's configuration. Raises CommandError without one."""
        known = self.table.get(topic)
        if known is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        return known

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """A queue of this broker."""
        return MessageQueue(topic, self.config.broker_name, queue_id)

    def is_system(self, topic: str) -> bool:
        """Whether administration may not create or delete it."""
        return topic in self.system or topic.startswith(SYSTEM_TOPIC_PREFIX)

    @staticmethod
    def is_sendable(topic: str) -> bool:
        """Whether clients may send to it."""
        return topic not in UNSENDABLE_TOPICS

    def is_order(self, topic: str) -> bool:
        """Whether the name server's configuration lists the topic as ordered."""
        known = self.table.get(topic)
        return known is not None and known.order

    def create_by_send(
        self, topic: str, default_topic: str | None, queue_nums: int, sys_flag: int = 0
    ) -> TopicConfig | None:
        """Create a topic that a send names, after the template `default_topic`; None if it may not be. Raises
        CommandError if there are too many already."""
        known = self.table.get(topic)
        if known is not None:
            return known
        self._check_room(topic, BYTES_BY_SEND, ResponseCode.TOPIC_NOT_EXIST)
        template = self.table.get(default_topic) if default_topic else None
        if template is None:
            log.warning("topic %s not created: the template %s does not exist", topic, default_topic)
            return None
        if default_topic == TBW102 and not self.config.auto_create_topic_enable:
            template.perm = int(READ_WRITE)
        if not template.perm & Perm.INHERIT:
            log.warning("topic %s not created: the template %s may not be inherited", topic, default_topic)
            return None
        queues = max(0, min(queue_nums, template.write_queue_nums, self.config.max_topic_queue_nums))
        created = topic_of(topic, queues, template.perm & ~int(Perm.INHERIT), sys_flag)
        created.topic_filter_type = template.topic_filter_type
        log.info("topic %s created by a send: %d queues, perm %d", topic, queues, created.perm)
        self.put(created)
        return created

    def ensure(self, topic: str, queue_nums: int, sys_flag: int = 0) -> TopicConfig:
        """The topic, created with these values if it is missing (retry and dead-letter topics). Raises
        CommandError if there are too many already."""
        known = self.table.get(topic)
        if known is None:
            self._check_room(topic, BYTES_BY_GROUPS, ResponseCode.SYSTEM_ERROR)
            queues = max(0, min(queue_nums, self.config.max_topic_queue_nums))
            known = topic_of(topic, queues, READ_WRITE, sys_flag)
            log.info("topic %s created: %d queues", topic, queues)
            self.put(known)
        return known

    def ensure_retry(self, group: str, queue_nums: int, unit_mode: bool | None) -> TopicConfig:
        """The retry topic of a group, created if it is missing. Raises CommandError as `ensure` does."""
        return self.ensure(RETRY_PREFIX + group, queue_nums, int(TopicSysFlag.UNIT_SUB) if unit_mode else 0)

    def put(self, config: TopicConfig) -> None:
        """Create or replace a topic. Raises MessageIllegal for a name that is none, CommandError if there is
        no room for it."""
        name = config.topic_name
        check_topic_name(name)
        known = self.table.get(name)
        more = _bytes_of(config) - (0 if known is None else _bytes_of(known))
        if more > 0:
            self._check_room(name, BYTES_MAX, ResponseCode.SYSTEM_ERROR, more)
        self.registered_bytes += more
        self.table[name] = config
        self.touch()

    def delete(self, topic: str) -> bool:
        """Forget a topic; False if it was not known."""
        known = self.table.pop(topic, None)
        if known is None:
            return False
        self.registered_bytes -= _bytes_of(known)
        self.touch()
        return True

    def set_ordered(self, ordered: Mapping[str, str]) -> None:
        """Take the name servers' ORDER_TOPIC_CONFIG: these topics are ordered, all others are not."""
        changed = False
        for name, config in self.table.items():
            if config.order != (name in ordered):
                config.order = not config.order
                changed = True
        if changed:
            self.touch()

    def touch(self) -> None:
        """Count the version up, also without a change of the table (brokerPermission changed)."""
        self.version = self.versions.after(self.version)
        self.changed()

    def load(
        self,
        version: DataVersion | None,
        topics: Mapping[str, TopicConfig],
        stored: Callable[[str], int] = lambda _topic: 0,
    ) -> None:
        """Merge the file's entries over the built-in ones: the file wins. Those with names that nobody may
        give a topic are left out; a cluster or broker whose name is none has a topic of it all the same.

        A topic with more queues than maxTopicQueueNums gets so many, or those that have messages, of which
        `stored` says how many there are.
        """
        legal = {
            name: config
            for name, config in topics.items()
            if is_legal_name(name, STORED_LENGTH_MAX) or name in self.table
        }
        if len(legal) < len(topics):
            log.warning("topics with illegal names are left out: %s", ", ".join(topics.keys() - legal.keys()))
        for name, config in legal.items():
            asked = max(config.read_queue_nums, config.write_queue_nums)
            built_in = self.table.get(name)
            most = max(self.config.max_topic_queue_nums, built_in.write_queue_nums if built_in else 0)
            if asked > most:
                most = min(max(most, stored(name)), TOPIC_QUEUES_MAX)
            if asked > most:
                log.warning(
                    "topic %s had %d queues, more than maxTopicQueueNums=%d: it is served with %d",
                    name, asked, self.config.max_topic_queue_nums, most,
                )  # fmt: skip
                config.read_queue_nums = min(config.read_queue_nums, most)
                config.write_queue_nums = min(config.write_queue_nums, most)
        self.table.update(legal)
        self._count_bytes()
        if version is not None:
            self.version = version

    def adopt(self, counts: Mapping[str, int]) -> None:
        """Have these topics, with as many queues at least. One for which there is no room is named."""
        for topic, count in counts.items():
            known = self.table.get(topic)
            if known is None:
                log.warning("topic %s has messages and no settings: it gets %d queues", topic, count)
                config = topic_of(topic, count, READ_WRITE)
            else:
                log.warning("topic %s has messages in more queues than it should: it gets %d", topic, count)
                config = msgspec.structs.replace(
                    known,
                    read_queue_nums=max(count, known.read_queue_nums),
                    write_queue_nums=max(count, known.write_queue_nums),
                )
            try:
                self.put(config)
            except (MessageIllegal, CommandError) as refusal:
                log.error("topic %s is not served: %s", topic, refusal)

    def replace(self, version: DataVersion, topics: Mapping[str, TopicConfig]) -> None:
        """Take a master's table, with its version, in the place of this one."""
        self.table.clear()
        self.load(version, topics)
        self.changed()


def topic_of(name: str, queue_nums: int, perm: int, sys_flag: int = 0) -> TopicConfig:
    """The configuration of a topic with as many queues to read from as to write to."""
    return TopicConfig(
        topic_name=name,
        read_queue_nums=queue_nums,
        write_queue_nums=queue_nums,
        perm=int(perm),
        topic_sys_flag=sys_flag,
    )


def _bytes_of(config: TopicConfig) -> int:
    """What a topic takes of a registration, at most."""
    attributes = (config.attributes or {}).items()
    return (
        TOPIC_BYTES + 2 * len(config.topic_name) + sum(len(key) + len(value) + 6 for key, value in attributes)
    )


def sys_flag_of_send(topic: str, unit_mode: bool | None) -> int:
    """topicSysFlag of a topic that a send creates."""
    if not unit_mode:
        return 0
    return int(TopicSysFlag.UNIT_SUB if topic.startswith(RETRY_PREFIX) else TopicSysFlag.UNIT)
