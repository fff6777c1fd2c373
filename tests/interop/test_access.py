"""Accounts and TLS: Apache's clients and tools with our broker, and our client with Apache's broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.access.test_files import write
from tests.certificates import Certificates
from tests.interop import apache
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometCluster, CometNamesrv
from tests.interop.driver import Driver, JavaError, body_of, message
from tests.interop.jars import CLIENT_VERSIONS
from tests.interop.processes import Cluster
from tests.kit.waiting import wait_until

from cometmq import Message, Producer, PullConsumer
from cometmq.client import ClientOptions
from cometmq.errors import BrokerError
from cometmq.message import MessageQueue

ACL = """
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
- accessKey: program
  secretKey: secret-of-program
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms: [Orders=PUB|SUB, Closed=DENY, DefaultCluster_REPLY_TOPIC=PUB]
  groupPerms: [billing=SUB, repliers=SUB, readers=SUB, lite-readers=SUB]
"""
SIGNED = ("-Ddriver.accessKey=program", "-Ddriver.secretKey=secret-of-program")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[CometCluster]:
    """Run our servers with accounts, and with TLS beside plain connections."""
    directory = tmp_path_factory.mktemp("guarded")
    write(directory / "plain_acl.yml", ACL)
    tls = {"tls.config.file": str(certificates.file)}
    soon = {"transactionTimeOut": "500", "transactionCheckInterval": "500"}
    running = CometCluster(directory, tls, {**tls, **soon, "aclEnable": "true"})
    yield running
    running.stop()


def java_tls(certificates: Certificates) -> list[str]:
    """Return the flags of a client that verifies the server's certificate."""
    strict = {"tls_test_mode_enable": "false", "tls_client_authServer": "true"}
    path = certificates.settings("java.properties", tls_server_certPath="", **strict)
    return ["-Dtls.enable=true", f"-Dtls.config.file={path}"]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("version", CLIENT_VERSIONS)
def test_javas_clients_sign_and_speak_tls(
    ours: CometCluster,
    certificates: Certificates,
    own_java_client: Callable[..., Driver],
    version: str,
    secure: bool,
) -> None:
    java = own_java_client(version, *SIGNED, *(java_tls(certificates) if secure else []))
    body = f"{version} {secure}".encode()
    java.call("producer_start", name="p", namesrv=ours.namesrv, retries=0)
    java.call("push_start", name="c", namesrv=ours.namesrv, group="billing", topics={"Orders": "*"})

    java.send("p", [message("Orders", body)])
    java.send("p", [message("Orders", body + b" 1"), message("Orders", body + b" 2")], "batch")
    got = java.wait_delivered("c", lambda seen: sum(body_of(each).startswith(body) for each in seen) >= 3)

    assert {body_of(each) for each in got} >= {body, body + b" 1", body + b" 2"}
    with pytest.raises(JavaError, match="Closed") as caught:
        java.send("p", [message("Closed", b"x")])
    assert caught.value.code == (1 if version.startswith("4.") else 16)  # codes of 4.9's and of 5.x's refusal


@pytest.mark.parametrize("version", CLIENT_VERSIONS)
def test_javas_transactions_and_replies_have_the_rights_that_they_need(
    ours: CometCluster, own_java_client: Callable[..., Driver], version: str
) -> None:
    java = own_java_client(version, *SIGNED)
    java.call("transaction_start", name="t", group="tg", namesrv=ours.namesrv)
    for name, (local, check) in {
        "told": ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE"),
        "asked": ("UNKNOW", "COMMIT_MESSAGE"),
    }.items():
        plan = {"local": local, "check": check}
        java.call(
            "transaction_send",
            name="t",
            messages=[message("Orders", f"{version} {name}".encode(), properties=plan)],
        )
    java.call("push_start", name="c", namesrv=ours.namesrv, group="billing", topics={"Orders": "*"})
    wanted = {f"{version} told".encode(), f"{version} asked".encode()}
    java.wait_delivered("c", lambda seen: wanted <= {body_of(each) for each in seen})
    java.call("transaction_stop", name="t")
    java.call("push_stop", name="c")

    java.call(
        "replier_start", name="r", namesrv=ours.namesrv, topic="Orders", consumerGroup="repliers", times=1
    )
    java.call("producer_start", name="p", namesrv=ours.namesrv, retries=0)
    (reply,) = java.send("p", [message("Orders", b"question")], "request")
    assert body_of(reply) == b"re: question"


@pytest.mark.parametrize("version", CLIENT_VERSIONS)
def test_nothing_that_javas_clients_ask_in_their_life_is_refused(
    ours: CometCluster, own_java_client: Callable[..., Driver], version: str
) -> None:
    java = own_java_client(version, *SIGNED)
    log = ours.directory / "broker.log"
    before = log.stat().st_size
    body, members = f"life {version}".encode(), {"Orders": "*"}
    java.call("producer_start", name="p", namesrv=ours.namesrv, retries=0, trace=True)
    (sent,) = java.send("p", [message("Orders", body, keys="life")])
    java.send("p", [message("Orders", b"y", delay=1)])
    queue = {key: sent[key] for key in ("topic", "brokerName", "queueId")}
    assert java.call("view", name="p", topic="Orders", msgId=sent["msgId"])["msgId"] == sent["msgId"]
    assert java.call("query", name="p", topic="Orders", key="life")
    assert java.call("queues", name="p", topic="Orders")
    assert java.call("bounds", name="p", queue=queue, timestamp=0)["min"] == 0
    java.call(
        "push_start", name="c", namesrv=ours.namesrv, group="billing", topics=members, trace=True,
        failTimes=1, failDelayLevel=1,
    )  # fmt: skip
    java.call("push_start", name="o", namesrv=ours.namesrv, group="repliers", topics=members, orderly=True)
    java.call("pull_start", name="u", namesrv=ours.namesrv, group="readers")
    java.call("lite_start", name="l", namesrv=ours.namesrv, group="lite-readers", topics=members)
    assert java.call("pull", name="u", queue=queue, offset=sent["queueOffset"])["messages"]
    java.call("offset_update", name="u", queue=queue, offset=1)
    assert java.call("offset_fetch", name="u", queue=queue) == 1
    assert java.call("lite_poll", name="l")
    java.call("lite_commit", name="l")
    for name, times in (("c", 2), ("o", 1)):
        java.wait_delivered(name, lambda seen, n=times: [body_of(e) for e in seen].count(body) >= n)
    ends = [("push_stop", "c"), ("push_stop", "o"), ("pull_stop", "u"), ("lite_stop", "l")]
    for end in [java.start(op, name=name) for op, name in [*ends, ("producer_stop", "p")]]:
        end.result(60)

    # The following refusal is the only one that is logged.
    java.call("producer_start", name="q", namesrv=ours.namesrv, retries=0)
    with pytest.raises(JavaError, match="Closed"):
        java.send("q", [message("Closed", b"x")])

    def refusals() -> list[str]:
        return [line for line in log.read_bytes()[before:].decode().splitlines() if " refused: " in line]

    (line,) = wait_until("the line of the refusal", refusals)
    assert "topic:Closed" in line


@pytest.mark.parametrize("version", CLIENT_VERSIONS)
def test_a_java_client_without_an_account_is_refused(
    ours: CometCluster, own_java_client: Callable[..., Driver], version: str
) -> None:
    java = own_java_client(version)
    java.call("producer_start", name="p", namesrv=ours.namesrv, retries=0)

    with pytest.raises(JavaError) as caught:
        java.send("p", [message("Orders", b"x")])
    assert caught.value.code == (1 if version.startswith("4.") else 16)


@pytest.mark.slow("a JVM starts for each command")
def test_apaches_tools_change_our_accounts(ours: CometCluster, tmp_path: Path) -> None:
    write(tmp_path / "conf" / "tools.yml", "accessKey: adminer\nsecretKey: secret-of-adminer\n")

    def run(*words: str) -> str:
        return apache.mqadmin("4.9.7", tmp_path, words[0], "-n", ours.namesrv, *words[1:])

    account = ("-a", "somebody", "-s", "a-good-secret", "-t", "T=PUB,U=SUB", "-m", "false")
    assert "success" in run("updateAclConfig", "-c", "DefaultCluster", *account)
    assert "somebody" in (ours.directory / "plain_acl.yml").read_text()
    assert "success" in run("updateGlobalWhiteAddr", "-b", ours.broker_addr, "-g", "10.9.9.9")
    versions = run("clusterAclConfigVersion", "-c", "DefaultCluster")
    assert str(ours.directory / "plain_acl.yml") in versions
    assert "success" in run("deleteAclConfig", "-b", ours.broker_addr, "-a", "somebody")
    assert "somebody" not in (ours.directory / "plain_acl.yml").read_text()


@pytest.fixture
def apaches(tmp_path: Path) -> Iterator[Cluster]:
    """Run Apache's broker with accounts, and our name server."""
    write(tmp_path / "conf" / "plain_acl.yml", ACL)
    running = Cluster(
        tmp_path,
        CometNamesrv(tmp_path / "namesrv"),
        lambda namesrv: ApacheBroker("4.9.7", tmp_path, namesrv, settings={"aclEnable": "true"}),
    )
    yield running
    running.kill()


async def test_our_client_signs_as_apaches_broker_wants_it(apaches: Cluster) -> None:
    options = ClientOptions(access_key="program", secret_key="secret-of-program")
    async with Producer("PG", namesrv=apaches.namesrv, client_options=options) as producer:
        sent = await producer.send(Message("Orders", b"signed", keys=("K",)))
        with pytest.raises(BrokerError, match="topic:Closed"):
            await producer.send(Message("Closed", b"x"))
    async with PullConsumer("billing", namesrv=apaches.namesrv, client_options=options) as consumer:
        queue = MessageQueue("Orders", "broker-a", sent.queue.queue_id)
        assert [each.body for each in (await consumer.pull(queue, 0)).messages] == [b"signed"]
    async with Producer("PG", namesrv=apaches.namesrv) as nobody:
        with pytest.raises(BrokerError, match="No accessKey is configured"):
            await nobody.send(Message("Orders", b"x"))
