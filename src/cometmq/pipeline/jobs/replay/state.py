"""The state directory of a replay: its arguments and its progress.

    state/replay.json                  the id, the arguments, the queues of the target topics
    state/owner                        the run that may send now; its tasks check it before each batch
    state/progress/<run>-<task>.json   the last acknowledged message of each source queue
    state/positions.json               exists once the groups' offsets have been set (only done once)
    state/bad/*.parquet                messages that could not be sent, with the reason

If two runs begin at the same time, only one of them creates replay.json. Every file is replaced as a whole,
so after a kill a file has either its old or its new content. A later run needs all of these files except
those in state/bad.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import uuid
from collections.abc import Iterable
from typing import TypedDict, TypeVar

import msgspec
from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplayError
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import conditional_put, joined, shown, without_user
from cometmq.pipeline.table.small_files import create_file, read_file, replace_file

FORMAT = 1
_ID = re.compile("[0-9a-f]{32}")
T = TypeVar("T")


class _Positions(TypedDict):
    positions: int


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The arguments that must not change when a replay is continued.

    Attributes:
        source: The source without keys, secrets and options.
        source_hash: SHA-256 of the source's URI with its options, such as the endpoint. "" for a path.
    """

    source: str
    source_hash: str = ""
    topics: list[str] = []
    pattern: str | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    into: str
    mapping: dict[str, str] = {}
    order: str


class Replay(msgspec.Struct):
    """A replay of one or more runs. Messages keep their order while the `queues` of the targets stay."""

    id: str
    asked: Asked
    queues: dict[str, list[MessageQueue]] = {}
    format: int = FORMAT


class Sent(msgspec.Struct):
    """The progress in a source queue: the last finished message, and the number of all rows read."""

    queue: MessageQueue
    offset: int = -1
    physical_offset: int = -1
    rows: int = 0


class Progress(msgspec.Struct):
    """The progress of a task.

    Attributes:
        bad: Messages that could not be sent.
        own: Messages that this replay itself had sent to the source.
        doubled: Rows that repeat a record.
    """

    queues: list[Sent] = []
    messages: int = 0
    bytes: int = 0
    bad: int = 0
    own: int = 0
    doubled: int = 0

    @property
    def rows(self) -> int:
        """Number of rows of the source that the task has read."""
        return sum(sent.rows for sent in self.queues)


class ReplayState:
    """A state directory: a path, or a URI that pyarrow supports and all machines can reach."""

    def __init__(self, path: str) -> None:
        self._filesystem, self._root = open_filesystem(path)
        # A local path is stored as an absolute path, because workers may have another working directory.
        self.path = path if "://" in path else self._root
        self.shown = shown(self.path)
        self.bad_path = joined(self.path, "bad")

    def replay(self) -> Replay | None:
        """Return the replay stored in this directory, or None if the directory is empty or missing."""
        found = self._read("replay.json")
        if found is None:
            if any(not info.base_name.startswith(("_", ".")) for info in self._list()):
                raise self._error("the directory contains files, but is not the state directory of a replay")
            return None
        replay = self._decoded("replay.json", found, Replay)
        if replay.format != FORMAT:
            raise self._error(
                f"the directory contains a replay of format {replay.format}, but {FORMAT} is supported"
            )
        if not _ID.fullmatch(replay.id) or not replay.queues or not all(replay.queues.values()):
            raise self._error("replay.json is invalid: it has no id, or a target topic without queues")
        return replay

    def begin(self, asked: Asked) -> Replay:
        """Return the replay to continue, or a new replay, which is not written yet.

        If the arguments have no times, the times of the first run apply. Raises ReplayError if the directory
        belongs to another replay.
        """
        replay = self.replay()
        asked = _kept(asked)
        if replay is None:
            return Replay(uuid.uuid4().hex, asked)
        if asked.begin_ms is None and asked.end_ms is None:
            asked = msgspec.structs.replace(asked, begin_ms=replay.asked.begin_ms, end_ms=replay.asked.end_ms)
        # State files of older versions may hold the source with secrets, or lack its hash, so convert them.
        old, hash_ = _kept(replay.asked), replay.asked.source_hash
        if hash_ or old.source == replay.asked.source:
            old = msgspec.structs.replace(old, source_hash=hash_ or asked.source_hash)
        replay.asked = old
        kept, given = msgspec.to_builtins(replay.asked), msgspec.to_builtins(asked)
        if kept != given:
            names = sorted(name for name in kept | given if kept.get(name) != given.get(name))
            if names == ["source_hash"]:
                raise self._error(
                    f"the directory contains a replay of source {asked.source} with other options"
                )
            was = ", ".join(f"{name} {kept.get(name)}" for name in names if name != "source_hash")
            raise self._error(
                f"the directory contains a replay with {was}; continue it, or choose another directory"
            )
        return replay

    def start(self, replay: Replay, run: str, *, begun: bool) -> None:
        """Make this run the owner, unless it is one (`begun`). Raises ReplayError if another was first."""
        content = msgspec.json.encode(replay)
        if begun:
            if not self.owned_by(run):
                raise self._error("another run has taken over the replay")
            self._write("replay.json", content)
        elif not (self._create("replay.json", content) and self._create("owner", run.encode())):
            raise self._error("another run uses this directory, too; run again to continue its replay")

    def positions_set(self) -> int | None:
        """Return the number of groups' offsets that an earlier run set; None if no run has set any."""
        found = self._read("positions.json")
        return None if found is None else self._decoded("positions.json", found, _Positions)["positions"]

    def save_positions(self, positions: int) -> None:
        self._write("positions.json", msgspec.json.encode({"positions": positions}))

    def take_over(self, run: str) -> None:
        """Make this run the only one that may send. If `run` is "", no run may send."""
        self._write("owner", run.encode())

    def owned_by(self, run: str) -> bool:
        return self._read("owner") == run.encode()

    def save(self, run: str, task: int, progress: Progress) -> None:
        self._write(f"progress/{run}-{task}.json", msgspec.json.encode(progress))

    def saved(self, run: str, task: int) -> Progress:
        """Return the progress of earlier attempts of a task in the same run, which may be empty."""
        return self._progress(f"progress/{run}-{task}.json")

    def all_saved(self, run: str = "") -> list[Progress]:
        """Return the progress of all tasks of the given run, or of all runs if `run` is ""."""
        names = (info.base_name for info in self._list("progress"))
        wanted = sorted(name for name in names if name.startswith(run) and name.endswith(".json"))
        return [self._progress(f"progress/{name}") for name in wanted]

    def _progress(self, name: str) -> Progress:
        found = self._read(name)
        return Progress() if found is None else self._decoded(name, found, Progress)

    def _decoded(self, name: str, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._error(f"{name} cannot be read ({error})") from None

    def _error(self, problem: str) -> ReplayError:
        return ReplayError(self.shown, problem)

    def _list(self, *parts: str) -> list[fs.FileInfo]:
        place = posixpath.join(self._root, *parts)
        try:
            found: list[fs.FileInfo] = self._filesystem.get_file_info(
                fs.FileSelector(place, allow_not_found=True)
            )
        except OSError as error:
            raise self._error(f"the directory cannot be listed ({error})") from None
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            return read_file(self._filesystem, posixpath.join(self._root, name))
        except OSError as error:
            raise self._error(f"{name} cannot be read ({error})") from None

    def _create(self, name: str, content: bytes) -> bool:
        """Create a file with its complete content. Return whether this run created it."""
        try:
            put = conditional_put(self.path, self._filesystem)
        except ConfigError as error:
            raise ConfigError("state", error.value, error.expected) from None
        try:
            if put is None:
                self._filesystem.create_dir(self._root, recursive=True)
            return create_file(self._filesystem, posixpath.join(self._root, name), content, put)
        except OSError as error:
            raise self._error(f"{name} cannot be written ({error})") from None

    def _write(self, name: str, content: bytes) -> None:
        path = posixpath.join(self._root, name)
        try:
            replace_file(self._filesystem, path, content)
        except OSError as error:
            raise self._error(f"{name} cannot be written ({error})") from None


def _kept(asked: Asked) -> Asked:
    """Return the arguments in their stored form: the source without secrets, and a hash of the source."""
    hash_ = hashlib.sha256(without_user(asked.source).encode()).hexdigest() if "://" in asked.source else ""
    return msgspec.structs.replace(asked, source=shown(asked.source), source_hash=hash_)


def reached(saved: Iterable[Progress]) -> dict[MessageQueue, Sent]:
    """Return the furthest saved progress of each source queue."""
    found: dict[MessageQueue, Sent] = {}
    for progress in saved:
        for sent in progress.queues:
            if sent.queue not in found or sent.offset > found[sent.queue].offset:
                found[sent.queue] = sent
    return found
