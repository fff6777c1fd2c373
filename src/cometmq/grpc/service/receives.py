"""The RPCs of consumers about messages: receive, acknowledge, change a lease, give up.

A long poll is a pop that the broker holds. If its call ends before the broker responds, the pop is withdrawn.
If the broker has leased messages meanwhile, they are given back immediately, without counting a delivery.

As at Apache's proxy, a message whose tag only has the same hash as a subscribed one is acknowledged and not
delivered, and a message of an ordered group that was delivered too often becomes a dead letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cometmq import logs
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import RemotingError
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import Code, FilterType
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service import renewals
from cometmq.grpc.service.clients import Client, Clients
from cometmq.grpc.service.delivered import fill_message, popped_messages
from cometmq.grpc.service.outcomes import Responder, Result, checked, failure, set_status, status
from cometmq.grpc.service.renewals import Renewals, Renewed
from cometmq.grpc.service.traces import Traces
from cometmq.periodic import Tasks
from cometmq.protocol import headers
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import (
    MAX_GROUP_LENGTH,
    MAX_TOPIC_LENGTH,
    RequestCode,
    ResponseCode,
    is_legal_name,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.lite import bound_topic, is_lite_topic
from cometmq.protocol.pop import PopFormatError, ReceiptHandle
from cometmq.protocol.record.one import body_crc
from cometmq.protocol.traces import ConsumeCode

log = logs.logger(__name__)

H = TypeVar("H", bound=headers.AckMessageRequestHeader)

MAX_BATCH = 32
MIN_INVISIBLE_MS, MAX_INVISIBLE_MS = 10_000, 12 * 3_600_000
MIN_POLL_MS, MAX_POLL_MS = 0, 20_000
POLL_MARGIN_MS = 500
"""How long before the deadline of its call a long poll ends."""
MAX_ACKS = 1024
MAX_POLLS = 256
"""The maximum number of receives of one client under way, with those that it has cancelled."""
NOTHING = (ResponseCode.POLLING_TIMEOUT, ResponseCode.NO_MESSAGE, ResponseCode.PULL_NOT_FOUND)


@dataclass(eq=False)
class Receives:
    """Handles the calls of consumers. The receipt handles contain the name of the broker."""

    clients: Clients
    groups: SubscriptionGroups
    renewals: Renewals
    broker_name: str
    traces: Traces
    _log_limit: logs.LogLimiter = field(default_factory=logs.LogLimiter)
    _tasks: Tasks = field(default_factory=Tasks)

    # -- receive

    def receive_message(self, call: Call, request: Any) -> None:
        """Lease messages to a consumer, now or when some arrive."""
        client = self.clients.find(call)
        group, topic = request.group.name, request.message_queue.topic.name
        check_names(group, topic)
        if len(client.polls) >= MAX_POLLS:
            raise ServiceError(Code.TOO_MANY_REQUESTS, f"the client has {MAX_POLLS} receives under way")
        config = self.groups.table.get(group) or SubscriptionGroupConfig(group_name=group)
        invisible_ms = renewals.RENEWED_MS if request.auto_renew else _invisible_ms(request)
        poll_ms = self._poll_ms(call, request)
        frame = _pop_frame(client, request, config, invisible_ms, poll_ms)
        outcome = client.asked(frame, poll_ms / 1000 + self.clients.call_timeout_s)
        call.on_cancel = partial(client.withdraw, frame.opaque)

        def done(outcome: asyncio.Future[Frame]) -> None:
            try:
                self._deliver(call, client, request, config, invisible_ms, outcome)
            except Exception as error:  # The response is damaged, or a value does not fit into a message
                self._finish(call, ServiceError(Code.INTERNAL_SERVER_ERROR, str(error)))
                if self._log_limit.allows():
                    log.error("messages of %s could not be delivered to %s", topic, group, exc_info=error)
            finally:
                client.poll_ended(frame.opaque)

        client.polls.add(frame.opaque)
        outcome.add_done_callback(done)

    def _poll_ms(self, call: Call, request: Any) -> int:
        """Return how long the broker may hold a request, which is less than its client waits."""
        wanted = MAX_POLL_MS
        if request.HasField("long_polling_timeout"):
            wanted = request.long_polling_timeout.ToMilliseconds()
        wanted = max(MIN_POLL_MS, min(wanted, MAX_POLL_MS))
        if call.deadline is not None:
            left = int((call.deadline - self.clients.now()) * 1000) - POLL_MARGIN_MS
            wanted = max(0, min(wanted, left))
        return wanted

    def _deliver(
        self,
        call: Call,
        client: Client,
        request: Any,
        config: SubscriptionGroupConfig,
        invisible_ms: int,
        outcome: asyncio.Future[Frame],
    ) -> None:
        """Send the messages of a pop's response, or give them back if the call or the client has ended."""
        if client.ended:
            # A client that ends waits for the end of its receives. It takes this status without an error.
            self._finish(call, ServiceError(Code.MESSAGE_NOT_FOUND, "the client has ended"))
        if outcome.cancelled() or (error := outcome.exception()) is not None:
            problem = "the broker has not responded" if outcome.cancelled() else str(error)
            self._finish(call, ServiceError(Code.INTERNAL_SERVER_ERROR, problem))
            return
        response = outcome.result()
        if response.code in NOTHING:
            self._finish(call, ServiceError(Code.MESSAGE_NOT_FOUND, "no message has arrived"))
            return
        if response.code:
            self._finish(call, failure(response))
            return
        now, m, tags, leases = (
            self.clients.now(),
            messages(),
            _tags(request.filter_expression),
            list[Renewed](),
        )
        group, topic = request.group.name, request.message_queue.topic.name
        sent = [m.ReceiveMessageResponse(status=status(Code.OK)).SerializeToString()]
        for popped in popped_messages(response, topic, self.broker_name):
            lease = Renewed(group, topic, popped.handle, now, popped.deliveries, popped.lite_topic)
            if call.ended:
                self.renewals.change(lease, 0, counts=False)
                continue
            if tags is not None and popped.message.tags not in tags:
                self.renewals.ack(lease)
                continue
            # In other groups, the broker moves the dead letters when leases expire.
            if config.consume_message_orderly and popped.deliveries > config.retry_max_times:
                self._tasks.start(self._bury(client, lease, popped.message.msg_id))
                continue
            if body_crc(popped.message.body) != popped.message.body_crc:
                # Its lease expires. The pulls of a client leave out such a message, too.
                log.error("message %s of %s is damaged, not delivered", popped.message.msg_id, topic)
                continue
            delivered = m.ReceiveMessageResponse()
            fill_message(delivered.message, popped, topic, invisible_ms)
            sent.append(delivered.SerializeToString())
            leases.append(lease)
            self.traces.delivered(client, group, topic, popped)
        if not leases:
            self._finish(call, ServiceError(Code.MESSAGE_NOT_FOUND, "no message has arrived"))
            return
        delivered = m.ReceiveMessageResponse()
        delivered.delivery_timestamp.GetCurrentTime()
        call.send(*sent, delivered.SerializeToString())
        if request.auto_renew:
            for lease in leases:
                renewals.keep(client, lease)
        call.on_lost = partial(self._give_back, client, leases)
        call.finish()

    def _give_back(self, client: Client, leases: list[Renewed]) -> None:
        """Give messages back, because their client has cancelled its call while they waited to be sent."""
        for lease in leases:
            renewals.forget(client, lease.handle.encode())
            self.renewals.change(lease, 0, counts=False)

    def _finish(self, call: Call, error: ServiceError) -> None:
        """End a call with a status and no message."""
        call.respond(messages().ReceiveMessageResponse(status=status(error.code, error.problem)))

    # -- leases

    def ack_message(self, call: Call, request: Any) -> Any:
        """Mark messages as consumed."""
        client = self.clients.find(call)
        entries = request.entries
        if not 0 < len(entries) <= MAX_ACKS:
            raise ServiceError(Code.BAD_REQUEST, f"entries: {len(entries)}, from 1 to {MAX_ACKS} are allowed")
        results: dict[int, Result] = {}

        def acked(number: int, lease: Renewed, outcome: Frame | RemotingError) -> Any:
            results[number] = self._acked(client, lease, entries[number], outcome)
            return _ack_response(entries, results) if len(results) == len(entries) else None

        for number, entry in enumerate(entries):
            try:
                lease = self._lease(request, entry.receipt_handle, entry.lite_topic)
            except ServiceError as error:
                results[number] = error.code, error.problem
            else:
                frame = self._ack_frame(client, lease, entry)
                client.ask(frame, Responder(call, partial(acked, number, lease)))
        return _ack_response(entries, results) if len(results) == len(entries) and not call.ended else None

    def _ack_frame(self, client: Client, lease: Renewed, entry: Any) -> Frame:
        """Return the request that ends a lease, which is not renewed any more."""
        renewals.forget(client, entry.receipt_handle)
        header = _about_lease(headers.AckMessageRequestHeader, lease, entry.receipt_handle)
        return client.frame(RequestCode.ACK_MESSAGE, header)

    def _acked(
        self,
        client: Client,
        lease: Renewed,
        entry: Any,
        outcome: Frame | RemotingError,
        code: ConsumeCode = ConsumeCode.SUCCESS,
    ) -> Result:
        """Return the result of an acknowledgement, for the broker's response or an error."""
        try:
            _check_lease(outcome)
        except ServiceError as error:
            if error.code == Code.INVALID_RECEIPT_HANDLE:
                self.traces.refused(client, lease, entry.message_id)
            return error.code, error.problem
        self.traces.consumed(client, lease, entry.message_id, code)
        return Code.OK, ""

    async def change_invisible_duration(self, call: Call, request: Any) -> Any:
        """Change when a lease expires. Its handle stays the same."""
        client = self.clients.find(call)
        lease = self._lease(request, request.receipt_handle, request.lite_topic)
        invisible_ms = request.invisible_duration.ToMilliseconds()
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            problem = f"invisible_duration: {invisible_ms} ms, from 0 to {MAX_INVISIBLE_MS} are allowed"
            raise ServiceError(Code.ILLEGAL_INVISIBLE_TIME, problem)
        renewed = renewals.forget(client, request.receipt_handle)
        header = _about_lease(
            headers.ChangeInvisibleTimeRequestHeader,
            lease,
            request.receipt_handle,
            invisible_time=invisible_ms,
            suspend=request.suspend or None,
        )
        try:
            _check_lease(await client.asked(client.frame(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)))
        except RemotingError as error:
            checked(error)
        if renewed:  # Only push consumers have such leases. They change them to give a message back.
            self.traces.consumed(client, lease, request.message_id, ConsumeCode.FAILED)
        return messages().ChangeInvisibleDurationResponse(
            status=status(Code.OK), receipt_handle=request.receipt_handle
        )

    async def forward_to_dead_letters(self, call: Call, request: Any) -> Any:
        """Move a message to the dead letters of its group, and acknowledge it."""
        client = self.clients.find(call)
        lease = self._lease(request, request.receipt_handle, request.lite_topic)
        await _send_back(client, lease, request.message_id)
        outcome: Frame | RemotingError
        try:
            outcome = await client.asked(self._ack_frame(client, lease, request))
        except RemotingError as error:
            outcome = error
        self._acked(client, lease, request, outcome, ConsumeCode.FAILED)
        return messages().ForwardMessageToDeadLetterQueueResponse(status=status(Code.OK))

    async def _bury(self, client: Client, lease: Renewed, message_id: str) -> None:
        """Move a message that was delivered too often to the dead letters. If it fails, the lease expires."""
        try:
            await _send_back(client, lease, message_id)
        except ServiceError as error:
            if self._log_limit.allows():
                log.error("a message of %s could not become a dead letter: %s", lease.topic, error)
        else:
            self.renewals.ack(lease)

    def _lease(self, request: Any, text: str, lite_topic: str) -> Renewed:
        """Return the lease that a request names. Raises ServiceError."""
        if lite_topic and not is_lite_topic(lite_topic):
            problem = f"lite_topic: {lite_topic[:80]!r} is not a valid name"
            raise ServiceError(Code.ILLEGAL_LITE_TOPIC, problem)
        check_names(request.group.name, request.topic.name)
        try:
            handle = ReceiptHandle.decode(text)
        except PopFormatError as error:
            raise ServiceError(Code.INVALID_RECEIPT_HANDLE, f"receipt_handle: {error}") from None
        if handle.broker_name != self.broker_name:
            problem = f"receipt_handle: it is of broker {handle.broker_name}, not {self.broker_name}"
            raise ServiceError(Code.INVALID_RECEIPT_HANDLE, problem)
        return Renewed(request.group.name, request.topic.name, handle, 0.0, 0, lite_topic)


def _pop_frame(
    client: Client, request: Any, config: SubscriptionGroupConfig, invisible_ms: int, poll_ms: int
) -> Frame:
    """Return the broker's request for a receive: a pop from lite topics, or an ordinary one."""
    group, topic = request.group.name, request.message_queue.topic.name
    count, attempt_id = max(1, min(request.batch_size, MAX_BATCH)), request.attempt_id or None
    ordered = bool(config.consume_message_orderly)
    if ordered and not client.settings:
        count = 1  # The client does not know yet that it must consume them one after the other
    # A group tells what its clients receive even if their settings are unknown after a restart.
    if client.is_lite or bound_topic(config.attributes) == topic:
        lite_header = headers.PopLiteMessageRequestHeader(
            client.client_id, group, topic, count, invisible_ms, poll_ms, 0, attempt_id
        )
        return client.frame(RequestCode.POP_LITE_MESSAGE, lite_header)
    expression = request.filter_expression
    header = headers.PopMessageRequestHeader(
        consumer_group=group,
        topic=topic,
        queue_id=-1,
        max_msg_nums=count,
        invisible_time=invisible_ms,
        poll_time=poll_ms,
        born_time=0,
        init_mode=1,
        exp_type="SQL92" if expression.type == FilterType.SQL else "TAG",
        exp=expression.expression or "*",
        order=ordered or None,
        attempt_id=attempt_id,
    )
    return client.frame(RequestCode.POP_MESSAGE, header)


def _tags(expression: Any) -> frozenset[str] | None:
    """Return the tags of a `FilterExpression`, or None if it selects all messages or is SQL92."""
    text = "" if expression.type == FilterType.SQL else expression.expression
    return None if text in ("", "*") else frozenset(map(str.strip, text.split("||")))


def _check_lease(outcome: Frame | RemotingError) -> None:
    """Check the outcome of a request about a lease. Raises ServiceError if it has failed.

    If the message's topic or queue no longer exists, neither does the lease. Clients repeat a request every
    second until it succeeds or is refused for its receipt handle.
    """
    try:
        checked(outcome)
    except ServiceError as error:
        if error.code in (Code.TOPIC_NOT_FOUND, Code.BAD_REQUEST):
            raise ServiceError(Code.INVALID_RECEIPT_HANDLE, error.problem) from None
        raise


def _ack_response(entries: Sequence[Any], results: Mapping[int, Result]) -> Any:
    """Return the response to acknowledgements. `results` has one of each entry."""
    response = messages().AckMessageResponse()
    for number, entry in enumerate(entries):
        found = response.entries.add()
        found.message_id = entry.message_id
        found.receipt_handle = entry.receipt_handle
        set_status(found.status, *results[number])
    same = len({code for code, _ in results.values()}) == 1
    set_status(response.status, *(results[0] if same else (Code.MULTIPLE_RESULTS,)))
    return response


def _about_lease(kind: type[H], lease: Renewed, receipt_handle: str, **more: Any) -> H:
    """Return the header of a request about a lease."""
    handle = lease.handle
    return kind(
        consumer_group=lease.group,
        topic=handle.kind.topic(lease.topic, lease.group),
        queue_id=handle.queue_id,
        extra_info=receipt_handle,
        offset=handle.offset or 0,
        lite_topic=lease.lite_topic or None,
        **more,
    )


async def _send_back(client: Client, lease: Renewed, message_id: str) -> None:
    """Store a copy of a message in the dead letters of its group. Raises ServiceError."""
    if lease.handle.commit_log_offset is None:
        raise ServiceError(Code.INVALID_RECEIPT_HANDLE, "receipt_handle: it names no log position")
    header = headers.ConsumerSendMsgBackRequestHeader(
        offset=lease.handle.commit_log_offset,
        group=lease.group,
        delay_level=-1,
        origin_msg_id=message_id,
        origin_topic=lease.topic,
        max_reconsume_times=0,
    )
    await client.send(client.frame(RequestCode.CONSUMER_SEND_MSG_BACK, header))


def _invisible_ms(request: Any) -> int:
    """Return the duration of the leases that a consumer requests. Raises ServiceError."""
    if not request.HasField("invisible_duration"):
        return renewals.RENEWED_MS
    wanted = int(request.invisible_duration.ToMilliseconds())
    if not MIN_INVISIBLE_MS <= wanted <= MAX_INVISIBLE_MS:
        problem = (
            f"invisible_duration: {wanted} ms, from {MIN_INVISIBLE_MS} to {MAX_INVISIBLE_MS} are allowed"
        )
        raise ServiceError(Code.ILLEGAL_INVISIBLE_TIME, problem)
    return wanted


def check_names(group: str, topic: str) -> None:
    """Raise ServiceError if the name of a group or topic is invalid: requests to the broker contain them."""
    if not is_legal_name(group, MAX_GROUP_LENGTH):
        raise ServiceError(Code.ILLEGAL_CONSUMER_GROUP, f"group: {group[:80]!r} is not a valid name")
    if not is_legal_name(topic, MAX_TOPIC_LENGTH):
        raise ServiceError(Code.ILLEGAL_TOPIC, f"topic: {topic[:80]!r} is not a valid name")
