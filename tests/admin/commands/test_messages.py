"""sendMessage, consumeMessage and the three queries on a real cluster."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.admin.conftest import Shell

from cometmq import CometError, Message, MessageExt, TransactionProducer, TransactionState
from cometmq.admin import Admin, MessageNotFound, ReadRange
from cometmq.testing import local_broker


def send(mq: Shell, topic: str, body: str, *more: str) -> dict[str, Any]:
    sent: dict[str, Any] = mq.ok("sendMessage", "-t", topic, "-p", body, *more, "--json").json
    return sent


def consumed(mq: Shell, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in mq.ok("consumeMessage", *arguments, "--json").lines]


class Wavering:
    """A transaction listener that returns UNKNOWN until `state` is set."""

    state = TransactionState.UNKNOWN

    def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return self.state

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return self.state


async def test_a_transaction_that_was_given_up_is_resumed_and_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    often = {"transactionTimeOut": "50", "transactionCheckInterval": "50", "transactionCheckMax": "2"}
    listener = Wavering()
    with local_broker(tmp_path / "store", often) as broker:
        shell, names = Shell(broker, capsys, monkeypatch), broker.namesrv
        producer = TransactionProducer("PG", listener, namesrv=names)
        async with asyncio.timeout(60), Admin(names) as admin, producer:

            async def stored(topic: str) -> list[MessageExt]:
                with suppress(CometError):
                    return [message async for message in admin.read(ReadRange(topic=topic))]
                return []

            with pytest.raises(MessageNotFound, match="TRANS_CHECK_MAX_TIME_TOPIC"):
                await admin.resume_check("F" * 32)
            for given_up in (1, 2):
                if given_up == 1:
                    sent = await producer.send_in_transaction(Message("resumed", b"half"))
                else:  # the state is still unknown, so the check expires again
                    assert (await admin.resume_check(sent.msg_id)).msg_id == sent.msg_id
                while len(await stored("TRANS_CHECK_MAX_TIME_TOPIC")) < given_up:
                    await asyncio.sleep(0.05)
            assert await stored("resumed") == []
            listener.state = TransactionState.COMMIT
            words = ("resumeCheckHalfMessage", "-i")
            told = await asyncio.to_thread(lambda: shell.ok(*words, f" {sent.msg_id},"))
            assert told.lines == [f"resumed {sent.msg_id} at {broker.broker_addr}"]
            while not (committed := await stored("resumed")):
                await asyncio.sleep(0.05)
            assert [(message.body, message.msg_id) for message in committed] == [(b"half", sent.msg_id)]
            offset_id = (await stored("TRANS_CHECK_MAX_TIME_TOPIC"))[-1].offset_msg_id
            for msg_id in (sent.msg_id, offset_id):
                again = await asyncio.to_thread(lambda name: shell.run(*words, name), msg_id)
                assert (again.code, "resumed before" in again.err) == (1, True)


def test_a_sent_message_is_reported_in_columns(mq: Shell) -> None:
    sent = mq.ok("sendMessage", "-t", "sent", "-p", "hello", "-k", "k1 k2", "-c", "TagA")

    assert sent.lines[0].split("  ")[0] == "#Broker Name"
    broker, queue, status, msg_id = sent.lines[1].split()
    assert (broker, status, len(msg_id)) == (mq.broker.broker_name, "SEND_OK", 32)
    assert queue.isdigit()


def test_a_message_goes_to_the_queue_that_was_named(mq: Shell) -> None:
    sent = send(mq, "aimed", "x", "-b", mq.broker.broker_name, "-i", "3")

    assert (sent["sendStatus"], sent["queueId"], sent["queueOffset"]) == ("SEND_OK", 3, 0)


@pytest.mark.parametrize("alone", [("-b", "broker-a"), ("-i", "0")])
def test_broker_and_queue_are_named_together(mq: Shell, alone: tuple[str, str]) -> None:
    failed = mq.run("sendMessage", "-t", "aimed", "-p", "x", *alone)

    assert failed.code == 1
    assert "-b/--broker and -i/--qid together" in failed.err


def test_a_message_is_found_by_its_offset_id_with_all_details(mq: Shell, tmp_path: Path) -> None:
    sent = send(mq, "by-id", "what it says", "-k", "order-7", "-c", "TagA")

    details = dict(
        line.split(":", 1) for line in mq.ok("queryMsgById", "-i", sent["offsetMsgId"]).lines if ":" in line
    )
    shown = {name: value.strip() for name, value in details.items()}

    assert shown["OffsetID"] == sent["offsetMsgId"]
    assert shown["Topic"] == "by-id"
    assert shown["Tags"] == "[TagA]"
    assert shown["Keys"] == "[order-7]"
    assert shown["Queue ID"] == str(sent["queueId"])
    assert shown["Store Host"] == mq.broker.broker_addr
    assert f"UNIQ_KEY={sent['msgId']}" in shown["Properties"]
    assert shown["Message Body Path"] == str(tmp_path / "cache" / "cometmq" / "msgbodys" / sent["msgId"])
    assert Path(shown["Message Body Path"]).read_text() == "what it says"
    assert shown["WARN"] == "No Consumer"


def test_the_body_is_printed_in_a_charset(mq: Shell) -> None:
    sent = mq.ok("sendMessage", "-t", "bodies", "-p", "gr\u00fc\u00df", "--json").json
    words = ("queryMsgById", "-i", sent["offsetMsgId"])

    assert "Message Body:        gr\u00fc\u00df" in mq.ok(*words, "-f", "UTF-8").lines
    place = ("-b", mq.broker.broker_name, "-i", str(sent["queueId"]), "-o", str(sent["queueOffset"]))
    shown = mq.ok("queryMsgByOffset", "-t", "bodies", *place, "--bodyFormat", "latin-1")
    assert "Message Body:        gr\u00c3\u00bc\u00c3\\x9f" in shown.lines
    assert not any("Message Body: " in line for line in mq.ok(*words).lines)
    for wrong in ("nonsense", "base64"):
        assert f"unknown charset '{wrong}'" in mq.run(*words, "-f", wrong).err


def test_several_offset_ids_give_several_messages(mq: Shell) -> None:
    ids = [send(mq, "by-ids", body)["offsetMsgId"] for body in ("one", "two")]

    messages = mq.ok("queryMsgById", "-i", ", ".join(ids), "--json").json

    assert [message["body"] for message in messages] == ["one", "two"]


@pytest.mark.parametrize("where", [(), ("-t", "by-unique-key")])
def test_the_id_that_a_producer_gives_finds_the_message_too(mq: Shell, where: tuple[str, ...]) -> None:
    sent = send(mq, "by-unique-key", "found")

    (message,) = mq.ok("queryMsgById", "-i", sent["msgId"], *where, "--json").json
    lines = mq.ok("queryMsgById", "-i", sent["msgId"].lower(), *where).lines

    assert (message["body"], message["offsetMsgId"]) == ("found", sent["offsetMsgId"])
    assert lines[0].split() == ["OffsetID:", sent["offsetMsgId"]]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ((), "in all topics but those of retries, dead letters and the system"),
        (("-t", "by-unique-key"), "in topic by-unique-key"),
    ],
)
def test_an_unknown_id_says_where_it_was_looked_for(mq: Shell, where: tuple[str, ...], words: str) -> None:
    msg_id = send(mq, "by-unique-key", "x")["msgId"][:-4] + "FFFF"

    failed = mq.run("queryMsgById", "-i", msg_id, *where)

    assert (failed.code, failed.err) == (1, f"mqadmin: no message with id {msg_id} {words}\n")


@pytest.mark.parametrize(("msg_id", "words"), [("abc", "32 or 56"), ("7F00000100002A9F0000000000FFFFFF", "")])
def test_an_id_without_a_message_is_an_error(mq: Shell, msg_id: str, words: str) -> None:
    failed = mq.run("queryMsgById", "-i", msg_id)

    assert failed.code == 1
    assert words in failed.err
    assert failed.err.count("\n") == 1


def test_a_message_is_sent_again_as_a_new_one(mq: Shell) -> None:
    sent = send(mq, "again", "body", "-k", "k", "-c", "T", "-b", mq.broker.broker_name, "-i", "0")

    mq.ok("queryMsgById", "-i", sent["offsetMsgId"], "-s", "true")
    copies = mq.ok("queryMsgByKey", "-t", "again", "-k", "k", "--json").json

    assert [(copy["body"], copy["tags"], copy["keys"]) for copy in copies] == [("body", "T", ["k"])] * 2
    assert len({copy["msgId"] for copy in copies}) == 2


def test_messages_are_found_by_key_the_oldest_first(mq: Shell) -> None:
    first = send(mq, "keyed", "1", "-k", "same other")
    second = send(mq, "keyed", "2", "-k", "same")
    send(mq, "keyed", "3", "-k", "different")

    lines = mq.ok("queryMsgByKey", "-t", "keyed", "-k", "same").lines

    assert lines[0].split() == ["#Message", "ID", "#QID", "#Offset"]
    assert [line.split()[0] for line in lines[1:]] == [first["msgId"], second["msgId"]]


def test_a_key_without_messages_gives_an_empty_listing(mq: Shell) -> None:
    send(mq, "keyed", "x")

    assert mq.ok("queryMsgByKey", "-t", "keyed", "-k", "nobody").lines[1:] == []


def test_a_message_is_found_by_its_unique_key(mq: Shell) -> None:
    sent = send(mq, "unique", "body")

    details = mq.ok("queryMsgByUniqueKey", "-t", "unique", "-i", sent["msgId"])
    found = mq.ok("queryMsgByUniqueKey", "-t", "unique", "-i", sent["msgId"], "-a", "--json").json

    assert details.lines[0].split() == ["Topic:", "unique"]  # without a line for the offset id
    assert [message["offsetMsgId"] for message in found] == [sent["offsetMsgId"]]
    assert mq.run("queryMsgByUniqueKey", "-t", "unique", "-i", "0" * 32).code == 1


class TestConsumeMessage:
    def test_all_queues_are_read_and_nothing_is_committed(self, mq: Shell) -> None:
        for body in ("a", "b", "c"):
            send(mq, "read", body)

        assert sorted(message["body"] for message in consumed(mq, "-t", "read")) == ["a", "b", "c"]
        assert len(consumed(mq, "-t", "read")) == 3

    def test_one_queue_is_read_from_an_offset(self, mq: Shell) -> None:
        queue = ("-b", mq.broker.broker_name, "-i", "1")
        for body in "abcde":
            send(mq, "read-queue", body, *queue)
        send(mq, "read-queue", "other", "-b", mq.broker.broker_name, "-i", "0")

        rest = consumed(mq, "-t", "read-queue", *queue, "-o", "3")

        assert [(message["queueOffset"], message["body"]) for message in rest] == [(3, "d"), (4, "e")]

    def test_the_number_of_messages_is_a_limit_over_all_queues(self, mq: Shell) -> None:
        for number in range(6):
            send(mq, "limited", str(number))

        assert len(consumed(mq, "-t", "limited", "-c", "4")) == 4

    @pytest.mark.parametrize("gap_ms", [0, 30])
    def test_times_choose_messages(self, mq: Shell, gap_ms: int) -> None:
        topic = f"timed-{gap_ms}"
        queue = ("-b", mq.broker.broker_name, "-i", "0")
        send(mq, topic, "before", *queue)
        between = next_ms()
        # The time is nearer to the older message than to the newer one, because 4.9 looks up the nearest
        # message.
        next_ms(gap_ms)
        send(mq, topic, "after", *queue)
        next_ms()

        assert [m["body"] for m in consumed(mq, "-t", topic, "-s", str(between))] == ["after"]
        assert [m["body"] for m in consumed(mq, "-t", topic, "-e", str(between))] == ["before"]
        assert len(consumed(mq, "-t", topic, "-e", "now")) == 2

    def test_text_shows_place_properties_and_body(self, mq: Shell) -> None:
        sent = send(mq, "shown", "the body", "-c", "T")

        lines = mq.ok("consumeMessage", "-t", "shown").lines

        (line,) = lines
        assert line.startswith(f"MSGID: {sent['msgId']} MessageExt [brokerName={mq.broker.broker_name}, ")
        assert "TAGS=T" in line
        assert line.endswith(" BODY: the body")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("-i", "0"), "Please set the brokerName before queueId!"),
            (("-b", "broker-a", "-o", "0"), "Please set queueId before offset!"),
            (("-s", "2", "-e", "1"), "beginTimestamp is less than or equal to the endTimestamp"),
            (("-s", "99999999999999"), "is in the future"),
            (("-s", "yesterday"), "yyyy-MM-dd#HH:mm:ss:SSS"),
            (("-b", "nobody"), "no broker named nobody"),
            (("-b", "broker-a", "-i", "77"), "no queue named 77"),
            (("-c", "0"), "0 is not in the range"),
        ],
    )
    def test_wrong_options_are_refused(self, mq: Shell, arguments: tuple[str, ...], words: str) -> None:
        send(mq, "refused", "x")

        failed = mq.run("consumeMessage", "-t", "refused", *arguments)

        assert failed.code == 1
        assert words in failed.err


class TestTraces:
    def test_a_traced_send_is_found_by_its_id(self, mq: Shell) -> None:
        sent = send(mq, "traced", "x", "-k", "k1", "-m", "true")
        untraced = send(mq, "traced", "x")

        (view,) = mq.ok("queryMsgTraceById", "-i", f" {sent['msgId']} ", "--json").json
        trace = view["trace"]
        assert (trace["type"], trace["msgId"], trace["topic"]) == ("Pub", sent["msgId"], "traced")
        assert (trace["keys"], trace["offsetMsgId"], trace["success"]) == ("k1", sent["offsetMsgId"], True)
        assert view["clientHost"] == "127.0.0.1"
        head, row = (line.split() for line in mq.ok("queryMsgTraceById", "-i", sent["msgId"]).lines if line)
        assert (head[0], row[:3], row[-1]) == ("#Type", ["Pub", "admin_ext_group", "127.0.0.1"], "success")

        assert mq.ok("queryMsgTraceById", "-i", untraced["msgId"], "--json").json == []
        none = mq.run("queryMsgTraceById", "-i", untraced["msgId"])
        assert (none.code, none.out) == (1, "")
        assert f"no trace of message {untraced['msgId']} in topic RMQ_SYS_TRACE_TOPIC" in none.err

    def test_the_ids_of_a_batch_find_the_trace_of_each_of_its_messages(self, mq: Shell) -> None:
        ids = [send(mq, "traced", body, "-m", "true")["msgId"] for body in ("one", "two")]

        found = mq.ok("queryMsgTraceById", "-i", ",".join(ids), "--json").json

        assert [view["trace"]["msgId"] for view in found] == ids

    def test_times_choose_traces(self, mq: Shell) -> None:
        sent = send(mq, "traced", "x", "-m", "true")
        after = next_ms()

        for span, count in ((("-e", str(after)), 1), (("-b", "0"), 1), (("-b", str(after + 1)), 0)):
            found = mq.ok("queryMsgTraceById", "-i", sent["msgId"], *span, "--json").json
            assert len(found) == count, span

    def test_a_trace_topic_of_another_name_is_read(self, mq: Shell, caplog: pytest.LogCaptureFixture) -> None:
        record = "Recall\x011\x01null\x01g\x01T\x01{}\x01true\x02"
        send(mq, "Mine", "nonsense" + record.format("ID") + record.format("ID") + "\x02ID", "-k", "ID")

        read = mq.ok("queryMsgTraceById", "-i", "ID", "-t", "Mine", "--json")

        assert [view["trace"]["type"] for view in read.json] == ["Recall"]
        assert "2 records of" in caplog.text
        assert "unknown kind 'nonsenseRecall'" in caplog.text

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("-i", "ID", "-t", "unheard-of"), "no route to topic unheard-of"),
            (
                ("-i", "ID", "-t", "unheard-of"),
                "topic: unheard-of'. Clients write traces if they enable them",
            ),
            (("-i", "ID", "-c", "65"), "65 is not in the range"),
            (("-i", "ID", "-b", "-1"), "-1 is not in the range"),
            (("-i", "ID", "-e", "soon"), "'soon' is not a valid integer"),
            ((), "Missing option"),
        ],
    )
    def test_wrong_options_are_refused(self, mq: Shell, arguments: tuple[str, ...], words: str) -> None:
        failed = mq.run("queryMsgTraceById", *arguments)

        assert failed.code == 1
        assert words in failed.err


def next_ms(later_ms: int = 0) -> int:
    """Return a time in ms after everything stored so far, once that time has passed."""
    moment = time.time_ns() // 1_000_000 + 1 + later_ms
    while time.time_ns() // 1_000_000 <= moment:
        time.sleep(0.001)
    return moment
