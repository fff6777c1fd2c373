"""The table of the segments that are in the object store (tiered storage).

It decides which segments can be read from there. The manifests in the object store say the same, and are
written before; so after a crash, an object without an entry here belongs to an upload or a deletion that was
interrupted. A broker starts without its object store, and no read waits for a listing.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping

from cometmq.store.base.disk import Disk
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import TIERED, TieredSegment, TieredSegmentTable

_NOWHERE = 1 << 62


class TieredSegments:
    """The file `config/tieredSegments.json`.

    `by_base` holds the segments by their first log position. The dict is never modified: each change replaces
    it, after it is on the disk.

    Attributes:
        store_id: The random name below which this store keeps its objects. A new store never replaces the
            objects of an earlier one.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table. Raises OSError, and StoreCorrupt: with an empty one, messages would be lost."""
        self._table = JsonTable(os.path.join(root, "config", TIERED), disk)
        self._lock = threading.Lock()
        found = TieredSegmentTable.from_plain(self._table.load())
        self.store_id = found.store_id
        self.by_base: Mapping[int, TieredSegment] = found.segments
        self.begin = min(self.by_base, default=_NOWHERE)
        """The first position of the oldest segment; beyond every log without segments."""
        if not self.store_id:
            self.store_id = secrets.token_hex(8)
            self._replace(self.by_base)

    def add(self, base: int, segment: TieredSegment) -> None:
        """Add a segment durably. Any thread may call this. An OSError leaves the table unchanged."""
        with self._lock:
            self._replace({**self.by_base, base: segment})

    def remove(self, base: int) -> None:
        """Remove a segment durably. Any thread may call this. An OSError leaves the table unchanged."""
        with self._lock:
            self._replace({other: kept for other, kept in self.by_base.items() if other != base})

    def _replace(self, segments: Mapping[int, TieredSegment]) -> None:
        plain = {str(base): list(segment) for base, segment in sorted(segments.items())}
        self._table.save({"storeId": self.store_id, "segments": plain})
        self.by_base, self.begin = segments, min(segments, default=_NOWHERE)
