"""The options of the jobs, one dataclass per job, for Python signatures, command-line options and checks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from cometmq.pipeline.base.declare import MAX_PLAIN_BYTES, MOST_BYTES, option
from cometmq.protocol.codes import TRACE_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cometmq.store import StoreConfig

TableFormat = Literal["parquet", "delta", "iceberg"]
BodyFormat = Literal["json", "avro", "protobuf"]
Show: TypeAlias = Callable[[int, int | None], None]
MAX_RETENTION_S = 30 * 86_400
TABLES = ("-o", "--output")
_MAX = 2**31 - 1  # maximum of options in seconds, so that sums of such times in ms fit into 64 bits


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """The progress of the archive run with the id `run`, whenever tasks of a batch have finished."""

    run: str
    batch: int
    records: int  # number of records that this run has already archived
    total: int  # number of records that this run has to archive, as far as is known
    bytes: int  # size of the archived records in bytes, in the format of the brokers' stores
    seconds: float


@dataclass(frozen=True)
class Cancelled:
    """Options that callers of every job have in Python.

    Args:
        on_progress: Called whenever tasks have finished, with the number of finished tasks and None (the
            total is unknown).
        stop: Cancels the job when it is set.
    """

    _: KW_ONLY
    on_progress: Show | None = None
    stop: threading.Event | None = None

    @property
    def show(self) -> Callable[[int], None] | None:
        """A function that calls `on_progress` with an unknown total. None without `on_progress`."""
        call = self.on_progress
        return None if call is None else lambda done: call(done, None)


@dataclass(frozen=True)
class Reading(Cancelled):
    """Options of jobs that read messages from any source (jobs/inputs.py).

    Args:
        source: An archive, store directories or live topics; `messages` describes the forms.
        begin_ms: First store time, in ms since 1970. None: no limit.
        end_ms: Store time, in ms since 1970, before which messages are read. None: no limit.
    """

    source: str
    _: KW_ONLY
    begin_ms: int | None = None
    end_ms: int | None = None


@dataclass(frozen=True)
class ArchiveOptions:
    """The options of `archive`.

    Args:
        namesrv: Addresses of the name servers, "host:port" separated by semicolons.
        topics: Names of the topics. Exactly one of `topics` and `pattern` is required.
        output: The archive's directory: a path or a URI. Required.
        pattern: A regular expression for names of topics.
        mode: `available_now` archives what the brokers hold at the start, in batches, and returns.
            `continuous` runs until `stop` is set.
        starting: `earliest`, `latest` or offsets as JSON: the first offset of queues that are not in the
            archive yet. An offset must not be greater than the end of its queue.
        interval_s: Interval between two checks for new messages in continuous mode, in seconds.
        batch_records: Maximum number of records per batch.
        compression: A Parquet codec that pyarrow supports.
        compression_level: Level of the codec. None: the codec's default.
        pulls_in_flight: Maximum number of concurrent pull requests per task.
        pull_batch_size: Maximum number of messages per pull request.
        timeout_ms: Timeout of requests to brokers and name servers, in ms.
        check_crc: Whether the checksum of each body is verified.
        decompress: Whether compressed bodies are stored decompressed.
        max_plain_bytes: Maximum size of a decompressed body, in bytes. Messages with larger bodies go to
            quarantine.
        fail_on_data_loss: Whether the run fails when messages were deleted before they were archived, or a
            queue was replaced. If not, these messages count as lost.
        max_bad_records: Maximum number of undecodable records in this run. None: no limit.
        consumer_group: A group whose offsets are set to the archive's progress after each commit, so that
            tools show its lag. None: no offsets are set.
        table_format: Format of a new archive: parquet, delta or iceberg. For an existing archive the same
            format is required.
        catalogue: A local file for the SQL catalogue of a new Iceberg table on an object store.
        body_format: Format in which bodies are parsed into columns: json, avro or protobuf (docs/pipeline.md,
            Bodies as columns). None: bodies stay bytes.
        body_schema: Schema of the bodies: 'id bigint, name string', FILE.avsc, or FILE.desc:MESSAGE. None:
            the fields of the first JSON bodies.
        keep_body: Whether the column of the raw body is kept beside the parsed columns.
        groups: Consumer groups whose offsets are recorded beside the table (`group_positions`). "*": all
            groups of the topics.
        on_progress: Called with the progress whenever it has changed.
        stop: Ends the run when it is set.
    """

    namesrv: str
    topics: Sequence[str] = ()
    output: str = ""
    _: KW_ONLY
    pattern: str | None = option(None, metavar="REGEX")
    mode: Literal["available_now", "continuous"] = "available_now"
    starting: str = option("earliest", metavar="WHERE")
    interval_s: float = option(10.0, low=0, typed_low=0.1)
    batch_records: int = option(1_000_000, low=1)
    compression: str = option("zstd", metavar="CODEC")
    compression_level: int | None = option(None)
    pulls_in_flight: int = option(8, low=1)
    pull_batch_size: int = option(1024, low=1)
    timeout_ms: int = option(30_000, low=1)
    check_crc: bool = option(True)
    decompress: bool = option(True)
    max_plain_bytes: int = option(MAX_PLAIN_BYTES, low=1, high=MOST_BYTES, shown="64 MiB")
    fail_on_data_loss: bool = option(True)
    max_bad_records: int | None = option(None, low=0)
    consumer_group: str | None = option(None, metavar="NAME", flags=("-g", "--group"))
    table_format: TableFormat = option("parquet", metavar="FORMAT", flags=("--format",))
    catalogue: str | None = option(None, metavar="FILE")
    body_format: BodyFormat | None = option(None, metavar="FORMAT")
    body_schema: str | None = option(None, metavar="SCHEMA")
    keep_body: bool = option(True)
    groups: Sequence[str] = option((), metavar="NAME")
    on_progress: Callable[[ArchiveProgress], None] | None = None
    stop: threading.Event | None = None


@dataclass(frozen=True)
class ReplayOptions(Reading):
    """The options of `replay`.

    Args:
        namesrv: Addresses of the target cluster's name servers, "host:port" separated by semicolons.
        topics: Names of the source topics. Empty: all topics that match `pattern`.
        pattern: A regular expression for names of source topics, instead of `topics`.
        into: Name of the target topic; "{topic}" stands for the name of the source topic.
        mapping: Target topics by source topic. An entry overrides `into`. System topics, whose names include
            all that begin with %, are sent only if they have an entry.
        state: The directory that records the progress, from which a further run continues: a path or a URI.
            Required unless `dry_run` is set.
        order: `queue`: a source queue goes to the target queue of the same broker and number, or else to the
            queue of the number modulo the number of queues. `key`: each message goes to the queue of its
            sharding key, or else of its first key.
        rate: Maximum messages per second, over all tasks. None: no limit.
        byte_rate: Maximum bytes of bodies and properties per second, over all tasks. None: no limit.
        positions: The source of the consumer groups' offsets: an archive that contains group offsets, the
            table of the lag job, or in Python a DataFrame with the columns group, topic, broker_name,
            queue_id and offset. After all messages have been sent, the offset of each group in the target
            topics is set to the message at which the group is in the source topics. Later runs do not set
            offsets again. None: no offsets are set.
        dry_run: Whether to count only, without sending.
        timeout_ms: Timeout of requests to brokers, in ms.
        on_progress: Called with the number of sent messages and the total number of messages, whenever more
            messages have been sent.
        stop: Ends the run after the current batches when it is set.
    """

    namesrv: str
    _: KW_ONLY
    topics: Sequence[str] = option((), metavar="NAME", flags=("-t", "--topic"))
    pattern: str | None = option(None, metavar="REGEX")
    into: str = option("{topic}-replay", metavar="NAME")
    mapping: Mapping[str, str] | None = None
    state: str | None = option(None, metavar="DIR")
    order: Literal["queue", "key"] = option("queue")
    rate: float | None = option(None, above=0)
    byte_rate: float | None = option(None, above=0)
    positions: "str | DataFrame | None" = option(None, metavar="DIR")
    dry_run: bool = option(False)
    timeout_ms: int = option(30_000, low=1)


@dataclass(frozen=True)
class AuditOptions(Reading):
    """The options of `audit`.

    Args:
        topics: Names of the topics. Empty: all topics that match `pattern`.
        pattern: A regular expression for names of topics. None: all topics of users. If the
            source is a cluster, names or a pattern are required.
        window_s: Length of the time windows of the tables, in seconds. A stored message belongs to the window
            of its store time, and a sent message of the traces to the window of its producer's send time.
        delay_s: How long a window stays open after its end, in seconds. A window is closed once the source
            (and the trace topic, if `traces` is given) holds a message that was stored this long after the
            window's end. All windows are closed once `end_ms` is this long ago.
        late_s: A message is late if it was stored more than this many seconds after it was born, by the
            client's clock.
        disorder_ms: A message is misordered if a message of the same client at a lower offset was born more
            than this many ms later.
        traces: The source of the trace topic. None: no traces.
        trace_topic: Name of the trace topic.
        positions: The source of the consumer groups' offsets: an archive that contains group offsets, the
            table of the lag job, or in Python a DataFrame with the columns group, topic, broker_name,
            queue_id and offset. None: no offsets.
        output: A directory for three tables (topics, groups, findings), which replace the tables of an
            earlier run. None: no tables.
    """

    _: KW_ONLY
    topics: Sequence[str] = ()
    pattern: str | None = option(None, metavar="REGEX")
    window_s: int = option(300, low=1, high=_MAX)
    delay_s: int = option(60, low=0, high=_MAX)
    late_s: float = option(60.0, low=0, high=_MAX)
    disorder_ms: int = option(1000, low=0, high=_MAX)
    traces: str | None = option(None, metavar="SOURCE")
    trace_topic: str = option(TRACE_TOPIC, metavar="NAME")
    positions: "str | DataFrame | None" = option(None, metavar="DIR")
    output: str | None = option(None, metavar="DIR", flags=TABLES)


@dataclass(frozen=True)
class DedupOptions(Reading):
    """The options of `dedup`.

    Args:
        output: A directory for the table: a path or a URI.
        topics: Names of the topics. Empty: all topics that match `pattern`.
        pattern: A regular expression for names of topics, instead of `topics`.
        key: `keys`, `msg_id` (the sink's idempotency key), or an SQL expression over the source's columns,
            like properties['order']. Messages whose key is empty or NULL are kept.
        keep: Whether the `first` or the `last` message with a key is kept, by store time.
        window_s: Maximum time between a duplicate and the previous message with its key, in seconds. None: no
            limit.
    """

    output: str
    topics: Sequence[str] = ()
    _: KW_ONLY
    pattern: str | None = option(None, metavar="REGEX")
    key: str = option("keys", metavar="SQL", flags=("-k", "--key"))
    keep: Literal["first", "last"] = option("first")
    window_s: float | None = option(None, low=0)


@dataclass(frozen=True)
class ThroughputOptions(Reading):
    """The options of `throughput`.

    Args:
        topics: Names of the topics. Empty: all topics that match `pattern`.
        pattern: A regular expression for names of topics, instead of `topics`.
        window_s: Length of a window of rates and peaks, in seconds.
        top: Maximum number of topics in the summary, by bytes.
        output: A directory for two tables (queues, topics), with a row for each window. The tables
            replace those of an earlier run. None: no tables.
    """

    topics: Sequence[str] = ()
    _: KW_ONLY
    pattern: str | None = option(None, metavar="REGEX")
    window_s: int = option(60, low=1, high=_MAX)
    top: int = option(20, low=1, high=_MAX)
    output: str | None = option(None, metavar="DIR", flags=TABLES)


@dataclass(frozen=True)
class TraceOptions(Reading):
    """The options of `trace`.

    Args:
        topic: Name of the trace topic.
        window_s: Length of a window of the tables, in seconds.
        output: A directory for the tables `sends` and `consumptions`, with a row for each window, topic and
            group, and for the table `bad` with the unreadable records. The tables replace those of an earlier
            run. None: no tables.
    """

    _: KW_ONLY
    topic: str = option(TRACE_TOPIC, metavar="NAME", flags=("-t", "--topic"))
    window_s: int = option(60, low=1, high=_MAX)
    output: str | None = option(None, metavar="DIR", flags=TABLES)


@dataclass(frozen=True)
class LagOptions(Cancelled):
    """The options of `lag`.

    Args:
        namesrv: Addresses of the name servers, "host:port" separated by semicolons.
        groups: Names of the groups. Empty: all groups that have ever been online.
        output: A directory for the table `samples`, to which every run appends one sample per interval, so
            that the windows of 1, 5 and 60 minutes include samples of earlier runs. None: no table.
        samples: Number of samples. 0: until the run is stopped.
        interval_s: Interval between samples, in seconds.
        keep_days: Samples that are this many days older than the newest are removed from the table.
        retention_h: Time for which brokers keep messages (fileReservedTime), in hours, for the forecast.
        timeout_ms: Timeout of requests, in ms.
        on_progress: Called after each sample with the number of samples and their total (None if unlimited).
        stop: Ends the run when it is set.
    """

    namesrv: str
    groups: Sequence[str] = ()
    _: KW_ONLY
    output: str | None = option(None, metavar="DIR", flags=TABLES)
    samples: int = option(2, low=0, high=_MAX)
    interval_s: float = option(10.0, above=0, high=_MAX, typed_low=0.1)
    keep_days: float = option(30.0, above=0, high=_MAX)
    retention_h: float = option(72.0, above=0, high=_MAX)
    timeout_ms: int = option(30_000, low=1)


@dataclass(frozen=True)
class DlqOptions(Reading):
    """The options of `dlq`. `redrive` has these options and others.

    Args:
        groups: Names of the consumer groups. Empty: all groups.
        where: A Spark SQL condition over the columns of `letters`. None: all dead letters.
        reason: A Spark SQL expression for the reason of a dead letter, over the other columns of `letters`,
            like properties['error']. None: the reason is the failure that the traces report, or, without one,
            the number of tries.
        traces: The source of a trace topic, which reports how consumption failed. None: no failures are
            known.
        output: A directory for the job's tables: `triage` of `dlq`, which replaces the table of an earlier
            run, or `redriven` and `quarantine` of `redrive`. None: no table.
    """

    groups: Sequence[str] = ()
    _: KW_ONLY
    where: str | None = option(None, metavar="EXPR")
    reason: str | None = option(None, metavar="EXPR")
    traces: str | None = option(None, metavar="SOURCE")
    output: str | None = option(None, metavar="DIR", flags=TABLES)


@dataclass(frozen=True)
class RedriveOptions(Reading):
    """The options of `redrive`.

    Args:
        namesrv: Addresses of the name servers, "host:port" separated by semicolons.
        groups: Names of the consumer groups. Empty: all groups.
        where: A Spark SQL condition over the columns of `letters`. "true" selects all dead letters.
        reason: A Spark SQL expression for the reason, as for `letters`.
        traces: The source of a trace topic, as for `letters`.
        to_topic: Whether messages are sent to their original topic instead of the group's retry topic. All
            groups that consume the original topic then receive them.
        again: Whether dead letters that were sent before are sent again.
        max_resends: Dead letters that have been resent this many times are refused.
        rate: Maximum messages per second, over all tasks. None: no limit.
        dry_run: Whether to count only, without sending.
        output: A directory, required unless `dry_run` is set. Each run adds its results to the table
            `redriven`, and the refused and failed dead letters to the table `quarantine`.
    """

    namesrv: str
    groups: Sequence[str] = ()
    _: KW_ONLY
    where: str
    reason: str | None = None
    traces: str | None = None
    to_topic: bool = False
    again: bool = option(False)
    max_resends: int = option(3, low=1)
    rate: float | None = option(None, above=0)
    dry_run: bool = option(False)
    output: str | None = None


@dataclass(frozen=True)
class CompactOptions:
    """The options of `compact`.

    Args:
        output: The archive's directory: a path or a URI.
        target_bytes: Approximate size of a merged file, in bytes. Files smaller than half of it are merged.
        older_than_s: The files of an hour of an archive are merged only if the hour ended at least this many
            seconds ago.
        retention_s: Time, in seconds, for which an object store keeps replaced files for running queries. The
            next compaction deletes them. With 0, running queries may fail.
        on_progress: Called with the number of finished merges and the number of merges of this run.
        stop: Ends the run after the current commit when it is set.
    """

    output: str
    _: KW_ONLY
    target_bytes: int = option(256 * 1024 * 1024, low=1, shown="256 MiB")
    older_than_s: float = option(3600.0, low=0)
    retention_s: float = option(86400.0, low=0, high=MAX_RETENTION_S)
    on_progress: Callable[[int, int], None] | None = None
    stop: threading.Event | None = None


@dataclass(frozen=True)
class RebuildOptions(Cancelled):
    """The options of `rebuild`.

    Args:
        root: The store's directory. All tasks must be able to read it.
        output: The directory for the result: a new one, or one of an earlier run. All tasks must be able to
            write to it.
        config: The store's settings. None: defaults, as for `cometmq store rebuild`.
        commit_log_dir: The log's directory if it is outside of `root`.
        check: Whether to verify the result against the log, in one process.
        on_progress: Called with the number of finished tasks and their total.
    """

    root: str
    output: str
    _: KW_ONLY
    config: "StoreConfig | None" = None
    commit_log_dir: str = option("", metavar="DIR", flags=("--commitlog",))
    check: bool = option(True, flags=("--verify/--no-verify",))
