"""mqnamesrv, mqbroker and mqshutdown as real processes: options, files, signals, exit codes."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import Run, Serve, write_conf

from cometmq import Message, Producer, ProducerOptions
from cometmq.admin import Admin, ReadRange
from cometmq.errors import CometError
from cometmq.testing import ServerProcess

SMALL = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20 * 1000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
}


def broker_conf(tmp_path: Path, **settings: object) -> str:
    """Write the configuration file of a small broker on a free port."""
    basics = {
        "brokerName": "broker-t",
        "brokerIP1": "127.0.0.1",
        "listenPort": 0,
        "storePathRootDir": tmp_path / "store",
        **SMALL,
    }
    return write_conf(tmp_path / "broker.conf", **(basics | settings))


def port_of(line: str) -> int:
    found = re.search(r"(?::|port )(\d+)\b", line)
    assert found is not None, line
    return int(found.group(1))


async def send_until_it_stops(addr: str, broker: ServerProcess, acknowledged: set[str]) -> None:
    """Send from 32 tasks, stop the broker after 2000 messages, and continue until sends fail."""
    options = ProducerOptions(send_timeout_s=20.0, retry_times=0)

    async def work(producer: Producer) -> None:
        while True:
            try:
                acknowledged.add((await producer.send(Message("loaded", b"x" * 100))).msg_id)
            except CometError:
                return
            if len(acknowledged) == 2000:
                broker.process.terminate()

    async with Producer("loaders", namesrv=addr, options=options) as producer:
        await asyncio.gather(*(work(producer) for _ in range(32)))
    assert await asyncio.to_thread(broker.wait) == 0


async def ids_of_all(addr: str, topic: str) -> set[str]:
    """Return the ids of all messages of a topic."""
    async with Admin(addr) as admin:
        return {message.msg_id async for message in admin.read(ReadRange(topic=topic, count=1_000_000))}


class TestOptions:
    def test_the_name_server_prints_its_configuration(self, run: Run, tmp_path: Path) -> None:
        conf = write_conf(tmp_path / "namesrv.conf", listenPort=19876)

        printed = run("mqnamesrv", "-c", conf, "-p")

        lines = printed.stdout.splitlines()
        assert printed.returncode == 0
        assert "listenPort=19876" in lines
        assert f"configStorePath={conf}" in lines
        assert "scanNotActiveBrokerInterval=10000" in lines

    def test_the_broker_prints_all_or_the_important_settings(self, run: Run, tmp_path: Path) -> None:
        conf = broker_conf(tmp_path, flushDiskType="SYNC_FLUSH")

        everything = run("mqbroker", "-c", conf, "-p").stdout.splitlines()
        important = run("mqbroker", "-c", conf, "-m").stdout.splitlines()

        assert "flushDiskType=SYNC_FLUSH" in important
        assert set(important) < set(everything)
        assert "longPollingEnable=true" in set(everything) - set(important)

    def test_printing_names_the_ports_that_are_taken(self, run: Run, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            conf = broker_conf(tmp_path, listenPort=0, haListenPort=port)
            broker = run("mqbroker", "-c", conf, "-p")
            namesrv = run("mqnamesrv", "-c", write_conf(tmp_path / "n.conf", listenPort=port), "-p")
        for key, done in (("haListenPort", broker), ("listenPort", namesrv)):
            assert done.returncode == 0
            assert done.stderr.startswith(f"warning: {key} = '{port}': expected a port that can be listened")

    def test_the_command_line_wins(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def namesrv(*arguments: str) -> str:
            lines = run("mqbroker", *arguments, "-p").stdout.splitlines()
            return next(line for line in lines if line.startswith("namesrvAddr="))

        monkeypatch.setenv("NAMESRV_ADDR", "env:1")
        conf = broker_conf(tmp_path, namesrvAddr="file:2")

        assert namesrv() == "namesrvAddr=env:1"
        monkeypatch.setenv("COMETMQ_NAMESRV", "own:1")
        assert namesrv() == "namesrvAddr=own:1"
        assert namesrv("-c", conf) == "namesrvAddr=file:2"
        assert namesrv("-c", conf, "-n", "line:3;line:4") == "namesrvAddr=line:3;line:4"

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"listenPort": "many"}, ["listenPort", "'many'", "whole number"]),
            ({"listenPort": 70000}, ["listenPort", "'70000'", "0 to 65535"]),
            ({"autoCreateTopicEnable": "maybe"}, ["autoCreateTopicEnable", "'maybe'", "true or false"]),
            ({"flushDiskType": "SOMETIMES"}, ["flushDiskType", "'SOMETIMES'", "SYNC_FLUSH"]),
            ({"namesrvAddr": "nowhere"}, ["namesrvAddr", "'nowhere'", "host:port"]),
            ({"brokerName": "\\u12"}, ["broker.conf line 1", "hexadecimal"]),
            ({"mappedFileSizeCommitLog": 100}, ["broker.conf line 5: mappedFileSizeCommitLog", "1024 to"]),
            ({"defaultTopicQueueNums": 0}, ["broker.conf line 9: defaultTopicQueueNums", "1 to"]),
            ({"flushIntervalCommitLog": "9" * 400}, ["broker.conf line 9: flushIntervalCommitLog"]),
            ({"bindAddress": "no-such-host.invalid"}, ["broker.conf line 9: bindAddress", "resolves"]),
            ({"brokerIP2": "no-such-host.invalid"}, ["broker.conf line 9: brokerIP2", "resolves"]),
        ],
    )
    def test_a_bad_value_stops_the_start_with_key_value_and_expected_form(
        self, run: Run, tmp_path: Path, settings: dict[str, object], words: list[str]
    ) -> None:
        failed = run("mqbroker", "-c", broker_conf(tmp_path, **settings))

        assert failed.returncode == 255
        assert failed.stderr.count("\n") == 1
        for word in words:
            assert word in failed.stderr
        assert not (tmp_path / "store").exists()

    @pytest.mark.parametrize(
        ("key", "directory", "line"),
        [
            ("storePathRootDir", "/dev/null", 4),
            ("storePathRootDir", "/dev/null/x/y", 4),
            ("storePathCommitLog", "/dev/null/x", 9),
            ("readOnlyCommitLogStorePaths", "/dev/null/x", 9),
        ],
    )
    def test_a_path_that_cannot_be_a_directory_stops_the_start(
        self, run: Run, tmp_path: Path, key: str, directory: str, line: int
    ) -> None:
        failed = run("mqbroker", "-c", broker_conf(tmp_path, **{key: directory}))

        assert failed.returncode == 255
        assert f"broker.conf line {line}: {key} = '{directory}': expected a directory" in failed.stderr
        assert failed.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("scanNotActiveBrokerInterval=0", "namesrv.conf line 2: scanNotActiveBrokerInterval = '0'"),
            ("bindAddress=no-such-host.invalid", "namesrv.conf line 2: bindAddress = 'no-such-host.invalid'"),
            ("tls.config.file=/nowhere", "namesrv.conf line 2: tls.config.file = '/nowhere'"),
            ("kvConfigPath=/dev/null/x", "namesrv.conf line 2: kvConfigPath = '/dev/null/x'"),
            ("configStorePath=/dev", "namesrv.conf line 2: configStorePath = '/dev'"),
        ],
    )
    def test_name_servers_refuse_bad_values(self, run: Run, tmp_path: Path, setting: str, words: str) -> None:
        conf = tmp_path / "namesrv.conf"
        conf.write_text(f"listenPort=0\n{setting}\n")

        failed = run("mqnamesrv", "-c", str(conf))

        assert failed.returncode == 255
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1

    def test_an_unknown_key_is_a_warning_that_names_the_nearest_one(self, run: Run, tmp_path: Path) -> None:
        printed = run("mqbroker", "-c", broker_conf(tmp_path, flushDiskTipe="ASYNC_FLUSH"), "-p")

        assert printed.returncode == 0
        assert "flushDiskTipe" in printed.stderr
        assert "flushDiskType" in printed.stderr
        assert "flushDiskTipe=ASYNC_FLUSH" in printed.stdout.splitlines()

    @pytest.mark.parametrize(
        ("command", "arguments", "words"),
        [
            ("mqbroker", ("-x",), "No such option"),
            ("mqbroker", ("-c", "/nowhere/broker.conf"), "/nowhere/broker.conf: No such file or directory"),
            ("mqbroker", ("-n", "host"), "namesrvAddr"),
            ("mqbroker", ("-n", "a b:1"), "mqbroker: namesrvAddr = 'a b:1'"),
            ("mqnamesrv", ("-x",), "No such option"),
            ("mqnamesrv", ("-c", "/nowhere/namesrv.conf"), "No such file or directory"),
        ],
    )
    def test_bad_options_end_with_apaches_exit_code(
        self, run: Run, command: str, arguments: tuple[str, ...], words: str
    ) -> None:
        failed = run(command, *arguments)

        assert failed.returncode == 255
        assert words in failed.stderr
        assert "Traceback" not in failed.stderr


@pytest.fixture
def hangups_not_ignored() -> Iterator[None]:
    """Give child processes the default handler of SIGHUP, even if this run ignores it (`nohup`)."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


class TestLife:
    @pytest.mark.usefixtures("hangups_not_ignored")
    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_stops_each_server_cleanly(self, serve: Serve, tmp_path: Path, signum: int) -> None:
        with serve("mqnamesrv", "--port", "0") as namesrv:
            addr = f"127.0.0.1:{port_of(namesrv.wait_ready())}"
            conf = broker_conf(tmp_path, bindAddress="127.0.0.1")
            with serve("mqbroker", "-c", conf, "-n", addr) as broker:
                assert f"and name server is {addr}" in broker.wait_ready()
                assert (tmp_path / "store" / "abort").exists()

                assert broker.stop(signum) == 0
            assert namesrv.stop(signum) == 0

        assert not (tmp_path / "store" / "abort").exists()
        assert broker.output.count("\n") == namesrv.output.count("\n") == 0  # nothing follows the ready line

    def test_messages_are_there_after_a_restart(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        with serve("mqnamesrv", "--port", "0") as namesrv:
            addr = f"127.0.0.1:{port_of(namesrv.wait_ready())}"
            conf = broker_conf(tmp_path, namesrvAddr=addr)
            for body in ("first", "second"):
                with serve("mqbroker", "-c", conf):
                    assert run("cometmq", "send", "kept", body, "-n", addr).returncode == 0
            with serve("mqbroker", "-c", conf):
                read = run("mqadmin", "consumeMessage", "-t", "kept", "-n", addr)

        assert sorted(re.findall(r"BODY: (\w+)", read.stdout)) == ["first", "second"]

    async def test_a_stop_under_load_loses_nothing_acknowledged(self, serve: Serve, tmp_path: Path) -> None:
        acknowledged: set[str] = set()
        with serve("mqnamesrv", "--port", "0") as namesrv:
            addr = f"127.0.0.1:{port_of(namesrv.wait_ready())}"
            conf = broker_conf(tmp_path, namesrvAddr=addr)
            with serve("mqbroker", "-c", conf) as broker:
                await send_until_it_stops(addr, broker, acknowledged)
            with serve("mqbroker", "-c", conf):
                stored = await ids_of_all(addr, "loaded")

        assert len(acknowledged) >= 2000
        assert acknowledged - stored == set()

    def test_a_port_in_use_is_told_in_one_line(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        with serve("mqnamesrv", "--port", "0") as namesrv:
            port = port_of(namesrv.wait_ready())
            second = run("mqnamesrv", "--port", str(port))
            broker = run("mqbroker", "-c", broker_conf(tmp_path, listenPort=port))

        for failed in (second, broker):
            assert failed.returncode == 255
            assert "in use" in failed.stderr
            assert failed.stderr.count("\n") == 1

    def test_a_store_in_use_is_refused(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        conf = broker_conf(tmp_path)
        with serve("mqbroker", "-c", conf):
            second = run("mqbroker", "-c", conf)

        assert second.returncode == 253
        assert str(tmp_path / "store") in second.stderr
        assert second.stderr.count("\n") == 1


class TestShutdown:
    def test_it_stops_what_runs_and_says_so(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        with (
            serve("mqnamesrv", "--port", "0") as namesrv,
            serve("mqbroker", "-c", broker_conf(tmp_path)) as broker,
        ):
            for kind, process in (("broker", broker), ("namesrv", namesrv)):
                asked = run("mqshutdown", kind, "--wait", "30")

                assert asked.returncode == 0
                assert asked.stdout.splitlines() == [
                    f"The mq{kind}({process.pid}) is running...",
                    f"Send shutdown request to mq{kind}({process.pid}) OK",
                ]
                assert process.wait() == 0

    @pytest.mark.parametrize("kind", ["broker", "namesrv"])
    def test_nothing_to_stop_is_an_error(self, run: Run, kind: str) -> None:
        asked = run("mqshutdown", kind)

        assert asked.returncode == 255
        assert asked.stdout == f"No mq{kind} running.\n"

    def test_a_killed_server_does_not_count_as_running(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        with serve("mqbroker", "-c", broker_conf(tmp_path)) as broker:
            broker.kill()

        assert run("mqshutdown", "broker").returncode == 255


class TestStandalone:
    def test_several_brokers_share_a_topic(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        ports = ("--namesrv-port", "0", "--broker-port", "0")
        arguments = ("standalone", "--data", str(tmp_path / "data"), "--brokers", "2", *ports)
        with serve("cometmq", *arguments, ready="broker-b") as cluster:
            addr = next(line.split()[-1] for line in cluster.output.splitlines() if "name server" in line)
            made = run("mqadmin", "updateTopic", "-n", addr, "-c", "DefaultCluster", "-t", "shared")
            sent = run("cometmq", "send", "shared", *"abcdefghijklmnopqrst", "-n", addr)
            assert cluster.stop(signal.SIGINT) == 0

        assert len(made.stdout.splitlines()) == 3
        assert {line.split()[2] for line in sent.stdout.splitlines()} == {"broker-a", "broker-b"}
        assert (tmp_path / "data" / "broker-b" / "broker.conf").exists()

    def test_a_port_in_use_stops_the_whole_start(self, serve: Serve, run: Run, tmp_path: Path) -> None:
        with serve("mqnamesrv", "--port", "0") as namesrv:
            port = str(port_of(namesrv.wait_ready()))
            failed = run("cometmq", "standalone", "--data", str(tmp_path / "data"), "--namesrv-port", port)

        assert failed.returncode == 1
        assert failed.stdout == ""
        assert "in use): is CometMQ already running? --namesrv-port" in failed.stderr
        assert failed.stderr.count("\n") == 1
