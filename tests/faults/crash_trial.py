"""The trial of an image: recovery, stop or crash, another recovery, new messages, another power failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple
from unittest import mock

from tests.faults.crash_model import Entry, Expected, Found, Wrong, config, entry_of, examine
from tests.faults.crash_workloads import SHORT, Worker, work
from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import Image, RecordingDisk
from tests.store.kit import put

from cometmq.errors import StoreError
from cometmq.store import ManualClock, MessageStore
from cometmq.store.recovery import recovery

LATER_MS = 1_800_000_000_000
BROKEN = (Wrong, StoreError, OSError)
"""Exceptions that show a broken guarantee."""


class Trial(NamedTuple):
    """An image and its expectations. `replay` creates it again from `label`."""

    label: str
    image: Image
    expected: Expected
    sync: bool
    slave: bool


def trials(workload: str, seed: str, count: int) -> Iterator[Trial]:
    """Yield `count` images of one run of a workload, spread over its history.

    Of a short history there are states of every moment, and all states of a moment with at most 200.
    """
    worker = work(workload, seed)
    history = len(worker.disk.history)
    point = CrashPoint(worker.disk)
    made = 0
    for at in range(history + 1):
        due = count * (at + 1) // (history + 1) - made
        if not due and workload not in SHORT:
            continue
        point.advance(at)
        expected = worker.ledger.at(at)
        if workload in SHORT and point.count() <= 200:
            images = point.every_image()
        else:
            first = random.Random(f"{seed}:{at}").choice((0, 1, 2, 4, 4, 4, 4, 4, 4, 4))
            images = (point.sampled_image(first + n, seed) for n in range(due))
        for label, image in images:
            made += 1
            yield Trial(f"{workload}/{seed}/{label}", image, expected, worker.sync, worker.slave)


@lru_cache(maxsize=4)
def _worker(workload: str, seed: str) -> Worker:
    return work(workload, seed)


def replay(label: str) -> Trial:
    """Return the trial of a label."""
    workload, seed, place = label.split("/")
    at, picks = place.split(":")
    worker = _worker(workload, seed)
    point = CrashPoint(worker.disk, int(at))
    if picks.startswith("s"):
        _, image = point.sampled_image(int(picks[1:]), seed)
    else:
        image = point.build([int(pick) for pick in picks.split(".")] if picks else [])
    return Trial(label, image, worker.ledger.at(int(at)), worker.sync, worker.slave)


def run(trial: Trial) -> None:
    """Raise Wrong, with the label, if the store breaks a guarantee or fails with an expected error.

    Any other exception is passed on: it is an error of these tests or an error that no recovery may have.
    """
    stores: list[MessageStore] = []
    # Every second trial treats the tiny segments as large ones, within which the recovery scan may begin.
    within = random.Random(f"{trial.label}/start").choice((True, False))

    def open_store(disk: RecordingDisk, slave: bool = False) -> MessageStore:
        stores.append(MessageStore.open(config(trial.sync, slave), disk, ManualClock(LATER_MS)))
        lost = [note for note in stores[-1].recovered.notes if "have lost" in note]
        if lost:
            raise Wrong(f"the checkpoint vouched for units that are not on the device: {lost}")
        return stores[-1]

    try:
        with mock.patch.object(recovery, "_MIN_SEGMENT_BYTES", 0) if within else nullcontext():
            _run(trial, random.Random(trial.label), open_store)
    except BROKEN as failure:
        raise Wrong(f"{failure or repr(failure)}\nimage COMETMQ_CRASH_REPLAY={trial.label}") from failure
    except Exception as failure:
        failure.add_note(f"image COMETMQ_CRASH_REPLAY={trial.label}")
        raise
    finally:
        for store in stores:
            store.crash()


def _run(trial: Trial, chance: random.Random, open_store: Callable[..., MessageStore]) -> None:
    """Run a trial. A slave becomes a master at its second start."""
    disk = RecordingDisk(trial.image)
    store = open_store(disk, trial.slave)
    opened = len(disk.history)
    holes = [damage for damage in store.recovered.damage if disk.facts(damage.path) is None]
    if holes:
        raise Wrong(f"segments are missing in the middle: {holes}")
    if trial.slave and store.recovered.damage:
        raise Wrong(f"a slave has gaps, and its master would never fill them: {store.recovered.damage}")
    first = examine(store, trial.expected)
    _leave(store, chance)
    settled = Expected(
        {position: trial.expected.may[position] for position in first.served},
        set(first.served),
        tables=trial.expected.tables,
    )
    store = open_store(disk)
    again = _with_hidden(settled, trial.expected)
    second = examine(store, again)
    if second != first:
        raise Wrong(f"the second recovery differs:\n{first}\n{second}")
    added = _go_on(store, first, chance)
    done = len(disk.history)
    for entry in added:
        again.may[entry.position] = entry
        again.must.add(entry.position)
        again.gone.discard(entry.position)
    _leave(store, chance)
    store = open_store(disk)
    third = examine(store, again)
    if set(third.served) != set(first.served) | {entry.position for entry in added}:
        raise Wrong(f"after two more sends: {first.served} became {third.served}")
    store.crash()
    if chance.random() < 0.4:
        settled = _with_hidden(settled, trial.expected)
        _fail_again(disk, opened, done, trial, settled, again, chance, open_store)


def _with_hidden(settled: Expected, before: Expected) -> Expected:
    """Return the expectations after a recovery: served records must stay, and all others must not reappear.

    Records of deleted topics stay in the log and may stay in the index.
    """
    dead = (before.gone | before.optional) - settled.must
    return Expected(
        {**settled.may, **{position: before.may[position] for position in dead}},
        set(settled.must),
        gone=dead,
        tables=settled.tables,
        unindexed=before.optional & settled.must,
    )


def _leave(store: MessageStore, chance: random.Random) -> None:
    if chance.random() < 0.5:
        store.close()
    else:
        store.crash()


def _go_on(store: MessageStore, found: Found, chance: random.Random) -> list[Entry]:
    """Send to an existing queue and to a new queue, and flush both."""
    places = [(topic, queue_id, high) for topic, queue_id, _, high in found.queues]
    chosen = [chance.choice(places)] if places else []
    chosen.append(("New", 0, 0))
    added: list[Entry] = []
    for topic, queue_id, offset in chosen:
        before = len(store.disk.history)  # type: ignore[attr-defined]
        body = chance.randbytes(chance.choice((10, 600)))
        appended = put(store, body, topic, queue_id, b"KEYS\x01new", born_timestamp_ms=LATER_MS)
        if appended.queue_offset != offset:
            raise Wrong(f"{topic}/{queue_id} went on at {appended.queue_offset} instead of {offset}")
        if appended.physical_offset < found.end:
            raise Wrong(f"the log went on at {appended.physical_offset}, before its end {found.end}")
        if (error := store.commit().error) is not None:
            raise Wrong(f"a send after recovery: {error}")
        added.append(entry_of(store, before, appended.physical_offset, appended.size, ("new",), 0))
    store.flusher.flush_now()
    return added


def _fail_again(
    disk: RecordingDisk, opened: int, done: int, trial: Trial, settled: Expected, grown: Expected,
    chance: random.Random, open_store: Callable[..., MessageStore],
) -> None:  # fmt: skip
    """Let power fail again: during the first recovery, after it, and after the sends."""
    during, after = chance.randint(0, opened), chance.randint(opened, done)
    between = Expected(dict(grown.may), set(settled.must), set(), grown.gone, settled.tables, grown.unindexed)
    for at, expected in ((during, trial.expected), (after, between), (done, grown)):
        label, image = CrashPoint(disk, at).sampled_image(chance.choice((0, 1, 5, 6)), trial.label)
        try:
            store = open_store(RecordingDisk(image), trial.slave and at == during)
            examine(store, expected)
            store.crash()
        except BROKEN as failure:
            where = "recovering" if at == during else "recovery"
            raise Wrong(f"{failure or repr(failure)} (power failed again at {label}, {where})") from failure
