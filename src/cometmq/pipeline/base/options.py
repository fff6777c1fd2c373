"""Options of the `cometmq` format: Spark's case-insensitive text map as checked values.

The names follow Kafka's source; those of RocketMQ's old connector are accepted as alternative spellings. An
unknown option is an error that suggests the nearest known one, because a typing error must not silently read
everything.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from cometmq.errors import ConfigError, SqlError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.declare import MAX_PLAIN_BYTES, MOST_BYTES
from cometmq.pipeline.base.offsets import (
    EARLIEST,
    LATEST,
    MAX_QUEUE_ID,
    Offsets,
    check_time,
    parse_offsets,
    parse_times,
)
from cometmq.pipeline.base.wire import PLAIN, Access
from cometmq.protocol.acl import credentials_of
from cometmq.protocol.codes import (
    CLIENT_INNER_PRODUCER_GROUP,
    MAX_GROUP_LENGTH,
    TOOLS_CONSUMER_GROUP,
    is_legal_name,
)
from cometmq.protocol.sql import compile_sql
from cometmq.settings import BOOLEANS

_TRIGGER_DELAY_S = 15 * 60.0  # seconds, as in Kafka's source


@dataclass(frozen=True, slots=True)
class Position:
    """The begin or the end of a read.

    A position consists of a word or a time for all queues; or of offsets, times, or a group's stored offsets
    for some queues, and a word for the other queues.
    """

    word: int = EARLIEST  # EARLIEST or LATEST
    offsets: Offsets = field(default_factory=dict)
    timestamp_ms: int | None = None
    times: Offsets = field(default_factory=dict)  # time in ms since 1970 by queue
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics to read: names, a pattern for the names that the name server lists, or single queues."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    queues: tuple[MessageQueue, ...] = ()

    def includes(self, queue: MessageQueue) -> bool:
        """Return whether the selection includes a queue that was read before."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, queue.topic) is not None
        return queue in self.queues or queue.topic in self.names

    def names_topic(self, topic: str) -> bool:
        """Return whether messages of this topic may be read."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.names or any(queue.topic == topic for queue in self.queues)


@dataclass(frozen=True, slots=True)
class PullOptions:
    """The options of a task's requests to brokers."""

    consumer_group: str = TOOLS_CONSUMER_GROUP  # exists on every broker, so a reading job creates none
    tags: str = "*"
    sql: str | None = None  # an SQL92 filter instead of tags
    pull_batch_size: int = 1024  # maximum records per pull; Apache's brokers return 32 by default
    pulls_in_flight: int = 8
    timeout_ms: int = 30_000  # timeout for responses, and for a busy or restarting broker
    batch_records: int = 10_000  # maximum records per Arrow batch
    batch_bytes: int = 16 * 1024 * 1024  # maximum stored bytes per Arrow batch, and as many plain bytes
    max_plain_bytes: int = MAX_PLAIN_BYTES
    check_crc: bool = True
    decompress: bool = True
    fail_on_data_loss: bool = True
    fail_on_bad_record: bool = True
    access: Access = PLAIN

    @property
    def by_tags(self) -> bool:
        """Whether only messages with certain tags are read."""
        return self.sql is None and self.tags.strip() not in ("", "*")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options of a read."""

    namesrv: tuple[str, ...]
    topics: Topics
    starting: Position
    ending: Position
    pull: PullOptions
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    min_partitions: int | None
    max_records_per_partition: int | None
    commit_group: str | None  # group for which `commit` publishes the progress; None: no group


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The checked options of a read of store directories."""

    paths: tuple[str, ...]
    topics: Topics | None = None  # None: all topics
    starting_ms: int | None = None
    ending_ms: int | None = None
    slice_bytes: int = 64 * 1024 * 1024  # bytes of a log file per task
    batch_records: int = 10_000
    batch_bytes: int = 2 * 1024 * 1024  # maximum stored bytes that are read and decoded together
    max_plain_bytes: int = MAX_PLAIN_BYTES
    check_crc: bool = True
    decompress: bool = True
    fail_on_data_loss: bool = True
    fail_on_bad_record: bool = True


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The checked options of a write."""

    namesrv: tuple[str, ...]
    topic: str | None
    producer_group: str
    batch_bytes: int
    batch_records: int
    timeout_ms: int
    retries: int
    write_id: str | None
    bad_records_path: str | None = None
    access: Access = PLAIN


_ALIASES = {
    "nameserver": "namesrv",
    "namesrvaddr": "namesrv",
    "topic": "subscribe",
    "path": "subscribe",  # the path in load("topic") and save("topic")
    "topicpattern": "subscribepattern",
    "subexpression": "tags",
    "group": "consumergroup",
    "pulltimeoutms": "timeoutms",
}

_ACCESS = ("accessKey", "secretKey", "securityToken", "tls")
_READ = (
    *_ACCESS, "namesrv", "subscribe", "timeoutMs", "subscribePattern", "assign",
    "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp",
    "startingGroup", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "minPartitions", "maxRecordsPerPartition", "failOnDataLoss", "consumerGroup", "tags", "sql",
    "pullBatchSize", "pullsInFlight",
    "batchRecords", "batchBytes", "maxPlainBytes", "checkCrc", "decompress", "onBadRecord",
)  # fmt: skip
_STORE = (
    "path", "paths", "subscribe", "subscribePattern", "startingTimestamp", "endingTimestamp", "sliceBytes",
    "batchRecords", "batchBytes", "maxPlainBytes", "checkCrc", "decompress", "failOnDataLoss", "onBadRecord",
)  # fmt: skip
_WRITE = (
    *_ACCESS, "namesrv", "subscribe", "timeoutMs", "producerGroup", "batchBytes", "batchRecords", "retries",
    "writeId", "badRecordsPath", "checkpointLocation", "queryName",  # the last two options are Spark's own
)  # fmt: skip

_DURATION = re.compile(r"(\d{1,15})\s*(ms|s|m|min|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LIGHT = "%LMQ%"
_QUOTED = re.compile(r"'[^']*'")
_ONLY_5X = re.compile(r"\b(CONTAINS|STARTSWITH|ENDSWITH)\b", re.IGNORECASE)
_ADDRESS = re.compile(r"^\[?[^;,\s]+\]?:\d{1,5}$")


def check_package(setting: str, value: str, package: str, extra: str) -> None:
    """Raise ConfigError if a value requires a package that is not installed."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # the parent package may be missing, too
        found = None
    if found is None:
        raise ConfigError(setting, value, f"the package {package}: pip install 'cometmq[{extra}]'")


def parse_addresses(text: str, option: str = "namesrv") -> tuple[str, ...]:
    """Parse `host:port` items separated by `;` (as in RocketMQ) or `,`."""
    items = tuple(item.strip() for item in re.split(r"[;,]", text) if item.strip())
    if not items or not all(_ADDRESS.match(item) and int(item.rpartition(":")[2]) < 65536 for item in items):
        raise ConfigError(option, text, "host:port, several separated by ';'")
    return items


def _shown(name: str, value: str) -> str:
    """Return the value of an option for an error message, unless it may be a secret."""
    return "******" if "secret" in name or "token" in name else value


class _Reader:
    """A reader of Spark's options with typed access to all spellings of a name."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for key, value in options.items():
            name = key.lower()
            name = name if name in names else _ALIASES.get(name, name)
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *_ALIASES], 1)
                hint = f"; did you mean {names.get(near[0], near[0])}?" if near else ""
                raise ConfigError(key, _shown(name, value), f"one of {', '.join(sorted(known))}{hint}")
            if name in self._values and self._values[name] != value:
                before = _shown(name, self._values[name])
                raise ConfigError(
                    key, _shown(name, value), f"one value, but {names[name]} is {before!r} already"
                )
            self._values[name] = value

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name.lower(), default)

    def integer(self, name: str, default: int | None, least: int = 1, most: int = 2**63 - 1) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text.strip())
        except ValueError:
            value = least - 1
        if value < least:
            raise ConfigError(name, text, f"a whole number of {least} or more")
        if value > most:
            raise ConfigError(name, text, f"a whole number of at most {most}")
        return value

    def count(self, name: str, default: int, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.integer(name, default, least, most)
        return default if value is None else value

    def time_ms(self, name: str) -> int | None:
        """Return a time in ms since 1970. Raises ConfigError for a time in seconds or in the future."""
        value = self.integer(name, None, least=0)
        if value is not None:
            check_time(name, value, end=name.startswith("ending"))
        return value

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise ConfigError(name, text, "true or false")
        return text.strip().lower() == "true"

    def seconds(self, name: str, default: float) -> float:
        """Return a duration in Spark's notation in seconds: a number with a unit, or in ms without one."""
        text = self.text(name)
        if text is None:
            return default
        match = _DURATION.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigError(name, text, "a time such as 90s, 15m or 1h")
        return int(match[1]) * _UNITS_S[match[2] or "ms"]

    def addresses(self) -> tuple[str, ...]:
        text = self.text("namesrv") or os.environ.get("NAMESRV_ADDR")
        if text is None:
            raise ConfigError(
                "namesrv", "", "host:port of the name server (or NAMESRV_ADDR in the environment)"
            )
        return parse_addresses(text)


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Parse the options of a reader. Raises ConfigError(key, value, expected)."""
    given = _Reader(options, _READ)
    if streaming:
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if given.text(name) is not None:
                raise ConfigError(name, str(given.text(name)), "a batch query (a stream has no end)")
    group = given.text("consumerGroup")
    default = PullOptions()
    pull = PullOptions(
        consumer_group=group or TOOLS_CONSUMER_GROUP,
        tags=given.text("tags") or default.tags,
        sql=_sql(given),
        pull_batch_size=given.count("pullBatchSize", default.pull_batch_size),
        pulls_in_flight=given.count("pullsInFlight", default.pulls_in_flight),
        timeout_ms=given.count("timeoutMs", default.timeout_ms),
        batch_records=given.count("batchRecords", default.batch_records),
        batch_bytes=given.count("batchBytes", default.batch_bytes, most=MOST_BYTES),
        max_plain_bytes=given.count("maxPlainBytes", default.max_plain_bytes, most=MOST_BYTES),
        check_crc=given.flag("checkCrc", default.check_crc),
        decompress=given.flag("decompress", default.decompress),
        fail_on_data_loss=given.flag("failOnDataLoss", default.fail_on_data_loss),
        fail_on_bad_record=_fails_on_bad_record(given),
        access=_access(given),
    )
    most = given.count("maxOffsetsPerTrigger", 1_000_000, most=2**63 - 1)
    least = given.integer("minOffsetsPerTrigger", None, most=most)
    if least is None and given.text("maxTriggerDelay") is not None:
        raise ConfigError("maxTriggerDelay", str(given.text("maxTriggerDelay")), "minOffsetsPerTrigger too")
    starting = _position(given, "starting", LATEST if streaming else EARLIEST)
    ending = _position(given, "ending", LATEST)
    _check_order(starting, ending)
    return ReadOptions(
        namesrv=given.addresses(),
        topics=_topics(given),
        starting=starting,
        ending=ending,
        pull=pull,
        max_offsets_per_trigger=most if streaming else None,
        max_bytes_per_trigger=given.integer("maxBytesPerTrigger", None),
        min_offsets_per_trigger=least,
        max_trigger_delay_s=given.seconds("maxTriggerDelay", _TRIGGER_DELAY_S),
        min_partitions=given.integer("minPartitions", None),
        max_records_per_partition=given.integer("maxRecordsPerPartition", None),
        commit_group=group,
    )


def store_options(options: Mapping[str, str]) -> StoreOptions:
    """Parse the options of a reader of store directories. Raises ConfigError(key, value, expected)."""
    given = _Reader(options, _STORE)
    default = StoreOptions(())
    named = given.text("subscribe") is not None or given.text("subscribePattern") is not None
    starting_ms, ending_ms = given.time_ms("startingTimestamp"), given.time_ms("endingTimestamp")
    _check_order(Position(timestamp_ms=starting_ms), Position(timestamp_ms=ending_ms))
    return StoreOptions(
        paths=_paths(given),
        topics=_topics(given) if named else None,
        starting_ms=starting_ms,
        ending_ms=ending_ms,
        slice_bytes=given.count("sliceBytes", default.slice_bytes, most=2**63 - 1),
        batch_records=given.count("batchRecords", default.batch_records),
        batch_bytes=given.count("batchBytes", default.batch_bytes, most=MOST_BYTES),
        max_plain_bytes=given.count("maxPlainBytes", default.max_plain_bytes, most=MOST_BYTES),
        check_crc=given.flag("checkCrc", default.check_crc),
        decompress=given.flag("decompress", default.decompress),
        fail_on_data_loss=given.flag("failOnDataLoss", default.fail_on_data_loss),
        fail_on_bad_record=_fails_on_bad_record(given),
    )


def _paths(given: _Reader) -> tuple[str, ...]:
    """Return the paths of `load("a,b")`, or of `load(["a", "b"])`, which Spark passes as a list in JSON."""
    text, listed = given.text("path", ""), given.text("paths")
    try:
        paths = [] if listed is None else json.loads(listed)
    except ValueError:
        paths = None
    if not isinstance(paths, list):
        raise ConfigError("paths", str(listed), "a list in JSON")
    paths += [item.strip() for item in str(text).split(",") if item.strip()]
    if not paths:
        raise ConfigError("path", str(text), "directories of stores, several separated by ','")
    return tuple(map(str, paths))


def _fails_on_bad_record(given: _Reader) -> bool:
    text = given.text("onBadRecord", "fail")
    if text not in ("fail", "skip"):
        raise ConfigError("onBadRecord", str(text), "fail or skip")
    return text == "fail"


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a sink. Raises ConfigError(key, value, expected)."""
    given = _Reader(options, _WRITE)
    topic = given.text("subscribe")
    return WriteOptions(
        namesrv=given.addresses(),
        topic=(topic or "").strip() or None,
        producer_group=given.text("producerGroup") or CLIENT_INNER_PRODUCER_GROUP,
        batch_bytes=given.count("batchBytes", 256 * 1024),
        batch_records=given.count("batchRecords", 512),
        timeout_ms=given.count("timeoutMs", 30_000),
        retries=given.count("retries", 5, least=0),
        write_id=given.text("writeId"),
        bad_records_path=_place(given.text("badRecordsPath")),
        access=_access(given),
    )


def _access(given: _Reader) -> Access:
    """Return the account and TLS of the options, else of the environment. Raises ConfigError."""
    environment = Access.of_environment()
    keys = [given.text(name) for name in ("accessKey", "secretKey", "securityToken")]
    tls = given.text("tls")
    return Access(
        credentials_of(*keys) if any(keys) else environment.credentials,
        environment.tls if tls is None else BOOLEANS.get(tls.lower(), tls or False),
    )


def _topics(given: _Reader) -> Topics:
    ways = [name for name in ("subscribe", "subscribePattern", "assign") if given.text(name)]
    if len(ways) != 1:
        raise ConfigError(
            "subscribe", ", ".join(ways), "exactly one of subscribe, subscribePattern and assign"
        )
    text = str(given.text(ways[0]))
    if ways[0] == "subscribe":
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise ConfigError("subscribe", text, "names of topics separated by ','")
        if any(name.startswith(_LIGHT) for name in names):
            raise ConfigError("subscribe", text, "topics; light queues have no route that could be read")
        return Topics(names=names)
    if ways[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError("subscribePattern", text, f"a regular expression ({error})") from None
        return Topics(pattern=text)
    return Topics(queues=_assigned(text))


def _assigned(text: str) -> tuple[MessageQueue, ...]:
    expected = '{"topic": {"broker-name": [queue numbers]}}'
    try:
        tree = json.loads(text)
        queues = [
            MessageQueue(topic, broker_name, int(queue_id))
            for topic, brokers in tree.items()
            for broker_name, ids in brokers.items()
            for queue_id in ids
        ]
    except (ValueError, AttributeError, TypeError):
        raise ConfigError("assign", text, expected) from None
    if not queues or any(not 0 <= queue.queue_id <= MAX_QUEUE_ID for queue in queues):
        raise ConfigError("assign", text, expected)
    return tuple(sorted(set(queues)))


def _sql(given: _Reader) -> str | None:
    text = given.text("sql")
    if text is None:
        return None
    if given.text("tags") is not None:
        raise ConfigError("sql", text, "not together with tags (TAGS is a property in SQL92 as well)")
    try:
        compile_sql(text)
    except SqlError as error:
        raise ConfigError("sql", text, f"an SQL92 expression ({error})") from None
    if _ONLY_5X.search(_QUOTED.sub("", text)):
        raise ConfigError("sql", text, "no CONTAINS, STARTSWITH or ENDSWITH: to a 4.9 broker they end it")
    return text


def _place(path: str | None) -> str | None:
    """Return an absolute local path, because workers may have another working directory."""
    if path is not None and not path.strip():
        raise ConfigError("badRecordsPath", path, "a directory: a path, or a URI such as hdfs:// or s3://")
    return path if path is None or "://" in path else os.path.abspath(path)


def _position(given: _Reader, side: str, default: int) -> Position:
    offsets, time, times = f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"
    said = [name for name in (offsets, time, times) if given.text(name) is not None]
    if len(said) > 1:
        raise ConfigError(said[0], str(given.text(said[0])), f"not together with {said[1]}")
    timestamp_ms = given.time_ms(time)
    if timestamp_ms is not None:
        position = Position(word=LATEST, timestamp_ms=timestamp_ms)
    elif times in said:
        position = Position(default, times=parse_times(str(given.text(times)), times))
    elif offsets in said:
        position = parse_position(str(given.text(offsets)), offsets, default)
    else:
        position = Position(word=default)
    text = given.text(offsets) or ""
    if side == "ending" and offsets in said:
        if position.word == EARLIEST:
            raise ConfigError(offsets, text, "latest or offsets in JSON")
        if EARLIEST in position.offsets.values():
            raise ConfigError(offsets, text, "offsets of 0 or more, or -1 (latest)")
    return _from_group(given, position, said) if side == "starting" else position


def _check_order(starting: Position, ending: Position) -> None:
    """Raise ConfigError for an end before the start, if both are times or both are offsets."""
    if starting == Position(LATEST) and (ending.timestamp_ms is not None or ending.times):
        raise ConfigError("startingOffsets", "latest", "a start before the end, which is a time")
    if (starting.timestamp_ms or 0) > (2**63 if ending.timestamp_ms is None else ending.timestamp_ms):
        expected = f"a time not before startingTimestamp, {starting.timestamp_ms}"
        raise ConfigError("endingTimestamp", str(ending.timestamp_ms), expected)
    for queue in sorted({*starting.offsets, *starting.times, *ending.offsets, *ending.times}):
        for option, first, last in (
            ("endingOffsets", starting.offsets.get(queue, -1), ending.offsets.get(queue, -1)),
            (
                "endingOffsetsByTimestamp" if queue in ending.times else "endingTimestamp",
                starting.times.get(queue, starting.timestamp_ms or 0),
                ending.times.get(queue, -1 if ending.timestamp_ms is None else ending.timestamp_ms),
            ),
        ):
            if first > last >= 0:
                raise ConfigError(option, f"{queue}: {last}", f"no end before the start, {first}")


def _from_group(given: _Reader, position: Position, said: list[str]) -> Position:
    group = given.text("startingGroup")
    if group is None:
        return position
    if said and said != ["startingOffsets"]:
        raise ConfigError("startingGroup", group, f"not together with {said[0]}")
    if not is_legal_name(group, MAX_GROUP_LENGTH):
        raise ConfigError("startingGroup", group, "the name of a consumer group")
    return replace(position, group=group)


def parse_position(text: str, option: str, default: int) -> Position:
    """Parse earliest, latest, or offsets in JSON. `default` is the position of queues without an offset."""
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return Position(words[text.strip().lower()])
    return Position(default, parse_offsets(text, option))
