"""The fields of a half message, and the decision that a check makes about it."""

from __future__ import annotations

import pytest

from cometmq.broker.transactions.half import (
    Verdict,
    check_body,
    closed_by,
    copy_properties,
    ends,
    half_of,
    judge,
    number_of,
    same_transaction,
)
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.one import decode_record, encode_record

NOW = 1_000_000_000
TIMEOUT_MS, MOST_CHECKS, OLDEST_MS = 6_000, 15, NOW - 72 * 3_600_000
LIMITS = TIMEOUT_MS, MOST_CHECKS, OLDEST_MS
ASKED = "TRANSACTION_CHECK_TIMES"
FIRST = "TRAN_PREPARED_QUEUE_OFFSET"
IMMUNE = "CHECK_IMMUNITY_TIME_IN_SECONDS"


def half(*, stored=NOW, born=NOW, offset=5, sys_flag=0, **properties):
    known = {"REAL_TOPIC": "Orders", "REAL_QID": "2", "PGROUP": "PG", "UNIQ_KEY": "K", **properties}
    record = encode_record(
        "RMQ_SYS_TRANS_HALF_TOPIC", b"body", encode_properties(known), queue_offset=offset,
        physical_offset=700, born_timestamp_ms=born, store_timestamp_ms=stored, flag=9, sys_flag=sys_flag,
        reconsume_times=1,
    )  # fmt: skip
    return half_of(record)


@pytest.mark.parametrize(
    ("age_ms", "properties", "verdict"),
    [
        (0, {}, "WAIT"),
        (5_999, {}, "WAIT"),
        (6_000, {}, "CHECK"),
        (-1, {}, "CHECK"),  # the clock was set back
        (72 * 3_600_000, {}, "CHECK"),
        (72 * 3_600_000 + 1, {}, "CHECK"),  # no producer was asked yet: the clock may have jumped
        (72 * 3_600_000 + 1, {IMMUNE: "9" * 18}, "CHECK"),
        (72 * 3_600_000 + 1, {ASKED: "14"}, "CHECK"),  # its producers may not have reconnected yet
        (6_000, {ASKED: "14"}, "CHECK"),
        (6_000, {ASKED: "15"}, "DISCARD"),
        (0, {ASKED: "15"}, "DISCARD"),
        (6_000, {ASKED: "0"}, "CHECK"),
        (6_000, {ASKED: "no number"}, "CHECK"),
        (6_000, {IMMUNE: "10"}, "PUT_BACK"),
        (9_999, {IMMUNE: "10", FIRST: "1"}, "PUT_BACK"),
        (10_000, {IMMUNE: "10"}, "CHECK"),
        (0, {IMMUNE: "0"}, "CHECK"),
        (-1, {IMMUNE: "10"}, "CHECK"),
        (5_999, {IMMUNE: "soon"}, "WAIT"),
        (6_000, {IMMUNE: "-7"}, "CHECK"),
    ],
)
def test_what_a_check_does(age_ms, properties, verdict):
    message = half(stored=NOW - age_ms, born=NOW - age_ms, **properties)
    assert judge(message, NOW, *LIMITS) is Verdict[verdict]


def test_a_clock_that_jumped_ahead_gives_nothing_up():
    asked = half(**{ASKED: "1"})
    assert judge(asked, NOW + 400 * 86_400_000, *LIMITS) is Verdict.CHECK


@pytest.mark.parametrize(
    ("age_h", "asked", "verdict"), [(72, 15, "CHECK"), (73, 14, "CHECK"), (73, 15, "DISCARD")]
)
def test_with_more_checks_allowed_age_ends_them(age_h, asked, verdict):
    message = half(stored=NOW - age_h * 3_600_000, born=NOW - age_h * 3_600_000, **{ASKED: str(asked)})
    assert judge(message, NOW, TIMEOUT_MS, 100, OLDEST_MS) is Verdict[verdict]


class TestClocksOfProducers:
    def test_one_that_is_behind_does_not_make_a_new_message_old(self):
        assert judge(half(born=1), NOW, *LIMITS) is Verdict.WAIT

    def test_one_that_is_ahead_gives_no_longer_time(self):
        ahead = half(stored=NOW - 20_000, born=NOW + 10_000_000, **{IMMUNE: "10"})
        assert judge(ahead, NOW, *LIMITS) is Verdict.CHECK
        assert ahead.born_ms == NOW - 20_000

    def test_a_copy_is_as_old_as_its_transaction(self):
        copy = half(stored=NOW, born=NOW - 7_000, **{ASKED: "1"})
        assert judge(copy, NOW, *LIMITS) is Verdict.CHECK

    def test_one_that_is_resumed_begins_anew(self):
        resumed = half(stored=NOW, born=1, **{ASKED: "0"})
        assert judge(resumed, NOW, *LIMITS) is Verdict.WAIT


def test_a_copy_counts_the_checks_and_says_where_it_began():
    once = half_of(copied(half()))
    assert (once.checks, once.form.prepared, once.first) == (1, 5, 5)
    twice = half_of(copied(once, offset=9))
    assert (twice.checks, twice.first) == (2, 5)
    put_back = half_of(copied(half(), checked=False))
    assert (put_back.checks, put_back.form.prepared) == (0, 5)


def copied(message, offset=8, checked=True):
    return encode_record("H", b"body", copy_properties(message, checked=checked), queue_offset=offset)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"offset": 6, FIRST: "5"}, True),
        ({"offset": 6, FIRST: "4"}, False),
        ({"offset": 6, ASKED: "1"}, True),  # a copy made by Apache's broker
        ({"offset": 6, ASKED: "1", FIRST: "4"}, False),
        ({"offset": 6}, False),  # the producer sent it twice
    ],
)
def test_copies_of_one_transaction(other, same):
    assert same_transaction(half(), half(**other)) is same


@pytest.mark.parametrize(
    ("body", "offsets"),
    [
        (b"12", [12]),
        (b"12,15,", [12, 15]),
        (b"", []),
        (b"-3,x,\xff,4", [4]),
        (b"9" * 19, []),
        (b"7,7", [7, 7]),
    ],
)
def test_what_an_op_closes(body, offsets):
    assert closed_by(body) == offsets


@pytest.mark.parametrize("text", [None, "", "-1", "+1", "1.0", "\u0663", " 1", "1" * 19])
def test_what_is_no_number(text):
    assert number_of(text) is None


def test_a_committed_message_names_its_half():
    def closes(sys_flag=8, prepared=700, key="K", **properties):
        text = encode_properties({"UNIQ_KEY": key, **properties})
        record = encode_record("Orders", b"x", text, sys_flag=sys_flag, prepared_transaction_offset=prepared)
        return ends(decode_record(record), half(), {700, 900})

    assert closes()
    assert closes(prepared=900)
    assert closes(prepared=1, **{FIRST: "5"})
    assert not closes(prepared=1, **{FIRST: "6"})
    assert not closes(prepared=701)
    assert not closes(sys_flag=0)
    assert not closes(key="L")


def test_a_producer_is_asked_about_the_message_that_it_sent():
    asked = half(sys_flag=0x304, born=NOW - 5)
    properties = copy_properties(asked, checked=True)
    message = decode_record(check_body(asked, properties, 9_000, 77, 2), check_crc=True)
    assert (message.topic, message.queue_id, message.body) == ("Orders", 2, b"body")
    assert (message.queue_offset, message.physical_offset) == (77, 9_000)
    assert (message.sys_flag, message.flag, message.reconsume_times) == (0x300, 9, 1)
    assert (message.born_timestamp_ms, message.properties[ASKED]) == (NOW - 5, "1")
