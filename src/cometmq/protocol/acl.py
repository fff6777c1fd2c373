"""The signature of requests for access control (docs/reference/remoting.md, ACL).

The signature is the base64 form of an HMAC-SHA1 whose key is the account's secret. It covers the values of
all ext fields except the signature itself, in the order of their names, followed by the body. It covers no
time and no nonce, so anyone who has seen a signed request can send it again. TLS prevents that, because it
hides the request.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping

import msgspec

from cometmq.errors import ConfigError
from cometmq.protocol.frame import Frame

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
SECURITY_TOKEN = "SecurityToken"
UNIQUE_QUERY = "_UNIQUE_KEY_QUERY"
MIN_KEY_LENGTH = 7
"""The minimum length of an access key and of a secret, because Apache's AclConstants requires more than 6."""
MAX_KEY_LENGTH = 1024

_UNSIGNED = frozenset({SIGNATURE})
_UNSIGNED_BY_4_9 = frozenset({SIGNATURE, UNIQUE_QUERY})


class Credentials(msgspec.Struct, frozen=True):
    """The keys with which a client signs its requests. Its `repr` contains neither secret nor token."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"

    __str__ = __repr__


def credentials_of(
    access_key: str | None, secret_key: str | None, security_token: str | None = None
) -> Credentials | None:
    """Return the credentials, or None without any argument. Raises ConfigError, which shows no secret."""
    if not (access_key or secret_key or security_token):
        return None
    for key, value in (("access_key", access_key), ("secret_key", secret_key)):
        if not value:
            raise ConfigError(key, "", "a value: a client signs with an access key and its secret")
        if len(value) > MAX_KEY_LENGTH:
            raise ConfigError(key, f"{len(value)} characters", f"at most {MAX_KEY_LENGTH}")
    return Credentials(access_key or "", secret_key or "", security_token or "")


def signature(secret_key: str, ext: Mapping[str, str], body: bytes | memoryview, *, all_fields: bool) -> str:
    """Return the signature of a request, which covers `UNIQUE_QUERY` only if `all_fields` is set.

    Servers of 5.x include this field, servers of 4.9 omit it, although clients of 4.9 include it.
    """
    left_out = _UNSIGNED if all_fields else _UNSIGNED_BY_4_9
    text = "".join([ext[name] for name in sorted(ext) if name not in left_out])
    content = b"".join((text.encode("utf-8", "replace"), body))
    return base64.b64encode(hmac.digest(secret_key.encode("utf-8", "replace"), content, "sha1")).decode()


def is_signed(secret_key: str, ext: Mapping[str, str], body: bytes | memoryview) -> bool:
    """Return whether a request has a valid signature, whether or not that covers `UNIQUE_QUERY`."""
    given = ext.get(SIGNATURE, "").encode("utf-8", "replace")
    for all_fields in (False, True) if UNIQUE_QUERY in ext else (False,):
        wanted = signature(secret_key, ext, body, all_fields=all_fields).encode()
        if hmac.compare_digest(wanted, given):
            return True
    return False


def sign(frame: Frame, credentials: Credentials) -> None:
    """Sign a request in place. Call it again after any change of the request."""
    ext = dict(frame.ext or {})
    ext[ACCESS_KEY] = credentials.access_key
    if credentials.security_token:
        ext[SECURITY_TOKEN] = credentials.security_token
    # Do not sign `UNIQUE_QUERY`: brokers of 4.9 omit this field and would refuse a signature that covers it.
    ext[SIGNATURE] = signature(credentials.secret_key, ext, frame.body, all_fields=False)
    frame.ext_fields, frame.typed = ext, None
