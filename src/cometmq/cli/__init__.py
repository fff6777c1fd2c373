"""The commands `cometmq`, `mqnamesrv`, `mqbroker`, `mqadmin` and `mqshutdown`.

Each entry point imports its modules when it runs, so that the start of a broker does not import the client.
"""

from __future__ import annotations

import gc
import signal
import sys
import time

# The monotonic time at which this process started. The ready line shows the time since then.
STARTED_S = time.monotonic()
# The garbage collector's first threshold in a command, and during the start of a server. The imports create
# 100,000 objects and hardly any reference cycle; with Python's default of 700 the collections took an eighth
# of a broker's start.
START_THRESHOLD = 10_000


def main() -> None:
    """Run `cometmq`, which contains all commands, for example `cometmq mqadmin`."""
    gc.set_threshold(START_THRESHOLD)
    try:
        _run()
    # Ctrl-C during the imports. Later interrupts are handled by `run_command`.
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run() -> None:
    scripts = {each.__name__: each for each in (mqnamesrv, mqbroker, mqadmin, mqshutdown)}
    script = scripts.get("".join(sys.argv[1:2]))
    if script is not None:
        del sys.argv[0]
        script()
    from cometmq.cli.app import cometmq
    from cometmq.cli.outcome import run_command

    run_command(cometmq, "cometmq")


def mqnamesrv() -> None:
    """Run `mqnamesrv`: a name server in the foreground, with the options of Apache's script."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.servers import mqnamesrv

    run_command(mqnamesrv, "mqnamesrv", SERVER_EXITS)


def mqbroker() -> None:
    """Run `mqbroker`: a broker in the foreground, with the options of Apache's script."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.servers import mqbroker

    run_command(mqbroker, "mqbroker", SERVER_EXITS)


def mqadmin() -> None:
    """Run `mqadmin`: RocketMQ's administration commands."""
    from cometmq.admin.commands import mqadmin
    from cometmq.cli.outcome import ADMIN_EXITS, run_command

    run_command(mqadmin, "mqadmin", ADMIN_EXITS)


def mqshutdown() -> None:
    """Run `mqshutdown`: stop the running name servers or brokers of this user."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.running import mqshutdown

    run_command(mqshutdown, "mqshutdown", SERVER_EXITS)
