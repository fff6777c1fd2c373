"""The signature of requests (docs/reference/remoting.md, ACL).

Signed are the values of all ext fields but the signature itself, in the order of their names, and the body
behind them: HMAC-SHA1 with the account's secret, written as base64. There is no time and no number in it, so
a signed request can be sent again by whoever has seen it: TLS keeps others from seeing it.
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
KEY_LENGTH_MIN = 7
"""Characters of an access key and of a secret: both have more than 6 (Apache's AclConstants)."""
KEY_LENGTH_MAX = 1024

_UNSIGNED = frozenset({SIGNATURE})
_UNSIGNED_BY_4_9 = frozenset({SIGNATURE, UNIQUE_QUERY})


class Credentials(msgspec.Struct, frozen=True):
    """What a client signs with. Neither secret nor token is ever shown."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"

    __str__ = __repr__


def credentials_of(
    access_key: str | None, secret_key: str | None, security_token: str | None = None
) -> Credentials | None:
    """None without any of them. Raises ConfigError for half of what is needed; it never has the secret."""
    if not (access_key or secret_key or security_token):
        return None
    for key, value in (("access_key", access_key), ("secret_key", secret_key)):
        if not value:
            raise ConfigError(key, "", "a value: a client signs with an access key and its secret")
        if len(value) > KEY_LENGTH_MAX:
            raise ConfigError(key, f"{len(value)} characters", f"at most {KEY_LENGTH_MAX}")
    return Credentials(access_key or "", secret_key or "", security_token or "")


def signature(secret_key: str, ext: Mapping[str, str], body: bytes | memoryview, *, all_fields: bool) -> str:
    """The signature of a request. all_fields: as 5.x's servers read it; 4.9's leave out `UNIQUE_QUERY`, which
    4.9's own clients sign."""
    left_out = _UNSIGNED if all_fields else _UNSIGNED_BY_4_9
    text = "".join([ext[name] for name in sorted(ext) if name not in left_out])
    content = b"".join((text.encode("utf-8", "replace"), body))
    return base64.b64encode(hmac.digest(secret_key.encode("utf-8", "replace"), content, "sha1")).decode()


def is_signed(secret_key: str, ext: Mapping[str, str], body: bytes | memoryview) -> bool:
    """Whether a request carries the signature of this secret, made in either way."""
    given = ext.get(SIGNATURE, "").encode("utf-8", "replace")
    for all_fields in (False, True) if UNIQUE_QUERY in ext else (False,):
        wanted = signature(secret_key, ext, body, all_fields=all_fields).encode()
        if hmac.compare_digest(wanted, given):
            return True
    return False


def sign(frame: Frame, credentials: Credentials) -> None:
    """Sign a request that is about to leave; once more, after a change, does no harm."""
    ext = dict(frame.ext or {})
    ext[ACCESS_KEY] = credentials.access_key
    if credentials.security_token:
        ext[SECURITY_TOKEN] = credentials.security_token
    # Without the field that 4.9's brokers leave out: they would refuse the signature.
    ext[SIGNATURE] = signature(credentials.secret_key, ext, frame.body, all_fields=False)
    frame.ext_fields, frame.typed = ext, None
