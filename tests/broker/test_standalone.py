"""The whole cluster in one call: ports, files, several brokers, a thread, and a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.brokers import Peer, records
from tests.kit.crash_images import CrashPoint
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.recording_disk import RecordingDisk
from tests.kit.waiting import until

from cometmq.errors import CometError, ConfigError
from cometmq.protocol.bodies import ClusterInfo
from cometmq.protocol.java_properties import parse_properties
from cometmq.standalone import Standalone, StandaloneError, broker_name


@contextlib.asynccontextmanager
async def serving(path, **more) -> AsyncIterator[tuple[Standalone, Peer]]:
    """Start a cluster with a single broker and connect a client."""
    async with (
        Standalone(path, 0, 0, **more) as cluster,
        Peer(cluster.broker_addrs["broker-a"]) as peer,
    ):
        yield cluster, peer


def settings_of(path) -> dict[str, str]:
    return parse_properties((path / "broker.conf").read_text())


async def brokers_known(namesrv_addr: str) -> set[str]:
    async with Peer(namesrv_addr) as peer:
        answer = await peer.call(106)
    table = ClusterInfo.decode(answer.body).broker_addr_table
    return {data.broker_addrs[0] for data in table.values()}


async def test_small_files_and_the_settings_that_say_so(tmp_path):
    async with serving(tmp_path) as (_, peer):
        await peer.send()
    store = tmp_path / "broker-a"
    settings = settings_of(store)
    assert (store / "commitlog" / ("0" * 20)).stat().st_size == 64 * 1024 * 1024
    assert settings["mappedFileSizeCommitLog"] == str(64 * 1024 * 1024)
    assert settings["mappedFileSizeConsumeQueue"] == "60000"
    assert settings["maxHashSlotNum"] == "50000"
    assert settings["storePathRootDir"] == str(store)


async def test_settings_of_a_run_are_not_kept_but_segment_sizes_are(tmp_path):
    settings = {"maxMessageSize": "1000", "mappedFileSizeCommitLog": "2097152"}
    async with serving(tmp_path, settings=settings) as (_, peer):
        assert (await peer.send(body=b"x" * 1001)).code == 13
    kept = settings_of(tmp_path / "broker-a")
    assert (kept["mappedFileSizeCommitLog"], kept.get("maxMessageSize")) == ("2097152", None)


async def test_an_operators_settings_in_the_store_stay(tmp_path):
    async with Standalone(tmp_path, 0, 0):
        pass
    path = tmp_path / "broker-a" / "broker.conf"
    path.write_text("# ours\r\n" + path.read_text() + "maxMessageSize=1000\n")
    before = path.read_bytes().splitlines(keepends=True)
    Standalone(tmp_path, 0, 1234).prepare(0)
    changed = set(before).symmetric_difference(path.read_bytes().splitlines(keepends=True))
    assert {line.partition(b"=")[0] for line in changed} == {b"namesrvAddr", b"listenPort"}
    async with serving(tmp_path) as (_, peer):
        assert (await peer.send(body=b"x" * 1001)).code == 13


@pytest.mark.parametrize("text", [b"", b"\n# nothing\n"])
async def test_an_empty_conf_beside_a_store_is_refused(tmp_path, text):
    async with serving(tmp_path) as (_, peer):
        await peer.send(body=b"kept")
    path = tmp_path / "broker-a" / "broker.conf"
    good = path.read_bytes()
    path.write_bytes(text)
    with pytest.raises(StandaloneError, match=r"broker\.conf is empty, but its directory contains a store"):
        await Standalone(tmp_path, 0, 0).start()
    assert path.read_bytes() == text
    path.write_bytes(good)
    async with serving(tmp_path) as (_, peer):
        assert [m.body for m in records(await peer.pull())] == [b"kept"]


def test_an_empty_conf_without_a_store_is_filled(tmp_path):
    (tmp_path / "broker-a").mkdir()
    (tmp_path / "broker-a" / "broker.conf").touch()
    Standalone(tmp_path, 0, 0).prepare(0)
    assert settings_of(tmp_path / "broker-a")["mappedFileSizeConsumeQueue"] == "60000"


def test_a_power_failure_leaves_the_old_conf_or_the_new(tmp_path):
    root = os.path.join(tmp_path, "broker-a")
    start = {os.path.join("/", *Path(root).parts[1 : n + 1]): None for n in range(1, len(Path(root).parts))}
    disk = RecordingDisk(start)
    path = Standalone(tmp_path, 0, 10911, disk=disk).prepare(0)[1]
    old = disk.image()[path]
    settled = len(disk.history)
    Standalone(tmp_path, 0, 10911, 1, {"mappedFileSizeCommitLog": "2097152"}, disk).prepare(0)
    new = disk.image()[path]
    assert None not in (old, new)
    assert old != new
    for at in range(settled, len(disk.history) + 1):
        found = {image.get(path) for _, image in CrashPoint(disk, at).every_image()}
        assert found <= {old, new}
    assert found == {new}


async def test_settings_changed_at_run_time_are_written_through_the_disk(start_cluster):
    """The settings file is never written in place: its new content is synced before the rename."""
    cluster = await start_cluster()
    store = cluster.broker.parts.store
    store.disk = disk = FaultyDisk()
    order = []
    disk.before = lambda operation, path: order.append((operation, os.path.basename(path)))
    text = b"maxMessageSize=4000000\n"
    answer = await cluster.peer().call(25, body=text)
    assert answer.code == 0
    path = Path(cluster.broker.config.broker_config_path)
    await until(lambda: ("fsync_dir", path.parent.name) in order)
    assert order == [
        ("open", "broker.conf.tmp"), ("truncate", "broker.conf.tmp"), ("pwrite", "broker.conf.tmp"),
        ("fdatasync", "broker.conf.tmp"), ("rename", "broker.conf.tmp"), ("fsync_dir", path.parent.name),
    ]  # fmt: skip
    assert settings_of(path.parent)["maxMessageSize"] == "4000000"


async def test_several_brokers_are_processes_with_stores_of_their_own(tmp_path):
    async with Standalone(tmp_path, 0, 0, brokers=2) as cluster:
        assert list(cluster.broker_addrs) == ["broker-a", "broker-b"]
        assert await brokers_known(cluster.namesrv_addr) == set(cluster.broker_addrs.values())
        for name, addr in cluster.broker_addrs.items():
            async with Peer(addr) as peer:
                assert (await peer.send(body=name.encode())).code == 0
                assert [m.body for m in records(await peer.pull())] == [name.encode()]
        processes = [child.process for child in cluster.children]
    assert [process.returncode for process in processes] == [0, 0]
    assert not (tmp_path / "broker-a" / "abort").exists()
    assert not (tmp_path / "broker-b" / "abort").exists()


async def test_a_cluster_that_cannot_start_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError):
        await Standalone(tmp_path, 0, 0, settings={"brokerPermission": "x"}).start()
    async with Standalone(tmp_path, 0, 0) as first:
        with pytest.raises(CometError):
            await Standalone(tmp_path, 0, 0).start()  # the store is already in use
        assert await brokers_known(first.namesrv_addr) == set(first.broker_addrs.values())


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program with its output in a pipe."""
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


async def test_children_die_with_their_parent(tmp_path):
    program = (
        "import asyncio, sys\n"
        "from cometmq.standalone import Standalone\n"
        "async def main():\n"
        "    cluster = Standalone(sys.argv[1], 0, 0, brokers=2)\n"
        "    await cluster.start()\n"
        "    print(*(child.process.pid for child in cluster.children), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.to_thread(start, program, str(tmp_path))
    try:
        assert parent.stdout is not None
        children = [int(word) for word in (await asyncio.to_thread(parent.stdout.readline)).split()]
        assert len(children) == 2
        parent.send_signal(signal.SIGKILL)
        await asyncio.to_thread(parent.wait)
        await until(lambda: not any(map(alive, children)))
        assert not (tmp_path / "broker-a" / "abort").exists()  # the brokers were stopped cleanly
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_programs_without_a_loop_run_it_in_a_thread(tmp_path):
    with Standalone(tmp_path, 0, 0).run_in_thread() as cluster:

        async def use() -> int:
            async with Peer(cluster.broker_addrs["broker-a"]) as peer:
                return (await peer.send()).code

        assert asyncio.run(use()) == 0
    assert not (tmp_path / "broker-a" / "abort").exists()


def test_it_serves_within_a_second_of_its_start(tmp_path):
    """The goal is 0.7 s; the test allows ten times as much on a busy machine, and five attempts.

    The time in which the process was ready but other processes ran (second number of schedstat, ns) is
    subtracted.
    """
    program = (
        "import asyncio, sys\n"
        "from cometmq.standalone import Standalone\n"
        "async def main():\n"
        "    async with Standalone(sys.argv[1], 0, 0):\n"
        "        print(open('/proc/self/schedstat').read(), flush=True)\n"
        "asyncio.run(main())\n"
    )
    took = []
    while len(took) < 5 and min(took, default=9.0) >= 1.0:
        begun = time.monotonic()
        with start(program, str(tmp_path / str(len(took)))) as process:
            assert process.stdout is not None
            waited = int(process.stdout.readline().split()[1]) / 1e9
            took.append(time.monotonic() - begun - waited)
    assert min(took) < 7.0, took


@pytest.mark.parametrize(
    ("number", "name"), [(0, "a"), (1, "b"), (25, "z"), (26, "aa"), (27, "ab"), (52, "ba")]
)
def test_names_of_brokers(number, name):
    assert broker_name(number) == f"broker-{name}"
