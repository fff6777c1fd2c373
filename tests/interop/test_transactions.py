"""Transactions with clients on each other's brokers, and with brokers on each other's stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.client.scenarios import PATIENT, PATIENT_CLIENT, read_all
from tests.client.transactions import Undecided
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker
from tests.interop.driver import Json, body_of, message
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.processes import side_by_side
from tests.interop.space import Space
from tests.kit.waiting import until, wait_until
from tests.long_form import LONG, long_form

from cometmq import Admin, Message, TransactionProducer
from cometmq.errors import MessageNotFound
from cometmq.protocol.codes import TRANS_CHECK_MAX_TIME_TOPIC

COMMIT, ROLLBACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"


def test_javas_transactions_end_once_as_they_should(space: Space) -> None:
    plans = {
        "commit": (COMMIT, ROLLBACK),
        "rollback": (ROLLBACK, COMMIT),
        "asked, commit": (UNKNOWN, COMMIT),
        "asked, rollback": (UNKNOWN, ROLLBACK),
        "throws": ("nothing of the kind", COMMIT),
        "large " + 100 * "x" * 100: (UNKNOWN, COMMIT),
    }
    seen = [name for name, ends in plans.items() if COMMIT in ends and ends[0] != ROLLBACK]
    producer = f"tp-{space.topic}"
    java = space.java
    group = {"group": f"tg-{space.topic}", "namesrv": space.cluster.namesrv}
    java.call("transaction_start", name=producer, **group)
    try:
        messages = [
            message(
                space.topic, name.encode(), tags="T", keys=f"k{number}", delay=2 if number == 0 else 0,
                properties={"local": local, "check": check},
            )
            for number, (name, (local, check)) in enumerate(plans.items())
        ]  # fmt: skip
        if java.version.startswith("5"):
            messages[0]["delay"] = 0  # this broker refuses the delay
        results = java.call("transaction_send", name=producer, messages=messages)
        assert [each["state"] for each in results] == [COMMIT, ROLLBACK, *[UNKNOWN] * 4]
        consumer = space.push(expression="T")
        java.wait_delivered(consumer, len(seen))

        def asked() -> dict[bytes, Json]:
            return {body_of(each): each for each in java.call("transaction_asked", name=producer)}

        wait_until("asked about what is rolled back", lambda: b"asked, rollback" in asked())
        about = asked()[b"asked, rollback"]
        assert (about["topic"], about["properties"]["UNIQ_KEY"]) == (space.topic, results[3]["msgId"])
    finally:
        java.call("transaction_stop", name=producer)
    stored = space.pull_topic(space.pull(group=space.group + "-pull"))
    for received in (java.delivered(consumer), stored):
        assert Counter(body_of(each).decode() for each in received) == Counter(seen)
    by_body = {body_of(each): each for each in stored}
    assert by_body[b"commit"]["msgId"] == results[0]["msgId"]
    assert by_body[b"commit"]["properties"]["KEYS"] == "k0"


@contextlib.contextmanager
def on_one_store(namesrv: str, place: Path) -> Iterator[Callable[[str], Any]]:
    """Yield a function that starts a broker ("ours", or a version of Apache's) on the store."""
    running: list[Any] = []

    def start(kind: str) -> Any:
        port = running[0].port if running else 0
        make: Any = CometBroker if kind == "ours" else partial(ApacheBroker, kind)
        directory = place / f"broker-{len(running)}"
        running.append(make(directory, namesrv, port=port, store=place / "store"))
        return running[-1]

    try:
        yield start
    finally:
        for broker in running:
            if broker.process.running:
                broker.process.kill()


def thread_cpu_s(pid: int, name: str) -> float:
    """Return the CPU seconds of a process's threads whose names begin with `name`."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    ticks = [map(int, stat.rpartition(")")[2].split()[11:13]) for stat in stats if f"({name}" in stat]
    assert ticks, f"no thread {name}"
    return sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK")


# Our broker finishes all transactions in either order. The long form runs both orders with both versions.
ORDERS = ["ours 4.9.7", "5.5.0 ours"]
if LONG:
    ORDERS = [order.format(version) for version in SERVER_VERSIONS for order in ("ours {0}", "{0} ours {0}")]


# Two orders run concurrently, because more would be too many JVMs.
@long_form("five brokers one after the other, and questions that wait")
@pytest.mark.parametrize("orders", [ORDERS[at : at + 2] for at in range(0, len(ORDERS), 2)], ids=", ".join)
def test_either_broker_finishes_what_the_other_has_begun(orders: list[str], tmp_path: Path) -> None:
    def one(order: str) -> None:
        place = tmp_path / order.replace(" ", "-")
        names = ApacheNamesrv("4.9.7", place)
        try:
            namesrv = f"127.0.0.1:{names.port}"
            with on_one_store(namesrv, place) as start:
                asyncio.run(hand_over(order.split(), namesrv, start))
        finally:
            names.kill()

    side_by_side(one, [(order,) for order in orders])


async def hand_over(kinds: list[str], namesrv: str, start: Callable[[str], Any]) -> None:
    """Let brokers take over from each other with open transactions.

    Each gets transactions that end, some whose producer leaves before their check, and before these a
    transaction with so long an immunity time that the next broker may have to check it.
    """
    topic, wanted, numbers = "Handed", [], iter(range(1000))
    for kind in kinds:
        broker = await asyncio.to_thread(start, kind)
        # Transactions that earlier brokers have left open end now, by a producer that has not sent them.
        listener = Undecided()
        finisher = TransactionProducer(
            "PG", listener, topics=[topic], namesrv=namesrv, options=PATIENT, client_options=PATIENT_CLIENT
        )
        async with finisher:
            patient = b"%d: patient" % next(numbers)
            properties = {"local": "UNKNOWN", "checks": "COMMIT", "CHECK_IMMUNITY_TIME_IN_SECONDS": "10"}
            await finisher.send_in_transaction(Message(topic, patient, properties=properties), patient)
            for plan in ("COMMIT COMMIT", "ROLLBACK COMMIT", "UNKNOWN COMMIT", "UNKNOWN ROLLBACK"):
                local, check = plan.split()
                body = b"%d: %s" % (next(numbers), plan.encode())
                properties = {"local": local, "checks": check}
                await finisher.send_in_transaction(Message(topic, body, properties=properties), body)
                if plan in ("COMMIT COMMIT", "UNKNOWN COMMIT"):
                    wanted.append(body)

            async def complete(count: int = len(wanted)) -> bool:
                return len(await read_all(namesrv, topic)) >= count

            await until(complete, f"all committed by {kind}: {wanted}")
            wanted.append(patient)
        async with TransactionProducer("PG", Undecided(), namesrv=namesrv, options=PATIENT) as leaver:
            for check in ("COMMIT", "ROLLBACK"):
                body = b"%d: left behind, %s" % (next(numbers), check.encode())
                properties = {"local": "UNKNOWN", "checks": check}
                await leaver.send_in_transaction(Message(topic, body, properties=properties), body)
                if check == "COMMIT":
                    wanted.append(body)
        if kind == "5.5.0":
            spun_s = thread_cpu_s(broker.pid, "TransactionalOp")
            await asyncio.sleep(1)  # 5.x writes op messages in another thread
            assert thread_cpu_s(broker.pid, "TransactionalOp") - spun_s < 0.1
        await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(start, "ours")
    async with TransactionProducer("PG", Undecided(), topics=[topic], namesrv=namesrv, options=PATIENT):

        async def finished() -> bool:
            return len(await read_all(namesrv, topic)) >= len(wanted)

        await until(finished, f"all committed: {wanted}")
    assert Counter(each.body for each in await read_all(namesrv, topic)) == Counter(wanted)


@pytest.mark.slow("waits for checks of transactions by two brokers")
def test_what_was_given_up_is_asked_about_again_by_request(tmp_path: Path) -> None:
    """The request is sent by our Admin, to our broker and to Apache's."""
    versions = SERVER_VERSIONS if LONG else SERVER_VERSIONS[:1]
    limits = {
        "transactionCheckMax": "1",
        "transactionCheckInterval": "1000",
        "transactionTimeOut": "1000",
    }

    def one(kind: str) -> None:
        names = ApacheNamesrv("4.9.7", tmp_path / kind)
        make: Any = CometBroker if kind == "ours" else partial(ApacheBroker, kind)
        broker = None
        try:
            namesrv = f"127.0.0.1:{names.port}"
            broker = make(tmp_path / kind, namesrv, settings=limits)
            asyncio.run(given_up_and_resumed(namesrv))
        finally:
            for each in (broker, names):
                if each is not None:
                    each.kill()

    side_by_side(one, [(kind,) for kind in ("ours", *versions)])


async def given_up_and_resumed(namesrv: str) -> None:
    body, listener = b"undecided", Undecided()
    producer = TransactionProducer(
        "PG", listener, namesrv=namesrv, options=PATIENT, client_options=PATIENT_CLIENT
    )
    properties = {"local": "UNKNOWN", "checks": "UNKNOWN COMMIT"}
    async with producer, Admin(namesrv) as admin:
        sent = await producer.send_in_transaction(Message("Resumed", body, properties=properties), body)

        async def resumed() -> bool:
            try:
                message = await admin.resume_check(sent.msg_id)
            except MessageNotFound:
                return False  # the checks have not expired yet
            return (message.topic, message.body) == (TRANS_CHECK_MAX_TIME_TOPIC, body)

        await until(resumed, "given up, and resumed")

        async def committed() -> bool:
            return [each.body for each in await read_all(namesrv, "Resumed")] == [body]

        await until(committed, "committed")
    assert listener.asked == {body: 2}
