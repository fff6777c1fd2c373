"""The state directory of a replay: what it was asked for, and how far it is.

    state/replay.json                  the id, what was asked for, the queues of the target topics
    state/owner                        the run that may send now; its tasks look before each batch
    state/progress/<run>-<task>.json   up to where a task has sent each source queue, all acknowledged
    state/bad/*.parquet                messages that could not be sent, with the reason

Every file is replaced as a whole, so a killed run leaves the old or the new one. The first three names are
all that a later run needs to go on.
"""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Iterable

import msgspec
from pyarrow import fs

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplayError
from cometmq.pipeline.table.directory import open_filesystem, sync_local

FORMAT = 1


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must stay the same for a replay to go on."""

    source: str
    topics: list[str] = []
    pattern: str | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    into: str
    mapping: dict[str, str] = {}
    order: str


class Replay(msgspec.Struct):
    """One replay, over all its runs. queues: of the target topics when it began; order needs them to stay."""

    id: str
    asked: Asked
    queues: dict[str, list[MessageQueue]] = {}
    format: int = FORMAT


class Sent(msgspec.Struct):
    """A source queue: the last message that was sent and acknowledged, and how many were in one task."""

    queue: MessageQueue
    offset: int = -1
    physical_offset: int = -1
    messages: int = 0


class Progress(msgspec.Struct):
    """What a task has done. bad: messages that could not be sent; doubled: rows that were the same record."""

    queues: list[Sent] = []
    messages: int = 0
    bytes: int = 0
    bad: int = 0
    doubled: int = 0


class ReplayState:
    """A state directory: a path, or a URI that pyarrow knows and all machines reach."""

    def __init__(self, path: str) -> None:
        self._filesystem, self._root = open_filesystem(path)
        # Workers may have another working directory.
        self.path = path if "://" in path else self._root
        self.bad_path = f"{self.path.rstrip('/')}/bad"

    def replay(self) -> Replay | None:
        """The replay of this directory, None for an empty or missing one."""
        found = self._read("replay.json")
        if found is None:
            if any(not info.base_name.startswith(("_", ".")) for info in self._list()):
                raise ReplayError(self.path, "holds files, and is not the state directory of a replay")
            return None
        try:
            replay = msgspec.json.decode(found, type=Replay)
        except msgspec.MsgspecError as error:
            raise ReplayError(self.path, f"replay.json cannot be read ({error})") from None
        if replay.format != FORMAT:
            raise ReplayError(self.path, f"a replay of format {replay.format}; this is format {FORMAT}")
        return replay

    def begin(self, asked: Asked) -> Replay:
        """The replay to go on with, or a new one, which is not written yet. Raises ReplayError for a
        directory of another replay. Without times the ones that it began with are meant."""
        replay = self.replay()
        if replay is None:
            return Replay(uuid.uuid4().hex, asked)
        if asked.begin_ms is None and asked.end_ms is None:
            asked = msgspec.structs.replace(asked, begin_ms=replay.asked.begin_ms, end_ms=replay.asked.end_ms)
        kept, given = msgspec.to_builtins(replay.asked), msgspec.to_builtins(asked)
        if kept != given:
            names = sorted(name for name in kept | given if kept.get(name) != given.get(name))
            was = ", ".join(f"{name} {kept.get(name)}" for name in names)
            raise ReplayError(
                self.path, f"the replay in it has {was}; go on with that, or take another directory"
            )
        return replay

    def write(self, replay: Replay) -> None:
        self._write("replay.json", msgspec.json.encode(replay))

    def take_over(self, run: str) -> None:
        """Let this run send, and none of before; "" lets none."""
        self._write("owner", run.encode())

    def owned_by(self, run: str) -> bool:
        return self._read("owner") == run.encode()

    def save(self, run: str, task: int, progress: Progress) -> None:
        self._write(f"progress/{run}-{task}.json", msgspec.json.encode(progress))

    def saved(self, run: str, task: int) -> Progress:
        """Of this task when it ran before, in the same run: its worker has died."""
        return self._progress(f"progress/{run}-{task}.json")

    def all_saved(self, run: str = "") -> list[Progress]:
        """Of all tasks, or of those of a run."""
        names = (info.base_name for info in self._list("progress"))
        wanted = sorted(name for name in names if name.startswith(run) and name.endswith(".json"))
        return [self._progress(f"progress/{name}") for name in wanted]

    def _progress(self, name: str) -> Progress:
        try:
            return msgspec.json.decode(self._read(name) or b"{}", type=Progress)
        except msgspec.MsgspecError as error:
            raise ReplayError(self.path, f"{name} cannot be read ({error})") from None

    def _list(self, *parts: str) -> list[fs.FileInfo]:
        place = posixpath.join(self._root, *parts)
        found: list[fs.FileInfo] = self._filesystem.get_file_info(
            fs.FileSelector(place, allow_not_found=True)
        )
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            with self._filesystem.open_input_stream(posixpath.join(self._root, name)) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content

    def _write(self, name: str, content: bytes) -> None:
        path = posixpath.join(self._root, name)
        self._filesystem.create_dir(posixpath.dirname(path), recursive=True)
        if not isinstance(self._filesystem, fs.LocalFileSystem):
            with self._filesystem.open_output_stream(path) as stream:  # object stores replace on close
                stream.write(content)
            return
        hidden = posixpath.join(posixpath.dirname(path), f"_{uuid.uuid4().hex[:12]}.tmp")
        with open(hidden, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
        sync_local(posixpath.dirname(path))


def reached(saved: Iterable[Progress]) -> dict[MessageQueue, int]:
    """Up to which offset each source queue was sent."""
    found: dict[MessageQueue, int] = {}
    for progress in saved:
        for sent in progress.queues:
            found[sent.queue] = max(sent.offset, found.get(sent.queue, -1))
    return found
