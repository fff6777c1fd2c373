"""Key-value configuration by namespace, and its file in Apache's form (kvConfig.json)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

import msgspec

from cometmq.errors import BodyError, CometError
from cometmq.private import make_private_directory, open_private
from cometmq.protocol.lenient import loads

# Bounds of what requests may put. A namespace has to fit into an answer (ORDER_TOPIC_CONFIG's goes out with
# each registration), and every change writes the whole file.
NAME_MAX = 255  # characters of a namespace or key
NAMESPACE_MAX = 1 << 20  # bytes of a namespace's keys and values: 20,000 ordered topics
NAMESPACES_MAX = 256


class KvRefused(CometError):
    """A pair that is not kept; `field` says which part of it is wrong."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class KvTables:
    """namespace -> key -> value. `generation` counts changes, so that a writer knows whether it is behind."""

    __slots__ = ("_sizes", "_tables", "generation")

    def __init__(self, tables: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._tables = {name: dict(pairs) for name, pairs in (tables or {}).items()}
        self._sizes = {
            name: sum(_size(key, value) for key, value in pairs.items())
            for name, pairs in self._tables.items()
        }
        self.generation = 0

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises KvRefused."""
        for field, name in (("namespace", namespace), ("key", key)):
            if not name or len(name) > NAME_MAX or not name.isprintable():
                raise KvRefused(field, f"1 to {NAME_MAX} printable characters are wanted")
        pairs = self._tables.get(namespace, {})
        if not pairs and len(self._tables) >= NAMESPACES_MAX and namespace not in self._tables:
            raise KvRefused("namespace", f"there are {NAMESPACES_MAX} of them, and no more are kept")
        size = self._sizes.get(namespace, 0) + _size(key, value)
        if key in pairs:
            size -= _size(key, pairs[key])
        if size > NAMESPACE_MAX:
            problem = f"its namespace would have {size} bytes, at most {NAMESPACE_MAX} are kept"
            raise KvRefused("value", problem)
        self._tables.setdefault(namespace, {})[key] = value
        self._sizes[namespace] = size
        self.generation += 1

    def get(self, namespace: str, key: str) -> str | None:
        """A value, None if there is none."""
        return self._tables.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value. A namespace that had one stays known, as Apache's does."""
        value = self._tables.get(namespace, {}).pop(key, None)
        if value is not None:
            self._sizes[namespace] -= _size(key, value)
            self.generation += 1

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All values of a namespace, None if it is not known."""
        pairs = self._tables.get(namespace)
        return None if pairs is None else dict(pairs)

    def fits(self, namespace: str) -> bool:
        """Whether a namespace may go out with other answers; a file made elsewhere can hold a longer one."""
        return self._sizes.get(namespace, 0) <= NAMESPACE_MAX

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


def _size(key: str, value: str) -> int:
    """What a pair counts, in bytes of UTF-8."""
    return len(key.encode("utf-8", "replace")) + len(value.encode("utf-8", "replace"))


class KvFile:
    """The file of the tables."""

    def __init__(self, path: str, tables: KvTables) -> None:
        self.tables = tables
        self._path = path
        self._written = tables.generation
        self._lock = asyncio.Lock()

    async def save(self) -> None:
        """Write the tables if they have changed since they were written. Raises OSError."""
        # One writer at a time, and each writes what holds when its turn comes: an older state never wins.
        async with self._lock:
            generation = self.tables.generation
            if generation != self._written:
                await asyncio.to_thread(write_file, self._path, self.tables.to_json())
                self._written = generation


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
    make_private_directory(directory)
    temporary = path + ".tmp"
    with open_private(temporary, in_place_of=path) as file:
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
