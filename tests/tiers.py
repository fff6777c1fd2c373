"""A pytest plugin: the tiers of the tests, and the progress, slowest files and slow tests of a run.

`make test-fast`, `make test` and `make test-all` select tests by tier. :func:`tier_of` decides which tier.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from enum import IntEnum
from pathlib import Path

import pytest
from tests.interop.jars import locked

MAX_UNMARKED_S = 5.0
"""Duration above which a test needs the mark ``slow``, in seconds on a quiet machine."""
SLOWEST_FILES = 10
PROGRESS_INTERVAL_S = 15.0
NEEDS_FOREIGN_PROGRAM = {
    "admin_shells", "apache_clusters", "browser", "browser_page", "connect_address", "java_clients", "java",
    "own_java_client", "spark",
}  # fmt: skip
"""Fixtures that start a JVM or a browser."""
MARKERS = (
    "slow(why): takes more than 5 s on a quiet machine; runs in `make test-all`",
    "foreign(program): starts a JVM or a browser without a fixture that does; runs in `make test-all`",
    "thorough(why): repeats on more input what another test shows; runs in `make test-all`",
    "representative(row): runs in `make test` although slow or foreign; with the id of a row, that row alone",
)


class Tier(IntEnum):
    """The smallest command that runs a test."""

    FAST = 0
    TEST = 1
    ALL = 2


REASONS = ("slow", "foreign", "thorough")
"""The marks that tell why a test is not in `make test`."""
TIERS = {
    "fast": {Tier.FAST},
    "test": {Tier.FAST, Tier.TEST},
    "rest": {Tier.ALL},
    "all": {Tier.FAST, Tier.TEST, Tier.ALL},
}
INTEROP = "tests/interop/"
NOT_FAST = (
    "tests/admin/commands/test_brokers.py", "tests/admin/commands/test_offsets.py",
    "tests/admin/test_dead_letters.py", "tests/admin/test_simple_consumers.py",
    "tests/admin/test_two_brokers.py", "tests/broker/access/test_guard.py",
    "tests/broker/base/test_protection.py", "tests/broker/pull/test_throttled_pulls.py",
    "tests/broker/rates/test_throttle.py", "tests/broker/groups/test_client_requests.py",
    "tests/broker/lite/test_lite_topics.py", "tests/broker/pull/test_pull.py",
    "tests/broker/admin/test_settings_requests.py", "tests/broker/send/test_dedup.py",
    "tests/broker/send/test_send_templates.py", "tests/broker/test_tiered_storage.py",
    "tests/broker/replication/", "tests/broker/tables/test_durable.py", "tests/broker/test_standalone.py",
    "tests/broker/timers/", "tests/broker/transactions/test_checks.py::test_every_transaction_ends_once",
    "tests/cli/", "tests/client/cluster/", "tests/client/consumer/test_orderly.py",
    "tests/client/consumer/test_queue_locks.py", "tests/client/consumer/test_stream.py",
    "tests/client/test_blocking.py", "tests/client/test_examples.py", "tests/client/test_scenarios.py",
    "tests/client/test_signals.py", "tests/console/", "tests/faults/", "tests/filtersrv/",
    "tests/grpc/gateway/", "tests/grpc/http2/test_sessions.py", "tests/grpc/service/", "tests/grpc/test_",
    "tests/integrations/", "tests/pipeline/",
    "tests/protocol/record/test_arrow.py",
    "tests/protocol/record/test_one.py::test_no_other_module_knows",
    "tests/raft/test_node.py::test_a_group_survives", "tests/remoting/test_client.py",
    "tests/remoting/test_tls.py", "tests/simulation/", "tests/store/background/test_deleted_files.py",
    "tests/store/background/test_refused_deletion.py", "tests/store/base/test_descriptors.py",
    "tests/store/inspect/", "tests/store/raft_log/test_apache_member.py",
    "tests/store/raft_log/test_log_ends.py", "tests/store/recovery/test_recovery.py",
    "tests/store/tables/test_table_checks.py", "tests/store/tiered/", "tests/store/test_faults.py",
    "tests/store/test_kill.py", "tests/store/test_truncation.py", "tests/test_architecture.py",
    "tests/test_dead_code.py", "tests/test_deploy.py", "tests/test_first_run.py",
    "tests/test_readme.py", "tests/test_secrets.py", "tests/test_tiers.py", "tests/testing/", "tests/typing/",
)  # fmt: skip
"""Folders, files and prefixes of ids of slow tests.

They start processes, import Spark, wait for elections or repeat work many times.
"""


def tier_of(item: pytest.Item) -> Tier:
    """Return the tier of a test: by its marks, the fixtures that it uses, and its folder.

    Raises:
        pytest.UsageError: a ``slow``, ``foreign`` or ``thorough`` mark does not say why.
    """
    marks = {mark.name: mark for mark in item.iter_markers()}
    reasons = [marks[name] for name in REASONS if name in marks]
    if any(not mark.args for mark in reasons):
        raise pytest.UsageError(f"{item.nodeid}: a mark {reasons[0].name} says why")
    if "representative" in marks and marks["representative"].args in ((), (row_of(item),)):
        return Tier.TEST
    fixtures = getattr(item, "fixturenames", ())
    if reasons or item.nodeid.startswith(INTEROP) or not NEEDS_FOREIGN_PROGRAM.isdisjoint(fixtures):
        return Tier.ALL
    return Tier.TEST if item.nodeid.startswith(NOT_FAST) else Tier.FAST


def check_representative_rows(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Raise a ``pytest.UsageError`` if a ``representative`` mark names a row that its test does not have."""
    if any("::" in argument for argument in config.args) or config.getoption("lf", False):
        return  # not all rows are collected
    rows_of: dict[str, set[str]] = defaultdict(set)
    named: dict[str, str] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        rows_of[test].add(row_of(item))
        for mark in item.iter_markers("representative"):
            named.update((test, row) for row in mark.args)
    for test, row in named.items():
        if row not in rows_of[test]:
            raise pytest.UsageError(f"{test} has no row {row!r}, which its mark representative names")


def row_of(item: pytest.Item) -> str:
    """Return the id of a test's parameters, or "" if it has none."""
    return item.name.partition("[")[2].removesuffix("]")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests: see tests/README.md")


@pytest.hookimpl(trylast=True)  # the terminal reporter exists by then
def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunReport(config), "cometmq-run-report")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip paths without fast tests: collecting all tests takes each process twice as much CPU."""
    if config.getoption("tier") != "fast":
        return None
    path = f"{collection_path.as_posix()}/".removeprefix(f"{config.rootpath.as_posix()}/")
    return path.startswith((INTEROP, *NOT_FAST)) or None


@pytest.hookimpl(tryfirst=True)  # before -k selects: the rows of a test are complete
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check_representative_rows(config, items)
    wanted = TIERS[config.getoption("tier")]
    kept, others = [], []
    for item in items:
        (kept if tier_of(item) in wanted else others).append(item)
    if others:
        items[:] = kept
        config.hook.pytest_deselected(items=others)


class RunReport:
    """A report of progress where the output is not a terminal, and of the slowest files and slow tests.

    A test without any of ``REASONS`` is listed if it took more than ``MAX_UNMARKED_S`` in this run and in its
    previous run. Runs with ``--tier`` keep this record in the cache of the tests, which survives a checkout.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started = time.monotonic()
        self._running: dict[str, None] = {}
        self._outcomes: Counter[str] = Counter()
        self._total = 0
        self._file_s: dict[str, float] = defaultdict(float)
        self._unmarked_s: dict[str, float] = {}
        self._ended = threading.Event()
        # Without worker processes, pytest itself prints a line for each file.
        self._prints_progress = (
            bool(config.getoption("numprocesses", None))
            and config.option.verbose <= 0
            and not sys.stdout.isatty()
        )

    def pytest_sessionstart(self) -> None:
        if self._prints_progress:
            threading.Thread(target=self._print_progress, name="test-progress", daemon=True).start()

    def pytest_sessionfinish(self) -> None:
        self._ended.set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._total = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport
    ) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        """Print no dots where progress is printed in lines, and print names of failed tests immediately."""
        category, letter, word = yield
        if self._prints_progress and letter:
            letter = f"{category.upper()} {report.nodeid}\n" if report.failed else ""
        return category, letter, word

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._file_s[report.nodeid.partition("::")[0]] += report.duration
        if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
            self._outcomes[report.outcome] += 1
        if report.when == "call" and not any(name in report.keywords for name in REASONS):
            self._unmarked_s[report.nodeid] = report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._file_s.items(), key=lambda each: -each[1])[:SLOWEST_FILES]
        if sum(self._outcomes.values()) > SLOWEST_FILES and slowest:
            terminalreporter.section("slowest files")
            for file, seconds in slowest:
                terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
        if self._config.getoption("tier") != "all":
            try:
                with locked("slow-tests") as directory:
                    over = exceeded_twice(directory / "slow-tests.json", self._unmarked_s)
            except OSError as error:
                terminalreporter.write_line(f"the slow tests of this run are not recorded: {error}")
                over = []
            if over:
                terminalreporter.section(
                    f"over {MAX_UNMARKED_S:g} s in two runs in a row, without a mark that tells why"
                )
                for nodeid in over:
                    terminalreporter.write_line(f"{self._unmarked_s[nodeid]:7.1f} s  {nodeid}")

    def progress(self) -> str:
        """Return one line: time since the start, tests done of all, failures, and the tests that run."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        if not self._total:
            return f"[{minutes:2}:{seconds:02}] collecting tests"
        done, failed = self._outcomes.total(), self._outcomes["failed"]
        failures = f", {failed} failed" if failed else ""
        running = ", ".join(dict.fromkeys(nodeid.partition("::")[0] for nodeid in list(self._running)))
        return (
            f"[{minutes:2}:{seconds:02}] {done:,} of {self._total:,} tests{failures}"
            f" ({100 * done // self._total}%); running: {running}"
        )

    def _print_progress(self) -> None:
        writer = self._config.get_terminal_writer()
        while not self._ended.wait(PROGRESS_INTERVAL_S):
            writer.write(f"{self.progress()}\n", flush=True)


def exceeded_twice(record: Path, durations_s: dict[str, float]) -> list[str]:
    """Return the tests that took too long in this run and in their previous run.

    Args:
        record: A JSON list of the tests whose last run took too long; it is updated.
        durations_s: Durations of this run's tests without any of ``REASONS``, in seconds.
    """
    try:
        before = set(json.loads(record.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        before = set()
    over = {nodeid for nodeid, seconds in durations_s.items() if seconds > MAX_UNMARKED_S}
    record.write_text(json.dumps(sorted(over | (before - durations_s.keys())), indent=1))
    return sorted(over & before)
