"""The command `cometmq mcp`, which serves tools for agents (Model Context Protocol)."""

from __future__ import annotations

import asyncio
import os
import secrets
from importlib.util import find_spec

import click

from cometmq.cli.options import HELP, namesrv_option

TOKEN_ENV = "COMETMQ_MCP_TOKEN"
MIN_TOKEN_CHARS = 16


@click.command(context_settings=HELP)
@namesrv_option
@click.option(
    "--http",
    "port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve HTTP at /mcp on this port (0: any free port) instead of standard input and output.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on, with --http.")
@click.option("--allow-changes", is_flag=True, help="Offer also tools that change the cluster.")
def mcp(namesrv: str, port: int | None, host: str, allow_changes: bool) -> None:
    """Serve tools with which agents examine a cluster (Model Context Protocol).

    With --http, clients must send the bearer token in COMETMQ_MCP_TOKEN. Without this variable, the command
    prints a new token. --allow-changes needs an account, whose rights the tools have. See docs/mcp.md.
    """
    if find_spec("mcp") is None:
        raise click.ClickException("the package mcp is missing: pip install 'cometmq[mcp]'")
    from cometmq.client.cluster.options import environment_credentials

    if allow_changes and environment_credentials() is None:
        raise click.UsageError("--allow-changes needs an account: --access-key and --secret-key")
    token = os.environ.get(TOKEN_ENV) or secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_CHARS or not token.isascii():
        raise click.UsageError(f"{TOKEN_ENV} must have at least {MIN_TOKEN_CHARS} ASCII characters")
    asyncio.run(_run(namesrv, port, host, token, allow_changes=allow_changes))


async def _run(namesrv: str, port: int | None, host: str, token: str, *, allow_changes: bool) -> None:
    from cometmq.admin import Admin
    from cometmq.integrations.mcp import make_server

    async with Admin(namesrv) as admin:
        server = make_server(admin, namesrv, allow_changes=allow_changes)
        if port is None:
            await server.run_stdio_async()
        else:
            await _serve(server.streamable_http_app(host=host, stateless_http=True), host, port, token)


async def _serve(app: object, host: str, port: int, token: str) -> None:
    import uvicorn

    from cometmq.integrations.mcp import TokenGuard

    config = uvicorn.Config(TokenGuard(app, token), host=host, port=port, log_level="warning", ws="none")
    listening = config.bind_socket()
    listening.listen()  # clients may connect as soon as they read the line below
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"mcp         http://{shown}:{listening.getsockname()[1]}/mcp")
    if not os.environ.get(TOKEN_ENV):
        click.echo(f"token       {token}")
    await uvicorn.Server(config).serve(sockets=[listening])
