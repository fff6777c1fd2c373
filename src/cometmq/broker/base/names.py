"""Checks of topic and group names in requests, with Apache's error texts (docs/reference/storage.md, Names).

`names_checked` checks the names in the header of every request, except for the frequent requests in
CHECK_BY_THEMSELVES. The handlers of sends and pulls check a name only the first time that they receive it.
The handler of END_TRANSACTION only compares the group with that of the half message. Names in a request's
body are checked by the body's decoder.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial

from cometmq.broker.base import compat
from cometmq.errors import CommandError
from cometmq.protocol.codes import MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH, RequestCode, is_legal_name
from cometmq.protocol.ext import Header, plan_of
from cometmq.protocol.frame import Frame
from cometmq.protocol.lite import MAX_LITE_TOPIC_LENGTH
from cometmq.remoting import Connection, Handler

CHECK_BY_THEMSELVES = frozenset({
    RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.END_TRANSACTION,
})  # fmt: skip
"""Frequent requests, whose handlers check a topic or group name only the first time that they receive it."""


def _checked(kind: str, longest: int, name: str | None, version: int) -> str:
    """Return a name if it is valid. Raises CommandError with code 1, or 29 for a 5.x request."""
    if name is not None and is_legal_name(name, longest):
        return name
    if name is None or not name.strip():
        problem = f"The specified {kind} is blank."
    elif len(name) > longest:
        problem = (
            f"The specified {kind} is longer than {kind} max length {longest}: it has {len(name)} characters."
        )
    else:
        problem = f"The specified {kind} contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    raise CommandError(compat.invalid_parameter(version), problem)


Check = Callable[[str | None, int], str]
check_topic: Check = partial(_checked, "topic", MAX_TOPIC_LENGTH)
check_group: Check = partial(_checked, "group", MAX_GROUP_LENGTH)
check_lite_topic: Check = partial(_checked, "lite topic", MAX_LITE_TOPIC_LENGTH)
FIELDS: dict[str, Check] = {
    "topic": check_topic,
    "group": check_group,
    "groupName": check_group,
    "consumerGroup": check_group,
    "producerGroup": check_group,
    "srcGroup": check_group,
    "destGroup": check_group,
    "compareGroup": check_group,
    "liteTopic": check_lite_topic,
}
"""The check of each ext field that contains a name. Empty values are left to the handlers."""


def names_checked(handler: Handler) -> Handler:
    """Return a handler that checks topic and group names in the ext fields and then calls `handler`."""

    def checked(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
        typed, version = frame.typed, frame.version
        if typed is not None and not frame.raw_header:  # The request has not been encoded
            for attribute, check in _checked_fields(type(typed)):
                if name := getattr(typed, attribute):
                    check(name, version)
        elif ext := frame.ext:
            for field, name in ext.items():
                if name and field in FIELDS:
                    FIELDS[field](name, version)
        return handler(connection, frame)

    return checked


@cache
def _checked_fields(kind: type[Header]) -> list[tuple[str, Check]]:
    """Return the attributes of a header that contain names, with the functions that check them."""
    return [(attribute, FIELDS[name]) for attribute, name, _, _ in plan_of(kind) if name in FIELDS]
