"""The remoting requests about lite topics and their subscriptions, and about leases of all messages."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.base.times import mono_ms
from cometmq.broker.lite.pops import LitePop
from cometmq.broker.lite.service import LiteService
from cometmq.broker.pop.checks import PopChecks, checked_attempt_id
from cometmq.broker.pop.leases import QueueKey
from cometmq.broker.pop.polls import FOUND
from cometmq.broker.pop.pops import Pops
from cometmq.broker.pop.requests import PopProcessor, response_buffers
from cometmq.errors import BodyError, CommandError
from cometmq.protocol import headers, lite
from cometmq.protocol.bodies import LiteSubscription, LiteSubscriptionCtlRequestBody, SubscriptionGroupConfig
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.pop import ORDERED_REVIVE_QUEUE, ReceiptHandle
from cometmq.remoting import Connection

MAX_ENTRIES = 64
"""The maximum number of entries in one request about subscriptions."""
MAX_CLIENT_ID_LENGTH = 512
LEASE_ENDED = "the message is not leased under this handle: it was acked before, or its lease has expired"


@dataclass(eq=False)
class LiteProcessor:
    """Handles the requests about lite topics, and those about leases of messages of all topics."""

    service: LiteService
    pops: PopProcessor

    def __post_init__(self) -> None:
        self.checks: PopChecks = self.pops.checks

    # -- pops

    @handles(RequestCode.POP_LITE_MESSAGE)
    def pop_lite_message(self, connection: Connection, frame: Frame) -> None:
        """Lease messages of the sender's lite topics, or hold the request until there are some."""
        header = frame.header(headers.PopLiteMessageRequestHeader)
        self.checks.check_numbers(header.max_msg_num, header.invisible_time)
        settings = self._check(header.consumer_group, header.topic)

        self.service.pops.serve(
            LitePop(
                owner=connection,
                opaque=frame.opaque,
                client_id=_client_id(header.client_id),
                group=header.consumer_group,
                parent=header.topic,
                count=header.max_msg_num,
                per_topic=header.max_msg_num if settings.consume_message_orderly else 1,
                invisible_ms=header.invisible_time,
                poll_ms=header.poll_time,
                attempt_id=checked_attempt_id(header.attempt_id),
                answer=_answer,
                account=self.service.rates.account_of(frame),
            )
        )

    def _check(self, group: str, topic: str) -> SubscriptionGroupConfig:
        """Check a group and its parent topic. Return the group. Raises CommandError."""
        settings = self.checks.check(group, topic, -1)
        config = self.service.tables.topics.get(topic)
        if config is None or not lite.is_lite_parent(config.attributes):
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"the topic [{topic}] message type not match: its attribute message.type must be LITE",
            )
        if lite.bound_topic(settings.attributes) != topic:
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"subscription bind topic not match, {group}: its attribute lite.bind.topic must be {topic}",
            )
        self.service.check_ready(topic)
        return settings

    @handles(RequestCode.WITHDRAW_POP)
    def withdraw_pop(self, connection: Connection, frame: Frame) -> Frame:
        """Answer a parked pop of the same connection, because its sender waits no longer."""
        for service in (self.service, self.pops.service):
            service.pops.withdraw(connection, frame.header(headers.WithdrawPopRequestHeader).request)
        return frame.response()

    # -- subscriptions

    @handles(RequestCode.LITE_SUBSCRIPTION_CTL)
    def lite_subscription_ctl(self, connection: Connection, frame: Frame) -> Frame:
        """Change the lite topics to which clients are subscribed."""
        try:
            entries = LiteSubscriptionCtlRequestBody.decode(frame.body).subscription_set if frame.body else []
        except BodyError as error:
            raise CommandError.failed(str(error)) from error
        if not 0 < len(entries) <= MAX_ENTRIES:
            raise CommandError(
                ResponseCode.ILLEGAL_OPERATION,
                f"subscriptionSet has {len(entries)} entries, from 1 to {MAX_ENTRIES} are allowed",
            )
        for entry in entries:
            self._change(connection, entry, frame.version)
        return frame.response()

    def _change(self, connection: Connection, entry: LiteSubscription, version: int) -> None:
        group, topic = check_group(entry.group, version), check_topic(entry.topic, version)
        client_id, service = _client_id(entry.client_id), self.service
        known = service.subscriptions.find(client_id, group)
        lmqs = [lite.lmq_name(topic, name) for name in dict.fromkeys(entry.lite_topic_set)]
        if entry.action in ("COMPLETE_REMOVE", "PARTIAL_REMOVE"):
            if known is not None and entry.action == "COMPLETE_REMOVE":
                service.unsubscribe(known, list(known.lmqs))
            elif known is not None:
                service.unsubscribe(known, lmqs, service.tables.groups.table.get(group))
            return
        if entry.action not in ("PARTIAL_ADD", "COMPLETE_ADD"):
            raise CommandError(ResponseCode.ILLEGAL_OPERATION, f"action {entry.action[:40]!r} is unknown")
        for name in entry.lite_topic_set:
            if not lite.is_lite_topic(name):
                raise CommandError(
                    ResponseCode.INVALID_PARAMETER,
                    f"liteTopicSet: {name[:80]!r} is not the name of a lite topic",
                )
        settings = self._check(group, topic)
        complete = entry.action == "COMPLETE_ADD"
        if lite.WILDCARD in (settings.attributes or {}):
            if not complete:
                raise CommandError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"group[{group}] receives from all lite topics of {topic}: it has {lite.WILDCARD}",
                )
            lmqs = [lite.all_of(topic)]
        if not lmqs:
            if known is not None and complete:
                service.unsubscribe(known, list(known.lmqs))
            return
        if known is not None and known.parent != topic:  # The group has been bound to another topic
            service.unsubscribe(known, list(known.lmqs))
        subscriber = service.subscriptions.enter(client_id, group, topic, mono_ms(service.clock))
        service.subscribe(
            subscriber, lmqs, settings, connection, complete=complete, offset=entry.offset_option
        )

    # -- acks and changes of leases

    @handles(RequestCode.ACK_MESSAGE)
    def ack_message(self, _connection: Connection, frame: Frame) -> Frame:
        """Mark a leased message as consumed."""
        header = frame.header(headers.AckMessageRequestHeader)
        server, key, handle = self._lease(header)
        if header.lite_topic:
            end = self.service.queues.end(key[1])
            if not 0 <= header.offset < end:
                raise CommandError(
                    ResponseCode.NO_MESSAGE, f"offset is illegal, commit:{header.offset}, store:0~{end}"
                )
        if not server.ack(key, header.offset, handle.pop_time_ms):
            raise CommandError(ResponseCode.NO_MESSAGE, LEASE_ENDED)
        return frame.response()

    @handles(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
    def change_message_invisible_time(self, _connection: Connection, frame: Frame) -> Frame:
        """Change when a lease expires. The message's handle, and any older one, stays valid."""
        header = frame.header(headers.ChangeInvisibleTimeRequestHeader)
        self.checks.check_numbers(1, header.invisible_time)
        server, key, handle = self._lease(header)
        pop_ms, invisible_ms = handle.pop_time_ms, header.invisible_time
        if not server.renew(key, header.offset, pop_ms, invisible_ms, counts=not header.suspend):
            raise CommandError(ResponseCode.NO_MESSAGE, LEASE_ENDED)
        until_ms = self.service.clock.time_ms() + invisible_ms
        return frame.response(
            header=headers.ChangeInvisibleTimeResponseHeader(
                pop_time=pop_ms, invisible_time=max(until_ms - pop_ms, 0), revive_qid=handle.revive_queue_id
            )
        )

    def _lease(
        self, header: headers.AckMessageRequestHeader
    ) -> tuple[Pops | LiteService, QueueKey, ReceiptHandle]:
        """Return the server of a leased message, its queue, and its receipt handle. Raises CommandError."""
        group, topic = header.consumer_group, header.topic
        if not header.lite_topic:
            self.checks.check_message(topic, header.queue_id, header.offset)
            key = group, topic, header.queue_id
            return self.pops.service.pops, key, self.pops.decoded_handle(header.extra_info)
        self.checks.check_master()
        config = self.service.tables.topics.existing(topic)
        if not lite.is_lite_parent(config.attributes):
            # 5.x clients repeat an ack until it succeeds or its lease has ended.
            raise CommandError(ResponseCode.NO_MESSAGE, f"topic[{topic}] has no lite topics")
        self.service.check_ready(topic)
        key = group, lite.lmq_name(topic, header.lite_topic), 0
        return self.service, key, self.pops.decoded_handle(header.extra_info)


def _client_id(text: str) -> str:
    if not 0 < len(text) <= MAX_CLIENT_ID_LENGTH:
        raise CommandError(
            ResponseCode.INVALID_PARAMETER,
            f"clientId has {len(text)} characters, from 1 to {MAX_CLIENT_ID_LENGTH} are allowed",
        )
    return text


def _answer(request: LitePop, code: int) -> None:
    found = request.found if code == FOUND else []
    counts = {"orderCountInfo": ";".join(str(each.deliveries) for each in found)}
    records = [each.record for each in found]
    for data in response_buffers(request, code, ORDERED_REVIVE_QUEUE, counts, records):
        request.owner.write(data)
