"""A start imports only what it needs, and a ready server collects garbage as Python does by default."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import cometmq
from cometmq import client

SERVERS = ("numpy", "cometmq.broker", "cometmq.store", "cometmq.namesrv")
# Modules that only some starts need, and that are imported where they do.
FEW_STARTS = ("yaml", "email", "importlib.metadata", "difflib", "http.client", "pathlib", "prometheus_client")
FEW_BROKERS = (
    "cometmq.raft",
    "cometmq.store.raft_log",
    "cometmq.broker.replication.raft",
    "cometmq.broker.replication.ha_client",
    "cometmq.broker.access.guard",
    "cometmq.protocol.sql.grammar",
)


def output(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip()


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("cometmq", ("pyspark", "pyarrow", "click", "rich", "lark", *SERVERS)),
        ("cometmq.client", ("pyspark", "pyarrow", "click", "rich", "lark", *SERVERS)),
        ("cometmq.client.producer.producer", ("cometmq.client.consumer", "cometmq.client.pull", "sqlite3")),
        ("cometmq.store", ("pyarrow", "click", "rich", "cometmq.store.inspect")),
        ("cometmq.cli.servers, cometmq.namesrv.server", (*FEW_STARTS, "numpy")),
        ("cometmq.cli.servers, cometmq.broker.server", (*FEW_STARTS, *FEW_BROKERS)),
    ],
)
def test_imports_load_only_what_their_user_needs(module: str, not_loaded: tuple[str, ...]) -> None:
    assert output(f"import sys, {module}; print([m for m in {not_loaded!r} if m in sys.modules])") == "[]"


def test_the_client_has_all_its_names() -> None:
    assert all(hasattr(client, name) for name in client.__all__)
    assert set(client.__all__) <= set(dir(client))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = client.Nothing  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert cometmq.__version__ == version("cometmq")


SERVER = """
import gc, os, signal
from cometmq.cli import START_THRESHOLD
from cometmq.cli.servers import serve

class Server:
    async def start(self): pass
    async def stop(self): pass

def ready(_server):
    os.kill(os.getpid(), signal.SIGTERM)
    return f"{gc.get_threshold()[0]} {gc.get_freeze_count() > 10_000}"

gc.set_threshold(START_THRESHOLD)
serve("namesrv", Server, ready)
"""


def test_a_ready_server_collects_garbage_often_and_skips_the_objects_of_its_start(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMETMQ_RUN_DIR", str(tmp_path))

    assert output(SERVER) == "700 True"
