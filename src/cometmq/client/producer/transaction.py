"""The transaction producer: a message that consumers see if a local transaction succeeds, and never else.

    class Orders:
        async def execute_local_transaction(self, message, argument):
            await database.insert(argument, message.msg_id)
            return TransactionState.COMMIT

        async def check_local_transaction(self, message):
            known = await database.has(message.msg_id)
            return TransactionState.COMMIT if known else TransactionState.ROLLBACK

    async with TransactionProducer("orders", Orders(), topics=["Orders"]) as producer:
        result = await producer.send_in_transaction(Message("Orders", b"..."), order)

The message is stored first, where no consumer sees it; then the local transaction runs, and the broker is
told how it ended. That is sent without an answer: whatever is lost on the way, the broker asks later, any
producer of the group, and goes on asking while the answer is UNKNOWN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import msgspec

from cometmq import logs
from cometmq.client.cluster.hooks import EndingTransaction, tell
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
)
from cometmq.protocol.codes import RequestCode, check_topic_name
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.layout import COMMITTED, ROLLBACK
from cometmq.remoting import Connection
from cometmq.text import printable

__all__ = ["TransactionListener", "TransactionProducer"]

log = logs.logger("cometmq.client.producer")

State = TransactionState | None
_METHODS = ("execute_local_transaction", "check_local_transaction")
_ENDS = {TransactionState.COMMIT: COMMITTED, TransactionState.ROLLBACK: ROLLBACK, TransactionState.UNKNOWN: 0}


class TransactionListener(Protocol):
    """The user's side of transactions. Each method may be async (runs on the loop) or plain (runs in a
    thread). None and an exception count as UNKNOWN.

    `message` is the message as the broker has it; `message.msg_id` names the transaction, in both methods.
    """

    def execute_local_transaction(self, message: MessageExt, argument: Any, /) -> Awaitable[State] | State:
        """Do the local transaction; `argument` is that of `send_in_transaction`."""

    def check_local_transaction(self, message: MessageExt, /) -> Awaitable[State] | State:
        """Say how the local transaction of a message ended. The broker asks about messages of which it has
        not heard the end: also those of other producers of the group, and of those that were killed. A
        transaction that nobody knows was not done: ROLLBACK; one that is under way is UNKNOWN."""


class Check(NamedTuple):
    """A question of a broker, and where its answer goes."""

    connection: Connection
    asked: CheckTransactionStateRequestHeader
    message: MessageExt


class TransactionProducer(Producer):
    """A producer, with `send_in_transaction`.

    topics: those whose brokers may ask it from the start on, before it has sent anything; a producer that
    takes the place of one that was killed needs them.
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
        self._workers: set[asyncio.Task[None]] = set()
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
            task = asyncio.get_running_loop().create_task(self._answer(), name=f"cometmq-check-{self.group}")
            self._workers.add(task)
            task.add_done_callback(self._workers.discard)
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
        """Send, run the listener's local transaction, tell the broker how that ended.

        `timeout_s` is the budget of the send alone. A status other than SEND_OK rolls back without a call of
        the listener. Raises what `send` raises, and then nothing was begun; what the local transaction raises
        is in the result.
        """
        client = self._running()
        check_kind(message)
        group = client.namespace.wrap(self.group)
        if len(message.body) < COMPRESS_HERE:
            outgoing = prepare_half(message, self.options, client.keys, group)
        else:
            outgoing = await asyncio.to_thread(prepare_half, message, self.options, client.keys, group)
        self._under_way += 1  # a stop waits for it
        try:
            sent = await self._send(outgoing, None, timeout_s)
            state: TransactionState = TransactionState.ROLLBACK
            error: BaseException | None = None
            begun = _as_stored(message, outgoing, sent)
            if sent.status is SendStatus.SEND_OK:
                state, error = await self._ask(self._listener.execute_local_transaction, begun, argument)
            await self._tell(begun, state, error, trace=sent.trace_on)
        finally:
            self._ended()
        fields = msgspec.structs.asdict(sent)
        fields["transaction_id"] = sent.transaction_id or begun.msg_id  # 4.9's answer has none
        return TransactionSendResult(**fields, state=state, error=error)

    async def _tell(
        self, begun: MessageExt, state: TransactionState, error: BaseException | None, *, trace: bool
    ) -> None:
        """Without an answer: the broker asks about what it has not heard of."""
        try:
            request = self._end_request(begun.msg_id, begun.queue_offset, begun.physical_offset, state)
            request.remark = _remark("executeLocalTransaction", error)
            addr = self._master_of(begun.queue)
            self._tell_hooks(begun, state, addr, from_check=False)
            connection = await self.client.remoting.connect(addr)
            connection.oneway(request)
            if trace:
                self._trace_end(begun, addr, state, from_check=False)
        except CometError as failure:
            log.warning(
                "the broker was not told that transaction %s is %s, it will ask: %s",
                begun.msg_id, state.name, failure,
            )  # fmt: skip

    def _tell_hooks(
        self, message: MessageExt, state: TransactionState, addr: str, *, from_check: bool
    ) -> None:
        ending = EndingTransaction(self.group, message, state, addr, from_check)
        tell(self.options.end_transaction_hooks, "__call__", ending)

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

    async def _ask(
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
                raise TypeError(f"{method.__name__} returns a TransactionState or None, not {state!r}")
            return state, None
        except Exception as error:
            log.warning(
                "%s of group %s failed, the transaction is UNKNOWN: %s",
                method.__name__, self.group, printable(repr(error)), exc_info=error,
            )  # fmt: skip
            return TransactionState.UNKNOWN, error

    # -- answering brokers (TransactionPeer)

    def topics(self) -> tuple[str, ...]:
        """Topics whose brokers are to know of it."""
        return self._topics

    def check(
        self, connection: Connection, asked: CheckTransactionStateRequestHeader, message: MessageExt
    ) -> None:
        """A broker asks about a transaction: the listener is called when its turn comes."""
        try:
            self._waiting.put_nowait(Check(connection, asked, message))
        except asyncio.QueueFull:
            log.warning(
                "group %s: %d checks wait already, one about %s is dropped: %s asks again",
                self.group, self._waiting.qsize(), message.msg_id, connection.addr,
            )  # fmt: skip

    async def _answer(self) -> None:
        while True:
            connection, asked, message = await self._waiting.get()
            if connection.closed:
                continue  # the broker asks somebody else
            state, error = await self._ask(self._listener.check_local_transaction, message)
            request = self._end_request(
                message.msg_id, asked.tran_state_table_offset, asked.commit_log_offset, state, check=True
            )
            request.remark = _remark("checkLocalTransaction", error)
            self._tell_hooks(message, state, connection.addr, from_check=True)
            try:
                connection.oneway(request)
                self._trace_end(message, connection.addr, state, from_check=True)
            except CometError as failure:
                log.warning("%s was not told of transaction %s: %s", connection.addr, message.msg_id, failure)


def _as_stored(message: Message, outgoing: Outgoing, sent: SendResult) -> MessageExt:
    """The message as the broker has it."""
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
