"""The integration tests of Celery and kombu themselves, from their source distributions, with CometMQ.

The results of Celery's are in Redis. ``OTHERS`` and ``LEFT_OUT`` tell what is left out, and why.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.databases import redis_server
from tests.long_form import long_form

from cometmq.testing import LocalBroker

ROOT = Path(__file__).parents[2]
CELERY = (
    "test_canvas.py",
    "test_dedup_chain_dispatch.py",
    "test_inspect.py",
    "test_tasks.py",
)
"""The files of Celery's `t/integration` that run here."""
OTHERS = {
    "test_backend.py": "Azure's store of results",
    "test_django_settings.py": "settings of a test",
    "test_loader.py": "uses no broker",
    "test_mem_leak_in_exception_handling.py": "uses the broker in memory",
    "test_native_delayed_delivery_binding.py": "RabbitMQ's queues of delays",
    "test_prefork_shutdown.py": "AMQP's heartbeats; test_celery.py has a longer shutdown than leases",
    "test_quorum_queue_qos_cluster_simulation.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_chord_unlock_routing.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_default_queue_type_fallback.py": "RabbitMQ's quorum queues",
    "test_rabbitmq_quorum_queue_cycle_detection.py": "RabbitMQ's quorum queues",
    "test_security.py": "Celery expects its only test to fail",
    "test_serialization.py": "looks only for a line about pickle in a worker's log",
    "test_serialization_config.py": "settings of a test",
    "test_worker.py": "a worker that cannot reach RabbitMQ",
    "test_worker_config.py": "settings of a test",
}
"""The other files, with the reasons for which they are left out."""
LEFT_OUT = {
    "test_canvas.py::test_chain::test_chord_header_id_duplicated_on_rabbitmq_msg_duplication": (
        "sends a Python object as a property, which only AMQP drops; the test expects to fail with Redis, too"
    ),
    "test_tasks.py::test_trace_log_arguments": "records of loggers; fails with Redis as the broker, too",
}
"""Tests of these files that are left out, with the reasons."""
OPTIONS = {"test_inspect.py": {"native_delayed_delivery": False}}
"""Transport options. `inspect scheduled` lists only messages with an ETA that workers, not brokers, hold."""


def source(package: str, directory: Path) -> Path:
    """Return the unpacked source distribution of the installed version of a package."""
    version = importlib.metadata.version(package)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", package, "--no-build-isolation", "-d", str(directory), f"{package}=={version}"]
    subprocess.run(command, check=True, timeout=240)
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        archive.extractall(directory, filter="data")
    return directory / f"{package}-{version}"


def run(folder: Path, broker: LocalBroker, arguments: Sequence[str], **variables: str) -> str:
    """Run tests of an unpacked distribution against a broker and return what pytest prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    url = f"cometmq://{broker.namesrv}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TEST_BROKER": url, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    return done.stdout


@pytest.mark.slow("waits for messages that must not come, a second each")
def test_kombus_own_tests_pass(broker: LocalBroker, tmp_path: Path) -> None:
    folder = source("kombu", tmp_path)
    shutil.copy(Path(__file__).with_name("kombu_suite.py"), folder / "t/integration/test_cometmq.py")
    printed = run(folder, broker, ["t/integration/test_cometmq.py", "-q", "-o", "python_classes=Test*"])

    assert "25 passed" in printed


@long_form("Celery's tests wait for seconds again and again")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", CELERY)
def test_celerys_own_tests_pass(broker: LocalBroker, tmp_path: Path, file: str) -> None:
    folder = source("celery", tmp_path)
    names = {path.name for path in (folder / "t/integration").glob("test_*.py")}
    assert sorted(names) == sorted([*CELERY, *OTHERS])
    left_out = [f"--deselect=t/integration/{test}" for test in LEFT_OUT if test.startswith(file)]
    config = {"broker_transport_options": OPTIONS.get(file, {})}
    (folder / "integration-tests-config.json").write_text(json.dumps(config))
    plugins = ["-p", "tests.integrations.celery_suite", "-p", "celery.contrib.pytest"]
    with redis_server(tmp_path) as port:
        results = {"TEST_BACKEND": f"redis://127.0.0.1:{port}/0", "REDIS_HOST": "127.0.0.1"}
        arguments = [*plugins, *left_out, f"t/integration/{file}"]
        printed = run(folder, broker, arguments, **results, REDIS_PORT=str(port))

    assert re.search(r"[1-9]\d* passed", printed)
