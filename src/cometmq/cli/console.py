"""`cometmq console`: the web console of a cluster."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import HELP, PORT, namesrv_option
from cometmq.cli.servers import log_format_option, serve
from cometmq.command_options import opt

if TYPE_CHECKING:
    from cometmq.console.app import Console

DEFAULT_DATA = Path("~/.cometmq/console")
DEFAULT_PORT = 8082
NEEDED = ("nicegui", "argon2")


@click.command(context_settings=HELP)
@namesrv_option
@opt("--port", type=PORT, default=DEFAULT_PORT, help="Port; 0 is any free port.")
@opt(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; 0.0.0.0 also accepts connections from other machines.",
)
@opt(
    "--name names",
    multiple=True,
    metavar="HOST",
    help="Host name in browser addresses, in addition to --host and localhost; may be repeated.",
)
@opt(
    "--proxy proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address of a trusted proxy, whose X-Forwarded-For names the client; may be repeated.",
)
@opt("--cert", type=click.Path(dir_okay=False, path_type=Path), help="Certificate for HTTPS, as PEM.")
@opt(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Private key, if it is not in the certificate's file.",
)
@opt(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA,
    help="Directory of the accounts and the audit log.",
)
@opt(
    "--reports",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with results of pipeline jobs to show.",
)
@opt(
    "--add-user",
    metavar="NAME",
    help="Create an account, or set a new password; print the password and exit.",
)
@opt("--role", type=click.Choice(["admin", "reader"]), default="reader", help="Of --add-user.")
@opt("--remove-user", metavar="NAME", help="Remove an account and exit.")
@log_format_option
@opt("--with-parent", is_flag=True, hidden=True)
def console(
    namesrv: str,
    port: int,
    host: str,
    names: tuple[str, ...],
    proxies: tuple[str, ...],
    cert: Path | None,
    key: Path | None,
    data: Path,
    reports: Path | None,
    add_user: str | None,
    role: str,
    remove_user: str | None,
    with_parent: bool,
) -> None:
    """Show a cluster in a browser until Ctrl-C or SIGTERM.

    The first start creates the account `admin` and prints its password once.
    """
    check_installed()
    data = data.expanduser()
    if add_user is not None or remove_user is not None:
        _change_accounts(data, add_user, role, remove_user)
        return
    # Without this setting, NiceGUI would create its storage directory in the working directory.
    os.environ["NICEGUI_STORAGE_PATH"] = str(data / "framework")
    from cometmq.console.app import Console, ConsoleOptions

    options = ConsoleOptions(
        namesrv=namesrv, data=data, host=host, port=port, names=names, cert=cert, key=key, reports=reports,
        proxies=proxies,
    )  # fmt: skip
    serve("console", lambda: _made(Console(options), with_parent), announcement)


def check_installed() -> None:
    """Raise ClickException if the console's packages are not installed."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise click.ClickException(f"{' and '.join(missing)} missing: pip install 'cometmq[console]'")


def _made(console: Console, with_parent: bool) -> Console:
    if with_parent:
        _end_with_parent()
    return console


def _end_with_parent() -> None:
    """Stop the process as a signal would, when standard input ends because the parent process has ended."""
    import signal

    from cometmq.remoting import end_of_input

    async def wait() -> None:
        parent_ended = asyncio.Event()
        await end_of_input(parent_ended)
        await parent_ended.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    _waiting.append(asyncio.ensure_future(wait()))


_waiting: list[asyncio.Future[None]] = []


def announcement(console: Console) -> str:
    """Return the text that is printed when the console is ready."""
    lines = [f"The console of {console.namesrv} is ready: {console.url}"]
    if console.password is not None:
        lines.append(f"  first account  admin  password  {console.password}")
        lines.append(
            "  The password is shown only once. --add-user creates further accounts or a new password."
        )
    if console.exposed:
        lines.append(
            f"  WARNING: other machines can reach the console, because it listens on {console.options.host}."
        )
        if console.options.cert is None:
            lines.append("  WARNING: passwords are sent over the network as plain text: use --cert.")
    return "\n".join(lines)


def _change_accounts(data: Path, add: str | None, role: str, remove: str | None) -> None:
    from cometmq.console.auth.accounts import Accounts, Role

    accounts = Accounts(data / "users.json")
    if add is not None:
        password = accounts.put(add, Role(role))
        click.echo(f"{add}  {role}  password  {password}")
    if remove is not None:
        accounts.remove(remove)
        click.echo(f"{remove} is removed")
