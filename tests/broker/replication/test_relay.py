"""Sends that reach the leader of a raft group during a handoff, and afterwards as a former leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.kit.brokers import Peer, records
from tests.kit.waiting import soon, until

from cometmq.broker.replication import raft, raft_member
from cometmq.broker.send import relay
from cometmq.errors import ConnectError, SendFailed
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import EndTransactionRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.record.layout import COMMITTED
from cometmq.store import Flag

REFUSED = ResponseCode.SERVICE_NOT_AVAILABLE


@pytest.fixture
async def group(tmp_path, monkeypatch):
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    async with RaftGroup(tmp_path) as made:
        yield made


async def bodies(peer: Peer, **more: object) -> list[bytes]:
    return [bytes(message.body) for message in records(await peer.pull(**more))]


async def test_a_former_leader_passes_sends_on_and_other_followers_refuse_them(group, monkeypatch):
    leader = await group.leader()
    former = group.peers[leader]
    for number in range(3):  # by then the broker has cached the header and uses its fast path
        assert (await former.send(body=b"%d" % number)).code == ResponseCode.SUCCESS
    to, other = group.followers()
    assert (await group.change(leader, "transfer", to)).code == ResponseCode.SUCCESS
    answers = await asyncio.gather(*(former.send(body=b"held %d" % number) for number in range(5)))
    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    await until(lambda: group.leads(to))
    answer = await former.send(body=b"relayed")
    assert (answer.code, answer.ext["queueOffset"]) == (ResponseCode.SUCCESS, "8")
    assert sorted(await bodies(group.peers[to])) == sorted(
        [b"0", b"1", b"2", b"relayed", *(b"held %d" % number for number in range(5))]
    )
    assert (await group.peers[other].send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
    await former.send(body=b"one-way", oneway=True)
    half = await former.send(
        properties={"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "K"}, body=b"transaction", sys_flag=4
    )
    end = EndTransactionRequestHeader(
        producer_group="PG",
        tran_state_table_offset=int(half.ext["queueOffset"]),
        commit_log_offset=decode_offset_id(half.ext["msgId"]).physical_offset,
        commit_or_rollback=COMMITTED,
        msg_id="K",
    )
    await former.oneway(RequestCode.END_TRANSACTION, end)
    took = await bodies(group.peers[to], offset=10, hold_ms=10_000)
    assert took == [b"transaction"]
    assert await bodies(group.peers[to], offset=9) == [b"one-way", *took]
    refused = await former.send(body=b"", topic="Orders", queue_id=999)
    assert refused.code not in (ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE)
    monkeypatch.setattr(relay, "RELAY_S", 0.0)
    group.brokers[leader].parts.replication.hand_over()
    assert (await former.send(body=b"late")).code == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_an_aborted_handoff_holds_sends_and_a_member_that_has_failed_does_not(group, monkeypatch):
    leader = await group.leader()
    away = group.followers()[0]
    await group.stop(away)
    assert (await group.change(leader, "transfer", away)).code == ResponseCode.SUCCESS
    monkeypatch.setattr(relay, "MAX_HELD_BYTES", 1)
    held = asyncio.create_task(group.peers[leader].send(body=b"held"))
    await asyncio.sleep(0.05)
    refused = await group.peers[leader].send(body=b"too much")
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert (await held).code == ResponseCode.SUCCESS
    assert await bodies(group.peers[leader]) == [b"held"]

    monkeypatch.setattr(relay, "HOLD_S", 600.0)
    assert (await group.change(leader, "transfer", away)).code == ResponseCode.SUCCESS
    held = asyncio.create_task(group.peers[leader].send())
    await asyncio.sleep(0.05)
    replication = group.brokers[leader].parts.replication
    replication.member._fail(OSError("a test"))  # noqa: SLF001
    assert (await soon(held)).code == REFUSED
    assert (await soon(group.peers[leader].send())).code == REFUSED
    assert replication.leader_addr is None


async def test_what_a_leader_may_have_stored_is_not_reported_as_refused(group, monkeypatch):
    leader = await group.leader()
    former = group.peers[leader]
    assert (await former.send(body=b"first")).code == ResponseCode.SUCCESS
    to = group.followers()[0]
    await group.hand_over(to)
    successor = group.brokers[to].parts
    monkeypatch.setattr(relay, "ANSWER_S", 0.3)
    kept = []
    successor.server.override_handlers(
        [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2], lambda _connection, frame: kept.append(frame)
    )
    answer = await former.send(body=b"?")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "may have stored the message" in answer.remark
    assert [frame.flag for frame in kept] == [relay.RELAYED_FLAG]


@pytest.mark.usefixtures("no_copies")
async def test_a_planned_handoff_keeps_the_queues_of_a_topic_that_a_send_has_just_created(group):
    """The last handoff is the stop of the leader, which forwards the sends that it holds."""
    leader = await group.leader()
    await group.equal()
    for topic in ("Transferred", "Full", "Stopped"):
        former, broker = group.peers[leader], group.brokers[leader]
        parts = broker.parts
        assert (await former.send(topic, body=b"first", queue_id=1)).code == ResponseCode.SUCCESS
        ends = asyncio.create_task(asyncio.sleep(0))
        if topic == "Transferred":
            ends = asyncio.create_task(group.hand_over(group.followers()[0]))
        elif topic == "Full":
            parts.store.flags.raise_flag(Flag.DISK_FULL, "a test")
        else:
            ends = asyncio.create_task(broker.stop())
        await until(lambda parts=parts: not parts.replication.accepts)
        numbers = [b"%d" % number for number in range(5)]
        answers = await asyncio.gather(*(former.send(topic, body, queue_id=1) for body in numbers))
        assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
        await ends
        if topic == "Stopped":
            del group.brokers[leader]
        await until(lambda former=leader: any(map(group.leads, group.brokers.keys() - {former})))
        leader = await group.leader()
        assert group.brokers[leader].parts.tables.topics.table[topic].read_queue_nums == 4
        assert await bodies(group.peers[leader], topic=topic, queue_id=1) == [b"first", *numbers]


@pytest.fixture
def no_copies(monkeypatch):
    """Let followers copy the tables only on request, and detect a full disk immediately."""
    monkeypatch.setattr(raft, "SYNC_S", 3600.0)
    monkeypatch.setattr(raft_member, "PREFER_INTERVAL_S", 0.1)


async def test_a_leader_that_stops_still_votes_for_its_successor(group):
    leader = await group.leader()
    await group.equal()
    away, to = group.followers()
    await group.stop(away)
    silent = group.brokers[leader].parts.replication.status
    await until(lambda: any(each.silent_ms > 200 for each in silent().members if each.member == away))
    successor = group.brokers[to].parts.replication
    stopping = asyncio.create_task(group.stop(leader))
    await until(lambda: successor.status().role == "leader", within_s=10)
    await stopping


class Leader:
    """The new leader, its connection and the group's view of it. With `refuses` it refuses every send."""

    def __init__(self) -> None:
        self.accepts = False
        self.leader_addr: str | None = "b:1"
        self.stored: list[bytes] = []
        self.requests = 0
        self.timeouts: list[float] = []
        self.refuses = True
        self.error: Exception | None = None

    async def connect(self, addr: str, timeout_s: float) -> Leader:
        if isinstance(self.error, ConnectError):
            raise self.error
        return self

    def request(self, frame: Frame, timeout_s: float) -> asyncio.Future[Frame]:
        if self.error is not None:
            raise self.error
        self.requests += 1
        self.timeouts.append(timeout_s)
        refused = self.refuses
        if not refused:
            self.stored.append(bytes(frame.body))
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        response = frame.response(REFUSED if refused else ResponseCode.SUCCESS)
        asyncio.get_running_loop().call_later(0.005, answer.set_result, response)
        return answer


class Former:
    """A former leader: its relay, its handlers, and the responses that it sent itself."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.answered: list[bytes] = []
        self.relay = relay.Relay(self.leader, self.leader)  # type: ignore[arg-type]
        handlers = self.relay.handlers({RequestCode.SEND_MESSAGE_V2: self._handle}, relay.SENDS)
        self.handler: Any = handlers[RequestCode.SEND_MESSAGE_V2]
        self.relay.begin()

    def _handle(self, _connection: object, frame: Frame) -> Frame:
        self.answered.append(bytes(frame.body))
        return frame.response(ResponseCode.SUCCESS if self.leader.accepts else REFUSED)

    def send(self, body: bytes = b"", **ext: str) -> asyncio.Future[Frame]:
        answer = self.handler(None, Frame.request(RequestCode.SEND_MESSAGE_V2, body=body, ext=ext))
        if isinstance(answer, Awaitable):
            return asyncio.ensure_future(answer)
        done: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        done.set_result(answer)
        return done


async def test_held_sends_cost_one_request_at_a_time_and_keep_their_order():
    former = Former()
    leader = former.leader
    bodies = [b"%d" % number for number in range(100)]
    sends = [former.send(body) for body in bodies[:50]]
    await asyncio.sleep(0.3)
    assert 2 <= leader.requests <= 5
    leader.refuses = False
    await until(lambda: len(leader.stored) == 50)
    sends += map(former.send, bodies[50:70])
    await asyncio.sleep(0.002)
    leader.refuses = True  # The leadership moves again.
    for body in bodies[70:90]:
        sends.append(former.send(body))
        await asyncio.sleep(0.001)
    before = leader.requests
    await asyncio.sleep(0.1)
    assert leader.requests <= before + 2
    leader.refuses, leader.leader_addr = False, "c:1"
    sends += map(former.send, bodies[90:])
    answers = await asyncio.gather(*sends)
    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    assert leader.stored == bodies


async def test_sends_that_were_held_come_before_those_that_follow_an_aborted_handoff():
    former = Former()
    former.leader.leader_addr = ""
    sends = [former.send(b"%d" % number) for number in range(5)]
    await asyncio.sleep(0.01)
    former.leader.accepts = True
    for number in range(5, 200):
        sends.append(former.send(b"%d" % number))
        await asyncio.sleep(0.0005)
    await asyncio.gather(*sends)
    assert former.answered == [b"%d" % number for number in range(200)]
    assert isinstance(former.handler(None, Frame.request(RequestCode.SEND_MESSAGE_V2)), Frame)


async def test_the_limit_of_what_is_held_counts_headers(monkeypatch):
    monkeypatch.setattr(relay, "MAX_HELD_BYTES", 50_000)
    former = Former()
    held = former.send(i="x" * 60_000)
    assert (await former.send()).code == REFUSED
    assert former.answered == [], "it must not be stored before those that are held"
    assert not held.done()
    former.leader.refuses = False
    await held


@pytest.mark.parametrize("error", [ConnectError("b:1"), SendFailed("b:1")])
async def test_what_was_not_sent_is_not_reported_as_stored(monkeypatch, error):
    monkeypatch.setattr(relay, "HOLD_S", 0.1)
    former = Former()
    former.leader.error = error
    assert (await former.send()).code == REFUSED
    assert former.leader.requests == 0


async def test_a_send_that_is_passed_on_late_has_time_of_its_own(monkeypatch):
    former = Former()
    former.leader.leader_addr = ""
    held = former.send()
    await asyncio.sleep(0.2)
    monkeypatch.setattr(relay, "HOLD_S", 0.3)
    former.leader.leader_addr, former.leader.refuses = "b:1", False
    assert (await held).code == ResponseCode.SUCCESS
    assert former.leader.timeouts[-1] > 2.0


async def test_no_send_is_held_where_no_leader_can_become_known(monkeypatch):
    monkeypatch.setattr(relay, "HOLD_S", 600.0)
    former = Former()
    former.leader.leader_addr = ""
    held = former.send(b"held")
    await asyncio.sleep(0)
    former.leader.leader_addr = None
    assert former.send(b"next").done() is False  # The new send waits behind the held one.
    assert (await soon(held)).code == REFUSED
    await until(lambda: former.answered == [b"held", b"next"])
    assert former.send().done()


async def test_a_relayed_send_is_refused_until_the_new_leader_accepts():
    """Until then the new leader's tables may be old, and it might refuse a queue that exists."""
    former = Former()
    frame = Frame.request(RequestCode.SEND_MESSAGE_V2)
    frame.flag = relay.RELAYED_FLAG
    assert former.handler(None, frame).code == REFUSED
    assert former.answered == []
