"""The parts of the broker that replication uses."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.durable import DurableTables
from cometmq.remoting import RemotingClient, Tick
from cometmq.store import Clock, MessageStore


@dataclass(frozen=True, kw_only=True)
class ReplicationContext:
    """Parts of the broker, which live as long as the broker runs."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    address: BrokerAddress
    client: RemotingClient
    tick: Tick
