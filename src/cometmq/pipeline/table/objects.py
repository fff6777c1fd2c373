"""The one operation of object stores that pyarrow's file systems lack: create an object unless there is one.

It is what makes a commit exclusive where nothing can be locked or renamed. S3 has it as PutObject with
`If-None-Match: *` (since August 2024), Google's store as a precondition on the generation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pyarrow import fs

from cometmq.errors import ConfigError

ConditionalPut = Callable[[str, bytes], bool]
"""Called with a path as pyarrow has it (`bucket/key`) and the content: whether it was created. Raises OSError
if that is not known."""


def conditional_put(uri: str, filesystem: fs.FileSystem) -> ConditionalPut | None:
    """For the object store of this URI; None for file systems, which rename instead.

    obstore is given what pyarrow takes from the URI. What is not in the URI both read from the environment.
    """
    stores = {"s3": _s3_store, "gcs": _google_store}
    if filesystem.type_name not in stores:
        return None
    try:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError
    except ImportError:
        expected = "a file system, as object stores need: pip install 'cometmq[s3]'"
        raise ConfigError("output", shown(uri), expected) from None
    store = stores[filesystem.type_name](uri, filesystem)

    def put(path: str, content: bytes) -> bool:
        try:
            obstore.put(store, path.partition("/")[2], content, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, PermissionError, FileNotFoundError) as error:
            # The rest of obstore's text is a dump of the request, over many lines.
            raise OSError(str(error).partition("\n")[0]) from None
        return True

    return put


def s3_settings(uri: str, filesystem: fs.S3FileSystem) -> dict[str, str]:
    """What the URI says, by the names of Rust's object_store, which obstore and deltalake are made of."""
    parts = urlsplit(uri)
    given = dict(parse_qsl(parts.query))
    endpoint = given.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{given.get('scheme', 'https')}://{endpoint}"
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = {
        "region": filesystem.region,
        "endpoint": endpoint,
        "access_key_id": unquote(parts.username or ""),
        "secret_access_key": unquote(parts.password or ""),
        "virtual_hosted_style_request": given.get("force_virtual_addressing"),
    }
    return {key: value for key, value in config.items() if value}


def allows_http(settings: dict[str, str]) -> bool:
    return settings.get("endpoint", "").startswith("http://")


def _s3_store(uri: str, filesystem: fs.S3FileSystem) -> Any:
    from obstore.store import S3Store

    settings: Any = s3_settings(uri, filesystem)
    plain = allows_http(settings)
    return S3Store(_bucket(urlsplit(uri).netloc), client_options={"allow_http": plain}, **settings)


def _google_store(uri: str, _: fs.FileSystem) -> Any:
    from obstore.store import GCSStore

    return GCSStore(_bucket(urlsplit(uri).netloc))


def _bucket(netloc: str) -> str:
    return netloc.rpartition("@")[2]


_USER = re.compile(r"(?<=://)(?:(?!://).)*@", re.DOTALL)
_OPTIONS = re.compile(r"(://[^,?#]*)[?#][^,]*")


def without_user(uri: str) -> str:
    """A path, URI or list of them without key and secret. Secrets may hold a `/`: the key begins behind `://`
    and the last `@` in front of the next URI ends the secret."""
    return _USER.sub("", uri)


def shown(uri: str) -> str:
    """A path or URI, or a list of them, as people may see it: without key, secret and options."""
    return _OPTIONS.sub(r"\1", without_user(uri))


def joined(uri: str, name: str) -> str:
    """`name` below a path or URI: behind the path and in front of a URI's options."""
    path, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"
