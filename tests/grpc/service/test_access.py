"""Access control of 5.x clients: the accounts and rights of remoting."""

from __future__ import annotations

import hmac

import pytest
from msgspec.structs import replace
from tests.broker.access.test_files import write
from tests.broker.lite.conftest import GROUP, PARENT
from tests.broker.rates.conftest import stopped_clock
from tests.grpc.service.caller import SETTINGS, consumer_settings, message
from tests.grpc.service.test_lite import LiteCaller
from tests.grpc.serving import M, connected

from cometmq.broker.tables.topics import topic_of
from cometmq.grpc.rpc.calls import frame_message
from cometmq.grpc.rpc.enums import Code
from cometmq.protocol.bodies import SubscriptionGroupConfig

ACL = """
accounts:
- accessKey: reader-1
  secretKey: secret-of-reader
- accessKey: program
  secretKey: secret-of-program
  topicPerms: [Orders=PUB|SUB, In=SUB, Sessions=PUB|SUB]
  groupPerms: [G=SUB, agents=SUB]
"""
MOMENT = "20261129T080000Z"


def signed(secret: str = "secret-of-program", key: str = "program", upper: bool = True) -> str:
    digest = hmac.digest(secret.encode(), MOMENT.encode(), "sha1").hex()
    found = digest.upper() if upper else digest
    return f"MQv2-HMAC-SHA1 Credential={key}/r/Rocketmq, SignedHeaders=x-mq-date-time, Signature={found}"


@pytest.fixture
async def guarded(start_cluster, tmp_path):
    write(tmp_path / "home" / "conf" / "plain_acl.yml", ACL)
    return await start_cluster(**SETTINGS, aclEnable="true", rocketmqHome=str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("authorization", "topic", "code"),
    [
        (signed(), "Orders", Code.OK),
        (signed(upper=False), "Orders", Code.OK),
        (signed(), "In", Code.FORBIDDEN),
        (signed("wrong"), "Orders", Code.UNAUTHORIZED),
        (signed(key="nobody"), "Orders", Code.UNAUTHORIZED),
        ("Basic x", "Orders", Code.UNAUTHORIZED),
        ("MQv2-HMAC-SHA1 =,=,,Credential", "Orders", Code.UNAUTHORIZED),
        ("", "Orders", Code.UNAUTHORIZED),
    ],
)
async def test_sends_need_an_account_with_the_right(guarded, connect, authorization, topic, code):
    caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=authorization)
    assert (await caller.send(message(topic))).status.code == code


async def test_the_limits_of_an_account_apply_to_its_grpc_clients(guarded, connect):
    guarded.broker.parts.config.update({"maxAccountSendMessagesPerSecond": "5"})
    guarded.broker.parts.rates.configure()
    stopped_clock(guarded)
    callers = [
        await connect(guarded, f"client-{number}", x_mq_date_time=MOMENT, authorization=signed())
        for number in range(2)
    ]
    for number in range(7):
        assert (await callers[number % 2].send(message())).status.code == Code.OK
    assert guarded.broker.parts.rates.delayed_sends == {("Orders", "account"): 2}


async def test_receives_need_the_rights_to_topic_and_group(guarded, connect):
    caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed())
    await caller.send(message())
    assert len(await caller.receive()) == 1
    (answer,) = [each async for each in caller.receiving(caller.receive_request(group="Other"))]
    assert answer.status.code == Code.FORBIDDEN


@pytest.mark.parametrize(
    ("authorization", "topic", "group", "code"),
    [
        (signed(), "Orders", "G", Code.OK),
        (signed(), "Out", "G", Code.FORBIDDEN),
        (signed(), "Unknown", "G", Code.FORBIDDEN),
        (signed(), "Orders", "Other", Code.FORBIDDEN),
        (signed("wrong"), "Orders", "G", Code.UNAUTHORIZED),
    ],
)
async def test_assignments_need_the_rights_of_receives(guarded, connect, authorization, topic, group, code):
    caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=authorization)
    request = M.QueryAssignmentRequest(topic=M.Resource(name=topic), group=M.Resource(name=group))
    assert (await caller.call("QueryAssignment", request)).status.code == code


async def test_the_rights_of_a_white_listed_host_are_not_those_of_its_client_elsewhere(
    start_cluster, tmp_path, connect
):
    host = "203.0.113.7"
    write(tmp_path / "home" / "conf" / "plain_acl.yml", f"globalWhiteRemoteAddresses: [{host}]\n{ACL}")
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path / "home")}
    cluster = await start_cluster(**SETTINGS, **settings, grpcProxyProtocolEnable="true")
    account = {"x_mq_date_time": MOMENT, "authorization": signed("secret-of-reader", "reader-1")}
    data = frame_message(M.SendMessageRequest(messages=[message()]).SerializeToString())
    line = f"PROXY TCP4 {host} 192.0.2.1 4711 8081\r\n".encode()
    async with connected(cluster.broker.endpoint.port, line) as trusted:
        stream = trusted.request(data, x_mq_client_id="client-1", **account)
        trusted.send()
        _, response = await trusted.response(stream)
        assert M.SendMessageResponse.FromString(response[5:]).status.code == Code.OK
        caller = await connect(cluster, **account)
        assert (await caller.send(message())).status.code == Code.FORBIDDEN


async def test_calls_without_rights_create_no_groups(start_cluster, tmp_path, connect):
    write(tmp_path / "home" / "conf" / "plain_acl.yml", ACL)
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path / "home")}
    cluster = await start_cluster(**SETTINGS, **settings, autoCreateSubscriptionGroup="true")
    groups = cluster.broker.parts.tables.groups.table
    caller = await connect(cluster, x_mq_date_time=MOMENT, authorization=signed())
    await caller.send(message())
    stream = caller.telemetry()
    await stream.write(consumer_settings("Other"))
    await stream.read()
    stream.cancel()
    await caller.call(
        "QueryAssignment",
        M.QueryAssignmentRequest(topic=M.Resource(name="Orders"), group=M.Resource(name="Other")),
    )
    (answer,) = [each async for each in caller.receiving(caller.receive_request(group="Other"))]
    assert (answer.status.code, "Other" in groups) == (Code.FORBIDDEN, False)
    assert len(await caller.receive()) == 1
    assert "G" in groups


async def test_a_refused_signature_is_counted_and_logged(guarded, connect, caplog):
    caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed("wrong"))
    await caller.send(message())
    assert guarded.broker.parts.security.guard.refused == 1
    assert "SendMessage from 127.0.0.1" in caplog.text


class TestDeadLetters:
    """Neither the retry topic nor the lite topic in which a message was found needs rights of its own."""

    async def test_of_a_retried_message(self, guarded, connect):
        caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed())
        await caller.send(message())
        (got,) = await caller.receive()
        await caller.change(got, 0)
        (again,) = await caller.receive(poll_s=20)
        assert (await caller.dead_letter(again)).status.code == Code.OK
        assert guarded.broker.parts.store.max_offset("%DLQ%G", 0) == 1

    async def test_of_a_message_of_a_lite_topic(self, guarded, connect):
        tables = guarded.broker.parts.tables
        parent = topic_of(PARENT, 1, perm=6)
        tables.topics.put(replace(parent, attributes={"message.type": "LITE"}))
        guarded.broker.parts.lite.use_topics()
        tables.groups.put(SubscriptionGroupConfig(GROUP, attributes={"lite.bind.topic": PARENT}))
        lite = LiteCaller(await connect(guarded, x_mq_date_time=MOMENT, authorization=signed()))
        await lite.subscribe("s1")
        await lite.send("s1", b"1")
        (got,) = await lite.receive()
        assert (await lite.caller.dead_letter(got, GROUP)).status.code == Code.OK


async def test_clients_of_one_connection_keep_their_own_accounts(guarded, connect):
    first = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed())
    assert (await first.send(message())).status.code == Code.OK
    first.metadata = [("x-mq-client-id", "client-1"), ("x-mq-date-time", MOMENT)]
    assert (await first.send(message())).status.code == Code.UNAUTHORIZED
