"""Filter classes in real processes: permitted and forbidden actions, and the handling of failing classes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.filtersrv.conftest import EVEN, matching

from cometmq.errors import CommandError
from cometmq.filtersrv import filters
from cometmq.filtersrv.filters import Filter
from cometmq.protocol.compression import Compression, compress
from cometmq.protocol.record.one import encode_record


def records(*found: bytes) -> bytes:
    return b"".join(
        encode_record("T", body, b"TAGS\x01a\x02n\x01%d\x02" % at) for at, body in enumerate(found)
    )


NUMBERS = records(b"0", b"1", b"2", b"3")


@contextlib.asynccontextmanager
async def loaded(source: str) -> AsyncIterator[Filter]:
    one = Filter("Wanted", source)
    try:
        await one.load()
        yield one
    finally:
        await one.close()


async def verdicts(source: str, data: bytes = NUMBERS, count: int = 4) -> list[int]:
    async with loaded(source) as one:
        return list(await one.judge(data, count))


def running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


class TestVerdicts:
    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            (EVEN, [1, 0, 1, 0]),
            (matching("message.properties['n'] > '1'"), [0, 0, 1, 1]),
            (matching("message.tags == 'a' and message.topic == 'T' and message.queue_offset == 0"), [1] * 4),
            (matching("None"), [0] * 4),
            (matching("[message]"), [1] * 4),
            (
                "import json, re, datetime, hashlib\n" + matching("json.loads(message.body) == 3"),
                [0, 0, 0, 1],
            ),
            (matching("__import__('datetime').datetime.strptime('2026', '%Y').year == 2026"), [1] * 4),
        ],
    )
    async def test_a_class_sees_message_after_message(self, source, expected):
        assert await verdicts(source) == expected

    async def test_a_class_keeps_its_state_between_pulls(self):
        source = "class Wanted:\n    def __init__(self): self.n = 0\n"
        source += "    def match(self, message):\n        self.n += 1\n        return self.n > 6\n"
        async with loaded(source) as one:
            assert list(await one.judge(NUMBERS, 4)) == [0, 0, 0, 0]
            assert list(await one.judge(NUMBERS, 4)) == [0, 0, 1, 1]

    async def test_a_class_sees_bodies_inflated_and_broken_ones_as_they_are_stored(self):
        packed = encode_record("T", compress(b"x" * 1000), sys_flag=Compression.ZLIB.sys_flag)
        broken = encode_record("T", b"no zlib", sys_flag=Compression.ZLIB.sys_flag)
        assert await verdicts(matching("message.body == b'x' * 1000"), packed + broken, 2) == [1, 0]
        assert await verdicts(matching("message.body == b'no zlib'"), packed + broken, 2) == [0, 1]


class TestWhatAClassCannotDo:
    @pytest.mark.parametrize(
        ("attempt", "words"),
        [
            ("open('/etc/passwd')", "PermissionError"),
            ("open('/tmp/written', 'w')", "PermissionError"),
            ("__import__('os').listdir('/')", "PermissionError"),
            ("__import__('os').open('/proc/self/mem', 2)", "PermissionError"),
            ("__import__('os').unlink('/tmp/x')", "PermissionError"),
            ("__import__('os').system('true') == 0", None),
            ("__import__('os').fork()", "PermissionError"),
            ("__import__('os').execv('/bin/true', ['true'])", "PermissionError"),
            ("__import__('os').kill(__import__('os').getppid(), 9)", "PermissionError"),
            ("__import__('socket')", "ModuleNotFoundError"),
            ("__import__('_socket').socket()", "ModuleNotFoundError|PermissionError"),
            ("__import__('cometmq.client')", "ModuleNotFoundError"),
            ("__import__('ctypes').CDLL(None).socket(2, 1, 0) >= 0", None),
            ("__import__('ctypes').CDLL(None).syscall(59, b'/bin/true', None, None) == 0", None),
            ("__import__('resource').setrlimit(9, (-1, -1))", "ValueError"),
            ("__import__('_thread').start_new_thread(print, ())", "RuntimeError"),
            ("bytes(1 << 30)", "MemoryError"),
            ("[bytes(1 << 20) for _ in range(1000)]", "MemoryError"),
            ("__import__('os').environ.get('HOME') or __import__('os').environ.get('PATH')", None),
        ],
    )
    async def test_it_fails_and_the_process_goes_on(self, attempt, words):
        async with loaded(matching(attempt)) as one:
            process = one.process
            if words is None:
                assert list(await one.judge(NUMBERS, 4)) == [0] * 4
            else:
                with pytest.raises(
                    CommandError, match=rf"filter class Wanted: ({words}): .* for message \w* at offset 0$"
                ):
                    await one.judge(NUMBERS, 4)
            assert one.process is process
            assert running(process.pid)

    async def test_nobody_hears_from_it(self, listener):
        port = listener.getsockname()[1]
        to = f"b'\\x02\\0' + ({port}).to_bytes(2, 'big') + b'\\x7f\\0\\0\\1' + bytes(8)"
        libc = "__import__('ctypes').CDLL(None)"
        assert await verdicts(matching(f"{libc}.connect({libc}.socket(2, 1, 0), {to}, 16) == 0")) == [0] * 4
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()

    async def test_it_has_no_descriptors_of_ours_and_is_alone_in_its_limits(self, tmp_path):
        with (tmp_path / "ours").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            async with loaded(EVEN) as one:
                process = Path("/proc") / str(one.process.pid)
                assert sorted(path.name for path in (process / "fd").iterdir()) == ["0", "1", "2"]
                assert (process / "environ").read_bytes() == b""
                status = (process / "status").read_text()
                assert "\nSeccomp:\t2\n" in status
                assert "\nNoNewPrivs:\t1\n" in status


class TestWhatGoesWrong:
    @pytest.fixture(autouse=True)
    def times(self, monkeypatch):
        """Give the workers time also on a busy machine, but restart them soon."""
        monkeypatch.setattr(filters, "LOAD_TIMEOUT_S", 60.0)
        monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 60.0)
        monkeypatch.setattr(filters, "_RESTART_DELAY_S", 0.05)

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("class Wanted(:", "SyntaxError"),
            ("1 / 0", "ZeroDivisionError"),
            ("Other = 1", "TypeError: the source code of the filter defines no class Wanted"),
            ("Wanted = 1", "TypeError: the source code of the filter defines no class Wanted"),
            ("class Wanted: pass", r"TypeError: class Wanted has no method match\(self, message\)"),
            ("class Wanted:\n    def __init__(self, a): pass", "TypeError"),
            ("raise SystemExit('bye')", "SystemExit: bye"),
            ("import os; os._exit(3)", r"sent an invalid answer \(exit code 3\)"),
            ("raise ValueError('x' * 10**6)", r"ValueError: x+\.\.\. \(\d+ characters\)"),
            ("x = bytes(1 << 40)", "MemoryError"),
        ],
    )
    async def test_a_class_that_cannot_be_loaded_leaves_no_process(self, source, words):
        one = Filter("Wanted", source)
        with pytest.raises(CommandError, match=words):
            await one.load()
        assert one.process is None

    async def test_an_upload_that_is_broken_off_leaves_no_process(self):
        one = Filter("Wanted", EVEN)
        loading = asyncio.create_task(one.load())
        await asyncio.sleep(0)
        pid = one.process.pid
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert one.process is None
        assert not running(pid)

    async def test_a_source_that_loads_for_ever_is_given_up(self, monkeypatch):
        monkeypatch.setattr(filters, "LOAD_TIMEOUT_S", 0.5)
        one = Filter("Wanted", "while True: pass")
        with pytest.raises(CommandError, match=r"a request took longer than 0\.5 s"):
            await one.load()
        assert one.process is None

    @pytest.mark.parametrize(
        ("condition", "words"),
        [
            ("any(None for _ in iter(int, 1)) if message.body == b'2' else True", "took longer than 1 s"),
            ("__import__('os')._exit(7)", r"\(exit code 7\)"),
            ("__import__('ctypes').string_at(0)", r"\(exit code -11\)"),
            ("__import__('os').write(1, b'x' * 100)", r"\(exit code -9\)"),
            ("__import__('os').write(1, b'\\x01\\xff\\xff\\xff\\xff')", r"\(exit code -9\)"),
            ("__import__('os').write(1, b'\\x01\\0\\0\\0\\x03yes')", r"\(exit code -9\)"),
            ("__import__('os').read(0, 1)", "took longer than 1 s"),
            ("[__import__('os').write(1, bytes(1 << 20)) for _ in range(100)]", r"\(exit code -9\)"),
        ],
    )
    async def test_a_process_that_is_lost_is_started_again_later(self, monkeypatch, condition, words):
        monkeypatch.setattr(filters, "_RESTART_DELAY_S", 60.0)
        if "took longer" in words:
            monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 1.0)
        async with loaded(matching(condition)) as one:
            first = one.process.pid
            with pytest.raises(CommandError, match=words):
                await one.judge(NUMBERS, 4)
            assert not running(first)
            with pytest.raises(CommandError, match="is started again in"):
                await one.judge(NUMBERS, 4)
            one._again_at = 0.0  # noqa: SLF001 -- the delay is over
            with pytest.raises(CommandError, match=words):
                await one.judge(NUMBERS, 4)

    async def test_it_is_started_less_and_less_often(self):
        async with loaded(matching("__import__('os')._exit(7)")) as one:
            begun, starts = time.monotonic(), 0
            while starts < 4:
                with pytest.raises(CommandError) as failed:
                    await one.judge(NUMBERS, 4)
                starts += "started again" not in str(failed.value)
                await asyncio.sleep(0.005)
            assert time.monotonic() - begun >= 0.35  # retries after 0, 50, 150, 350 ms

    async def test_one_that_was_killed_serves_again(self):
        async with loaded(EVEN) as one:
            os.kill(one.process.pid, signal.SIGKILL)
            with pytest.raises(CommandError, match="exit code -9"):
                await one.judge(NUMBERS, 4)
            await asyncio.sleep(0.1)
            assert list(await one.judge(NUMBERS, 4)) == [1, 0, 1, 0]

    async def test_those_that_wait_behind_a_slow_one_are_put_off(self, monkeypatch):
        monkeypatch.setattr(filters, "QUEUE_TIMEOUT_S", 0.1)
        monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 1.0)
        slow = matching("any(None for _ in iter(int, 1))")
        async with loaded(slow) as one:
            outcomes = await asyncio.gather(
                *(one.judge(NUMBERS, 4) for _ in range(3)), return_exceptions=True
            )
            assert [outcome.code for outcome in outcomes] == [1, 215, 215]

    async def test_one_whose_caller_has_gone_answers_nobody_else(self):
        async with loaded(
            matching("any(None for _ in iter(int, 1)) if message.body == b'2' else True")
        ) as one:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.judge(NUMBERS, 4), 0.02)
            assert list(await one.judge(records(b"0", b"1"), 2)) == [1, 1]

    async def test_a_filter_that_is_closed_amid_a_pull_puts_it_off(self):
        async with loaded(matching("any(None for _ in iter(int, 1))")) as one:
            judging = asyncio.create_task(one.judge(NUMBERS, 4))
            await asyncio.sleep(0.05)
            await one.close()
            with pytest.raises(CommandError, match="215: filter class Wanted: the class was replaced"):
                await judging
            with pytest.raises(CommandError, match="215: filter class Wanted: the class was replaced"):
                await one.judge(NUMBERS, 4)
