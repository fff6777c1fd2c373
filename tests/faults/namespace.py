"""Linux network namespaces: a test runs again in one of its own, where the kernel loses packets on the ways
that are cut. There all servers listen on its loopback, as they do outside of it.

A way is a port that only those who go that way use (groups.py). Cutting it by a routing rule needs no other
tool than iproute2: what is on its way is lost and nobody hears of it, and whoever connects has no route.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = os.environ.get("COMETMQ_NAMESPACE") == "1"
"""Whether this process is in such a namespace."""
_ENTER = ["unshare", "--user", "--map-root-user", "--net"]
# The rule for what is local comes first, whatever others say: it is put behind those that cut.
_PREPARE = "ip link set lo up && ip rule add pref 100 lookup local && ip rule del pref 0"


def possible() -> bool:
    """Whether this machine lets us have one."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_ENTER, "sh", "-c", _PREPARE], capture_output=True).returncode == 0


def run_again(test: str, directory: Path, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a test in a namespace; directory: for its files."""
    pytest = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", f"--basetemp={directory}", test]
    return subprocess.run(
        [*_ENTER, "sh", "-c", f'{_PREPARE} && exec "$@"', "sh", *pytest],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "COMETMQ_NAMESPACE": "1", **env},
    )


def cut(port: int) -> None:
    """From now on nothing goes to a port, or comes from it."""
    _rules("add", port)


def heal(port: int) -> None:
    """It goes again."""
    _rules("del", port)


def _rules(what: str, port: int) -> None:
    for end in ("dport", "sport"):
        rule = ["pref", "10", "ipproto", "tcp", end, str(port), "unreachable"]
        subprocess.run(["ip", "rule", what, *rule], check=True, capture_output=True)
