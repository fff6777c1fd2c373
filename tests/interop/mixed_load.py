"""Clients of both implementations that send and consume while brokers are replaced, and their history."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tests.interop.driver import Driver, JavaError, Json, body_of, message
from tests.interop.histories import COMMIT, ROLLBACK, UNKNOWN
from tests.interop.our_driver import OurDriver
from tests.kit.waiting import wait_until

from cometmq.errors import CometError
from cometmq.testing import Expected, History, Report, check_history

PAUSE_S = 0.01
DELAYED, FAILING, IN_TRANSACTION = 11, 13, 17
"""Intervals, in messages, at which one message is delayed by a second, fails once, or is in a transaction."""
ENDS = ((COMMIT, COMMIT), (UNKNOWN, COMMIT), (ROLLBACK, ROLLBACK))
"""The states that the transaction listener returns at first and at a check."""
Clients = Sequence[Driver | OurDriver]


class MixedLoad:
    """A producer and a push consumer of each client. All consumers get the messages of all producers."""

    def __init__(self, clients: Clients, namesrv: str, topic: str) -> None:
        self._clients = clients
        self._namesrv = namesrv
        self._topic = topic
        self._history = History(clock=time.monotonic)
        self._stopping = threading.Event()
        self._acknowledged: set[str] = set()
        self._rolled_back: set[str] = set()
        self.refused = self.transactions = 0
        self.longest_s = dict.fromkeys(map(name_of, clients), 0.0)
        """The longest time from a send to its acknowledgement, including refusals and retries, by client."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send messages while the block runs; at its end wait for all acknowledged messages."""
        for client in self._clients:
            name, namesrv = name_of(client), self._namesrv
            for kind in ("producer", "transaction"):
                group = {"name": f"{name}-{kind}", "group": f"{name}-{kind}", "namesrv": namesrv}
                client.call(f"{kind}_start", **group)
            client.call(
                "push_start",
                name=name,
                namesrv=namesrv,
                group=name,
                topics={self._topic: "*"},
                failDelayLevel=1,
            )
        threads = [threading.Thread(target=self._send, args=(client,)) for client in self._clients]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()
        for client in self._clients:
            wait_until(f"all messages at {name_of(client)}", partial(self._arrived, client), 180.0, 0.5)
            client.call("push_stop", name=name_of(client))
            for kind in ("producer", "transaction"):
                client.call(f"{kind}_stop", name=f"{name_of(client)}-{kind}")

    def report(self) -> Report:
        """Check the history and return the report."""
        for client in self._clients:
            for got in client.delivered(name_of(client)):
                assert body_of(got).decode() not in self._rolled_back
                self._note(client, got)
        report = check_history(self._history.lines(), Expected(late_s=120.0))
        return report.verify()

    def _send(self, client: Driver | OurDriver) -> None:
        for number in itertools.count():
            if self._stopping.is_set():
                return
            self._one(client, number)
            time.sleep(PAUSE_S)

    def _one(self, client: Driver | OurDriver, number: int) -> None:
        body = f"{name_of(client)}-{number}"
        if number % IN_TRANSACTION == 0:
            self._in_transaction(client, body, *ENDS[number // IN_TRANSACTION % len(ENDS)])
            return
        delay = 1 if number % DELAYED == 0 else 0
        fails = {"fails": "1"} if number % FAILING == 0 else None
        sent = message(self._topic, body.encode(), delay=delay, properties=fails)
        began = time.monotonic()
        while not self._tried(client, body, sent, began + 0.99 if delay else None):
            if self._stopping.wait(0.1):
                return
        took = time.monotonic() - began
        self.longest_s[name_of(client)] = max(self.longest_s[name_of(client)], took)

    def _in_transaction(self, client: Driver | OurDriver, body: str, local: str, check: str) -> None:
        """Send a message in a transaction until a transaction ends as planned.

        Both clients roll a transaction back if its half message is on one machine only.
        """
        sent = message(self._topic, body.encode(), properties={"local": local, "check": check})
        if check == ROLLBACK:
            self._rolled_back.add(body)
        while True:
            sending = (
                self._history.begin("send", message=body, topic=self._topic) if check == COMMIT else None
            )
            try:
                (result,) = client.call(
                    "transaction_send", name=f"{name_of(client)}-transaction", messages=[sent]
                )
                ended = result["state"] == local
            except (JavaError, CometError):
                ended = False
            if sending is not None:
                (self._history.ok if ended else self._history.unknown)(sending)
            if ended:
                self.transactions += 1
                if check == COMMIT:
                    self._acknowledged.add(body)
                return
            if self._stopping.wait(0.1):
                return

    def _tried(self, client: Driver | OurDriver, body: str, sent: Json, due: float | None) -> bool:
        facts = {"due": due} if due else {}
        sending = self._history.begin("send", message=body, topic=self._topic, **facts)
        try:
            (result,) = client.send(producer(client), [sent])
        except (JavaError, CometError):
            self._history.unknown(sending)
            self.refused += 1
            return False
        # The response to a delayed message contains an offset of its level's queue.
        self._history.ok(sending, **({} if due else place(result)))
        self._acknowledged.add(body)
        return True

    def _arrived(self, client: Driver | OurDriver) -> bool:
        done = {body_of(got).decode() for got in client.delivered(name_of(client)) if not got["failed"]}
        return done >= self._acknowledged

    def _note(self, client: Driver | OurDriver, got: Json) -> None:
        # A redelivered message has an offset of the retry topic.
        where = {} if got["reconsumeTimes"] else {"topic": self._topic, **place(got)}
        call = self._history.begin(
            "handle", at=got["began"] / 1e9, group=name_of(client), message=body_of(got).decode(), **where
        )
        end: Callable[..., None] = self._history.fail if got["failed"] else self._history.ok
        end(call, at=got["ended"] / 1e9)


def name_of(client: Driver | OurDriver) -> str:
    """Return the name of the client's consumer and group."""
    return f"load-{client.version.replace('.', '-')}"


def producer(client: Driver | OurDriver) -> str:
    return f"{name_of(client)}-producer"


def place(at: Json) -> Json:
    return {"queue": f"{at['brokerName']}:{at['queueId']}", "offset": at["queueOffset"]}
