"""Reads single records of a commit log by position, without opening the store."""

from __future__ import annotations

import errno

from cometmq.protocol.record.layout import START
from cometmq.protocol.record.one import Facts, record_facts
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.log.directories import LogDirectories


class LogReader:
    """Reads single records of a commit log by position."""

    def __init__(self, files: ReadOnlyFiles, config: StoreConfig) -> None:
        self._files = files
        self._places = LogDirectories(files.disk, config)
        self.framing = config.framing
        self._segment_size = config.mapped_file_size_commit_log

    def path_of(self, position: int) -> str:
        return self._places.path_of(position - position % self._segment_size)

    def record(self, position: int) -> bytes:
        """Return the bytes of the record at `position`, or b"" if no valid record begins there."""
        found = self._read(position)
        return found[1] if found is not None else b""

    def facts(self, position: int) -> Facts | None:
        """Return the fields of the record at `position`, or None if no valid record begins there."""
        found = self._read(position)
        return found[0] if found is not None else None

    def facts_after(self, position: int) -> Facts | None:
        """Return the fields of the record after the entry header at `position`, which only a raft log has."""
        return self.facts(position + self.framing.gap)

    def bytes_at(self, position: int, length: int) -> bytes | None:
        """Return up to `length` bytes within one segment, or None if the device cannot read them."""
        at = position % self._segment_size
        try:
            return self._files.read(self.path_of(position), min(length, self._segment_size - at), at)
        except OSError as failure:
            if failure.errno == errno.EIO:
                return None
            raise

    def _read(self, position: int) -> tuple[Facts, bytes] | None:
        if not 0 <= position < 1 << 62:
            return None
        start = self.bytes_at(position, START.size)
        if start is None or len(start) < START.size:
            return None
        size, _ = START.unpack(start)
        if not 0 < size <= self._segment_size - position % self._segment_size:
            return None
        data = self.bytes_at(position, size)
        if data is None:
            return None
        facts = record_facts(memoryview(data), 0, position)
        return None if facts is None else (facts, data)
