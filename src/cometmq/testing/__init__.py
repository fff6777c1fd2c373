"""Tools for tests, ours and our users': real servers that start in milliseconds.

As a pytest plugin: `pytest_plugins = ["cometmq.testing.plugin"]` in conftest.py gives the fixtures
`cometmq_broker` and `start_cometmq_broker`. `local_broker` is the same without pytest; the processes are for
tests of crashes and signals.
"""

from cometmq.testing.local import LocalBroker, local_broker
from cometmq.testing.process import ProcessFailed, ServerProcess, StandaloneProcess

__all__ = ["LocalBroker", "ProcessFailed", "ServerProcess", "StandaloneProcess", "local_broker"]
