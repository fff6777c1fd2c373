"""Scenarios for the transaction producer, run against any broker; see scenarios.py."""

from __future__ import annotations

from collections import Counter

from tests.client.scenarios import PATIENT, PATIENT_CLIENT, Ledger, consuming, fill, names, read_all
from tests.kit.waiting import until

from cometmq import Message, MessageExt, TransactionProducer, TransactionState


class Undecided:
    """A transaction listener that follows the message's properties and counts its calls."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        assert argument == message.body
        assert message.msg_id == message.properties["UNIQ_KEY"]
        return TransactionState[message.properties["local"]]

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.asked[message.body] += 1
        answers = message.properties["checks"].split()
        return TransactionState[answers[min(self.asked[message.body], len(answers)) - 1]]


async def transactions_end_once_as_they_should(namesrv: str) -> None:
    name, ledger, listener = names("trans"), Ledger(), Undecided()
    await fill(namesrv, name.topic, [b"first"])
    plans = {
        b"commit": ("COMMIT", "ROLLBACK"),
        b"rollback": ("ROLLBACK", "COMMIT"),
        b"asked, commit": ("UNKNOWN", "COMMIT"),
        b"asked, rollback": ("UNKNOWN", "ROLLBACK"),
        b"asked twice": ("UNKNOWN", "UNKNOWN COMMIT"),
        b"raises": ("no state", "COMMIT"),
    }
    producer = TransactionProducer(
        f"p-{name.group}", listener, namesrv=namesrv, options=PATIENT, client_options=PATIENT_CLIENT
    )
    seen = [b"first", b"commit", b"asked, commit", b"asked twice", b"raises"]
    async with producer, consuming(namesrv, name, ledger.listener):
        for body, (local, checks) in plans.items():
            message = Message(name.topic, body, properties={"local": local, "checks": checks}, delay_level=3)
            result = await producer.send_in_transaction(message, body)
            assert result.state is TransactionState.__members__.get(local, TransactionState.UNKNOWN)
            assert (type(result.error) is KeyError) == (body == b"raises")
        await ledger.has_all(seen)

        async def asked() -> bool:
            return listener.asked[b"asked, rollback"] > 0

        await until(asked, "asked about what is rolled back")
    assert ledger.bodies == Counter(seen)
    assert listener.asked.keys() == {b"asked, commit", b"asked, rollback", b"asked twice", b"raises"}
    assert Counter(message.body for message in await read_all(namesrv, name.topic)) == Counter(seen)
