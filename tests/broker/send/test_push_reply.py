"""Replies: pushed to the requesting client, stored in the reply topic, confirmed as by Apache's broker."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.brokers import records, refused

from cometmq.protocol.codes import RequestCode, SysFlag
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PushReplyMessageRequestHeader, UnregisterClientRequestHeader
from cometmq.protocol.properties.values import decode_properties

TOPIC = "DefaultCluster_REPLY_TOPIC"
PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
REPLY = {"CORRELATION_ID": "c-1", "MSG_TYPE": "reply", "REPLY_TO_CLIENT": "asker", "TTL": "3000"}
CODES = [RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2]


@pytest.fixture
async def asker(fast):
    """Connect a client that waits for replies and accepts them."""
    peer = fast.peer()
    peer.answers[PUSH] = lambda frame: frame.response()
    await peer.heartbeat("asker", None, producers=("PG",))
    return peer


@pytest.fixture
async def replier(fast):
    return fast.peer()


async def reply(peer, properties=REPLY, code=RequestCode.SEND_REPLY_MESSAGE_V2, **more):
    return await peer.send(TOPIC, b"answer", properties=properties, code=code, **more)


async def kept(peer):
    answer = await peer.pull(TOPIC)
    return records(answer) if answer.code == 0 else []


@pytest.mark.parametrize("code", CODES)
async def test_a_reply_reaches_its_client_and_is_kept(fast, asker, replier, code) -> None:
    answer = await reply(replier, code=code, flag=7, sys_flag=int(SysFlag.COMPRESSED))
    (stored,) = await kept(replier)
    assert (answer.code, answer.remark) == (0, None)
    wanted = {"msgId": stored.offset_msg_id, "queueId": "0", "queueOffset": "0"}
    assert answer.ext == {**wanted, "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert (stored.body, stored.properties, stored.flag) == (b"answer", REPLY, 7)
    pushed = await asker.notice(PUSH)
    header = pushed.header(PushReplyMessageRequestHeader)
    properties = decode_properties((header.properties or "").encode())
    assert int(properties.pop("PUSH_REPLY_TIME")) == header.store_timestamp
    assert (bytes(pushed.body), properties, pushed.is_oneway) == (b"answer", REPLY, False)
    told = (header.topic, header.flag, header.sys_flag, header.born_timestamp, header.store_host)
    assert told == (TOPIC, 7, int(SysFlag.COMPRESSED), stored.born_timestamp_ms, fast.addr)
    assert header.born_host == stored.born_host


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({**REPLY, "REPLY_TO_CLIENT": "nobody"}, "push reply message fail, channel of <nobody> not found."),
        ({"CORRELATION_ID": "c-1"}, "reply message properties[REPLY_TO_CLIENT] is null"),
    ],
)
async def test_a_reply_that_nobody_waits_for_is_kept_and_refused(asker, replier, properties, words) -> None:
    answer = await reply(replier, properties)
    refused(answer, 1, words)
    assert [answer.ext["msgId"]] == [message.offset_msg_id for message in await kept(replier)]


@pytest.mark.parametrize("how", ["refuses", "goes away", "left the group"])
async def test_a_client_that_does_not_take_it(fast, asker, replier, how: str) -> None:
    def go_away(frame: Frame) -> None:
        leaving.append(asyncio.get_running_loop().create_task(asker.close()))

    leaving: list[asyncio.Task[None]] = []

    if how == "left the group":
        leaving = UnregisterClientRequestHeader(client_id="asker", producer_group="PG")
        assert (await asker.call(RequestCode.UNREGISTER_CLIENT, leaving)).code == 0
    asker.answers[PUSH] = (lambda frame: frame.response(1, "no")) if how == "refuses" else go_away
    words = "channel of <asker> not found" if how == "left the group" else "push reply message to askerfail."
    refused(await reply(replier), 1, words)


async def test_without_the_copy(start_cluster) -> None:
    fast = await start_cluster(storeReplyMessageEnable="false")
    replier = fast.peer()
    replier.answers[PUSH] = lambda frame: frame.response()
    await replier.heartbeat("asker", None, producers=("PG",))
    answer = await reply(replier)
    assert (answer.code, answer.ext["msgId"], answer.ext["queueOffset"]) == (0, "0", "0")
    assert await kept(replier) == []


async def test_a_oneway_reply_is_pushed_without_an_answer(asker, replier) -> None:
    await reply(replier, oneway=True)
    assert bytes((await asker.notice(PUSH)).body) == b"answer"


async def test_a_bad_queue_is_refused(asker, replier) -> None:
    refused(await reply(replier, queue_id=9), 1, "queueId[9] is illegal")


@pytest.mark.parametrize("topic", ["%RETRY%g", "%DLQ%g"])
async def test_replies_do_not_go_to_topics_of_groups(asker, replier, topic: str) -> None:
    code = RequestCode.SEND_REPLY_MESSAGE_V2
    refused(await replier.send(topic, b"answer", properties=REPLY, code=code), 16, topic)
    assert asker.notices.empty()
    assert (await replier.call(RequestCode.GET_ALL_TOPIC_CONFIG)).body.find(topic.encode()) == -1


async def test_a_reply_is_in_no_transaction(asker, replier) -> None:
    await reply(replier, sys_flag=int(SysFlag.COMPRESSED | SysFlag.TRANSACTION_PREPARED))
    pushed = (await asker.notice(PUSH)).header(PushReplyMessageRequestHeader)
    (stored,) = await kept(replier)
    assert pushed.sys_flag == stored.sys_flag == int(SysFlag.COMPRESSED)


async def test_a_reply_that_is_too_large_is_neither_kept_nor_pushed(start_cluster) -> None:
    fast = await start_cluster(maxMessageSize="1000")
    replier = fast.peer()
    replier.answers[PUSH] = lambda frame: frame.response()
    await replier.heartbeat("asker", None, producers=("PG",))
    code = RequestCode.SEND_REPLY_MESSAGE_V2
    answer = await replier.send(TOPIC, b"x" * 1001, properties=REPLY, code=code)
    refused(answer, 13, "1001 bytes, at most 1000 are allowed (maxMessageSize)")
    assert await kept(replier) == []
    assert replier.notices.empty()


@pytest.mark.parametrize("note", ["x" * 32_767, "\N{SNOWMAN}" * 12_000])
async def test_a_reply_with_too_many_properties_is_neither_kept_nor_pushed(asker, replier, note: str) -> None:
    refused(await reply(replier, {**REPLY, "note": note}), 13, "properties")
    assert await kept(replier) == []
    assert asker.notices.empty()
