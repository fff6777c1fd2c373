"""How a command ends: one clear line on standard error and an exit code, never a traceback.

COMETMQ_TRACEBACK=1 shows the traceback as well, for bug reports. With `--json` the error is a JSON object.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

import click

from cometmq.errors import CometError, StoreError
from cometmq.text import printable, printable_json, shortened

INTERRUPTED = 130  # 128 + SIGINT, what shells expect
ERROR_LIMIT = 4096  # characters: a remark of a server may be as long as a frame


@dataclass(frozen=True, slots=True)
class Exits:
    """Exit codes by kind of failure."""

    usage: int = 2
    store: int = 1
    failure: int = 1


COMET_EXITS = Exits()
# Apache's mqadmin says 0 for failed and unknown commands; scripts deserve to know.
ADMIN_EXITS = Exits(usage=1)
# Apache's servers: -1 for bad options and exceptions, -3 when the store cannot be opened.
SERVER_EXITS = Exits(usage=255, store=253, failure=255)


def run_command(command: click.Command, prog: str, exits: Exits = COMET_EXITS) -> NoReturn:
    """Run a click command with the process's arguments and leave with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal lacks, and bytes of arguments that are no text, are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command.main(prog_name=prog, standalone_mode=False)
        # A closed pipe (`| head`) is noticed here, not while the interpreter shuts down.
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.UsageError as error:
        show_usage_error(error)
        code = exits.usage
    except click.exceptions.Exit as asked:
        code = asked.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        code = 1  # whoever read our output has gone
    except Exception as error:
        show_error(prog, error)
        code = exits.store if isinstance(error, StoreError) else exits.failure
    leave(code if isinstance(code, int) else 0)


def leave(code: int) -> NoReturn:
    """End the process with a code, even if standard output is gone."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Nobody reads the rest (that was reported above): the interpreter must not try to write it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def json_wanted() -> bool:
    """Whether the command line asks for JSON, even if the rest of it is wrong."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def show_error(prog: str, error: Exception) -> None:
    """One line on standard error; an unexpected failure names its type."""
    if os.environ.get("COMETMQ_TRACEBACK"):
        traceback.print_exception(error)
    text = describe(error)
    if json_wanted():
        show_json_error(error, text)
    else:
        click.echo(f"{prog}: {text}", err=True)


def show_usage_error(error: click.UsageError) -> None:
    """How the command is called and what was wrong, on standard error."""
    text = printable(error.format_message(), ERROR_LIMIT)
    if json_wanted():
        show_json_error(error, text)
        return
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
    click.echo(f"Error: {text}", err=True)


def show_json_error(error: Exception, text: str) -> None:
    """One line: the error's type, its text and the facts that it carries (code, remark, brokerAddr ...)."""
    import msgspec

    facts = vars(error) if isinstance(error, CometError) else {}
    details = {camel_case(name): plain(fact) for name, fact in facts.items() if not name.startswith("_")}
    value = {"error": type(error).__name__, "message": text, "details": details}
    click.echo(printable_json(msgspec.json.encode(value)), err=True)


def plain(fact: object) -> object:
    """A fact as JSON has it: short, and UTF-8 whatever an argument or a server's answer held."""
    if fact is None or isinstance(fact, bool | int | float):
        return fact
    if isinstance(fact, list | tuple):
        return [plain(each) for each in fact]
    return shortened(str(fact), ERROR_LIMIT).encode("utf-8", "backslashreplace").decode("utf-8")


def camel_case(name: str) -> str:
    """`broker_addr` as JSON has it: `brokerAddr`."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


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
    elif isinstance(error, UnicodeEncodeError):
        text = f"not UTF-8 text: {error.object!r}"
    else:
        hint = "" if os.environ.get("COMETMQ_TRACEBACK") else " (COMETMQ_TRACEBACK=1 shows where)"
        text = f"internal error: {type(error).__name__}: {error}{hint}"
    return printable(" ".join(text.split()), ERROR_LIMIT)
