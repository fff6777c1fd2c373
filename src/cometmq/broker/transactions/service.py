"""The transactions of a broker, put together."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.access.security import OPEN, Security
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.writer import Writer
from cometmq.broker.groups.clients import ProducerTable
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.transactions.checks import TransactionChecks
from cometmq.broker.transactions.ending import TransactionEnds
from cometmq.broker.transactions.inherited import Inherited
from cometmq.broker.transactions.ledger import Ledger
from cometmq.broker.transactions.records import TransactionRecords
from cometmq.store import Clock, MessageStore


@dataclass(eq=False, kw_only=True)
class TransactionService:
    """`ends` handles requests, `checks` asks producers."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    producers: ProducerTable
    writer: Writer
    address: BrokerAddress
    security: Security = OPEN

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.inherited = Inherited(self.store)
        self.records = TransactionRecords(
            clock=self.clock, store=self.store, topics=self.tables.topics, address=self.address,
            writer=self.writer,
        )  # fmt: skip
        self.ends = TransactionEnds(
            config=self.config, clock=self.clock, store=self.store, ledger=self.ledger,
            inherited=self.inherited, records=self.records, writer=self.writer,
            check_write=self.security.check_write,
        )  # fmt: skip
        self.checks = TransactionChecks(
            config=self.config, clock=self.clock, store=self.store, ledger=self.ledger,
            inherited=self.inherited, records=self.records, writer=self.writer, offsets=self.tables.offsets,
            producers=self.producers, address=self.address, may_write=self.security.may_write,
        )  # fmt: skip

    def restart(self) -> None:
        """Forget everything: others have written the log meanwhile. `load` is to follow."""
        self.ledger.clear()
        self.inherited.restart()

    def load(self) -> None:
        """Find out which half messages are open; for a thread. Raises OSError."""
        self.inherited.load(self.tables.offsets, self.ledger)

    def fill(self) -> None:
        """Before anything is sent: use up what a crash has left of offsets."""
        self.inherited.fill(self.records)
        self.writer.appended()

    def start(self) -> None:
        """Begin to ask producers."""
        self.checks.start()

    async def stop(self) -> None:
        """Ask nobody any more."""
        await self.checks.stop()
