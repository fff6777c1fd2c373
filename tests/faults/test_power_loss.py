"""Power failures at every moment of several workloads.

All guaranteed data is there, no other data is, and a second recovery changes nothing. The fault model is that
of `tests.kit.recording_disk`. `COMETMQ_CRASH_IMAGES=100000` tries that many images (2,000 by default),
`COMETMQ_CRASH_SEED=n` tries different ones, and `COMETMQ_CRASH_REPLAY=workload/seed/image` (as printed by a
failure) tries a single image.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults import crash_trial
from tests.faults.crash_model import Wrong, config
from tests.faults.crash_workloads import WORKLOADS
from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import RecordingDisk

from cometmq.errors import StoreError, StoreInUse
from cometmq.store import JsonTable, ManualClock, MessageStore
from cometmq.store.background.derived_writer import DerivedWriter
from cometmq.store.background.retention import Retention
from cometmq.store.background.space_ahead import ZeroAhead
from cometmq.store.base.checkpoint import Checkpoint, CheckpointPosition
from cometmq.store.base.guards import AbortFile
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log import scan as scan_module
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.recovery.recovery import Recovery
from cometmq.store.recovery.recovery_scan import RecoveryScan
from cometmq.store.tables.min_offsets import MinOffsets

IMAGES = int(os.environ.get("COMETMQ_CRASH_IMAGES", "2000"))
FIRST_SEED = int(os.environ.get("COMETMQ_CRASH_SEED", "1"))
REPLAY = os.environ.get("COMETMQ_CRASH_REPLAY", "")
PER_RUN = 250  # images of one run of a workload, before the next seed
PARTS = 3  # tests among which the images of a workload are divided


@pytest.mark.slow("enumerates the crash images of a workload")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(each, marks=[pytest.mark.representative] if each == "synchronous" else [])
        for each in WORKLOADS
    ],
)
def test_every_image_is_recovered_to_what_was_promised(workload: str, part: int) -> None:
    if REPLAY:
        pytest.skip("a single image is replayed")
    due = IMAGES // len(WORKLOADS)
    tried, seed, failures = 0, FIRST_SEED, []
    while tried < due and len(failures) < 5:
        for trial in crash_trial.trials(workload, str(seed), min(PER_RUN, due - tried)):
            tried += 1
            if tried % PARTS != part:
                continue
            try:
                crash_trial.run(trial)
            except Wrong as failure:
                failures.append(str(failure))
                if len(failures) == 5:
                    break
        seed += 1
    assert not failures, "\n\n".join(failures)
    assert tried >= due


@pytest.mark.skipif(not REPLAY, reason="set COMETMQ_CRASH_REPLAY to the label of a failing image")
def test_replay() -> None:
    crash_trial.run(crash_trial.replay(REPLAY))


def test_a_label_builds_the_same_image_again() -> None:
    for workload in ("threaded", "short"):
        for number, trial in enumerate(crash_trial.trials(workload, "1", 60)):
            if number % 13 == 0:
                again = crash_trial.replay(trial.label)
                assert (again.image, again.expected) == (trial.image, trial.expected)


# -- the disk's own rules --------------------------------------------------------------------------


def history() -> RecordingDisk:
    """Two sectors are written, synced and overwritten; a rename replaces the file without a sync."""
    disk = RecordingDisk()
    fd = disk.open("/f", create=True)
    disk.pwrite(fd, b"a" * 1024, 0)
    disk.fdatasync(fd)
    disk.fsync_dir("/")
    disk.pwrite(fd, b"b" * 1024, 0)
    disk.truncate(fd, 2000)
    return disk


def test_sectors_and_lengths_fail_one_by_one() -> None:
    disk = history()
    files = {image["/f"] for _, image in CrashPoint(disk, len(disk.history)).every_image()}
    assert files == {
        (first * 512 + second * 512).ljust(length, b"\0")
        for first in (b"a", b"b")
        for second in (b"a", b"b")
        for length in (1024, 2000)
    }
    assert [image["/f"] for _, image in CrashPoint(disk, 4).every_image()] == [b"a" * 1024]


def test_names_are_there_or_not_until_their_directory_is_synced() -> None:
    disk = history()
    fd = disk.open("/f.tmp", create=True)
    disk.pwrite(fd, b"new", 0)
    disk.fdatasync(fd)
    disk.rename("/f.tmp", "/f")
    at = len(disk.history)
    images = [image for _, image in CrashPoint(disk, at).every_image()]
    assert {image["/f"] for image in images} >= {b"new", b"a" * 1024, b"b" * 1024 + bytes(976)}
    assert any("/f.tmp" in image for image in images)
    disk.fsync_dir("/")
    assert [image for _, image in CrashPoint(disk, at + 1).every_image()] == [{"/": None, "/f": b"new"}]


def test_a_directory_that_was_moved_leaves_nothing_behind() -> None:
    disk = RecordingDisk()
    disk.makedirs("/d/e")
    disk.fsync_dir("/")
    disk.fsync_dir("/d")
    for name in ("kept", "dropped"):
        disk.open(f"/d/e/{name}", create=True)  # names that no sync has made durable
    disk.fsync_dir("/d/e")
    disk.unlink("/d/e/dropped")
    disk.open("/d/e/new", create=True)
    disk.rename("/d/e", "/d/f")
    disk.fsync_dir("/d")
    disk.makedirs("/d/e")
    disk.fsync_dir("/d")
    images = [set(image) for _, image in CrashPoint(disk, len(disk.history)).every_image()]
    assert images == [{"/", "/d", "/d/e", "/d/f", "/d/f/kept", "/d/f/new"}]


def test_a_new_file_is_lost_with_its_directory() -> None:
    disk = RecordingDisk()
    disk.makedirs("/d/e")
    fd = disk.open("/d/e/f", create=True)
    disk.fdatasync(fd)
    disk.fsync_dir("/d/e")
    disk.fsync_dir("/d")
    images = [set(image) for _, image in CrashPoint(disk, len(disk.history)).every_image()]
    assert images == [{"/"}, {"/", "/d", "/d/e", "/d/e/f"}]


# -- planted bugs ----------------------------------------------------------------------------------


class Patch:
    """A replacement of a method by a wrong one. It counts calls: a bug that never runs is not detected."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.calls = 0

    def setattr(self, owner: type, name: str, wrong: Any) -> None:
        function = wrong.fget if isinstance(wrong, property) else wrong

        def counted(*given: Any, **more: Any) -> Any:
            self.calls += 1
            return function(*given, **more)

        self._patch.setattr(owner, name, property(counted) if isinstance(wrong, property) else counted)


def acknowledge_before_the_flush(patch: Patch) -> None:
    patch.setattr(LogFlusher, "wait_for", lambda self, position, waiter: waiter(True))


def flush_only_the_newest_segment(patch: Patch) -> None:
    """An off-by-one error when a segment is full: its end is never synced."""
    right = CommitLog.segments_to_sync
    patch.setattr(CommitLog, "segments_to_sync", lambda self: right(self)[-1:])


def let_go_of_a_segment_filled_during_its_sync(patch: Patch) -> None:
    """A bug that this test once found: a sync was credited with data written after it had begun."""
    right = CommitLog.synced
    patch.setattr(CommitLog, "synced", lambda self, bases, end: right(self, bases, self.end))


def skip_the_crc_in_recovery(patch: Patch) -> None:
    right = scan_module.SegmentScan.__init__

    def wrong(self: scan_module.SegmentScan, *given: Any, check_crc: bool = True, **more: Any) -> None:
        right(self, *given, check_crc=False, **more)

    patch.setattr(scan_module.SegmentScan, "__init__", wrong)


def leave_the_torn_tail(patch: Patch) -> None:
    patch.setattr(Recovery, "_zero_tail", lambda self, base, result: None)


def leave_stale_queue_units(patch: Patch) -> None:
    patch.setattr(ConsumeQueue, "cut", lambda self: False)


def let_records_pass_zeros_on_their_way(patch: Patch) -> None:
    patch.setattr(ZeroAhead, "wait_for_zeros", lambda self, stop: None)


def forget_directory(patch: Patch, name: str) -> None:
    right = RecordingDisk.fsync_dir

    def wrong(self: RecordingDisk, path: str) -> None:
        if not path.endswith(name):
            right(self, path)

    patch.setattr(RecordingDisk, "fsync_dir", wrong)


def forget_the_directory_of_a_new_segment(patch: Patch) -> None:
    forget_directory(patch, "commitlog")


def forget_the_directory_after_a_rename(patch: Patch) -> None:
    forget_directory(patch, "config")


def move_the_checkpoint_first(patch: Patch) -> None:
    right = DerivedWriter.make_durable

    def wrong(self: DerivedWriter, *, slots: bool = True) -> bool:
        self.flusher.flush_now()
        checkpoint = self.checkpoint
        checkpoint.physic_ms = checkpoint.logics_ms = checkpoint.index_ms = self.clock.time_ms() + 10_000
        checkpoint.flush()
        return right(self, slots=slots)

    patch.setattr(DerivedWriter, "make_durable", wrong)


def mark_what_is_only_written(patch: Patch) -> None:
    """The start of the recovery scan is advanced before the sync that must precede it."""
    right = DerivedWriter.make_durable

    def wrong(self: DerivedWriter, *, slots: bool = True) -> bool:
        covered = self.covered()
        self.checkpoint.saved = self.index.checkpoint_position(
            self.commit_log.end, covered.last, covered.queue_ends
        )
        self.checkpoint.flush()
        return right(self, slots=slots)

    patch.setattr(DerivedWriter, "make_durable", wrong)


def trust_the_checkpoint_without_its_margin(patch: Patch) -> None:
    """Queues are assumed to be durable up to the time of the start."""
    patch.setattr(Checkpoint, "min_timestamp", property(lambda self: 1 << 52))


def truncate_one_record_too_many(patch: Patch) -> None:
    right = RecoveryScan._groups  # noqa: SLF001 - the planted bug takes the place of this step

    def wrong(self: RecoveryScan, start: int) -> Any:
        held, result = None, self.result
        for run in right(self, start):
            if held is not None:
                yield held
            held = run
        if held is not None and result.end == held.end:
            *kept, last = held.facts()
            result.end, self.torn = last.position, True
            held = scan_module.RecordGroup.of(kept) if kept else None
        if held is not None:
            yield held

    patch.setattr(RecoveryScan, "_groups", wrong)


def index_before_the_log(patch: Patch) -> None:
    """The index keeps entries of records that the log may have lost."""
    right, right_load = IndexService.resume, IndexService.load

    def wrong(self: IndexService, *, clean: bool, cut_at: int | None = None) -> None:
        right(self, clean=clean)

    def load(
        self: IndexService, *, saved: CheckpointPosition | None = None, **given: Any
    ) -> tuple[list[str], bool]:
        return right_load(self, **given)

    patch.setattr(IndexService, "resume", wrong)
    patch.setattr(IndexService, "load", load)


def declare_an_unclean_stop_clean(patch: Patch) -> None:
    patch.setattr(AbortFile, "exists", lambda self: False)


def forget_the_directory_of_deleted_segments(patch: Patch) -> None:
    """Without the directory's sync, deleted segments may reappear one by one and leave gaps."""

    async def wrong(self: Retention, directory: str, log_min: int = -1) -> bool:
        self.synced_min = max(self.synced_min, log_min)
        return True

    patch.setattr(Retention, "_sync", wrong)


def purge_in_memory_only(patch: Patch) -> None:
    patch.setattr(MinOffsets, "save", lambda self: None)


def keep_floors_above_lost_messages(patch: Patch) -> None:
    """A minimum offset hides the messages that reuse the offsets of lost ones."""

    def wrong(self: MinOffsets, queues: QueueTable) -> None:
        for topic, floors in self.by_topic.items():
            for queue_id, floor in floors.items():
                queue = queues.find_queue(topic, queue_id)
                if queue is not None:
                    queue.min_offset = max(queue.min_offset, floor)

    patch.setattr(MinOffsets, "apply", wrong)


def keep_what_is_behind_a_gap(patch: Patch) -> None:
    """The slave behaves like a master, which has no source for missing data."""
    patch.setattr(Recovery, "_gaps_end_from", lambda self, saved: 1 << 62)


PLANTED: list[tuple[Callable[[Patch], None], tuple[str, ...]]] = [
    (acknowledge_before_the_flush, ("threaded",)),
    (flush_only_the_newest_segment, ("synchronous", "threaded")),
    (let_go_of_a_segment_filled_during_its_sync, ("threaded",)),
    (skip_the_crc_in_recovery, ("asynchronous", "threaded")),
    (leave_the_torn_tail, ("threaded", "short")),
    (leave_stale_queue_units, ("asynchronous", "restarts")),
    (let_records_pass_zeros_on_their_way, ("threaded",)),
    (forget_the_directory_of_a_new_segment, ("synchronous",)),
    (forget_the_directory_after_a_rename, ("deletions", "asynchronous")),
    (move_the_checkpoint_first, ("asynchronous", "synchronous")),
    (mark_what_is_only_written, ("asynchronous", "synchronous")),
    (trust_the_checkpoint_without_its_margin, ("synchronous",)),
    (truncate_one_record_too_many, ("short", "synchronous")),
    (index_before_the_log, ("asynchronous", "short")),
    (declare_an_unclean_stop_clean, ("synchronous", "asynchronous")),
    (forget_the_directory_of_deleted_segments, ("retention",)),
    (purge_in_memory_only, ("retention", "deletions")),
    (keep_floors_above_lost_messages, ("deletions",)),
    (keep_what_is_behind_a_gap, ("slave",)),
]
BOUND = 1500


@pytest.mark.thorough("a check of the test itself")
@pytest.mark.parametrize(("plant", "workloads"), PLANTED, ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_caught(
    plant: Callable[[Patch], None], workloads: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = Patch(monkeypatch)
    plant(patch)
    tried = 0
    for seed in range(1, 10):
        for workload in workloads:
            try:
                for trial in crash_trial.trials(workload, str(seed), 100):
                    tried += 1
                    crash_trial.run(trial)
            except Wrong as failure:
                print(f"{plant.__name__}: caught by image {tried}: {str(failure).splitlines()[0]}")
                assert patch.calls
                return
            if tried > BOUND:
                pytest.fail(f"{tried} images did not show it")
    pytest.fail(f"{tried} images did not show it")


def test_a_fault_of_the_harness_is_no_caught_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    (trial,) = itertools.islice(crash_trial.trials("short", "1", 1), 1)
    for error, seen in ((KeyError, KeyError), (OSError, Wrong), (StoreError, Wrong), (Wrong, Wrong)):
        monkeypatch.setattr(Recovery, "run", raising(error))
        with pytest.raises(seen) as caught:
            crash_trial.run(trial)
        assert type(caught.value) is seen
        assert trial.label in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def raising(error: type[Exception]) -> Callable[..., None]:
    def wrong(*_given: Any, **_more: Any) -> None:
        raise error("planted")

    return wrong


def test_a_table_is_never_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every state during two saves the table is the old or the new one, and after a save the new one."""
    disk = RecordingDisk()
    disk.makedirs("/config")
    disk.fsync_dir("/")
    table = JsonTable("/config/t.json", disk)
    done = [0]
    for version in range(1, 4):
        table.save({"version": version, "text": "x" * 700 * version})
        done.append(len(disk.history))
    point = CrashPoint(disk)
    for at in range(done[0], len(disk.history) + 1):
        point.advance(at)
        oldest = max(version for version, end in enumerate(done) if end <= at)
        for label, image in point.every_image():
            found = JsonTable("/config/t.json", RecordingDisk(image)).load().get("version", 0)
            assert found in (oldest, oldest + 1), label


def test_a_store_on_this_disk_is_a_store() -> None:
    disk = RecordingDisk()
    store = MessageStore.open(config(sync=True), disk, ManualClock())
    store.close()
    assert "/store/abort" not in disk.image()
    store = MessageStore.open(config(sync=True), RecordingDisk(disk.image()), ManualClock())
    assert store.recovered.clean
    store.close()


def test_a_store_that_an_interrupted_test_left_open_excludes_no_store_on_another_disk() -> None:
    disk = RecordingDisk()
    left_open = MessageStore.open(config(sync=True), disk, ManualClock())
    MessageStore.open(config(sync=True), RecordingDisk(), ManualClock()).close()
    with pytest.raises(StoreInUse):
        MessageStore.open(config(sync=True), disk, ManualClock())
    left_open.close()
