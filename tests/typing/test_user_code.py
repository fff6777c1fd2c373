"""The types of the public API, as a user's mypy checks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def test_a_users_program_has_the_types_it_should(pytestconfig: pytest.Config) -> None:
    # With the cache the second run on a machine takes only a second.
    cache = pytestconfig.cache.mkdir("mypy") if pytestconfig.cache is not None else os.devnull
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(HERE / "user_code.py")],
        env={**os.environ, "MYPYPATH": str(SRC)},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.stdout.startswith("Success"), found.stdout + found.stderr
