"""The paths that a pipeline reads and writes, and whether two paths may refer to the same files."""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatchcase
from itertools import islice, zip_longest
from urllib.parse import unquote

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?")
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs"}
_PORTS = {"hdfs": ":8020"}  # Default ports by scheme, which URIs may omit
_MATCHES_MAX = 1000  # Maximum number of directories to which a pattern is expanded
_BRACES_MAX = 100


def local_path(path: str) -> str | None:
    """Return the path of a local path or URI (file:/a or file:///a), or None for another store's URI."""
    found = _SCHEME.match(path)
    if found is None:
        return path
    return path[found.end() :] if found[1].lower() == "file" else None


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URI that does not refer to this machine, or None for a local path."""
    found = _SCHEME.match(path)
    return found[1] if found and local_path(path) is None else None


def overlap(one: str, other: str) -> bool:
    """Return whether one path may equal the other path or lie inside it.

    Each argument may be a comma-separated list, contain patterns (`*`, `?`, `[a-c]`, `{a,b}`), be a URI, and
    lead through symlinks. The result is True if the answer depends on files or directories that do not exist
    yet.
    """
    others = _places(other)
    return any(_meet(place, another) for place in _places(one) for another in others)


def _meet(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return all(
        first is None or second is None or fnmatchcase(first, second) or fnmatchcase(second, first)
        or (_is_pattern(first) and _is_pattern(second))
        for first, second in zip_longest(one, other)
    )  # fmt: skip


def _places(path: str) -> set[tuple[str, ...]]:
    """Return the possible locations of `path`: a file system or store, and the path's components."""
    found: set[tuple[str, ...]] = set()
    for item in {path, *_divided(path)}:
        for each in _without_braces(item.strip()):
            found |= _ways(each) | _ways(unquote(each))
    return found


def _divided(path: str) -> list[str]:
    """Split a comma-separated list. Commas inside braces do not separate."""
    return [item for item in re.split(r",(?![^{]*\})", path) if item.strip()]


def _without_braces(path: str) -> list[str]:
    """Expand `a{b,c}` to `ab` and `ac`, or, with too many alternatives, to the beginning and `*`."""
    done, left = [], [path]
    while left:
        item = left.pop()
        inner = re.search(r"\{([^{}]*)\}", item)
        if inner is None:
            done.append(item)
        elif len(done) + len(left) >= _BRACES_MAX:
            done.append(f"{item[: inner.start()]}*")
        else:
            left += [f"{item[: inner.start()]}{word}{item[inner.end() :]}" for word in inner[1].split(",")]
    return done


def _ways(path: str) -> set[tuple[str, ...]]:
    local = local_path(path)
    if local is None:
        found = _SCHEME.match(path)
        assert found is not None
        scheme = found[1].lower()
        # In abfs URIs the part before the @ is a container; in s3 URIs it is a key and a secret, which do not
        # identify the store.
        host = found[2] or "" if scheme.startswith("abfs") else (found[2] or "").rpartition("@")[2]
        store = f"{_SAME.get(scheme, scheme)}://{host.removesuffix(_PORTS.get(scheme, ''))}"
        rest = path[found.end() :]
        # A `?` may begin the options of a URI or be a wildcard, so the result contains the path with and
        # without the part that begins with the `?`.
        return {(store, *_names(os.path.normpath(f"/{part}"))) for part in (rest, rest.partition("?")[0])}
    whole = os.path.abspath(local)
    matches = islice(glob.iglob(whole), _MATCHES_MAX) if _is_pattern(whole) else [whole]
    return {("file", *_names(os.path.realpath(each))) for each in (*matches, whole)}


def _names(path: str) -> list[str]:
    return [name.replace("[^", "[!") for name in path.split("/") if name]


def _is_pattern(name: str) -> bool:
    return any(char in name for char in "*?[")
