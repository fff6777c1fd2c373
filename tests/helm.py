"""Helm, compiled once from the Go module of its version and kept in the cache of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.interop.jars import FetchError, ToolMissingError, fetching, locked

VERSION = "v3.22.0"
BUILD_TIMEOUT_S = 1500
"""The build compiles the client libraries of Kubernetes, which takes three minutes of CPU."""


def helm() -> Path:
    """Return the program."""
    with locked("helm") as cache:
        home = cache / f"helm@{VERSION}"
        if not home.exists():
            go = shutil.which("go")
            if go is None:
                raise ToolMissingError(
                    "go is needed for helm, which checks conf/helm: install Go 1.26 or newer"
                )
            with fetching(cache, home.name), TemporaryDirectory(dir=cache) as fresh:
                done = subprocess.run(
                    [go, "install", "-ldflags=-s -w", f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
                    env={**os.environ, "GOBIN": f"{fresh}/bin"},
                    capture_output=True,
                    text=True,
                    timeout=BUILD_TIMEOUT_S,
                )
                if done.returncode != 0:
                    raise FetchError(f"go could not install helm:\n{done.stderr[-4000:]}")
                Path(fresh, "bin").rename(home)
        return home / "helm"
