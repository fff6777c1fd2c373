"""Ends an event-loop tick: stores its messages with one write, sends responses, and wakes waiting pulls.

A send of a single message waits, with its sender, in the store's appender. Other requests append to the store
when they are processed, and register a callback for the result with the writer. No response is sent before
the store has committed the messages of the tick. With SYNC_FLUSH, the response to a sender that waits for
durability is sent once the message is on the disk; consumers see the message from then on. With SYNC_MASTER,
the response also waits for slaves.

Budget: of the 12 µs of CPU that a 1 KiB send takes, 1.5 µs are for formatting and queueing its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cometmq import logs
from cometmq.broker.base.replies import Sender, SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.remoting import Tick
from cometmq.store import Arrivals, MessageStore, TickMessage

log = logs.logger(__name__)

SUCCESS = int(ResponseCode.SUCCESS)
FLUSH_DISK_TIMEOUT = int(ResponseCode.FLUSH_DISK_TIMEOUT)
SYSTEM_ERROR = int(ResponseCode.SYSTEM_ERROR)
# The code of a failed flush. It exceeds all response codes, because the result of an append is the greatest
# of the codes of its flush and its replication.
FLUSH_FAILED = 1 << 16

NOT_COMMITTED = "the raft group has not committed the message in time: it may be stored, or not"

# A callback that receives the result of an append as a response code and a remark: the message is durable, or
# it is stored but was not durable in time, or the append has failed.
Outcome = Callable[[int, "str | None"], None]


def is_in_log(code: int, remark: str | None) -> bool:
    """Return whether a message with this outcome is in the broker's log.

    A message that a raft group has not committed in time is in the log of its leader, which still tries to
    replicate it. If the leader appended such a message again, consumers could receive it twice.
    """
    return code == SUCCESS or remark == NOT_COMMITTED


class Replicas(Protocol):
    """The brokers that store copies of the commit log: the slaves, or the other members of a raft group."""

    decide: bool
    """Whether a message counts as stored only once enough members of a raft group have stored it.

    If so, every sender waits for the other members, and no sender waits only for the local flush.
    """

    def wait_for(self, position: int, waiter: Callable[[int], None]) -> None:
        """Call `waiter` with a response code once enough copies have the log up to `position`.

        The code is SUCCESS, SLAVE_NOT_AVAILABLE or FLUSH_SLAVE_TIMEOUT, or SYSTEM_ERROR if it is unknown
        whether the message will remain stored.
        """
        ...


class Writer:
    """At the end of an event-loop tick, commits the messages appended in the tick and sends the responses."""

    def __init__(
        self,
        store: MessageStore,
        replies: SendReplies,
        stats: Stats,
        tick: Tick,
        on_arrivals: Callable[[Arrivals], None],
    ) -> None:
        """Create a writer. `on_arrivals` receives newly visible messages, for which pulls may wait."""
        self.store = store
        self.replies = replies
        self._on_arrivals = on_arrivals
        self.replicas: Replicas | None = None
        """The slaves or raft members, if any, that store a message before a waiting sender is answered."""
        self.on_refused: Callable[[TickMessage], object] = lambda _message: None
        """Called with each message that the store has refused, the newest first."""
        self.on_committed: Callable[[], None] = lambda: None
        """Called after each commit. The appended messages then have their positions."""
        self._stats = stats
        self._tick = tick
        self.configure()
        self._appender = store.appender
        self._last_appends: list[Callable[[], None]] = []  # Functions to call before the next commit
        # (callback for the result of an append, whether the result must wait until the message is durable)
        self._outcomes: list[tuple[Outcome, bool]] = []
        self._ticks = 0  # Number of commits whose senders still wait for a flush or for other brokers' copies
        self.waiting = 0  # Number of senders that wait for a flush or for other brokers' copies
        self._idle = asyncio.Event()
        self._idle.set()

    def configure(self) -> None:
        """Apply the setting for the flush mode, which may change while the broker runs."""
        self._sync = self.store.config.sync_flush

    def appended(self, outcome: Outcome | None = None, wait: bool = False) -> None:
        """Let the end of the event-loop tick commit a message that was appended.

        `outcome` receives the result; with `wait`, once the message is as durable as the broker promises.
        """
        self._tick.schedule()
        if outcome is not None:
            self._outcomes.append((outcome, wait))

    def before_commit(self, append: Callable[[], None]) -> None:
        """Call `append` once before the next commit, which includes its messages and follows soon."""
        self._tick.schedule()
        self._last_appends.append(append)

    def end_tick(self) -> None:
        """Commit the messages of this event-loop tick. Respond to senders that do not wait for durability."""
        last_appends, self._last_appends = self._last_appends, []
        for append in last_appends:
            append()
        if not (self._outcomes or self._appender.waiting()):
            return
        replicas = self.replicas
        waits = self._sync or replicas is not None
        all_wait = replicas is not None and replicas.decide
        outcomes = [outcome for outcome, wait in self._outcomes if not ((wait and waits) or all_wait)]
        waiting_outcomes = [outcome for outcome, wait in self._outcomes if (wait and waits) or all_wait]
        self._outcomes = []
        commit = self.store.commit()
        self.on_committed()
        for message, _ in reversed(commit.refused):
            self.on_refused(message)
        for message, refusal in commit.refused:
            self._refuse([message.sender], [], refusal.response_code, refusal.remark)
        sends = commit.placed
        error = commit.error
        if error is not None:
            self._refuse(
                [send.sender for send in sends],
                outcomes + waiting_outcomes,
                error.response_code,
                error.remark,
            )
            return
        waiting_sends: list[TickMessage] = []
        if waits:
            waiting_sends = [send for send in sends if send.sender.waits or all_wait]
            sends = [send for send in sends if not (send.sender.waits or all_wait)]
        self._answer(sends, outcomes)
        if waiting_sends or waiting_outcomes:
            self._await(waiting_sends, waiting_outcomes, commit.end_offset)
        self.visible(commit.visible, commit.arrivals)

    def visible(self, count: int, arrivals: Arrivals) -> None:
        """Count messages that a commit or flush has made visible, and wake the pulls that wait for them."""
        self._stats.put += count
        if arrivals:
            self._on_arrivals(arrivals)

    async def drain(self, timeout_s: float) -> None:
        """Commit the remaining appends, and wait until all waiting senders have received their responses."""
        self.end_tick()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("%d write batches were not flushed or replicated within %g s", self._ticks, timeout_s)

    def _answer(self, sends: list[TickMessage], outcomes: list[Outcome]) -> None:
        self.replies.answer(sends)
        for outcome in outcomes:
            outcome(SUCCESS, None)

    def _refuse(self, senders: list[Sender | None], outcomes: list[Outcome], code: int, remark: str) -> None:
        self._stats.put_failed += len(senders) + len(outcomes)
        for sender in senders:
            if sender is not None:
                answer = Frame(code=code, opaque=int(sender.opaque), flag=1, language="JAVA", remark=remark)
                sender.connection.write(encode_frame(answer))
        for outcome in outcomes:
            outcome(code, remark)

    def _await(self, sends: list[TickMessage], outcomes: list[Outcome], end_offset: int) -> None:
        """Send the responses once the flush and the replication to other brokers have succeeded or failed."""
        replicas = self.replicas
        sync = self._sync and not (replicas is not None and replicas.decide)
        count = len(sends) + len(outcomes)
        left = sync + (replicas is not None)
        # The result is the higher code. All codes of failed replication to slaves exceed FLUSH_DISK_TIMEOUT.
        worst = SUCCESS
        self._ticks += 1
        self.waiting += count
        self._idle.clear()

        def came(code: int) -> None:
            nonlocal left, worst
            left -= 1
            worst = max(worst, code)
            if left:
                return
            self._ticks -= 1
            self.waiting -= count
            if not self._ticks:
                self._idle.set()
            self._finish(sends, outcomes, worst)

        if replicas is not None:
            replicas.wait_for(end_offset, came)
        if sync:
            self.store.flusher.wait_for(end_offset, lambda ok: came(SUCCESS if ok else self._unflushed()))

    def _unflushed(self) -> int:
        return FLUSH_DISK_TIMEOUT if self.store.flusher.failure is None else FLUSH_FAILED

    def _finish(self, sends: list[TickMessage], outcomes: list[Outcome], code: int) -> None:
        if code == FLUSH_FAILED:
            failure = self.store.flusher.failure
            remark = f"the flush to disk failed: {failure.strerror if failure else 'unknown'}"
            self._refuse([send.sender for send in sends], outcomes, SYSTEM_ERROR, remark)
        elif code == SUCCESS:
            self._answer(sends, outcomes)
        elif code == SYSTEM_ERROR:
            self._refuse([send.sender for send in sends], outcomes, code, NOT_COMMITTED)
        else:
            self._stored_only(code, sends, outcomes)

    def _stored_only(self, code: int, sends: list[TickMessage], outcomes: list[Outcome]) -> None:
        """Respond, with message ids, to senders whose messages were not flushed or replicated in time."""
        replies = self.replies
        for send in sends:
            sender: Sender = send.sender
            ids = replies.message_id(send.physical_offset)
            sender.connection.write(
                replies.reply(code, int(sender.opaque), ids, sender.queue_id, send.queue_offset, sender.more)
            )
        for outcome in outcomes:
            outcome(code, None)
