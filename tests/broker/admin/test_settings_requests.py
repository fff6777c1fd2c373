"""Changes of settings by request and at a start: allowed changes, the written file, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.brokers import records, refused, running
from tests.kit.faulty_disk import FaultyDisk

from cometmq import logs
from cometmq.broker.base.config import NOT_BY_REQUEST, BrokerConfig
from cometmq.errors import CometError, ConfigError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.java_properties import format_properties, parse_properties
from cometmq.remoting import resolve
from cometmq.standalone import Standalone
from cometmq.store.base.disk import Disk
from cometmq.store.recovery.store_layout import read_layout


@contextlib.contextmanager
def in_a_new_process() -> Iterator[None]:
    """Hide the loggers of this process, as if the process were new."""
    known = logging.root.manager.loggerDict
    kept = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.clear()
        known.update(kept)


async def change(peer, body: bytes):
    return await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)


class TestRequests:
    @pytest.mark.parametrize(
        ("body", "code", "words"),
        [
            *((b"maxMessageSize=100\n%b=1\n" % key.encode(), 16, key) for key in sorted(NOT_BY_REQUEST)),
            (b"autoCreateTopicEnable=maybe\n", 1, "true or false"),
            (b"brokerPermission=99\n", 1, "brokerPermission"),
            (b"maxMessageSize=big\n", 1, "whole number"),
            (b"messageDelayLevel=1x\n", 1, "delays"),
            (b"flushIntervalCommitLog=0\n", 1, "flushIntervalCommitLog"),
            (b"flushConsumerOffsetInterval=" + b"9" * 400, 1, "flushConsumerOffsetInterval"),
            (b"maxMessageSize=100\nsendMessageThreadPoolNums=-4\n", 1, "sendMessageThreadPoolNums"),
            (b"regionId=" + b"x" * 5000, 1, "regionId"),
            (b"noSuchKey=1\n" * 6000, 1, "65536"),
            (b"\xff\xfe", 1, "string2Properties"),
        ],
    )
    async def test_what_cannot_be_set_changes_nothing_and_is_not_kept(self, cluster, peer, body, code, words):
        config = cluster.broker.config
        before, kept = config.properties(), Path(config.broker_config_path).read_bytes()
        answer = await change(peer, body)
        refused(answer, code, words)
        assert len(answer.remark) < 500
        assert config.properties() == before
        assert Path(config.broker_config_path).read_bytes() == kept

    async def test_the_answer_says_what_counts_later_and_what_is_unknown(self, cluster, peer):
        body = b"maxMessageSize=222\nmessageIndexSafe=true\ncheckCRCOnRecover=false\nmaxMesageSize=1\n"
        answer = await change(peer, body)
        assert (answer.code, dict(answer.ext)) == (
            0,
            {"atNextStart": "checkCRCOnRecover messageIndexSafe", "unknown": "maxMesageSize"},
        )
        assert cluster.broker.config.store.max_message_size == 222

    async def test_without_a_file_the_answer_says_that_it_is_lost(self, tmp_path, caplog):
        async with running(tmp_path) as (broker, peer):
            answer = await change(peer, b"maxMessageSize=222\nnoSuchKey=1\n")
            assert (answer.code, answer.ext["notWritten"]) == (0, "true")
            assert broker.config.store.max_message_size == 222
            assert "notWritten" not in (await change(peer, b"noSuchKey=1\n")).ext
        (line,) = [each.message for each in caplog.records if "without a settings file" in each.message]
        assert line.endswith("(mqbroker -c FILE): maxMessageSize")

    async def test_what_holds_and_cannot_be_written_is_no_success(self, tmp_path):
        disk, path = FaultyDisk(really_sync=False), tmp_path / "broker.conf"
        async with running(tmp_path / "store", disk, brokerConfigPath=str(path)) as (broker, peer):
            disk.fail("open", match="broker.conf", error=errno.ENOSPC)
            refused(await change(peer, b"maxMessageSize=111\n"), 1, "taken, but cannot be written")
            assert broker.config.store.max_message_size == 111
            assert (await change(peer, b"maxMessageSize=222\n")).code == 0
            assert path.read_text() == "maxMessageSize=222\n"

    async def test_only_the_keys_that_were_set_change_in_the_file(self, tmp_path):
        path = tmp_path / "broker.conf"
        conf = "# our broker\r\nfileReservedTime = 48\r\n\r\n! more\r\ndeleteWhen=05\r\n"
        path.write_bytes(conf.encode())
        link = tmp_path / "link.conf"
        link.symlink_to(path)
        async with running(tmp_path / "store", brokerConfigPath=str(link)) as (_, peer):
            path.write_bytes(conf.replace("our", "the").encode())  # a user edits the file meanwhile
            assert (await change(peer, b"fileReservedTime=24\nmaxMessageSize=222\nnoSuchKey=1\n")).code == 0
        wanted = conf.replace("our", "the").replace("48", "24") + "maxMessageSize=222\r\n"
        assert path.read_bytes() == wanted.encode()
        assert link.is_symlink()

    async def test_a_file_of_the_package_is_not_written(self, tmp_path, monkeypatch):
        packaged = tmp_path / "cometmq" / "conf"
        packaged.mkdir(parents=True)
        monkeypatch.setattr("cometmq.settings.PACKAGED_CONF", str(packaged))
        (packaged / "broker.conf").write_text("fileReservedTime=48\n")
        path = str(packaged / "broker.conf")
        async with running(tmp_path / "store", brokerConfigPath=path) as (broker, peer):
            refused(await change(peer, b"fileReservedTime=24\n"), 1, "a file of the installed package")
            assert broker.config.store.file_reserved_time == 24
        assert (packaged / "broker.conf").read_text() == "fileReservedTime=48\n"

    async def test_quick_changes_are_written_one_after_the_other(self, tmp_path):
        disk = FaultyDisk(really_sync=False)
        path = tmp_path / "broker.conf"
        reached, let_go = threading.Event(), threading.Event()
        opened = []

        def hold(operation: str, touched: str) -> None:
            if touched.startswith(str(path)) and operation == "open":
                opened.append(touched)
            if touched.startswith(str(path)) and operation == "fdatasync":
                reached.set()
                assert let_go.wait(20)

        async with running(tmp_path / "store", disk, brokerConfigPath=str(path)) as (broker, peer):
            disk.before = hold
            first = asyncio.create_task(change(peer, b"maxMessageSize=111\n"))
            assert await asyncio.to_thread(reached.wait, 20)
            second = asyncio.create_task(change(peer, b"maxMessageSize=222\n"))
            while broker.config.store.max_message_size != 222:
                await asyncio.sleep(0)
            # The second change is in force. If it used a thread, that thread would have started by now.
            await asyncio.to_thread(lambda: None)
            assert not first.done()
            assert len(opened) == 1
            let_go.set()
            assert [(await first).code, (await second).code] == [0, 0]
            assert parse_properties(path.read_text())["maxMessageSize"] == "222"
            assert len(opened) == 2


ODD = (
    "", "0", "-1", "1", "99999999999", "true", "PROM", "OTLP_GRPC", "a,b", "a:b", "1s 2s", "${HOME}",
    "\\u0000", "cometmq.broker.admin.runtime=DEBUG", "tests.broker.admin=INFO",
    "cometmq.of_this_process=INFO", "..",
    "A" * 4096,
)  # fmt: skip


def test_whatever_is_taken_a_start_can_use() -> None:
    """A request with an odd value is refused, or the next start accepts the value."""
    logs.logger("cometmq.of_this_process")
    logs.logger("tests.broker.admin")
    taken = 0
    keys = BrokerConfig.from_properties({}).properties().keys() - NOT_BY_REQUEST
    for key in sorted(keys):
        for value in ODD:
            config = BrokerConfig.from_properties({})
            before = config.properties()
            try:
                config.update({key: value})
            except ConfigError:
                assert config.properties() == before
                continue
            taken += 1
            written = parse_properties(format_properties(config.properties()))
            with in_a_new_process():
                assert BrokerConfig.from_properties(written).properties() == config.properties()
    assert taken > 300
    assert "metricsExporterType" not in keys  # the exporter's package may not be installed


class TestAddresses:
    async def test_a_hosts_name_is_announced_and_its_number_stored(self, tmp_path):
        async with running(tmp_path, brokerIP1="localhost", brokerIP2="localhost") as (broker, peer):
            assert broker.addr == f"localhost:{broker.port}"
            header, _ = broker.parts.registrar.registration()
            assert header.broker_addr == f"localhost:{broker.port}"
            assert header.ha_server_addr == f"localhost:{broker.parts.registrar.address.ha_port}"
            sent = await peer.send()
            assert decode_offset_id(sent.ext["msgId"]).host == f"127.0.0.1:{broker.port}"
            (message,) = records(await peer.pull())
            assert message.store_host == f"127.0.0.1:{broker.port}"

    @pytest.mark.parametrize("key", ["brokerIP1", "brokerIP2", "bindAddress"])
    async def test_a_name_that_nobody_knows_stops_the_start_and_names_the_key(self, tmp_path, key):
        with pytest.raises(ConfigError) as raised:
            async with running(tmp_path / "store", **{key: "no-such-host.invalid"}):
                pass
        assert (raised.value.key, raised.value.value) == (key, "no-such-host.invalid")
        assert not (tmp_path / "store").exists()

    async def test_an_address_of_another_machine_cannot_be_listened_on(self, tmp_path):
        with pytest.raises(ConfigError) as raised:
            async with running(tmp_path, bindAddress="192.0.2.1"):
                pass
        assert (raised.value.key, raised.value.value) == ("bindAddress", "192.0.2.1")

    async def test_a_resolver_that_does_not_answer_is_not_waited_for(self, monkeypatch):
        async def never(*_given, **_named):
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never, raising=False)
        with pytest.raises(ConfigError, match=r"brokerIP1 = 'slow': .* within 0\.01 s"):
            await resolve("brokerIP1", "slow", timeout_s=0.01)

    @pytest.mark.parametrize(
        ("found", "address"),
        [([(10, "::1"), (2, "10.0.0.1"), (2, "10.0.0.2")], "10.0.0.1"), ([(10, "::1"), (10, "::2")], "::1")],
    )
    async def test_the_first_address_of_ipv4_counts_or_of_ipv6(self, monkeypatch, found, address):
        async def answer(*_given, **_named):
            return [(family, 1, 6, "", (host, 0)) for family, host in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer, raising=False)
        assert await resolve("brokerIP1", "name") == address


async def test_a_poisoned_file_of_a_store_stops_the_start_with_file_line_and_key(tmp_path):
    conf = Path(Standalone(tmp_path, 0, 0).prepare(0)[1])
    good = conf.read_text()
    conf.write_text("cleanResourceInterval=10000\n" + good + "cleanResourceInterval=0\n")
    for brokers in (1, 2):
        with pytest.raises(ConfigError) as raised:
            await Standalone(tmp_path, 0, 0, brokers=brokers).start()
        line = len(good.splitlines()) + 2
        assert str(raised.value).startswith(f"{conf} line {line}: cleanResourceInterval = '0': expected ")
    with pytest.raises(ConfigError, match=rf"^{conf} line {line}: cleanResourceInterval"):
        read_layout(Disk(), str(conf.parent))  # the store's tools read the file, too
    with pytest.raises(ConfigError) as raised:  # the value was passed to the start and is not in the file
        await Standalone(tmp_path, 0, 0, settings={"cleanResourceInterval": "1"}).start()
    assert str(raised.value).startswith("cleanResourceInterval = '1': expected ")


@pytest.mark.parametrize("brokers", [1, 2])
async def test_a_name_in_the_file_of_a_store_that_nobody_knows_does_too(tmp_path, brokers, capfd):
    conf = Path(Standalone(tmp_path, 0, 0).prepare(0)[1])
    conf.write_text("brokerIP2=no-such-host.invalid\n" + conf.read_text())
    with pytest.raises(CometError) as raised:
        await Standalone(tmp_path, 0, 0, brokers=brokers).start()
    said = str(raised.value) if brokers == 1 else capfd.readouterr().err
    assert f"{conf} line " in said
    assert ": brokerIP2 = 'no-such-host.invalid'" in said
