"""The table of the segments that are in the object store (tiered storage).

Only segments in this table are read from the object store. So a broker can start without the object store,
and reads need no listing. Manifests in the object store contain the same facts, and are written before the
entry. So after a crash, an object without an entry belongs to an interrupted upload or deletion.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping

from cometmq.errors import StoreError
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

    def __init__(self, disk: Disk, root: str, *, restoring: str = "") -> None:
        """Load the table. With `restoring`, begin or continue the restore of the store with this id.

        Raises OSError, StoreCorrupt (with an empty table, messages would be lost), and StoreError if the
        directory contains an incomplete restore that the caller does not continue.
        """
        self._table = _table_in(disk, root)
        self._lock = threading.Lock()
        found = TieredSegmentTable.from_plain(self._table.load())
        if found.restoring and found.store_id != restoring:
            problem = f"the restore of store {found.store_id} is not complete: repeat `cometmq store restore`"
            raise StoreError(problem, self._table.path)
        self._restoring = bool(restoring)
        self.store_id = found.store_id or restoring
        self.by_base: Mapping[int, TieredSegment] = found.segments
        self.begin = min(self.by_base, default=_NOWHERE)
        """The first position of the oldest segment; beyond every log without segments."""
        if not found.store_id:
            self.store_id = self.store_id or secrets.token_hex(8)
            self._replace(self.by_base)

    @staticmethod
    def is_restoring(disk: Disk, root: str) -> bool:
        """Return whether a directory contains an interrupted restore. Raises StoreCorrupt, OSError."""
        return TieredSegmentTable.from_plain(_table_in(disk, root).load()).restoring

    def finish_restore(self) -> None:
        """Mark the restore as complete, so that brokers may open the directory. May raise OSError."""
        self._restoring = False
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
        marker = {"restoring": True} if self._restoring else {}
        self._table.save({"storeId": self.store_id, "segments": plain, **marker})
        self.by_base, self.begin = segments, min(segments, default=_NOWHERE)


def _table_in(disk: Disk, root: str) -> JsonTable:
    return JsonTable(os.path.join(root, "config", TIERED), disk)
