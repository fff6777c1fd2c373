"""Contexts: named clusters with name servers, account and TLS settings, in a private file of the user.

Commands without name servers use the context in COMETMQ_CONTEXT or, without this variable, the context that
`cometmq context use` has chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cometmq.errors import ConfigError
from cometmq.private import lock_file, make_private_directory, replace_private
from cometmq.text import did_you_mean

CONTEXT_ENV = "COMETMQ_CONTEXT"
MAX_BYTES = 1 << 20


class Context(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The connection settings of a cluster. Their values are those of the environment variables."""

    namesrv: str
    access_key: str = ""
    secret_key: str = ""
    tls: str = ""

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which clients read the account and the TLS settings."""
        pairs = {
            "COMETMQ_ACCESS_KEY": self.access_key,
            "COMETMQ_SECRET_KEY": self.secret_key,
            "COMETMQ_TLS": self.tls,
        }
        return {name: value for name, value in pairs.items() if value}

    def conflicting(self) -> set[str]:
        """Return the variables that must not be set, such as a token that belongs to another account."""
        return self.variables().keys() | ({"COMETMQ_SECURITY_TOKEN"} if self.access_key else set())


class Contexts(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file. `current` is the name of the chosen context, or ""."""

    current: str = ""
    contexts: dict[str, Context] = {}

    def named(self, name: str) -> Context:
        """Return the context with a name. Raises ConfigError."""
        if name not in self.contexts:
            raise ConfigError(
                "context", name, f"one of cometmq context list.{did_you_mean(name, self.contexts)}"
            )
        return self.contexts[name]

    def save(self) -> None:
        """Write the file, or the target of a link, durably and with mode 0600. Raises OSError."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=2)
        replace_private(os.path.realpath(path()), content + b"\n")


def path() -> Path:
    """Return the path of the file: `cometmq/contexts.json` below XDG_CONFIG_HOME, or ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "cometmq", "contexts.json")


def load() -> Contexts:
    """Return the content of the file, or empty contexts without a file. Raises ConfigError."""
    where = path()
    try:
        with where.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):  # a service may have /dev/null as its home
        return Contexts()
    except OSError as error:
        raise ConfigError("contexts", str(where), f"a file that can be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError("contexts", str(where), f"at most {MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=Contexts)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError("contexts", str(where), f"JSON as `cometmq context` writes it: {error}") from None


@contextmanager
def changing() -> Iterator[Contexts]:
    """Yield the content of the file, and save it after the block. Raises ConfigError or OSError."""
    where = str(path())
    make_private_directory(os.path.dirname(where))
    try:
        unlock = lock_file(f"{where}.lock")
    except BlockingIOError:
        raise ConfigError("contexts", where, "a file that no other command is changing") from None
    try:
        contexts = load()
        yield contexts
        contexts.save()
    finally:
        unlock()


def chosen() -> Context | None:
    """Return the context that commands use, or None. Raises ConfigError."""
    contexts = load()
    name = os.environ.get(CONTEXT_ENV) or contexts.current
    return contexts.named(name) if name else None
