"""kill -9 of a process that writes to a store: acknowledged messages are there, in order, without gaps."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.kit import everything, finds, open_store

from cometmq.store import MessageStore

WRITER = """
import asyncio, os, sys
from tests.store.kit import HOST, small
from cometmq.store import MessageStore

async def main(root, first, sync):
    changes = {"flush_interval_commit_log": 5, "flush_interval_consume_queue": 7,
               "flush_consume_queue_thorough_interval": 20, "mapped_file_size_commit_log": 256 << 10,
               "flush_disk_type": "SYNC_FLUSH" if sync else "ASYNC_FLUSH"}
    store = MessageStore.open(small(root, **changes))
    store.start()
    number = first
    while True:
        sent = []
        for _ in range(number % 9 + 1):
            body = b"%d:" % number + bytes(number * 7919 % 3000)
            keys = b"KEYS\\x01k%d" % number
            store.appender.append("T", number % 3, body, keys, born_timestamp_ms=1, born_host=HOST)
            sent.append(number)
            number += 1
        commit = store.commit()
        assert commit.error is None
        line = b"".join(b"%d\\n" % each for each in sent)
        if sync:
            answer = lambda ok, line=line: os.write(1, line) if ok else os._exit(7)
            store.flusher.wait_for(commit.end_offset, answer)
        else:
            os.write(1, line)
        await asyncio.sleep(0)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "sync"))
"""
CYCLES = int(os.environ.get("COMETMQ_KILL_CYCLES", "5"))


def check(store: MessageStore, acknowledged: set[int], keys: list[int]) -> int:
    """Check that every queue is ordered and complete; return the next free number."""
    found: list[int] = []
    for queue_id in range(3):
        numbers = [int(body.split(b":")[0]) for body in everything(store, "T", queue_id)]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == store.max_offset("T", queue_id) - store.min_offset("T", queue_id)
        found += numbers
    assert acknowledged <= set(found)
    finds(store, keys)
    return max(found, default=-1) + 1


@pytest.mark.timeout(300 + 10 * CYCLES)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_nothing_acknowledged_is_missing_after_kill_9(tmp_path: Path, mode: str) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    number = 0
    for cycle in range(CYCLES):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number), mode],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        target = chance.randrange(1, 3000)
        lines = []
        for line in writer.stdout:
            lines.append(int(line))
            if len(lines) >= target:
                writer.send_signal(signal.SIGKILL)
                break
        lines += [int(line) for line in writer.stdout if line.endswith(b"\n")]
        writer.stdout.close()
        assert writer.wait(20) == -signal.SIGKILL, f"cycle {cycle}, seed {seed}"
        acknowledged.update(lines)
        store = open_store(tmp_path, mapped_file_size_commit_log=256 << 10)
        assert store.recovered.damage == []
        number = check(store, acknowledged, chance.sample(sorted(acknowledged), min(50, len(acknowledged))))
        if cycle % 2:
            store.close()
        else:
            store.crash()
    assert len(acknowledged) > CYCLES
