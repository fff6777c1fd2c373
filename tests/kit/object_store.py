"""An object store in memory, with planned failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from cometmq.store import ObjectStoreFailed


class MemoryObjects:
    """An `ObjectStore` in memory.

    Attributes:
        objects: The content by name. Tests may change it.
        calls: Each operation so far, with the name of its object.
        before: Called before each operation, with operation and name. It may raise an exception or block.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda _operation, _name: None
        self._lock = threading.Lock()

    def _begin(self, operation: str, name: str) -> None:
        with self._lock:
            self.calls.append((operation, name))
        self.before(operation, name)

    def fail(self, *operations: str, ending: str = "") -> None:
        """From now on, let operations fail, by default all, on objects with this ending."""

        def refuse(operation: str, name: str) -> None:
            if (not operations or operation in operations) and name.endswith(ending):
                raise ObjectStoreFailed(f"planned failure of {operation}")

        self.before = refuse

    def heal(self) -> None:
        self.before = lambda _operation, _name: None

    def put(self, name: str, content: bytes | Iterator[bytes]) -> None:
        self._begin("put", name)
        self.objects[name] = content if isinstance(content, bytes) else b"".join(content)

    def get(self, name: str, start: int, length: int) -> bytes:
        self._begin("get", name)
        if name not in self.objects:
            raise ObjectStoreFailed(f"{name} does not exist")
        return self.objects[name][start : start + length]

    def size(self, name: str) -> int | None:
        self._begin("size", name)
        found = self.objects.get(name)
        return None if found is None else len(found)

    def names(self, prefix: str) -> list[str]:
        self._begin("names", prefix)
        return [name for name in self.objects if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        self._begin("delete", name)
        self.objects.pop(name, None)

    def endings(self) -> dict[int, str]:
        """Return the endings of the objects of each segment, sorted and joined, by first log position."""
        found: dict[int, list[str]] = {}
        for name in self.objects:
            stem, _, ending = name.rpartition("/")[2].partition(".")
            found.setdefault(int(stem), []).append(ending)
        return {base: " ".join(sorted(endings)) for base, endings in sorted(found.items())}
