"""printMsg, printMsgByQueue, queryMsgByOffset."""

from __future__ import annotations

import json

import pytest
from tests.admin.conftest import Shell


@pytest.fixture(scope="module")
def sent() -> set[str]:
    return set()


@pytest.fixture
def printed(mq: Shell, sent: set[str]) -> tuple[str, ...]:
    """Create a queue with four messages, two with tag A and one without a tag."""
    place = ("-t", "printed", "-b", mq.broker.broker_name, "-i", "1")
    if not sent:
        mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "printed", "-r", "2", "-w", "2")
        for body, tag in (("one", "A"), ("zwö", "B"), ("three", "A"), ("four", "")):
            mq.ok("sendMessage", *place, "-p", body, *(("-c", tag) if tag else ()))
            sent.add(body)
    return place


def test_all_messages_of_a_topic_are_printed(mq: Shell, printed: tuple[str, ...]) -> None:
    lines = mq.ok("printMsg", "-t", "printed").lines

    queue = f"MessageQueue [topic=printed, brokerName={mq.broker.broker_name}, queueId="
    assert [line for line in lines if line.startswith("minOffset")] == [
        f"minOffset=0, maxOffset=0, {queue}0]",
        f"minOffset=0, maxOffset=4, {queue}1]",
    ]
    messages = [line for line in lines if line.startswith("MSGID: ")]
    assert [line.rsplit("BODY: ", 1)[1] for line in messages] == ["one", "zwö", "three", "four"]
    assert "body=[122, 119, -61, -74], transactionId='null'}]" in messages[1]
    assert lines.count("-" * 56) == 2
    hidden = mq.ok("printMsg", "-t", "printed", "-d", "false", "-s", "B").lines
    assert next(line for line in hidden if line.startswith("MSGID")).endswith("BODY: NOT PRINT BODY")
    bodies = [json.loads(line)["body"] for line in mq.ok("printMsg", "-t", "printed", "--json").lines]
    assert bodies == ["one", "zwö", "three", "four"]


@pytest.mark.parametrize(
    ("more", "bodies"),
    [
        ((), []),
        (("-p", "true"), ["NOT PRINT BODY"] * 4),
        (("-p", "true", "-d", "true", "-s", "A || B"), ["one", "zwö", "three"]),
        (("-p", "true", "-d", "true", "-c", "ISO-8859-1", "-s", "B"), ["zw\u00c3\u00b6"]),
        (("-p", "true", "-b", "2000-01-01#00:00:00:000", "-e", "1"), []),
    ],
)
def test_messages_of_a_queue_are_printed(
    mq: Shell, printed: tuple[str, ...], more: tuple[str, ...], bodies: list[str]
) -> None:
    words = ("printMsgByQueue", "-t", "printed", "-a", mq.broker.broker_name, "-i", "1")

    assert [line.rsplit("BODY: ", 1)[1] for line in mq.ok(*words, *more).lines] == bodies


def test_tags_are_counted(mq: Shell, printed: tuple[str, ...]) -> None:
    words = ("printMsgByQueue", "-t", "printed", "-a", mq.broker.broker_name, "-i", "1", "-f", "true")

    assert mq.ok(*words).lines == [f"Tag: {'A':<30} Count: 2", f"Tag: {'B':<30} Count: 1"]
    assert mq.ok(*words, "--json").json == {"tags": {"A": 2, "B": 1}}


def test_a_charset_that_is_none_is_an_error(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "nothing-printed")

    failed = mq.run("printMsg", "-t", "nothing-printed", "-c", "EBCDIC-x")

    assert (failed.code, "unknown charset 'EBCDIC-x'" in failed.err) == (1, True)


def test_a_message_is_found_by_its_offset(mq: Shell, printed: tuple[str, ...]) -> None:
    words = ("queryMsgByOffset", *printed)

    assert mq.ok(*words, "-o", "2", "--json").json[0]["body"] == "three"
    assert any(line.startswith("OffsetID:") for line in mq.ok(*words, "-o", "2").lines)
    missing = mq.run(*words, "-o", "9")
    assert (missing.code, "queue 1 of topic printed" in missing.err) == (1, True)
    stranger = mq.run("queryMsgByOffset", "-t", "printed", "-b", "nowhere", "-i", "0", "-o", "0")
    assert "no broker named nowhere" in stranger.err
