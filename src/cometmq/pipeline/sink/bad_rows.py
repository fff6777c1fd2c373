"""The Parquet table at `badRecordsPath`: the rows that cannot be sent, each with the reason.

A task derives the names of its files from query, batch and partition, so a repeated task overwrites the files
of its earlier attempt.
"""

from __future__ import annotations

import posixpath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cometmq import logs
from cometmq.errors import BrokerError
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.protocol.properties.values import decode_properties

log = logs.logger(__name__)

PART_ROWS = 10_000
PART_BYTES = 16 * 1024 * 1024
"""Size of bodies and properties, in bytes, after which a task begins another file."""

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("field", "problem", "topic")),
        ("body", pa.binary()),
        *((name, pa.string()) for name in ("tags", "keys")),
        ("properties", pa.map_(pa.string(), pa.string())),
        *((name, pa.int64()) for name in ("flag", "delay_level")),
        *((name, pa.string()) for name in ("sharding_key", "msg_id")),
    ]
)
"""The invalid field, its problem, and the row in the sink's columns, to be repaired and written again."""


class BadRows:
    """A buffer of rows that cannot be sent, written to `path`, a directory or a URI. `count` counts them."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._rows: list[dict[str, Any]] = []
        self._bytes = self._part = self.count = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add a row with values of SCHEMA's columns."""
        self.count += 1
        self._rows.append(row)
        properties = row["properties"] or ()
        self._bytes += len(row["body"] or b"") + sum(
            len(name) + len(value or "") for name, value in properties
        )
        if len(self._rows) >= PART_ROWS or self._bytes >= PART_BYTES:
            self.flush()

    def refused(self, message: RowMessage, refusal: BrokerError) -> None:
        """Add a row for a message that a broker refused permanently."""
        pairs = decode_properties(message.properties)
        pairs.pop("WAIT", None)
        names = {"tags": "TAGS", "keys": "KEYS", "msg_id": "UNIQ_KEY"}
        own = {name: pairs.pop(key, None) for name, key in names.items()}
        row = message._asdict() | own | {"properties": list(pairs.items())}
        self.add(row | {"field": "message", "problem": str(refusal)})

    def flush(self) -> None:
        """Write the buffered rows. Readers of the table see a complete file or none."""
        if not self._rows:
            return
        filesystem, root = open_filesystem(self._path)
        filesystem.create_dir(root, recursive=True)
        name = f"bad-{self._name}-{self._part:05}.parquet"
        hidden, path = posixpath.join(root, f"_{name}"), posixpath.join(root, name)
        table = pa.Table.from_pylist(self._rows, SCHEMA)
        pq.write_table(table, hidden, filesystem=filesystem, compression="zstd")
        filesystem.move(hidden, path)
        log.warning("%d rows could not be sent and were written to %s", len(self._rows), path)
        self._part += 1
        self._rows, self._bytes = [], 0
