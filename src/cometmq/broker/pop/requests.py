"""The remoting requests of pop consumers: pops, acks, changes of leases, and waits for messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.replies import frame_of
from cometmq.broker.filters.sql_filters import NotCompiled
from cometmq.broker.pop.checks import PopChecks, checked_attempt_id
from cometmq.broker.pop.polls import FOUND, POLLING_FULL, CheckedPop, PollKey
from cometmq.broker.pop.pops import PoppedQueue, PopRequest, split
from cometmq.broker.pop.retries import POP_CK
from cometmq.broker.pop.revive import REVIVE_QUEUE
from cometmq.broker.pop.service import PopService
from cometmq.errors import CommandError, RecordError
from cometmq.protocol import headers, pop
from cometmq.protocol.bodies import BatchAckMessageRequestBody
from cometmq.protocol.bodies.pop import MAX_ACKS_PER_REQUEST
from cometmq.protocol.codes import VERSION_4_9_7, RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.protocol.pop import ORDERED_REVIVE_QUEUE, CountKey, PopFormatError, ReceiptHandle, TopicKind
from cometmq.protocol.properties.values import put
from cometmq.protocol.record.layout import LENGTH, MAX_PROPERTIES, START
from cometmq.protocol.record.one import record_parts, topic_part
from cometmq.remoting import Connection
from cometmq.store import Buffer


@dataclass(eq=False)
class PopProcessor:
    """Handles the requests of pop consumers."""

    service: PopService

    def __post_init__(self) -> None:
        self.config = self.service.config
        self.checks: PopChecks = self.service.checks

    # -- pops

    @handles(RequestCode.POP_MESSAGE)
    def pop_message(self, connection: Connection, frame: Frame) -> object:
        """Lease messages to the sender, or hold the request until there are some."""
        header = frame.header(headers.PopMessageRequestHeader)
        self.checks.check_numbers(header.max_msg_nums, header.invisible_time)
        request = self._request(connection, frame, header, self._answer)
        request.count = header.max_msg_nums
        request.invisible_ms = header.invisible_time
        request.from_end = header.init_mode != 0
        return self._serve_filtered(connection, header, request)

    def _answer(self, request: PopRequest, code: int) -> None:
        for data in pop_response(request, code, self.config.broker_name):
            request.owner.write(data)

    @handles(RequestCode.NOTIFICATION)
    def notification(self, connection: Connection, frame: Frame) -> object:
        """Wait until the group can pop a message, without leasing it."""
        header = frame.header(headers.NotificationRequestHeader)

        def answer(request: PopRequest, code: int) -> None:
            found = headers.NotificationResponseHeader(
                has_msg=request.taken > 0, polling_full=code == POLLING_FULL
            )
            connection.write(encode_frame(Frame(code=0, opaque=request.opaque).response(header=found)))

        request = self._request(connection, frame, header, answer)
        request.leases = False
        return self._serve_filtered(connection, header, request)

    def _request(
        self,
        connection: Connection,
        frame: Frame,
        header: Waiting | headers.PeekMessageRequestHeader,
        answer: Callable[[PopRequest, int], None],
    ) -> PopRequest:
        """Check the fields that all kinds of pops share. Return a pop of one message, without a filter."""
        self.checks.check(header.consumer_group, header.topic, header.queue_id)
        request = PopRequest(
            owner=connection,
            opaque=frame.opaque,
            group=header.consumer_group,
            topic=header.topic,
            queue_id=max(header.queue_id, -1),
            answer=answer,
            account=self.service.rates.account_of(frame),
        )
        if not isinstance(header, headers.PeekMessageRequestHeader):
            request.poll_ms = header.poll_time or 0
            request.ordered = bool(header.order)
            request.attempt_id = checked_attempt_id(header.attempt_id)
        return request

    def _serve_filtered(self, connection: Connection, header: Waiting, request: PopRequest) -> object:
        """Serve a pop or a notification, once its filter is compiled."""
        try:
            request.wanted = self.checks.wanted(header.exp, header.exp_type)
        except NotCompiled as missing:
            return self._compile_first(connection, missing, header, request)
        self.service.pops.serve(request)
        return None

    async def _compile_first(
        self, connection: Connection, missing: NotCompiled, header: Waiting, request: PopRequest
    ) -> None:
        await self.checks.filters.compile(missing.key, connection)
        request.wanted = self.checks.wanted(header.exp, header.exp_type)
        self.service.pops.serve(request)

    @handles(RequestCode.PEEK_MESSAGE)
    def peek_message(self, connection: Connection, frame: Frame) -> None:
        """Return the next messages of a group without leasing them."""
        header = frame.header(headers.PeekMessageRequestHeader)
        self.checks.check_numbers(header.max_msg_nums, 0)

        def answer(request: PopRequest, code: int) -> None:
            self._answer(request, FOUND if code == FOUND else int(ResponseCode.PULL_NOT_FOUND))

        request = self._request(connection, frame, header, answer)
        request.count = header.max_msg_nums
        request.leases = False
        self.service.pops.serve(request)

    @handles(RequestCode.POLLING_INFO)
    def polling_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return how many pops wait for a queue, or for all queues (-1), of a topic."""
        header = frame.header(headers.GroupQueueRequestHeader)
        self.checks.check(header.consumer_group, header.topic, header.queue_id)
        key = PollKey(header.consumer_group, header.topic, header.queue_id)
        number = self.service.pops.polls.count(key)
        return frame.response(header=headers.PollingInfoResponseHeader(polling_num=number))

    # -- acks

    @handles(RequestCode.BATCH_ACK_MESSAGE)
    def batch_ack_message(self, _connection: Connection, frame: Frame) -> Frame:
        """Mark several messages as consumed. Messages that are no longer leased are ignored."""
        left = MAX_ACKS_PER_REQUEST
        self.checks.check_master()
        body = BatchAckMessageRequestBody.decode(frame.body)
        if not body.acks:
            raise CommandError(ResponseCode.NO_MESSAGE, "the body has no acks")
        self._check_broker(body.broker_name or self.config.broker_name)
        for ack in body.acks:
            if ack.retry not in ("0", "1", "2"):
                raise CommandError(
                    ResponseCode.MESSAGE_ILLEGAL, f"the kind of topic r is {ack.retry[:20]!r}, not 0, 1 or 2"
                )
            check_topic(ack.topic, frame.version)
            check_group(ack.consumer_group, frame.version)
            topic = TopicKind(int(ack.retry)).topic(ack.topic, ack.consumer_group)
            offsets = ack.offsets()
            left -= len(offsets)
            if left < 0:
                raise CommandError(
                    ResponseCode.MESSAGE_ILLEGAL, f"a request can ack at most {MAX_ACKS_PER_REQUEST} messages"
                )
            pops, key = self.service.pops, (ack.consumer_group, topic, ack.queue_id)
            end = self.service.store.max_offset(topic, ack.queue_id)
            stored = [each for each in offsets if each < end]
            for offset in pops.leases.ack_run(key, stored, ack.pop_time):
                pops.ack(key, offset, ack.pop_time)
        return frame.response()

    def decoded_handle(self, text: str) -> ReceiptHandle:
        """Return a receipt handle of a request. Raises CommandError."""
        try:
            handle = ReceiptHandle.decode(text)
        except PopFormatError as error:
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from None
        self._check_broker(handle.broker_name)
        return handle

    def _check_broker(self, name: str) -> None:
        """Raise CommandError if a handle is that of another broker.

        Apache's broker accepts such an ack, which has no effect.
        """
        if name != self.config.broker_name:
            raise CommandError(
                ResponseCode.NO_MESSAGE,
                f"the receipt handle is of broker {name[:200]}, not {self.config.broker_name}",
            )

    @handles(RequestCode.POP_ROLLBACK)
    def pop_rollback(self, _connection: Connection, frame: Frame) -> Frame:
        """Do nothing: there are no pop records in RocksDB that could be moved to files."""
        return frame.response()


Waiting = headers.PopMessageRequestHeader | headers.NotificationRequestHeader
"""The header of a request that can be parked."""


# -- the response to a pop


_TAIL = b'},"flag":1,"language":"JAVA","opaque":%d,"remark":"%b","serializeTypeCurrentRPC":"JSON",' + (
    b'"version":%d}' % VERSION_4_9_7
)


def pop_response(request: PopRequest, code: int, broker_name: str) -> list[Buffer]:
    """Return the response to a pop: a frame up to its body, followed by the buffers of the body."""
    found = request.found if code == FOUND else []
    revive_queue = ORDERED_REVIVE_QUEUE if request.ordered else REVIVE_QUEUE
    ext = {
        "restNum": str(request.rest),
        "startOffsetInfo": pop.encode_start_offsets(
            {(each.kind, each.queue_id): each.start for each in found}
        ),
        "msgOffsetInfo": pop.encode_message_offsets(
            {(each.kind, each.queue_id): each.offsets for each in found}
        ),
    }
    if request.ordered:
        ext["orderCountInfo"] = pop.encode_order_counts(_order_counts(found))
    buffers: list[Buffer] = []
    for each in found:
        if each.kind is TopicKind.NORMAL:
            buffers += each.buffers
        else:
            buffers += _renamed_records(request, each, revive_queue, broker_name)
    return response_buffers(request, code, revive_queue, ext, buffers)


def response_buffers(
    request: CheckedPop, code: int, revive_queue: int, more: Mapping[str, str], records: Sequence[Buffer]
) -> list[Buffer]:
    """Return the response to a pop of any kind. `more` is added to the fields that all kinds have."""
    ext = {
        "popTime": str(request.pop_ms),
        "invisibleTime": str(request.invisible_ms),
        "reviveQid": str(revive_queue),
        **more,
    }
    remark = b"FOUND" if records else b"NO_MESSAGE_IN_QUEUE"
    header = b'{"code":%d,"extFields":%b' % (code, json.dumps(ext).encode()[:-1])
    return [frame_of(header + _TAIL % (request.opaque, remark), sum(map(len, records))), *records]


def _renamed_records(
    request: PopRequest, popped: PoppedQueue, revive_queue: int, broker_name: str
) -> Iterable[Buffer]:
    """Return the records of a retry topic under the name of the topic that the consumer has subscribed to."""
    for record, offset in zip(split(popped.buffers), popped.offsets, strict=True):
        handle = ReceiptHandle(
            popped.start, request.pop_ms, request.invisible_ms, revive_queue, popped.kind, broker_name,
            popped.queue_id, offset,
        )  # fmt: skip
        try:
            yield _renamed(record, request.topic, handle.encode().encode())
        except RecordError:
            yield record  # The client sees the damage


def _renamed(record: Buffer, topic: str, handle: bytes) -> bytes:
    """Return a record with another topic and, as Apache's broker, with its receipt handle as a property.

    If its properties would become too long, the record is returned unchanged; the client then computes the
    handle from the response and the name of the retry topic. Raises RecordError.
    """
    _, _, body_end, _, topic_end = record_parts(record, 0)
    properties = put(bytes(record[topic_end + 2 :]), POP_CK, handle)
    if len(properties) > MAX_PROPERTIES:
        return bytes(record)
    name, magic = topic_part(topic)
    rest = b"".join((record[START.size : body_end], name, LENGTH.pack(len(properties)), properties))
    return START.pack(START.size + len(rest), magic) + rest


def _order_counts(found: Iterable[PoppedQueue]) -> Mapping[CountKey, int]:
    """Return how often each message was delivered before, and for older clients the minimum of each queue."""
    counts: dict[CountKey, int] = {}
    for each in found:
        for offset, count in zip(each.offsets, each.deliveries, strict=True):
            if count:
                counts[each.kind, each.queue_id, offset] = count
        counts[each.kind, each.queue_id, None] = min(each.deliveries, default=0)
    return counts
