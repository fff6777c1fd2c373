"""Access control of 5.x clients: the accounts and rights of remoting."""

from __future__ import annotations

import hmac

import pytest
from tests.broker.access.test_files import write
from tests.grpc.service.caller import SETTINGS, message

from cometmq.grpc.rpc.enums import Code

ACL = """
accounts:
- accessKey: reader-1
  secretKey: secret-of-reader
- accessKey: program
  secretKey: secret-of-program
  topicPerms: [Orders=PUB|SUB, In=SUB]
  groupPerms: [G=SUB]
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


async def test_receives_need_the_rights_to_topic_and_group(guarded, connect):
    caller = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed())
    await caller.send(message())
    assert len(await caller.receive()) == 1
    (answer,) = [each async for each in caller.receiving(caller.receive_request(group="Other"))]
    assert answer.status.code == Code.FORBIDDEN


async def test_clients_of_one_connection_keep_their_own_accounts(guarded, connect):
    first = await connect(guarded, x_mq_date_time=MOMENT, authorization=signed())
    assert (await first.send(message())).status.code == Code.OK
    first.metadata = [("x-mq-client-id", "client-1"), ("x-mq-date-time", MOMENT)]
    assert (await first.send(message())).status.code == Code.UNAUTHORIZED
