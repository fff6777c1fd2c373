"""Consumer offsets in a local file in the format of Apache's client.

The offsets of a BROADCASTING consumer are stored where Java stores them:

    <dir>/<client id>/<group>/offsets.json

The group and the topics in the file include their namespace. Only one consumer at a time can use a file. The
consumer holds the lock of `offsets.json.lock` from the first use to its stop, because two consumers of the
same file would continue at each other's offsets and skip messages.

The keys of the offset table are objects, so the file is not standard JSON. A new version is written to a
temporary file, which then replaces the main file. The previous version becomes `offsets.json.bak`, which is
read if the main file is missing or damaged.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from cometmq import logs
from cometmq.client.cluster.namespaces import Namespace
from cometmq.errors import CometError
from cometmq.message import MessageQueue
from cometmq.private import lock_file, make_private_directory, open_private
from cometmq.protocol.lenient import LenientError, ObjectKey, read_lenient

log = logs.logger("cometmq.client.consumer")

T = TypeVar("T")

_NO_NAMESPACE = Namespace()


class OffsetFileError(CometError):
    """The offsets file and its backup cannot be read or written, or another consumer is using them."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def local_path(directory: str | None, client_id: str, group: str) -> str:
    """Return the path of the offsets file of a broadcasting consumer."""
    base = directory if directory is not None else os.path.join(os.path.expanduser("~"), ".rocketmq_offsets")
    return os.path.join(base, client_id, group, "offsets.json")


class FileOffsets:
    """An OffsetStorage that keeps the offsets of one consumer in a local file.

    No other consumer of this or another process can use the file until this consumer has stopped.

    Args:
        path: The path of the file. Missing directories are created.
    """

    def __init__(self, path: str, namespace: Namespace = _NO_NAMESPACE) -> None:
        self.path = path
        self._namespace = namespace
        self._table: dict[MessageQueue, int] | None = None
        self._unlock: Callable[[], object] | None = None
        self._turn = asyncio.Lock()
        self._disk = threading.Lock()

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the offset of a queue, or None if the file has none. Raises OffsetFileError."""
        return (await self._loaded()).get(self._namespace.wrap_queue(queue))

    async def write(self, table: Mapping[MessageQueue, int]) -> None:
        """Store offsets. Queues of the file that are not in `table` are kept. Raises OffsetFileError."""
        known = await self._loaded()
        known.update({self._namespace.wrap_queue(queue): offset for queue, offset in table.items()})
        try:
            await self._in_thread(lambda: self._save(render_offsets(known)))
        except OSError as error:
            raise OffsetFileError(self.path, error.strerror or str(error)) from error

    def close(self) -> None:
        """Release the file for other consumers. A later read or write opens it again."""
        if self._unlock is not None:
            self._unlock()
        self._table = self._unlock = None
        # Create a new lock, because the file may be opened again in another event loop.
        self._turn = asyncio.Lock()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread, one call at a time.

        Raises OffsetFileError if an earlier call still hangs in a disk operation. Its thread cannot be
        cancelled, and the number of threads is limited, so a second one must not hang for the same file.
        """
        async with self._turn:
            if self._disk.locked():
                raise OffsetFileError(self.path, "the previous disk operation has not finished yet")
            return await asyncio.to_thread(self._alone, work)

    def _alone(self, work: Callable[[], T]) -> T:
        with self._disk:
            return work()

    async def _loaded(self) -> dict[MessageQueue, int]:
        return await self._in_thread(self._load) if self._table is None else self._table

    def _load(self) -> dict[MessageQueue, int]:
        if self._unlock is None:
            self._lock()
        if self._table is None:
            self._table = self._read()
        return self._table

    def _read(self) -> dict[MessageQueue, int]:
        problems: list[str] = []
        for path in (self.path, self.path + ".bak"):
            try:
                with open(path, "rb") as file:
                    data = file.read()
                if data.strip():
                    return parse_offsets(data)
                problems.append(f"{path} is empty")
            except FileNotFoundError:
                continue
            except (OSError, LenientError, ValueError) as error:
                problems.append(f"{path}: {error}")
        if problems:
            # A start without offsets would skip or repeat all messages, so the user must decide whether to
            # remove the file.
            raise OffsetFileError(
                self.path, "; ".join(problems) + "; remove the file to start without offsets"
            )
        return {}

    def _lock(self) -> None:
        unlock: Callable[[], None] = _nothing
        try:
            make_private_directory(os.path.dirname(os.path.abspath(self.path)))
            unlock = lock_file(self.path + ".lock")
        except BlockingIOError:
            expected = "give each consumer of a machine its own ClientOptions.instance_name or file"
            raise OffsetFileError(self.path, f"another consumer uses this file; {expected}") from None
        except OSError as error:
            log.warning("%s cannot be locked, so other consumers may use the same file: %s", self.path, error)
        self._unlock = weakref.finalize(self, unlock)

    def _save(self, text: str) -> None:
        make_private_directory(os.path.dirname(self.path))
        temporary = self.path + ".tmp"
        with open_private(temporary, in_place_of=self.path) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(self.path):
            os.replace(self.path, self.path + ".bak")
        os.replace(temporary, self.path)


def _nothing() -> None: ...


def parse_offsets(data: bytes | str) -> dict[MessageQueue, int]:
    """Return the offset of each queue in an offsets file. Raises LenientError or ValueError.

    The keys of the file's table are queues: JSON objects without quotation marks in the files of Java's
    client, which standard JSON does not permit, or strings with the text of such an object.
    """
    value = read_lenient(data)
    if not isinstance(value, dict) or not isinstance(value.get("offsetTable", {}), dict):
        raise ValueError("the file contains no offsetTable")
    table: dict[MessageQueue, int] = {}
    for key, offset in (value.get("offsetTable") or {}).items():
        fields = key.as_dict() if isinstance(key, ObjectKey) else read_lenient(key)
        if not isinstance(fields, dict):
            raise ValueError(f"{key!r} is no queue")
        try:
            queue = MessageQueue(str(fields["topic"]), str(fields["brokerName"]), int(fields["queueId"]))
            # Some versions of Apache's client write an offset as a number, other versions as {"value": n}.
            table[queue] = int(offset["value"] if isinstance(offset, dict) else offset)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{key!r}: {error!r}") from None
    return table


def render_offsets(table: dict[MessageQueue, int]) -> str:
    """Return offsets in fastjson's pretty format, where each key is a JSON object on several lines."""
    entries = [
        "{\n"
        f'\t\t\t"brokerName":{json.dumps(queue.broker_name)},\n'
        f'\t\t\t"queueId":{queue.queue_id},\n'
        f'\t\t\t"topic":{json.dumps(queue.topic)}\n'
        f"\t\t}}:{offset}"
        for queue, offset in table.items()
    ]
    return '{\n\t"offsetTable":{' + ",".join(entries) + "\n\t}\n}"
