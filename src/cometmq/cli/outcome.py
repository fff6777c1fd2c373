"""The end of a command: one clear line on standard error and an exit code instead of a traceback.

COMETMQ_TRACEBACK=1 adds the traceback, for bug reports. With `--json` the error is a JSON object.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

import click

from cometmq.command_options import say
from cometmq.errors import CometError, ConnectError, StoreError
from cometmq.text import printable, printable_json, shortened

INTERRUPTED = 130  # the exit code of shells after Ctrl-C: 128 plus the number of SIGINT
MAX_ERROR_CHARS = 4096  # maximum length of a printed error: a server's remark may be as long as a frame


@dataclass(frozen=True, slots=True)
class Exits:
    """Exit codes by kind of failure."""

    usage: int = 2
    store: int = 1
    failure: int = 1


COMET_EXITS = Exits()
# `mqadmin` returns 1 for failures, so that scripts can detect them. Apache's `mqadmin` returns 0 even for
# failed and unknown commands.
ADMIN_EXITS = Exits(usage=1)
# The exit codes of Apache's servers: -1 for invalid options and exceptions, -3 if the store cannot be opened.
SERVER_EXITS = Exits(usage=255, store=253, failure=255)


def run_command(command: click.Command, prog: str, exits: Exits = COMET_EXITS) -> NoReturn:
    """Run a click command with the process's arguments, and exit with its exit code.

    A command whose standard output is closed fails before it does anything.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal cannot show, and undecodable bytes of arguments, are shown as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    if f"_{prog.upper()}_COMPLETE" in os.environ:  # a shell asks for completions
        import cometmq.cli.completion  # noqa: F401 - registers itself
    try:
        if sys.stdout is None:
            raise click.ClickException("standard output is closed")
        code = command.main(prog_name=prog, standalone_mode=False)
        # Flush here, so that a closed pipe (`| head`) is detected before the interpreter shuts down.
        sys.stdout.flush()
    except click.UsageError as error:
        show_usage_error(error)
        code = exits.usage
    except click.exceptions.Exit as exit_request:
        code = exit_request.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        code = 1  # the reader of standard output has closed the pipe
    except Exception as error:
        show_error(prog, error)
        code = exits.store if isinstance(error, StoreError) else exits.failure
    leave(code if isinstance(code, int) else 0)


def leave(code: int) -> NoReturn:
    """Exit with a code, even if standard output is closed."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # The closed output was already reported. Redirect it, so that the interpreter does not fail to write
        # the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Without freeze(), the interpreter would search all objects for garbage at exit before it frees them.
    gc.freeze()
    sys.exit(code)


def json_wanted() -> bool:
    """Return whether the command line contains `--json`, even if the command line is invalid."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def show_error(prog: str, error: Exception) -> None:
    """Print one line to standard error. For an unexpected error the line contains the error's type."""
    if os.environ.get("COMETMQ_TRACEBACK"):
        traceback.print_exception(error)
    text = describe(error)
    if json_wanted():
        show_json_error(error, text)
    else:
        say(f"{prog}: {text}", err=True, fg="red")


def show_usage_error(error: click.UsageError) -> None:
    """Print the usage line and the error to standard error."""
    text = describe(error)
    if json_wanted():
        show_json_error(error, text)
        return
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
    say(f"Error: {text}", err=True, fg="red")


def show_json_error(error: Exception, text: str) -> None:
    """Print one line of JSON: the error's type, text and attributes (code, remark, brokerAddr ...)."""
    import msgspec

    facts = vars(error) if isinstance(error, CometError) else {}
    details = {camel_case(name): plain(fact) for name, fact in facts.items() if not name.startswith("_")}
    value = {"error": type(error).__name__, "message": text, "details": details}
    click.echo(printable_json(msgspec.json.encode(value)), err=True)


def plain(fact: object) -> object:
    """Return an error's attribute as short, valid JSON, whatever bytes the attribute contains."""
    if fact is None or isinstance(fact, bool | int | float):
        return fact
    if isinstance(fact, list | tuple):
        return [plain(each) for each in fact]
    return shortened(str(fact), MAX_ERROR_CHARS).encode("utf-8", "backslashreplace").decode("utf-8")


def camel_case(name: str) -> str:
    """Return a name in camel case: `broker_addr` becomes `brokerAddr`."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def describe(error: Exception) -> str:
    """Return an error as one line of text."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, ConnectError) and "SSL" not in error.problem:
        text = f"{error} (is the server running? cometmq doctor examines the cluster)"
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
    return printable(" ".join(text.split()), MAX_ERROR_CHARS)
