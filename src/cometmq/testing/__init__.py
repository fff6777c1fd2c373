"""Tools for tests, ours and our users': servers that start in milliseconds, bad networks, checked histories.

As a pytest plugin: `pytest_plugins = ["cometmq.testing.plugin"]` in conftest.py gives fixtures. `TestBroker`
and `local_broker` are the same without pytest; the processes are for tests of crashes and signals.
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
