"""Reading and writing of the small JSON files beside an archive's table."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

from pyarrow import fs

from cometmq.pipeline.base.errors import ArchiveError


def read_json(filesystem: fs.FileSystem, path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no file.

    Raises ArchiveError if the content of the file is not a JSON object.
    """
    try:
        with filesystem.open_input_stream(path) as stream:
            content = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ArchiveError(path, "the file is damaged: restore it from a backup")
    return found


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
        sync_local(where)
        filesystem.move(where, path)
        sync_local(os.path.dirname(path))


def sync_local(path: str) -> None:
    """Sync a local file or directory to disk. For a directory, this makes the names in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
