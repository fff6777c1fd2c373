"""Kill -9 of a broker at each step of tiered storage: no message is lost, and no object is left behind."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.faults.test_kill import SETTINGS
from tests.faults.tiered_child import SEGMENTS_EXPIRED, STEPS
from tests.kit.brokers import Peer
from tests.kit.waiting import until

from cometmq.errors import RemotingError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import QueueRequestHeader
from cometmq.protocol.java_properties import format_properties
from cometmq.protocol.record.one import iter_records
from cometmq.testing.process import ServerProcess

SEGMENT = 1 << 20  # Two blocks
Q = QueueRequestHeader(topic="Orders", queue_id=0)


def conf_in(root: Path) -> Path:
    settings = {
        **SETTINGS, "storePathRootDir": str(root / "store"), "mappedFileSizeCommitLog": str(SEGMENT),
        "cleanResourceInterval": "20", "deleteCommitLogFilesInterval": "1", "deleteWhen": "99",
        "tieredStoreUri": f"file://{root / 'objects'}", "tieredLocalReservedTime": "0",
        "vipChannelEnable": "false", "maxTransferBytesOnMessageInMemory": "1048576",
    }  # fmt: skip
    conf = root / "broker.conf"
    conf.write_text(format_properties(settings))
    return conf


async def started(command: list[str]) -> tuple[ServerProcess, str]:
    process = ServerProcess([sys.executable, "-m", *command], ready='"addr"')
    return process, json.loads(await asyncio.to_thread(process.wait_ready))["addr"]


async def send_until_killed(addr: str, process: ServerProcess) -> list[bytes]:
    """Send messages to one queue until the broker is killed. Return the acknowledged messages."""
    acknowledged: list[bytes] = []
    async with Peer(addr) as peer:
        try:
            while process.process.poll() is None:
                body = b"%d " % len(acknowledged) + bytes(50_000)
                if (await peer.send(body=body)).code == ResponseCode.SUCCESS:
                    acknowledged.append(body)
                await asyncio.sleep(0.005 if len(acknowledged) > 150 else 0)
                assert len(acknowledged) < 2_000
        except RemotingError:
            pass
    return acknowledged


async def consume(peer: Peer) -> tuple[int, list[bytes]]:
    """Pull the whole queue. Return its first offset and the bodies."""
    begin = offset = int((await peer.call(RequestCode.GET_MIN_OFFSET, Q)).ext["offset"])
    end = int((await peer.call(RequestCode.GET_MAX_OFFSET, Q)).ext["offset"])
    found: list[bytes] = []
    while offset < end:
        answer = await peer.pull(offset=offset)
        assert answer.code == ResponseCode.SUCCESS, (offset, answer.code, answer.remark)
        bodies = [bytes(each.body) for each in iter_records(answer.body)]
        assert int(answer.ext["nextBeginOffset"]) == offset + len(bodies)
        found, offset = found + bodies, offset + len(bodies)
    return begin, found


def objects_of(root: Path) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for path in (root / "objects").rglob("*.*"):
        found.setdefault(path.stem, []).append(path.suffix)
    return {stem: " ".join(sorted(endings)) for stem, endings in sorted(found.items())}


def table_of(root: Path) -> list[str]:
    table = json.loads((root / "store/config/tieredSegments.json").read_text())
    return [f"{int(base):020d}" for base in table["segments"]]


# before each step, and after the two steps at which a segment moves
CASES = [f"before {step}" for step in STEPS]
CASES += [f"after {step}" for step in ("add", "unlink commitlog")]


@pytest.mark.slow("starts two brokers for each step, and kills one")
@pytest.mark.parametrize("step", CASES)
async def test_a_broker_killed_at_any_step_keeps_every_message_and_no_remains(
    tmp_path: Path, step: str
) -> None:
    conf = conf_in(tmp_path)
    process, addr = await started(["tests.faults.tiered_child", step, str(conf)])
    try:
        sent = await send_until_killed(addr, process)
        assert process.process.wait(60) == -9, process.output
    finally:
        process.kill()

    process, addr = await started(["cometmq.broker_process", "-c", str(conf)])
    try:
        async with Peer(addr) as peer:
            begin, found = await consume(peer)
            assert found[: len(sent) - begin] == sent[begin:]
            expires = step.partition(" ")[2] in STEPS[STEPS.index("remove") :]
            assert sum(map(len, sent[:begin])) < (SEGMENTS_EXPIRED * SEGMENT if expires else 1)
            await until(lambda: len(list((tmp_path / "store/commitlog").iterdir())) <= 2)
            await until(lambda: objects_of(tmp_path) == dict.fromkeys(table_of(tmp_path), ".crc .json .log"))
            assert await consume(peer) == (begin, found)
    finally:
        process.stop()
