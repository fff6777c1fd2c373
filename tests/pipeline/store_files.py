"""Store directories written record by record in a broker's layout, and the rows read from them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.stored.plan import plan_slices
from cometmq.pipeline.stored.source import read_slice
from cometmq.protocol.record.arrow import arrow_schema
from cometmq.protocol.record.one import encode_blank, encode_record

HEAD = 88  # bytes before the body
START_MS = 1_700_000_000_000
QUEUE_FILE = 200  # bytes per queue file: ten units
ALL = "topic", "queue_id", "queue_offset", "physical_offset", "tags", "body", "store_timestamp"


@dataclass
class StoreFiles:
    """Records of a store with log files of `segment` bytes, the last file filled with zeros."""

    segment: int = 4096
    log: bytearray = field(default_factory=bytearray)
    places: list[int] = field(default_factory=list)  # log position of each record
    queues: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)

    def place_for(self, size: int) -> int:
        """Return the log position at which a record of this size would begin."""
        left = self.segment - len(self.log) % self.segment
        return len(self.log) + (left if size + 8 > left else 0)

    def add(self, body: bytes = b"hello", topic: str = "T", queue_id: int = 0, **given: Any) -> int:
        """Append a record and its queue unit; return its log position."""
        units = self.queues.setdefault((topic, queue_id), [])
        given = {"store_timestamp_ms": START_MS + len(self.places), "queue_offset": len(units), **given}
        size = len(encode_record(topic, body, queue_id=queue_id, **given))
        position = self.place_for(size)
        if position > len(self.log):
            left = position - len(self.log)
            self.log += encode_blank(left).ljust(left, b"\0")
        self.log += encode_record(topic, body, queue_id=queue_id, physical_offset=position, **given)
        self.places.append(position)
        if given.get("sys_flag", 0) & 0xC not in (4, 0xC):
            units.append(struct.pack(">qiq", position, size, 0))
        return position

    def end_of(self, number: int) -> int:
        size: int = struct.unpack_from(">i", self.log, self.places[number])[0]
        return self.places[number] + size

    def write(self, root: Path, *, queues: bool = True) -> Path:
        (root / "commitlog").mkdir(parents=True, exist_ok=True)
        for base in range(0, max(len(self.log), 1), self.segment):
            data = bytes(self.log[base : base + self.segment]).ljust(self.segment, b"\0")
            (root / "commitlog" / f"{base:020d}").write_bytes(data)
        for (topic, queue_id), units in self.queues.items() if queues else ():
            directory = root / "consumequeue" / topic / str(queue_id)
            directory.mkdir(parents=True, exist_ok=True)
            data = b"".join(units)
            for base in range(0, len(data), QUEUE_FILE):
                part = data[base : base + QUEUE_FILE].ljust(QUEUE_FILE, b"\0")
                (directory / f"{base:020d}").write_bytes(part)
        return root


def rows(root: Path | str, columns: Sequence[str] = ALL, **options: Any) -> list[dict[str, Any]]:
    """Read a store slice by slice and return its rows."""
    given = StoreOptions((str(root),), **options)
    schema = arrow_schema(columns)
    return [
        row
        for part in plan_slices(given)
        for batch in read_slice(part, schema, given)
        for row in batch.to_pylist(maps_as_pydicts="strict")
    ]


def positions(root: Path | str, **options: Any) -> list[int]:
    """Return the log positions of the rows of a read."""
    return [row["physical_offset"] for row in rows(root, ("physical_offset", "body"), **options)]
