"""A name server and a broker with TLS: clients, a slave, and wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ACL, ADMIN
from tests.certificates import Certificates
from tests.kit.brokers import running
from tests.kit.waiting import until

from cometmq import Message, Producer, PullConsumer
from cometmq.client import ClientOptions
from cometmq.errors import CometError, ConfigError
from cometmq.message import MessageQueue
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


async def test_everything_goes_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    write(tmp_path / "conf" / "plain_acl.yml", ACL)
    enforcing = {"tls.config.file": str(certificates.file), "tls.server.mode": "enforcing"}
    files = {name: str(tmp_path / name) for name in ("kvConfigPath", "configStorePath")}
    local = {"listenPort": "0", "bindAddress": "127.0.0.1"}
    names = NameServer(NamesrvConfig.from_properties({**files, **local, **enforcing}))
    await names.start()
    namesrv = f"127.0.0.1:{names.port}"
    accounts = {"aclEnable": "true", "rocketmqHome": str(tmp_path), "namesrvAddr": namesrv}
    master, slave = tmp_path / "master", tmp_path / "slave"
    try:
        async with running(master, **enforcing, **accounts) as (_broker, _):
            options = ClientOptions(
                access_key=ADMIN.access_key, secret_key=ADMIN.secret_key, tls=str(certificates.file)
            )
            async with Producer("PG", namesrv=namesrv, client_options=options) as producer:
                sent = await producer.send(Message("Orders", b"secret"))
            async with PullConsumer("G", namesrv=namesrv, client_options=options) as consumer:
                queue = MessageQueue("Orders", "broker-a", sent.queue.queue_id)
                assert [each.body for each in (await consumer.pull(queue, 0)).messages] == [b"secret"]
            async with Producer("PG", namesrv=namesrv) as plain:
                with pytest.raises(CometError):
                    await plain.send(Message("Orders", b"x"), timeout_s=1.0)
            # A slave signs its requests to the master and sends them over TLS.
            copy = {**enforcing, **accounts, "brokerRole": "SLAVE", "brokerId": "1"}
            async with running(slave, **copy) as (other, _):
                sync = other.parts.replication.sync  # type: ignore[union-attr]
                assert sync is not None
                await until(lambda: sync.master_addr)
                await sync.sync()
                assert sync.failure == ""
                assert "Orders" in other.parts.tables.topics.table
    finally:
        await names.stop()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls.server.mode": "enforcing"}, "which names the certificate"),
        (
            {"tls.config.file": "FILE", "tls.server.mode": "enforcing", "filterServerNums": "1"},
            "filter servers do not speak TLS",
        ),
        ({"tls.config.file": "/nowhere"}, "a file of settings that can be read"),
        ({"tls.config.file": "FILE", "tls.server.mode": "perhaps"}, "disabled, permissive or enforcing"),
    ],
)
async def test_half_of_tls_stops_the_start(
    tmp_path: Path, certificates: Certificates, settings: dict[str, str], words: str
) -> None:
    settings = {key: str(certificates.file) if value == "FILE" else value for key, value in settings.items()}

    with pytest.raises(ConfigError, match=words):
        async with running(tmp_path / "store", **settings):
            pass
