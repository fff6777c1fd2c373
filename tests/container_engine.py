"""A container engine for tests: a Docker daemon that answers, else Podman of this machine.

Podman needs no daemon and no registry: its base image is made of Debian's packages, which have the same
Python as the base of conf/container/Containerfile. Where neither is possible, the tests that need an engine
are skipped, and the report of the run says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.interop.jars import fetching, locked
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[1]
CONTAINERFILE = ROOT / "src" / "cometmq" / "conf" / "container" / "Containerfile"
IMAGE = "localhost/cometmq-test"
BUILD = ("build", "--tag", IMAGE, "--file", str(CONTAINERFILE))
SUITE = "trixie"
PROGRAMS = ("podman", "runc", "slirp4netns", "debootstrap")
MISSING = (
    "NO IMAGE IS BUILT AND NO CONTAINER IS STARTED. That takes a Docker daemon with access to a "
    f"registry, or, as root, apt-get install --no-install-recommends {' '.join(PROGRAMS)}"
)
SECONDS = 600
CONF = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "slirp4netns"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@dataclass(frozen=True)
class Engine:
    """A container engine with the image of conf/container.

    Attributes:
        command: The program, with its options.
        address: The address for DOCKER_HOST.
        run_options: Options of `run`, as keyword arguments of Testcontainers, too.
    """

    command: list[str]
    env: dict[str, str]
    address: str
    run_options: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        """Run a command of the engine. Return its output, and fail with it if the command fails."""
        done = subprocess.run(
            [*self.command, *words], env=self.env, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
        return done.stdout


@contextmanager
def engine_with_image(directory: Path) -> Iterator[Engine]:
    """Build the image and yield its engine, or skip the test."""
    if shutil.which("docker") and not _fails("docker", "info"):
        if failure := _fails("docker", "pull", "python:3.13-slim"):
            pytest.skip(f"{MISSING}. The daemon says: {failure}")
        engine = Engine(["docker"], dict(os.environ), os.environ.get("DOCKER_HOST", ""))
        engine.run(*BUILD, ".")
        yield engine
        return
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        pytest.skip(MISSING)
    (directory / "containers.conf").write_text(CONF)
    env = {**os.environ, "CONTAINERS_CONF": str(directory / "containers.conf")}
    with locked("containers") as cache, ExitStack() as stack:
        store = cache / f"containers-{SUITE}"
        command = ["podman", "--root", str(store / "store"), "--runroot", str(store / "run")]
        address = f"unix://{directory}/podman.sock"
        engine = Engine(command, env, address, {"network_mode": "slirp4netns"})
        _make_base(engine, cache)
        shared = [path for path in ("/etc/ssl/certs", "/etc/pip.conf") if Path(path).exists()]
        volumes = [word for path in shared for word in ("--volume", f"{path}:{path}:ro")]
        base = ("--isolation", "chroot", "--format", "docker", "--layers=false")
        stack.callback(engine.run, "image", "prune", "--force")
        engine.run(*BUILD, "--build-arg", "BASE=localhost/base", *base, *volumes, ".")
        service = subprocess.Popen([*command, "system", "service", "--time", "0", address], env=env)
        stack.callback(service.wait)
        stack.callback(service.terminate)
        wait_until("podman listens", lambda: (directory / "podman.sock").exists())
        yield engine


def _make_base(engine: Engine, cache: Path) -> None:
    if "localhost/base" in engine.run("images", "--noheading", "--format", "{{.Repository}}"):
        return
    with fetching(cache, f"debian-{SUITE}"), TemporaryDirectory(dir=cache) as fresh:
        packages = "--include=python3,python3-venv,binutils,ca-certificates"
        command = ["debootstrap", "--variant=minbase", packages, SUITE, f"{fresh}/root"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            pytest.skip(f"{MISSING}. debootstrap says: {(done.stdout + done.stderr)[-2000:]}")
        subprocess.run(["tar", "-C", f"{fresh}/root", "-cf", f"{fresh}/base.tar", "."], check=True)
        engine.run("import", f"{fresh}/base.tar", "localhost/base")


def _fails(*command: str) -> str:
    """Return the last line of the output of a command that fails, else ""."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode == 0:
        return ""
    return ((done.stdout + done.stderr).strip().splitlines() or ["it failed"])[-1]
