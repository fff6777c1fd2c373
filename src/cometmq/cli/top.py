"""`cometmq top`: a live view of brokers, groups and topics, from two requests to each broker."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import nlargest
from typing import TypeVar

import click

from cometmq.admin import Admin, BrokerStatus
from cometmq.admin.commands.shell import show_error
from cometmq.admin.commands.watching import repeated
from cometmq.admin.rates import LagRates, Lags, disk_of, get_rate, put_rate
from cometmq.admin.servers import MAX_CONCURRENT_BROKERS, ask_each
from cometmq.admin.values import Value, known_sum
from cometmq.cli.options import HELP, json_line, namesrv_option, print_table
from cometmq.client.cluster.workers import for_each
from cometmq.command_options import FiniteRange, name_option, number, opt, say
from cometmq.errors import CometError
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, is_system_group, is_system_topic, topics_at_start
from cometmq.text import printable, seconds

R = TypeVar("R", "GroupRow", "TopicRow")
SORTS = ("lag", "rate", "name")
MAX_SAMPLED_TOPICS = 50
"""The maximum number of topics without groups whose offsets are requested per view."""


class BrokerRow(Value, frozen=True, kw_only=True):
    """A broker process. It reports its rates itself, over the last 10 s. `lag` is in bytes of the log."""

    cluster: str
    name: str
    id: int
    addr: str
    role: str
    in_rate: float | None
    out_rate: float | None
    disk: float | None
    lag: int | None
    problem: str


class GroupRow(Value, frozen=True, kw_only=True):
    """A consumer group. `lag` is in messages. `delay_ms` is the age of the last consumed message."""

    name: str
    topics: int
    rate: float | None
    lag: int
    delay_ms: int | None


class TopicRow(Value, frozen=True, kw_only=True):
    """A topic. `rate` is in messages sent per second. `lag` is the sum over its groups."""

    name: str
    groups: int
    rate: float | None
    lag: int


class Report(Value, frozen=True, kw_only=True):
    """The content of one view. `problems` contains errors by broker address."""

    at_ms: int
    in_rate: float | None
    out_rate: float | None
    lag: int
    brokers: list[BrokerRow]
    groups: list[GroupRow]
    topics: list[TopicRow]
    broker_count: int
    group_count: int
    topic_count: int
    problems: dict[str, str]


class Top:
    """A source of reports. It keeps the last offsets, to compute rates, and the order of the rows."""

    def __init__(self, admin: Admin, cluster: str | None, rows: int, sort: str) -> None:
        self.sort = sort
        self._admin = admin
        self._cluster = cluster
        self._rows = rows
        self._rates = LagRates()
        self._sampled: dict[str, tuple[float, int | None, float | None]] = {}
        """By topic without groups: the time of its last request, the sum of its offsets, and its rate."""
        self._resorted = False
        self._last: tuple[list[BrokerStatus], Lags, dict[str, str]] | None = None

    def sort_next(self) -> None:
        """Select the next order. The next call of `look` sorts the last report again, without requests."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self._resorted = True

    async def look(self) -> Report:
        """Request all values and return a report. The first report has no rates of groups and topics."""
        if not self._resorted or self._last is None:
            brokers = await self._admin.brokers(self._cluster)
            problems = {each.broker_addr: each.problem for each in brokers if each.problem}
            masters: dict[str, str] = {}
            for each in sorted(brokers, key=lambda each: each.broker_id):
                if not each.problem:
                    masters.setdefault(each.broker_name, each.broker_addr)
            missing: dict[str, CometError] = {}
            answers = await ask_each(
                masters, lambda _, addr: self._admin.broker_consume_stats(addr), missing, need_answer=False
            )
            problems |= {masters[name]: str(error) for name, error in missing.items()}
            lags = await self._rates.observe(answers)
            if self._cluster is None:
                await self._sample({topic for _, topic in lags.pairs})
            self._last = brokers, lags, problems
        self._resorted = False
        return self._report(*self._last)

    async def _sample(self, with_groups: set[str]) -> None:
        """Request the offsets of the next topics without groups."""
        names = {
            each
            for each in await self._admin.topics()
            if each not in with_groups
            and not each.startswith((RETRY_PREFIX, DLQ_PREFIX))
            and not is_system_topic(each)
        }
        self._sampled = {name: seen for name, seen in self._sampled.items() if name in names}
        rates = {name: rate for name, (_, _, rate) in self._sampled.items() if rate}
        hot = nlargest(MAX_SAMPLED_TOPICS // 2, rates, key=lambda name: rates[name])

        def turn(name: str) -> tuple[bool, float, str]:
            """Return a sort key. A rate needs two requests; topics with a rate then wait for the others."""
            at, end, rate = self._sampled.get(name, (0.0, None, None))
            return end is None or rate is not None, at, name

        due = [*hot, *sorted(names.difference(hot), key=turn)]

        async def ask(name: str) -> None:
            end: int | None = None
            with suppress(CometError):  # the topic was deleted, or `problems` lists its broker
                end = sum(each.max_offset for each in await self._admin.topic_status(name))
            now = time.monotonic()
            then, before, _ = self._sampled.get(name, (now, None, None))
            rate: float | None = None
            if before is not None and end is not None and now > then:
                rate = max(0, end - before) / (now - then)
            self._sampled[name] = now, end, rate

        await for_each(due[:MAX_SAMPLED_TOPICS], ask, MAX_CONCURRENT_BROKERS)

    def _report(self, brokers: list[BrokerStatus], lags: Lags, problems: dict[str, str]) -> Report:
        now = int(time.time() * 1000)
        topics_of = Counter(group for group, _ in lags.pairs)
        groups = [
            GroupRow(
                name=name,
                topics=topics_of[name],
                rate=lags.group_rates.get(name),
                lag=lag.behind,
                delay_ms=max(now - lag.last_ms, 0) if lag.behind and lag.last_ms > 0 else None,
            )
            for name, lag in lags.groups.items()
            if not is_system_group(name)
        ]
        groups_of: Counter[str] = Counter()
        lag_of: Counter[str] = Counter()
        for (_, topic), lag in lags.pairs.items():
            groups_of[topic] += 1
            lag_of[topic] += lag.behind
        rate_of = {name: rate for name, (_, _, rate) in self._sampled.items()} | lags.topic_rates
        own = set[str]().union(*(topics_at_start(each.cluster_name, each.broker_name) for each in brokers))
        topics = [
            TopicRow(name=name, groups=groups_of[name], rate=rate_of.get(name), lag=lag_of[name])
            for name in {*groups_of, *rate_of}
            if not name.startswith((RETRY_PREFIX, DLQ_PREFIX))
            and not is_system_topic(name)
            and name not in own
        ]
        return Report(
            at_ms=now,
            in_rate=known_sum(map(put_rate, brokers)),
            out_rate=known_sum(map(get_rate, brokers)),
            lag=sum(each.lag for each in groups),
            brokers=[_broker_row(each) for each in brokers[: self._rows]],
            groups=self._first(groups, self.sort),
            # The lag of a topic only sums up the lags of its groups, so topics are sorted by rate instead.
            topics=self._first(topics, "rate" if self.sort == "lag" else self.sort),
            broker_count=len(brokers),
            group_count=len(groups),
            topic_count=len(topics),
            problems=problems,
        )

    def _first(self, rows: list[R], sort: str) -> list[R]:
        orders: dict[str, Callable[[R], tuple[float, float, str]]] = {
            "lag": lambda row: (-row.lag, -(row.rate or 0), row.name),
            "rate": lambda row: (-(row.rate or 0), -row.lag, row.name),
            "name": lambda row: (0, 0, row.name),
        }
        return sorted(rows, key=orders[sort])[: self._rows]


def _broker_row(status: BrokerStatus) -> BrokerRow:
    return BrokerRow(
        cluster=status.cluster_name,
        name=status.broker_name,
        id=status.broker_id,
        addr=status.broker_addr,
        role=status.role,
        in_rate=put_rate(status),
        out_rate=get_rate(status),
        disk=disk_of(status),
        lag=status.lag,
        problem=status.problem,
    )


def print_report(report: Report, sort: str) -> None:
    """Print a report as tables."""
    in_rate, out_rate = (_rate(each) for each in (report.in_rate, report.out_rate))
    say(f"in {in_rate}   out {out_rate}   lag {report.lag:,}   sorted by {sort}\n", bold=True)
    print_table(
        report.brokers,
        {
            f"BROKER ({_of(report.brokers, report.broker_count)})": "name",
            "ID": lambda row: str(row.id), "ADDRESS": "addr",
            "STATE": lambda row: f"down: {row.problem}" if row.problem else row.role,
            "IN/s": "in_rate", "OUT/s": "out_rate",
            "DISK": lambda row: None if row.disk is None else f"{row.disk:.0%}", "LAG, bytes": "lag",
        },
        words=4,
    )  # fmt: skip
    click.echo()
    print_table(
        report.groups,
        {
            f"GROUP ({_of(report.groups, report.group_count)})": "name",
            "TOPICS": "topics", "OUT/s": "rate", "LAG": "lag",
            "DELAY": lambda row: None if row.delay_ms is None else seconds(row.delay_ms // 1000),
        },
    )  # fmt: skip
    click.echo()
    print_table(
        report.topics,
        {
            f"TOPIC ({_of(report.topics, report.topic_count)})": "name",
            "GROUPS": "groups", "IN/s": "rate", "LAG": "lag",
        },
    )  # fmt: skip
    for addr, problem in itertools.islice(report.problems.items(), 5):
        say(printable(f"{addr}: {problem}"), err=True, fg="red")


def _of(rows: Sequence[object], count: int) -> str:
    return f"{len(rows)} of {count:,}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}/s"


@click.command(context_settings=HELP)
@namesrv_option
@name_option("-c --cluster", help="Only brokers of this cluster, and only topics with groups.")
@opt(
    "-i --interval", type=FiniteRange(min=0.5), default=2.0, metavar="SECONDS", help="Time between two views."
)
@number("--rows", low=1, high=1000, default=10, help="Maximum rows per table.")
@opt("--sort", type=click.Choice(SORTS), default="lag", help="Order of rows. For lag, topics use rate.")
@opt("--once", is_flag=True, help="Show the rates of one interval and exit.")
@opt("--json as_json", is_flag=True, help="Print each view as a line of JSON.")
def top(
    namesrv: str, cluster: str | None, interval: float, rows: int, sort: str, once: bool, as_json: bool
) -> None:
    """Show live rates and lags of brokers, groups and topics, until Ctrl-C or `q`.

    The rates of groups and topics are averages between two views. Brokers report their own rates. For topics
    without groups, each view requests the offsets of 50: the busiest topics, and others in turn.

    With `--once` the exit code is 1 if a broker does not answer.
    """

    async def run() -> None:
        async with Admin(namesrv) as admin:
            view = Top(admin, cluster, rows, sort)

            async def show() -> None:
                report = await view.look()
                click.echo(json_line(report)) if as_json else print_report(report, view.sort)
                if report.problems:
                    raise click.exceptions.Exit(1)

            if once or as_json or not sys.stdout.isatty():
                await view.look()  # a rate needs two views
                await asyncio.sleep(interval)
            every = None if once else interval
            await repeated(show, every, show_error, as_json=as_json, keys={"s": view.sort_next})

    asyncio.run(run())
