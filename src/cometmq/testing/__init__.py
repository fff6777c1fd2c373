"""Tools for tests, ours and our users': real servers that start in milliseconds.

As a pytest plugin: `pytest_plugins = ["cometmq.testing.plugin"]` in conftest.py gives the fixture `cometmq_broker`.
"""

from .process import ProcessFailed, ServerProcess, StandaloneProcess

__all__ = ["ProcessFailed", "ServerProcess", "StandaloneProcess"]
