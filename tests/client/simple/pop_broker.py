"""A fake broker that leases its messages, each once."""

from __future__ import annotations

from tests.kit.fakes import FakeBroker

from cometmq.protocol.bodies import BatchAckMessageRequestBody
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationResponseHeader,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
)
from cometmq.protocol.record.one import encode_record

POP_TIME_MS = 1_800_000_000_000


class PopBroker(FakeBroker):
    """A broker whose `ready` records are leased, and that never holds a request."""

    def __init__(self, name: str = "broker-a") -> None:
        super().__init__(name)
        self.ready: list[bytes] = []
        self.leases: list[PopMessageRequestHeader] = []
        self.acks: list[AckMessageRequestHeader] = []
        self.batches: list[BatchAckMessageRequestBody] = []
        self.changes: list[ChangeInvisibleTimeRequestHeader] = []
        self.order_counts: str | None = None

    def offer(
        self, body: bytes, properties: bytes = b"", *, topic: str = "T", queue_id: int = 0, offset: int = 0
    ) -> None:
        """Add a message that the next request leases."""
        places = {"queue_id": queue_id, "queue_offset": offset, "physical_offset": 1000 * offset}
        self.ready.append(encode_record(topic, body, properties, **places))

    def answer(self, frame: Frame) -> Frame | None:
        match frame.code:
            case RequestCode.POP_MESSAGE:
                return self.lease(frame)
            case RequestCode.NOTIFICATION:
                return frame.response(0, header=NotificationResponseHeader(has_msg=bool(self.ready)))
            case RequestCode.ACK_MESSAGE:
                self.acks.append(frame.header(AckMessageRequestHeader))
            case RequestCode.BATCH_ACK_MESSAGE:
                self.batches.append(BatchAckMessageRequestBody.decode(frame.body))
            case RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
                change = frame.header(ChangeInvisibleTimeRequestHeader)
                self.changes.append(change)
                header = ChangeInvisibleTimeResponseHeader(POP_TIME_MS + 5, change.invisible_time, 4)
                return frame.response(0, header=header)
            case _:
                return super().answer(frame)
        return frame.response(0)

    def lease(self, frame: Frame) -> Frame:
        request = frame.header(PopMessageRequestHeader)
        self.leases.append(request)
        found, self.ready = self.ready[: request.max_msg_nums], self.ready[request.max_msg_nums :]
        header = PopMessageResponseHeader(
            pop_time=POP_TIME_MS,
            invisible_time=request.invisible_time,
            revive_qid=3,
            start_offset_info="0 0 0;1 0 7",
            order_count_info=self.order_counts,
        )
        code = ResponseCode.SUCCESS if found else ResponseCode.POLLING_TIMEOUT
        return frame.response(code, header=header, body=b"".join(found))
