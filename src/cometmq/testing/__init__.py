"""Tools for tests: brokers that start in milliseconds, fault-injecting proxies, checks of recorded histories.

- `TestBroker`: a name server and a broker in the test's process, without sockets.
- `local_broker`: a name server and a broker in the test's process, with real sockets and files.
- `StandaloneProcess`, `ServerProcess`: servers as separate processes, for tests of crashes and signals.
- `FaultProxy`, `ClusterProxy`: proxies that cut, stall, delay or split connections.
- `History`, `check_history`: record what clients did, and check it against what CometMQ guarantees.

The pytest plugin `cometmq.testing.plugin` provides brokers and proxies as fixtures. pytest loads it in every
run, so a name of this package is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.testing.checker import Expected, HistoryViolation, Problem, Report, check_history
    from cometmq.testing.cluster_proxy import ClusterProxy
    from cometmq.testing.faults import Direction, Fault, Kind, Script, no_faults, random_faults
    from cometmq.testing.history import History, HistoryError
    from cometmq.testing.in_memory import TestBroker
    from cometmq.testing.local import LocalBroker, local_broker
    from cometmq.testing.process import ProcessFailed, ServerProcess, StandaloneProcess
    from cometmq.testing.proxy import FaultProxy, ProxiedConnection

_MODULES = {
    "Expected HistoryViolation Problem Report check_history": "checker",
    "ClusterProxy": "cluster_proxy",
    "Direction Fault Kind Script no_faults random_faults": "faults",
    "History HistoryError": "history",
    "TestBroker": "in_memory",
    "LocalBroker local_broker": "local",
    "ProcessFailed ServerProcess StandaloneProcess": "process",
    "FaultProxy ProxiedConnection": "proxy",
}

__all__ = [
    "ClusterProxy", "Direction", "Expected", "Fault", "FaultProxy", "History", "HistoryError",
    "HistoryViolation", "Kind", "LocalBroker", "Problem", "ProcessFailed", "ProxiedConnection", "Report",
    "Script", "ServerProcess", "StandaloneProcess", "TestBroker", "check_history", "local_broker",
    "no_faults", "random_faults",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for names, module in _MODULES.items():
        if name in names.split():
            globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
