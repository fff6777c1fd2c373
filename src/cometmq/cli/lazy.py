"""Click groups of the `cometmq` command: commands under headings, imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from cometmq.text import did_you_mean

MAX_LIST_LINE_CHARS = 500  # maximum characters of a line in the list of commands; click's default is 45
Commands = Mapping[str, tuple[str, str]]
"""A mapping from each command name to its "module:attribute" and its line in the list of commands."""


class CometGroup(click.Group):
    """A Click group that prints its help if called without arguments, and suggests similar commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            # Print the help here: Click 8.2 and later would raise it as a usage error.
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"No such command {args[0]!r}.{did_you_mean(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def lines(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the commands under each heading, as pairs of the command's name and its line of help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {
            "Commands": [
                (name, each.get_short_help_str(MAX_LIST_LINE_CHARS)) for name, each in commands if each
            ]
        }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = self.lines(ctx)
        width = max(len(name) for lines in sections.values() for name, _ in lines)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines])


class LazyGroup(CometGroup):
    """A Click group that imports the module of a command only when the command is used.

    The help lines of the commands are constants, so that `cometmq --help` imports no server, client or Spark.

    Args:
        sections: Maps each heading of the help to the commands under it, in their order.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Commands], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self._lazy = {name: place for commands in sections.values() for name, (place, _) in commands.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def lines(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:  # noqa: ARG002
        return {
            heading: [(name, line) for name, (_, line) in commands.items()]
            for heading, commands in self.sections.items()
        }
