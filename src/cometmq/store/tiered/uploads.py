"""Uploads of sealed log segments to an object store, and their deletion there (tiered storage).

A segment is uploaded when it is full, synced, and visible to readers, so it never changes again. The order of
the steps makes an interruption safe:

- Upload: first the bytes, then the CRCs, the manifest, and the entry in the table of segments. A local file
  may be deleted early only after these steps, and only if its bytes match the CRC in the table.
- Deletion: first the entry in the table, then the manifest, the bytes, and the CRCs.

An interruption leaves objects without an entry in the table. The first cycle after a start, or after a failed
deletion, removes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

from cometmq import logs
from cometmq.protocol.checksum import crc32
from cometmq.store.base.clock import SteadyTime
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.table_checks import TieredSegment
from cometmq.store.tiered.layout import (
    CRCS,
    DATA,
    MANIFEST,
    ObjectStoreFailed,
    Pieces,
    base_of,
    crcs_length,
    manifest,
    manifest_at,
    object_name,
)
from cometmq.store.tiered.reads import TieredReads

log = logs.logger(__name__)

T = TypeVar("T")
Given = TypeVarTuple("Given")
_HOUR_MS = 3_600_000
_NOWHERE = 1 << 62  # A log position beyond the end of every log
_THREADS = 2  # one for uploads, and one for retention, which must not wait for uploads


@dataclass(eq=False, kw_only=True)
class TieredUploads:
    """Copies the sealed segments of a store to its object store.

    Its methods run on the event loop.

    Attributes:
        executor: The executor for work that waits for the local disk.
        sealed_end: A function that returns the log position before which the log never changes.
        timeout_s: Timeout, in seconds, of requests that are no upload. Retention must not wait for a network
            file system that never answers.
    """

    disk: Disk
    config: StoreConfig
    executor: StoreExecutor
    steady: SteadyTime
    commit_log: CommitLog
    reads: TieredReads
    deleted: DeletedTopics
    sealed_end: Callable[[], int]
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self.objects, self.table, self.counts = self.reads.objects, self.reads.table, self.reads.counts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._swept = False
        self._stopped = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run all further requests to the object store in threads. Before, the caller's thread runs them."""
        self._loop, self._ended = loop, loop.create_future()
        self._pool = ThreadPoolExecutor(_THREADS, "cometmq-tiered")

    def end(self) -> None:
        """Make requests in progress fail, because a stop must not wait for the object store."""
        self._stopped = True
        if self._loop is not None and not self._ended.done():
            self._ended.set_result(None)

    def close(self) -> None:
        self.end()
        self.reads.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._loop = self._pool = None

    async def _run(self, work: Callable[[*Given], T], *given: *Given, is_upload: bool = False) -> T:
        if self._loop is None:
            return work(*given)
        future = self._loop.run_in_executor(self._pool, partial(work, *given))
        timeout_s = None if is_upload else self.timeout_s
        both = future, self._ended
        if not (await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            future.cancel()
        if not future.done() or future.cancelled():
            future.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise ObjectStoreFailed("the broker is stopping, or the object store does not answer")
        return future.result()

    def _pieces(self, path: str, size: int) -> Pieces:
        return Pieces(self.disk, path, size, lambda: self._stopped)

    def _name(self, base: int, ending: str) -> str:
        return object_name(self.table.store_id, base, ending)

    # -- the periodic work ------------------------------------------------------------------------

    async def cycle(self) -> None:
        """Remove remains of interruptions, delete expired segments, and upload new segments, oldest first.

        A failed step does not prevent the next step: an account without the right to delete still uploads.
        Raises the OSError of the first failed step. The next cycle tries again.
        """
        failure: OSError | None = None
        for step in (self._sweep, self._delete_expired, self._upload_waiting):
            try:
                await step()
            except OSError as error:
                if self.executor.ending:
                    return
                failure = failure or error
        if failure is not None:
            self.counts.failures += 1
            raise failure

    async def _upload_waiting(self) -> None:
        for base in self._waiting():
            if self.executor.ending or self.deleted.under_way:
                return  # A deletion that is in progress may be undone. It must not be in the manifest
            await self._upload(base)

    def _waiting(self) -> list[int]:
        """Return the sealed segments that are not uploaded yet, oldest first."""
        size, end = self.commit_log.segment_size, self.sealed_end()
        known = self.table.by_base
        return [each for each in self.commit_log.segments[:-1] if each + size <= end and each not in known]

    @property
    def waiting_bytes(self) -> int:
        """The size of the sealed segments that are not uploaded yet."""
        return len(self._waiting()) * self.commit_log.segment_size

    def _expired(self, modified_ms: int) -> bool:
        return modified_ms + self.config.tiered_reserved_time * _HOUR_MS < self.steady.now_ms()

    async def _upload(self, base: int) -> None:
        path, size = self.commit_log.path_of(base), self.commit_log.segment_size
        facts = await self.executor.run(self.disk.facts, path)
        if facts is None or self._expired(facts.modified_ms):
            return
        await self._check_owner(base)
        pieces = self._pieces(path, size)
        await self._run(self.objects.put, self._name(base, DATA), iter(pieces), is_upload=True)
        crcs = pieces.crcs()
        await self._run(self.objects.put, self._name(base, CRCS), crcs)
        if await self._run(self.objects.size, self._name(base, DATA)) != size:
            raise ObjectStoreFailed(
                f"the uploaded object {self._name(base, DATA)} does not have {size} bytes"
            )
        segment = TieredSegment(size, crc32(crcs), facts.modified_ms)
        deleted = self.deleted.newest(base, _NOWHERE)
        await self._run(self.objects.put, self._name(base, MANIFEST), manifest(base, segment, deleted))
        self.reads.forget(base)
        await self.executor.run(self.table.add, base, segment)
        self.counts.segments += 1
        self.counts.uploaded_bytes += size
        log.info("uploaded %s to the object store as %s", path, self._name(base, DATA))

    async def _check_owner(self, base: int) -> None:
        """Raise ObjectStoreFailed if the objects of a segment are those of another store with the same id.

        The other store is a copy of this directory, or the directory from before a restore. If the objects
        equal the local segment, the upload was only interrupted.
        """
        name, size = self._name(base, MANIFEST), self.commit_log.segment_size
        if await self._run(self.objects.size, name) is None:
            return
        found = await self._run(manifest_at, self.objects, self.table.store_id, base, size)
        pieces = self._pieces(self.commit_log.path_of(base), size)
        if found is not None and found.crc != await self._run(_crc_of, pieces):
            raise ObjectStoreFailed(f"{name} belongs to another broker with a copy of this store")

    async def _delete_expired(self) -> None:
        """Delete the segments in the object store that are older than tieredReservedTime, oldest first."""
        for base, segment in sorted(self.table.by_base.items()):
            if base >= self.commit_log.min_position or not self._expired(segment.modified_ms):
                break
            await self.executor.run(self.table.remove, base)
            self._swept = False
            await self._delete([base])
            self._swept = True
            log.info("deleted %s (expired)", self._name(base, DATA))

    async def _delete(self, bases: Iterable[int]) -> None:
        for base in bases:
            self.reads.forget(base)
            for ending in (MANIFEST, DATA, CRCS):
                await self._run(self.objects.delete, self._name(base, ending))

    async def _sweep(self) -> None:
        """Compare the object store with the table. Remove incomplete objects, and report missing ones."""
        if self._swept:
            return
        names = await self._run(lambda: list(self.objects.names(f"{self.table.store_id}/")))
        found = {place for place in map(base_of, names) if place is not None}
        known = self.table.by_base
        # Objects of segments that are still local stay: the repeated upload replaces them.
        begin = self.commit_log.min_position
        for base in sorted({base for base, _ in found if base < begin} - known.keys()):
            if (base, MANIFEST) not in found:
                await self._delete([base])
            else:
                await self._adopt(base)
        for base in sorted(known):
            if any((base, ending) not in found for ending in (DATA, CRCS)):
                await self._lost(base, "its objects are missing in the object store")
        self._swept = self.reads.complete = True

    async def _adopt(self, base: int) -> None:
        """Add a complete segment that an older table lacks. Delete the segment if it has expired."""
        size = self.commit_log.segment_size
        found = await self._run(manifest_at, self.objects, self.table.store_id, base, size)
        if found is None or base % size:
            log.error("%s is not a manifest, and its segment is ignored", self._name(base, MANIFEST))
        elif self._expired(found.modified_ms):
            await self._delete([base])
        else:
            log.warning("%s is added to the table of segments, which lacked it", self._name(base, DATA))
            await self.executor.run(self.table.add, base, found.segment)

    async def _lost(self, base: int, why: str) -> None:
        """Report a segment that the object store lacks. If it is still local, it is uploaded again."""
        name = self._name(base, DATA)
        if base in self.commit_log.segments:
            log.error("%s must be uploaded again: %s", name, why)
            await self._run(self.objects.delete, self._name(base, MANIFEST))
            await self.executor.run(self.table.remove, base)
        else:
            log.error("%s is lost and its messages cannot be read: %s", name, why)
            self.counts.lost += 1

    # -- for the retention of local segments ------------------------------------------------------

    def may_go(self, base: int, modified_ms: int, now_ms: int) -> bool:
        """Return whether a local segment has reached the age for early deletion, and was uploaded."""
        early = modified_ms + self.config.tiered_local_reserved_time * _HOUR_MS < now_ms
        return early and base in self.table.by_base

    async def confirm(self, base: int, *, early: bool) -> bool:
        """Return whether the object store has the bytes of a local segment that is about to be deleted.

        The local bytes are compared with the CRC in the table. With `early`, the objects' lengths are checked
        as well. The result is False if a check fails. A segment that differs is uploaded again.
        """
        segment = self.table.by_base.get(base)
        if segment is None:
            return False
        pieces = self._pieces(self.commit_log.path_of(base), segment.size)
        lengths = {DATA: segment.size, CRCS: crcs_length(segment.size)}
        try:
            crc = await self._run(_crc_of, pieces)
            differs = crc != segment.crc
            for ending, length in lengths.items() if early else ():
                differs |= await self._run(self.objects.size, self._name(base, ending)) != length
        except OSError as failure:
            self.counts.failures += 1
            log.warning("cannot compare %s with the local file: %s", self._name(base, DATA), failure)
            return False
        if differs:
            await self._lost(base, "it differs from the local file")
        return not differs

    def report_lost(self, base: int) -> None:
        """Count and log a local segment that is deleted without a copy in the object store."""
        self.counts.lost += 1
        self._swept = False  # an interrupted upload may have left objects
        log.error("%s is deleted although it was never uploaded", self.commit_log.path_of(base))


def _crc_of(pieces: Pieces) -> int:
    deque(pieces, 0)
    return crc32(pieces.crcs())
