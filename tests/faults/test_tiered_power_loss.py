"""Power failures during tiered storage: at every moment, readers find all messages, here or there."""

from __future__ import annotations

import pytest
from tests.kit.crash_images import CrashPoint
from tests.kit.object_store import MemoryObjects
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import everything, put_all, run_retention, small
from tests.store.tiered.offload import HOUR, NOON, fill, upload

from cometmq.store import FileFacts, ManualClock, MessageStore

CONFIG = small("/store", tiered_local_reserved_time=1, tiered_reserved_time=24, delete_when="99")
IMAGES = 3


class OldFiles(RecordingDisk):
    """A disk whose files were last written two hours ago."""

    def facts(self, path: str) -> FileFacts | None:
        found = super().facts(path)
        return None if found is None else found._replace(modified_ms=NOON - 2 * HOUR)


class StampedObjects(MemoryObjects):
    """An object store whose objects are known for each moment of the history of a disk."""

    def __init__(self, disk: RecordingDisk) -> None:
        super().__init__()
        self.disk = disk
        self.states: list[tuple[int, dict[str, bytes]]] = []

    def note(self) -> None:
        self.states.append((len(self.disk.history), dict(self.objects)))

    def put(self, name: str, content: object) -> None:
        super().put(name, content)  # type: ignore[arg-type]
        self.note()

    def delete(self, name: str) -> None:
        super().delete(name)
        self.note()

    def at(self, moment: int) -> MemoryObjects:
        """Return the objects at a moment: the oldest state, for which the table must not be too new."""
        objects = MemoryObjects()
        objects.objects = next((dict(state) for at, state in reversed(self.states) if at <= moment), {})
        return objects


@pytest.mark.parametrize("expires", [False, True], ids=["offloaded", "expired"])
def test_after_a_power_failure_at_any_moment_all_messages_are_here_or_there(expires: bool) -> None:
    disk = OldFiles()
    objects = StampedObjects(disk)
    store = MessageStore.open(CONFIG, disk, ManualClock(NOON), objects)
    fill(store, 4)
    put_all(store, [b"the", b"last"])
    assert store.writer.make_durable()
    every = everything(store)
    begin = len(disk.history)
    upload(store)
    assert any("commitlog" in path for path in run_retention(store))
    if expires:
        assert store.tiered is not None
        begin = len(disk.history)
        store.tiered.steady.now_ms = lambda: NOON + 100 * HOUR  # type: ignore[method-assign]
        upload(store)
        run_retention(store)
        assert 0 < len(everything(store)) < len(every)
    end = len(disk.history)
    store.crash()

    point = CrashPoint(disk)
    for at in range(begin, end + 1):
        point.advance(at)
        for number in range(IMAGES):
            label, image = point.sampled_image(number, "tiered")
            there = objects.at(at)
            again = MessageStore.open(CONFIG, OldFiles(image), ManualClock(NOON), there)
            try:
                found = everything(again)
                assert found == every[-len(found) :], label
                assert expires or found == every, label
                upload(again)
            finally:
                again.crash()
            assert again.tiered is not None
            known = again.tiered.table.by_base
            assert there.endings() == dict.fromkeys(known, "crc json log"), label
