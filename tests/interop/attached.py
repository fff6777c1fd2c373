"""Run one of our commands and end it when standard input ends: a killed test run leaves no server behind.

Usage: ``python attached.py mqbroker -c broker.conf``. ServerLauncher does the same for the Java servers.
"""

from __future__ import annotations

import os
import sys
import threading

import cometmq.cli


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass  # no data is ever sent, only the end counts
    os._exit(3)


def main() -> None:
    command = sys.argv.pop(1)
    threading.Thread(target=_end_with_parent, name="parent-watcher", daemon=True).start()
    getattr(cometmq.cli, command)()


if __name__ == "__main__":
    main()
