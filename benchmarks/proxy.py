"""Our broker's gRPC port beside Apache's proxy with a broker inside, under Apache's 5.x Java client.

The client runs on the same machine and uses more CPU than either server, so rates and latencies depend on the
client as well; the servers' CPU per message is the figure to compare. Servers are the name server and the
broker. CPU is their user and system time, and resident memory includes their mapped files. Apache's heap is
that of `benchmarks.servers.APACHE_JVM`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import RemoteClient
from tests.interop.grpc_clients import start_java
from tests.ports import free_port

from benchmarks.apache import LOAD_JVM, MIB, WARM_UP_S
from benchmarks.processes import back_memory, cpu_seconds, memory_bytes
from benchmarks.servers import APACHE_JVM, COMET, SETTINGS, write_topics
from benchmarks.turns import Figures, Options, in_turns, median, ratio, say, table

VERSION = "5.5.0"
APACHE = f"Apache {VERSION}"
CLIENT = "5.2.0"
TOPICS = SEND, RECEIVE, PACED = "Send", "Receive", "Paced"
QUEUES = 8
GROUP = "bench"
LOAD: Figures = {"threads": 64, "size": 1024}
RECEIVERS = 8
RECEIVED_PER_SECOND = 5_000
"""A turn receives this many messages for each second of --seconds."""
SENT_PER_SECOND = 500
RECEIVE_TIMEOUT_S = 120
LINES = [
    (SEND, "rate", "64 threads send 1 KiB, messages/s", ",.0f"),
    (SEND, "cpu_us", "the same, server CPU µs/message", ".1f"),
    (RECEIVE, "rate", f"{RECEIVERS} threads receive 32 at once and acknowledge each, messages/s", ",.0f"),
    (RECEIVE, "cpu_us", "the same, server CPU µs/message", ".1f"),
    (PACED, "p50", f"sends of 1 KiB at {SENT_PER_SECOND}/s, p50 ms", ".2f"),
    (PACED, "p99", "the same, p99 ms", ".2f"),
    (PACED, "cpu_us", "the same, server CPU µs/message", ".1f"),
]


class Servers:
    """A name server and a broker with a gRPC port, and one producer and one SimpleConsumer in the client."""

    def __init__(self, system: str, directory: Path, client: RemoteClient) -> None:
        self.system, self.directory, self._client = system, directory, client
        write_topics(directory / "store", TOPICS, QUEUES)
        _write_group(directory / "store")
        port = free_port()
        self.name_server: ApacheNamesrv | CometNamesrv
        self.broker: ApacheBroker | CometBroker
        if system == APACHE:
            self.name_server = ApacheNamesrv(VERSION, directory)
            self.broker = ApacheBroker(
                VERSION, directory, self._namesrv, settings=SETTINGS, jvm=APACHE_JVM, grpc_port=port
            )
        else:
            self.name_server = CometNamesrv(directory)
            self.broker = CometBroker(directory, self._namesrv, settings=SETTINGS | {"grpcPort": str(port)})
        self.broker.process.wait_ready("gRPC port open", lambda: wire.listens(port))
        place: Figures = {"endpoint": f"127.0.0.1:{port}"}
        client.call("producer_start", name=f"{system} producer", topics=list(TOPICS), **place)
        client.call("simple_start", name=f"{system} consumer", group=GROUP, topic=RECEIVE, **place)

    @property
    def _namesrv(self) -> str:
        return f"127.0.0.1:{self.name_server.port}"

    def send(self, topic: str, seconds: int, **more: int) -> Figures:
        return self._measured("send_load", "producer", seconds, topic=topic, **LOAD | more)

    def receive(self, count: int) -> Figures:
        return self._measured("receive_load", "consumer", RECEIVE_TIMEOUT_S, count=count, threads=RECEIVERS)

    def _measured(self, load: str, part: str, seconds: int, **arguments: object) -> Figures:
        before = self._cpu_seconds()
        turn: Figures = self._client.call(
            load, answer_within_s=seconds + 120, name=f"{self.system} {part}", seconds=seconds, **arguments
        )
        return turn | {"cpu_us": (self._cpu_seconds() - before) * 1e6 / turn["messages"]}

    def warm_up(self, seconds: int) -> None:
        """Run both loads, and leave a backlog, so that no counted receive waits at an empty queue."""
        say(f"warm-up, {self.system}: {seconds} s of sends, and their receipt")
        self._client.call("receive", name=f"{self.system} consumer", count=1)  # a group may start at the end
        sent = self.send(RECEIVE, seconds)["messages"]
        self.receive(max(1, sent * 3 // 4))

    def memory(self) -> Figures:
        """Return the memory of the servers in MiB by kind."""
        both = [memory_bytes(each.pid) for each in (self.name_server, self.broker)]
        return {kind: sum(each[kind] for each in both) / MIB for kind in ("anonymous", "resident")}

    def _cpu_seconds(self) -> float:
        return cpu_seconds(self.name_server.pid) + cpu_seconds(self.broker.pid)

    def stop(self) -> None:
        self.broker.stop()
        self.name_server.kill()


def run(options: Options) -> str:
    """Return a table of rates, server CPU, latencies and memory, with the ratio of ours to Apache's."""
    client = start_java(CLIENT, options.data / "java", LOAD_JVM)
    systems: dict[str, Servers] = {}
    try:
        for name in (APACHE, COMET):
            systems[name] = Servers(name, options.data / name.split()[0], client)
        memory = {"idle": {name: system.memory() for name, system in systems.items()}}
        for system in systems.values():
            system.warm_up(1 if options.short else WARM_UP_S)
        found = {
            topic: in_turns(topic, systems, options.turns, partial(_turn, topic, systems, options))
            for topic in TOPICS
        }
        memory["after load"] = {name: system.memory() for name, system in systems.items()}
    finally:
        client.stop()
        for system in systems.values():
            system.stop()
    rows = [_row(title, found[topic], figure, form) for topic, figure, title, form in LINES]
    rows += [
        _row(f"servers' {kind} MiB, {when}", {name: [each] for name, each in of.items()}, kind, ",.0f")
        for when, of in memory.items()
        for kind in ("anonymous", "resident")
    ]
    return table(["Figure", APACHE, "ours", "ratio (range)"], rows)


def _write_group(store: Path) -> None:
    """Write the group table that the broker loads: the proxy refuses consumers of a group that is missing."""
    groups = {
        "dataVersion": {"timestamp": 1, "counter": 1},
        "subscriptionGroupTable": {GROUP: {"groupName": GROUP}},
    }
    (store / "config" / "subscriptionGroup.json").write_text(json.dumps(groups))


def _turn(topic: str, systems: dict[str, Servers], options: Options, name: str, _: int) -> Figures:
    system = systems[name]
    back_memory(system.directory, options.seconds)
    if topic == RECEIVE:
        count = 300 if options.short else RECEIVED_PER_SECOND * options.seconds
        system.send(RECEIVE, RECEIVE_TIMEOUT_S, count=count)
        return system.receive(count)
    return system.send(topic, options.seconds, per_second=SENT_PER_SECOND if topic == PACED else 0)


def _row(title: str, found: dict[str, list[Figures]], figure: str, form: str) -> list[str]:
    apache, ours = found[APACHE], found[COMET]
    medians = (format(median(turns, figure), form) for turns in (apache, ours))
    return [title, *medians, ratio(apache, ours, figure)]
