"""The request message and the reply message of request-reply (docs/reference/client.md, Request-reply)."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from cometmq.errors import MessageIllegal
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import REPLY_TOPIC_POSTFIX
from cometmq.protocol.properties import values as names

_REPLY = "reply"
_COPIED = (names.CORRELATION_ID, names.REPLY_TO_CLIENT, names.TTL)


def as_request(message: Message, client_id: str, timeout_s: float) -> tuple[str, Message]:
    """Return a new correlation id, and a copy of `message` whose properties ask the consumer for a reply."""
    correlation_id = str(uuid.uuid4())
    asking = {
        names.CORRELATION_ID: correlation_id,
        names.REPLY_TO_CLIENT: client_id,
        names.TTL: str(math.ceil(timeout_s * 1000)),
    }
    return correlation_id, replace(message, properties={**message.properties, **asking})


def reply_to(
    request: MessageExt,
    body: bytes,
    *,
    tags: str | None = None,
    keys: Sequence[str] = (),
    flag: int = 0,
    properties: Mapping[str, str] | None = None,
) -> Message:
    """Return the message that replies to a `request`. Any producer may send it.

    Args:
        request: The received message. Its properties CORRELATION_ID, REPLY_TO_CLIENT, TTL (set by `request`)
            and CLUSTER (set by the broker) determine the receiver.
        body: The body of the reply.
        tags: The tag of the reply.
        keys: The keys of the reply.
        flag: The flag of the reply.
        properties: The user properties of the reply.

    Returns:
        The reply, to be sent with `Producer.send`.

    Raises:
        MessageIllegal: The received message does not request a reply.
    """
    asked = request.properties
    for name in (names.CLUSTER, *_COPIED):
        if not asked.get(name):
            problem = f"message {request.msg_id} does not request a reply: it has no property {name}"
            raise MessageIllegal(problem, request.topic, name)
    carried = {name: asked[name] for name in _COPIED}
    return Message(
        asked[names.CLUSTER] + REPLY_TOPIC_POSTFIX,
        body,
        tags,
        keys,
        flag,
        properties={**(properties or {}), **carried, names.MSG_TYPE: _REPLY},
    )


def is_reply(message: Message) -> bool:
    """Return whether a message is a reply to a request."""
    return message.properties.get(names.MSG_TYPE) == _REPLY
