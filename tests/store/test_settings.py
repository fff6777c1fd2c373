"""Settings with other values than the default: what each of them changes (storage fact sheet 2, 5, 6, 11)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.store.kit import (
    START_MS,
    committed,
    drop_first_segment,
    everything,
    got,
    open_store,
    put,
    send,
)

from cometmq.protocol.record import decode_record
from cometmq.store import GetStatus, ManualClock, MessageStore

HOUR = 3_600_000
LATE = 1 << 62


def found(store: MessageStore, key: str, topic: str = "T") -> list[bytes]:
    return [decode_record(record).body for record in store.query_by_key(topic, key, 64, 0, LATE)]


def keyed(store: MessageStore, number: int, size: int = 0) -> None:
    send(store, b"%d:" % number + bytes(size), properties=b"KEYS\x01k%d" % number)


class TestIndexSwitchedOff:
    """messageIndexEnable=false stops the indexing of new messages, nothing else."""

    def test_what_was_indexed_is_still_found(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        keyed(store, 1)
        store.close()
        store = open_store(tmp_path, message_index_enable=False)
        keyed(store, 2)
        assert (found(store, "k1"), found(store, "k2")) == ([b"1:"], [])
        store.close()

    def test_no_file_is_made_where_there_is_none(self, tmp_path: Path) -> None:
        for _ in range(2):
            store = open_store(tmp_path, message_index_enable=False)
            keyed(store, 1)
            store.close()
        assert not (tmp_path / "index").exists()
        store = open_store(tmp_path)  # switched on again, and there is none: it is made from the log
        assert found(store, "k1") == [b"1:"] * 2
        store.close()

    def test_it_can_be_switched_while_the_store_runs(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        for number, enabled in enumerate([True, False, True]):
            store.configure(store.config.replace(message_index_enable=enabled))
            keyed(store, number)
        assert [found(store, f"k{number}") for number in range(3)] == [[b"0:"], [], [b"2:"]]
        store.close()
        store = open_store(tmp_path)
        assert [found(store, f"k{number}") for number in range(3)] == [[b"0:"], [], [b"2:"]]
        store.close()

    def test_switched_on_in_a_store_that_began_without(self, tmp_path: Path) -> None:
        store = open_store(tmp_path, message_index_enable=False)
        keyed(store, 0)
        store.configure(store.config.replace(message_index_enable=True))
        keyed(store, 1)
        assert (found(store, "k0"), found(store, "k1")) == ([], [b"1:"])
        store.close()

    def test_a_crash_takes_nothing_from_it_and_adds_nothing(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        for number in range(50):
            keyed(store, number)
        store.configure(store.config.replace(message_index_enable=False))
        keyed(store, 50)
        store.index.write()
        store.crash()
        store = open_store(tmp_path, message_index_enable=False)
        assert not store.recovered.clean
        assert [found(store, f"k{number}") for number in range(51)] == [
            *([b"%d:" % number] for number in range(50)),
            [],
        ]
        store.close()

    def test_its_files_expire_with_the_log(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        for number in range(900):  # of 400 entries a file
            keyed(store, number, 300)
        store.close()
        files = sorted(os.listdir(tmp_path / "index"))
        assert len(files) == 3
        store = open_store(tmp_path, message_index_enable=False)
        while store.log.min_position <= store.index.files[0].end_position:
            drop_first_segment(store, derived=False)
        drop_first_segment(store)
        assert sorted(os.listdir(tmp_path / "index")) == files[1:]
        assert found(store, "k899") == [b"899:" + bytes(300)]
        store.close()

    def test_a_damaged_file_is_not_made_anew(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        keyed(store, 1)
        store.close()
        (path,) = (tmp_path / "index").iterdir()
        os.truncate(path, 10)
        store = open_store(tmp_path, message_index_enable=False)
        assert found(store, "k1") == []
        assert everything(store) == [b"1:"]
        store.close()


def test_a_safe_index_moves_the_start_of_a_recovery_back_to_its_last_full_file(tmp_path: Path) -> None:
    walked = []
    for safe in (False, True):
        root = tmp_path / str(safe)
        clock = ManualClock(START_MS)
        store = open_store(root, clock=clock)
        for number in range(300):
            clock.now_ms += 1000
            keyed(store, number, 1000)
        store.upkeep.settle_all()
        store.checkpoint.mark = None
        store.checkpoint.index_ms = START_MS + 20_000
        store.checkpoint.flush()
        store.crash()
        store = open_store(root, clock=clock, message_index_safe=safe)
        walked.append(store.recovered.records)
        assert [found(store, f"k{number}") for number in (0, 299)] == [
            [b"0:" + bytes(1000)],
            [b"299:" + bytes(1000)],
        ]
        store.close()
    assert walked[0] < 100 < 250 < walked[1]


@pytest.mark.parametrize("checked", [True, False])
def test_a_recovery_that_checks_no_crc_takes_damaged_bodies_for_messages(
    tmp_path: Path, checked: bool
) -> None:
    store = open_store(tmp_path)
    places = [send(store, b"body %d" % number).physical_offset for number in range(3)]
    store.crash()
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[places[1] + 90] ^= 1
    log.write_bytes(data)
    store = open_store(tmp_path, check_crc_on_recover=checked)
    assert len(everything(store)) == (2 if checked else 3)
    assert bool(store.recovered.damage) is checked
    store.close()


class TestRecordsByPosition:
    """Codes 33 and 36 ask for these."""

    def test_a_record_whose_body_is_damaged_is_none(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        first, second = (send(store, body).physical_offset for body in (b"first", b"second"))
        store.close()
        log = tmp_path / "commitlog" / f"{0:020d}"
        data = bytearray(log.read_bytes())
        data[second + 90] ^= 1
        log.write_bytes(data)
        store = open_store(tmp_path)
        assert decode_record(store.lookup(first) or b"").body == b"first"
        assert store.lookup(second) is None
        store.close()

    @pytest.mark.parametrize("away", [-1, 1, 4, 91])
    def test_no_record_begins_beside_one(self, tmp_path: Path, away: int) -> None:
        store = open_store(tmp_path)
        send(store, bytes(100))
        place = send(store, bytes(100)).physical_offset
        assert store.lookup(place) is not None
        assert store.lookup(place + away) is None
        store.close()


class TestBatchLimits:
    """Both ways of reading keep to them: by queue units alone, and record by record."""

    CASES = (
        ({"max_transfer_count_on_message_in_memory": 5}, 1 << 40, 5),
        ({"max_transfer_bytes_on_message_in_memory": 3 * 1095}, 1 << 40, 3),
        ({"max_transfer_bytes_on_message_in_memory": 3 * 1095 - 1}, 1 << 40, 2),
        ({"max_transfer_count_on_message_in_disk": 4}, 0, 4),
        ({"max_transfer_bytes_on_message_in_disk": 6 * 1095}, 0, 6),
        ({"max_transfer_bytes_on_message_in_disk": 6 * 1095 - 1}, 0, 5),
        ({"max_transfer_bytes_on_message_in_disk": 1}, 0, 1),
        # The first 30 of 40 are on the disk; eight of those end the batch whatever memory would allow.
        ({"max_transfer_bytes_on_message_in_disk": 1 << 20}, 10 * 1095, 8),
        (
            {"max_transfer_count_on_message_in_disk": 100, "max_transfer_bytes_on_message_in_disk": 1 << 20},
            0,
            40,
        ),
        # Limits are those of the unit's own place: what is on the disk is taken, what is in memory is not.
        (
            {
                "max_transfer_count_on_message_in_disk": 100,
                "max_transfer_bytes_on_message_in_disk": 1 << 20,
                "max_transfer_count_on_message_in_memory": 20,
            },
            10 * 1095,
            30,
        ),
    )

    @pytest.mark.parametrize("way", ["units", "records", "crc"])
    @pytest.mark.parametrize(("changes", "memory", "count"), CASES)
    def test_a_batch_ends_where_they_say(
        self, tmp_path: Path, changes: dict[str, int], memory: int, count: int, way: str
    ) -> None:
        changes = {"max_transfer_count_on_message_in_memory": 100, **changes}
        store = open_store(
            tmp_path, access_message_in_memory_max_ratio=100, check_crc_on_read=way == "crc", **changes
        )
        store.reader.memory_bytes = memory
        for _ in range(40):
            put(store, bytes(1000 + 3))
        committed(store.commit())
        assert store.commit_log_max == 40 * 1095
        keeps = (lambda _record: True) if way == "records" else None
        answer = got(store.get_messages("T", 0, 0, 64, record_filter=keeps))
        assert (answer.count, answer.next_begin_offset) == (count, count)
        store.close()

    @pytest.mark.parametrize(("size", "scanned"), [(16_000, 800), (800, 40), (20, 32)])
    def test_a_filter_looks_at_so_many_bytes_of_units(self, tmp_path: Path, size: int, scanned: int) -> None:
        store = open_store(
            tmp_path,
            max_filter_message_size=size,
            mapped_file_size_consume_queue=20_000,
            mapped_file_size_commit_log=1 << 20,
        )
        for _ in range(900):
            put(store, b"", tags_code=1)
        committed(store.commit())
        answer = got(store.get_messages("T", 0, 0, 32, filter={2}))
        assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, scanned)
        store.close()
