"""The name server's key-value pairs by namespace, and their file kvConfig.json in Apache's format."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

import msgspec

from cometmq.errors import BodyError, CommandError
from cometmq.private import make_private_directory, open_private, sync_path
from cometmq.protocol.lenient import loads

# Limits for namespaces, keys and values from requests. The namespace ORDER_TOPIC_CONFIG is part of each
# registration response, so a namespace must fit into one response. Every change rewrites the whole file, so
# the file must stay small.
MAX_NAME_CHARACTERS = 255  # maximum length of a namespace or a key
MAX_NAMESPACE_BYTES = 1 << 20  # maximum bytes of a namespace's pairs; enough for 20,000 ordered topics
MAX_NAMESPACES = 256


class KvTables:
    """The key-value pairs of all namespaces. `generation` counts changes, so that KvFile can detect them."""

    __slots__ = ("_sizes", "_tables", "generation")

    def __init__(self, tables: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._tables = {name: dict(pairs) for name, pairs in (tables or {}).items()}
        self._sizes = {
            name: sum(_size(key, value) for key, value in pairs.items())
            for name, pairs in self._tables.items()
        }
        self.generation = 0

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set the value of a key in a namespace. Raises CommandError, which names the invalid part."""
        for field, name in (("namespace", namespace), ("key", key)):
            if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
                raise _refused(field, f"1 to {MAX_NAME_CHARACTERS} printable characters are expected")
        pairs = self._tables.get(namespace, {})
        if not pairs and len(self._tables) >= MAX_NAMESPACES and namespace not in self._tables:
            raise _refused("namespace", f"the limit of {MAX_NAMESPACES} namespaces is reached")
        size = self._sizes.get(namespace, 0) + _size(key, value)
        if key in pairs:
            size -= _size(key, pairs[key])
        if size > MAX_NAMESPACE_BYTES:
            problem = f"its namespace would have {size} bytes, at most {MAX_NAMESPACE_BYTES} are kept"
            raise _refused("value", problem)
        self._tables.setdefault(namespace, {})[key] = value
        self._sizes[namespace] = size
        self.generation += 1

    def get(self, namespace: str, key: str) -> str | None:
        """Return the value of a key in a namespace, or None if the key does not exist."""
        return self._tables.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Remove a key. An empty namespace continues to exist, as in Apache's name server."""
        value = self._tables.get(namespace, {}).pop(key, None)
        if value is not None:
            self._sizes[namespace] -= _size(key, value)
            self.generation += 1

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """Return all key-value pairs of a namespace, or None for an unknown namespace."""
        pairs = self._tables.get(namespace)
        return None if pairs is None else dict(pairs)

    def fits(self, namespace: str) -> bool:
        """Return whether the pairs of a namespace fit into one response. Those of a file may be too long."""
        return self._sizes.get(namespace, 0) <= MAX_NAMESPACE_BYTES

    def to_json(self) -> bytes:
        """Return the content of kvConfig.json."""
        return msgspec.json.encode({"configTable": self._tables})

    @classmethod
    def from_json(cls, text: bytes) -> KvTables:
        """Parse the content of kvConfig.json: standard JSON or fastjson's dialect. Raises BodyError."""
        content = loads(text)
        tables = content.get("configTable") if isinstance(content, dict) else None
        if tables is None:
            tables = {}
        try:
            return cls(msgspec.convert(tables, dict[str, dict[str, str]], strict=False))
        except msgspec.ValidationError as error:
            raise BodyError("kvConfig.json", str(error)) from error


def _refused(field: str, problem: str) -> CommandError:
    return CommandError.failed(f"{field}: {problem}")


def _size(key: str, value: str) -> int:
    """Return the size of a key and its value, in bytes of UTF-8."""
    return len(key.encode("utf-8", "replace")) + len(value.encode("utf-8", "replace"))


class KvFile:
    """The file that holds the key-value tables."""

    def __init__(self, path: str, tables: KvTables) -> None:
        self.tables = tables
        self._path = path
        self._written = tables.generation
        self._lock = asyncio.Lock()

    async def save(self) -> None:
        """Write the tables if they have changed since the last write. Raises OSError."""
        # The lock admits one writer at a time, and each writer writes the current state. So an older state
        # never replaces a newer one.
        async with self._lock:
            generation = self.tables.generation
            if generation != self._written:
                await asyncio.to_thread(write_file, self._path, self.tables.to_json())
                self._written = generation


def read_file(path: str) -> bytes | None:
    """Return the content of a configuration file or, if it is missing or empty, of its backup, or None."""
    for name in (path, path + ".bak"):
        with contextlib.suppress(FileNotFoundError), open(name, "rb") as file:
            content = file.read()
            if content.strip():
                return content
    return None


def write_file(path: str, content: bytes) -> None:
    """Replace a configuration file atomically. Keep its old content as <path>.bak. Raises OSError."""
    directory = os.path.dirname(os.path.abspath(path))
    make_private_directory(directory)
    temporary = path + ".tmp"
    with open_private(temporary, in_place_of=path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if os.path.exists(path):
        # The backup is a hard link, so `path` exists at every moment until the rename.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".bak")
        os.link(path, path + ".bak")
    os.replace(temporary, path)
    sync_path(directory)
