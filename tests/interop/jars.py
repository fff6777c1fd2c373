"""Apache RocketMQ's jars, fetched by coordinates with the Ivy that PySpark contains.

This repository contains no files of Apache's: the jars of a test are resolved with their transitive
dependencies into a cache outside the tree (``COMETMQ_TEST_CACHE``, else ``cometmq-tests`` under
``$XDG_CACHE_HOME`` or ``~/.cache``) and kept there, so only the first run on a machine needs a registry.
Ivy's default resolvers are used; ``COMETMQ_IVY_SETTINGS`` may name an Ivy settings file with others, and
proxies come from the usual environment variables. A missing tool or an unreachable registry raises
:class:`ToolMissingError` or :class:`FetchError`: interoperability tests are never skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

GROUP = "org.apache.rocketmq"
SERVER_VERSIONS = ("4.9.7", "5.5.0")
CLIENT_VERSIONS = ("4.9.8", "5.5.0")
FETCH_ATTEMPTS = 3
FETCH_TIMEOUT_S = 600
FAILURE_KEPT_S = 300
"""How long, in seconds, a failure counts for other processes, which have waited for the lock meanwhile."""


class ToolMissingError(Exception):
    """A program required by these tests is not installed."""


class FetchError(Exception):
    """A failure of all attempts to fetch from the registry; the text ends with Ivy's own report."""


def java_tool(name: str) -> str:
    """Return the path of ``java`` or ``javac``: from JAVA_HOME if that is set, else from PATH."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(name, path=str(Path(home, "bin"))) if home else None
    found = found or shutil.which(name)
    if found is None:
        raise ToolMissingError(f"{name} is needed to run Apache RocketMQ: install a JDK 17 or newer")
    return found


def cache_dir() -> Path:
    named = os.environ.get("COMETMQ_TEST_CACHE")
    if named:
        path = Path(named)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base) if base else Path.home() / ".cache") / "cometmq-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


NOT_FETCHED = contextlib.suppress(Exception)
"""Ignores a failure to fetch before the first test: the tests that need the file fail in the same way."""


@contextlib.contextmanager
def locked(name: str) -> Iterator[Path]:
    """Hold the cache's lock ``name``, across processes; yield the cache directory."""
    directory = cache_dir()
    with open(directory / f"{name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield directory


@contextlib.contextmanager
def fetching(cache: Path, name: str) -> Iterator[None]:
    """Fetch something in the block. For some minutes after a failure, raise FetchError instead."""
    failure = cache / f"{name}.failed"
    if failure.exists() and 0 <= time.time() - failure.stat().st_mtime < FAILURE_KEPT_S:
        raise FetchError(f"{failure.read_text()}\nTo try again before {FAILURE_KEPT_S} s, delete {failure}")
    try:
        yield
    except (FetchError, subprocess.TimeoutExpired) as error:
        failure.write_text(str(error))
        raise
    failure.unlink(missing_ok=True)


def server_jars(version: str, *more: str) -> list[Path]:
    """Return the class path of Apache's name server, broker, admin tools and more parts of one version."""
    return resolve([(f"rocketmq-{part}", version) for part in ("namesrv", "broker", "tools", *more)])


def client_jars(version: str) -> list[Path]:
    """Return the class path of Apache's Java client of one version."""
    return resolve([("rocketmq-client", version)])


def resolve(modules: list[tuple[str, str]], *, transitive: bool = True) -> list[Path]:
    """Return the jars of (artifact, version) pairs with their run-time dependencies.

    An artifact of another group than RocketMQ's is `group:artifact`.
    """
    key = hashlib.sha256(json.dumps([modules, transitive]).encode()).hexdigest()[:16]
    with locked("ivy") as directory:
        remembered = directory / f"classpath-{key}.json"
        if remembered.exists():
            jars = [Path(name) for name in json.loads(remembered.read_text())]
            if jars and all(jar.exists() for jar in jars):
                return jars
        with fetching(directory, f"ivy-{key}"):
            jars = _fetch(directory, key, modules, transitive)
        remembered.write_text(json.dumps([str(jar) for jar in jars], indent=1))
        return jars


def _fetch(directory: Path, key: str, modules: list[tuple[str, str]], transitive: bool) -> list[Path]:
    wanted = directory / f"ivy-{key}.xml"
    found = directory / f"ivy-{key}.path"
    named = [(*(name.split(":") if ":" in name else (GROUP, name)), version) for name, version in modules]
    dependencies = "".join(
        f'<dependency org="{group}" name="{name}" rev="{version}" conf="default" '
        f'transitive="{str(transitive).lower()}"/>'
        for group, name, version in named
    )
    wanted.write_text(
        f'<ivy-module version="2.0"><info organisation="cometmq" module="interop-{key}"/>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
    command = [java_tool("java"), *proxy_options(), "-jar", str(_ivy_jar())]
    settings = os.environ.get("COMETMQ_IVY_SETTINGS")
    if settings:
        command += ["-settings", settings]
    command += ["-cache", str(directory / "ivy"), "-ivy", str(wanted), "-cachepath", str(found), "-warn"]
    report = ""
    for attempt in range(FETCH_ATTEMPTS):
        found.unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, cwd=directory)
        jars = [Path(name) for name in found.read_text().strip().split(os.pathsep)] if found.exists() else []
        present = {jar.name for jar in jars if jar.exists()}
        if done.returncode == 0 and all(f"{name}-{version}.jar" in present for _, name, version in named):
            return jars
        report = done.stdout[-4000:] + done.stderr[-2000:]
        time.sleep(2 * attempt)  # an overloaded registry may recover
    names = ", ".join(map(":".join, named))
    raise FetchError(f"{names} could not be fetched in {FETCH_ATTEMPTS} attempts:\n{report}")


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ToolMissingError("pyspark is needed for the Ivy jar it brings: pip install 'cometmq[test]'")
    jars = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))
    if not jars:
        raise ToolMissingError(f"no ivy-*.jar beside {spec.origin}: is this a full PySpark?")
    return jars[-1]


def proxy_options() -> list[str]:
    """Return Java options for the proxy variables, which Java does not read itself."""
    options = []
    for scheme, url in urllib.request.getproxies().items():
        parts = urllib.parse.urlsplit(url)
        if scheme in ("http", "https") and parts.hostname:
            options.append(f"-D{scheme}.proxyHost={parts.hostname}")
            options.append(f"-D{scheme}.proxyPort={parts.port or 80}")
    exempt = urllib.request.getproxies().get("no")
    if exempt:
        names = exempt.replace(" ", "").split(",")
        hosts = ["*" + name if name.startswith(".") else name for name in names]
        options.append("-Dhttp.nonProxyHosts=" + "|".join(hosts))
    return options
