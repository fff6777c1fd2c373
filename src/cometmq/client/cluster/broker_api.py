"""The requests of clients to brokers. Each method raises BrokerError or RemotingError."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cometmq.client.cluster.decoding import MAX_BODY, Decoded, decode_messages, decode_one, decode_pulled
from cometmq.client.cluster.namespaces import Namespace
from cometmq.client.cluster.requests import (
    PULL_STATUS,
    broker_error,
    commit_request,
    committed_request,
    offset_in,
    queue_request,
    succeeded,
)
from cometmq.errors import BodyError
from cometmq.message import MessageExt, MessageQueue, PullResult, PullStatus, WaitingMessage
from cometmq.protocol.bodies import (
    Body,
    CheckClientRequestBody,
    ConsumerConnection,
    ConsumerList,
    HeartbeatData,
    KVTable,
    LockBatchBody,
    LockBatchResult,
    ResetOffsetBody,
    SubscriptionData,
)
from cometmq.protocol.bodies.admin import (
    ConsumerOffsetTable,
    HaRuntimeInfo,
    PurgedQueue,
    PurgeResult,
    RaftStatus,
)
from cometmq.protocol.codes import SCHEDULE_TOPIC, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumerGroupRequestHeader,
    ConsumerSendMsgBackRequestHeader,
    CreateTopicRequestHeader,
    DeleteTopicRequestHeader,
    GetEarliestMsgStoretimeResponseHeader,
    ListTimersRequestHeader,
    ListTimersResponseHeader,
    OffsetResponseHeader,
    PullMessageResponseHeader,
    QueryMessageRequestHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    RegisterMessageFilterClassRequestHeader,
    ResetOffsetRequestHeader,
    SearchOffsetRequestHeader,
    UnregisterClientRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.protocol.headers.admin import (
    AddBrokerHeader,
    ChangeRaftGroupHeader,
    PurgeTopicRequestHeader,
    RemoveBrokerHeader,
    ResetMasterFlushOffsetHeader,
)
from cometmq.protocol.properties.values import REAL_TOPIC, TIMER_OUT_MS, UNIQ_KEY
from cometmq.protocol.timers import RecallHandle
from cometmq.remoting import RemotingClient
from cometmq.text import printable

B = TypeVar("B", bound=Body)

MAX_MEMBERS = 100_000
"""Maximum number of members of a group. This maximum limits the duration of a rebalance to about 0.1 s."""
_PULL_S = 10.0


@dataclass(eq=False)
class Calls:
    """The base class of BrokerApi and NamesrvApi. `timeout_s` is the default request timeout in seconds."""

    remoting: RemotingClient
    timeout_s: float = 3.0

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
        """Return the answer to a request. Raises BrokerError unless its code is SUCCESS, or RemotingError."""
        answer = await self.ask(addr, Frame.request(code, header, body), timeout_s)
        return succeeded(answer, addr, topic, key)

    async def fetch(
        self,
        addr: str,
        code: RequestCode,
        body: type[B],
        header: Any = None,
        *,
        timeout_s: float | None = None,
        topic: str = "",
    ) -> B:
        """Return the body of the answer to a request. Raises BodyError and the errors of `call`."""
        return body.decode((await self.call(addr, code, header, timeout_s=timeout_s, topic=topic)).body)

    async def ask(self, addr: str, request: Frame, timeout_s: float | None = None) -> Frame:
        """Return the answer to a request, whatever the answer's response code."""
        return await self.remoting.call(addr, request, self.timeout_s if timeout_s is None else timeout_s)


@dataclass(eq=False)
class BrokerApi(Calls):
    """The requests of a client to a broker, one method each. Names in answers have no namespace."""

    namespace: Namespace = field(default_factory=Namespace)

    # -- reading

    async def pull(
        self,
        addr: str,
        queue: MessageQueue,
        request: Frame,
        timeout_s: float | None = None,
        max_body: int = MAX_BODY,
    ) -> PullResult:
        """Send a `pull_request` for a queue and return its result.

        The broker filters tags by their hash only, so the caller must compare the tags of the messages.

        Args:
            addr: The broker.
            queue: The queue.
            request: The request.
            timeout_s: The timeout in seconds, more than the request's `suspend_s`. Default: at least 10 s,
                for slow disks.
            max_body: The maximum size of a decompressed body in bytes. A larger one stays compressed.

        Raises:
            BrokerError: The broker refused the pull: the code of its answer corresponds to no PullStatus.
        """
        answer = await self.ask(
            addr, request, max(self.timeout_s, _PULL_S) if timeout_s is None else timeout_s
        )
        status = PULL_STATUS.get(answer.code)
        if status is None:
            raise broker_error(answer, addr, queue.topic)
        header = answer.header(PullMessageResponseHeader)
        if status is PullStatus.FOUND:
            found = decode_pulled(answer.body, queue.broker_name, max_body)
            self.namespace.unwrap_messages(found.messages)
        else:
            found = Decoded([], [], [], None)
        return PullResult(
            status=status,
            next_begin_offset=header.next_begin_offset if found.left_at is None else found.left_at,
            min_offset=header.min_offset,
            max_offset=header.max_offset,
            messages=found.messages,
            damaged=found.damaged,
            oversized=found.oversized,
            suggest_which_broker_id=header.suggest_which_broker_id,
        )

    async def upload_filter_class(self, addr: str, group: str, topic: str, name: str, source: str) -> None:
        """Upload the filter class of a group and topic to a filter server."""
        body = source.encode("utf-8", "replace")
        header = RegisterMessageFilterClassRequestHeader(
            consumer_group=group, topic=topic, class_name=name, class_crc=zlib.crc32(body) & 0x7FFFFFFF
        )
        code = RequestCode.REGISTER_MESSAGE_FILTER_CLASS
        await self.call(addr, code, header, body, timeout_s=max(self.timeout_s, _PULL_S), topic=topic)

    async def view_message(self, addr: str, physical_offset: int, broker_name: str = "") -> MessageExt:
        """Return the message at a position of the commit log. Raises RecordError if its body is damaged."""
        header = ViewMessageRequestHeader(offset=physical_offset)
        answer = await self.call(addr, RequestCode.VIEW_MESSAGE_BY_ID, header)
        message = decode_one(answer.body, broker_name)
        self.namespace.unwrap_messages([message])
        return message

    async def query_message(
        self,
        addr: str,
        topic: str,
        key: str,
        *,
        max_count: int = 64,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        unique_key: bool = False,
        broker_name: str = "",
    ) -> list[MessageExt]:
        """Return messages by key or unique key. Callers compare the keys: the index stores hashes."""
        header = QueryMessageRequestHeader(
            topic=topic,
            key=key,
            max_num=max_count,
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            unique_key_query=unique_key,
        )
        request = Frame.request(RequestCode.QUERY_MESSAGE, header)
        answer = await self.ask(addr, request, max(self.timeout_s, 6.0))
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        messages = decode_messages(succeeded(answer, addr, topic, key).body, broker_name, [])
        self.namespace.unwrap_messages(messages)
        return messages

    # -- offsets of queues

    async def max_offset(self, addr: str, queue: MessageQueue) -> int:
        """Return the offset that the next message will get, 0 for a queue that the broker does not have."""
        return offset_in(await self.ask(addr, queue_request(RequestCode.GET_MAX_OFFSET, queue)), addr, queue)

    async def min_offset(self, addr: str, queue: MessageQueue) -> int:
        """Return the queue's minimum offset: the offset of the first message that is still stored."""
        return offset_in(await self.ask(addr, queue_request(RequestCode.GET_MIN_OFFSET, queue)), addr, queue)

    async def offset_by_time(self, addr: str, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of a queue at a store time (ms since 1970).

        Brokers of 4.9 return the offset of the nearest message, brokers of 5.x that of the first message that
        is not older.
        """
        header = SearchOffsetRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms, bname=queue.broker_name
        )
        answer = await self.call(addr, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, topic=queue.topic)
        return answer.header(OffsetResponseHeader).offset

    async def earliest_store_time(self, addr: str, queue: MessageQueue) -> int:
        """Return the store time of the queue's first message in ms, -1 for an empty queue."""
        request = queue_request(RequestCode.GET_EARLIEST_MSG_STORETIME, queue)
        answer = succeeded(await self.ask(addr, request), addr, queue.topic)
        return answer.header(GetEarliestMsgStoretimeResponseHeader).timestamp

    # -- a group's offsets

    async def consumer_offset(
        self, addr: str, group: str, queue: MessageQueue, *, exact: bool = False
    ) -> int | None:
        """Return the group's consumer offset in a queue, or None if the group has no offset there.

        Every failure raises an exception, because a failure reported as None would make the caller skip
        messages.

        Args:
            addr: The broker.
            group: The group.
            queue: The queue.
            exact: Distinguish "no offset" from 0. Otherwise a broker that still has the queue's first
                messages answers 0 for an unknown group.
        """
        request = committed_request(group, queue, set_zero_if_not_found=False if exact else None)
        answer = await self.ask(addr, request, max(self.timeout_s, 5.0))
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        offset = offset_in(answer, addr, queue)
        if exact and offset == 0 and not await self._stores_offset(addr, group, queue):
            return None
        return offset

    async def _stores_offset(self, addr: str, group: str, queue: MessageQueue) -> bool:
        """Return whether the group has a stored offset, after a broker has answered that its offset is 0.

        A 4.9 broker also answers 0 for a group without an offset, so the broker's table of all offsets is
        searched. If the broker refuses access to the table (NO_PERMISSION), it is newer than 4.9. A newer
        broker answers 0 only for a stored offset, so the result is True.
        """
        answer = await self.ask(addr, Frame.request(RequestCode.GET_ALL_CONSUMER_OFFSET), _PULL_S)
        if answer.code == ResponseCode.NO_PERMISSION:
            return True
        table = ConsumerOffsetTable.decode(succeeded(answer, addr, queue.topic).body).offset_table
        key = f"{self.namespace.wrap(queue.topic)}@{self.namespace.wrap(group)}"
        return queue.queue_id in table.get(key, {})

    async def update_consumer_offset(self, addr: str, group: str, queue: MessageQueue, offset: int) -> None:
        """Store a group's offset and wait for the broker's confirmation. Apache's client does not wait."""
        answer = await self.ask(addr, commit_request(group, queue, offset), max(self.timeout_s, 5.0))
        succeeded(answer, addr, queue.topic)

    async def reset_offset(
        self, addr: str, header: ResetOffsetRequestHeader, *, in_cpp_form: bool, timeout_s: float
    ) -> dict[MessageQueue, int]:
        """Request a broker to reset a group's offsets, which its members apply, and return the new offsets.

        Raises BrokerError with CONSUMER_NOT_ONLINE if no member is connected.
        """
        request = Frame.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        if in_cpp_form:
            request.language = "CPP"
        answer = succeeded(await self.ask(addr, request, timeout_s), addr, header.topic)
        return dict(ResetOffsetBody.decode(answer.body).offset_table)

    # -- groups and their members

    async def heartbeat(self, addr: str, data: HeartbeatData) -> int:
        """Send a heartbeat and return the broker's version number."""
        answer = await self.call(addr, RequestCode.HEART_BEAT, body=data.encode())
        return answer.version

    async def unregister_client(
        self, addr: str, client_id: str, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Notify the broker that a client has left its groups."""
        header = UnregisterClientRequestHeader(
            client_id=client_id, producer_group=producer_group, consumer_group=consumer_group
        )
        await self.call(addr, RequestCode.UNREGISTER_CLIENT, header)

    async def consumer_ids(self, addr: str, group: str) -> list[str]:
        """Return the client ids of the members. Raises BrokerError with SYSTEM_ERROR if there are none."""
        header = ConsumerGroupRequestHeader(consumer_group=group)
        found = await self.fetch(addr, RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerList, header)
        members = found.consumer_id_list
        if len(members) > MAX_MEMBERS:
            problem = (
                f"group {printable(group)} has {len(members)} members, a client accepts {MAX_MEMBERS} at most"
            )
            raise BodyError("ConsumerList", problem, "consumerIdList")
        return list(members)

    async def consumer_connection(self, addr: str, group: str) -> ConsumerConnection:
        """Return the members of a group that are connected to one broker.

        Raises BrokerError with CONSUMER_NOT_ONLINE if no member is connected.
        """
        header = ConsumerGroupRequestHeader(consumer_group=group)
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        found = await self.fetch(addr, code, ConsumerConnection, header)
        for subscription in found.subscription_table.values():
            subscription.topic = self.namespace.unwrap(subscription.topic)
        for each in found.connection_set:
            if each.subscriptions is not None:
                each.subscriptions = {
                    self.namespace.unwrap(topic): what for topic, what in each.subscriptions.items()
                }
        return found

    async def check_client_config(
        self, addr: str, client_id: str, group: str, subscription: SubscriptionData
    ) -> None:
        """Compile an SQL92 subscription at the broker. Raises BrokerError with the broker's remark."""
        body = CheckClientRequestBody(client_id=client_id, group=group, subscription_data=subscription)
        await self.call(addr, RequestCode.CHECK_CLIENT_CONFIG, body=body.encode(), topic=subscription.topic)

    async def send_message_back(
        self,
        addr: str,
        message: MessageExt,
        group: str,
        *,
        delay_level: int = 0,
        max_reconsume_times: int = 16,
        timeout_s: float = 5.0,
    ) -> None:
        """Send a message back, so that the group consumes it again later.

        `delay_level` 0: the broker chooses the delay by the number of retries. Negative: dead-letter queue.
        """
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset,
            group=group,
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=max_reconsume_times,
            bname=message.broker_name,
        )
        await self.call(
            addr,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            header,
            topic=message.topic,
            key=message.msg_id,
            timeout_s=timeout_s,
        )

    async def lock_queues(
        self, addr: str, group: str, client_id: str, queues: Iterable[MessageQueue], *, timeout_s: float = 1.0
    ) -> set[MessageQueue]:
        """Request locks of queues for this client, and return the queues that are locked for it now."""
        body = LockBatchBody(consumer_group=group, client_id=client_id, mq_set=list(queues))
        answer = await self.call(addr, RequestCode.LOCK_BATCH_MQ, body=body.encode(), timeout_s=timeout_s)
        return {
            self.namespace.unwrap_queue(each) for each in LockBatchResult.decode(answer.body).lock_ok_mq_set
        }

    async def unlock_queues(
        self, addr: str, group: str, client_id: str, queues: Iterable[MessageQueue]
    ) -> None:
        """Release this client's locks of queues."""
        body = LockBatchBody(consumer_group=group, client_id=client_id, mq_set=list(queues))
        await self.call(addr, RequestCode.UNLOCK_BATCH_MQ, body=body.encode())

    # -- topics and the broker itself

    async def create_topic(
        self,
        addr: str,
        topic: str,
        *,
        read_queue_nums: int = 8,
        write_queue_nums: int = 8,
        perm: int = 6,
        topic_sys_flag: int = 0,
        order: bool = False,
        attributes: str | None = None,
    ) -> None:
        """Create or change a topic on this broker, which registers it at its name servers immediately."""
        header = CreateTopicRequestHeader(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=read_queue_nums,
            write_queue_nums=write_queue_nums,
            perm=perm,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=topic_sys_flag,
            order=order,
            attributes=attributes,
        )
        await self.call(addr, RequestCode.UPDATE_AND_CREATE_TOPIC, header, topic=topic)

    async def purge_topic(
        self,
        addr: str,
        topic: str,
        *,
        queue_id: int | None = None,
        before_ms: int | None = None,
        execute: bool = False,
    ) -> list[PurgedQueue]:
        """Hide a topic's messages on a CometMQ broker. Without `execute`, only return what would be."""
        header = PurgeTopicRequestHeader(topic=topic, queue_id=queue_id, before=before_ms, execute=execute)
        return (await self.fetch(addr, RequestCode.PURGE_TOPIC, PurgeResult, header, topic=topic)).queues

    async def recall(self, addr: str, group: str, topic: str, recall_handle: str) -> str:
        """Cancel the delivery of a waiting timer message and return its unique key."""
        header = RecallMessageRequestHeader(topic=topic, recall_handle=recall_handle, producer_group=group)
        answer = await self.call(addr, RequestCode.RECALL_MESSAGE, header, topic=topic)
        return answer.header(RecallMessageResponseHeader).msg_id

    async def timers(
        self, addr: str, broker_name: str, wanted: ListTimersRequestHeader
    ) -> tuple[list[WaitingMessage], ListTimersResponseHeader]:
        """Return a page of the timer messages waiting on a CometMQ broker, and the next page's start."""
        answer = await self.call(addr, RequestCode.LIST_TIMERS, wanted)
        header = answer.header(ListTimersResponseHeader)
        times = [int(text) for text in header.deliver_at.split(",") if text.isdecimal() and len(text) <= 18]
        messages = decode_messages(answer.body, broker_name, [])
        return [_waiting(message, at) for message, at in zip(messages, times, strict=False)], header

    async def raft_status(self, addr: str) -> RaftStatus:
        """Return the state of a raft group as one member reports it."""
        return await self.fetch(addr, RequestCode.GET_RAFT_STATUS, RaftStatus)

    async def change_raft_group(self, addr: str, action: str, member: str) -> None:
        """Change a raft group at its leader. `action` is transfer, addLearner, promote or remove."""
        await self.call(
            addr, RequestCode.CHANGE_RAFT_GROUP, ChangeRaftGroupHeader(action=action, member=member)
        )

    async def ha_status(self, addr: str) -> HaRuntimeInfo:
        """Return a master's slaves or a slave's master, each with the progress of the replication."""
        return await self.fetch(addr, RequestCode.GET_BROKER_HA_STATUS, HaRuntimeInfo)

    async def reset_master_flush_offset(self, addr: str, offset: int) -> None:
        """Set the value that a slave has recorded as its master's flush offset."""
        header = ResetMasterFlushOffsetHeader(master_flush_offset=offset)
        await self.call(addr, RequestCode.RESET_MASTER_FLUSH_OFFSET, header)

    async def add_broker(self, container: str, config_path: str) -> None:
        """Add a broker to a broker container of 5.x."""
        await self.call(container, RequestCode.ADD_BROKER, AddBrokerHeader(config_path=config_path))

    async def remove_broker(self, container: str, header: RemoveBrokerHeader) -> None:
        """Remove a broker from a broker container of 5.x."""
        await self.call(container, RequestCode.REMOVE_BROKER, header)

    async def delete_topic(self, addr: str, topic: str) -> None:
        """Delete a topic on this broker. To delete it at the name servers, send them separate requests."""
        await self.call(
            addr, RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequestHeader(topic=topic), topic=topic
        )

    async def runtime_info(self, addr: str) -> dict[str, str]:
        """Return the runtime information of a broker, under RocketMQ's names."""
        return dict((await self.fetch(addr, RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)).table)


def _waiting(message: MessageExt, deliver_at_ms: int) -> WaitingMessage:
    properties = message.properties
    topic, key = properties.get(REAL_TOPIC, ""), properties.get(UNIQ_KEY)
    if message.topic == SCHEDULE_TOPIC:
        return WaitingMessage(message, topic, deliver_at_ms, None, message.queue_id + 1)
    text = properties.get(TIMER_OUT_MS, "")
    out_ms = int(text) if text.isdecimal() and len(text) <= 18 else 0
    handle = RecallHandle(topic, message.broker_name, out_ms + 1, key).encode() if key else None
    return WaitingMessage(message, topic, deliver_at_ms, handle)
