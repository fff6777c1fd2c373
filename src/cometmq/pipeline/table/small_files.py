"""Reading, replacing and creating of small files, such as those beside an archive's table."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

from pyarrow import fs

from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.objects import ConditionalPut
from cometmq.private import sync_path


class UncertainWrite(OSError):
    """An object store has not confirmed that it created an object, and the object is not there."""


def read_json(filesystem: fs.FileSystem, path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None without a file. Raises ArchiveError for other content."""
    if (content := read_file(filesystem, path)) is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ArchiveError(path, "the file is damaged: restore it from a backup")
    return found


def read_file(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """Return the content of a file, or None if there is no file."""
    try:
        with filesystem.open_input_stream(path) as stream:
            content: bytes = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content


def replace_json(filesystem: fs.FileSystem, path: str, content: dict[str, Any]) -> None:
    """Replace the content of a file by one line of JSON. A reader sees either the old or the new content."""
    replace_file(filesystem, path, json.dumps(content).encode() + b"\n")


def replace_file(filesystem: fs.FileSystem, path: str, content: bytes) -> None:
    """Replace the content of a file. A reader sees either the old or the new content."""
    local = isinstance(filesystem, fs.LocalFileSystem)  # Remote stores show a file only when it is complete
    where = f"{path}.{uuid.uuid4().hex[:12]}.tmp" if local else path
    if local:
        filesystem.create_dir(os.path.dirname(path), recursive=True)
    with filesystem.open_output_stream(where) as stream:
        stream.write(content)
    if local:
        sync_path(where)
        filesystem.move(where, path)
        sync_path(os.path.dirname(path))


def create_file(
    filesystem: fs.FileSystem, path: str, content: bytes, put: ConditionalPut | None = None
) -> bool:
    """Create a complete file durably. Return False if another job has created a file of that name.

    On a local disk or an object store only one of several jobs succeeds; on other file systems this is not
    certain. `put` is the result of `conditional_put`. If its response was lost and the put was repeated, the
    object's content shows which job created it. Raises UncertainWrite if there is no object then.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        return _create_local(path, content)
    if put is None:
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            return False
        temporary = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
        with filesystem.open_output_stream(temporary) as stream:
            stream.write(content)
        filesystem.move(temporary, path)
        return True
    problem = "refused, though it does not exist"
    try:
        if put(path, content):
            return True
    except OSError as error:
        problem = str(error)
    found = read_file(filesystem, path)
    if found is None:
        raise UncertainWrite(f"{path.rpartition('/')[2]} was perhaps not written: {problem}")
    return found == content


def _create_local(path: str, content: bytes) -> bool:
    directory, _, name = path.rpartition("/")
    # Readers of the table ignore names that begin with `_`.
    temporary = f"{directory}/_{name}.{uuid.uuid4().hex[:12]}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)  # Unlike a rename, a link fails if the name exists
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    sync_path(directory)
    return True
