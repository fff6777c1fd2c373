"""The outcome of a request: from response codes of remoting to the codes of 5.x clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cometmq.errors import RemotingError, RequestTimeout
from cometmq.grpc.rpc.calls import Call, Message
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.protocol.codes import ResponseCode, response_name
from cometmq.protocol.frame import Frame

CODES: dict[int, Code] = {
    ResponseCode.SUCCESS: Code.OK,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    ResponseCode.MESSAGE_ILLEGAL: Code.BAD_REQUEST,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.INVALID_PARAMETER: Code.BAD_REQUEST,
    ResponseCode.NO_MESSAGE: Code.INVALID_RECEIPT_HANDLE,
    ResponseCode.POLLING_FULL: Code.TOO_MANY_REQUESTS,
    ResponseCode.POLLING_TIMEOUT: Code.MESSAGE_NOT_FOUND,
    ResponseCode.PULL_NOT_FOUND: Code.MESSAGE_NOT_FOUND,
    ResponseCode.LMQ_QUOTA_EXCEEDED: Code.LITE_TOPIC_QUOTA_EXCEEDED,
    ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
}
"""The code of a 5.x client for each response code. All others become INTERNAL_SERVER_ERROR."""


Result: TypeAlias = tuple[Code, str]
"""The code and the text of a `Status`."""


def lost(error: RemotingError) -> Result:
    """Return the status for a request to which the broker has not responded."""
    timed_out = isinstance(error, RequestTimeout)
    return Code.PROXY_TIMEOUT if timed_out else Code.INTERNAL_SERVER_ERROR, str(error)


def checked(outcome: Frame | RemotingError) -> Frame:
    """Return the response of the broker. Raises ServiceError if there is none, or none of success."""
    if isinstance(outcome, RemotingError):
        raise ServiceError(*lost(outcome))
    if outcome.code:
        raise failure(outcome)
    return outcome


def failure(response: Frame) -> ServiceError:
    """Return the error for a response of the broker that is none of success."""
    text = response.remark or response_name(response.code)
    return ServiceError(CODES.get(response.code, Code.INTERNAL_SERVER_ERROR), text)


def status(code: Code, text: str = "") -> Any:
    """Return a `Status` message."""
    return messages().Status(code=code, message=text or code.name)


def set_status(message: Any, code: Code, text: str = "") -> None:
    """Set a `Status` message that is part of another one. This costs a third of a copy."""
    message.code = code
    message.message = text or code.name


class Responder:
    """Waits for the outcome of a request to the broker, and responds to a call immediately.

    `respond` returns the response for the broker's response or for an error, or None if the call needs more
    outcomes. It may raise ServiceError.
    """

    __slots__ = ("_call", "_respond")

    def __init__(self, call: Call, respond: Callable[[Frame | RemotingError], Message | None]) -> None:
        self._call = call
        self._respond = respond

    def done(self) -> bool:
        return False  # The outcome also matters if the call has been cancelled

    def set_result(self, outcome: Frame | RemotingError) -> None:
        try:
            response = self._respond(outcome)
            if response is not None:
                self._call.respond(response)
        except Exception as error:
            self._call.fail(error)

    set_exception = set_result
