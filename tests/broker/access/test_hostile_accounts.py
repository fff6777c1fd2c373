"""An account with a valid signature must not exceed its rights, on a real broker, request by request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ADMIN, PROGRAM, SigningPeer
from tests.broker.transactions.conftest import COMMIT, HALF, MANUAL, ROLLBACK, Place, asked, end, prepare
from tests.kit.brokers import Peer, create, records, refused, running
from tests.kit.fakes import FakeServer
from tests.kit.waiting import until

from cometmq.broker.server import Broker
from cometmq.client import ClientInstance, ClientOptions
from cometmq.namesrv.requests import RequestProcessor
from cometmq.protocol.acl import Credentials
from cometmq.protocol.codes import NAMESRV_REQUESTS, RequestCode, handlers_of
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumerSendMsgBackRequestHeader,
    QueryMessageRequestHeader,
    UpdateConsumerOffsetRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.protocol.ids import decode_offset_id, pack_host
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.layout import HEAD_V4
from cometmq.protocol.record.one import encode_record

ACL = """
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
- accessKey: program
  secretKey: secret-of-program
  topicPerms: [Orders=PUB|SUB, KeysAa=PUB|SUB, DefaultCluster_REPLY_TOPIC=PUB]
  groupPerms: [G=SUB]
- accessKey: mallory
  secretKey: secret-of-mallory
  defaultTopicPerm: SUB
  defaultGroupPerm: SUB
  topicPerms: [Mine=PUB|SUB, Orders=DENY, KeysAa=DENY]
  groupPerms: [G=DENY]
"""
MALLORY = Credentials("mallory", "secret-of-mallory")
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
REPLY = {"CORRELATION_ID": "c-1", "MSG_TYPE": "reply", "REPLY_TO_CLIENT": "asker", "TTL": "3000"}
PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


class Scene(NamedTuple):
    broker: Broker
    program: SigningPeer
    mallory: SigningPeer
    admin: SigningPeer


@contextlib.asynccontextmanager
async def scene(tmp_path: Path, **settings: str) -> AsyncIterator[Scene]:
    write(tmp_path / "home" / "conf" / "plain_acl.yml", ACL)
    access = {"aclEnable": "true", "rocketmqHome": str(tmp_path / "home")}
    async with (
        running(tmp_path / "store", **access, **settings) as (broker, _),
        SigningPeer(broker.addr, PROGRAM) as program,
        SigningPeer(broker.addr, MALLORY) as mallory,
        SigningPeer(broker.addr, ADMIN) as admin,
    ):
        yield Scene(broker, program, mallory, admin)


async def asker(peer: Peer, client_id: str = "asker") -> None:
    peer.answers[PUSH] = lambda frame: frame.response()
    assert (await peer.heartbeat(client_id, None, producers=("PG",))).code == 0


@pytest.mark.parametrize("code", [RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2])
async def test_a_reply_needs_the_right_to_its_topic(tmp_path: Path, code: int) -> None:
    async with scene(tmp_path) as (_broker, program, mallory, admin):
        await asker(admin)
        refused(await mallory.send(REPLY_TOPIC, properties=REPLY, code=code), 1, f"topic:{REPLY_TOPIC}")
        # Neither the right to another kind of topic nor a topic open to all accounts gives access to a
        # client.
        for topic in ("Mine", "Orders", "RMQ_SYS_TRACE_TOPIC"):
            refused(await mallory.send(topic, properties=REPLY, code=code), 1, "Need admin permission")
        refused(await admin.send("RMQ_SYS_TRACE_TOPIC", properties=REPLY, code=code), 16, "forbidden")
        assert admin.notices.empty()
        assert (await program.send(REPLY_TOPIC, b"yes", properties=REPLY, code=code)).code == 0
        assert (await admin.notice(PUSH)).body == b"yes"


async def test_the_replies_of_a_client_do_not_go_to_another_account(tmp_path: Path) -> None:
    async with scene(tmp_path) as (broker, program, mallory, admin):
        await asker(admin)
        await asker(mallory)  # uses the same client id, and is newer
        assert (await program.send(REPLY_TOPIC, b"1", properties=REPLY, code=325)).code == 0
        assert (await admin.notice(PUSH)).body == b"1"
        assert mallory.notices.empty()
        async with SigningPeer(broker.addr, ADMIN) as again:  # the real client on a new connection
            await asker(again)
            assert (await program.send(REPLY_TOPIC, b"2", properties=REPLY, code=325)).code == 0
            assert (await again.notice(PUSH)).body == b"2"


async def test_a_query_finds_messages_of_its_topic_alone(tmp_path: Path) -> None:
    """The topics KeysAa and KeysBB have the same hash, so equal keys have the same index hash in both."""
    async with scene(tmp_path) as (_broker, program, mallory, admin):
        assert (await program.send("KeysAa", b"secret", properties={"KEYS": "k"})).code == 0
        assert (await create(admin, "KeysBB")).code == 0

        def query(topic: str) -> QueryMessageRequestHeader:
            return QueryMessageRequestHeader(
                topic=topic, key="k", max_num=32, begin_timestamp=0, end_timestamp=1 << 60
            )

        refused(await mallory.call(12, query("KeysBB")), 22, "can not find message")
        assert [each.body for each in records(await program.call(12, query("KeysAa")))] == [b"secret"]
        assert (await admin.send("KeysBB", b"open", properties={"KEYS": "k"})).code == 0
        assert [each.body for each in records(await mallory.call(12, query("KeysBB")))] == [b"open"]
        refused(await mallory.call(12, query("")), 22, "can not find message")


async def test_bytes_in_a_body_that_look_like_a_record_open_no_other_topic(tmp_path: Path) -> None:
    """The properties of such a record could extend over the next messages of the log."""
    async with scene(tmp_path) as (_broker, program, mallory, admin):
        assert (await create(admin, "Mine")).code == 0

        async def position_of(body: bytes) -> int:
            sent = await mallory.send("Mine", body)
            return decode_offset_id((sent.ext or {})["msgId"]).physical_offset

        first, second = await position_of(b"probe"), await position_of(b"probe")
        inside = 2 * second - first + HEAD_V4.size  # The place of the next body
        fake = encode_record("Mine", b"", bytes(900), physical_offset=inside)[:-900]
        assert await position_of(fake) + HEAD_V4.size == inside
        assert (await program.send("Orders", b"secret" * 200)).code == 0
        view = ViewMessageRequestHeader(offset=inside)
        refused(await mallory.call(RequestCode.VIEW_MESSAGE_BY_ID, view), 1, "Need admin permission")
        back = ConsumerSendMsgBackRequestHeader(offset=inside, group="Mallory", delay_level=-1)
        refused(await mallory.call(RequestCode.CONSUMER_SEND_MSG_BACK, back), 1, "Need admin permission")
        assert (
            await mallory.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(second))
        ).code == 0


async def test_a_default_does_not_open_what_the_broker_keeps_for_others(tmp_path: Path) -> None:
    async with scene(tmp_path) as (_broker, program, mallory, _admin):
        assert (await program.send(properties={"DELAY": "18"})).code == 0
        await prepare(program)
        assert (await program.send("RMQ_SYS_TRACE_TOPIC")).code == 0
        for topic in (
            "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC",
            "TRANS_CHECK_MAX_TIME_TOPIC", "rmq_sys_wheel_timer", "RMQ_SYS_TRACE_TOPIC", REPLY_TOPIC,
            "OFFSET_MOVED_EVENT", "%DLQ%G", "%RETRY%G",
        ):  # fmt: skip
            refused(await mallory.pull(topic, group="Any", queue_id=0), 1, "No default permission for ")
        refused(await mallory.call(33, ViewMessageRequestHeader(offset=0)), 1, "topic:SCHEDULE_TOPIC_XXXX")
        assert (await mallory.send("Mine")).code == 0
        assert (await mallory.pull("Mine", group="Any")).code == 0


async def test_how_far_transactions_are_is_not_everybodys_to_set(tmp_path: Path) -> None:
    async with scene(tmp_path) as (_broker, _program, mallory, _admin):
        header = UpdateConsumerOffsetRequestHeader(
            consumer_group="CID_RMQ_SYS_TRANS", topic="Mine", queue_id=0, commit_offset=1 << 40
        )
        refused(await mallory.call(15, header), 1, "No default permission for group:CID_RMQ_SYS_TRANS")
        header.consumer_group, header.topic = "Any", "RMQ_SYS_TRANS_HALF_TOPIC"
        refused(await mallory.call(15, header), 1, "No default permission for topic:RMQ_SYS_TRANS_HALF")
        header.consumer_group = ""
        header.topic = "Orders"
        refused(await mallory.call(15, header), 1, "No default permission for topic:Orders")


async def test_transactions_are_ended_by_those_who_may_send_to_their_topic(tmp_path: Path) -> None:
    async with scene(tmp_path, **MANUAL) as (_broker, program, mallory, _admin):
        place = await prepare(program)
        for each in (place, Place(place.offset + 1, place.position)):
            refused(await end(mallory, each), 1, "No default permission for topic:Orders")
        assert (await program.pull()).code != 0
        assert (await end(program, place, COMMIT)).code == 0
        assert [each.body for each in records(await program.pull())] == [b"half"]


async def test_a_body_that_reads_as_a_half_message_ends_no_transaction(tmp_path: Path) -> None:
    async with scene(tmp_path, **MANUAL) as (broker, program, mallory, _admin):
        place = await prepare(program)
        position = broker.parts.store.log.end + 88  # position of the next message's body
        forged = encode_record(
            HALF, b"", encode_properties({"REAL_TOPIC": "Mine", "REAL_QID": "0", "PGROUP": "PG"}),
            queue_id=0, queue_offset=place.offset, physical_offset=position,
            born_timestamp_ms=1, born_host=pack_host("127.0.0.1:1"),
            store_timestamp_ms=1, store_host=pack_host("127.0.0.1:1"),
        )  # fmt: skip
        assert (await mallory.send("Mine", forged)).code == 0
        for how in (COMMIT, ROLLBACK):
            refused(await end(mallory, Place(place.offset, position), how), 1, "Find prepared transaction")
        assert (await end(program, place, COMMIT)).code == 0


async def test_nobody_else_is_asked_about_a_transaction(tmp_path: Path) -> None:
    async with scene(tmp_path, **MANUAL) as (broker, program, mallory, _admin):
        await prepare(program)
        assert (await mallory.heartbeat("m", None, producers=("PG",))).code == 0
        checks = broker.parts.transactions.checks
        await checks.round()
        assert (await program.heartbeat("p", None, producers=("PG",))).code == 0
        for _ in range(4):  # producers of a group are normally checked in turn
            await checks.round()
            message, _, _ = await asked(program)
            assert message.body == b"half"
        assert mallory.notices.empty()


OPEN_TO_PROGRAMS = {
    10, 11, 12, 14, 15, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 41, 42, 46, 203, 310, 320, 324, 325, 352, 361,
    370, 400, 200050, 200051, 200052, 200053, 200054, 200055, 200070,
    200071, 200151, 21008,
}  # fmt: skip
"""Codes in the table in docs/security.md, without its last row. A new code needs a row there, too."""


async def test_every_other_request_needs_an_admin(tmp_path: Path) -> None:
    async with scene(tmp_path) as (broker, _program, mallory, _admin):
        closed = broker.parts.handlers.keys() - OPEN_TO_PROGRAMS
        assert closed > {17, 25, 26, 50, 200, 207, 215, 307, 309, 323, 21001}
        for code in sorted(closed):
            answer = await mallory.call(code, ext={"topic": "Mine", "consumerGroup": "Any", "group": "Any"})
            refused(answer, 1, "Need admin permission")
        for code in sorted(OPEN_TO_PROGRAMS):  # a request without the field has no right
            answer = await mallory.call(code)
            assert answer.code != 0 or code == 35, code


async def test_name_servers_and_brokers_share_no_request(tmp_path: Path) -> None:
    """The codes are disjoint, so requests to name servers can stay unsigned."""
    async with scene(tmp_path) as (broker, *_):
        assert handlers_of(RequestProcessor).keys() == NAMESRV_REQUESTS
        assert not broker.parts.handlers.keys() & NAMESRV_REQUESTS


async def test_name_servers_get_no_signature(tmp_path: Path) -> None:
    """Neither a broker nor, by default, a client signs requests to name servers.

    A signature made for a topic's route would be equally valid for the topic's deletion.
    """
    seen: list[Frame] = []

    def note(frame: Frame) -> Frame:
        seen.append(frame)
        return frame.response(17, "no route")

    async with FakeServer(dict.fromkeys(NAMESRV_REQUESTS, note)) as server:
        async with scene(tmp_path, namesrvAddr=server.addr):
            await until(lambda: seen)
        for told in (False, True):
            options = ClientOptions(
                access_key="adminer", secret_key="secret-of-adminer", sign_to_name_servers=told
            )
            async with ClientInstance(server.addr, options) as client:
                await client.remoting.call(server.addr, Frame.request(105, ext={"topic": "Orders"}))
    *unsigned, signed = seen
    assert {frame.code for frame in unsigned} >= {103, 104, 105}
    assert not any("Signature" in (frame.ext or {}) for frame in unsigned)
    assert "Signature" in (signed.ext or {})
