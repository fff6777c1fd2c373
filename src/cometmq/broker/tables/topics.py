"""The topic table: the topics of a broker, their creation by sends, and the file topics.json.

Each change creates a new data version. Then the broker writes the file and registers with the name servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.versions import Versions
from cometmq.errors import CommandError, MessageIllegal
from cometmq.message import MessageQueue, check_topic_name
from cometmq.protocol import codes
from cometmq.protocol.bodies import DataVersion, TopicConfig
from cometmq.protocol.codes import Perm, ResponseCode, TopicSysFlag

log = logs.logger(__name__)

READ_WRITE = Perm.READ | Perm.WRITE
# A registration contains all topics and must fit into a frame (16 MiB). Otherwise the broker could not
# register, and would disappear from all routes. So a topic is refused if the registration would exceed a
# limit: BYTES_BY_SEND for topics created by sends, BYTES_BY_GROUPS for retry and dead-letter topics,
# MAX_REGISTRATION_BYTES for topics created by administrators.
BYTES_BY_SEND = 11 << 20
BYTES_BY_GROUPS = 14 << 20
MAX_REGISTRATION_BYTES = codes.MAX_FRAME_LENGTH - (256 << 10)
# The maximum number of bytes of a topic in a registration, apart from its attributes and its name (which
# occurs twice). This maximum holds for all values of the topic's numbers. It is so large that even a full
# frame contains fewer topics than the 100,000 that a name server accepts.
TOPIC_BYTES = 168


@dataclass(eq=False)
class TopicTable:
    """The configurations of all topics, and their data version. `changed` is called after each change."""

    config: BrokerConfig
    versions: Versions
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.table: dict[str, TopicConfig] = {}
        self.version = self.versions.first()
        self.system: set[str] = set(codes.SYSTEM_TOPICS)
        self.registered_bytes = 0  # upper bound of the bytes that all topics take in a registration
        self._create_built_in()

    def _create_built_in(self) -> None:
        """Create the topics that each broker has (docs/reference/storage.md, Topics and groups at start)."""
        config = self.config
        inherit = Perm.INHERIT
        of_cluster = inherit | READ_WRITE if config.cluster_topic_enable else inherit
        of_broker = inherit | READ_WRITE if config.broker_topic_enable else inherit
        built_in = [
            (codes.SELF_TEST_TOPIC, 1, READ_WRITE),
            (codes.BENCHMARK_TOPIC, 1024, READ_WRITE),
            (config.broker_cluster_name, 16, of_cluster),
            (config.broker_name, 1, of_broker),
            (codes.OFFSET_MOVED_EVENT, 1, READ_WRITE),
            (codes.SCHEDULE_TOPIC, 18, READ_WRITE),
            (config.broker_cluster_name + codes.REPLY_TOPIC_POSTFIX, 1, READ_WRITE),
        ]
        if config.auto_create_topic_enable:
            built_in.append((codes.TBW102, config.default_topic_queue_nums, inherit | READ_WRITE))
        if config.trace_topic_enable or config.grpc_trace_enable:
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
                f"topic[{topic}] not exist, and is not created: the registration of {len(self.table)} topics "
                f"has {self.registered_bytes} bytes. Above {most} bytes only administrators can create "
                f"topics, up to {MAX_REGISTRATION_BYTES} bytes",
            )

    def get(self, topic: str) -> TopicConfig | None:
        """Return the configuration of a topic, or None for an unknown topic."""
        return self.table.get(topic)

    def existing(self, topic: str) -> TopicConfig:
        """Return the configuration of a topic. Raises CommandError for an unknown topic."""
        known = self.table.get(topic)
        if known is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        return known

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """Return a queue of this broker as a MessageQueue."""
        return MessageQueue(topic, self.config.broker_name, queue_id)

    def is_system(self, topic: str) -> bool:
        """Return whether a topic is a system topic, which requests may neither create nor delete."""
        return topic in self.system or topic.startswith(codes.SYSTEM_TOPIC_PREFIX)

    @staticmethod
    def is_sendable(topic: str) -> bool:
        """Return whether clients may send to a topic."""
        return topic not in codes.UNSENDABLE_TOPICS and not topic.startswith(codes.REVIVE_TOPIC_PREFIX)

    def is_order(self, topic: str) -> bool:
        """Return whether a topic is ordered, according to the name server's configuration."""
        known = self.table.get(topic)
        return known is not None and known.order

    def create_by_send(
        self, topic: str, default_topic: str | None, queue_nums: int, sys_flag: int = 0
    ) -> TopicConfig | None:
        """Create a topic for a send, with `default_topic` as template. Return None if that is not allowed.

        Raises CommandError if there are too many topics.
        """
        known = self.table.get(topic)
        if known is not None:
            return known
        self._check_room(topic, BYTES_BY_SEND, ResponseCode.TOPIC_NOT_EXIST)
        template = self.table.get(default_topic) if default_topic else None
        if template is None:
            log.warning("topic %s not created: the template topic %s does not exist", topic, default_topic)
            return None
        if default_topic == codes.TBW102 and not self.config.auto_create_topic_enable:
            template.perm = int(READ_WRITE)
        if not template.perm & Perm.INHERIT:
            log.warning(
                "topic %s not created: the template topic %s has no inherit permission", topic, default_topic
            )
            return None
        queues = max(0, min(queue_nums, template.write_queue_nums, self.config.max_topic_queue_nums))
        created = topic_of(topic, queues, template.perm & ~int(Perm.INHERIT), sys_flag)
        created.topic_filter_type = template.topic_filter_type
        log.info("topic %s created by a send: %d queues, perm %d", topic, queues, created.perm)
        self.put(created)
        return created

    def ensure(self, topic: str, queue_nums: int, sys_flag: int = 0) -> TopicConfig:
        """Return a topic that the broker needs. Create it if it is missing. Raises CommandError."""
        known = self.table.get(topic)
        if known is None:
            self._check_room(topic, BYTES_BY_GROUPS, ResponseCode.SYSTEM_ERROR)
            queues = max(0, min(queue_nums, self.config.max_topic_queue_nums))
            known = topic_of(topic, queues, READ_WRITE, sys_flag)
            log.info("topic %s created: %d queues", topic, queues)
            self.put(known)
        return known

    def ensure_retry(self, group: str, queue_nums: int, unit_mode: bool | None) -> TopicConfig:
        """Return a group's retry topic. If it is missing, create it. Raises CommandError like `ensure`."""
        return self.ensure(
            codes.RETRY_PREFIX + group, queue_nums, int(TopicSysFlag.UNIT_SUB) if unit_mode else 0
        )

    def put(self, config: TopicConfig) -> None:
        """Create or replace a topic. Raises MessageIllegal for its name, CommandError for too many."""
        name = config.topic_name
        check_topic_name(name)
        known = self.table.get(name)
        more = _bytes_of(config) - (0 if known is None else _bytes_of(known))
        if more > 0:
            self._check_room(name, MAX_REGISTRATION_BYTES, ResponseCode.SYSTEM_ERROR, more)
        self.registered_bytes += more
        self.table[name] = config
        self.touch()

    def delete(self, topic: str) -> bool:
        """Remove a topic. Return False if the topic is unknown."""
        known = self.table.pop(topic, None)
        if known is None:
            return False
        self.registered_bytes -= _bytes_of(known)
        self.touch()
        return True

    def set_ordered(self, ordered: Mapping[str, str]) -> None:
        """Mark exactly the topics in `ordered`, the name servers' ORDER_TOPIC_CONFIG, as ordered."""
        changed = False
        for name, config in self.table.items():
            if config.order != (name in ordered):
                config.order = not config.order
                changed = True
        if changed:
            self.touch()

    def touch(self) -> None:
        """Create a new table version after a change of a topic or of `brokerPermission`. Call `changed`."""
        self.version = self.versions.after(self.version)
        self.changed()

    def load(
        self,
        version: DataVersion | None,
        topics: Mapping[str, TopicConfig],
        stored: Callable[[str], int] = lambda _topic: 0,
    ) -> None:
        """Add the topics of a file or of a master. They replace built-in topics of the same names.

        Topics with invalid names are omitted, except those that replace built-in topics. A number of queues
        above maxTopicQueueNums is lowered to that limit, but not below `stored(name)`, the number of queues
        that have messages. `version` is None to keep the table's version.
        """
        legal = {
            name: config
            for name, config in topics.items()
            if codes.is_legal_name(name, codes.MAX_STORED_TOPIC_LENGTH) or name in self.table
        }
        if len(legal) < len(topics):
            log.warning("topics with invalid names are ignored: %s", ", ".join(topics.keys() - legal.keys()))
        for name, config in legal.items():
            asked = max(config.read_queue_nums, config.write_queue_nums)
            built_in = self.table.get(name)
            most = max(self.config.max_topic_queue_nums, built_in.write_queue_nums if built_in else 0)
            if asked > most:
                most = min(max(most, stored(name)), codes.MAX_QUEUES_PER_TOPIC)
            if asked > most:
                log.warning(
                    "topic %s had %d queues, more than maxTopicQueueNums=%d, and now has %d",
                    name, asked, self.config.max_topic_queue_nums, most,
                )  # fmt: skip
                config.read_queue_nums = min(config.read_queue_nums, most)
                config.write_queue_nums = min(config.write_queue_nums, most)
        self.table.update(legal)
        self._count_bytes()
        if version is not None:
            self.version = version

    def adopt(self, counts: Mapping[str, int]) -> None:
        """Add missing topics and queues: at least `counts` queues per topic. Refusals are only logged."""
        for topic, count in counts.items():
            known = self.table.get(topic)
            if known is None:
                log.warning("topic %s has messages but no settings: created with %d queues", topic, count)
                config = topic_of(topic, count, READ_WRITE)
            else:
                log.warning(
                    "topic %s has messages in more queues than its settings allow: set to %d queues",
                    topic,
                    count,
                )
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
        """Replace all topics and the version of the table with those of a master."""
        self.table.clear()
        self.load(version, topics)
        self.changed()


def topic_of(name: str, queue_nums: int, perm: int, sys_flag: int = 0) -> TopicConfig:
    """Return the configuration of a topic with as many read queues as write queues."""
    return TopicConfig(
        topic_name=name,
        read_queue_nums=queue_nums,
        write_queue_nums=queue_nums,
        perm=int(perm),
        topic_sys_flag=sys_flag,
    )


def _bytes_of(config: TopicConfig) -> int:
    """Return the maximum number of bytes that a topic takes in a registration."""
    attributes = (config.attributes or {}).items()
    return (
        TOPIC_BYTES + 2 * len(config.topic_name) + sum(len(key) + len(value) + 6 for key, value in attributes)
    )


def sys_flag_of_send(topic: str, unit_mode: bool | None) -> int:
    """Return the topicSysFlag of a topic that a send creates."""
    if not unit_mode:
        return 0
    return int(TopicSysFlag.UNIT_SUB if topic.startswith(codes.RETRY_PREFIX) else TopicSysFlag.UNIT)
