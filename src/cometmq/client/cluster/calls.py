"""One request and its answer, with failure codes as errors that say who refused what and why."""

from __future__ import annotations

from typing import Any

from cometmq.errors import BrokerError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import RemotingClient

__all__ = ["Calls", "hint_of"]

_HINTS = {
    ResponseCode.SYSTEM_BUSY: "the broker refuses work for a moment: slow down or try again",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic (mqadmin updateTopic) or set autoCreateTopicEnable",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group (mqadmin updateSubGroup), or switch on "
    "autoCreateSubscriptionGroup",
    ResponseCode.NO_PERMISSION: "look at the permissions of broker, topic and group",
    ResponseCode.SERVICE_NOT_AVAILABLE: "the broker takes no messages: full disk, replica, or stopping",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "this server's version does not know the request, or it is a "
    "server of another kind: by default name servers listen on port 9876, brokers on 10911",
}


def hint_of(code: int) -> str:
    return _HINTS.get(code, "")  # type: ignore[call-overload, no-any-return]


class Calls:
    """Base of the typed APIs. `timeout_s` holds where a call names no other."""

    def __init__(self, remoting: RemotingClient, timeout_s: float = 3.0) -> None:
        self.remoting = remoting
        self.timeout_s = timeout_s

    async def call(
        self,
        addr: str,
        code: RequestCode,
        header: Any = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        topic: str = "",
        key: str = "",
    ) -> Frame:
        """The answer if its code is SUCCESS. Raises BrokerError otherwise, or what remoting raises."""
        answer = await self.ask(addr, code, header, body, timeout_s=timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise broker_error(answer, addr, topic, key)
        return answer

    async def ask(
        self,
        addr: str,
        code: RequestCode,
        header: Any = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
    ) -> Frame:
        """The answer whatever its code."""
        frame = Frame.request(code, header, body)
        return await self.remoting.call(addr, frame, self.timeout_s if timeout_s is None else timeout_s)


def broker_error(answer: Frame, addr: str, topic: str = "", key: str = "") -> BrokerError:
    return BrokerError(
        answer.code,
        remark=answer.remark or "",
        broker_addr=addr,
        topic=topic,
        key=key,
        hint=hint_of(answer.code),
    )
