"""The parts of the broker that replication uses."""

from __future__ import annotations

import msgspec

from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.durable import DurableTables
from cometmq.remoting import RemotingClient, Tick
from cometmq.store import Clock, MessageStore


class ReplicationContext(msgspec.Struct, frozen=True, eq=False):
    """The parts of the broker that replication uses. They exist as long as the broker runs."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    address: BrokerAddress
    client: RemotingClient
    tick: Tick
