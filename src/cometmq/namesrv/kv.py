"""Key-value configuration by namespace, and its file in Apache's form (kvConfig.json)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import msgspec

from cometmq.errors import BodyError
from cometmq.protocol.lenient import loads


class KvTables:
    """namespace -> key -> value. `generation` counts changes, so that a writer knows whether it is behind."""

    __slots__ = ("_tables", "generation")

    def __init__(self, tables: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._tables: dict[str, dict[str, str]] = {
            name: dict(pairs) for name, pairs in (tables or {}).items()
        }
        self.generation = 0

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value."""
        self._tables.setdefault(namespace, {})[key] = value
        self.generation += 1

    def get(self, namespace: str, key: str) -> str | None:
        """A value, None if there is none."""
        return self._tables.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value. A namespace that had one stays known, as Apache's does."""
        if self._tables.get(namespace, {}).pop(key, None) is not None:
            self.generation += 1

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All values of a namespace, None if it is not known."""
        pairs = self._tables.get(namespace)
        return None if pairs is None else dict(pairs)

    def to_json(self) -> bytes:
        """The content of kvConfig.json."""
        return msgspec.json.encode({"configTable": self._tables})

    @classmethod
    def from_json(cls, text: bytes) -> KvTables:
        """Read a kvConfig.json, fastjson's dialect included. Raises BodyError if it is something else."""
        content = loads(text)
        tables = content.get("configTable") if isinstance(content, dict) else None
        if tables is None:
            tables = {}
        try:
            return cls(msgspec.convert(tables, dict[str, dict[str, str]], strict=False))
        except msgspec.ValidationError as error:
            raise BodyError("kvConfig.json", str(error)) from error


def read_file(path: str) -> bytes | None:
    """The content of a configuration file, or of its backup if it is missing or empty; else None."""
    for name in (path, path + ".bak"):
        with contextlib.suppress(FileNotFoundError), open(name, "rb") as file:
            content = file.read()
            if content.strip():
                return content
    return None


def write_file(path: str, content: bytes) -> None:
    """Replace a configuration file in one step; what it held goes to <path>.bak. Raises OSError."""
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if os.path.exists(path):
        # A link keeps `path` itself in place until the rename.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".bak")
        os.link(path, path + ".bak")
    os.replace(temporary, path)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
