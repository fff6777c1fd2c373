"""Contents of messages control neither a terminal nor a parser of lines, unless --raw is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.admin.conftest import Shell
from tests.faults.hostile import EVIL

BODY = f"{EVIL}\nMSGID: forged"


def obeyed(text: str) -> set[str]:
    """Return the control characters of a text, which a terminal may interpret."""
    return {char for char in text if not char.isprintable() and char != "\n"}


@pytest.fixture(scope="module")
def sent(broker: Any) -> dict[str, Any]:
    """Send a message full of escape sequences; return the command's JSON output."""
    command = [sys.executable, "-m", "cometmq", "send", "evil", BODY, "-k", EVIL, "-t", EVIL, "--json"]
    env = {**os.environ, "NAMESRV_ADDR": broker.namesrv}
    done = subprocess.run(
        [*command, "-p", f"{EVIL}={EVIL}"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return dict(json.loads(done.stdout))


COMMANDS = [
    ("queryMsgById", "-i", "{offset_id}"),
    ("queryMsgByUniqueKey", "-t", "evil", "-i", "{unique_key}"),
    ("queryMsgByKey", "-t", "evil", "-k", EVIL),
    ("consumeMessage", "-t", "evil"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_names_and_bodies_are_escaped(mq: Shell, sent: dict[str, Any], command: tuple[str, ...]) -> None:
    words = [word.format(offset_id=sent["offsetMsgId"], unique_key=sent["msgId"]) for word in command]

    shown = mq.ok(*words)
    as_json = mq.ok(*words, "--json")

    assert obeyed(shown.out) == obeyed(as_json.out) == set()
    value = json.loads(as_json.out)
    assert (value if isinstance(value, dict) else value[0])["body"] == BODY
    assert not any(line.startswith("MSGID: forged") for line in shown.lines)


def test_raw_is_what_was_sent(mq: Shell, sent: dict[str, Any]) -> None:
    assert BODY in mq.ok("consumeMessage", "-t", "evil", "--raw").out
    assert EVIL in mq.ok("queryMsgById", "-i", sent["offsetMsgId"], "--raw").out


def test_neither_do_names_in_errors(mq: Shell) -> None:
    failed = mq.run("topicStatus", "-t", EVIL)

    assert failed.code == 1
    assert obeyed(failed.err) == set()
    assert failed.err.count("\n") == 1


def test_neither_do_traces(mq: Shell) -> None:
    record = f"SubAfter\x01r\x01ID\x013\x01true\x01{EVIL}\x010\x011\x01{EVIL}\x02"
    mq.ok("sendMessage", "-t", "EvilTraces", "-p", record, "-k", "ID")
    words = ("queryMsgTraceById", "-t", "EvilTraces", "-i", "ID")

    as_json = mq.ok(*words, "--json")

    assert obeyed(mq.ok(*words).out) == obeyed(as_json.out) == set()
    assert as_json.json[0]["trace"]["group"] == EVIL
    assert EVIL in mq.ok(*words, "--raw").out


def test_a_body_file_holds_the_body_as_it_is(mq: Shell, sent: dict[str, Any]) -> None:
    lines = mq.ok("queryMsgById", "-i", sent["offsetMsgId"]).lines
    (path,) = [line.split(": ", 1)[1].strip() for line in lines if line.startswith("Message Body Path:")]

    assert Path(path).read_text(encoding="utf-8") == BODY
