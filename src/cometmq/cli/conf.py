"""`cometmq conf`, `acl` and `context`: packaged configuration, accounts' permissions, named clusters."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from cometmq import contexts
from cometmq.cli.app import CometGroup
from cometmq.cli.options import HELP, check_utf8, json_line
from cometmq.client.cluster.options import namesrv_addresses
from cometmq.command_options import opt
from cometmq.errors import ConfigError
from cometmq.settings import PACKAGED_CONF
from cometmq.text import did_you_mean, printable


@click.group(cls=CometGroup, context_settings=HELP)
def conf() -> None:
    """List, show and copy the configuration files of the package: cluster modes, settings, deployments."""


@conf.command("list", context_settings=HELP)
def list_files() -> None:
    """List the files and directories by name, each directory with its files."""
    for path in sorted(Path(PACKAGED_CONF).iterdir()):
        inside = "  ".join(sorted(file.name for file in path.iterdir())) if path.is_dir() else ""
        click.echo(f"{path.name:16}{inside}".rstrip())


@conf.command(context_settings=HELP)
@click.argument("name")
def show(name: str) -> None:
    """Print the file NAME, or all files of the directory NAME."""
    files = _files(name)
    for number, file in enumerate(files):
        if len(files) > 1:
            click.echo(f"{'' if number == 0 else chr(10)}==> {file.relative_to(PACKAGED_CONF)} <==")
        click.echo(file.read_bytes(), nl=False)


@conf.command(context_settings=HELP)
@click.argument("name")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def copy(name: str, directory: Path) -> None:
    """Copy the file NAME, or all files of the directory NAME, into DIR. Existing files are not replaced."""
    root = Path(PACKAGED_CONF, name)
    files = {file: file.relative_to(root) if root.is_dir() else Path(file.name) for file in _files(name)}
    if there := [str(file) for file in files.values() if (directory / file).exists()]:
        raise click.ClickException(f"{directory} already contains {', '.join(there)}; nothing was copied")
    for source, file in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, directory / file)
        click.echo(directory / file)


def _files(name: str) -> list[Path]:
    """Return the files under a name in `conf/`, sorted. Raises ClickException for an unknown name."""
    root = Path(PACKAGED_CONF)
    known = {str(path.relative_to(root)): path for path in root.rglob("*")}
    found = known.get(name.rstrip("/"))
    if found is None:
        raise click.ClickException(
            f"The package has no {name!r}.{did_you_mean(name, known)} `cometmq conf list` lists them."
        )
    return [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.is_file())


ACTIONS = ("pub", "sub", "admin")


@click.group(cls=CometGroup, context_settings=HELP)
def acl() -> None:
    """Explain the permissions of accounts of a broker with aclEnable.

    See docs/security.md.
    """


@acl.command(context_settings=HELP)
@click.argument("user")
@click.argument("action", type=click.Choice(ACTIONS, case_sensitive=False))
@click.argument("resource", required=False, default="")
@opt(
    "-c --configFile config_file",
    metavar="FILE",
    help="Settings file of the broker, whose accounts are used.",
)
@opt(
    "--conf",
    metavar="DIR",
    help="Directory of plain_acl.yml. [default: conf below ROCKETMQ_HOME, else the working directory]",
)
@opt(
    "--from host",
    default="",
    show_default=False,
    metavar="ADDRESS",
    help="Address of the client, to be looked up in the white lists.",
)
@opt("--json as_json", is_flag=True, help="Print the result as a line of JSON.")
def explain(
    user: str, action: str, resource: str, config_file: str | None, conf: str | None, host: str, as_json: bool
) -> None:
    """Explain whether the account USER may ACTION the RESOURCE, and name the rule that decides.

    The exit code is 1 if the action is denied.

    RESOURCE: `topic:NAME`, `group:NAME`, or NAME, which is a topic. The action `admin` has no resource: one
    permission covers all administration requests.
    """
    from cometmq.broker.access.decision import explained
    from cometmq.broker.access.files import AclFiles

    check_utf8(user, resource, host)
    files = AclFiles(_directory(config_file, conf))
    try:
        verdict = explained(files.load(), user, action, resource, host)
    except ConfigError as error:
        if error.key != "RESOURCE":
            raise
        raise click.UsageError(str(error)) from None
    if as_json:
        answer = {"user": user, "action": action, "resource": resource, "allowed": verdict.allowed}
        click.echo(json_line({**answer, "reason": verdict.reason, "conf": files.conf}))
    else:
        click.echo(printable(f"{'allowed' if verdict.allowed else 'denied'}: {verdict.reason}", None))
    if not verdict.allowed:
        raise click.exceptions.Exit(1)


def _directory(config_file: str | None, conf: str | None) -> str:
    from cometmq.broker.access.files import conf_directory
    from cometmq.cli.servers import broker_config

    if conf:
        return conf
    home = os.environ.get("ROCKETMQ_HOME", "")
    if config_file:
        config = broker_config(config_file, None)
        return conf_directory(config.rocketmq_home or home, config.broker_config_path)
    return os.path.join(home, "conf") if home else "."


@click.group(cls=CometGroup, context_settings=HELP)
def context() -> None:
    """Name clusters, and choose the cluster for commands without name servers.

    COMETMQ_CONTEXT=NAME chooses a context for one shell or one command.
    """


@context.command("list", context_settings=HELP)
@opt("--json as_json", is_flag=True, help="Print each context as a line of JSON.")
def list_contexts(as_json: bool) -> None:
    """List the contexts. A star marks the current one; secrets are not shown."""
    found = contexts.load()
    current = os.environ.get(contexts.CONTEXT_ENV) or found.current
    for name, each in sorted(found.contexts.items()):
        if as_json:
            shown = {"name": name, "current": name == current, "namesrv": each.namesrv}
            click.echo(json_line({**shown, "accessKey": each.access_key, "tls": each.tls}))
        else:
            account = f"  as {printable(each.access_key)}" if each.access_key else ""
            mark = "*" if name == current else " "
            click.echo(f"{mark} {printable(name):<16}{printable(each.namesrv)}{account}")


@context.command(context_settings=HELP)
@click.argument("name")
@opt("-n --namesrv", metavar="LIST", required=True, help="Name servers, separated by ';'.")
@opt("--access-key", metavar="NAME", default="", show_default=False, help="Account that signs the requests.")
@opt(
    "--secret-key",
    metavar="SECRET",
    help="Secret of the account. Without it, the command asks for the secret.",
)
@opt(
    "--tls", metavar="FILE", default="", show_default=False, help="TLS: RocketMQ's settings file, or `true`."
)
@opt("--use", is_flag=True, help="Make NAME the current context.")
def add(name: str, namesrv: str, access_key: str, secret_key: str | None, tls: str, use: bool) -> None:
    """Add the context NAME, or replace it."""
    check_utf8(name, namesrv, access_key, secret_key, tls)
    if not name.strip():
        raise click.UsageError("NAME is empty")
    namesrv_addresses(namesrv)
    if secret_key and not access_key:
        raise click.UsageError("--secret-key needs --access-key")
    if access_key and secret_key is None:
        secret_key = click.prompt("Secret key", hide_input=True)
    with contexts.changing() as found:
        found.contexts[name] = contexts.Context(namesrv, access_key, secret_key or "", tls)
        if use:
            found.current = name


@context.command(context_settings=HELP)
@click.argument("name", required=False, default="")
def use(name: str) -> None:
    """Make NAME the current context; without NAME, no context is current."""
    with contexts.changing() as found:
        if name:
            found.named(name)
        found.current = name


@context.command(context_settings=HELP)
@click.argument("name")
def remove(name: str) -> None:
    """Remove the context NAME."""
    with contexts.changing() as found:
        found.named(name)
        del found.contexts[name]
        if found.current == name:
            found.current = ""
