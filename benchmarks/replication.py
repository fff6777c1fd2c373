"""Replicated brokers of ours beside Apache's (master and slave, raft and DLedger), and a slave's cost."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread

from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver, JavaError
from tests.kit.waiting import wait_until
from tests.ports import free_port

from benchmarks.apache import CLIENT, LOAD_JVM, SYNC, WARM_UP_S
from benchmarks.processes import back_memory, cpu_seconds
from benchmarks.servers import APACHE, APACHE_JVM, APACHE_VERSION, COMET, SETTINGS, SYSTEMS
from benchmarks.turns import Figures, Options, in_turns, median, ratio, say, table

ALONE = "one master"
ONE = SYNC | {"threads": 1}
MASTER = {"brokerRole": "ASYNC_MASTER"}
SYNC_MASTER = {"brokerRole": "SYNC_MASTER"}
SLAVE = {"brokerRole": "SLAVE", "brokerId": "1"}
RAFT = {"enableDLegerCommitLog": "true", "dLegerGroup": "broker-a"}
MEMBERS = 3
CATCH_UP_MIB = 512
SAMPLE_S = 0.02


@dataclass(frozen=True)
class Row:
    """A line of the first table: the same load (java/driver/Load.java) on two systems, base first."""

    title: str
    load: Figures
    members: list[dict[str, str]]
    systems: tuple[str, str] = SYSTEMS
    base: list[dict[str, str]] = field(default_factory=list)
    """Members of the base system if they differ from the other system's."""


ROWS = {
    "sync-64-1k": Row("SYNC_MASTER with a slave, 64 threads, 1 KiB", SYNC, [SYNC_MASTER, SLAVE]),
    "sync-1-1k": Row(
        "SYNC_MASTER with a slave, 1 thread, 1 KiB", SYNC | {"threads": 1}, [SYNC_MASTER, SLAVE]
    ),
    "async-64-1k": Row("ASYNC_MASTER with a slave, 64 threads, 1 KiB", SYNC, [MASTER, SLAVE]),
    "cost-64-1k": Row(
        "ours with a slave beside ours without, 64 threads, 1 KiB",
        SYNC,
        [MASTER, SLAVE],
        (ALONE, COMET),
        [MASTER],
    ),
    "raft-64-1k": Row("raft of three (Apache: DLedger), 64 threads, 1 KiB", SYNC, [RAFT] * MEMBERS),
    "raft-1-1k": Row("raft of three (Apache: DLedger), 1 thread, 1 KiB", ONE, [RAFT] * MEMBERS),
}


class Replicated:
    """Brokers of one name, and a name server.

    Either the first member is the master, or all are raft members.
    """

    def __init__(self, system: str, directory: Path, members: list[dict[str, str]]) -> None:
        self.system = system
        self.directory = directory
        directory.mkdir(parents=True)
        self._apache = system == APACHE
        self.name_server: ApacheNamesrv | CometNamesrv = (
            ApacheNamesrv(APACHE_VERSION, directory / "namesrv")
            if self._apache
            else CometNamesrv(directory / "namesrv")
        )
        self.namesrv = f"127.0.0.1:{self.name_server.port}"
        peers = ";".join(f"n{number}-127.0.0.1:{free_port()}" for number in range(len(members)))
        self.brokers: list[ApacheBroker | CometBroker] = []
        for number, settings in enumerate(members):
            raft = {"dLegerPeers": peers, "dLegerSelfId": f"n{number}"} if settings is RAFT else {}
            self.add({**settings, **raft})
        for broker in self.brokers:
            wait_until("a broker listens", partial(wire.listens, broker.port), 60)
        wait_until("a master is known", lambda: self._sendable(), 60)

    def _sendable(self) -> bool:
        return wire.knows_broker(self.name_server.port, "broker-a")

    def add(self, settings: dict[str, str]) -> ApacheBroker | CometBroker:
        """Start one more broker."""
        place = self.directory / f"broker-{len(self.brokers)}"
        place.mkdir()
        merged = {**SETTINGS, **settings}
        broker: ApacheBroker | CometBroker
        if self._apache:
            broker = ApacheBroker(
                APACHE_VERSION, place, self.namesrv, settings=merged, jvm=APACHE_JVM, wait=False
            )
        else:
            broker = CometBroker(place, self.namesrv, settings=merged, wait=False)
        self.brokers.append(broker)
        return broker

    def cpu_seconds(self) -> list[float]:
        """Return each broker's CPU seconds, of the master first unless a raft group elects its leader."""
        return [cpu_seconds(broker.pid) for broker in self.brokers]

    def stop(self) -> None:
        for broker in reversed(self.brokers):
            broker.kill()
        self.name_server.kill()


def run(options: Options) -> str:
    """Return rates, latencies and CPU of the rows, a slave's lag, and the catch-up rate of an empty slave."""
    java = Driver(CLIENT, options.data / "java", jvm=LOAD_JVM)
    lines = []
    try:
        for name, row in ROWS.items():
            if not options.rows or name in options.rows:
                lines.append(_row(name, row, java, options))
        lag = _lag(java, options) if not options.rows or "lag" in options.rows else ""
        caught_up = _catch_up(java, options) if not options.rows or "catch-up" in options.rows else ""
    finally:
        java.stop()
    head = ["row", "base rate/s", "ours/s", "ours by base", "p50 ms", "p99 ms"]
    head += ["CPU us of all brokers", "of the first broker"]
    return (table(head, lines) if lines else "") + lag + caught_up


def _row(name: str, row: Row, java: Driver, options: Options) -> list[str]:
    base, other = row.systems
    systems: dict[str, Replicated] = {}
    try:
        for system in row.systems:
            members = row.base if system == base and row.base else row.members
            systems[system] = Replicated(system, options.data / name / system.split()[0], members)
        for each in systems.values():
            wait_until("all sends are replicated", partial(_sends_well, each, java), 120)
        for each in () if options.short else systems.values():
            say(f"warm-up, {each.system}: {WARM_UP_S} s")
            java.call(
                "load", answer_within_s=300, namesrv=each.namesrv, topic="WarmUp", seconds=WARM_UP_S, **SYNC
            )
        found = in_turns(
            row.title,
            systems,
            options.turns,
            lambda system, _: _turn(name, row, systems[system], java, options),
        )
    finally:
        for each in systems.values():
            each.stop()

    def pair(figure: str, form: str) -> str:
        return " / ".join(format(median(found[system], figure), form) for system in (base, other))

    rates = (f"{median(found[system], 'rate'):,.0f}" for system in (base, other))
    compared = ratio(found[base], found[other], "rate")
    times = (pair("p50", ".2f"), pair("p99", ".2f"), pair("cpu_us", ".1f"), pair("first_us", ".1f"))
    return [row.title, *rates, compared, *times]


def _sends_well(system: Replicated, java: Driver) -> bool:
    """Return whether a second of sends succeeded, which needs connected slaves or an elected leader."""
    load = {"topic": "First", "seconds": 1, **SYNC}
    try:
        return not java.call("load", answer_within_s=300, namesrv=system.namesrv, **load)["errors"]
    except JavaError:  # no leader yet, so there is no route
        return False


def _turn(name: str, row: Row, system: Replicated, java: Driver, options: Options) -> Figures:
    back_memory(system.directory, options.seconds)
    before = system.cpu_seconds()
    turn: Figures = java.call(
        "load", answer_within_s=options.seconds + 120, namesrv=system.namesrv, topic=name,
        seconds=options.seconds, **row.load,
    )  # fmt: skip
    if turn.get("errors"):
        raise RuntimeError(f"{system.system}: {turn['errors']} requests failed, first: {turn['firstError']}")
    used = [now - then for now, then in zip(system.cpu_seconds(), before, strict=True)]
    turn["cpu_us"] = sum(used) * 1e6 / turn["messages"]
    turn["first_us"] = used[0] * 1e6 / turn["messages"]
    return turn


def _lag(java: Driver, options: Options) -> str:
    """Measure the lag of an ASYNC_MASTER's slave every 20 ms while 64 threads send."""
    systems = {}
    try:
        for system in SYSTEMS:
            systems[system] = Replicated(system, options.data / "lag" / system.split()[0], [MASTER, SLAVE])
            wait_until("sends go well", partial(_sends_well, systems[system], java), 120)
            wait_until("the slave follows", partial(_in_step, systems[system]), 120)
        found = in_turns(
            "lag", systems, options.turns, lambda system, _: _behind(systems[system], java, options)
        )
    finally:
        for each in systems.values():
            each.stop()
    head = ["a slave under load is behind", *SYSTEMS]
    names = {"KiB, median": "median", "KiB, 99 %": "most", "messages/s": "rate"}
    lines = [
        [title, *(f"{median(found[system], figure):,.0f}" for system in SYSTEMS)]
        for title, figure in names.items()
    ]
    return "\n" + table(head, lines)


def _in_step(system: Replicated) -> bool:
    ends = {_log_end(broker.port) for broker in system.brokers}
    return len(ends) == 1 and ends != {0}


def _behind(system: Replicated, java: Driver, options: Options) -> Figures:
    master, slave = (broker.port for broker in system.brokers)
    samples: list[int] = []
    ended = Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            end = _log_end(slave)
            samples.append(max(0, _log_end(master) - end))

    sampling = Thread(target=sample)
    sampling.start()
    try:
        turn = _turn("lag", ROWS["async-64-1k"], system, java, options)
    finally:
        ended.set()
        sampling.join()
    samples.sort()
    turn["median"], turn["most"] = (samples[int(len(samples) * share)] / 1024 for share in (0.5, 0.99))
    return turn


def _catch_up(java: Driver, options: Options) -> str:
    """Measure how an empty slave copies a log of one segment: 4.9's slave fetches only the last one."""
    mib = 32 if options.short else CATCH_UP_MIB
    turns: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(options.turns):
        for system in SYSTEMS if turn % 2 else SYSTEMS[::-1]:
            turns[system].append(_caught_up(system, mib, java, options, turn))
    rates = [f"{statistics.median(turns[system]):.0f}" for system in SYSTEMS]
    head = ["an empty slave catches up, MiB/s", *SYSTEMS]
    return "\n" + table(head, [[f"{mib} MiB, 4 KiB messages", *rates]])


def _caught_up(system: str, mib: int, java: Driver, options: Options, turn: int) -> float:
    """Return the rate in MiB/s, from the first bytes on."""
    pair = Replicated(system, options.data / "catch-up" / f"{system.split()[0]}-{turn}", [MASTER])
    try:
        load = {"mode": "batch", "threads": 4, "batch": 32, "size": 4096, "count": mib * 256}
        java.call("load", answer_within_s=300, namesrv=pair.namesrv, topic="catch-up", **load)
        wanted = _log_end(pair.brokers[0].port)
        slave = pair.add(SLAVE)
        wait_until("the slave listens", partial(wire.listens, slave.port), 60)
        first = wait_until("the slave receives", partial(_log_end, slave.port), 60, 0.005)
        began = time.perf_counter()
        wait_until("the slave has all", lambda: _log_end(slave.port) >= wanted, 300, 0.005)
        return (wanted - first) / (time.perf_counter() - began) / (1 << 20)
    finally:
        pair.stop()


def _log_end(port: int) -> int:
    return int(wire.runtime_info(port).get("commitLogMaxOffset", 0))
