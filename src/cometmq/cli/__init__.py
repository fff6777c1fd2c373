"""The commands `cometmq`, `mqnamesrv`, `mqbroker`, `mqadmin` and `mqshutdown`.

Each entry point imports what it needs when it runs: a broker that starts must not wait for the client.
"""

from __future__ import annotations

import sys
import time

# When this process's command began, on the monotonic clock: what "ready after" counts from.
STARTED_S = time.monotonic()


def main() -> None:
    """`cometmq`: everything in one command; `cometmq mqadmin` is the command `mqadmin`, and so on."""
    scripts = {each.__name__: each for each in (mqnamesrv, mqbroker, mqadmin, mqshutdown)}
    script = scripts.get("".join(sys.argv[1:2]))
    if script is not None:
        del sys.argv[0]
        script()
    from cometmq.cli.app import cometmq
    from cometmq.cli.outcome import run_command

    run_command(cometmq, "cometmq")


def mqnamesrv() -> None:
    """`mqnamesrv`: a name server in the foreground, with the options of Apache's script."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.servers import mqnamesrv

    run_command(mqnamesrv, "mqnamesrv", SERVER_EXITS)


def mqbroker() -> None:
    """`mqbroker`: a broker in the foreground, with the options of Apache's script."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.servers import mqbroker

    run_command(mqbroker, "mqbroker", SERVER_EXITS)


def mqadmin() -> None:
    """`mqadmin`: RocketMQ's administration commands."""
    from cometmq.admin.commands import mqadmin
    from cometmq.cli.outcome import ADMIN_EXITS, run_command

    run_command(mqadmin, "mqadmin", ADMIN_EXITS)


def mqshutdown() -> None:
    """`mqshutdown`: ask the running name servers or brokers of this user to stop."""
    from cometmq.cli.outcome import SERVER_EXITS, run_command
    from cometmq.cli.shutdown import mqshutdown

    run_command(mqshutdown, "mqshutdown", SERVER_EXITS)
