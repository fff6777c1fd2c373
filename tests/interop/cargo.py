"""Programs of ours in Rust, which are compiled once for each content and kept in the cache of the tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.interop.jars import FetchError, ToolMissingError, fetching, locked

BUILD_TIMEOUT_S = 3600
"""The first build compiles 200 crates, which takes minutes."""


def rust_program(source: Path) -> Path:
    """Return the program of a directory with `Cargo.toml` and `src/main.rs`."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise ToolMissingError("cargo is needed for Apache's Rust client: install Rust 1.85 or newer")
    digest = hashlib.sha256()
    for path in (source / "Cargo.toml", source / "src" / "main.rs"):
        digest.update(path.read_bytes())
    with locked("cargo") as cache:
        home = cache / f"rust-{digest.hexdigest()[:16]}"
        program = home / "program"
        if not program.exists():
            shutil.copytree(source, home, dirs_exist_ok=True)
            target = cache / "rust-target"  # keeps the compiled crates when the program changes
            with fetching(cache, home.name):
                done = subprocess.run(
                    [cargo, "build", "--quiet"],
                    cwd=home,
                    env={**os.environ, "CARGO_TARGET_DIR": str(target)},
                    capture_output=True,
                    text=True,
                    timeout=BUILD_TIMEOUT_S,
                )
                if done.returncode != 0:
                    raise FetchError(f"cargo could not build {source}:\n{done.stderr[-4000:]}")
            shutil.copy(target / "debug" / "grpc-driver", home / "unfinished")
            (home / "unfinished").rename(program)
        return program
