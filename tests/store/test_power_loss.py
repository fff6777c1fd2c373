"""Power failures: every state of the disk that one may leave, recovered twice, and bugs planted to prove the
eye.

`COMETMQ_CRASH_IMAGES` sets how many images are tried (2,400 by default).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator

import pytest
from tests.store.kit import HOST, START_MS, everything

from cometmq.protocol.record import decode_record
from cometmq.store import ManualClock, MessageStore, StoreConfig
from cometmq.store import recovery as recovery_module
from cometmq.store.consume_queue import FILLER_SIZE
from cometmq.store.disk import OsDisk
from cometmq.store.flush import LogFlusher
from cometmq.testing.crash_disk import CrashDisk, Image

_roots = itertools.count()  # a store that an exception left open holds its root for the rest of the process
IMAGES = int(os.environ.get("COMETMQ_CRASH_IMAGES", "2400"))
QUEUES = 3


def config(root: str) -> StoreConfig:
    return StoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=8192,
        mapped_file_size_consume_queue=160,
        max_hash_slot_num=7,
        max_index_num=30,
        flush_disk_type="SYNC_FLUSH",
    )


class Wrong(AssertionError):
    """An image was recovered to something it must not be."""


class Failures:
    """Runs a workload on a CrashDisk and tries what a failure after each operation may leave."""

    def __init__(self, seed: int, limit: int, samples: int = 2) -> None:
        self.chance = random.Random(seed)
        self.limit = limit
        self.samples = samples
        self.seen: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        self.attempted: set[bytes] = set()
        self.deleted: set[bytes] = set()
        self.disk = CrashDisk()
        self.root = f"/store{next(_roots)}"

    def workload(self) -> None:
        """Sends of all sizes over several segments, checkpoints, a deleted topic, a clean stop, a new
        start."""
        clock = ManualClock(START_MS)
        store = MessageStore.open(config(self.root), self.disk, clock)
        for number in range(34):
            clock.now_ms += 2000
            for part in range(number % 3 + 1):
                body = b"%d.%d:" % (number, part) + b"x" * self.chance.randrange(1, 1800)
                topic = "gone" if number % 5 == 4 else "T"
                self.attempted.add(body)
                store.append(
                    topic, number % QUEUES, body, b"KEYS\x01k%d.%d" % (number, part),
                    born_timestamp_ms=1, born_host=HOST,
                )  # fmt: skip
            bodies = {body for body in self.attempted if body.startswith(b"%d." % number)}
            end = store.commit().end_offset
            store.when_flushed(end, lambda ok, bodies=bodies: self.acknowledge(bodies if ok else set()))
            if number % 6 == 3:
                store.queues.write_dirty()
                store.index.write()
            if number % 9 == 8:
                store.upkeep.settle_all(slots=False)
            if number == 22:
                self.deleted |= {body for body in self.attempted if int(body.split(b".")[0]) % 5 == 4}
                store.delete_topic("gone")
            if number == 27:
                store.close()
                store = MessageStore.open(config(self.root), self.disk, clock)
        store.crash()

    def acknowledge(self, bodies: set[bytes]) -> None:
        self.acknowledged |= bodies
        self.after("acknowledged", "")

    def run(self) -> int:
        """Returns how many different images were tried. Raises Wrong."""
        self.disk.after = self.after
        try:
            self.workload()
        except _EnoughImages:
            pass
        return len(self.seen)

    def after(self, operation: str, path: str) -> None:
        for image in self.disk.crash_images(self.chance, self.samples):
            state = (sorted(image.items()), len(self.acknowledged), len(self.deleted))
            key = hashlib.blake2b(repr(state).encode(), digest_size=16).digest()
            if key in self.seen:
                continue
            self.seen.add(key)
            try:
                check(moved(image, self.root), self.acknowledged - self.deleted, self.attempted)
            except Exception as problem:
                raise Wrong(f"after {operation} {path}, image {len(self.seen)}: {problem!r}") from problem
            if len(self.seen) >= self.limit:
                raise _EnoughImages


class _EnoughImages(Exception):
    pass


def moved(image: Image, root: str) -> Image:
    """The image with `root` as "/store"."""
    return {path.replace(root, "/store", 1): content for path, content in image.items()}


def check(image: Image, acknowledged: set[bytes], attempted: set[bytes]) -> None:
    root = f"/image{next(_roots)}"
    disk = CrashDisk({path.replace("/store", root, 1): content for path, content in image.items()})
    clock = ManualClock(START_MS + 10**9)
    store = MessageStore.open(config(root), disk, clock)
    first = served(store)
    verify(store, first, acknowledged, attempted)
    again = b"999.0:" + b"y" * max(0, stale_record(disk, store) - RECORD_OVERHEAD - 6)
    store.append("T", 0, again, b"", born_timestamp_ms=1, born_host=HOST)
    assert store.commit().error is None
    store.crash()
    store = MessageStore.open(config(root), disk, clock)
    second = served(store)
    assert second.pop(again, None) is not None, "a message sent after the recovery is gone"
    assert second == first, "the second recovery differs from the first"
    store.crash()


RECORD_OVERHEAD = 92  # of a record of topic "T" without properties


def stale_record(disk: CrashDisk, store: MessageStore) -> int:
    """Bytes from the end of the log to what looks like a record behind it; 0 if nothing does. A message
    that fills exactly this space would bring it to life."""
    end = store.commit_log_max
    base = end - end % 8192
    if disk.facts(store.log.path_of(base)) is None:
        return 0
    fd = disk.open(store.log.path_of(base), write=False)
    rest = disk.pread(fd, 8192, end - base)
    disk.close(fd)
    return max(0, rest.find(b"\xda\xa3\x20\xa7") - 4)


def served(store: MessageStore) -> dict[bytes, tuple[str, int, int]]:
    """Body -> (topic, queue id, queue offset) of everything that consumers get, checked against its
    record."""
    found: dict[bytes, tuple[str, int, int]] = {}
    for queue in store.queues:
        everything(store, queue.topic, queue.queue_id)
        for offset, position, size, _ in queue.units(queue.min_offset, queue.max_offset):
            if size == FILLER_SIZE:
                continue  # lost without an acknowledgement, in front of one that is there
            record = store.lookup(position)
            assert record is not None, f"unit {queue.topic}/{queue.queue_id}@{offset} points nowhere"
            assert len(record) == size
            message = decode_record(record, check_crc=True)
            assert (message.topic, message.queue_id, message.queue_offset) == (
                queue.topic,
                queue.queue_id,
                offset,
            )
            assert message.body not in found
            found[bytes(message.body)] = (queue.topic, queue.queue_id, offset)
    return found


def verify(
    store: MessageStore,
    found: dict[bytes, tuple[str, int, int]],
    acknowledged: set[bytes],
    attempted: set[bytes],
) -> None:
    missing = acknowledged - set(found)
    assert not missing, f"acknowledged and lost: {sorted(body[:6] for body in missing)}"
    invented = set(found) - attempted
    assert not invented, f"never sent: {invented}"
    for queue in store.queues:
        order = [body for body, place in found.items() if place[:2] == (queue.topic, queue.queue_id)]
        numbers = [tuple(map(int, body.split(b":")[0].split(b"."))) for body in order]
        assert numbers == sorted(numbers), "order"
    for body, (topic, _, _) in found.items():
        key = "k" + body.split(b":")[0].decode()
        assert len(store.query_by_key(topic, key, 9, 0, 1 << 60)) == 1, f"key {key}"


def test_what_was_acknowledged_survives_every_power_failure() -> None:
    seed = random.randrange(1 << 30)
    tried = 0
    while tried < IMAGES:
        failures = Failures(seed, IMAGES - tried)
        try:
            tried += failures.run()
        except Wrong as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
        assert failures.acknowledged
        seed += 1


# -- planted bugs: each must be seen, or the test above proves nothing ---------------------------


def acknowledge_before_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(self: LogFlusher, _position: int, waiter: Callable[[bool], None]) -> None:
        waiter(True)
        self.flush_now()

    monkeypatch.setattr(LogFlusher, "wait_for", too_early)
    monkeypatch.setattr(LogFlusher, "request", lambda self: None)


def acknowledge_without_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrashDisk, "fdatasync", _only_if(lambda path: "commitlog" not in path))


def forget_the_directory_of_a_new_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CrashDisk.fsync_dir
    monkeypatch.setattr(
        CrashDisk, "fsync_dir", lambda self, path: None if "commitlog" in path else original(self, path)
    )


def move_the_checkpoint_before_the_queues_are_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.store.upkeep.sync_paths", lambda disk, paths, directories=(): None)
    monkeypatch.setattr(recovery_module._StartEarlier, "__init__", _not_raised, raising=False)


def _not_raised(self: object, *_: object) -> None:
    raise AssertionError("the checkpoint promised units that are not there")


def leave_the_torn_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module.Recovery, "_zero_tail", lambda self, base, result: None)
    monkeypatch.setattr(recovery_module.SegmentScan, "_resync", lambda self, at: None)


def serve_bodies_whose_crc_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recovery_module.SegmentScan.__init__

    def careless(self: object, *arguments: object, **more: object) -> None:
        original(self, *arguments, **{**more, "check_crc": False})  # type: ignore[arg-type]

    monkeypatch.setattr(recovery_module.SegmentScan, "__init__", careless)


def lose_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    original = recovery_module.Recovery._records

    def all_but_the_last(
        self: recovery_module.Recovery, start: int, result: recovery_module.Recovered
    ) -> Iterator[object]:
        held = None
        for facts in original(self, start, result):
            if held is not None:
                yield held
            held = facts

    monkeypatch.setattr(recovery_module.Recovery, "_records", all_but_the_last)


def _only_if(allowed: Callable[[str], bool]) -> Callable[[CrashDisk, int], None]:
    original = CrashDisk.fdatasync

    def fdatasync(self: CrashDisk, fd: int) -> None:
        if allowed(self._open[fd][1]):
            original(self, fd)

    return fdatasync


PLANTED = [
    acknowledge_before_the_flush,
    acknowledge_without_a_flush,
    forget_the_directory_of_a_new_segment,
    move_the_checkpoint_before_the_queues_are_synced,
    leave_the_torn_tail,
    serve_bodies_whose_crc_is_wrong,
    lose_the_last_record,
]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Wrong):
        Failures(1, 2500, samples=6).run()


def test_the_recorded_disk_behaves_like_a_real_one(tmp_path: object) -> None:
    """The same workload on both leaves the same files."""
    memory, real = CrashDisk(), OsDisk()
    memory.makedirs(str(tmp_path))
    contents = []
    for disk in (memory, real):
        root = f"{tmp_path}/store"
        store = MessageStore.open(config(root), disk, ManualClock(START_MS))
        for number in range(40):
            store.append(
                "T",
                number % QUEUES,
                bytes(number * 20),
                b"KEYS\x01k%d" % number,
                born_timestamp_ms=1,
                born_host=HOST,
            )
            assert store.commit().error is None
        store.delete_topic("T")
        store.close()
        contents.append(tree(disk, root))
    assert contents[0] == contents[1]
    assert len(contents[0]) > 7


def tree(disk: CrashDisk | OsDisk, root: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in disk.listdir(root):
        path = f"{root}/{name}"
        if disk.is_dir(path):
            found.update(tree(disk, path))
        else:
            fd = disk.open(path, write=False)
            found[path] = disk.pread(fd, 1 << 20, 0)
            disk.close(fd)
    return found
