"""Messages that two brokers hold back: timer messages in pages, and open transactions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.admin.commands.test_messages import Wavering
from tests.kit.waiting import until

from cometmq.admin import Admin, waiting
from cometmq.admin.waiting import Place, closed_by, given_up, half_messages, newest_copies, timer_page
from cometmq.client import Producer, TransactionProducer
from cometmq.message import Message, MessageExt, MessageQueue, TransactionState
from cometmq.protocol.codes import TRANS_HALF_TOPIC
from cometmq.standalone import Standalone

HOUR_MS = 3_600_000


async def test_timers_of_all_brokers_come_page_by_page_in_the_order_of_their_times(tmp_path: Path) -> None:
    with Standalone(tmp_path, 0, 0, brokers=2).run_in_thread() as cluster:
        async with (
            asyncio.timeout(90),
            Admin(cluster.namesrv_addr) as admin,
            Producer("p", namesrv=cluster.namesrv_addr) as producer,
        ):
            await producer.send(Message("T", b"now"))
            for number in range(150):
                queue = MessageQueue("T", "broker-a" if number % 3 else "broker-b", 0)
                # Several messages have the same due time.
                await producer.send(
                    Message("T", b"%d" % number, delay_ms=HOUR_MS + number // 5 * 1000), queue=queue
                )
            await producer.send(Message("other", b"x", delay_ms=HOUR_MS))

            async def all_wait() -> bool:
                return (await timer_page(admin, "T")).waiting == 151

            await until(all_wait, "the timers of all messages")  # set soon after a message is stored
            bodies: list[bytes] = []
            times: list[int] = []
            after: dict[str, Place] = {}
            pages = 0
            while True:
                page = await timer_page(admin, "T", after=after, size=40)
                assert page.waiting == 151
                bodies += [bytes(row.message.body) for row in page.rows]
                times += [row.deliver_at_ms for row in page.rows]
                after, pages = page.after, pages + 1
                if not page.more:
                    break
            assert pages == 4
            assert sorted(map(int, bodies)) == list(range(150))
            assert times == sorted(times)
            assert len((await timer_page(admin)).rows) == 100
            assert page.missing == {}


async def test_a_transaction_waits_until_it_is_ended_or_given_up(tmp_path: Path) -> None:
    settings = {"transactionTimeOut": "1500", "transactionCheckInterval": "100", "transactionCheckMax": "1"}
    listener = Wavering()
    with Standalone(tmp_path, 0, 0, settings=settings).run_in_thread() as cluster:
        producer = TransactionProducer("PG", listener, namesrv=cluster.namesrv_addr)
        async with asyncio.timeout(60), Admin(cluster.namesrv_addr) as admin, producer:
            assert (await half_messages(admin)).rows == []
            assert (await given_up(admin)).rows == []
            listener.state = TransactionState.COMMIT
            await producer.send_in_transaction(Message("T", b"done"))
            listener.state = TransactionState.UNKNOWN
            sent = await producer.send_in_transaction(Message("T", b"open", keys=["k"]))
            (row,) = (await half_messages(admin)).rows
            assert (row.topic, row.group, row.checks) == ("T", "PG", 0)
            assert (row.message.msg_id, list(row.message.keys)) == (sent.msg_id, ["k"])
            while not (old := await given_up(admin)).rows:
                await asyncio.sleep(0.1)
            assert [(each.message.msg_id, each.group, each.checks) for each in old.rows] == [
                (sent.msg_id, "PG", 1)
            ]
            assert (await half_messages(admin)).rows == []


def test_an_op_names_one_half_message_or_several() -> None:
    assert closed_by(b"7") == [7]
    assert closed_by(b"7,8,") == [7, 8]
    assert closed_by(b"x,-1,\xff,9999999999999999999999") == []


async def test_a_transaction_is_listed_once_while_the_broker_asks_its_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two responses the broker stores the half message again and closes the older copy."""
    answered = waiting.unprocessed_messages

    async def with_a_copy_after(
        admin: Admin, addr: str, queue: MessageQueue, most: int
    ) -> tuple[list[MessageExt], bool]:
        found = await answered(admin, addr, queue, most)
        halves = MessageQueue(TRANS_HALF_TOPIC, queue.broker_name, 0)
        end = await admin.client.brokers.max_offset(addr, halves)
        while await admin.client.brokers.max_offset(addr, halves) == end:
            await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(waiting, "unprocessed_messages", with_a_copy_after)
    settings = {"transactionTimeOut": "50", "transactionCheckInterval": "50", "transactionCheckMax": "999"}
    with Standalone(tmp_path, 0, 0, settings=settings).run_in_thread() as cluster:
        producer = TransactionProducer("PG", Wavering(), namesrv=cluster.namesrv_addr)
        async with asyncio.timeout(60), Admin(cluster.namesrv_addr) as admin, producer:
            sent = await producer.send_in_transaction(Message("T", b"open"))
            rows = (await half_messages(admin)).rows
            assert [each.message.msg_id for each in rows] == [sent.msg_id]


def half(offset: int, key: str, **properties: str) -> MessageExt:
    return MessageExt("T", b"x", queue_offset=offset, properties={"UNIQ_KEY": key, **properties})


def test_the_newest_copy_stands_for_its_transaction() -> None:
    halves = [
        half(0, "a"),
        half(1, "b"),
        half(2, "a"),  # sent twice by its producer, so a separate transaction
        half(3, "b", TRANSACTION_CHECK_TIMES="1"),  # a copy as Apache's broker makes it
        half(4, "a", TRAN_PREPARED_QUEUE_OFFSET="0", TRANSACTION_CHECK_TIMES="1"),
        half(5, "a", TRAN_PREPARED_QUEUE_OFFSET="0", TRANSACTION_CHECK_TIMES="2"),
    ]
    assert sorted(each.queue_offset for each in newest_copies(halves)) == [2, 3, 5]
