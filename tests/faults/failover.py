"""A load on a group of brokers among faults, the clients' history, and the guarantees that it must fulfil."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.groups import BROKERS, QUEUES, TOPIC, Group, Layout
from tests.faults.nemesis import KINDS, Ways, idle_faults_do_not_show, inflict, trouble
from tests.interop.driver import Driver, JavaError, message
from tests.interop.processes import ProcessError
from tests.interop.store_input import served
from tests.kit.waiting import wait_until

from cometmq import ClientOptions, CometError, Message, ProducerOptions, SyncProducer
from cometmq.testing import History, Report, check_history
from cometmq.testing.history import operations

SEND_MS = 1500
ROUTES_MS = 1000
"""Interval, in ms, at which clients request routes.

With the default of 30 s unavailability would depend on it.
"""


class Load:
    """Threads that send one message after the other with our client and with Java's.

    Sends are not retried, so each message is stored at most once.
    """

    def __init__(self, namesrv: str, java: Driver, label: str, pause_s: float = 0.02) -> None:
        self.history = History()
        self._java = java
        self._producer = f"{label}-{time.time_ns()}"
        self._pause_s = pause_s
        self._stop = threading.Event()
        java.call(
            "producer_start", name=self._producer, group=f"java-{label}", namesrv=namesrv, retries=0,
            timeout=SEND_MS, pollMillis=ROUTES_MS,
        )  # fmt: skip
        self._ours = SyncProducer(
            f"ours-{label}",
            namesrv=namesrv,
            options=ProducerOptions(retry_times=0, send_timeout_s=SEND_MS / 1000),
            client_options=ClientOptions(route_interval_s=ROUTES_MS / 1000),
        )
        self._ours.start()
        senders = {"java": self._by_java, "ours": self._by_ours}
        self._threads = [
            threading.Thread(target=self._send, args=(f"{kind}-{number}", send), name=f"{label}-{kind}")
            for kind, send in senders.items()
            for number in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, process: str, send: Callable[[str], tuple[str, int, int]]) -> None:
        history = self.history
        for number in itertools.count():
            if self._stop.wait(self._pause_s):
                return
            body = f"{process}/{number}"
            sending = history.begin("send", process=process, message=body, topic=TOPIC)
            try:
                status, queue, offset = send(body)
            except (CometError, JavaError):
                history.unknown(sending)
            else:
                # Any other status means that the message is stored on this broker and perhaps on no other.
                ended = history.ok if status == "SEND_OK" else history.unknown
                ended(sending, queue=str(queue), offset=offset)

    def _by_java(self, body: str) -> tuple[str, int, int]:
        (sent,) = self._java.send(self._producer, [message(TOPIC, body.encode())])
        return str(sent["status"]), int(sent["queueId"]), int(sent["queueOffset"])

    def _by_ours(self, body: str) -> tuple[str, int, int]:
        sent = self._ours.send(Message(TOPIC, body.encode()))
        return sent.status.name, sent.queue.queue_id, sent.queue_offset

    def acknowledged(self, since: float = 0.0) -> dict[str, list[float]]:
        """Return the acknowledgement times of sends that began after `since`, by client (java, ours)."""
        found: dict[str, list[float]] = {"java": [], "ours": []}
        for each in operations(self.history.lines()):
            if each.op == "send" and each.result == "ok" and each.began > since and each.ended is not None:
                found[each.process.partition("-")[0]].append(each.ended)
        return {client: sorted(times) for client, times in found.items()}

    def wait_acknowledged(self, sends: int = 1) -> None:
        """Wait until each client has had another `sends` acknowledgements."""
        since = time.time()
        wait_until(
            f"both clients have {sends} acknowledgements",
            lambda: all(len(times) >= sends for times in self.acknowledged(since).values()),
            120,
            0.2,
        )

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            for thread in self._threads:
                thread.join()
            with contextlib.suppress(JavaError, ProcessError):
                self._java.call("producer_stop", name=self._producer)
            self._ours.stop()


@contextlib.contextmanager
def loaded(layout: Layout, directory: Path, java: Driver, label: str) -> Iterator[tuple[Group, Load]]:
    """Run a group under load; both clients have sent messages when this returns."""
    with contextlib.ExitStack() as resources:
        group = Group(layout, directory)
        resources.callback(group.close)
        load = Load(group.namesrv, java, label)
        resources.callback(load.stop)
        load.wait_acknowledged()
        yield group, load


def settle(group: Group, load: Load) -> None:
    """After all faults, wait until clients can send, stop them, and wait until the logs are equally long."""
    group.heal()
    load.wait_acknowledged()
    load.stop()

    def equal() -> bool:
        ends = {group.end(name) for name in BROKERS}
        return len(ends) == 1 and ends != {-1}

    wait_until("logs of the same length", equal, every_s=0.2)


def read(group: Group, name: str) -> list[bytes]:
    """Read the topic from a broker and return the history of a reader with the broker's name."""
    history = History(name)
    for queue in range(QUEUES):
        # The history has an owner of the queue, so missing messages are detected even if none is served.
        owning = history.begin("own", topic=TOPIC, queue=str(queue), group=name)
        for record in served(group.ports[name], TOPIC, queue):
            facts = {"message": record.body.decode(), "topic": TOPIC, "queue": str(queue), "group": name}
            history.note("read", at=time.time(), offset=record.queue_offset, **facts)
        history.ok(owning)
    return list(history.lines())


def verify(lines: Sequence[bytes]) -> Report:
    """Check that all acknowledged messages are there once, at their offsets, in order.

    Raises AssertionError.
    """
    report = check_history(lines).verify()
    assert report.duplicates == 0, f"{report.duplicates} messages are stored twice"
    highest: dict[str, int] = defaultdict(lambda: -1)
    sends = [each for each in operations(lines) if each.op == "send" and each.result == "ok"]
    ends = deque(sorted(sends, key=lambda each: each.ended or 0.0))
    for send in sends:
        while ends and (ends[0].ended or 0.0) < send.began:
            before = ends.popleft()
            highest[before.queue] = max(highest[before.queue], before.offset or 0)
        assert (send.offset or 0) > highest[send.queue], (
            f"{send.message} is at {send.offset} of queue {send.queue}, and {highest[send.queue]} "
            "was acknowledged before it was sent"
        )
    return report


def run(layout: Layout, directory: Path, java: Driver, seed: int, steps: int = 4) -> list[list[bytes]]:
    """Return the histories of a group among faults that the seed chooses: all sends and the final content.

    A SYNC_MASTER is stopped in the end. Its slave with the longest log must have all acknowledged messages,
    which the first of two histories shows.
    """
    dice = random.Random(f"{seed} {layout.raft}")
    histories = []
    with loaded(layout, directory, java, f"run-{seed}") as (group, load):
        idle_faults_do_not_show(group, dice)
        load.wait_acknowledged(30)
        for kind in dice.sample(list(KINDS), steps, counts=KINDS.values()):
            leader = group.wait_for_leader()
            victim = leader if dice.random() < 0.6 else dice.choice(BROKERS)
            faults, seconds = [trouble(group, kind, victim, dice)], dice.uniform(1.5, 4.0)
            if isinstance(faults[0], Ways) and dice.random() < 0.4:
                second = dice.choice([name for name in BROKERS if name != victim])
                faults.append(trouble(group, dice.choice(("kill", "stop")), second, dice))
            told = " and ".join(map(str, faults))
            print(f"{layout.title}, seed {seed}, leader {leader}: {told} for {seconds:.1f} s")
            inflict(faults, seconds)
            time.sleep(dice.uniform(0.2, 2.0))
        if not layout.raft:
            slaves = BROKERS[1:]
            wait_until("both slaves", lambda: min(map(group.end, slaves)) >= 0)
            load.wait_acknowledged(30)
            group.brokers["n0"].kill()
            served_then = read(group, max(slaves, key=group.end))
            histories.append([*load.history.lines(), *served_then])
        settle(group, load)
        histories.append([*load.history.lines(), *itertools.chain(*(read(group, name) for name in BROKERS))])
    return histories


@dataclass(frozen=True)
class Window:
    """The time without acknowledgements at a fault, in seconds, for each client."""

    what: str
    java: float
    ours: float


WINDOW_FAULTS = [("kill", True), ("stop", True), ("cut", True), ("kill", False)]
"""Faults, and whether they affect the leader or master, or another broker."""


def windows(
    layout: Layout, directory: Path, java: Driver, seconds: float
) -> tuple[list[Window], list[bytes]]:
    """Apply each fault to the leader or master and to another broker; return the windows and the history.

    Each fault lasts `seconds`. The history ends with a read from the leader.
    """
    found = []
    dice = random.Random(0)
    with loaded(layout, directory, java, f"windows-{layout.apache}-{layout.raft}") as (group, load):
        for kind, of_leader in WINDOW_FAULTS:
            time.sleep(6)  # until all brokers are in sync again
            leader = group.wait_for_leader()
            victim = leader if of_leader else next(name for name in reversed(BROKERS) if name != leader)
            began = time.time()
            inflict([trouble(group, kind, victim, dice)], seconds)
            load.wait_acknowledged()
            until = time.time()
            gaps = {
                client: max(after - before for before, after in itertools.pairwise(
                    [began, *(at for at in times if began < at < until), until]))
                for client, times in load.acknowledged().items()
            }  # fmt: skip
            found.append(Window(f"{kind} of {'leader' if of_leader else 'other'}", **gaps))
            print(f"{layout.title}: {found[-1]}")
        load.stop()
        time.sleep(5)
        lines = [*load.history.lines(), *read(group, group.wait_for_leader())]
    return found, lines
