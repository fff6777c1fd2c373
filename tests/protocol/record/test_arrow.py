"""The column decoder returns the content of the records, for any mixture of layouts, and tolerates bad ones.

Records are built here by the layout's table and not by the codec, so that both are checked against the
format.
"""

from __future__ import annotations

import struct
import tarfile
import zlib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.protocol.properties import columns as columnar_properties
from cometmq.protocol.record.arrow import (
    COLUMNS,
    MAX_RAW_BYTES,
    ColumnDecoder,
    Decoded,
    Origin,
    UnknownColumnError,
    arrow_schema,
)
from cometmq.protocol.record.one import decode_record, record_starts

V1, V2 = 0xDAA320A7, 0xDAA320AB


@dataclass(frozen=True)
class Rec:
    """The fields of a record; hosts are (address, port)."""

    topic: str = "TopicTest"
    body: bytes = b"Hello"
    properties: bytes = b"KEYS\x01k1\x02TAGS\x01TagA"
    queue_id: int = 3
    flag: int = 0
    queue_offset: int = 7
    physical_offset: int = 1073742000
    sys_flag: int = 0
    born: tuple[str, int] = ("192.168.0.10", 50000)
    store: tuple[str, int] = ("192.168.0.10", 10911)
    born_ms: int = 1700000000000
    store_ms: int = 1700000000005
    reconsume_times: int = 0
    prepared: int = 0
    magic: int = V1
    crc: int | None = None
    plain: bytes | None = field(default=None, compare=False)  # the inflated body, if it is compressed

    @property
    def flags(self) -> int:
        v6 = [0x10 * (":" in self.born[0]), 0x20 * (":" in self.store[0])]
        return self.sys_flag | v6[0] | v6[1]

    def encode(self) -> bytes:
        def host(value: tuple[str, int]) -> bytes:
            return ip_address(value[0]).packed + struct.pack(">i", value[1])

        topic = self.topic.encode()
        crc = zlib.crc32(self.body) & 0x7FFFFFFF if self.crc is None else self.crc
        rest = (
            struct.pack(">Iiiiqqiq", self.magic, crc, self.queue_id, self.flag, self.queue_offset,
                        self.physical_offset, self.flags, self.born_ms)
            + host(self.born) + struct.pack(">q", self.store_ms) + host(self.store)
            + struct.pack(">iqi", self.reconsume_times, self.prepared, len(self.body)) + self.body
            + struct.pack(">B" if self.magic == V1 else ">h", len(topic)) + topic
            + struct.pack(">h", len(self.properties)) + self.properties
        )  # fmt: skip
        return struct.pack(">i", 4 + len(rest)) + rest

    def pairs(self) -> dict[str, str]:
        found = {}
        for piece in self.properties.decode().split("\x02"):
            parts = piece.split("\x01", 1)
            if len(parts) == 2 and all(parts):
                found[parts[0]] = parts[1]
        return found

    def row(self, broker_name: str) -> dict[str, Any]:
        """Return the row of the record by the definition of the columns."""
        pairs = self.pairs()

        def host(value: tuple[str, int]) -> str:
            shown = str(ip_address(value[0]))
            return f"[{shown}]:{value[1]}" if ":" in shown else f"{shown}:{value[1]}"

        offset_id = (
            (ip_address(self.store[0]).packed + struct.pack(">iq", self.store[1], self.physical_offset))
            .hex()
            .upper()
        )
        return {
            "topic": self.topic,
            "broker_name": broker_name,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "physical_offset": self.physical_offset,
            "msg_id": pairs.get("UNIQ_KEY", offset_id),
            "tags": pairs.get("TAGS"),
            "keys": pairs.get("KEYS"),
            "body": self.body if self.plain is None else self.plain,
            "properties": pairs,
            "flag": self.flag,
            "sys_flag": self.flags,
            "born_timestamp": datetime.fromtimestamp(self.born_ms / 1000, UTC),
            "born_host": host(self.born),
            "store_timestamp": datetime.fromtimestamp(self.store_ms / 1000, UTC),
            "store_host": host(self.store),
            "reconsume_times": self.reconsume_times,
            "prepared_transaction_offset": self.prepared,
            "body_crc": zlib.crc32(self.body) & 0x7FFFFFFF,
            "store_size": len(self.encode()),
            "offset_msg_id": offset_id,
        }


def decompress(sys_flag: int, body: bytes) -> bytes:
    assert sys_flag & 1
    return zlib.decompress(body)


def decode(
    records: list[Rec] | bytes, columns: list[str] | None = None, **options: Any
) -> tuple[list[dict[str, Any]], list[Any]]:
    buffer = records if isinstance(records, bytes) else b"".join(record.encode() for record in records)
    starts, end = record_starts(buffer)
    assert end == len(buffer)
    decoder = ColumnDecoder(arrow_schema(columns), broker_name="broker-a", decompress=decompress, **options)
    decoded = alone(decoder, buffer, starts)
    decoded.batch.validate(full=True)
    rows = decoded.batch.to_pylist(maps_as_pydicts="strict")
    return rows, decoded.bad


def alone(decoder: ColumnDecoder, buffer: bytes | bytearray, starts: list[int]) -> Decoded:
    """Decode records that fit into a single batch."""
    (decoded,) = decoder.decode(buffer, starts)
    return decoded


def packed(body: bytes, **fields: Any) -> Rec:
    return Rec(body=zlib.compress(body), plain=body, sys_flag=0x301, **fields)


COMMON = Rec()
MIXTURE = [
    COMMON,
    Rec(born=("2001:db8::1", 50000)),
    Rec(store=("fd00::2", 10911), queue_offset=8),
    Rec(born=("2001:db8::1", 1), store=("fd00::2", 10911), body=b"", properties=b""),
    Rec(magic=V2, topic="t" * 200),
    packed(b"squeezed" * 100, queue_offset=9),
    Rec(properties=b"UNIQ_KEY\x01FD0001\x02WAIT\x01true\x02TAGS\x01b\x02CLUSTER\x01c\x02WAIT\x01false"),
    Rec(properties=b"TAGS\x01closed\x02"),
    Rec(properties="clé\x01größe\x02订单\x01\U0001f600".encode()),
    Rec(properties=b"a\x01b\x01c\x02KEYS\x01k"),
    Rec(properties=b"novalue\x02x\x01\x02\x01y\x02KEYS\x01k\x02\x02"),
    Rec(flag=-5, reconsume_times=3, prepared=2**40, sys_flag=8, body=bytes(range(256))),
]


class TestColumns:
    def test_the_worked_example_of_the_format(self) -> None:
        example = bytes.fromhex(
            "0000007adaa320a777d189820000000300000000000000000000000700000000"
            "400000b0000000000000018bcfe56800c0a8000a0000c3500000018bcfe56805"
            "c0a8000a00002a9f0000000000000000000000000000000548656c6c6f09546f"
            "7069635465737400114b455953016b3102544147530154616741"
        )
        rows, bad = decode(example)
        assert (rows, bad) == ([COMMON.row("broker-a")], [])
        assert rows[0]["msg_id"] == "C0A8000A00002A9F00000000400000B0"
        assert rows[0]["body_crc"] == 0x77D18982

    def test_every_layout_side_by_side(self) -> None:
        rows, bad = decode(MIXTURE)
        assert bad == []
        assert rows == [record.row("broker-a") for record in MIXTURE]

    @pytest.mark.parametrize("column", list(COLUMNS))
    def test_each_column_alone_is_what_it_is_among_all(self, column: str) -> None:
        rows, _ = decode(MIXTURE, [column])
        assert rows == [{column: record.row("broker-a")[column]} for record in MIXTURE]

    def test_names_in_camel_case_and_any_order(self) -> None:
        schema = pa.schema([("storeTimestamp", COLUMNS["store_timestamp"]), ("queueId", pa.int32())])
        batch = alone(ColumnDecoder(schema), COMMON.encode(), [0]).batch
        assert batch.schema.equals(schema)
        assert batch.column("queueId").to_pylist() == [3]

    @pytest.mark.parametrize(
        "field",
        [
            ("colour", pa.int32()),
            ("queue_id", pa.int64()),
            ("body", pa.string()),
            ("properties", pa.string()),
        ],
    )
    def test_a_column_that_records_do_not_have_is_named(self, field: tuple[str, pa.DataType]) -> None:
        with pytest.raises(UnknownColumnError, match=field[0]):
            ColumnDecoder(pa.schema([field]))

    def test_no_records_give_an_empty_batch_of_the_schema(self) -> None:
        decoded = alone(ColumnDecoder(arrow_schema()), b"", [])
        assert decoded.batch.num_rows == 0
        assert decoded.batch.schema.equals(arrow_schema())

    def test_bodies_stay_as_stored_without_a_decompressor(self) -> None:
        record = packed(b"x" * 500)
        batch = alone(ColumnDecoder(arrow_schema(["body"])), record.encode(), [0]).batch
        assert batch.column(0).to_pylist() == [record.body]

    def test_a_result_does_not_hold_on_to_the_buffer(self) -> None:
        buffer = bytearray(COMMON.encode())
        batch = alone(ColumnDecoder(arrow_schema()), buffer, [0]).batch
        expected = batch.to_pylist()
        buffer[:] = bytes(len(buffer))
        assert batch.to_pylist() == expected


def test_what_apache_wrote_comes_out_as_the_record_codec_reads_it() -> None:
    """Both decoders of this project agree on every field of a whole commit log of Apache's broker 4.9.7."""
    with tarfile.open(Path(__file__).parents[2] / "data" / "store-4.9.7.tar.gz") as archive:
        member = archive.extractfile("commitlog/00000000000000000000")
        assert member is not None
        log = member.read()
    starts, _ = record_starts(log)
    decoded = alone(ColumnDecoder(arrow_schema()), log, starts)
    assert decoded.bad == []
    assert len(starts) > 20
    for start, row in zip(starts, decoded.batch.to_pylist(maps_as_pydicts="strict"), strict=True):
        message = decode_record(log, start)
        assert (row["topic"], row["queue_id"], row["queue_offset"]) == (
            message.topic, message.queue_id, message.queue_offset
        )  # fmt: skip
        assert row["body"] == bytes(message.body)
        assert row["properties"] == message.properties
        assert (row["msg_id"], row["offset_msg_id"]) == (message.msg_id, message.offset_msg_id)
        assert (row["born_host"], row["store_host"]) == (message.born_host, message.store_host)
        assert (row["flag"], row["sys_flag"], row["body_crc"]) == (
            message.flag, message.sys_flag, message.body_crc
        )  # fmt: skip
        assert row["store_timestamp"].timestamp() * 1000 == pytest.approx(
            message.store_timestamp_ms, abs=0.01
        )
        assert (row["physical_offset"], row["store_size"]) == (message.physical_offset, message.store_size)


class TestBadRecords:
    def test_a_flipped_body_is_left_out_and_named(self) -> None:
        wrong = replace(COMMON, body=b"Jello", crc=0x77D18982, queue_offset=8)
        rows, bad = decode([COMMON, wrong, COMMON])
        assert len(rows) == 2
        assert [(item.stage, item.queue_id, item.queue_offset, item.raw) for item in bad] == [
            ("crc", 3, 8, wrong.encode())
        ]
        assert len(decode([COMMON, wrong], check_crc=False)[0]) == 2
        assert len(decode([COMMON, wrong], ["queue_offset", "tags"])[0]) == 2  # the body is not requested

    def test_a_body_that_cannot_be_decompressed(self) -> None:
        broken = Rec(body=b"not zlib", sys_flag=0x301, queue_offset=99)
        rows, bad = decode([packed(b"good"), broken, COMMON])
        assert [row["body"] for row in rows] == [b"good", b"Hello"]
        assert [(item.stage, item.queue_offset) for item in bad] == [("body", 99)]

    @pytest.mark.parametrize(
        ("record", "problem"),
        [(Rec(properties=b"TAGS\x01\xff\xfe"), "properties"), (Rec(properties=b"\xc3\x01x"), "properties")],
    )
    def test_text_that_is_not_utf8(self, record: Rec, problem: str) -> None:
        rows, bad = decode([COMMON, record, Rec(properties="ä\x01ö".encode())])
        assert len(rows) == 2
        assert [(item.stage, problem in item.problem) for item in bad] == [("text", True)]

    def test_a_topic_that_is_not_utf8(self) -> None:
        data = COMMON.encode().replace(b"TopicTest", b"Topic\xff\xfest")
        rows, bad = decode(COMMON.encode() + data)
        assert len(rows) == 1
        assert "topic" in bad[0].problem

    @pytest.mark.parametrize("position", [84, 93, 103, 104])  # the lengths of body, topic and properties
    @pytest.mark.parametrize("value", [0x00, 0x7F, 0x80, 0xFF])
    def test_lengths_that_do_not_add_up(self, position: int, value: int) -> None:
        data = bytearray(COMMON.encode())
        right = data[position] == value
        data[position] = value
        rows, bad = decode(bytes(data) + COMMON.encode(), check_crc=False)
        assert [item.stage for item in bad] == ([] if right else ["layout"])
        assert len(rows) == 2 - len(bad)

    def test_every_byte_flipped_is_survived(self) -> None:
        good = b"".join(record.encode() for record in MIXTURE[:4])
        decoder = ColumnDecoder(arrow_schema(), decompress=decompress)
        starts, _ = record_starts(good)
        for position in range(len(good)):
            data = bytearray(good)
            data[position] ^= 0xFF
            decoded = alone(decoder, bytes(data), starts)
            assert decoded.batch.num_rows + len(decoded.bad) == len(starts)
            decoded.batch.validate(full=True)

    def test_what_is_kept_of_a_large_bad_record_is_bounded(self) -> None:
        _, bad = decode([Rec(body=b"x" * 200_000, crc=1)])
        assert len(bad[0].raw) == MAX_RAW_BYTES

    def test_a_start_too_near_the_end(self) -> None:
        data = COMMON.encode()
        decoded = alone(ColumnDecoder(arrow_schema()), data, [0, len(data) - 5])
        assert decoded.batch.num_rows == 1
        assert decoded.bad[0].queue_offset is None

    @pytest.mark.parametrize(
        ("times", "column"),
        [
            ({"born_ms": 2**62}, "born_timestamp"),
            ({"born_ms": -(2**63)}, "born_timestamp"),
            ({"store_ms": 253_370_764_800_000}, "store_timestamp"),
            ({"store_ms": -62_104_060_800_001, "born": ("2001:db8::1", 1)}, "store_timestamp"),
        ],
    )
    def test_times_that_cannot_be(self, times: dict[str, Any], column: str) -> None:
        rows, bad = decode([COMMON, replace(COMMON, queue_offset=8, **times)])
        assert [row["queue_offset"] for row in rows] == [7]
        assert [(item.stage, item.queue_offset) for item in bad] == [("time", 8)]
        assert column in bad[0].problem
        assert len(decode([replace(COMMON, **times)], ["body"])[0]) == 1  # the times are not requested

    @pytest.mark.parametrize("ms", [-62_104_060_800_000, -1, 0, 253_370_764_799_999])
    def test_times_that_can_be(self, ms: int) -> None:
        rows, bad = decode([replace(COMMON, born_ms=ms, store_ms=ms)])
        assert bad == []
        time = rows[0]["born_timestamp"]
        assert time == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
        for hours in (-23, 23):  # as `collect()` converts times to the caller's zone
            time.astimezone(timezone(timedelta(hours=hours)))

    def test_a_record_of_another_queue(self) -> None:
        mine = replace(COMMON, topic="Größe", queue_id=0)
        others = [replace(mine, queue_id=-1), replace(mine, topic="Grösse"), replace(mine, topic="Anderes")]
        second = replace(COMMON, queue_id=9)
        first = b"".join(record.encode() for record in (mine, *others))
        buffer = first + second.encode()
        origins = [Origin(len(first), "Größe", 0), Origin(len(buffer), COMMON.topic, 9)]
        (decoded,) = ColumnDecoder(arrow_schema(["queue_id"])).decode(
            buffer, record_starts(buffer)[0], origins
        )
        assert decoded.batch.column(0).to_pylist() == [0, 9]
        assert [(item.stage, item.raw) for item in decoded.bad] == [("queue", r.encode()) for r in others]


class TestPlainBodies:
    """A small stored body may inflate to a large one: a batch ends before its plain bodies are too large."""

    def batches(
        self, records: list[Rec], columns: list[str] | None = None, limit: int = 250
    ) -> list[Decoded]:
        buffer = b"".join(record.encode() for record in records)
        decoder = ColumnDecoder(arrow_schema(columns), decompress=decompress, plain_bytes=limit)
        parts = decoder.decode(buffer, record_starts(buffer)[0])
        return [Decoded(batch, list(bad)) for batch, bad in parts]  # `bad` at the time of the batch

    def test_a_batch_ends_before_the_body_that_is_too_much(self) -> None:
        records = [packed(b"%d" % n * 100, queue_offset=n) for n in range(5)]
        found = self.batches([*records[:3], COMMON, *records[3:]])
        assert [part.batch.column("queue_offset").to_pylist() for part in found] == [[0, 1], [2, 7, 3], [4]]
        bodies = [body for part in found for body in part.batch.column("body").to_pylist()]
        assert bodies == [record.plain or record.body for record in [*records[:3], COMMON, *records[3:]]]

    def test_a_body_that_is_larger_alone_has_a_batch_that_ends_with_it(self) -> None:
        records = [packed(b"x" * size) for size in (100, 1000, 100)]
        assert [part.batch.num_rows for part in self.batches(records)] == [1, 1, 1]

    def test_bodies_that_nobody_asks_for_are_not_made_plain(self) -> None:
        records = [packed(b"x" * 1000), Rec(body=b"not zlib", sys_flag=0x301)]
        (part,) = self.batches(records, ["queue_id"])
        assert (part.batch.num_rows, part.bad) == (2, [])

    def test_bad_bodies_are_each_reported_once_and_for_what_they_are(self) -> None:
        bad = [Rec(body=text, sys_flag=0x301, queue_offset=n) for n, text in enumerate([b"no", b"", b"no"])]
        good = [packed(b"x" * 200) for _ in bad]
        found = self.batches([record for pair in zip(bad, good, strict=True) for record in pair])
        assert [part.batch.num_rows for part in found] == [1, 1, 1]
        assert [item.queue_offset for part in found for item in part.bad] == [0, 1, 2]
        assert len({item.problem for part in found for item in part.bad}) == 2

    def test_no_memory_is_no_fault_of_the_record(self) -> None:
        def fail(sys_flag: int, body: bytes) -> bytes:
            raise MemoryError

        decoder = ColumnDecoder(arrow_schema(), decompress=fail)
        with pytest.raises(MemoryError):
            list(decoder.decode(packed(b"x").encode(), [0]))


class TestNamesTwice:
    """Batch sends write WAIT again: the last value counts, at the first position."""

    def test_no_record_is_decoded_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def alone(text: str) -> dict[str, str]:
            raise AssertionError(text)

        monkeypatch.setattr(columnar_properties, "decode_properties", alone)
        texts = [
            b"UNIQ_KEY\x011\x02WAIT\x01true\x02TAGS\x01b\x02WAIT\x01false",
            b"a\x011\x02a\x012\x02b\x013\x02a\x014\x02b\x015\x02",
            b"WAIT\x01true",
        ]
        rows, bad = decode([Rec(properties=text) for text in texts], ["properties", "msg_id"])
        assert bad == []
        assert [list(row["properties"].items()) for row in rows] == [
            [("UNIQ_KEY", "1"), ("WAIT", "false"), ("TAGS", "b")], [("a", "4"), ("b", "5")],
            [("WAIT", "true")],
        ]  # fmt: skip
        assert rows[0]["msg_id"] == "1"

    def test_names_twice_without_values(self) -> None:
        texts = [
            b"KEYS\x01\x02TAGS\x01\x02KEYS\x01",
            b"a\x01\x02b\x012\x02a\x011",
            b"a\x011\x02b\x012\x02a\x01",
        ]
        rows, bad = decode([Rec(properties=text) for text in texts], ["properties"])
        assert bad == []
        assert [row["properties"] for row in rows] == [{}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}]

    def test_in_a_large_batch_of_many_names(self) -> None:
        records = [Rec(properties=b"n%d\x01old\x02k\x01v\x02n%d\x01new" % (n, n)) for n in range(3000)]
        rows, _ = decode(records, ["properties"])
        assert [list(row["properties"].items()) for row in rows] == [
            [(f"n{n}", "new"), ("k", "v")] for n in range(3000)
        ]


class TestStarts:
    def test_truncated_at_every_position(self) -> None:
        data = b"".join(record.encode() for record in MIXTURE[:3])
        edges = [0]
        for record in MIXTURE[:3]:
            edges.append(edges[-1] + len(record.encode()))
        for length in range(len(data) + 1):
            starts, end = record_starts(data[:length])
            whole = [edge for edge in edges[1:] if edge <= length]
            assert (starts, end) == (edges[: len(whole)], edges[len(whole)])

    @pytest.mark.parametrize(
        "tail", [b"\0" * 200, b"\x7f\xff\xff\xff" * 50, bytes.fromhex("00000100cbd43194") + b"\0" * 248]
    )
    def test_trailing_bytes_end_the_chain(self, tail: bytes) -> None:
        data = COMMON.encode()
        assert record_starts(data + tail) == ([0], len(data))


text = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=8)
names = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT"]) | text
property_strings = st.one_of(
    st.lists(st.tuples(names, text), max_size=6).map(
        lambda pairs: "\x02".join(f"{n}\x01{v}" for n, v in pairs)
    ),
    st.lists(st.tuples(names, text), max_size=6).map(
        lambda pairs: "".join(f"{n}\x01{v}\x02" for n, v in pairs)
    ),
    st.text(st.sampled_from("ab\x01\x02"), max_size=20),
)
hosts = st.tuples(st.ip_addresses().map(str), st.integers(0, 65535))
records = st.builds(
    Rec,
    topic=text.filter(lambda value: len(value.encode()) < 128),
    body=st.binary(max_size=40),
    properties=property_strings.map(str.encode),
    queue_id=st.integers(0, 2**31 - 1),
    flag=st.integers(-(2**31), 2**31 - 1),
    queue_offset=st.integers(0, 2**62),
    physical_offset=st.integers(0, 2**62),
    sys_flag=st.sampled_from([0, 4, 8, 12, 2]),
    born=hosts,
    store=hosts,
    born_ms=st.integers(0, 4 * 10**12),
    store_ms=st.integers(0, 4 * 10**12),
    reconsume_times=st.integers(0, 100),
    prepared=st.integers(0, 2**62),
    magic=st.sampled_from([V1, V2]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(records, max_size=8), st.lists(st.sampled_from(list(COLUMNS)), unique=True, min_size=1))
def test_any_records_any_projection(batch: list[Rec], columns: list[str]) -> None:
    rows, bad = decode(batch, columns)
    assert bad == []
    expected = [record.row("broker-a") for record in batch]
    assert rows == [{column: row[column] for column in columns} for row in expected]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(-5, 400), max_size=5, unique=True).map(sorted))
def test_noise_is_never_an_exception(noise: bytes, starts: list[int]) -> None:
    decoded = alone(ColumnDecoder(arrow_schema(), decompress=decompress), noise, starts)
    assert decoded.batch.num_rows + len(decoded.bad) == len(starts)
