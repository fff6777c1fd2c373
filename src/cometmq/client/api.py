"""The typed requests that clients, tools and pipelines are built from."""

from __future__ import annotations

from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.calls import Calls
from cometmq.client.cluster.namesrv_api import NamesrvApi

__all__ = ["BrokerApi", "Calls", "NamesrvApi"]
