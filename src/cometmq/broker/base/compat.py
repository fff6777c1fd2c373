"""The differences between RocketMQ 4.9 and 5.x in how a broker handles requests.

A request whose version or code is that of 5.x is handled as RocketMQ 5.5.0 handles it. Every other request is
handled as RocketMQ 4.9.7 handles it. The section Versions of docs/server.md lists the differences.
"""

from __future__ import annotations

from cometmq.protocol.codes import VERSION_5_0_0, ResponseCode
from cometmq.protocol.properties.values import put, value_of


def is_5x(version: int) -> bool:
    """Return whether `version` is that of a 5.x client or tool."""
    return version >= VERSION_5_0_0


def invalid_parameter(version: int) -> int:
    """Return the response code for an invalid parameter, such as a bad topic name or queue id."""
    return int(ResponseCode.INVALID_PARAMETER if is_5x(version) else ResponseCode.SYSTEM_ERROR)


def spreads_batch_properties(version: int) -> bool:
    """Return whether a batch's own properties are added to each message, as in Apache's 4.9 broker."""
    return not is_5x(version)


def level_of_dead_letter(version: int) -> bytes:
    """Return the property `DELAY` of a dead letter that a client has sent to a retry topic.

    The broker stores a message sent to a retry topic as a dead letter if all its retries are used up.
    """
    return b"-1" if is_5x(version) else b"0"


def half_properties(version: int, properties: bytes) -> bytes:
    """Return the properties of a stored half message. Those of 5.x clients also have the transaction id."""
    key = value_of(properties, b"UNIQ_KEY")
    return put(properties, b"__transactionId__", key) if key and is_5x(version) else properties


def most_bytes(version: int, asked: int | None) -> int | None:
    """Return the limit, 100 bytes to 128 MiB, that a 5.x client requests for a pull's response, or None."""
    return max(100, min(asked, 128 << 20)) if asked is not None and is_5x(version) else None


def search_mode(version: int, boundary_type: str | None) -> str | None:
    """Return how a search for an offset by time selects the message; None means the nearest message.

    LOWER means the first message at or after the time, UPPER the last message at or before the time.
    """
    if not is_5x(version):
        return None
    return "UPPER" if boundary_type is not None and boundary_type.upper() == "UPPER" else "LOWER"
