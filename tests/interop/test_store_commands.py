"""`cometmq store` on the store of Apache's 4.9.7 broker: running, stopped and killed.

Apache's broker opens and serves the result of `rebuild`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.stores import read_store
from tests.kit.waiting import wait_until
from tests.long_form import LONG, long_form

COMMAND = str(Path(sys.executable).with_name("cometmq"))
TOPIC = "Load"
SETTINGS = {**store_input.TINY, "maxIndexNum": "10000"}
"""Settings with large index files.

Apache's broker names an index file after the current millisecond. If it fills two files within one
millisecond, the second overwrites the first, which `verify` reports. Files of this size are never filled so
quickly.
"""


def run(command: str, store: Path, *words: str, expect: int = 0) -> str:
    """Run a command, check its exit code, and return its output."""
    done = subprocess.run(
        [COMMAND, "store", command, str(store), *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == expect, f"{done.stdout[-4000:]}\n{done.stderr}"
    return done.stdout if expect == 0 else done.stdout + done.stderr


def report(command: str, store: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(command, store, "--json", *words))
    return found


@contextmanager
def apache(directory: Path, names: str) -> Iterator[ApacheBroker]:
    broker = ApacheBroker("4.9.7", directory, names, settings=SETTINGS)
    try:
        yield broker
    finally:
        if broker.process.running:
            broker.kill()


class Load:
    """A sender of single messages and batches, with keys and tags, over two connections until stopped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(2)]
        self.acknowledged: list[dict[str, str]] = []  # the responses, with the keys that were sent
        self.failures: list[BaseException] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, worker: int) -> None:
        try:
            with wire.Connection(self._port) as connection:
                feeder = store_input.Feeder(connection)
                number = 0
                while not self._stop.is_set():
                    number += 1
                    key = f"w{worker}n{number}"
                    tags = ("TAGS", f"tag{number % 3}")
                    properties = [("UNIQ_KEY", f"{worker:016X}{number:016X}"), ("KEYS", f"{key} all"), tags]
                    body = b"%d " % number + bytes(number % 700)
                    answer = feeder.send(TOPIC, number % 4, body, properties)
                    self.acknowledged.append({**answer, "key": key})
                    if number % 20 == 0:
                        parts = [(b"part", [("KEYS", f"{key}p{each}"), tags]) for each in range(10)]
                        feeder.batch(TOPIC, number % 4, parts)
        except BaseException as failure:
            self.failures.append(failure)


@long_form("a broker writes for 20 seconds")
def test_beside_a_broker_that_is_writing(names: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with apache(tmp_path, names) as broker:
        with Load(broker.port) as load:
            wait_until("several index files", lambda: len(list((store / "index").glob("*"))) > 2)
            counts = []
            for _ in range(6):
                before = len(load.acknowledged)
                found = report("verify", store)
                assert found["findings"] == []
                assert (found["live"], found["errors"]) == (True, 0)
                assert found["records"] >= before
                assert found["index_entries"] > 10_000
                counts.append(found["records"])
            assert counts == sorted(set(counts))
            stats = report("stats", store)
            assert stats["live"]
            assert stats["messages"] >= counts[-1]
            self_named = load.acknowledged[-1]
            _dump_finds(store, self_named)
            assert "a broker is using this store" in run("rebuild", store, expect=1)
        assert load.failures == []
        broker.stop()
    found = report("verify", store)
    assert (found["findings"], found["live"], found["clean"]) == ([], False, True)
    assert found["units"] == found["records"]
    stats = report("stats", store)
    assert (stats["messages"], stats["index_entries"]) == (found["units"], found["index_entries"])


def _dump_finds(store: Path, sent: dict[str, str]) -> None:
    """Check that a message just acknowledged is found in every way."""
    (by_key,) = run("dump", store, "--key", sent["key"], "-t", TOPIC, "--json").splitlines()
    message = json.loads(by_key)
    assert message["offset_msg_id"] == sent["msgId"]
    assert (message["queue_id"], message["queue_offset"]) == (int(sent["queueId"]), int(sent["queueOffset"]))
    for words in (
        ("--id", message["offset_msg_id"]),
        ("--id", message["msg_id"]),
        ("--offset", str(message["physical_offset"])),
        ("--key", sent["key"], "--scan"),
    ):
        assert json.loads(run("dump", store, *words, "--json")) == message


@pytest.fixture(scope="module")
def written(names: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return directories with the same input: "stopped" cleanly, and "killed" with kill -9."""
    made = {}
    for end in ("stopped", "killed"):
        directory = tmp_path_factory.mktemp(end)
        with apache(directory, names) as broker:
            store_input.feed(broker.port)
            if end == "stopped":
                broker.stop()
        made[end] = directory / "store"
    return made


def test_after_a_stop_nothing_is_found(written: dict[str, Path]) -> None:
    found = report("verify", written["stopped"])
    assert found["findings"] == []
    assert found["clean"]
    assert found["records"] == 814


def test_after_a_kill_there_are_warnings_only(written: dict[str, Path]) -> None:
    found = report("verify", written["killed"])
    assert not found["clean"]
    assert {finding["severity"] for finding in found["findings"]} <= {"warning"}
    assert {finding["kind"] for finding in found["findings"]} <= {"queue-short", "index-short", "checkpoint"}
    assert found["records"] == 814


@pytest.mark.parametrize("end", ["stopped", "killed"] if LONG else ["killed"])
def test_apache_serves_rebuilt_stores(end: str, written: dict[str, Path], names: str, tmp_path: Path) -> None:
    store = Path(shutil.copytree(written[end], tmp_path / "store"))
    before = read_store(written["stopped"], slots=store_input.TINY_SLOTS)
    shutil.rmtree(store / "index")
    for path in (store / "consumequeue" / "Alpha" / "1").iterdir():
        path.unlink()
    (store / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in SETTINGS.items()))
    made = report("rebuild", store)
    assert (made["records"], made["not_served"], made["findings"]) == (814, 0, [])
    assert {finding["kind"] for finding in report("verify", store)["findings"]} <= {"checkpoint"}
    rebuilt = read_store(store, slots=store_input.TINY_SLOTS)
    if end == "stopped":
        assert rebuilt.queues == before.queues
        assert [each.fixed() for each in rebuilt.indexes] == [each.fixed() for each in before.indexes]
    with apache(tmp_path, names) as broker:
        for queue in range(4):
            wanted = [each for each in rebuilt.records if (each.topic, each.queue_id) == ("Alpha", queue)]
            assert len(wanted) > 100
            assert store_input.served(broker.port, "Alpha", queue)[: len(wanted)] == wanted
        assert store_input.by_key(broker.port, "Alpha", "k7") == [
            each for each in rebuilt.records if each.topic == "Alpha" and "k7" in store_input.keys(each)
        ]
        with wire.Connection(broker.port) as connection:
            store_input.Feeder(connection).send("Alpha", 1, b"after", [("KEYS", "after")])
        assert store_input.served(broker.port, "Alpha", 1)[-1].body == b"after"
        if end == "stopped":  # a clean stop takes Apache's broker ten seconds
            broker.stop()
    assert report("verify", store)["errors"] == 0
