"""The types of the public API, as a user's mypy checks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def type_check(config: pytest.Config, *options: str, path: str = "") -> str:
    """Return what mypy prints about the user's program. The package is in `path`, or installed."""
    # With the cache the second run on a machine takes only a second.
    cache = config.cache.mkdir("mypy") if path and config.cache is not None else os.devnull
    options = ("--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}", *options)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(HERE / "user_code.py")],
        env={**os.environ, "MYPYPATH": path},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return found.stdout + found.stderr


@pytest.mark.slow("mypy reads the types of all modules")
@pytest.mark.representative
def test_a_users_program_has_the_types_it_should(pytestconfig: pytest.Config) -> None:
    assert type_check(pytestconfig, path=str(SRC)).startswith("Success")
