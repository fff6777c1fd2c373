"""`cometmq acl`: the permissions that account files grant, and the rules that decide."""

from __future__ import annotations

import os

import click

from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import HELP, check_utf8
from cometmq.errors import ConfigError
from cometmq.text import printable, printable_json

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
@click.option(
    "-c",
    "--configFile",
    "config_file",
    metavar="FILE",
    help="Settings file of the broker, whose accounts are used.",
)
@click.option(
    "--conf",
    metavar="DIR",
    help="Directory of plain_acl.yml. [default: conf below ROCKETMQ_HOME, else the working directory]",
)
@click.option(
    "--from",
    "host",
    default="",
    show_default=False,
    metavar="ADDRESS",
    help="Address of the client, to be looked up in the white lists.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as a line of JSON.")
def explain(
    user: str, action: str, resource: str, config_file: str | None, conf: str | None, host: str, as_json: bool
) -> None:
    """Explain whether the account USER may ACTION the RESOURCE, and which rule decides.

    The exit code is 1 if the account may not.

    RESOURCE: `topic:NAME`, `group:NAME`, or NAME, which is a topic. The action `admin` has no resource: one
    permission covers all administration requests.
    """
    import msgspec

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
        click.echo(
            printable_json(msgspec.json.encode({**answer, "reason": verdict.reason, "conf": files.conf}))
        )
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
