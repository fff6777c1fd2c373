"""How a command ends: one clear line on standard error and an exit code, never a traceback.

COMETMQ_TRACEBACK=1 shows the traceback as well, for reports about our own mistakes.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

import click

from cometmq.errors import CometError, ConfigError, StoreError

INTERRUPTED = 130  # 128 + SIGINT, what shells expect


@dataclass(frozen=True, slots=True)
class Exits:
    """Exit codes by kind of failure."""

    usage: int = 2
    config: int = 1
    store: int = 1
    failure: int = 1


COMET_EXITS = Exits()
# Apache's mqadmin says 0 for failed and unknown commands; scripts deserve to know.
ADMIN_EXITS = Exits(usage=1)
# Apache's servers: -1 for bad options and exceptions, -3 when the store cannot be opened.
SERVER_EXITS = Exits(usage=255, config=255, store=253, failure=255)


def run_command(command: click.Command, prog: str, exits: Exits = COMET_EXITS) -> NoReturn:
    """Run a click command with the process's arguments and leave with its exit code."""
    try:
        code = command.main(prog_name=prog, standalone_mode=False)
        # A pipe that closed (`| head`) is noticed here, not in the interpreter's last breath.
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        code = exits.usage
    except click.exceptions.Exit as asked:
        code = asked.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; closing the descriptor keeps Python from complaining again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        show_error(prog, error)
        code = exit_code_of(error, exits)
    sys.exit(code if isinstance(code, int) else 0)


def exit_code_of(error: BaseException, exits: Exits) -> int:
    """The exit code that says what kind of failure it was."""
    if isinstance(error, ConfigError):
        return exits.config
    if isinstance(error, StoreError):
        return exits.store
    return exits.failure


def show_error(prog: str, error: Exception) -> None:
    """One line on standard error; a failure nobody foresaw names its type."""
    if os.environ.get("COMETMQ_TRACEBACK"):
        traceback.print_exception(error)
    click.echo(f"{prog}: {describe(error)}", err=True)


def describe(error: Exception) -> str:
    """An error in one line for a person."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, CometError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, OSError | TimeoutError):
        text = str(error) or type(error).__name__
    else:
        hint = "" if os.environ.get("COMETMQ_TRACEBACK") else " (COMETMQ_TRACEBACK=1 shows where)"
        text = f"internal error: {type(error).__name__}: {error}{hint}"
    return " ".join(text.split())
