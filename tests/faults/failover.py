"""Brokers of one name as real processes, with a proxy on each way between them; faults; what clients saw.

A `Group` has three brokers of our make or Apache's (a raft group, or a SYNC_MASTER with two slaves, all with
SYNC_FLUSH) and two name servers. Brokers reach each other and the name servers through a proxy for each pair
and direction, so any of these ways can be cut or slowed alone, on every machine. Clients reach brokers
directly: one that is cut off is still asked by them, and must not promise what it cannot keep.

Each fault says when it ends whether it took effect: a run whose faults do nothing proves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil
from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver, JavaError, message
from tests.interop.processes import ProcessError, broker_port, wait_until
from tests.interop.store_input import Feeder, served

from cometmq import ClientOptions, CometError, Message, ProducerOptions, SyncProducer
from cometmq.remoting import loop_in_thread
from cometmq.testing import Fault, FaultProxy, History, Kind, Report, check_history
from cometmq.testing.history import operations

HOST = "127.0.0.1"
NAME = "broker-a"
TOPIC = "Orders"
QUEUES = 4
APACHE = "4.9.7"
APACHE_JVM = ["-Xms256m", "-Xmx512m", "-XX:+UseSerialGC"]
SLOW_DISK = Path(__file__).with_name("slow_disk.py")
SEND_MS = 1500
ROUTES_MS = 1000
"""Clients ask for routes so often, not each 30 s: their windows are then those of the brokers."""
PATIENCE_S = 15.0
"""A fault of a disk shows when next there is something to write: so long at most."""
BROKERS = ("n0", "n1", "n2")
NAME_SERVERS = ("s0", "s1")


@dataclass(frozen=True)
class Layout:
    """raft: three members that elect; else n0 is a SYNC_MASTER, the others its slaves. apache: whose."""

    raft: bool
    apache: bool = False

    @property
    def title(self) -> str:
        kind = ("DLedger" if self.apache else "raft of three") if self.raft else "SYNC_MASTER, two slaves"
        return f"{'Apache' if self.apache else 'CometMQ'}, {kind}"


class Group:
    """The servers of a layout. Brokers are n0 to n2, name servers s0 and s1."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        self.layout = layout
        self._directory = directory
        self._resources = contextlib.ExitStack()
        self._run = self._resources.enter_context(loop_in_thread("failover-proxies"))
        self.ports = {name: broker_port() for name in BROKERS}
        self.brokers: dict[str, ApacheBroker | CometBroker] = {}
        self.name_servers: dict[str, ApacheNamesrv | CometNamesrv] = {}
        self.links: dict[tuple[str, str], FaultProxy] = {}
        self._members = {name: broker_port() for name in BROKERS} if layout.raft else {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in NAME_SERVERS:
            place = self._directory / name
            self.name_servers[name] = (
                ApacheNamesrv(APACHE, place, port=broker_port(), wait=False) if self.layout.apache
                else CometNamesrv(place, port=broker_port(), wait=False)
            )  # fmt: skip
        for server in self.name_servers.values():
            server.wait_ready()
        self.namesrv = ";".join(f"{HOST}:{server.port}" for server in self.name_servers.values())
        for source, target in itertools.product(BROKERS, (*BROKERS, *NAME_SERVERS)):
            if target in self.name_servers:
                self._link(source, target, self.name_servers[target].port)
            elif self.layout.raft and source != target:
                self._link(source, target, self._members[target])
            elif target == "n0" and source != target:
                self._link(source, target, self.ports[target] + 1)
        self.start("n0")
        if self.layout.raft:
            for name in BROKERS[1:]:
                self.start(name)
        self.wait_for_leader()
        # Slaves copy the tables of their master 3 s after their start: the topic is to be there by then.
        wait_until("the topic", self._make_topic, 60, 0.2)
        if not self.layout.raft:
            for name in BROKERS[1:]:
                self.start(name)
        for name in BROKERS:
            listens = partial(wire.listens, self.ports[name])
            self.brokers[name].process.wait_ready("broker listening", listens, 90)

    def _link(self, source: str, target: str, port: int) -> None:
        proxy = FaultProxy(f"{HOST}:{port}")
        self._run(proxy.start())
        self._resources.callback(lambda: self._run(proxy.stop()))
        self.links[source, target] = proxy

    def _make_topic(self) -> bool:
        try:
            with wire.Connection(self.ports[self.leader()]) as connection:
                Feeder(connection).update_topic(TOPIC, QUEUES)
        except Exception:  # nobody leads, or no longer
            return False
        return True

    def start(self, name: str) -> None:
        """Start a broker, also again after its end, on its port and store."""
        namesrv = ";".join(self.links[name, server].addr for server in NAME_SERVERS)
        settings = {"flushDiskType": "SYNC_FLUSH", "slaveTimeout": "3000", "bindAddress": HOST}
        if self.layout.raft:
            # Others go through a proxy; a member listens on its own address.
            peers = [
                f"{each}-{HOST}:{port}" if each == name else f"{each}-{self.links[name, each].addr}"
                for each, port in self._members.items()
            ]
            settings |= {
                "enableDLegerCommitLog": "true", "dLegerGroup": NAME, "dLegerPeers": ";".join(peers),
                "dLegerSelfId": name,
            }  # fmt: skip
        elif name == "n0":
            settings |= {"brokerRole": "SYNC_MASTER"}
        else:
            ha = self.links[name, "n0"].addr
            settings |= {"brokerRole": "SLAVE", "brokerId": name[1:], "haMasterAddress": ha}
        place, port = self._directory / name, self.ports[name]
        if self.layout.apache:
            self.brokers[name] = ApacheBroker(
                APACHE, place, namesrv, name=NAME, port=port, settings=settings, jvm=APACHE_JVM, wait=False
            )
        else:
            self.brokers[name] = CometBroker(
                place, namesrv, name=NAME, port=port, settings=settings, launcher=[str(SLOW_DISK)], wait=False
            )

    def alive(self, name: str) -> bool:
        return self.brokers[name].process.running

    def leader(self) -> str:
        """Who is the master, or the leader, by one of the name servers; nobody: ""."""
        for server in self.name_servers.values():
            with contextlib.suppress(OSError):
                _, body = wire.call(server.port, wire.GET_BROKER_CLUSTER_INFO)
                found = re.search(rb'\b"?0"?:"127\.0\.0\.1:(\d+)"', body)
                for name, port in self.ports.items():
                    if found and int(found[1]) == port:
                        return name
        return ""

    def wait_for_leader(self) -> str:
        return wait_until("a leader", self.leader, 90, 0.1)

    def end(self, name: str) -> int:
        """Where the log of a broker ends; -1 while it does not say."""
        try:
            return int(wire.runtime_info(self.ports[name]).get("commitLogMaxOffset", -1))
        except (OSError, ValueError):
            return -1

    def heal(self) -> None:
        """End all faults; start what does not run."""
        for proxy in self.links.values():
            proxy.heal()
        for name in BROKERS:
            (self._directory / name / "slow").unlink(missing_ok=True)
            if self.alive(name):
                os.kill(self.brokers[name].pid, signal.SIGCONT)
            else:
                self.start(name)

    def place(self, name: str) -> Path:
        return self._directory / name

    def close(self) -> None:
        for server in (*self.brokers.values(), *self.name_servers.values()):
            if server.process.running:
                server.kill()
        self._resources.close()


class Trouble(Protocol):
    """A fault of a group. Its text says what it is."""

    def begin(self) -> None: ...

    def effective(self) -> bool:
        """Whether it shows, in what the fault itself does not know."""
        ...

    def end(self) -> None: ...


class Killed:
    """kill -9, and a start."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self._victim = group.brokers[name].process

    def __str__(self) -> str:
        return f"kill -9 of {self._name}"

    def begin(self) -> None:
        self._victim.kill()

    def effective(self) -> bool:
        return self._victim.popen.poll() == -signal.SIGKILL

    def end(self) -> None:
        self._group.start(self._name)


class Paused:
    """SIGSTOP, and SIGCONT."""

    def __init__(self, group: Group, name: str) -> None:
        self._name = name
        self._process = psutil.Process(group.brokers[name].pid)

    def __str__(self) -> str:
        return f"SIGSTOP of {self._name}"

    def begin(self) -> None:
        self._process.suspend()

    def effective(self) -> bool:
        return bool(self._process.status() == psutil.STATUS_STOPPED)

    def end(self) -> None:
        self._process.resume()


class Ways:
    """A fault of some ways of a group."""

    fault: Fault

    def __init__(self, what: str, group: Group, ways: Iterable[tuple[str, str]]) -> None:
        self._what = what
        self.proxies = {way: group.links[way] for way in ways}
        self.before = self.passed()

    def __str__(self) -> str:
        return self._what

    def begin(self) -> None:
        for proxy in self.proxies.values():
            proxy.script = lambda _number: [self.fault]
            proxy.inflict(self.fault)
        time.sleep(0.05)  # the loop of the proxies carries it out
        self.before = self.passed()

    def end(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()

    def passed(self) -> dict[object, int]:
        """Bytes that went through the open connections."""
        return {
            each: sum(each.passed.values()) for proxy in self.proxies.values() for each in proxy.connections
        }

    def answers_in(self, timeout_s: float) -> Iterator[float]:
        """Seconds until name servers at the end of these ways answer, or the time-out."""
        for way, proxy in self.proxies.items():
            if way[1] in NAME_SERVERS:
                began, port = time.monotonic(), int(proxy.addr.rpartition(":")[2])
                with contextlib.suppress(OSError), wire.Connection(port, timeout_s=timeout_s) as connection:
                    connection.call(wire.GET_BROKER_CLUSTER_INFO)
                yield time.monotonic() - began


class Cut(Ways):
    """Nothing passes: what is sent is lost, and nobody is told."""

    fault = Fault(kind=Kind.STALL, seconds=math.inf)

    def effective(self) -> bool:
        now = self.passed()
        silent = all(count == self.before.get(connection, 0) for connection, count in now.items())
        return silent and bool(self.before or now) and all(took >= 0.3 for took in self.answers_in(0.3))


class Slow(Ways):
    """Every piece of data waits on its way."""

    fault = Fault(kind=Kind.DELAY, seconds=0.15)

    def effective(self) -> bool:
        return all(took >= self.fault.seconds for took in self.answers_in(1.0))


class SlowDisk:
    """Each sync takes long; of ours only, see slow_disk.py."""

    def __init__(self, group: Group, name: str) -> None:
        self._name = name
        self._slow, self._slowed = group.place(name) / "slow", group.place(name) / "slowed"
        self._slowed.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"slow disk of {self._name}"

    def begin(self) -> None:
        self._slow.touch()

    def effective(self) -> bool:
        return self._slowed.exists()

    def end(self) -> None:
        self._slow.unlink(missing_ok=True)


class Load:
    """Threads that send one message after the other, with our client and with Java's. Nobody tries again, so
    each message is stored once at most."""

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
                # Any other status says: stored here, and perhaps nowhere else.
                ended = history.ok if status == "SEND_OK" else history.unknown
                ended(sending, queue=str(queue), offset=offset)

    def _by_java(self, body: str) -> tuple[str, int, int]:
        (sent,) = self._java.send(self._producer, [message(TOPIC, body.encode())])
        return str(sent["status"]), int(sent["queueId"]), int(sent["queueOffset"])

    def _by_ours(self, body: str) -> tuple[str, int, int]:
        sent = self._ours.send(Message(TOPIC, body.encode()))
        return sent.status.name, sent.queue.queue_id, sent.queue_offset

    def acknowledged(self, since: float = 0.0) -> dict[str, list[float]]:
        """By client (java, ours): when sends that began after `since` were acknowledged."""
        found: dict[str, list[float]] = {"java": [], "ours": []}
        for each in operations(self.history.lines()):
            if each.op == "send" and each.result == "ok" and each.began > since and each.ended is not None:
                found[each.process.partition("-")[0]].append(each.ended)
        return {client: sorted(times) for client, times in found.items()}

    def wait_acknowledged(self, timeout_s: float = 60.0) -> None:
        """Until each client has sent something, from now on."""
        since = time.time()
        wait_until(
            "both clients can send", lambda: all(self.acknowledged(since).values()), timeout_s, every_s=0.2
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
    """A group under load; both clients have sent something."""
    with contextlib.ExitStack() as resources:
        group = Group(layout, directory)
        resources.callback(group.close)
        load = Load(group.namesrv, java, label)
        resources.callback(load.stop)
        load.wait_acknowledged()
        yield group, load


KINDS = {
    "kill": 3, "stop": 2, "cut": 2, "cut one way": 1, "cut pair": 1, "name servers": 1, "delay": 1, "disk": 1,
}  # fmt: skip
"""Faults, and how often each is in the hat."""


def trouble(group: Group, kind: str, victim: str, dice: random.Random) -> Trouble:
    """The fault of a kind, one of KINDS, that hits a broker."""
    leader = group.leader() or "n0"
    # Those who follow say nothing to each other: a cut between them would not show.
    other = leader if victim != leader else dice.choice([name for name in BROKERS if name != victim])
    its = [way for way in group.links if victim in way]
    out = [way for way in its if way[0] == victim]
    between = [way for way in its if other in way]
    names = [way for way in its if way[1] in NAME_SERVERS]
    made: dict[str, Callable[[], Trouble]] = {
        "kill": lambda: Killed(group, victim),
        "stop": lambda: Paused(group, victim),
        "cut": lambda: Cut(f"{victim} cut off from everybody but clients", group, its),
        "cut one way": lambda: Cut(f"nothing from {victim} arrives", group, out),
        "cut pair": lambda: Cut(f"{victim} and {other} cut off from each other", group, between),
        "name servers": lambda: Cut(f"{victim} cut off from the name servers", group, names),
        "delay": lambda: Slow(f"slow ways of {victim}", group, its),
        "disk": lambda: SlowDisk(group, victim),
    }
    return made[kind]()


class IdleNemesisError(AssertionError):
    """A fault did nothing, so the run says nothing."""


def inflict(faults: Sequence[Trouble], seconds: float) -> None:
    """Faults at once, for so long. Raises IdleNemesisError if one of them shows no effect."""
    begun: list[Trouble] = []
    try:
        for fault in faults:
            begun.append(fault)
            fault.begin()
        time.sleep(seconds)
        for fault in faults:
            try:
                wait_until("an effect", fault.effective, PATIENCE_S)
            except AssertionError:
                raise IdleNemesisError(f"{fault}: took no effect") from None
    finally:
        for fault in begun:
            fault.end()


def idle_faults_show(group: Group, dice: random.Random) -> None:
    """Faults that have not begun must show no effect: else nobody could tell."""
    leader = group.wait_for_leader()
    faults = [trouble(group, kind, leader, dice) for kind in KINDS]
    time.sleep(2.0)
    for fault in faults:
        assert not fault.effective(), f"{fault} has not begun, and shows an effect"


def settle(group: Group, load: Load) -> None:
    """After all faults: clients can send; then they stop, and all logs are as long."""
    group.heal()
    load.wait_acknowledged()
    load.stop()

    def equal() -> bool:
        ends = {group.end(name) for name in BROKERS}
        return len(ends) == 1 and ends != {-1}

    wait_until("logs of the same length", equal, 60, 0.2)


def read(group: Group, name: str) -> list[bytes]:
    """What a broker serves of the topic, as the history of a reader of its name."""
    history = History(name)
    for queue in range(QUEUES):
        place = {"topic": TOPIC, "queue": str(queue), "group": name}
        # The group has the queue, so what is missing is missed even if nothing is served.
        owning = history.begin("own", **place)
        for record in served(group.ports[name], TOPIC, queue):
            history.note("read", message=record.body.decode(), offset=record.queue_offset, **place)
        history.ok(owning)
    return list(history.lines())


def verify(lines: Sequence[bytes]) -> Report:
    """Everything acknowledged is there, once, at its place, in order. Raises AssertionError."""
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
    """The histories of a group among faults that the seed chooses: what was sent, and what is there then.

    A SYNC_MASTER is gone for a while in the end: then its slave with the longest log has all that was
    acknowledged, which is the first history of two.
    """
    dice = random.Random(f"{seed} {layout.raft}")
    histories = []
    with loaded(layout, directory, java, f"run-{seed}") as (group, load):
        idle_faults_show(group, dice)
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
            wait_until("both slaves", lambda: min(map(group.end, slaves)) >= 0, 30)
            group.brokers["n0"].kill()
            served_then = read(group, max(slaves, key=group.end))
            histories.append([*load.history.lines(), *served_then])
        settle(group, load)
        histories.append([*load.history.lines(), *itertools.chain(*(read(group, name) for name in BROKERS))])
    return histories


@dataclass(frozen=True)
class Window:
    """How long nobody could send at a fault: seconds between two acknowledgements, for each client."""

    what: str
    java: float
    ours: float


WINDOW_FAULTS = [(kind, of_leader) for of_leader in (True, False) for kind in ("kill", "stop", "cut")]


def windows(
    layout: Layout, directory: Path, java: Driver, seconds: float
) -> tuple[list[Window], list[bytes]]:
    """Each fault for so long, of the leader or master and of another one; and the history of it all, which is
    read from the leader in the end."""
    found = []
    dice = random.Random(0)
    with loaded(layout, directory, java, f"windows-{layout.apache}-{layout.raft}") as (group, load):
        for kind, of_leader in WINDOW_FAULTS:
            time.sleep(8)  # all are in step again
            leader = group.wait_for_leader()
            victim = leader if of_leader else next(name for name in reversed(BROKERS) if name != leader)
            began = time.time()
            inflict([trouble(group, kind, victim, dice)], seconds)
            load.wait_acknowledged(120)
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
