"""Record tests/data/frames-*.json.gz: the real frames between Apache's clients and servers.

Run from the repository's root when a version is added: ``python -m tests.golden.record [part of a name]``.
Recordings are not reproducible byte for byte (times, addresses, ids), so the files are committed and the
tests read only them.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.golden.tap import Recorded, Recording, Tap
from tests.interop.apache import ApacheBroker, ApacheNamesrv, mqadmin
from tests.interop.driver import Driver, message
from tests.kit.waiting import wait_until
from tests.ports import free_port

DATA = Path(__file__).parent.parent / "data"
BINARY = "-Drocketmq.serialize.type=ROCKETMQ"

RUNS = [
    ("4.9.8", "4.9.7", False),
    ("4.9.8", "4.9.7", True),
    ("5.5.0", "5.5.0", False),
    ("5.5.0", "5.5.0", True),
    ("5.5.0", "4.9.7", False),
]
"""Client version, server version, and whether both ends write binary headers."""


class Stage:
    """Servers of one version with taps before them; clients connect to ``namesrv``."""

    def __init__(self, server: str, binary: bool, directory: Path) -> None:
        self.recording = Recording()
        self.server = server
        self.directory = directory
        flags = ["-Xmx512m", "-XX:+UseSerialGC", *([BINARY] if binary else [])]
        real, tapped = free_port(), free_port()  # both have five digits
        self.name_server = ApacheNamesrv(server, directory, jvm=flags)
        self.to_namesrv = Tap(
            "namesrv", self.name_server.port, self.recording, replace={b":%d" % real: b":%d" % tapped}
        )
        self.registration = Tap("namesrv", self.name_server.port, self.recording, client="broker-server")
        self.to_broker = Tap("broker", real, self.recording)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open(tapped))
        self.broker = ApacheBroker(
            server, directory, f"127.0.0.1:{self.registration.port}", port=real, jvm=flags
        )

    async def _open(self, tapped: int) -> None:
        await self.to_namesrv.start()
        await self.registration.start()
        await self.to_broker.start(tapped)

    async def _close(self) -> None:
        for tap in (self.to_namesrv, self.registration, self.to_broker):
            await tap.stop()

    def _run(self, job: object) -> None:
        asyncio.run_coroutine_threadsafe(job, self._loop).result(30)  # type: ignore[arg-type]

    @property
    def namesrv(self) -> str:
        return f"127.0.0.1:{self.to_namesrv.port}"

    def close(self) -> None:
        self.broker.stop()
        self.name_server.stop()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def java_client(version: str, binary: bool, directory: Path) -> Iterator[Driver]:
    java = Driver(version, directory, jvm=["-Xmx256m", "-XX:+UseSerialGC", *([BINARY] if binary else [])])
    try:
        yield java
    finally:
        java.stop()


def produce(java: Driver, namesrv: str) -> str:
    """Send in every way; return the offset id of a stored message."""
    java.call("producer_start", name="p", namesrv=namesrv, group="producers")
    plain = [
        message("Orders", b"order %d" % n, tags="AB"[n % 2], keys=f"k{n} all", properties={"n": str(n)})
        for n in range(6)
    ]
    (first, *_rest) = java.send("p", plain)
    java.send("p", plain[:2], "oneway")
    java.send("p", [message("Orders", b"part %d" % n, tags="A", keys=f"b{n}") for n in range(3)], "batch")
    java.send("p", [message("Orders", b"0123456789" * 600, tags="big")])
    java.send("p", [message("Orders", b"late", tags="A", delay=1)])
    java.send("p", [message("Orders", "Grüße 订单".encode(), tags="订单", properties={"wer": "Łukasz 🚀"})])
    java.call("bounds", name="p", queue=_queue(0), timestamp=1)
    java.call("query", name="p", topic="Orders", key="k1")
    return str(first["offsetMsgId"])


def consume(java: Driver, namesrv: str, *, lite: bool) -> None:
    """Consume by push with retries, in order, by pull and by lite pull, whose 5.x code 4.9 lacks."""
    java.call(
        "push_start",
        name="c",
        namesrv=namesrv,
        group="readers",
        topics={"Orders": "A || B"},
        failTimes=1,
        failDelayLevel=1,
    )
    java.wait_delivered("c", lambda got: sum(not each["failed"] for each in got) >= 10)
    java.call("push_start", name="o", namesrv=namesrv, group="ordered", topics={"Orders": "*"}, orderly=True)
    java.wait_delivered("o", 12)
    java.call("pull_start", name="u", namesrv=namesrv, group="pullers")
    java.call("pull", name="u", queue=_queue(0), max=2)
    java.call("pull", name="u", queue=_queue(0), offset=1000)
    java.call("pull", name="u", queue=_queue(0), expression="nothing")
    java.call("offset_update", name="u", queue=_queue(0), offset=1)
    wait_until("offset stored", lambda: java.call("offset_fetch", name="u", queue=_queue(0)) == 1)
    if lite:
        options = {"namesrv": namesrv, "group": "lites", "topics": {"Orders": "*"}, "autoCommit": False}
        java.call("lite_start", name="l", **options)
        wait_until("lite messages", lambda: java.call("lite_poll", name="l"))
        java.call("lite_commit", name="l")
        java.call("lite_stop", name="l")
    for kind, name in (("pull", "u"), ("push", "o")):
        java.call(f"{kind}_stop", name=name)


def administer(stage: Stage, offset_id: str) -> None:
    """Run the admin commands whose responses have bodies of their own format."""
    broker = f"127.0.0.1:{stage.to_broker.port}"
    for line in (
        f"updateTopic -b {broker} -t Made -r 4 -w 4",
        f"updateSubGroup -b {broker} -g made",
        "topicList -c",
        "topicRoute -t Orders",
        "topicStatus -t Orders",
        "clusterList",
        f"brokerStatus -b {broker}",
        "consumerProgress -g readers",
        "consumerConnection -g readers",
        "producerConnection -g producers -t Orders",
        "consumerStatus -g readers",
        f"queryMsgById -i {offset_id}",
        "queryMsgByKey -t Orders -k k1",
        f"getBrokerConfig -b {broker}",
        f"brokerConsumeStats -b {broker}",
        "cloneGroupOffset -s readers -d made -t Orders -o true",
        "statsAll",
        "updateKvConfig -s space -k key -v value",
        "deleteKvConfig -s space -k key",
        f"wipeWritePerm -b broker-a -n {stage.namesrv}",
        f"addWritePerm -b broker-a -n {stage.namesrv}",
        "resetOffsetByTime -g made -t Orders -s 0",
        "deleteTopic -c DefaultCluster -t Made",
        f"deleteSubGroup -b {broker} -g made",
    ):
        words = line.split()
        mqadmin(
            stage.server, stage.directory / "admin", *words, *([] if "-n" in words else ["-n", stage.namesrv])
        )


def _queue(number: int) -> dict[str, object]:
    return {"topic": "Orders", "brokerName": "broker-a", "queueId": number}


def record(client: str, server: str, binary: bool, directory: Path) -> list[Recorded]:
    stage = Stage(server, binary, directory)
    try:
        with java_client(client, binary, directory / "java") as java:
            offset_id = produce(java, stage.namesrv)
            consume(java, stage.namesrv, lite=(client, server) != ("5.5.0", "4.9.7"))
            if not binary and (client, server) != ("5.5.0", "4.9.7"):
                administer(stage, offset_id)
            java.call("push_stop", name="c")
            java.call("producer_stop", name="p")
    finally:
        stage.close()
    return stage.recording.frames


def write(path: Path, frames: list[Recorded]) -> None:
    rows = [
        {
            "from": each.sender,
            "to": each.receiver,
            "request": each.request,
            "response": each.response,
            "frame": base64.b64encode(each.data).decode(),
        }
        for each in frames
    ]
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    for client, server, binary in RUNS:
        name = f"frames-client-{client}-server-{server}-{'binary' if binary else 'json'}.json.gz"
        if not all(part in name for part in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as directory:
            frames = record(client, server, binary, Path(directory))
        write(DATA / name, frames)
        requests = sorted({each.request for each in frames})
        sys.stderr.write(
            f"{name}: {len(frames)} frames, {(DATA / name).stat().st_size} bytes, codes {requests}\n"
        )


if __name__ == "__main__":
    main()
