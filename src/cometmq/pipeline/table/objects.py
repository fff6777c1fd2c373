"""The operation of object stores that pyarrow's file systems lack: create an object unless it exists.

The operation makes commits exclusive on stores where files cannot be locked or renamed. S3 supports it as
PutObject with `If-None-Match: *` (since August 2024), and Google's store as a precondition on the generation.
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
"""A function that creates an object in an object store, unless an object with this path exists.

Its arguments are the path (`bucket/key`) and the content. It returns whether it created the object. It
raises OSError if the outcome is unknown.
"""


def conditional_put(uri: str, filesystem: fs.FileSystem) -> ConditionalPut | None:
    """Return a function that creates an object in this URI's store unless the object exists.

    Return None for a file system, where a file can be renamed. obstore receives the settings that pyarrow
    reads from the URI. Both libraries read all other settings from the environment.
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
            # Only the first line is used, because the rest of obstore's text is a long dump of the request.
            raise OSError(str(error).partition("\n")[0]) from None
        return True

    return put


def s3_settings(uri: str, filesystem: fs.S3FileSystem) -> dict[str, str]:
    """Return the URI's settings with the names that Rust's object_store uses, for obstore and deltalake."""
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
    """Remove the key and the secret from a URI, or from each URI in a text. A path is returned unchanged.

    The text between `://` and `@` counts as key and secret. A secret may contain `/` and `@`, so the last `@`
    before the next URI counts.
    """
    return _USER.sub("", uri)


def shown(uri: str) -> str:
    """Remove key, secret and options from a URI, or each URI in a text, to display it. A path stays."""
    return _OPTIONS.sub(r"\1", without_user(uri))


def joined(uri: str, name: str) -> str:
    """Return a path or URI with `name` appended to its path; a URI's options stay at the end."""
    path, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"
