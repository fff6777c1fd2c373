"""Log events as text and as JSON, limits on their number and size, and data that they never contain."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.brokers import Peer

from cometmq import logs
from cometmq.protocol.codes import RequestCode
from cometmq.standalone import Standalone

SAYS = """
import logging
from cometmq import logs
logs.set_up()
log = logs.logger("cometmq.kitchen")
log.info("never mind")
try:
    open("/nowhere/at/all")
except OSError:
    log.exception("cannot open %s for %d", "a\\nb", 7)
"""


def said(code: str = SAYS, **environment: str) -> list[str]:
    given = {"PYTHONPATH": ":".join(filter(None, sys.path)), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=given, check=True, text=True)
    return done.stderr.splitlines()


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logs.use_levels(logging.getLevelName(before))


def test_text_is_a_line_an_event_and_tracebacks_are_indented() -> None:
    first, *others = said()
    assert first.endswith(r"ERROR cometmq.kitchen: cannot open a\nb for 7")
    assert len(others) > 2
    assert all(line.startswith("  | ") for line in others)


def test_json_is_one_line_an_event_with_its_values() -> None:
    (line,) = said(COMETMQ_LOG_FORMAT="json")
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert "FileNotFoundError" in event.pop("traceback")
    assert event == {
        "level": "ERROR",
        "logger": "cometmq.kitchen",
        "message": r"cannot open a\nb for 7",
        "event": "cannot open %s for %d",
        "values": [r"a\nb", 7],
    }


WILD = """
import asyncio, gc, logging, threading, warnings
from cometmq import logs
logs.set_up()
other = logging.getLogger("a.library")
other.error("two\\nlines \\ud800 %s", "x\\ny")
other.error("too %s few %s", 1)
logs.logger("cometmq.kitchen").error("b\\u00f6dy of %s", "\\ud800")
def boom():
    raise ValueError("in a\\nthread")
thread = threading.Thread(target=boom, name="oven")
thread.start()
thread.join()
warnings.warn("watch\\nout")
async def fails():
    raise KeyError("k\\ney")
async def main():
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()
asyncio.run(main())
other.error("the end")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_libraries_threads_and_odd_texts_say_is_a_line_an_event(form: str) -> None:
    """The terminal may support only ASCII."""
    lines = said(WILD, COMETMQ_LOG_FORMAT=form, LC_ALL="C", PYTHONIOENCODING="ascii")
    events = [json.loads(line) for line in lines] if form == "json" else [
        line for line in lines if not line.startswith("  | ")
    ]  # fmt: skip
    texts = [each["message"] if isinstance(each, dict) else each for each in events]
    wanted = (
        r"two\nlines \ud800 x\ny",
        "too %s few %s (1,)",
        r"dy of \ud800",
        "thread oven ended",
        r"UserWarning: watch\nout",
        "Task exception was never retrieved",
        "the end",
    )
    assert len(texts) == len(wanted), texts
    assert [word for word, text in zip(wanted, texts, strict=True) if word not in text] == []
    if form == "json":
        (thread,) = (each for each in events if each["message"] == "thread oven ended")
        assert "ValueError" in thread["traceback"]


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"COMETMQ_LOG_FORMAT": "xml"}, "COMETMQ_LOG_FORMAT=xml is not a log format: text, json"),
        ({"COMETMQ_LOG_LEVEL": "cometmq.nobody=INFO"}, "unknown logger cometmq.nobody"),
    ],
)
def test_what_cannot_be_used_is_told(environment: dict[str, str], line: str) -> None:
    assert any(line in each for each in said(**environment))


@pytest.mark.parametrize(
    "text",
    [
        "loud",
        "cometmq.logs=loud",
        "cometmq.nobody=INFO",
        "cometmq..logs=INFO",
        "=",
        "INFO,,x=1",
        "../logs=INFO",
    ],
)
def test_levels_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(logs.BadLevels):
        logs.levels_of(text)


def test_a_logger_that_only_this_process_has_is_refused() -> None:
    """At the next start the logger would be unknown, and the server would not start."""
    logs.logger("cometmq.of_this_process")
    logging.getLogger("of_this_process_too")
    for name in ("cometmq.of_this_process", "of_this_process_too"):
        with pytest.raises(logs.BadLevels, match="unknown logger"):
            logs.levels_of(f"{name}=INFO")
    assert logs.levels_of("cometmq.broker.pull=INFO,cometmq=ERROR,cometmq.logs=INFO,asyncio=ERROR")


def test_a_logger_that_is_named_no_more_follows_the_others() -> None:
    one = logs.logger("cometmq.text")
    logs.use_levels("ERROR,cometmq.text=DEBUG")
    assert one.isEnabledFor(logging.DEBUG)
    logs.use_levels("WARNING")
    assert not one.isEnabledFor(logging.INFO)


async def test_levels_change_while_servers_run_and_no_body_or_secret_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setLevel(logging.DEBUG)
    body, secret = "a-body-that-nobody-may-read", "token:nobody-may-know"
    async with Standalone(tmp_path, namesrv_port=0, broker_port=0) as cluster:
        (addr,) = cluster.broker_addrs.values()
        async with Peer(addr) as peer, Peer(cluster.namesrv_addr) as names:
            settings = f"logLevel=DEBUG\nmetricsGrpcExporterHeader={secret}".encode()
            assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, settings)).code == 0
            assert logging.getLogger().level == logging.DEBUG
            await peer.heartbeat()
            await peer.send(body=body.encode())
            await peer.pull()
            refused = await peer.send(topic="no topic", body=body.encode())
            assert refused.code != 0
            wrong = await names.call(RequestCode.UPDATE_NAMESRV_CONFIG, None, b"logLevel=loud")
            assert "LOUD is not a log level" in (wrong.remark or "")
            assert (await names.call(RequestCode.UPDATE_NAMESRV_CONFIG, None, b"logLevel=ERROR")).code == 0
            assert logging.getLogger().level == logging.ERROR
    assert any("logLevel" in line for line in caplog.text.splitlines())
    assert body not in caplog.text
    assert secret not in caplog.text


def test_a_limited_log_has_some_lines_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    limit = logs.LogLimiter(2, 10.0)

    assert [limit.allows() for _ in range(3)] == [True, True, False]
    now[0] = 14.9
    assert not limit.allows()
    now[0] = 15.0
    assert limit.allows()
    limit.allows()
    assert not limit.allows()
    limit.reset()
    assert limit.allows()
