"""Tools for tests: brokers that start in milliseconds, fault-injecting proxies, checks of recorded histories.

- `TestBroker`: a name server and a broker in the test's process, without sockets.
- `local_broker`: a name server and a broker in the test's process, with real sockets and files.
- `StandaloneProcess`, `ServerProcess`: servers as separate processes, for tests of crashes and signals.
- `FaultProxy`, `ClusterProxy`: proxies that cut, stall, delay or split connections.
- `History`, `check_history`: record what clients did, and check it against what CometMQ guarantees.

The pytest plugin `cometmq.testing.plugin` provides brokers and proxies as fixtures. Add `pytest_plugins =
["cometmq.testing.plugin"]` to the top-level conftest.py.
"""

from cometmq.testing.checker import Expected, HistoryViolation, Problem, Report, check_history
from cometmq.testing.cluster_proxy import ClusterProxy
from cometmq.testing.faults import Direction, Fault, Kind, Script, no_faults, random_faults
from cometmq.testing.history import History, HistoryError
from cometmq.testing.in_memory import TestBroker
from cometmq.testing.local import LocalBroker, local_broker
from cometmq.testing.process import ProcessFailed, ServerProcess, StandaloneProcess
from cometmq.testing.proxy import FaultProxy, ProxiedConnection

__all__ = [
    "ClusterProxy",
    "Direction",
    "Expected",
    "Fault",
    "FaultProxy",
    "History",
    "HistoryError",
    "HistoryViolation",
    "Kind",
    "LocalBroker",
    "Problem",
    "ProcessFailed",
    "ProxiedConnection",
    "Report",
    "Script",
    "ServerProcess",
    "StandaloneProcess",
    "TestBroker",
    "check_history",
    "local_broker",
    "no_faults",
    "random_faults",
]
