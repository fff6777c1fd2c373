"""`cometmq context`: names for clusters, whose name servers and accounts other commands then use."""

from __future__ import annotations

import os

import click

from cometmq import contexts
from cometmq.cli.app import CometGroup
from cometmq.cli.options import HELP, check_utf8, json_line
from cometmq.client.cluster.options import namesrv_addresses
from cometmq.command_options import opt
from cometmq.text import printable


@click.group(cls=CometGroup, context_settings=HELP)
def context() -> None:
    """Name clusters, and choose the one that commands use when they are given no name servers.

    COMETMQ_CONTEXT=NAME chooses one for a shell, or for a command.
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
@opt("--use", is_flag=True, help="Also make it the current context.")
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
