"""`mqshutdown broker | namesrv`: stop running servers, like Apache's script."""

from __future__ import annotations

import os
import signal
import time

import click

from cometmq import __version__
from cometmq.cli.options import HELP
from cometmq.cli.running import running
from cometmq.number_range import FiniteRange

POLL_INTERVAL_S = 0.05


@click.command(context_settings=HELP)
@click.argument("kind", type=click.Choice(["broker", "namesrv", "standalone"], case_sensitive=False))
@click.option(
    "-w",
    "--wait",
    "wait_s",
    type=FiniteRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Maximum time to wait for the processes to stop. The exit code is 1 if one is still running then.",
)
@click.version_option(__version__, "-V", "--version")
def mqshutdown(kind: str, wait_s: float) -> int:
    """Stop every running name server or broker of this user after draining it."""
    name = kind if kind == "standalone" else f"mq{kind}"
    pids = list(running(kind))
    if not pids:
        click.echo(f"No {name} running.")
        return 255  # Apache's script returns -1 if no server runs
    for pid in pids:
        click.echo(f"The {name}({pid}) is running...")
        os.kill(pid, signal.SIGTERM)
        click.echo(f"Send shutdown request to {name}({pid}) OK")
    deadline = time.monotonic() + wait_s
    while wait_s and (left := set(pids) & set(running(kind))):
        if time.monotonic() > deadline:
            click.echo(f"{name} still runs after {wait_s:g} s: {', '.join(map(str, sorted(left)))}", err=True)
            return 1
        time.sleep(POLL_INTERVAL_S)
    return 0
