"""The typed requests that clients, tools and pipelines are built from."""

from __future__ import annotations

from .broker_api import BrokerApi
from .calls import Calls
from .namesrv_api import NamesrvApi

__all__ = ["BrokerApi", "Calls", "NamesrvApi"]
