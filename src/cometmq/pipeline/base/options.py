"""Options of the `cometmq` format: parses Spark's case-insensitive map of strings into checked values.

Each format has one dataclass, whose fields are its options (declare.py). The names follow Kafka's source; the
names of RocketMQ's old connector are accepted as alternative spellings.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.util import find_spec
from typing import Literal

from cometmq.errors import ConfigError, SqlError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.declare import MAX_PLAIN_BYTES, MOST_BYTES, Given, check_pattern, option
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
from cometmq.settings import BOOLEANS, INT_MAX, LONG_MAX, environment_namesrv


@dataclass(frozen=True, slots=True)
class Position:
    """The start or the end of a read, for all queues together or for single queues.

    `timestamp_ms` or, if it is None, `word` (EARLIEST or LATEST) applies to all queues. A single queue may
    instead have an offset in `offsets`, a time in `times`, or a stored offset of the consumer group `group`.
    """

    word: int = EARLIEST  # EARLIEST or LATEST
    offsets: Offsets = field(default_factory=dict)
    timestamp_ms: int | None = None
    times: Offsets = field(default_factory=dict)  # start or end times in ms since 1970, by queue
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics to read: topic names, a pattern for names that the name server lists, or single queues."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    queues: tuple[MessageQueue, ...] = ()

    def includes(self, queue: MessageQueue) -> bool:
        """Return whether the selection still includes a queue that has been read before."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, queue.topic) is not None
        return queue in self.queues or queue.topic in self.names

    def names_topic(self, topic: str) -> bool:
        """Return whether messages of a topic may be read."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.names or any(queue.topic == topic for queue in self.queues)


@dataclass(frozen=True)
class _Requesting:
    """The options for sending requests.

    Args:
        accessKey: Name of the [account](client.md#accounts-and-tls) that signs requests. Without an account,
            that of the driver's environment is used, as in all jobs: `COMETMQ_ACCESS_KEY`,
            `COMETMQ_SECRET_KEY` and `COMETMQ_SECURITY_TOKEN`.
        secretKey: Secret key of the account, which is sent to the workers.
        securityToken: Security token of the account.
        tls: `true`, or a file of TLS settings, which every worker must have. Default: `COMETMQ_TLS` of the
            driver.
    """

    _: KW_ONLY
    timeout_ms: int = option(30_000, low=1, high=INT_MAX)
    access: Access = option(PLAIN, keys=("accessKey", "secretKey", "securityToken", "tls"), shown="")


@dataclass(frozen=True)
class _Decoding:
    """The options for decoding messages.

    Args:
        batch_records: Maximum records per Arrow batch.
        max_plain_bytes: Maximum bytes of a decompressed body. A message with a larger body is a bad record.
        decompress: Whether compressed bodies are decompressed.
    """

    _: KW_ONLY
    batch_records: int = option(10_000, low=1, high=INT_MAX)
    max_plain_bytes: int = option(MAX_PLAIN_BYTES, low=1, high=MOST_BYTES)
    check_crc: bool = option(True)
    decompress: bool = option(True)
    fail_on_data_loss: bool = option(True)
    on_bad_record: Literal["fail", "skip"] = option("fail")


@dataclass(frozen=True)
class PullOptions(_Requesting, _Decoding):
    """The options of a task's requests to brokers.

    Args:
        tags: Tags of the messages to read, such as `A || B`. Brokers filter by hash codes, tasks by the text.
        sql: An SQL92 filter over properties, `TAGS` and `KEYS`, instead of tags: `region = 'EU' AND amount >
            5`. Brokers apply the filter; Apache's brokers need `enablePropertyFilter=true`. CONTAINS,
            STARTSWITH and ENDSWITH are refused, because a 4.9 broker ignores the rest of an expression from
            these words on.
        consumer_group: The consumer group named in pull requests. A stream stores its progress as the offsets
            of this group, and never resumes from them.
        pull_batch_size: Maximum messages per pull. By default, Apache's brokers return at most 32 messages,
            and CometMQ's at most 1 MiB.
        pulls_in_flight: Maximum concurrent pulls of a task.
        batch_bytes: Maximum stored bytes per Arrow batch. The limit applies to the decompressed bodies of a
            batch, too.
        timeout_ms: Timeout of requests, in ms, and of the wait for a [broker that is
            away](#brokers-that-are-away).
        check_crc: Whether the checksum of each body is verified.
        fail_on_data_loss: Whether a read fails if messages of its range were deleted, [their queue was
            replaced](#queues-that-were-replaced) or, in a batch, [cannot be
            read](#queues-that-cannot-be-read). `false`: the read continues, with a warning.
        on_bad_record: `skip` leaves out [bad records](#bad-records), with a warning.
    """

    _: KW_ONLY
    tags: str = option("*")
    sql: str | None = option(None)
    # By default, pulls name RocketMQ's group for tools, which every broker has.
    consumer_group: str = option(TOOLS_CONSUMER_GROUP, shown="none")
    pull_batch_size: int = option(1024, low=1, high=INT_MAX)
    pulls_in_flight: int = option(8, low=1, high=INT_MAX)
    batch_bytes: int = option(16 * 1024 * 1024, low=1, high=MOST_BYTES)

    @property
    def by_tags(self) -> bool:
        """Whether only messages with certain tags are read."""
        return self.sql is None and self.tags.strip() not in ("", "*")


@dataclass(frozen=True)
class ReadOptions(PullOptions):
    """The checked options of a read.

    Args:
        namesrv: Addresses of the name servers, `host:port` separated by `;`.
        subscribe: Names of topics, separated by `,`. Exactly one of `subscribe`, `subscribePattern` and
            `assign` is required. See [which topics](#what-to-know) can be read.
        subscribePattern: A regular expression for names of topics.
        assign: Single queues: `{"topic": {"broker-name": [queue numbers]}}`.
        startingOffsets: `earliest`, `latest`, or `{"topic": {"broker-name": {"queue": offset}}}` with -2 for
            earliest and -1 for latest. A stream uses the start only for a new checkpoint. An offset greater
            than the end of its queue is a `DataLossError`, or with `failOnDataLoss=false` a warning.
        startingTimestamp: Store time, in ms since 1970, of the first messages. A queue without later messages
            is read from its end. Times in seconds or in the future are refused.
        startingOffsetsByTimestamp: A time for each queue: `{"topic": {"broker-name": {"queue": ms}}}`. Queues
            without a time have the default start.
        startingGroup: A consumer group whose stored offsets are the start. Queues without a stored offset
            begin at `startingOffsets`. A group without any stored offset is an error; 4.9 brokers report the
            offset 0 for such a group while they hold the first message of a queue.
        endingOffsets: `latest`, or offsets as for `startingOffsets`. An end before the start is refused, and
            so is a time as the end if the start is `latest`.
        endingTimestamp: Store time, in ms since 1970, before which messages are read. Times in seconds or
            more than a day ahead are refused.
        endingOffsetsByTimestamp: A time for each queue, as for `startingOffsetsByTimestamp`.
        max_offsets_per_trigger: Maximum messages of a batch, divided among the queues in proportion to their
            backlogs.
        max_bytes_per_trigger: Approximate maximum of stored bytes of a batch, before filters. The mean size
            of messages is estimated from up to 64 waiting messages, at least one of each queue.
        min_offsets_per_trigger: Number of messages for which a batch waits. As in Kafka's source, the first
            batch of a run does not wait, nor does `AvailableNow`.
        max_trigger_delay_s: Maximum time since the previous batch for which a batch waits for
            `minOffsetsPerTrigger` messages, such as `90s` or `1h`.
        min_partitions: Minimum number of tasks. Set it on a cluster, because the default depends on the cores
            of the driver.
        max_records_per_partition: Maximum records of a task.
    """

    namesrv: tuple[str, ...] = option((), shown="`COMETMQ_NAMESRV`, else `NAMESRV_ADDR`")
    topics: Topics = option(Topics(), keys=("subscribe", "subscribePattern", "assign"), shown="")
    starting: Position = option(
        Position(),
        keys=("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingGroup"),
        shown="batch: earliest, stream: latest",
    )
    ending: Position = option(
        Position(),
        keys=("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
        shown="latest",
        query="batch",
    )
    max_offsets_per_trigger: int = option(1_000_000, low=1, high=LONG_MAX, query="stream")
    max_bytes_per_trigger: int | None = option(None, low=1, high=LONG_MAX, query="stream")
    min_offsets_per_trigger: int | None = option(None, low=1, high=LONG_MAX, query="stream")
    # Spark's Kafka source has the same default.
    max_trigger_delay_s: float = option(15 * 60.0, shown="15m", query="stream")
    min_partitions: int | None = option(None, low=1, high=LONG_MAX, shown="2 for each core")
    max_records_per_partition: int | None = option(None, low=1, high=LONG_MAX)

    @property
    def commit_group(self) -> str | None:
        """The group under which a stream publishes its progress. None: the stream publishes no progress."""
        return None if self.consumer_group == TOOLS_CONSUMER_GROUP else self.consumer_group


@dataclass(frozen=True)
class StoreOptions(_Decoding):
    """The checked options of a read of store directories.

    Args:
        path: The argument of `load()`, which is required: stores, separated by `,`, with `*` and `?`. A store
            is a directory with a `commitlog`, or a directory of log files. From the store of a raft member,
            only committed records are read.
        paths: The stores as a list in JSON, which Spark creates for `load([...])`.
        subscribe: Names of topics, separated by `,`.
        subscribePattern: A regular expression for names of topics.
        startingTimestamp: Store time, in ms since 1970, of the first messages. Times in seconds or in the
            future are refused.
        endingTimestamp: Store time, in ms since 1970, before which messages are read. Times in seconds or
            more than a day ahead are refused.
        slice_bytes: Bytes of a log file per task.
        batch_bytes: Maximum stored bytes that are read and decoded together. The limit applies to their
            decompressed bodies, too.
        check_crc: Whether the checksums of bodies are verified, if the column `body` is read.
        fail_on_data_loss: Whether a read fails if a file is missing between two files of the log, or was
            deleted after `load()`. `false`: the read continues, with a warning.
        on_bad_record: `skip` leaves out damaged records, with a warning that names file, log position and
            reason.
    """

    paths: tuple[str, ...] = option((), keys=("path", "paths"), shown="")
    topics: Topics | None = option(None, keys=("subscribe", "subscribePattern"), shown="all topics")
    starting_ms: int | None = option(None, keys=("startingTimestamp",), shown="")
    ending_ms: int | None = option(None, keys=("endingTimestamp",), shown="")
    _: KW_ONLY
    slice_bytes: int = option(64 * 1024 * 1024, low=1, high=LONG_MAX)
    batch_bytes: int = option(2 * 1024 * 1024, low=1, high=MOST_BYTES)


@dataclass(frozen=True)
class WriteOptions(_Requesting):
    """The checked options of a write.

    Args:
        namesrv: Addresses of the name servers, `host:port` separated by `;`.
        subscribe: The topic of all rows. Without this option, the rows have a column `topic`.
        producer_group: The producer group of the sends.
        batch_records: Maximum rows of a send request.
        batch_bytes: Maximum bytes of the bodies of a send request.
        timeout_ms: Timeout of requests, in ms.
        retries: Maximum number of further attempts for rows that are refused or not answered.
        write_id: Identifies a batch write. The message ids of its rows are derived from this id, so the rows
            of a repeated write have the same ids.
        bad_records_path: A directory, as a path or a URI, for rows that cannot be sent. Without this option,
            such a row ends the job.
    """

    namesrv: tuple[str, ...] = option((), shown="`COMETMQ_NAMESRV`, else `NAMESRV_ADDR`")
    topic: str | None = option(None, keys=("subscribe",))
    producer_group: str = option(CLIENT_INNER_PRODUCER_GROUP)
    _: KW_ONLY
    write_id: str | None = option(None, shown="new for each `save()`")
    bad_records_path: str | None = option(None)
    batch_records: int = option(512, low=1, high=INT_MAX)
    batch_bytes: int = option(256 * 1024, low=1, high=INT_MAX)
    retries: int = option(5, low=0, high=INT_MAX)


SPELLINGS = {
    "nameServer": "namesrv",
    "namesrvAddr": "namesrv",
    "topic": "subscribe",
    "path": "subscribe",  # load("topic") and save("topic") set `path`
    "topicPattern": "subscribePattern",
    "subExpression": "tags",
    "group": "consumerGroup",
    "pullTimeoutMs": "timeoutMs",
}
"""Alternative spellings of options, each with the name of its option."""
_OF_SPARK = ("checkpointLocation", "queryName")  # options of Spark itself, which it also passes to a sink

_LIGHT = "%LMQ%"
_QUOTED = re.compile(r"'[^']*'")
_ONLY_5X = re.compile(r"\b(CONTAINS|STARTSWITH|ENDSWITH)\b", re.IGNORECASE)
_ADDRESS = re.compile(r"^\[?[^;,\s]+\]?:\d{1,5}$")


def check_package(setting: str, value: str, package: str, extra: str) -> None:
    """Raise ConfigError if the value of a setting requires a package that is not installed."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # raised by `find_spec` if the parent package is missing
        found = None
    if found is None:
        raise ConfigError(setting, value, f"the package {package}: pip install 'cometmq[{extra}]'")


def parse_addresses(text: str, option: str = "namesrv") -> tuple[str, ...]:
    """Parse `host:port` items separated by `;` (as in RocketMQ) or `,`."""
    items = tuple(item.strip() for item in re.split(r"[;,]", text) if item.strip())
    if not items or not all(_ADDRESS.match(item) and int(item.rpartition(":")[2]) < 65536 for item in items):
        raise ConfigError(option, text, "host:port, several separated by ';'")
    return items


def _addresses(given: Given) -> tuple[str, ...]:
    text = given.text("namesrv") or environment_namesrv()[1]
    if not text:
        raise ConfigError("namesrv", "", "host:port of the name server, or the variable COMETMQ_NAMESRV")
    return parse_addresses(text)


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Parse the options of a reader. Raises ConfigError(key, value, expected)."""
    given = Given(options, ReadOptions, SPELLINGS)
    if streaming:
        given.refuse_ends()
    starting = _position(given, "starting", LATEST if streaming else EARLIEST)
    ending = _position(given, "ending", LATEST)
    _check_order(starting, ending)
    read = ReadOptions(
        **given.values(
            namesrv=_addresses(given), topics=_topics(given), starting=starting, ending=ending,
            sql=_sql(given), access=_access(given),
        )
    )  # fmt: skip
    least, most, delay = (
        read.min_offsets_per_trigger,
        read.max_offsets_per_trigger,
        given.text("maxTriggerDelay"),
    )
    if least is not None and least > most:
        raise ConfigError("minOffsetsPerTrigger", str(least), f"a whole number of at most {most}")
    if least is None and delay is not None:
        raise ConfigError("maxTriggerDelay", delay, "minOffsetsPerTrigger to be set, too")
    return read


def store_options(options: Mapping[str, str]) -> StoreOptions:
    """Parse the options of a reader of store directories. Raises ConfigError(key, value, expected)."""
    given = Given(options, StoreOptions, SPELLINGS)
    named = given.text("subscribe") is not None or given.text("subscribePattern") is not None
    starting_ms, ending_ms = _time_ms(given, "startingTimestamp"), _time_ms(given, "endingTimestamp")
    _check_order(Position(timestamp_ms=starting_ms), Position(timestamp_ms=ending_ms))
    return StoreOptions(
        **given.values(
            paths=_paths(given), topics=_topics(given) if named else None,
            starting_ms=starting_ms, ending_ms=ending_ms,
        )
    )  # fmt: skip


def _paths(given: Given) -> tuple[str, ...]:
    """Return the paths of `load("a,b")`, or of `load(["a", "b"])`, which Spark passes as a JSON list."""
    text, listed = given.text("path") or "", given.text("paths")
    try:
        paths = [] if listed is None else json.loads(listed)
    except ValueError:
        paths = None
    if not isinstance(paths, list):
        raise ConfigError("paths", str(listed), "a list in JSON")
    paths += [item.strip() for item in text.split(",") if item.strip()]
    if not paths:
        raise ConfigError("path", text, "directories of stores, several separated by ','")
    return tuple(map(str, paths))


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a sink. Raises ConfigError(key, value, expected)."""
    given = Given(options, WriteOptions, SPELLINGS, _OF_SPARK)
    place = _place(given.text("badRecordsPath"))
    topic = (given.text("subscribe") or "").strip() or None
    return WriteOptions(
        **given.values(namesrv=_addresses(given), topic=topic, bad_records_path=place, access=_access(given))
    )


def _time_ms(given: Given, name: str) -> int | None:
    """Return a time in ms since 1970. Raises ConfigError for a time in seconds or in the future."""
    value = given.integer(name, 0)
    if value is not None:
        check_time(name, value, end=name.startswith("ending"))
    return value


def _access(given: Given) -> Access:
    """Return the account and TLS settings of the options, or else of the environment. Raises ConfigError."""
    environment = Access.of_environment()
    keys = [given.text(name) for name in ("accessKey", "secretKey", "securityToken")]
    tls = given.text("tls")
    return Access(
        credentials_of(*keys) if any(keys) else environment.credentials,
        environment.tls if tls is None else BOOLEANS.get(tls.lower(), tls or False),
    )


def _topics(given: Given) -> Topics:
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
        check_pattern("subscribePattern", text)
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


def _sql(given: Given) -> str | None:
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
        raise ConfigError("sql", text, "no CONTAINS, STARTSWITH or ENDSWITH, which 4.9 brokers misread")
    return text


def _place(path: str | None) -> str | None:
    """Return the absolute form of a local path, because workers may have another working directory."""
    if path is not None and not path.strip():
        raise ConfigError("badRecordsPath", path, "a directory: a path, or a URI such as hdfs:// or s3://")
    return path if path is None or "://" in path else os.path.abspath(path)


def _position(given: Given, side: str, default: int) -> Position:
    offsets, time, times = f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp"
    said = [name for name in (offsets, time, times) if given.text(name) is not None]
    if len(said) > 1:
        raise ConfigError(said[0], str(given.text(said[0])), f"not together with {said[1]}")
    timestamp_ms = _time_ms(given, time)
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
        for name, first, last in (
            ("endingOffsets", starting.offsets.get(queue, -1), ending.offsets.get(queue, -1)),
            (
                "endingOffsetsByTimestamp" if queue in ending.times else "endingTimestamp",
                starting.times.get(queue, starting.timestamp_ms or 0),
                ending.times.get(queue, -1 if ending.timestamp_ms is None else ending.timestamp_ms),
            ),
        ):
            if first > last >= 0:
                raise ConfigError(name, f"{queue}: {last}", f"no end before the start, {first}")


def _from_group(given: Given, position: Position, said: list[str]) -> Position:
    group = given.text("startingGroup")
    if group is None:
        return position
    if said and said != ["startingOffsets"]:
        raise ConfigError("startingGroup", group, f"not together with {said[0]}")
    if not is_legal_name(group, MAX_GROUP_LENGTH):
        raise ConfigError("startingGroup", group, "the name of a consumer group")
    return replace(position, group=group)


def parse_position(text: str, option: str, default: int) -> Position:
    """Parse "earliest", "latest" or offsets in JSON, in which `default` stands for queues without one."""
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return Position(words[text.strip().lower()])
    return Position(default, parse_offsets(text, option))
