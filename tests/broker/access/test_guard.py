"""A broker with aclEnable, and clients with and without an account."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.broker.access.test_files import write
from tests.broker.rates.conftest import stopped_clock
from tests.kit.brokers import Peer, records, refused, running
from tests.kit.waiting import until

from cometmq import Message, Producer, PushConsumer
from cometmq.broker.access.guard import REFUSED
from cometmq.broker.server import Broker
from cometmq.client import ClientOptions
from cometmq.errors import BrokerError, ConfigError
from cometmq.protocol.acl import Credentials, sign
from cometmq.protocol.bodies import DataVersion
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    AclConfigVersionResponseHeader,
    ConsumerSendMsgBackRequestHeader,
    CreateAccessConfigRequestHeader,
    DeleteAccessConfigRequestHeader,
    QueryMessageRequestHeader,
    UpdateGlobalWhiteAddrsConfigRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.standalone import Standalone

ACL = """
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
- accessKey: program
  secretKey: secret-of-program
  topicPerms: [Orders=PUB|SUB, In=SUB]
  groupPerms: [G=SUB]
"""
ADMIN = Credentials("adminer", "secret-of-adminer")
PROGRAM = Credentials("program", "secret-of-program")


class SigningPeer(Peer):
    """A client that signs its requests with an account."""

    def __init__(self, addr: str, credentials: Credentials) -> None:
        super().__init__(addr, outgoing=lambda frame: sign(frame, credentials))


@contextlib.asynccontextmanager
async def guarded(
    tmp_path: Path, acl: str = ACL
) -> AsyncIterator[tuple[Broker, Peer, SigningPeer, SigningPeer]]:
    """Yield a broker and three clients: without an account, with a program's, and with an admin's."""
    write(tmp_path / "home" / "conf" / "plain_acl.yml", acl)
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path / "home")}
    async with (
        running(tmp_path / "store", **settings) as (broker, peer),
        SigningPeer(broker.addr, PROGRAM) as program,
        SigningPeer(broker.addr, ADMIN) as admin,
    ):
        yield broker, peer, program, admin


async def test_only_those_who_may_are_let_in(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, peer, program, admin):
        refused(await peer.send(), 1, f"{REFUSED}No accessKey is configured")
        refused(await peer.send(version=413), 16, "No accessKey is configured")
        assert (await program.send()).code == 0
        refused(await program.send("In"), 1, "No default permission for topic:In (topicPerms: In=SUB)")
        refused(await program.send("Other"), 1, "no defaultTopicPerm")
        assert (await program.pull()).code == 0
        refused(await program.pull(group="Other"), 1, "group:Other")
        assert (await program.heartbeat()).code == 0
        refused(await program.heartbeat(topics={"Other": "*"}), 1, "topic:Other")
        for code in (RequestCode.GET_BROKER_CONFIG, RequestCode.GET_ALL_TOPIC_CONFIG, 28, 204):
            refused(await program.call(code), 1, "Need admin permission")
        for group, code in (("G", 0), ("Other", 1)):  # only the group's members may list its connections
            assert (await program.call(203, ext={"consumerGroup": group})).code == code
        assert (await admin.call(RequestCode.GET_BROKER_CONFIG)).code == 0
        assert (await admin.send("Whatever")).code == 0
        refused(await admin.call(4711), 3, "not supported")
        async with SigningPeer(broker.addr, Credentials("program", "a-wrong-secret")) as forger:
            refused(await forger.send(), 1, "Check signature failed for accessKey=program")


async def test_a_signature_is_of_one_request_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_broker, peer, _program, _admin):
        frame = Frame.request(RequestCode.GET_MAX_OFFSET, None, b"", ext={"topic": "Orders", "queueId": "0"})
        sign(frame, PROGRAM)
        good = dict(frame.ext or {})

        async def answer(body: bytes = b"", **changes: str) -> Frame:
            request = Frame.request(RequestCode.GET_MAX_OFFSET, None, body, ext={**good, **changes})
            return await peer.remoting.call(peer.addr, request)

        assert (await answer()).code == 0
        assert (await answer()).code == 0  # the protocol cannot detect a replay
        for changed in (await answer(topic="In"), await answer(b"more"), await answer(AccessKey="adminer")):
            refused(changed, 1, "Check signature failed")
        refused(await answer(Signature=""), 1, "Check signature failed")


@pytest.mark.parametrize(
    ("key", "signature", "words"),
    [
        ("п" * 300, "x", "No acl config for п"),
        ("\ud800", "x", "No acl config for ?"),
        ("x" * 100_000, "x", "No acl config for x"),
        ("program", "y" * 1_000_000, "Check signature failed for accessKey=program"),
        ("program", "\ud800é", "Check signature failed for accessKey=program"),
    ],
)
async def test_odd_names_and_signatures_are_refused_like_others(
    tmp_path: Path, key: str, signature: str, words: str
) -> None:
    async with guarded(tmp_path) as (_broker, peer, program, _admin):
        answer = await peer.call(30, ext={"AccessKey": key, "Signature": signature, "topic": "Orders"})
        refused(answer, 1, words)
        assert len(answer.remark or "") < 5_000
        assert (await program.send()).code == 0


async def test_sends_go_on_being_checked_one_by_one(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, peer, program, _admin):
        for number in range(20):  # a broker without accounts would use its cached header by then
            properties = f"UNIQ_KEY\x01{number:032d}\x02"
            assert (await program.send(properties_text=properties)).code == 0
        refused(await peer.send(properties_text=properties), 1, "No accessKey")
        assert broker.parts.store.queues.find_queue("Orders", 0).max_offset == 20  # type: ignore[union-attr]


async def test_white_listed_clients_need_no_account(tmp_path: Path) -> None:
    async with guarded(tmp_path, ACL + "globalWhiteRemoteAddresses: [127.0.0.*]") as (_broker, peer, *_):
        assert (await peer.send("Whatever")).code == 0
        assert (await peer.call(RequestCode.GET_BROKER_CONFIG)).code == 0


async def test_accounts_change_while_the_broker_runs(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_broker, peer, program, _admin):
        write(tmp_path / "home" / "conf" / "plain_acl.yml", ACL.replace("Orders=PUB|SUB", "Orders=SUB"))
        async with asyncio.timeout(60):
            while (await program.send()).code == 0:
                await asyncio.sleep(0.05)
        write(tmp_path / "home" / "conf" / "plain_acl.yml", "nonsense")
        await asyncio.sleep(2.2)
        assert (await program.pull()).code == 0
        refused(await peer.pull(), 1, "No accessKey")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "nothing says where accounts are"),
        ({"rocketmqHome": "/nowhere"}, "there are none"),
        ({"rocketmqHome": "HOME", "filterServerNums": "1"}, "filter servers would send messages"),
    ],
)
async def test_half_a_configuration_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], words: str
) -> None:
    monkeypatch.delenv("ROCKETMQ_HOME", raising=False)
    write(tmp_path / "conf" / "plain_acl.yml", ACL)
    settings = {key: str(tmp_path) if value == "HOME" else value for key, value in settings.items()}

    with pytest.raises(ConfigError, match=words):
        async with running(tmp_path / "store", aclEnable="true", **settings):
            pass
    assert not (tmp_path / "store").exists()


async def test_access_control_is_not_switched_off_by_request(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_broker, _peer, _program, admin):
        answer = await admin.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"aclEnable=false")
        refused(answer, 16, "aclEnable")


async def test_requests_50_to_53_change_the_files(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, peer, program, admin):
        path = tmp_path / "home" / "conf" / "plain_acl.yml"

        async def put(**fields: object) -> Frame:
            header = CreateAccessConfigRequestHeader(**fields)  # type: ignore[arg-type]
            return await admin.call(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, header)

        refused(
            await program.call(51, DeleteAccessConfigRequestHeader(access_key="adminer")), 1, "Need admin"
        )
        # Fields that the request does not name are unchanged.
        assert (await put(access_key="program", topic_perms="Orders=SUB,%RETRY%G=SUB, New=PUB")).code == 0
        refused(await program.send(), 1, "topicPerms: Orders=SUB")
        assert (await program.send("New")).code == 0
        assert (await program.pull()).code in (0, 17, 19)
        assert (await put(access_key="another", secret_key="secret-of-another", admin=True)).code == 0
        async with SigningPeer(broker.addr, Credentials("another", "secret-of-another")) as another:
            assert (await another.call(26)).code == 0
            assert (await another.call(51, DeleteAccessConfigRequestHeader(access_key="another"))).code == 0
            refused(await another.call(26), 1, "No acl config for another")
        for fields, words in (
            ({"access_key": "somebody"}, "no secretKey"),
            ({"access_key": "somebody", "secret_key": "short"}, "secretKey needs 7"),
            ({"access_key": "program", "topic_perms": "T=PUB," * 20_000}, "at most 65536 are allowed"),
            ({"access_key": "program", "topic_perms": "T=READ"}, "none of DENY"),
            ({"access_key": "program", "white_remote_address": "1.2"}, "expected an address"),
        ):
            refused(await put(**fields), 209, words)
        refused(await admin.call(51, DeleteAccessConfigRequestHeader(access_key="nobody")), 210, "'nobody'")
        for addresses, file, words in (("1.2", "", "an address"), ("1.2.3.4", "/etc/passwd", "/etc/passwd")):
            header = UpdateGlobalWhiteAddrsConfigRequestHeader(
                global_white_addrs=addresses, acl_file_full_path=file
            )
            refused(await admin.call(53, header), 211, words)
        assert (await admin.call(53, header_of("10.9.9.9,127.0.0.1"))).code == 0
        assert (await peer.send()).code == 0
        answer = (await admin.call(52)).header(AclConfigVersionResponseHeader)
        assert (answer.broker_addr, answer.cluster_name) == (broker.addr, "DefaultCluster")
        assert DataVersion.decode(answer.version.encode()).counter == 4
        assert str(path) in (answer.all_acl_file_version or "")
        assert path.stat().st_mode & 0o777 == 0o600


def header_of(addresses: str) -> UpdateGlobalWhiteAddrsConfigRequestHeader:
    return UpdateGlobalWhiteAddrsConfigRequestHeader(global_white_addrs=addresses, acl_file_full_path="")


async def test_without_access_control_there_is_nothing_to_change(tmp_path: Path) -> None:
    async with running(tmp_path) as (_broker, peer):
        header = CreateAccessConfigRequestHeader(access_key="somebody", secret_key="12345678")
        refused(await peer.call(50, header), 209, "aclEnable=false")
        refused(await peer.call(51, DeleteAccessConfigRequestHeader(access_key="somebody")), 210, "aclEnable")
        refused(await peer.call(53, header_of("*")), 211, "aclEnable")
        refused(await peer.call(52), 1, "aclEnable")


async def test_a_message_named_by_its_place_is_read_by_who_may_read_its_topic(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_broker, _peer, program, admin):
        for topic in ("Orders", "Secret"):
            assert (await admin.send(topic)).code == 0
        own, other = [
            message.physical_offset for t in ("Orders", "Secret") for message in records(await admin.pull(t))
        ]
        assert (await program.call(33, ViewMessageRequestHeader(offset=own))).code == 0
        refused(await program.call(33, ViewMessageRequestHeader(offset=other)), 1, "topic:Secret")
        assert (await admin.call(33, ViewMessageRequestHeader(offset=other))).code == 0
        for offset, code in ((own, 0), (other, 1)):
            back = ConsumerSendMsgBackRequestHeader(
                offset=offset, group="G", delay_level=1, origin_topic="Orders"
            )
            assert (await program.call(36, back)).code == code


async def test_only_tools_of_an_admin_read_retries_of_pops(tmp_path: Path) -> None:
    """Several groups may have the rights to `%RETRY%a_b_c`, the retry topic of a pop by group a."""
    acl = ACL.replace("[G=SUB]", "[a_b_c=SUB, TOOLS_CONSUMER=SUB]")
    topic = "%RETRY%a_b_c"
    async with guarded(tmp_path, acl) as (_broker, _peer, program, admin):
        assert (await admin.send(topic, b"popped", 0, {"ORIGIN_GROUP": "a"})).code == 0
        assert (await admin.send(topic, b"sent back", 0, {"RETRY_TOPIC": "Orders"})).code == 0

        async def pulled(peer: Peer, group: str) -> list[bytes]:
            return [bytes(each.body) for each in records(await peer.pull(topic, group=group))]

        assert await pulled(admin, "TOOLS_CONSUMER") == [b"popped", b"sent back"]
        assert await pulled(admin, "a_b_c") == [b"sent back"]
        for group in ("TOOLS_CONSUMER", "a_b_c"):
            assert await pulled(program, group) == [b"sent back"]


async def test_only_an_admin_finds_retries_of_pops_by_key_or_id(tmp_path: Path) -> None:
    acl = ACL.replace("[G=SUB]", "[a_b_c=SUB, TOOLS_CONSUMER=SUB]")
    topic = "%RETRY%a_b_c"
    async with guarded(tmp_path, acl) as (_broker, _peer, program, admin):
        assert (await admin.send(topic, b"popped", 0, {"ORIGIN_GROUP": "a", "KEYS": "k"})).code == 0
        assert (await admin.send(topic, b"own", 0, {"ORIGIN_GROUP": "a_b_c", "KEYS": "k"})).code == 0
        assert (await admin.send(topic, b"sent back", 0, {"RETRY_TOPIC": "Orders", "KEYS": "k"})).code == 0
        stored = records(await admin.pull(topic, group="TOOLS_CONSUMER"))
        query = QueryMessageRequestHeader(
            topic=topic, key="k", max_num=32, begin_timestamp=0, end_timestamp=2**62
        )
        for peer, found in ((admin, [b"popped", b"own", b"sent back"]), (program, [b"own", b"sent back"])):
            by_key = records(await peer.call(RequestCode.QUERY_MESSAGE, query))
            assert [each.body for each in by_key] == found
            for message in stored:
                answer = await peer.call(33, ViewMessageRequestHeader(offset=message.physical_offset))
                assert (answer.code == 0) == (message.body in found)


async def test_our_clients_sign_what_they_send(tmp_path: Path) -> None:
    write(tmp_path / "conf" / "plain_acl.yml", ACL)
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path), "waitTimeMillsInSendQueue": "20000"}
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def listener(messages: list, _context: object) -> None:
        for message in messages:
            got.put_nowait(message.body)

    async with Standalone(tmp_path / "data", 0, 0, settings=settings) as cluster:
        options = ClientOptions(access_key="program", secret_key="secret-of-program")
        async with (
            Producer("PG", namesrv=cluster.namesrv_addr, client_options=options) as producer,
            PushConsumer("G", listener, "Orders", namesrv=cluster.namesrv_addr, client_options=options),
        ):
            await producer.send(Message("Orders", b"signed"))
            assert await asyncio.wait_for(got.get(), 20) == b"signed"
            with pytest.raises(BrokerError, match="No default permission for topic:Other"):
                await producer.send(Message("Other", b"x"))
        async with Producer("PG", namesrv=cluster.namesrv_addr) as nobody:
            with pytest.raises(BrokerError, match="the broker asks for an account"):
                await nobody.send(Message("Orders", b"x"))


async def test_an_account_may_send_and_receive_at_its_rate_over_all_its_clients(tmp_path: Path) -> None:
    acl = ACL + "  rateLimits: [send.messages=10, receive.messages=10]\n"
    async with (
        guarded(tmp_path, acl) as (broker, _, program, admin),
        SigningPeer(broker.addr, PROGRAM) as second,
    ):
        clock, began = stopped_clock(broker), time.monotonic()
        answers = await asyncio.gather(*(each.send() for each in (program, second) for _ in range(8)))
        assert time.monotonic() - began >= 0.4
        assert {answer.code for answer in answers} == {0}
        for _ in range(20):  # another account has no limit
            assert (await admin.send("Other")).code == 0
        assert len(records(await program.pull())) == 10
        waiting = asyncio.create_task(second.pull(offset=10, hold_ms=60_000))
        await until(lambda: broker.parts.rates.delayed_receives)
        clock.advance(0.3)
        assert len(records(await waiting)) == 3
        rates = broker.parts.rates
        assert rates.delayed_sends == {("Orders", "account"): 6}
        assert rates.delayed_receives["G", "account"] >= 1


async def test_an_account_without_limits_of_its_own_has_those_of_the_settings(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, _, program, admin):
        assert not broker.parts.rates.has_accounts
        body = b"maxAccountSendMessagesPerSecond=4"
        assert (await admin.call(RequestCode.UPDATE_BROKER_CONFIG, body=body)).code == 0
        began = time.monotonic()
        for _ in range(6):
            assert (await program.send()).code == 0
            assert (await program.send("RMQ_SYS_TRACE_TOPIC")).code == 0  # traces are exempt
        assert time.monotonic() - began >= 0.5
