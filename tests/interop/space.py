"""The environment of a test with Java clients: its topic and group, its clients, and checks of deliveries."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tests.interop.driver import Driver, JavaError, Json, body_of
from tests.kit.waiting import wait_until

_numbers, _traced = itertools.count(1), itertools.count(1)


class Cluster(Protocol):
    """Servers of either implementation, as clients use them."""

    @property
    def namesrv(self) -> str: ...

    @property
    def broker_addr(self) -> str: ...


class Space:
    """Names and clients of one test. The first send creates a topic with four queues."""

    def __init__(self, java: Driver, cluster: Cluster) -> None:
        self.java = java
        self.cluster = cluster
        self.number = next(_numbers)
        self.topic = f"T{self.number}"
        self.group = f"g{self.number}"
        self._open: list[tuple[Driver, str, str]] = []

    @property
    def broker_port(self) -> int:
        return int(self.cluster.broker_addr.rsplit(":", 1)[1])

    def producer(self, **options: Any) -> str:
        return self._start(self.java, "producer", "p", options)

    def push(self, *, java: Driver | None = None, expression: str = "*", **options: Any) -> str:
        options.setdefault("topics", {self.topic: expression})
        options.setdefault("group", self.group)
        return self._start(java or self.java, "push", "c", options)

    def replier(self, **options: Any) -> str:
        return self._start(self.java, "replier", "r", options)

    def pull(self, **options: Any) -> str:
        options.setdefault("group", self.group)
        return self._start(self.java, "pull", "u", options)

    def lite(self, **options: Any) -> str:
        options.setdefault("topics", {self.topic: "*"})
        options.setdefault("group", self.group)
        return self._start(self.java, "lite", "l", options)

    def _start(self, java: Driver, kind: str, letter: str, options: dict[str, Any]) -> str:
        name = f"{letter}{next(_numbers)}"
        namesrv = self.cluster.namesrv
        if options.get("trace"):
            # In a JVM, one client sends the traces for each distinct name server string. The client of
            # another test may be shutting down, which takes 3 s and loses traces, so each producer uses a
            # different string.
            namesrv = ";".join([namesrv] * next(_traced))
        java.call(f"{kind}_start", name=name, namesrv=namesrv, **options)
        self._open.append((java, kind, name))
        return name

    def stop(self, name: str) -> None:
        """Stop one client cleanly before the test's end."""
        for each in self._open:
            if each[2] == name:
                self._open.remove(each)
                each[0].call(f"{each[1]}_stop", name=name)
                return
        raise KeyError(name)

    def close(self) -> None:
        """Stop all clients without waiting: 5.x takes three seconds for each, and no other test uses them."""
        for java, kind, name in reversed(self._open):
            if java.running:
                java.start(f"{kind}_stop", name=name)

    def queue(self, queue_id: int, topic: str | None = None) -> Json:
        return {"topic": topic or self.topic, "brokerName": "broker-a", "queueId": queue_id}

    def pull_queue(
        self, puller: str, queue_id: int, *, expression: str = "*", sql: bool = False
    ) -> list[Json]:
        """Return all messages of one queue, read from its beginning."""
        found: list[Json] = []
        offset = 0

        def pull() -> Json | None:
            wanted = {"queue": self.queue(queue_id), "expression": expression, "sql": sql}
            try:
                return self.java.call("pull", name=puller, offset=offset, **wanted)
            except JavaError as error:
                if "not exist" in error.message:  # a new topic may not be registered yet
                    return None
                raise

        while True:
            part = wait_until("an answer to a pull", pull)
            found += part["messages"]
            if part["next"] >= part["max"]:
                return found
            assert part["next"] > offset, part
            offset = part["next"]

    def pull_topic(self, puller: str, *, queues: int = 4, **wanted: Any) -> list[Json]:
        return [each for number in range(queues) for each in self.pull_queue(puller, number, **wanted)]


def bodies(messages: Iterable[Json]) -> list[bytes]:
    return sorted(body_of(each) for each in messages)


def assert_exactly_once(received: Sequence[Json], sent: Iterable[bytes]) -> None:
    """Check that each sent body was received once and no other body; the failure lists the differences."""
    want, got = Counter(sent), Counter(body_of(each) for each in received)
    lost = {body[:60]: count for body, count in (want - got).items()}
    extra = {body[:60]: count for body, count in (got - want).items()}
    assert not lost, f"{sum(lost.values())} lost: {dict(list(lost.items())[:5])}"
    assert not extra, f"{sum(extra.values())} more than sent: {dict(list(extra.items())[:5])}"
