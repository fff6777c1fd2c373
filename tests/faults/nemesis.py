"""Faults for a group of brokers.

Each fault can detect its own effect, since faults without effect prove nothing.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import psutil
from tests.faults import namespace
from tests.faults.groups import BROKERS, NAME_SERVERS, Group
from tests.interop import wire
from tests.kit.waiting import wait_until

from cometmq.testing import Fault, FaultProxy, Kind

PATIENCE_S = 60.0
"""Time, in seconds, within which a fault must have an effect.

A disk fault has an effect only at the next write, and a restarted slave reconnects after a while.
"""


class Trouble(Protocol):
    """A fault of a group; its string describes it."""

    def begin(self) -> None: ...

    def effective(self) -> bool:
        """Return whether the fault has an effect outside its own state."""
        ...

    def end(self) -> None: ...


class Killed:
    """A broker that is killed and later started."""

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
    """A broker that is paused with SIGSTOP and later resumed."""

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
    """A fault on some paths of a group."""

    fault: Fault

    def __init__(self, what: str, group: Group, ways: Iterable[tuple[str, str]]) -> None:
        self._what, self._group = what, group
        self.proxies = {way: group.links[way] for way in ways}
        self.before = self.passed()

    def __str__(self) -> str:
        return self._what

    def begin(self) -> None:
        self.strike()
        self._group.wait_for_proxies()
        self.before = self.passed()

    def strike(self) -> None:
        """Start the fault."""
        for proxy in self.proxies.values():
            proxy.script = lambda _number: [self.fault]
            proxy.inflict(self.fault)

    def end(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()

    def passed(self) -> dict[object, int]:
        """Return the bytes that passed through the open connections."""
        return {
            each: sum(each.passed.values()) for proxy in self.proxies.values() for each in proxy.connections
        }

    def answers_in(self, timeout_s: float) -> Iterator[float]:
        """Yield the seconds until name servers at the end of these paths respond, at most the timeout."""
        for way, proxy in self.proxies.items():
            if way[1] in NAME_SERVERS:
                began, port = time.monotonic(), port_of(proxy)
                with contextlib.suppress(OSError), wire.Connection(port, timeout_s=timeout_s) as connection:
                    connection.call(wire.GET_BROKER_CLUSTER_INFO)
                yield time.monotonic() - began


def port_of(proxy: FaultProxy) -> int:
    return int(proxy.addr.rpartition(":")[2])


class Cut(Ways):
    """A fault in which no data passes and no side is notified."""

    fault = Fault(kind=Kind.STALL, seconds=math.inf)

    def begin(self) -> None:
        """Wait until data passes, then cut: after a kill of one end there would be no connection to cut."""
        wait_until(f"something passes before {self}", lambda: any(self.passed().values()), PATIENCE_S)
        super().begin()

    def effective(self) -> bool:
        now = self.passed()
        silent = all(count == self.before.get(connection, 0) for connection, count in now.items())
        return silent and bool(self.before or now) and all(took >= 0.3 for took in self.answers_in(0.3))


class Lost(Cut):
    """The kernel drops all packets in a network namespace, and no connection can be made."""

    def __str__(self) -> str:
        return f"packets lost by the kernel: {super().__str__()}"

    def strike(self) -> None:
        for proxy in self.proxies.values():
            namespace.cut(port_of(proxy))

    def effective(self) -> bool:
        if any(count != self.before.get(connection, 0) for connection, count in self.passed().items()):
            return False
        return not any(wire.listens(port_of(proxy)) for proxy in self.proxies.values())

    def end(self) -> None:
        for proxy in self.proxies.values():
            namespace.heal(port_of(proxy))


class Slow(Ways):
    """A fault in which every piece of data is delayed."""

    fault = Fault(kind=Kind.DELAY, seconds=0.15)

    def effective(self) -> bool:
        return all(took >= self.fault.seconds for took in self.answers_in(1.0))


class SlowDisk:
    """A fault in which each sync is slow; only for our brokers, see slow_disk.py."""

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


CUTS = {"cut": 2, "cut one way": 1, "cut pair": 1, "name servers": 1}
KINDS = CUTS if namespace.INSIDE else CUTS | {"kill": 3, "stop": 2, "delay": 1, "disk": 1}
"""Kinds of faults and their weights."""


def trouble(group: Group, kind: str, victim: str, dice: random.Random) -> Trouble:
    """Create a fault of a kind in KINDS that affects a broker."""
    leader = group.leader() or "n0"
    # Followers do not communicate with each other, so a cut between them would have no effect.
    other = leader if victim != leader else dice.choice([name for name in BROKERS if name != victim])
    its = [way for way in group.links if victim in way]
    out = [way for way in its if way[0] == victim]
    between = [way for way in its if other in way]
    names = [way for way in its if way[1] in NAME_SERVERS]
    cut = Lost if namespace.INSIDE else Cut
    made: dict[str, Callable[[], Trouble]] = {
        "kill": lambda: Killed(group, victim),
        "stop": lambda: Paused(group, victim),
        "cut": lambda: cut(f"{victim} cut off from everybody but clients", group, its),
        "cut one way": lambda: cut(f"nothing from {victim} arrives", group, out),
        "cut pair": lambda: cut(f"{victim} and {other} cut off from each other", group, between),
        "name servers": lambda: cut(f"{victim} cut off from the name servers", group, names),
        "delay": lambda: Slow(f"slow ways of {victim}", group, its),
        "disk": lambda: SlowDisk(group, victim),
    }
    return made[kind]()


class IdleNemesisError(AssertionError):
    """A fault without effect, which makes a run meaningless."""


def inflict(faults: Sequence[Trouble], seconds: float) -> None:
    """Apply faults together for some seconds. Raises IdleNemesisError if a fault has no effect."""
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


def idle_faults_do_not_show(group: Group, dice: random.Random) -> None:
    """Check that faults that have not begun report no effect; otherwise the detection is useless."""
    leader = group.wait_for_leader()
    for fault in [trouble(group, kind, leader, dice) for kind in KINDS]:
        wait_until(f"no effect of {fault}, which has not begun", partial(_idle, fault))


def _idle(fault: Trouble) -> bool:
    return not fault.effective()
