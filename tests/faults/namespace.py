"""Linux network namespaces: a test runs again in its own one, where the kernel drops packets on cut paths.

All servers listen on the namespace's loopback address, as they do outside. A path is a port that only its own
connections use (groups.py). A routing rule cuts it, which needs only iproute2: packets in flight are dropped
without notice, and new connections have no route.
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
# The rule for local addresses normally precedes all others, so it is moved after the rules that cut.
_PREPARE = "ip link set lo up && ip rule add pref 100 lookup local && ip rule del pref 0"


def possible() -> bool:
    """Return whether this machine permits network namespaces."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_ENTER, "sh", "-c", _PREPARE], capture_output=True).returncode == 0


def run_again(test: str, directory: Path, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a test in a namespace, with its files in `directory`."""
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
    """Drop all packets to and from a port."""
    _rules("add", port)


def heal(port: int) -> None:
    """Stop dropping packets of a port."""
    _rules("del", port)


def _rules(what: str, port: int) -> None:
    for end in ("dport", "sport"):
        rule = ["pref", "10", "ipproto", "tcp", end, str(port), "unreachable"]
        subprocess.run(["ip", "rule", what, *rule], check=True, capture_output=True)
