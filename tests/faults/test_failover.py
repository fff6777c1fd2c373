"""Groups of brokers among faults: by the histories of our client and Java's, no acknowledged message is lost.

COMETMQ_FAILOVER_RUNS sets the number of runs (5), COMETMQ_FAILOVER_SEED the first seed. The last test prints
the table in docs/replication.md.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults import namespace
from tests.faults.failover import run, verify, windows
from tests.faults.groups import Layout
from tests.faults.nemesis import IdleNemesisError, inflict
from tests.interop.driver import Driver
from tests.interop.processes import side_by_side
from tests.long_form import long_form

from cometmq.testing import HistoryViolation, check_history
from cometmq.testing.history import operations

RUNS = int(os.environ.get("COMETMQ_FAILOVER_RUNS", "5"))
SEED = int(os.environ.get("COMETMQ_FAILOVER_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
AT_ONCE = 5
RAFT, PAIR = Layout(raft=True), Layout(raft=False)


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver("4.9.8", tmp_path_factory.mktemp("java"))
    yield driver
    driver.stop()


@pytest.mark.slow("several runs of a group under faults, with a JVM")
@pytest.mark.timeout(300 + 60 * RUNS)
def test_nothing_acknowledged_is_lost_among_faults(tmp_path: Path, java: Driver) -> None:
    cases = [(PAIR if number % 5 in (1, 3) else RAFT, SEED + number) for number in range(RUNS)]

    def one(layout: Layout, seed: int) -> None:
        print(f"COMETMQ_FAILOVER_SEED={seed}: {layout.title}")
        for history in run(layout, tmp_path / str(seed), java, seed):
            report = verify(history)
            print(f"{layout.title}, seed {seed}: {report.sent} acknowledged, {report.unknown} unknown")
            assert report.sent >= 60  # `run` waits for so many, at least
            the_loss_of_one_is_seen(history, random.Random(seed))

    for first in range(0, RUNS, AT_ONCE):
        side_by_side(one, cases[first : first + AT_ONCE])


@pytest.mark.slow("brokers and a Java client fail over in a network namespace")
@pytest.mark.timeout(120 + 60 * RUNS)
def test_nothing_is_lost_where_the_kernel_loses_packets(tmp_path: Path, java: Driver) -> None:
    """Run the test in a network namespace without registries; `java` has fetched its jars before."""
    if not namespace.possible():
        pytest.skip("this machine gives no network namespaces (unshare, ip): cuts are those of proxies alone")
    done = namespace.run_again(
        f"{__file__}::{test_nothing_acknowledged_is_lost_among_faults.__name__}",
        tmp_path / "inside",
        timeout_s=100 + 60 * RUNS,
        COMETMQ_FAILOVER_RUNS=str(max(1, RUNS // 5)),
        COMETMQ_FAILOVER_SEED=str(SEED),
    )
    print(done.stdout[-20_000:])
    assert done.returncode == 0
    assert "packets lost by the kernel" in done.stdout


def the_loss_of_one_is_seen(history: list[bytes], dice: random.Random) -> None:
    """Check that the history without a read of one acknowledged message breaks the guarantee."""
    lost = dice.choice([
        each.message for each in operations(history) if each.op == "send" and each.result == "ok"
    ])  # fmt: skip
    events = [json.loads(line) for line in history]
    reads = {
        (each["process"], each["id"])
        for each in events
        if each.get("message") == lost and each["op"] == "read"
    }
    assert reads
    without = [
        line for line, each in zip(history, events, strict=True) if (each["process"], each["id"]) not in reads
    ]
    with pytest.raises(HistoryViolation, match=f"{lost} was acknowledged but not read"):
        verify(without)


def test_a_nemesis_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        ended = False

        def begin(self) -> None:
            pass

        def effective(self) -> bool:
            return False

        def end(self) -> None:
            self.ended = True

    monkeypatch.setattr("tests.faults.nemesis.PATIENCE_S", 0.1)
    idle = Idle()
    with pytest.raises(IdleNemesisError):
        inflict([idle], 0)
    assert idle.ended


@long_form("minutes: DLedger does not look for another leader before 6 s are over")
@pytest.mark.timeout(1800)
def test_how_long_nobody_can_send_beside_apaches(tmp_path: Path, java: Driver) -> None:
    """Our group and Apache's run concurrently, since both mostly wait."""
    for raft, seconds in ((True, 20.0), (False, 6.0)):
        rows: dict[str, dict[bool, str]] = defaultdict(dict)

        def measure(
            layout: Layout, directory: Path, seconds: float, rows: dict[str, dict[bool, str]]
        ) -> None:
            found, history = windows(layout, directory, java, seconds)
            for each in found:
                rows[each.what][layout.apache] = f"{each.java:.1f} / {each.ours:.1f}"
            report = check_history(history)
            lost = [problem for problem in report.problems if problem.rule == "nothing lost"]
            print(f"{layout.title}: {report.sent} acknowledged, {len(lost)} lost, {report.unknown} unknown")
            if not layout.apache:
                verify(history)
                assert all(each.java < 15 and each.ours < 15 for each in found)

        cases = [
            (Layout(raft, apache), tmp_path / f"{raft}-{apache}", seconds, rows) for apache in (False, True)
        ]
        side_by_side(measure, cases)
        print("| fault | CometMQ | Apache |")
        for what, cells in rows.items():
            print(f"| {what} | {cells[False]} | {cells[True]} |")
