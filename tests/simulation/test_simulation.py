"""Seeded runs of real brokers, clients and raft cores with simulated time, network and disks.

COMETMQ_SIM_SEEDS sets the number of seeds and COMETMQ_SIM_FIRST the first one. COMETMQ_SIM_SEED runs a single
seed and prints its history.
"""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
from tests.simulation.disks import SimulatedDisk
from tests.simulation.network import Network
from tests.simulation.planted import BUGS
from tests.simulation.run import Plan, Run, plan_of
from tests.simulation.seeds import CLUSTERS, SeedFailed, each_of, many, rarely_collecting, what_is

from cometmq.testing.history import operations

SEEDS = int(os.environ.get("COMETMQ_SIM_SEEDS", "6000"))
FIRST = int(os.environ.get("COMETMQ_SIM_FIRST", "1"))
ALONE = int(os.environ.get("COMETMQ_SIM_SEED", "0"))
AT_ONCE = 250
IN_MAKE_TEST = 2_000
"""Number of seeds in `make test`; `make test-all` runs all seeds."""
MOST_TRIED = 300
"""Number of seeds within which a planted bug must be found."""
STRIKES = (
    "clean stop", "clock step", "cut", "full", "kill", "loss", "lost disk", "member killed", "member left",
    "move", "pause", "power loss", "remove", "reset", "rot", "slow disk", "slow network", "sync error",
    "transfer", "volatile at power loss", "write error",
)  # fmt: skip
"""Faults that every few hundred seeds must show, since otherwise they have no effect."""
NOTED = ("bounds", "commit", "dead", "end", "handle", "own", "read", "send", "settled")
"""Operations that the rules of histories check: without them a rule cannot find anything."""


def _no_cut(_network: Network, *_directions: tuple[str, str]) -> None:
    """A fault without effect."""


def missing(first: int, count: int) -> set[str]:
    """Return the faults and operations that occurred in none of these runs of clusters, `count` at most."""
    left = {*STRIKES, *NOTED}
    for seed in rarely_collecting(range(first, first + count)):
        outcome = Run(seed)()
        left.difference_update(outcome.seen, (each.op for each in operations(outcome.history)))
        if not left:
            break
    return left


@pytest.mark.slow("up to 280 seeds of clusters")
def test_faults_strike_and_some_that_do_not_are_noticed() -> None:
    with many():
        assert missing(1, 250) == set()
        with (
            mock.patch.object(Network, "cut", _no_cut),
            mock.patch.object(SimulatedDisk, "after_power_loss", lambda self: self),
        ):
            assert missing(1, 30) >= {"cut", "volatile at power loss"}


@pytest.mark.slow("three clusters in three processes")
def test_a_seed_is_one_run_in_any_process() -> None:
    faults = frozenset({"kill", "cut", "loss"})
    plans = [
        Plan("pair", "retries", faults, True),
        Plan("raft", "plain", faults | {"change"}, True),
        plan_of(8),
    ]
    program = (
        "from tests.simulation.test_simulation import digests; from tests.simulation.run import *\n"
        f"print(digests([{', '.join(map(repr, plans))}]))"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))}
    told = [
        subprocess.run(command, env={**environment, "PYTHONHASHSEED": text}, capture_output=True, check=True)
        for text in ("1", "2")
    ]
    assert told[0].stdout == told[1].stdout == f"{digests(plans)}\n".encode()


def digests(plans: list[Plan]) -> list[int]:
    """Return the event checksums of seed 7 with each of these plans."""
    with many():
        return [Run(7, each)().digest for each in plans]


@pytest.mark.thorough("a check of the simulation itself")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with many(), bug.plant():
        assert any(map(bug.find, rarely_collecting(range(1, MOST_TRIED)))), (
            f"{name} was not found by {MOST_TRIED} seeds"
        )


@pytest.mark.skipif(bool(ALONE), reason="one seed runs alone")
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(
            first,
            marks=[pytest.mark.slow("250 seeds"), pytest.mark.representative]
            if first < FIRST + IN_MAKE_TEST
            else [pytest.mark.thorough("more seeds")],
        )
        for first in range(FIRST, FIRST + SEEDS, AT_ONCE)
    ],
)
def test_what_is_promised_holds(first: int) -> None:
    with many():
        each_of(range(first, min(first + AT_ONCE, FIRST + SEEDS)))


@pytest.mark.skipif(not ALONE, reason="COMETMQ_SIM_SEED names a seed to run alone")
def test_a_seed_alone() -> None:
    print(f"seed {ALONE}: {what_is(ALONE)}")
    with many():
        if ALONE % CLUSTERS == 0:
            outcome = Run(ALONE)()
            print(*(line.decode() for line in outcome.history), sep="\n")
            print(*outcome.problems, sep="\n")
        each_of([ALONE])


class _LateRegistration(Run):
    """A run with a member that cannot join until a broker registers, 10 s after the broker's start."""

    def _disturb(self) -> None:
        (name_server,), (broker,) = self.cluster.name_servers, self.cluster.brokers
        self.scheduler.run_for(3.0)
        name_server.kill()
        broker.kill()
        broker.start()
        self.scheduler.run_for(0.5)
        name_server.start()
        self._add_member()
        self.scheduler.run_for(1.5)


def test_a_group_has_settled_after_the_brokers_have_registered_again() -> None:
    with many(), mock.patch("tests.simulation.run._SETTLES", 1.0):
        assert _LateRegistration(1, Plan("one", "plain", frozenset({"kill"}), True))().problems == []


def test_a_failure_names_its_seed() -> None:
    with (
        mock.patch("tests.simulation.seeds.Run", side_effect=RuntimeError("boom")),
        pytest.raises(SeedFailed, match="COMETMQ_SIM_SEED=20 runs it alone"),
    ):
        each_of([20])
