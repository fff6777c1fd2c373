"""Generates pages of the reference site from the code, and adapts the links of all pages (`make docs`).

MkDocs loads this module as a hook (mkdocs.yml). It adds the README and the other texts at the root of the
repository, a page for each command with its help text, and pages for the public names of the packages.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
"""Text files at the root of the repository, and the names of their pages."""

API: dict[str, dict[str, list[str] | None]] = {
    "cometmq": {
        "Messages": [
            "Message", "MessageExt", "MessageQueue", "SendResult", "SendStatus", "TransactionSendResult",
            "tags", "sql92", "filter_class", "unique_key", "reply_to", "split_batches", "select_by_hash",
            "select_by_random",
        ],
        "Producers": [
            "Producer", "SyncProducer", "ProducerOptions", "TransactionProducer",
            "SyncTransactionProducer", "TransactionListener", "TransactionState",
        ],
        "Push consumers": [
            "PushConsumer", "SyncPushConsumer", "PushOptions", "MessageStream", "SyncMessageStream",
            "ConsumeContext", "ConsumeFromWhere", "ConsumeStatus", "OrderlyContext", "OrderlyStatus",
            "MessageModel", "ConsumerHealth", "FlowLimits", "stop_on_signal",
        ],
        "Pull consumers": [
            "PullConsumer", "SyncPullConsumer", "PullOptions", "PullResult", "PullStatus", "PullTurn",
            "OffsetStorage", "FileOffsets",
        ],
        "Simple consumers": [
            "SimpleConsumer", "SyncSimpleConsumer", "SimpleOptions", "LiteConsumer", "SyncLiteConsumer",
        ],
        "Idempotent listeners": [
            "idempotent", "MemoryMarks", "SqliteMarks", "DatabaseMarks", "RedisMarks", "BeingHandled",
        ],
        "Clients, hooks, traces": [
            "ClientInstance", "ClientOptions", "TraceOptions", "Telemetry", "SendHook", "Sending",
            "ConsumeHook", "Consuming", "EndingTransaction",
        ],
        "Errors": [
            "CometError", "Transient", "Terminal", "BadHandle", "BodyError", "BodyTooLarge",
            "BrokerError", "ClientStateError", "ConfigError", "ConnectError", "IdError", "MessageIllegal",
            "MessageNotFound", "NoRouteError", "ReplyTimeout", "RequestNotSent", "RequestTimeout",
            "SendFailed", "TooManySends",
        ],
        "Administration": ["Admin"],
    },
    "cometmq.pipeline": {"Spark jobs": None},
    "cometmq.testing": {"Testing": None},
}  # fmt: skip
"""Public names by package and page. None stands for all names of a package."""

_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:|#|mailto:)([^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, text in (*_command_pages(), *_api_pages()):
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Change links to files into links to their pages. Replace links to files without pages by their text."""
    here = page.file.src_uri
    root_page = here in ROOT_PAGES.values()

    def relink(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, _, anchor = target.partition("#")
        # The path of the file from the root of the repository.
        named = path if root_page else _joined("docs", str(PurePosixPath(here).parent), path)
        uri = ROOT_PAGES.get(named) or (named.removeprefix("docs/") if named.startswith("docs/") else None)
        if uri is None or files.get_file_from_path(uri) is None:
            return text
        up = "../" * (len(PurePosixPath(here).parts) - 1)
        return f"[{text}]({up}{uri}{'#' if anchor else ''}{anchor})"

    if here.startswith(("commands/", "api/")):
        return markdown
    return _LINK.sub(relink, markdown)


def _joined(*parts: str) -> str:
    """Return a path without `..`."""
    joined: list[str] = []
    for part in "/".join(parts).split("/"):
        if part == "..":
            joined.pop()
        elif part not in ("", "."):
            joined.append(part)
    return "/".join(joined)


def command_contexts() -> Iterator[click.Context]:
    """Yield the context of every command of the package once."""
    from cometmq.admin.commands import mqadmin
    from cometmq.cli.app import cometmq
    from cometmq.cli.running import mqshutdown
    from cometmq.cli.servers import mqbroker, mqnamesrv

    described: set[int] = set()  # `cometmq mqadmin` is `mqadmin`
    for command in (mqnamesrv, mqbroker, mqadmin, mqshutdown, cometmq):
        assert command.name is not None
        for context in _contexts(click.Context(command, info_name=command.name, max_content_width=100)):
            if id(context.command) not in described:
                described.add(id(context.command))
                yield context


def _command_pages() -> Iterator[tuple[str, str]]:
    """Yield a page for each command, and a page that lists all commands."""
    lines = ["# Commands\n"]
    for context in command_contexts():
        path = context.command_path
        page = f"{path.replace(' ', '-')}.md"
        summary = context.command.get_short_help_str(120)
        lines.append(f"{'    ' * path.count(' ')}- [{path}]({page}): {summary}")
        yield f"commands/{page}", f"# {path}\n\n```text\n{context.get_help()}\n```\n"
    yield "commands/index.md", "\n".join(lines) + "\n"


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and of all its subcommands."""
    yield context
    if not isinstance(context.command, click.Group):
        return
    for name in context.command.list_commands(context):
        below = context.command.get_command(context, name)
        if below is not None and not below.hidden:
            yield from _contexts(click.Context(below, context, name, max_content_width=100))


def _api_pages() -> Iterator[tuple[str, str]]:
    """Yield the pages that document the public names.

    Raises:
        PluginError: A public name has no page.
    """
    for package, pages in API.items():
        module = importlib.import_module(package)
        public = set(module.__all__)
        for title, names in pages.items():
            listed = names if names is not None else sorted(public)
            public -= set(listed)
            text = [f"# {title}\n"]
            for name in listed:
                value = getattr(module, name)
                if hasattr(value, "__signature__"):
                    text.append(_made_function(f"{package}.{name}", value))
                    continue
                home = getattr(value, "__module__", "")  # of a type alias: that of its type
                path = f"{home}.{value.__qualname__}" if home.startswith("cometmq") else f"{package}.{name}"
                text.append(
                    f"::: {path}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}\n"
                )
            yield f"api/{_page_name(title)}.md", "\n".join(text)
        if public:
            raise PluginError(f"docs_site.API: no page names {', '.join(sorted(public))} of {package}")


def _made_function(name: str, value: Callable[..., object]) -> str:
    """Return the documentation of a job, whose signature and docstring are not in its source."""
    lines = [f"## {name}\n", f"```python\n{value.__name__}(", *_parameters(value), ")\n```\n"]
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if re.fullmatch("(Args|Returns|Raises):", line):
            line = f"**{line}**\n"
        elif found := re.fullmatch(r" {4}(\w+): (.*)", line):
            line = f"- `{found[1]}`: {found[2]}"
        lines.append(f"  {line.strip()}" if line.startswith(" " * 8) else line.strip())
    return "\n".join(lines) + "\n"


def _parameters(value: Callable[..., object]) -> Iterator[str]:
    star = False
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            star = True
            yield "    *,"
        yield f"    {each},"


def _page_name(title: str) -> str:
    """Return the file name of a page without its suffix."""
    return re.sub(r"\W+", "-", title).lower()
