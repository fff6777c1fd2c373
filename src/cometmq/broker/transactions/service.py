"""The parts of a broker that handle transactions, and their connections with each other."""

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


@dataclass(eq=False)
class TransactionService:
    """Handles the transactions of a broker: `ends` handles requests, `checks` sends checks to producers."""

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
        """Discard the state, before `load` reads it from the store again.

        This broker becomes the leader, and other leaders may have changed the store since the last `load`.
        """
        self.ledger.clear()
        self.inherited.restart()

    def load(self) -> None:
        """Determine which half messages are open. Must run in a thread, because it reads the disk.

        Raises OSError.
        """
        self.inherited.load(self.tables.offsets, self.ledger)

    def fill(self) -> None:
        """Store empty half messages in place of those that a crash has destroyed, see `Inherited.fill`.

        This must be done before new half messages are stored.
        """
        self.inherited.fill(self.records)
        self.writer.appended()

    def start(self) -> None:
        """Start the periodic transaction checks."""
        self.checks.start()

    async def stop(self) -> None:
        """Stop the periodic transaction checks."""
        await self.checks.stop()
