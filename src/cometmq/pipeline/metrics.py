"""Metrics of running jobs for Prometheus, on a local port or in a file for node_exporter.

    with PipelineMetrics("9404") as metrics:  # or "/var/lib/node_exporter/cometmq.prom"
        spark.streams.addListener(metrics.listener)
        archive(spark, ..., on_progress=metrics.archived)

Streams report through a StreamingQueryListener, which runs in this process even with Spark Connect. With each
batch the source reports its positions, from which a query's progress and lag are computed.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime
from itertools import islice
from typing import Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server, write_to_textfile
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.pipeline.base.job_options import ArchiveProgress
from cometmq.pipeline.base.offsets import Offsets, from_tree
from cometmq.text import printable

log = logs.logger(__name__)

QUERIES_MAX = 100
"""Maximum number of running queries with metrics of their own; further queries share the label `others`."""
ENDED_MAX = 20
"""Maximum number of ended queries whose last metrics remain readable; those of older queries are removed."""
PHASES_MAX = 30
"""Maximum number of phases of a batch with metrics of their own. Spark has about ten phases."""
LABEL_CHARS = 255
QUEUES_MAX = 2000
"""Maximum number of queues with metrics of their own. `cometmq_pipeline_lag` counts all queues."""
_Metric = TypeVar("_Metric", Counter, Gauge)
_OTHERS = "others"
# Maximum number of stored query ids, including queries whose end was never reported.
_IDS_MAX = 10 * QUERIES_MAX
_QUERY = ("query",)
_QUEUE = ("query", "topic", "broker", "queue")


class PipelineMetrics:
    """The metrics of this process's jobs. `where`: a port on 127.0.0.1 (0: any free one), or a file.

    Raises ConfigError if the port is in use or the file cannot be written.
    """

    def __init__(self, where: str) -> None:
        self.registry = CollectorRegistry()
        self.port: int | None = None
        self._path: str | None = None
        self._lock = threading.Lock()  # The listener and the job report in different threads
        self._names: dict[str, str] = {}  # Label of each running query, by the query's id
        self._ended: dict[str, None] = {}  # Labels of ended queries, the oldest first
        # By the label of a query: the metrics that exist for this query, each with its label values.
        self._children: dict[str, set[tuple[Counter | Gauge, tuple[str, ...]]]] = {}
        self._queues: set[tuple[str, ...]] = set()
        self._left_out: set[tuple[str, ...]] = set()
        self._archived: dict[str, tuple[int, int]] = {}  # Numbers of records and bytes, by id of the run
        self._metrics()
        self.listener = _Listener(self)
        try:
            if where.isdecimal():
                self._server, self._thread = start_http_server(int(where), "127.0.0.1", self.registry)
                self.port = self._server.server_port
            else:
                self._path = where
                write_to_textfile(where, self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "metrics", where, f"a free port, or a file that can be written ({error})"
            ) from None

    def _metrics(self) -> None:
        """Create the metrics of jobs and queries."""

        def counter(name: str, words: str) -> Counter:
            return Counter(f"cometmq_pipeline_{name}", words, _QUERY, registry=self.registry)

        def gauge(name: str, words: str, labels: tuple[str, ...] = _QUERY) -> Gauge:
            return Gauge(f"cometmq_pipeline_{name}", words, labels, registry=self.registry)

        self._rows = counter("rows", "Rows that the query has read.")
        self._batches = counter("batches", "Batches that the query has completed.")
        self._bytes = counter("bytes", "Bytes of archived messages, as the brokers store them.")
        self._failures = counter("failures", "Queries that ended with an error.")
        self._input_rate = gauge("input_rows_per_second", "Input rows per second of the newest batch.")
        self._done_rate = gauge("processed_rows_per_second", "Rows processed per second in the newest batch.")
        self._seconds = gauge("batch_seconds", "Duration of a phase of the newest batch.", ("query", "phase"))
        self._newest = gauge("last_batch_timestamp_seconds", "Start time of the newest batch.")
        self._running = gauge("running", "Whether the query is running.")
        self._lag = gauge("lag", "Messages at the brokers that the query has not read yet.")
        self._offset = gauge("queue_offset", "Next offset of a queue to read.", _QUEUE)
        self._queue_lag = gauge("queue_lag", "Messages of a queue that the query has not read yet.", _QUEUE)
        self._queues_left_out = Gauge(
            "cometmq_pipeline_queues_left_out", "Queues without separate metrics.", registry=self.registry
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.port is not None:
            self.port = None
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    # -- events of jobs and queries

    def started(self, query_id: str, name: str | None) -> None:
        with self._lock:
            label = printable(name or query_id, LABEL_CHARS)
            self._ended.pop(label, None)
            running = set(self._names.values())
            if len(self._names) >= QUERIES_MAX and label not in running:
                label = _OTHERS
            if len(self._names) < _IDS_MAX:
                self._names[query_id] = label
            self._of(self._running, label).set(1)

    def ended(self, query_id: str, error: str | None) -> None:
        with self._lock:
            label = self._names.pop(query_id, _OTHERS)
            self._of(self._running, label).set(0)
            self._of(self._failures, label).inc(1 if error else 0)
            if label not in (_OTHERS, *self._names.values()):
                self._ended[label] = None
            while len(self._ended) > ENDED_MAX:
                self._forget(next(iter(self._ended)))
            self._written()

    def _of(self, metric: _Metric, *labels: str) -> _Metric:
        """Return the metric with these values. It is removed with the query that the first one names."""
        self._children.setdefault(labels[0], set()).add((metric, labels))
        return metric.labels(*labels)

    def _forget(self, label: str) -> None:
        """Remove all metrics of a query."""
        del self._ended[label]
        for metric, labels in self._children.pop(label, set()):
            metric.remove(*labels)
        self._queues = {queue for queue in self._queues if queue[0] != label}
        self._left_out = {queue for queue in self._left_out if queue[0] != label}
        self._queues_left_out.set(len(self._left_out))

    def progressed(self, progress: StreamingQueryProgress) -> None:
        """Record a finished batch of a query."""
        with self._lock:
            label = self._names.get(str(progress.id), _OTHERS)
            self._of(self._rows, label).inc(max(progress.numInputRows, 0))
            self._of(self._batches, label).inc()
            self._of(self._input_rate, label).set(progress.inputRowsPerSecond)
            self._of(self._done_rate, label).set(progress.processedRowsPerSecond)
            self._of(self._newest, label).set(datetime.fromisoformat(progress.timestamp).timestamp())
            for phase, milliseconds in islice(progress.durationMs.items(), PHASES_MAX):
                self._of(self._seconds, label, printable(phase, LABEL_CHARS)).set(milliseconds / 1000)
            lag = 0
            for source in progress.sources:
                read = _offsets(source.endOffset)
                held = _offsets(source.latestOffset)
                lag += self._positions(label, read, held)
            self._of(self._lag, label).set(lag)
            self._written()

    def archived(self, at: ArchiveProgress) -> None:
        """Record the progress of the archive job. Pass this method as the job's `on_progress`."""
        with self._lock:
            records, size = self._archived.pop(at.run, (0, 0))
            self._of(self._rows, "archive").inc(max(at.records - records, 0))
            self._of(self._bytes, "archive").inc(max(at.bytes - size, 0))
            self._archived[at.run] = (at.records, at.bytes)
            if len(self._archived) > QUERIES_MAX:
                del self._archived[next(iter(self._archived))]
            self._of(self._lag, "archive").set(max(at.total - at.records, 0))
            self._of(self._newest, "archive").set_to_current_time()
            self._written()

    def _positions(self, label: str, read: Offsets, held: Offsets) -> int:
        """Set the metrics of each queue. Return the total lag over all queues."""
        lag = 0
        for queue, offset in read.items():
            behind = max(held.get(queue, offset) - offset, 0)
            lag += behind
            names = (queue.topic, queue.broker_name, str(queue.queue_id))
            values = (label, *(printable(name, LABEL_CHARS) for name in names))
            if values not in self._queues and len(self._queues) >= QUEUES_MAX:
                if len(self._left_out) < 10 * QUEUES_MAX:
                    self._left_out.add(values)
                continue
            self._queues.add(values)
            self._left_out.discard(values)
            self._of(self._offset, *values).set(offset)
            self._of(self._queue_lag, *values).set(behind)
        self._queues_left_out.set(len(self._left_out))
        return lag

    def _written(self) -> None:
        if self._path is None:
            return
        try:
            write_to_textfile(self._path, self.registry)
        except OSError as error:  # Metrics must not end a job; the file is written again after the next batch
            log.warning("the metrics could not be written to %s: %s", self._path, error.strerror)


class _Listener(StreamingQueryListener):
    """A listener that forwards Spark's events to the metrics. Spark calls it in a separate thread."""

    def __init__(self, metrics: PipelineMetrics) -> None:
        self._metrics = metrics

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        self._metrics.started(str(event.id), event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        self._metrics.progressed(event.progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        self._metrics.ended(str(event.id), event.exception)


def _offsets(text: str | None) -> Offsets:
    """Return the offsets in a position of the `cometmq` source, or nothing for another source's position."""
    try:
        tree = json.loads(text or "{}")
        return from_tree(tree) if isinstance(tree, dict) else {}
    except (ValueError, ConfigError):
        return {}
