"""The parts of a broker that handle transactions, and their connections with each other."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.access.security import OPEN, Security
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.writer import Writer
from cometmq.broker.groups.clients import ProducerTable
from cometmq.broker.send.dedup import Deduplication
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
    dedup: Deduplication
    security: Security = OPEN

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.inherited = Inherited(self.store)
        clock, store, writer, address = self.clock, self.store, self.writer, self.address
        records = self.records = TransactionRecords(
            clock, store, self.tables.topics, address, writer, self.dedup
        )
        self.ends = TransactionEnds(
            clock, store, self.ledger, self.inherited, records, writer, self.security.check_write
        )
        self.checks = TransactionChecks(
            self.config, clock, store, self.ledger, self.inherited, records, writer, self.tables.offsets,
            self.producers, address, self.security.may_write,
        )  # fmt: skip
        self.start, self.stop = self.checks.start, self.checks.stop

    def restart(self) -> None:
        """Discard the state, before `load` reads it again: another leader may have changed the store."""
        self.ledger.clear()
        self.inherited.restart()

    def load(self) -> None:
        """Determine which half messages are open. Must run in a thread. Raises OSError."""
        self.inherited.load(self.tables.offsets, self.ledger)

    def fill(self) -> None:
        """Do `Inherited.fill`. This must be done before new half messages are stored."""
        self.inherited.fill(self.records)
        self.writer.appended()
