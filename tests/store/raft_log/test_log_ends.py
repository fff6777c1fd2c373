"""A member's log at its start: torn tails are truncated, and lost entries are reported.

After any power failure a prefix remains that contains every entry promised as durable.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import START_MS, committed, put, small
from tests.store.raft_log.members import add, again, agree, elect, hand_over, leader, member, raft_log, seen

from cometmq.errors import StoreCorrupt, StoreError
from cometmq.store import ManualClock, MessageStore, truncate_log
from cometmq.store.raft_log import entry_index, is_suspect, remove_suspect
from cometmq.store.raft_log.member_files import RaftLogCheckpoint, read_checkpoint


def filled(root: Path, count: int = 60) -> MessageStore:
    """Write the entries 1 to `count` in several segments; half of them are synced, committed and recorded."""
    store = leader(root)
    for number in range(count):
        add(store, b"%d:" % number + bytes(2500))
        if number + 1 == count // 2:
            store.flusher.flush_now()
            agree(store)
            raft_log(store).save()
    return store


def spoil(store: MessageStore, index: int, *, zeros: bool = False) -> None:
    """Damage an entry in the files of a stopped store; `zeros` also erases all later entries."""
    place = raft_log(store).location_of(index)
    base = place.position - place.position % store.log.segment_size
    path = Path(store.log.path_of(base))
    data = bytearray(path.read_bytes())
    at = place.position - base
    if zeros:
        data[at:] = bytes(len(data) - at)
        for later in store.log.segments:
            if later > base:
                Path(store.log.path_of(later)).unlink()
    else:
        data[at + 300] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("index", [31, 45, 59, 60])
@pytest.mark.parametrize("zeros", [True, False])
def test_what_was_never_synced_may_be_torn(tmp_path: Path, index: int, zeros: bool) -> None:
    store = filled(tmp_path)
    spoil(store, index, zeros=zeros)
    store = again(store, clean=False)
    log = raft_log(store)
    assert (log.last, log.committed, log.synced) == (index - 1, 30, index - 1)
    assert len(seen(store)) == 30
    log.commit_to(index - 1)
    elect(store, 2)
    add(store, b"more")
    agree(store)
    assert seen(again(store))[-1] == b"more"


@pytest.mark.parametrize("index", [30, 31, 45, 60])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("noted", [True, False])
def test_what_was_synced_is_never_cut_off(tmp_path: Path, index: int, zeros: bool, noted: bool) -> None:
    """The synced end is recorded in `checkpoint` or, for later syncs, only in the index."""
    store = leader(tmp_path)
    if not noted:
        store.flusher.request()
        raft_log(store).save()
    store.close()
    store = filled_again(store)
    store.flusher.request()
    if noted:
        raft_log(store).save()
    spoil(store, index, zeros=zeros)
    with pytest.raises(StoreCorrupt, match=f"entry {index} .* is missing"):
        again(store, clean=False)


PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2;n2-127.0.0.1:3"


@pytest.mark.parametrize("index", [1, 5, 31, 60])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_log_with_peers_is_cut_in_front_of_what_is_lost_and_mended_by_them(
    tmp_path: Path, index: int, zeros: bool
) -> None:
    store, peer = (member(tmp_path / name, name=name, d_leger_peers=PEERS) for name in ("n0", "n1"))
    elect(peer, 1)
    for number in range(60):
        add(peer, b"%d:" % number + bytes(2500), queue_id=number % 2)
    hand_over(peer, store)
    for each in (peer, store):
        each.flusher.flush_now()
        agree(each)
        raft_log(each).save()
    spoil(store, index, zeros=zeros)
    for _ in range(2):  # every start has the same result
        store = again(store, clean=False)
        log, directory = raft_log(store), store.config.raft_log_dir
        assert is_suspect(store.disk, directory)
        assert (log.last, log.committed, log.synced) == (index - 1, index - 1, index - 1)
        assert sum(len(seen(store, queue_id=queue)) for queue in range(2)) == index - 1
    hand_over(peer, store)
    store.flusher.flush_now()
    remove_suspect(store.disk, directory)
    for clean in (False, True):
        agree(store)
        assert [seen(store, queue_id=queue) for queue in range(2)] == [
            seen(peer, queue_id=queue) for queue in range(2)
        ]
        store = again(store, clean=clean)
        assert not is_suspect(store.disk, directory)
    assert store.recovered.damage == []
    for each in (store, peer):
        each.close()


def filled_again(store: MessageStore) -> MessageStore:
    store = member(store.config.root)
    elect(store, 2)
    for number in range(60):
        add(store, b"%d:" % number + bytes(2500))
    return store


def test_a_log_from_before_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "commitlog"
    old.mkdir()
    (old / ("0" * 20)).write_bytes(bytes(64 << 10))
    with pytest.raises(StoreError, match="written without raft"):
        member(tmp_path)


def test_a_members_log_is_not_cut_by_hand(tmp_path: Path) -> None:
    store = filled(tmp_path, 10)
    store.close()
    with pytest.raises(StoreError, match="can only be truncated by its group"):
        truncate_log(str(tmp_path), raft_log(store).location_of(5).position, config=store.config)


def test_the_mark_says_how_far_the_log_is(tmp_path: Path) -> None:
    store = filled(tmp_path, 10)
    store.flusher.request()
    add(store, b"x")
    raft_log(store).save()
    assert read_checkpoint(store.disk, store.config.raft_log_dir) == RaftLogCheckpoint(11, 5, 10)
    store.close()
    assert read_checkpoint(store.disk, store.config.raft_log_dir) == RaftLogCheckpoint(11, 5, 11)


# -- power failures --------------------------------------------------------------------------------


class Run:
    """A member on a recording disk: a leader, then a follower with a truncated tail, then a leader again.

    `facts`: the entries that were durable after a number of disk operations, by index.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = RecordingDisk()
        self.facts: list[tuple[int, dict[int, bytes]]] = []
        self.ever: set[tuple[int, bytes]] = set()
        self.now: dict[int, bytes] = {}
        config = small(
            "/store", enable_d_leger_commit_log=True, d_leger_group="g", d_leger_self_id="n0",
            mapped_file_size_commit_log=4096, flush_disk_type="ASYNC_FLUSH",
        )  # fmt: skip
        self.store = MessageStore.open(config, self.disk, ManualClock(START_MS))
        self.term = 0
        for step in (self.lead, self.truncate, self.lead, self.truncate, self.lead):
            step()
        self.store.crash()

    def note(self) -> None:
        synced = {index: data for index, data in self.now.items() if index <= self.log.synced}
        self.facts.append((len(self.disk.history), synced))

    @property
    def log(self):  # type: ignore[no-untyped-def]
        return raft_log(self.store)

    def wrote(self) -> None:
        committed(self.store.commit())
        for index in range(self.log.last + 1):
            if index not in self.now:
                place = self.log.location_of(index)
                self.now[index] = bytes(self.store.log.read(place.position, place.size) or b"")
                self.ever.add((index, self.now[index]))
        self.note()

    def lead(self) -> None:
        self.term += 1
        self.log.lead(self.term)
        self.log.append_own(b"{}")
        self.wrote()
        self.store.flusher.flush_now()
        self.log.commit_to(self.log.last)
        self.note()
        self.log.take_messages()
        for number in range(self.chance.randint(3, 20)):
            for _ in range(self.chance.randint(1, 3)):
                put(self.store, b"%d" % number + bytes(self.chance.randint(0, 900)))
            self.wrote()
            if self.chance.random() < 0.3:
                self.store.flusher.flush_now()
                self.note()
            if self.chance.random() < 0.3 and self.log.synced > self.log.committed:
                self.log.commit_to(self.chance.randint(self.log.committed + 1, self.log.synced))
            if self.chance.random() < 0.15:
                self.log.save()
            if self.chance.random() < 0.1:
                self.store.writer.make_durable()
                self.note()

    def truncate(self) -> None:
        self.log.follow()
        if self.log.last == self.log.committed:
            return
        index = self.chance.randint(self.log.committed + 1, self.log.last)
        self.now = {each: data for each, data in self.now.items() if each < index}
        self.note()  # only this is promised once the truncation begins
        self.log.cut(index)
        self.note()


def promised(run: Run, at: int) -> dict[int, bytes]:
    """Return the entries that must survive a power failure after `at` disk operations.

    A truncation that begins at that operation may have begun.
    """
    found: dict[int, bytes] = {}
    for number, entries in run.facts:
        if number > at:
            break
        found = entries
    return found


def check_image(run: Run, at: int, image: dict[str, bytes | None]) -> None:
    store = MessageStore.open(run.store.config, RecordingDisk(image), ManualClock(START_MS))
    try:
        check_recovered(run, at, store)
    finally:
        store.crash()


def check_recovered(run: Run, at: int, store: MessageStore) -> None:
    log = raft_log(store)
    entries = {}
    for index in range(log.last + 1):
        place = log.location_of(index)
        entries[index] = bytes(store.log.read(place.position, place.size) or b"")
    for index, data in promised(run, at).items():
        assert entries.get(index) == data, f"entry {index} of {log.last} is lost or another one"
    assert set(entries.items()) <= run.ever
    assert log.committed <= log.last
    count = len(seen(store))
    log.commit_to(log.last)
    elect(store, 99)
    add(store, b"more")
    agree(store)
    assert len(seen(store)) > count


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the index use several files while disk images stay small."""
    monkeypatch.setattr(entry_index, "FILE_SIZE", 32 * 16)


@pytest.mark.usefixtures("small_index")
@pytest.mark.parametrize("seed", range(8))
def test_every_image_of_a_power_failure_is_a_prefix_with_all_that_was_synced(seed: int) -> None:
    run = Run(seed)
    chance = random.Random(seed)
    for _ in range(25):
        at = chance.randint(0, len(run.disk.history))
        number = chance.choice((0, 1, *range(4, 14)))
        label, image = CrashPoint(run.disk, at).sampled_image(number, str(seed))
        try:
            check_image(run, at, image)
        except Exception as failure:
            failure.add_note(f"image {label}")
            raise
