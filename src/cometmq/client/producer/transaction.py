"""The transaction producer: consumers see its messages only if a local transaction succeeds.

    class Orders:
        async def execute_local_transaction(self, message, argument):
            await database.insert(argument, message.msg_id)
            return TransactionState.COMMIT

        async def check_local_transaction(self, message):
            known = await database.has(message.msg_id)
            return TransactionState.COMMIT if known else TransactionState.ROLLBACK

    async with TransactionProducer("orders", Orders(), topics=["Orders"]) as producer:
        result = await producer.send_in_transaction(Message("Orders", b"..."), order)

The broker first stores the message as a half message, which no consumer receives. Then the local transaction
runs, and the producer sends the state of the transaction to the broker in a oneway request. If that request
is lost or the state is UNKNOWN, the broker sends transaction checks to any producer of the group until it
receives COMMIT or ROLLBACK.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from cometmq import logs
from cometmq.client.cluster.hooks import EndingTransaction, notify_hooks
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.telemetry import spanned
from cometmq.client.cluster.workers import again_if_cancelled, call_user_function, cancel_all
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import Outgoing, prepare_half
from cometmq.client.producer.producer import COMPRESS_HERE, Producer, check_kind
from cometmq.errors import CometError, ConfigError
from cometmq.message import (
    Message,
    MessageExt,
    SendResult,
    SendStatus,
    TransactionSendResult,
    TransactionState,
    check_topic_name,
)
from cometmq.periodic import Tasks
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.layout import COMMITTED, ROLLBACK
from cometmq.remoting import Connection
from cometmq.text import printable

log = logs.logger("cometmq.client.producer")

State = TransactionState | None
_METHODS = ("execute_local_transaction", "check_local_transaction")
_ENDS = {TransactionState.COMMIT: COMMITTED, TransactionState.ROLLBACK: ROLLBACK, TransactionState.UNKNOWN: 0}


class TransactionListener(Protocol):
    """The user's functions that run and check local transactions.

    Each method may be async (it runs on the event loop) or plain (it runs in a thread). A result of None and
    an exception both count as UNKNOWN. In both methods `message` is the message as stored by the broker, and
    `message.msg_id` identifies the transaction.
    """

    def execute_local_transaction(self, message: MessageExt, argument: Any, /) -> Awaitable[State] | State:
        """Run the local transaction of a message.

        Args:
            message: The stored half message.
            argument: The argument of `send_in_transaction`.

        Returns:
            COMMIT: consumers receive the message. ROLLBACK: the message is dropped. UNKNOWN or None: the
                broker sends a transaction check later.
        """

    def check_local_transaction(self, message: MessageExt, /) -> Awaitable[State] | State:
        """Return the state of the local transaction of a message, in answer to a broker's transaction check.

        A broker checks each message whose transaction state it has not received. The message may have been
        sent by another producer of the group, or by a producer that was killed.

        Args:
            message: The stored half message.

        Returns:
            COMMIT if the transaction was committed. ROLLBACK if it was rolled back or does not exist.
            UNKNOWN while it is running.
        """


Check = tuple[Connection, CheckTransactionStateRequestHeader, MessageExt]
"""A transaction check of a broker, after the connection on which the check is answered."""


class TransactionProducer(Producer):
    """A producer of transactional messages, which `send_in_transaction` sends.

    Args:
        group: The name of the producer group.
        listener: Runs local transactions and answers the brokers' transaction checks.
        topics: The topics whose brokers may send transaction checks before the first send. A producer that
            replaces a killed producer of its group needs these topics.
        namesrv: The name servers, as in Producer.
        options: The settings of the producer. Default: ProducerOptions().
        client: A client instance to share. Default: the producer creates its own.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The name of the group or of a topic is illegal.
        ConfigError: The listener lacks a method, or a setting is invalid.
    """

    def __init__(
        self,
        group: str,
        listener: TransactionListener,
        *,
        topics: Iterable[str] = (),
        namesrv: str | Sequence[str] | None = None,
        options: ProducerOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        super().__init__(
            group, namesrv=namesrv, options=options, client=client, client_options=client_options
        )
        for name in _METHODS:
            if not callable(getattr(listener, name, None)):
                raise ConfigError("listener", repr(listener), f"an object with {' and '.join(_METHODS)}")
        self._topics = (topics,) if isinstance(topics, str) else tuple(topics)
        for topic in self._topics:
            check_topic_name(topic)
        self._listener = listener
        self._waiting: asyncio.Queue[Check] = asyncio.Queue(self.options.max_checks_waiting)
        self._workers = Tasks()
        self._threads: ThreadPoolExecutor | None = None

    # -- life

    async def _begin(self) -> None:
        client = await self._start_client()
        client.register_transactions(self.group, self)
        await super()._begin()
        for _ in range(self.options.checks_at_once):
            self._begin_worker()
        for topic in self._topics:
            client.refresh_soon(topic)

    def _begin_worker(self) -> None:
        if self._state in ("starting", "running"):
            task = self._workers.start(self._answer(), name=f"cometmq-check-{self.group}")
            again_if_cancelled(task, self._begin_worker)

    async def _end(self, *, drain: bool) -> None:
        if self._client is not None and self._client.transactions.get(self.group) is self:
            del self._client.transactions[self.group]
        await cancel_all(list(self._workers), "checks of transactions")
        try:
            await super()._end(drain=drain)
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    # -- sending

    @spanned
    async def send_in_transaction(
        self, message: Message, argument: object = None, *, timeout_s: float | None = None
    ) -> TransactionSendResult:
        """Send a half message, run the local transaction and send its state to the broker.

        If the half message is stored with a status other than SEND_OK, the listener is not called and the
        transaction is rolled back.

        Args:
            message: The message.
            argument: The argument of the listener's `execute_local_transaction`.
            timeout_s: The timeout of the send in seconds, without the local transaction. Default:
                `ProducerOptions.send_timeout_s`.

        Returns:
            The send result with the state of the transaction. `error` holds the exception if the local
                transaction raised one.

        Raises:
            CometError: The local transaction did not run, because the send failed with an error of `send`.
        """
        client = self._running()
        check_kind(message)
        group = client.namespace.wrap(self.group)
        if len(message.body) < COMPRESS_HERE:
            outgoing = prepare_half(message, self.options, client.keys, group)
        else:
            outgoing = await asyncio.to_thread(prepare_half, message, self.options, client.keys, group)
        self._under_way += 1  # `stop` waits until no transaction is under way
        try:
            sent = await self._send(outgoing, None, timeout_s)
            state: TransactionState = TransactionState.ROLLBACK
            error: BaseException | None = None
            begun = _as_stored(message, outgoing, sent)
            if sent.status is SendStatus.SEND_OK:
                state, error = await self._call_listener(
                    self._listener.execute_local_transaction, begun, argument
                )
            await self._send_state(begun, state, error, trace=sent.trace_on)
        finally:
            self._ended()
        fields = msgspec.structs.asdict(sent)
        fields["transaction_id"] = (
            sent.transaction_id or begun.msg_id
        )  # RocketMQ 4.9 returns no transaction id
        return TransactionSendResult(**fields, state=state, error=error)

    async def _send_state(
        self, begun: MessageExt, state: TransactionState, error: BaseException | None, *, trace: bool
    ) -> None:
        """Send the state in a oneway request. If it is lost, the broker sends a check later."""
        try:
            request = self._end_request(begun.msg_id, begun.queue_offset, begun.physical_offset, state)
            request.remark = _remark("executeLocalTransaction", error)
            addr = self._master_of(begun.queue)
            self._notify_hooks(begun, state, addr, from_check=False)
            connection = await self.client.remoting.connect(addr)
            connection.oneway(request)
            if trace:
                self._trace_end(begun, addr, state, from_check=False)
        except CometError as failure:
            log.warning(
                "transaction %s: its state %s was not sent, the broker will check it: %s",
                begun.msg_id, state.name, failure,
            )  # fmt: skip

    def _notify_hooks(
        self, message: MessageExt, state: TransactionState, addr: str, *, from_check: bool
    ) -> None:
        ending = EndingTransaction(self.group, message, state, addr, from_check)
        notify_hooks(self.options.end_transaction_hooks, "__call__", ending)

    def _trace_end(
        self, message: MessageExt, addr: str, state: TransactionState, *, from_check: bool
    ) -> None:
        traces = self.client.traces
        if traces is not None:
            traces.transaction_ended(self.group, message, addr, state.value, from_check=from_check)

    def _end_request(
        self, msg_id: str, offset: int, position: int, state: TransactionState, *, check: bool = False
    ) -> Frame:
        header = EndTransactionRequestHeader(
            producer_group=self.group,
            tran_state_table_offset=offset,
            commit_log_offset=position,
            commit_or_rollback=_ENDS[state],
            from_transaction_check=check,
            msg_id=msg_id,
            transaction_id=msg_id,
        )
        return Frame.request(RequestCode.END_TRANSACTION, header, oneway=True)

    # -- asking the listener

    async def _call_listener(
        self, method: Callable[..., Any], *given: object
    ) -> tuple[TransactionState, BaseException | None]:
        try:
            if self._threads is None:
                name = f"cometmq-{self.group}"
                self._threads = ThreadPoolExecutor(self.options.transaction_threads, name)
            state = await call_user_function(self._threads, method, *given)
            if state is None:
                return TransactionState.UNKNOWN, None
            if not isinstance(state, TransactionState):
                raise TypeError(f"{method.__name__} must return a TransactionState or None, not {state!r}")
            return state, None
        except Exception as error:
            log.warning(
                "%s of group %s failed, the transaction is UNKNOWN: %s",
                method.__name__, self.group, printable(repr(error)), exc_info=error,
            )  # fmt: skip
            return TransactionState.UNKNOWN, error

    # -- answering brokers (TransactionPeer)

    def topics(self) -> tuple[str, ...]:
        """Return the topics whose brokers may send transaction checks to this producer."""
        return self._topics

    def check(
        self, connection: Connection, asked: CheckTransactionStateRequestHeader, message: MessageExt
    ) -> None:
        """Queue a broker's transaction check for the listener. Drop it if too many are waiting."""
        try:
            self._waiting.put_nowait((connection, asked, message))
        except asyncio.QueueFull:
            log.warning(
                "group %s: %d transaction checks are waiting; the check of %s is dropped, and %s "
                "will send it again",
                self.group, self._waiting.qsize(), message.msg_id, connection.addr,
            )  # fmt: skip

    async def _answer(self) -> None:
        while True:
            connection, asked, message = await self._waiting.get()
            if connection.closed:
                continue  # the broker will send the check to another producer of the group
            state, error = await self._call_listener(self._listener.check_local_transaction, message)
            request = self._end_request(
                message.msg_id, asked.tran_state_table_offset, asked.commit_log_offset, state, check=True
            )
            request.remark = _remark("checkLocalTransaction", error)
            self._notify_hooks(message, state, connection.addr, from_check=True)
            try:
                connection.oneway(request)
                self._trace_end(message, connection.addr, state, from_check=True)
            except CometError as failure:
                log.warning(
                    "could not send the state of transaction %s to %s: %s",
                    message.msg_id,
                    connection.addr,
                    failure,
                )


def _as_stored(message: Message, outgoing: Outgoing, sent: SendResult) -> MessageExt:
    """Return the message as the broker has stored it."""
    place = decode_offset_id(sent.offset_msg_id)
    return MessageExt(
        message.topic,
        message.body,
        message.flag,
        decode_properties(outgoing.properties.encode()),
        queue_id=sent.queue.queue_id,
        queue_offset=sent.queue_offset,
        physical_offset=place.physical_offset,
        store_host=place.host,
        broker_name=sent.queue.broker_name,
    )


def _remark(where: str, error: BaseException | None) -> str | None:
    return None if error is None else printable(f"{where} exception: {error!r}", 1000)
