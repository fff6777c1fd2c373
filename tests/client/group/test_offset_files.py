"""Offset files of broadcasting consumers: Apache's format is read and written, damaged files are handled."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq.client.group import offset_files
from cometmq.client.group.offset_files import (
    FileOffsets,
    OffsetFileError,
    local_path,
    parse_offsets,
    render_offsets,
)
from cometmq.message import MessageQueue

A1 = MessageQueue("TopicTest", "broker-a", 1)
A0 = MessageQueue("TopicTest", "broker-a", 0)

APACHES = """{
	"offsetTable":{{
			"brokerName":"broker-a",
			"queueId":1,
			"topic":"TopicTest"
		}:7,{
			"brokerName":"broker-a",
			"queueId":0,
			"topic":"TopicTest"
		}:12
	}
}"""


def test_the_form_is_apaches() -> None:
    assert render_offsets({A1: 7, A0: 12}) == APACHES
    assert parse_offsets(APACHES) == {A1: 7, A0: 12}


@pytest.mark.parametrize(
    "text",
    [
        r'{"offsetTable":{"{\"brokerName\":\"broker-a\",\"queueId\":1,\"topic\":\"TopicTest\"}":7}}',
        '{"offsetTable":{{"topic":"TopicTest","queueId":1,"brokerName":"broker-a"}:{"value":7}}}',
    ],
)
def test_other_forms_are_read(text: str) -> None:
    assert parse_offsets(text) == {A1: 7}


names = st.text("abc%|-_09", min_size=1, max_size=8)


@given(
    st.dictionaries(
        st.builds(MessageQueue, names, names, st.integers(0, 9)), st.integers(0, 2**62), max_size=5
    )
)
def test_what_is_written_is_read(table: dict[MessageQueue, int]) -> None:
    assert parse_offsets(render_offsets(table)) == table


async def test_offsets_survive_a_restart_and_other_queues_stay(tmp_path: Path) -> None:
    path = local_path(str(tmp_path), "c@1", "g")
    for before, table in ((None, {A0: 5}), (5, {A1: 6})):
        file = FileOffsets(path)
        assert await file.read(A0) == before
        await file.write(table)
        file.close()
    again = FileOffsets(path)
    assert [await again.read(A0), await again.read(A1)] == [5, 6]
    assert (tmp_path / "c@1" / "g" / "offsets.json.bak").exists()


@pytest.mark.parametrize("broken", ["", "{", "[]"])
async def test_a_broken_file_is_replaced_by_its_backup(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "c" / "g" / "offsets.json"
    path.parent.mkdir(parents=True)
    path.with_name("offsets.json.bak").write_text(APACHES)
    path.write_text(broken)
    assert await FileOffsets(str(path)).read(A0) == 12


async def test_two_broken_files_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "c" / "g" / "offsets.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    path.with_name("offsets.json.bak").write_text("nonsense")
    with pytest.raises(OffsetFileError, match=r"offsets\.json\.bak"):
        await FileOffsets(str(path)).read(A0)


HOLD = """
import asyncio, sys
from cometmq.client import FileOffsets
from cometmq.message import MessageQueue

file = FileOffsets(sys.argv[1])
asyncio.run(file.write({MessageQueue("TopicTest", "broker-a", 0): 7}))
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_file_has_one_user_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "offsets.json")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        ours = FileOffsets(path)
        for use in (ours.read(A0), ours.write({A0: 1})):
            with pytest.raises(OffsetFileError, match="another consumer uses this file; give each"):
                await use
        other.kill()
    assert await asyncio.gather(*(ours.read(A0) for _ in range(10))) == [7] * 10
    again = FileOffsets(path)
    with pytest.raises(OffsetFileError, match="another consumer"):
        await again.read(A0)
    ours.close()
    await again.write({A0: 9})
    again.close()
    assert await ours.read(A0) == 9


async def test_a_file_that_cannot_be_locked_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(path: str) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(offset_files, "lock_file", refuses)
    file = FileOffsets(str(tmp_path / "offsets.json"))
    await file.write({A0: 3})
    assert await file.read(A0) == 3
    assert "other consumers may use the same file" in caplog.text


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    offsets = FileOffsets(str(tmp_path / "c" / "offsets.json"))
    assert await offsets.read(A0) is None
    (tmp_path / "c" / "offsets.json.tmp").mkdir()
    with pytest.raises(OffsetFileError, match=r"c/offsets\.json"):
        await offsets.write({A0: 1, A1: 2})


async def test_a_disk_that_hangs_holds_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    goes_on = threading.Event()

    def hang(descriptor: int) -> None:
        asked.append(descriptor)
        goes_on.wait(20)

    file = FileOffsets(str(tmp_path / "offsets.json"))
    await file.write({A0: 1})
    monkeypatch.setattr(os, "fsync", hang)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await file.write({A0: 2})
        for offset in range(3, 9):
            with pytest.raises(OffsetFileError, match="has not finished yet"):
                await file.write({A0: offset})
    finally:
        goes_on.set()
    assert len(asked) == 1
    async with asyncio.timeout(60):
        while True:
            try:
                await file.write({A0: 9})
                break
            except OffsetFileError:
                await asyncio.sleep(0)
    file.close()
    assert await FileOffsets(file.path).read(A0) == 9


async def test_a_group_goes_on_where_its_file_says(
    broker: FakeBroker, namesrv: FakeNamesrv, tmp_path: Path
) -> None:
    path = str(tmp_path / "offsets.json")
    for lot in ([b"0", b"1", b"2"], [b"3", b"4"]):
        for body in lot:
            broker.store("T", 0, body)
        box = Box(namesrv)
        async with box.consumer(offset_storage=FileOffsets(path)):
            await box.has(len(lot))
        assert box.bodies == lot
    assert broker.offsets == {}  # broadcasting offsets are not sent to brokers
