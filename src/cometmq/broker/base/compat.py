"""The differences between RocketMQ 4.9 and 5.x, and which behaviour each request receives.

A request whose version or code is that of 5.x is handled as 5.5.0 does; every other request as 4.9.7 does.
docs/server.md contains the same table.

| point | 4.9 requests | 5.x requests |
|---|---|---|
| bad topic or group name, bad queue id | 1 SYSTEM_ERROR | 29 INVALID_PARAMETER |
| offset by time (29, 222) | nearest message | first at or after it; boundaryType UPPER: last at or before |
| offset query (14), topic unknown | 0, offset 0 | 22 QUERY_NOT_FOUND |
| offset query (14), nothing stored | 0 while the queue is young; 22 if setZeroIfNotFound=false | same |
| batch (320) | the batch's own properties go to every element | elements keep their own, plus CLUSTER |
| send of one message | CLUSTER is added | CLUSTER, MSG_REGION and TRACE_ON are added |
| offset update (15) | anything is stored | unknown topic 17, unknown group 26, bad queue or offset 29 |
| group deletion (207) | removeOffset | cleanOffset; both are read |
| retry sent by a client (310) | dead at the maximum, DELAY 0 | dead above it, or with locked queues; -1 |
| send of a half message | | response: transactionId; property __transactionId__: the UNIQ_KEY |
| end of a transaction (37), late | accepted | 604 if the message's own time is over and no check was sent |
| maxMsgBytes of a pull (11) | unknown to 4.9 | maximum size of the response, 100 to 128 Mi bytes |
| runtime table (28) | getTransferedTps | getTransferredTps; both are written |
| CONTAINS, STARTSWITH, ENDSWITH in SQL92 filters | names of properties | operators |
| 18, 225, 351, 352, 361 | unknown to 4.9 | served: 5.x tools and lite pull consumers ask every broker |

Differences that do not depend on the request are listed below that table in docs/server.md.
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
    """Return the property `DELAY` of a dead letter that a client itself had sent to a retry topic."""
    return b"-1" if is_5x(version) else b"0"


def half_properties(version: int, properties: bytes) -> bytes:
    """Return a half message's properties as they are stored: for 5.x clients, with the transaction id."""
    key = value_of(properties, b"UNIQ_KEY")
    return put(properties, b"__transactionId__", key) if key and is_5x(version) else properties


def most_bytes(version: int, asked: int | None) -> int | None:
    """Return the maximum size of a pull's response, in bytes, that the client asked for, or None."""
    return max(100, min(asked, 128 << 20)) if asked is not None and is_5x(version) else None


def search_mode(version: int, boundary_type: str | None) -> str | None:
    """Return which message a search by time finds: None (the nearest), or the boundary LOWER or UPPER."""
    if not is_5x(version):
        return None
    return "UPPER" if boundary_type is not None and boundary_type.upper() == "UPPER" else "LOWER"
