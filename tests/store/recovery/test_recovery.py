"""Stops and damage of every kind, each with its documented outcome."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import (
    after_crash,
    by_key,
    check_sound,
    committed,
    delete_topic,
    everything,
    finds,
    numbered,
    open_store,
    put,
    quick,
    restarted,
    run_retention,
    send,
    send_all,
)
from tests.store.planted import alter, messages_of, places, snapshot

from cometmq.protocol.record.layout import PREPARED
from cometmq.store import GetStatus, ManualClock, MessageStore

QUEUES = 3


def fill(root: Path, count: int = 300, size: int = 800) -> dict[int, list[bytes]]:
    """Build a store of `count` messages in several segments and stop it cleanly; return bodies by queue."""
    clock = ManualClock()
    store = quick(root, clock)
    sent: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(QUEUES)}
    for number in range(count):
        clock.now_ms += 100
        body = b"%d:" % number + bytes(number % 251 for _ in range(size))
        put(store, body, queue_id=number % QUEUES, properties=b"KEYS\x01k%d" % number)
        sent[number % QUEUES].append(body)
        if number % 5 == 0:
            committed(store.commit())
    committed(store.commit())
    assert len(store.log.segments) > 3
    store.close()
    return sent


def contents(store: MessageStore) -> dict[int, list[bytes]]:
    return {queue_id: everything(store, "T", queue_id) for queue_id in range(QUEUES)}


def unclean(root: Path) -> None:
    (root / "abort").touch()


def segment(root: Path, number: int) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


def end_of_log(root: Path) -> tuple[Path, int]:
    """Return the last segment and the end of its records."""
    last = places(root)[-1]
    return last.path, last.at + last.size


def assert_serves_all(root: Path, sent: dict[int, list[bytes]]) -> MessageStore:
    store = quick(root)
    assert contents(store) == sent
    finds(store, (0, 7, 150, 299))
    assert all(len(sent[queue_id]) == store.max_offset("T", queue_id) for queue_id in range(QUEUES))
    return store


def newest(root: Path, queue_id: int) -> Path:
    return max((root / "consumequeue/T" / str(queue_id)).iterdir())


def index(root: Path) -> Path:
    return next((root / "index").iterdir())


DAMAGE_REPAIRED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda root: None,
    "nothing, unclean": lambda root: None,
    "checkpoint missing, unclean": lambda root: os.unlink(root / "checkpoint"),
    "checkpoint garbage, unclean": lambda root: alter(root / "checkpoint", 0, b"\xff" * 24),
    "checkpoint short, unclean": lambda root: os.truncate(root / "checkpoint", 11),
    "queues missing": lambda root: shutil.rmtree(root / "consumequeue"),
    "queues missing, unclean": lambda root: shutil.rmtree(root / "consumequeue"),
    "one queue missing": lambda root: shutil.rmtree(root / "consumequeue/T/1"),
    "one topic missing": lambda root: shutil.rmtree(root / "consumequeue/T"),
    "a queue's last file missing": lambda root: os.unlink(newest(root, 2)),
    "a queue's last file zeroed": lambda root: alter(newest(root, 2), 0, bytes(2000)),
    "one queue missing, unclean": lambda root: shutil.rmtree(root / "consumequeue/T/1"),
    "index missing": lambda root: shutil.rmtree(root / "index"),
    "index missing, unclean": lambda root: shutil.rmtree(root / "index"),
    "index header garbage": lambda root: alter(index(root), 36, b"\x7f\xff\xff\xff"),
    "index short": lambda root: os.truncate(index(root), 5000),
    "index entries zeroed, unclean": lambda root: alter(index(root), 40 + 400 + 20 * 100, bytes(2000)),
    "index slots zeroed, unclean": lambda root: alter(index(root), 40, bytes(400)),
    "queue file zeroed at its end, unclean": lambda root: alter(newest(root, 2), 0, bytes(2000)),
    "queue file full of garbage, unclean": lambda root: (
        alter(newest(root, 2), 0, b"\x01" * 2000),
        os.unlink(root / "checkpoint"),
    ),
    "queue file short": lambda root: os.truncate(newest(root, 0), 7),
    "reserved segment": lambda root: (root / "commitlog" / f"{1 << 20:020d}").write_bytes(bytes(65536)),
    "half reserved segment, unclean": lambda root: (root / "commitlog" / f"{1 << 20:020d}").touch(),
    "foreign files": lambda root: [
        (root / place / "notes.txt").write_text("x")
        for place in ("commitlog", "consumequeue/T/0", "consumequeue", "index")
    ],
}


@pytest.mark.parametrize("damage", DAMAGE_REPAIRED)
def test_nothing_is_missing_after(tmp_path: Path, damage: str) -> None:
    sent = fill(tmp_path)
    DAMAGE_REPAIRED[damage](tmp_path)
    if "unclean" in damage:
        unclean(tmp_path)
    store = assert_serves_all(tmp_path, sent)
    send(store, b"and on", queue_id=1)
    sent[1].append(b"and on")
    store.crash()
    assert_serves_all(tmp_path, sent).close()
    assert_serves_all(tmp_path, sent).close()


TORN: dict[str, Callable[[Path, int], object]] = {
    "half a record": lambda path, at: alter(
        path, at, struct.pack(">ii", 900, 0xDAA320A7 - (1 << 32)) + b"\x55" * 400
    ),
    "a size and nothing else": lambda path, at: alter(path, at, struct.pack(">i", 900)),
    "garbage": lambda path, at: alter(path, at, os.urandom(3000)),
    "far garbage": lambda path, at: alter(path, at + 9000, b"x"),
    "a huge size": lambda path, at: alter(path, at, b"\x7f\xff\xff\xff\xda\xa3\x20\xa7"),
    "a negative size": lambda path, at: alter(path, at, b"\xff\xff\xff\xff\xda\xa3\x20\xa7"),
    "the end of the file cut off": lambda path, at: os.truncate(path, at),
}


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_tail_is_cut_and_zeroed(tmp_path: Path, torn: str) -> None:
    sent = fill(tmp_path)
    path, at = end_of_log(tmp_path)
    TORN[torn](path, at)
    unclean(tmp_path)
    store = assert_serves_all(tmp_path, sent)
    assert store.recovered.damage == []
    store.crash()
    data = path.read_bytes()
    assert (len(data), data[at:].strip(b"\0")) == (65536, b"")


def test_the_last_record_cut_in_half_is_lost_alone(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    path, at = end_of_log(tmp_path)
    alter(path, at - 300, bytes(300))
    unclean(tmp_path)
    lost = sent[299 % QUEUES].pop()
    store = quick(tmp_path)
    assert contents(store) == sent
    # A consumer may have seen the lost message's offset before the clean stop, so it is not assigned again.
    assert send(store, lost, queue_id=299 % QUEUES).queue_offset == len(sent[299 % QUEUES]) + 1


def test_a_stale_record_behind_the_cut_never_comes_back(tmp_path: Path) -> None:
    """Two records after a torn one would become valid again if new records ended exactly where they begin."""
    store = quick(tmp_path)
    places = [send(store, b"%d" % number + bytes(100)) for number in range(3)]
    store.crash()
    path = segment(tmp_path, 0)
    alter(path, places[1].physical_offset, bytes(places[1].size + places[2].size))
    alter(path, places[2].physical_offset + 20, b"stale bytes, no record")
    store = quick(tmp_path)
    assert send(store, b"n" + bytes(100)).physical_offset == places[1].physical_offset
    store.crash()
    store = quick(tmp_path)
    assert [body[:1] for body in everything(store)] == [b"0", b"n"]


@pytest.mark.parametrize("what", ["body", "magic", "size", "zeros"])
def test_damage_in_the_middle_hides_only_what_it_hit(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = fill(tmp_path)
    store = quick(tmp_path)
    unit = store.queues.get_or_make("T", 1).unit(50)
    assert unit is not None
    store.close()
    position, size, _ = unit
    path = segment(tmp_path, position // 65536)
    at = position % 65536
    alter(path, *{
        "body": (at + 300, b"\xee"),
        "magic": (at + 5, b"\xee"),
        "size": (at, b"\x00\x00\x00\x10"),
        "zeros": (at, bytes(size)),
    }[what])  # fmt: skip
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    unclean(tmp_path)
    store = quick(tmp_path)
    assert [(damage.path, damage.start, damage.stop) for damage in store.recovered.damage] == [
        (str(path), position, position + size)
    ]
    assert f"skipped positions {position} to {position + size}, which contain no valid record" in caplog.text
    del sent[1][50]
    assert contents(store) == sent
    assert store.max_offset("T", 1) == len(sent[1]) + 1
    answer = store.get_messages("T", 1, 50, 1)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 51)
    assert send(store, b"next", queue_id=1).queue_offset == len(sent[1]) + 1
    store.crash()
    store = quick(tmp_path)
    assert everything(store, "T", 1) == [*sent[1], b"next"]


def test_a_missing_segment_costs_its_own_messages_only(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    victim = segment(tmp_path, 1)
    unclean(tmp_path)
    lost = {message.body for _, message in messages_of(victim)}
    victim.unlink()
    store = quick(tmp_path)
    assert contents(store) == {q: [body for body in sent[q] if body not in lost] for q in range(QUEUES)}
    assert 0 < len(lost) < 100


def test_a_truncated_segment_in_the_middle_gets_its_length_back(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    path = segment(tmp_path, 1)
    messages = list(messages_of(path))
    kept = {message.body for _, message in messages[:20]}
    lost = {message.body for _, message in messages[20:]}
    os.truncate(path, messages[20][0])
    unclean(tmp_path)
    store = quick(tmp_path)
    assert path.stat().st_size == 65536
    found = {body for queue in contents(store).values() for body in queue}
    assert found == {body for queue in sent.values() for body in queue} - lost
    assert kept <= found


def test_a_message_whose_header_lies_about_its_queue_offset_is_not_served(tmp_path: Path) -> None:
    store = quick(tmp_path)
    places = [send(store, b"%d" % number) for number in range(5)]
    store.crash()
    alter(segment(tmp_path, 0), places[2].physical_offset + 20, struct.pack(">q", 1 << 40))
    store = quick(tmp_path)
    assert everything(store) == [b"0", b"1", b"3", b"4"]
    assert any("queue offset" in note for note in store.recovered.notes)


def test_recovery_starts_at_the_checkpoint_not_at_the_beginning(tmp_path: Path) -> None:
    sent = fill(tmp_path, 600)
    unclean(tmp_path)
    store = assert_serves_all(tmp_path, sent)
    assert store.recovered.start >= store.log.segments[-1] - 65536
    assert store.recovered.records < 160


def test_a_clean_start_walks_nothing(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    store = quick(tmp_path)
    assert (store.recovered.clean, store.recovered.records) == (True, 0)
    assert contents(store) == sent


def test_a_clean_start_indexes_no_record_again(tmp_path: Path) -> None:
    """The last record of the log has a key but no queue unit."""
    store = quick(tmp_path)
    send(store, sys_flag=PREPARED, properties=b"KEYS\x01k")
    check_sound(restarted(store))


def test_queues_that_point_behind_the_log_are_cut(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    last = segment(tmp_path, -1)
    lost = {message.body for _, message in messages_of(last)}
    last.unlink()
    store = quick(tmp_path)
    assert not store.recovered.clean
    expected = {q: [body for body in sent[q] if body not in lost] for q in range(QUEUES)}
    assert contents(store) == expected
    assert all(store.max_offset("T", q) == len(sent[q]) for q in range(QUEUES))  # no offset is assigned twice
    assert by_key(store, "T", "k299") == []


def test_recovering_twice_is_the_same_as_once(tmp_path: Path) -> None:
    fill(tmp_path)
    path, at = end_of_log(tmp_path)
    alter(path, at, b"\x55" * 500)
    unclean(tmp_path)
    quick(tmp_path).crash()
    once = snapshot(tmp_path)
    quick(tmp_path).crash()
    assert once == snapshot(tmp_path)


def test_an_empty_store_can_be_opened_again_and_again(tmp_path: Path) -> None:
    for stop in ("close", "crash", "close", "crash"):
        store = quick(tmp_path)
        assert (store.log.min_position, store.log.end, store.queues.topics()) == (0, 0, [])
        getattr(store, stop)()
    store = quick(tmp_path)
    send(store, b"at last")
    assert everything(store) == [b"at last"]


@pytest.mark.parametrize("deleted_again", [False, True])
def test_the_end_of_a_topic_that_was_created_again_is_its_own(tmp_path: Path, deleted_again: bool) -> None:
    """The clean stop recorded the end of the new topic; a later deletion makes that end invalid."""
    store = open_store(tmp_path)
    send(store, topic="A")
    delete_topic(store, "A")
    send(store, topic="A")
    store = restarted(store)
    if deleted_again:
        delete_topic(store, "A")
    send_all(store, [bytes(20_000)] * 4, "B")
    assert store.writer.make_durable(slots=False)
    for path in (tmp_path / "commitlog").iterdir():
        os.utime(path, (1, 1))
    store.retention.delete_now()
    while run_retention(store):
        pass
    store.crash()
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path)
    assert store.max_offset("A", 0) == (0 if deleted_again else 1)
    store.close()


def test_deleted_messages_stay_deleted_and_do_not_hide_new_ones(tmp_path: Path) -> None:
    store = quick(tmp_path)
    for number in range(5):
        send(store, b"old %d" % number, topic="again")
        send(store, b"old %d" % number, topic="gone")
    delete_topic(store, "again")
    delete_topic(store, "gone")
    send(store, b"new", topic="again")
    for _ in range(2):
        store.crash()
        shutil.rmtree(tmp_path / "consumequeue")
        store = quick(tmp_path)
        assert (everything(store, "again"), store.queues.topics()) == ([b"new"], ["again"])


@pytest.mark.parametrize("again", [restarted, after_crash])
def test_index_files_of_a_clock_that_was_set_back_are_kept(
    tmp_path: Path, again: Callable[..., MessageStore], caplog: pytest.LogCaptureFixture
) -> None:
    """A file does not count as damaged because its end time precedes its begin time."""
    clock = ManualClock()
    store = quick(tmp_path, clock)
    for number in range(600):  # a file has 399 entries
        if number in (200, 500):
            clock.now_ms -= 3_600_000
        send(store, b"x", properties=b"KEYS\x01k%d" % number)
    store.index.write()
    names = [file.path for file in store.index.files]
    assert [file.end_ms < file.begin_ms for file in store.index.files] == [True, True]
    store = again(store, None, clock)
    assert "damaged" not in caplog.text
    assert [file.path for file in store.index.files] == names
    finds(store, (0, 199, 200, 399, 599))
    check_sound(store)


def test_a_key_is_found_by_its_time_after_the_clock_was_set_back(tmp_path: Path) -> None:
    clock = ManualClock()
    store = quick(tmp_path, clock, max_hash_slot_num=1)  # puts all entries into one chain
    times = []
    for number in range(600):
        clock.now_ms += -3_600_000 if number in (200, 500) else 1000
        times.append(clock.now_ms)
        send(store, b"x", properties=b"KEYS\x01k%d" % number)
    for number in (100, 199, 450, 499):
        found = by_key(store, "T", f"k{number}", 9, times[number] - 2000, times[number] + 2000)
        assert len(found) == 1, number


def test_a_key_is_found_by_its_time_although_the_clock_steps_back_a_little(tmp_path: Path) -> None:
    clock = ManualClock()
    store = quick(tmp_path, clock, max_hash_slot_num=1, max_index_num=21)  # one chain, 20 entries per file
    times = []
    for number in range(60):
        clock.now_ms += -5000 if number in (1, 10, 20, 35) else 700
        times.append(clock.now_ms)
        send(store, b"x", properties=b"KEYS\x01k%d" % number)
        assert len(by_key(store, "T", f"k{number}", 9, clock.now_ms - 3_600_000, clock.now_ms)) == 1
    for number, at in enumerate(times):
        assert len(by_key(store, "T", f"k{number}", 9, at, at)) == 1, number
        for begin, end in ((at - 10_000, at - 1), (at + 1, at + 10_000)):
            assert by_key(store, "T", f"k{number}", 9, begin, end) == []
    clock.now_ms -= 86_400_000
    send(store, b"x", properties=b"KEYS\x01k")
    assert len(by_key(store, "T", "k", 9, clock.now_ms, clock.now_ms)) == 1


def test_a_clock_far_behind_the_newest_index_file_is_no_trouble(tmp_path: Path) -> None:
    clock = ManualClock()
    store = quick(tmp_path, clock)
    for number in range(1000):
        clock.now_ms -= 86_400_000
        send(store, b"x", properties=b"KEYS\x01k%d" % number)
    finds(store, [999])
    names = [path.name for path in sorted((tmp_path / "index").iterdir())]
    assert len(names) == len(store.index.files) == 3
    assert names == [os.path.basename(file.path) for file in store.index.files]


LARGE = {"mapped_file_size_commit_log": 1 << 20, "mapped_file_size_consume_queue": 20 * 2000}


@pytest.fixture
def large_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat segments of 1 MiB like those of 1 GiB: the recovery scan may begin within them."""
    monkeypatch.setattr("cometmq.store.recovery.recovery._MIN_SEGMENT_BYTES", 0)


def killed_behind_a_checkpoint(root: Path) -> dict[int, list[bytes]]:
    """Kill a store with 1,000 messages, all in the files, and a checkpoint after the first 901."""
    clock = ManualClock()
    store = quick(root, clock, **LARGE)
    sent: dict[int, list[bytes]] = {queue_id: [] for queue_id in range(QUEUES)}
    for number in range(1000):
        clock.now_ms += 1000
        body = b"%d" % number
        send(store, body, queue_id=number % QUEUES, properties=b"KEYS\x01k%d" % number)
        sent[number % QUEUES].append(body)
        if number == 900:
            assert store.writer.make_durable(slots=False)
    store.queues.write_dirty()
    store.index.write()
    store.crash()
    return sent


@pytest.mark.usefixtures("large_segments")
def test_after_an_unclean_stop_only_what_follows_the_checkpoint_is_walked(tmp_path: Path) -> None:
    sent = killed_behind_a_checkpoint(tmp_path)
    store = quick(tmp_path, **LARGE)
    assert contents(store) == sent
    assert store.recovered.records == 99
    finds(store, (0, 500, 896, 900, 901, 999))
    store.crash()  # data that the recovery made durable is not scanned again
    store = quick(tmp_path, **LARGE)
    assert contents(store) == sent
    assert store.recovered.records == 0


@pytest.mark.usefixtures("large_segments")
@pytest.mark.parametrize("written_ahead", [False, True])
def test_slots_of_the_index_are_chained_anew_from_where_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_ahead: bool
) -> None:
    """With `written_ahead` the slots contain dropped entries, which look-ups must not follow."""
    monkeypatch.setattr("cometmq.store.derived.index_service._MAX_ENTRIES_WITHOUT_SLOTS", 10)
    monkeypatch.setattr("cometmq.store.derived.index_file._MAX_CHECKED_ENTRIES", 0)
    clock = ManualClock()
    sizes = {**LARGE, "max_index_num": 5000, "max_hash_slot_num": 97}
    store = quick(tmp_path, clock, **sizes)
    for number in range(1000):
        clock.now_ms += 1000
        send(store, b"x", properties=b"KEYS\x01k%d" % number)
        if number == 500 or (number == 950 and written_ahead):
            store.index.index_waiting_keys()
            for _ in store.index.write_slots():
                pass
        if number == 900:
            assert store.writer.make_durable(slots=False)
    store.index.write()
    store.crash()
    mark = store.checkpoint.saved
    assert mark is not None
    assert (mark.index_slots, mark.index_count) == (502, 902)
    store = quick(tmp_path, clock, **sizes)
    assert store.recovered.records == 99
    finds(store, range(1000))


def lose_the_mark(root: Path) -> None:
    alter(root / "checkpoint", 64 + 47, b"\x07")


def cut_the_log_before_the_mark(root: Path) -> None:
    alter(segment(root, 0), 5000, bytes((1 << 20) - 5000))


def let_apache_move_the_checkpoint(root: Path) -> None:
    path = root / "checkpoint"
    alter(path, 0, struct.pack(">q", struct.unpack_from(">q", path.read_bytes())[0] + 1))


@pytest.mark.usefixtures("large_segments")
@pytest.mark.parametrize(
    "change", [lose_the_mark, cut_the_log_before_the_mark, let_apache_move_the_checkpoint]
)
def test_a_mark_that_does_not_hold_is_not_followed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    sent = killed_behind_a_checkpoint(tmp_path)
    change(tmp_path)
    store = quick(tmp_path, **LARGE)
    kept = contents(store)
    assert store.recovered.start == 0
    if change is cut_the_log_before_the_mark:
        assert store.recovered.end < 5000
        assert all(kept[queue_id] == sent[queue_id][: len(kept[queue_id])] for queue_id in sent)
    else:
        assert kept == sent


@pytest.mark.usefixtures("large_segments")
def test_a_queue_that_lacks_what_the_checkpoint_covers_is_built_anew(tmp_path: Path) -> None:
    sent = killed_behind_a_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue" / "T" / "1")
    store = quick(tmp_path, **LARGE)
    assert contents(store) == sent


@pytest.mark.usefixtures("large_segments")
@pytest.mark.parametrize("lost", ["the newest", "its end"])
def test_an_index_that_lacks_what_the_checkpoint_covers_is_built_anew(tmp_path: Path, lost: str) -> None:
    sent = killed_behind_a_checkpoint(tmp_path)
    path = max((tmp_path / "index").iterdir())
    if lost == "the newest":
        path.unlink()
    else:
        alter(path, 36, struct.pack(">i", 3))
    store = quick(tmp_path, **LARGE)
    assert contents(store) == sent
    finds(store, range(0, 1000, 7))


@pytest.mark.usefixtures("large_segments")
def test_a_clock_that_steps_back_does_not_make_new_messages_look_durable(tmp_path: Path) -> None:
    clock = ManualClock()
    store = quick(tmp_path, clock, mapped_file_size_commit_log=1 << 20)
    for number in range(50):
        clock.now_ms += 1000
        send(store, b"%d" % number)
    assert store.writer.make_durable(slots=False)
    clock.now_ms -= 3_600_000
    for number in range(50, 90):
        clock.now_ms += 1000
        send(store, b"%d" % number, properties=b"KEYS\x01k%d" % number)
    assert store.checkpoint.min_timestamp < clock.now_ms - 40_000
    store.queues.write_dirty()  # units may reach the files before a checkpoint covers them
    store.crash()
    store = quick(tmp_path, clock, mapped_file_size_commit_log=1 << 20)
    assert everything(store) == numbered(90)
    finds(store, range(50, 90))


@pytest.mark.parametrize("clean", [True, False])
def test_a_lower_maximum_size_loses_no_message_that_was_larger(tmp_path: Path, clean: bool) -> None:
    files = {"mapped_file_size_commit_log": 16 << 20}
    store = open_store(tmp_path, max_message_size=12 << 20, **files)
    sent = [send(store, bytes([65 + n]) * (5 << 20)) for n in range(4)]
    store.close()
    if not clean:
        unclean(tmp_path)
    store = open_store(tmp_path, max_message_size=1000, **files)
    assert store.recovered.damage == []
    assert [body[:1] for body in everything(store, "T", 0)] == [b"A", b"B", b"C", b"D"]
    assert all(store.lookups.record_at(each.physical_offset) for each in sent)


def test_a_body_full_of_old_records_does_not_slow_the_walk(tmp_path: Path) -> None:
    """Each embedded record contains another position, so none is read because of its size field."""
    files = {"mapped_file_size_commit_log": 16 << 20}
    store = open_store(tmp_path / "a", **files)
    for _ in range(8):
        send(store, bytes(1 << 20))
    store.close()
    log = (tmp_path / "a" / "commitlog" / f"{0:020d}").read_bytes()
    heads = b"".join(log[at : at + 200] for at in range(0, 8 << 20, 1 << 16))
    store = open_store(tmp_path / "b", **files)
    send(store, log[:200] * 1000 + heads)
    send(store, b"last")
    store.close()
    alter(segment(tmp_path / "b", 0), 4, b"XXXX")
    unclean(tmp_path / "b")
    disk = FaultyDisk(really_sync=False)
    store = open_store(tmp_path / "b", disk, **files)
    assert everything(store, "T", 0) == [b"last"]
    assert disk.calls["pread"] < 60


def test_an_empty_log_beside_full_queues_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    for path in (tmp_path / "commitlog").iterdir():
        path.rename(tmp_path / path.name)
    quick(tmp_path).close()
    assert "the queues lose 300 messages (is its disk mounted?)" in caplog.text
