"""The directories of a log's segments: one, or several (`storePathCommitLog=a,b`).

As in Apache's broker (docs/reference/storage.md, Store directory), the directory of a new segment is
`paths[number of the segment mod n]`. `paths` are the sorted directories that accept new files and are not too
full, or, if all of them are too full, all that accept new files. The directories in
`readOnlyCommitLogStorePaths` are only read, until retention has emptied them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection

from cometmq.errors import StoreError
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk


class LogDirectories:
    """The directories of one log.

    The directories in `full` get new segments only if all writable directories are full.
    """

    def __init__(self, disk: Disk, config: StoreConfig) -> None:
        self._disk = disk
        self._segment_size = config.mapped_file_size_commit_log
        self._known: dict[int, str] = {}
        self.all = config.commit_log_dirs
        self.writable = sorted(set(self.all) - set(config.read_only_commit_log_dirs))
        self.full: Collection[str] = ()

    def files(self) -> list[tuple[str, str]]:
        """Return (directory, name) of all files in the directories of the log, sorted by name."""
        found = [(directory, name) for directory in self.all for name in self._disk.listdir(directory)]
        return sorted(found, key=lambda each: each[1])

    def path_of(self, base: int) -> str:
        """Return the path of the segment that starts at `base`, or the path at which it would be created."""
        path = self._known.get(base)
        if path is None:
            name = f"{base:020d}"
            path = os.path.join(self.all[0], name)
            if len(self.all) > 1:
                candidates = (os.path.join(directory, name) for directory in self.all)
                found = next((each for each in candidates if self._disk.facts(each) is not None), None)
                if found is None:
                    return os.path.join(self._next(base), name)
                path = found
            self._known[base] = path
        return path

    def forget(self, base: int) -> None:
        """Remove the cached path of a deleted segment."""
        self._known.pop(base, None)

    def _next(self, base: int) -> str:
        choice = [each for each in self.writable if each not in self.full] or self.writable
        return choice[base // self._segment_size % len(choice)]

    def check_unique(self, bases: Collection[int]) -> None:
        """Raise StoreError if a segment exists in two directories, so that `bases` contains it twice."""
        for base, count in Counter(bases).items():
            if count > 1:
                raise StoreError(f"segment {base:020d} lies in more than one directory", ", ".join(self.all))
