"""The object store of tiered storage, implemented with the library obstore (extra `tiered`).

obstore reads keys, region and endpoint from the environment. Settings of the broker must not contain a key,
because clients can request them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import ConfigError
from cometmq.private import sync_path
from cometmq.store import ObjectStore, ObjectStoreFailed

T = TypeVar("T")
PARALLEL_PARTS = 2
PART_BYTES = 8 << 20  # S3 allows 10,000 parts, which is enough for the largest segment, 2 GiB
# `allow_http`: the environment may name an endpoint without TLS.
CLIENT: Any = {"connect_timeout": "5s", "timeout": "30s", "allow_http": True}
RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


class ObjectMissing(ObjectStoreFailed):
    """The object does not exist."""


def object_store_of(config: BrokerConfig) -> ObjectStore | None:
    """Return the object store for a broker's segments, or None without the setting `tieredStoreUri`.

    The objects of a broker have its prefix, so several brokers may use one URI. No request is sent. Raises
    ConfigError.
    """
    uri, store = config.store.tiered_store_uri, config.store
    if not uri:
        return None
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError:
        expected = "no value, or the library for object stores: pip install 'cometmq[tiered]'"
        raise ConfigError("tieredStoreUri", uri, expected) from None
    member = store.d_leger_self_id if store.enable_d_leger_commit_log else config.broker_id
    # `=` replaces the percent sign, which some object stores would escape again.
    prefix = f"{quote(config.broker_name, safe='').replace('%', '=')}-{member}/"
    try:
        if uri.startswith("file:"):
            directory = unquote(uri.removeprefix("file://")) or "/"
            return Directory(LocalStore(directory, mkdir=True), prefix, Path(directory))
        # S3 verifies each uploaded part by its checksum. Google and Azure do not have this option.
        checked: Any = {"checksum_algorithm": "SHA256"} if uri.startswith("s3:") else {}
        store_of = from_url(uri, config=checked, client_options=CLIENT, retry_config=RETRIES)
        return Objects(store_of, prefix)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError("tieredStoreUri", uri, f"a usable object store ({_first_line(error)})") from None


class Objects:
    """An `ObjectStore` that uses obstore. It is thread-safe."""

    def __init__(self, store: Any, prefix: str) -> None:
        import obstore

        self._obstore: Any = obstore
        self._store = store
        self._prefix = prefix

    def put(self, name: str, content: bytes | Iterator[bytes]) -> None:
        options = {"chunk_size": PART_BYTES, "max_concurrency": PARALLEL_PARTS}
        self._call(lambda: self._obstore.put(self._store, self._prefix + name, content, **options))

    def get(self, name: str, start: int, length: int) -> bytes:
        found = self._call(
            lambda: self._obstore.get_range(self._store, self._prefix + name, start=start, length=length)
        )
        return bytes(found)

    def size(self, name: str) -> int | None:
        try:
            return int(self._call(lambda: self._obstore.head(self._store, self._prefix + name))["size"])
        except ObjectMissing:
            return None

    def names(self, prefix: str) -> list[str]:
        pages = self._call(lambda: list(self._obstore.list(self._store, self._prefix + prefix.rstrip("/"))))
        return [each["path"].removeprefix(self._prefix) for page in pages for each in page]

    def delete(self, name: str) -> None:
        try:
            self._call(lambda: self._obstore.delete(self._store, self._prefix + name))
        except ObjectMissing:
            pass

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ObjectStoreFailed:
            raise  # the iterator of an upload has raised it
        except (FileNotFoundError, self._obstore.exceptions.NotFoundError) as error:
            raise ObjectMissing(_first_line(error)) from None
        except (OSError, ValueError, self._obstore.exceptions.BaseError) as error:
            raise ObjectStoreFailed(_first_line(error)) from None


class Directory(Objects):
    """An `ObjectStore` in a directory, such as a mounted network file system."""

    def __init__(self, store: Any, prefix: str, root: Path) -> None:
        super().__init__(store, prefix)
        self._root = root / prefix

    def put(self, name: str, content: bytes | Iterator[bytes]) -> None:
        """Create or replace an object, and sync it, because obstore does not sync files."""
        super().put(name, content)
        path = self._root / name
        for each in (path, path.parent, self._root, self._root.parent):
            self._call(partial(sync_path, each))

    def names(self, prefix: str) -> list[str]:
        """Remove the files of uploads that were interrupted by a kill, and return the names of objects."""
        for path in (self._root / prefix).glob("*#*"):
            path.unlink(missing_ok=True)
        return super().names(prefix)


def _first_line(error: Exception) -> str:
    """Return the first line of an error. The other lines of obstore's errors are a dump of the request."""
    return str(error).partition("\n")[0]
