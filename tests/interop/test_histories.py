"""The same programs on our servers and on Apache's, with Java's clients and ours, have equal histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.driver import Driver
from tests.interop.histories import PROGRAMS, History, Program, orderly_death, timers
from tests.interop.jars import CLIENT_VERSIONS, SERVER_VERSIONS
from tests.interop.our_driver import OurDriver
from tests.interop.space import Cluster, Space
from tests.long_form import LONG

# Combinations that are not compared: (client, server of Apache, program) -> reason.
NOT_THERE = {
    ("5.5.0", "4.9.7", "sql"): "the lite pull of a 5.x client is request 361, which 4.9 does not know",
    **{
        (client, "4.9.7", "timers"): "4.9 has no delivery times, and delivers such messages at once"
        for client in ("ours", *CLIENT_VERSIONS)
    },
}

# Combinations that only the long form runs: (client, server of Apache, program) -> reason.
SLOW = {
    (
        "4.9.8",
        "4.9.7",
        "orderly_death",
    ): "4.9's broker waits a minute, since Java sends dead letters with a delay"
}

CLIENTS = ("ours", *CLIENT_VERSIONS)
PAIRS = (
    [(client, server) for client in CLIENTS for server in SERVER_VERSIONS] if LONG else [("4.9.8", "4.9.7")]
)


def is_run(client: str, server: str, program: Program) -> bool:
    which = client, server, program.__name__
    return which not in NOT_THERE and (LONG or which not in SLOW)


COMPARED = [
    (client, server, program)
    for client, server in PAIRS
    for program in PROGRAMS
    if is_run(client, server, program)
]


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.fixture(scope="module")
def history(
    cluster: Cluster,
    apache_clusters: Callable[[str], ApacheCluster],
    java_clients: Callable[[str], Driver],
) -> Iterator[Callable[[str, str, Program], History]]:
    """Return a program's history with a client on a server. All programs of a pair run concurrently."""
    running: dict[tuple[str, str, str], Future[History]] = {}
    ours = OurDriver()

    def one(program: Program, client: str, servers: Cluster) -> History:
        space = Space(ours if client == "ours" else java_clients(client), servers)
        try:
            return program(space)
        finally:
            space.close()

    with ThreadPoolExecutor(len(PROGRAMS)) as threads:

        def found(client: str, server: str, program: Program) -> History:
            if (client, server, program.__name__) not in running:
                servers = cluster if server == "ours" else apache_clusters(server)
                if client != "ours":
                    java_clients(client)  # started here once, and not by several threads
                for each in PROGRAMS:
                    if is_run(client, server, each):
                        key = client, server, each.__name__
                        running[key] = threads.submit(one, each, client, servers)
            return running[client, server, program.__name__].result(200)

        yield found
    ours.stop()


# 5.x consumers trace only messages with MSG_REGION, which 4.9 brokers do not store for 5.x senders.
NOT_TRACED_AT_4_9 = ("5.5.0", "4.9.7", "traces")


@pytest.mark.parametrize(("client", "server", "program"), COMPARED, ids=name_of)
def test_a_program_sees_the_same_on_apaches_server(
    client: str, server: str, program: Program, history: Callable[[str, str, Program], History]
) -> None:
    apaches, ours = history(client, server, program), history(client, "ours", program)
    if (client, server, program.__name__) == NOT_TRACED_AT_4_9:
        consumers = {"SubBefore", "SubAfter"}
        assert {str(event[1]) for event in ours} >= consumers
        ours = [event for event in ours if event[1] not in consumers]
    assert ours == apaches


@pytest.mark.parametrize("program", [each for each in PROGRAMS if LONG or each is not timers], ids=name_of)
def test_our_client_sees_what_javas_does(
    program: Program, history: Callable[[str, str, Program], History]
) -> None:
    # 4.9's client gets no handle with which to recall a message.
    javas = "5.5.0" if program is timers else "4.9.8"
    ours, theirs = history("ours", "ours", program), history(javas, "ours", program)
    if program is orderly_death:  # 4.9's client does not count the last failure; 5.x's does
        ours = [("dead", "1", "try", 2, *event[4:]) if event[0] == "dead" else event for event in ours]
    assert ours == theirs
