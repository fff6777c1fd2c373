"""Check a recorded history of client operations against the guarantees of CometMQ.

Each rule is a function that depends only on the history. Apart from sorting, its run time is linear in the
length of the history.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property

import msgspec

from cometmq.testing.history import Operation, operations

MAX_SHOWN_PROBLEMS = 20
_FOREVER = float("inf")


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of servers and consumers that a history is checked against.

    Attributes:
        tries: Maximum number of redeliveries of a message after its first delivery, before the message
            becomes a dead letter (RocketMQ's maxReconsumeTimes).
        check_s: Time in seconds within which a transaction must be committed or rolled back.
        late_s: Maximum delay in seconds of a delayed message's delivery after its due time.
        filtering: Names of the groups that subscribe with a filter, and therefore need not receive every
            message.
    """

    tries: int = 16
    check_s: float = 60.0
    late_s: float = 2.0
    filtering: frozenset[str] = frozenset()


class Problem(msgspec.Struct, frozen=True):
    """A violation of a guarantee.

    Attributes:
        rule: Name of the violated rule, such as "nothing lost".
        what: Description of the violation: the message, queue or group and what happened.
    """

    rule: str
    what: str


class HistoryViolation(AssertionError):
    """A history violates at least one guarantee.

    `problems` lists all violations; the text shows the first 20.
    """

    def __init__(self, problems: list[Problem]) -> None:
        shown = [f"{problem.rule}: {problem.what}" for problem in problems[:MAX_SHOWN_PROBLEMS]]
        more = f"and {len(problems) - MAX_SHOWN_PROBLEMS} more" if len(problems) > MAX_SHOWN_PROBLEMS else ""
        super().__init__("\n".join(["the history violates guarantees", *shown, more]).rstrip())
        self.problems = problems

    def __reduce__(self) -> tuple[type[HistoryViolation], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class Report(msgspec.Struct, kw_only=True):
    """The result of checking a history.

    Attributes:
        sent: Number of messages whose send was acknowledged.
        unknown: Number of messages whose send ended without a result, and which may have been stored.
        refused: Number of messages whose send failed.
        delivered: Number of pairs of a group and a message that the group read or handled successfully.
        duplicates: Number of successful deliveries to a group beyond the first one of each message.
            At-least-once delivery permits duplicates.
        problems: Violations of guarantees; empty if the history is correct.
    """

    sent: int
    unknown: int
    refused: int
    delivered: int
    duplicates: int
    problems: list[Problem]

    def verify(self) -> Report:
        """Return this report if it contains no problem.

        Raises:
            HistoryViolation: The report contains a problem.
        """
        if self.problems:
            raise HistoryViolation(self.problems)
        return self


class _Index:
    """The operations of a history. Its properties group them as the rules need them, such as by message."""

    def __init__(self, history: list[Operation], expected: Expected) -> None:
        self.history = history
        self.expected = expected
        self.last = max((each.ended or each.began for each in history), default=0.0)

    def of(self, *ops: str) -> list[Operation]:
        return [each for each in self.history if each.op in ops]

    @cached_property
    def sends(self) -> dict[str, list[Operation]]:
        return by_message(self.of("send"))

    @cached_property
    def deliveries(self) -> dict[str, list[Operation]]:
        """All deliveries, by message: successful pulls, and all listener calls, successful or not."""
        return by_message(each for each in self.of("read", "handle") if each.op == "handle" or is_ok(each))

    @cached_property
    def cancelled(self) -> dict[str, list[Operation]]:
        return by_message(each for each in self.of("cancel") if each.result != "fail")

    @cached_property
    def ends(self) -> dict[str, list[Operation]]:
        return by_message(self.of("end"))

    @cached_property
    def dead(self) -> Counter[tuple[str, str]]:
        return Counter((each.group, each.message) for each in self.of("dead") if is_ok(each))

    def outcomes(self, message: str, results: Collection[str] = ("ok",)) -> set[str]:
        return {each.outcome for each in self.ends.get(message, []) if each.result in results}


def by_message(history: Iterable[Operation]) -> dict[str, list[Operation]]:
    grouped: dict[str, list[Operation]] = defaultdict(list)
    for each in history:
        grouped[each.message].append(each)
    return grouped


def is_ok(operation: Operation) -> bool:
    return operation.result == "ok"


def check_history(lines: Iterable[str | bytes], expected: Expected | None = None) -> Report:
    """Check a history against all guarantees.

    Args:
        lines: JSON lines as `History.lines` returns them, or the lines of a file. Empty lines are ignored.
        expected: Settings of servers and consumers that the history is checked against. Default:
            `Expected()`.

    Returns:
        Counts of messages and all violations. Call `verify` on it to raise an error for violations.

    Raises:
        HistoryError: A line is not a valid event.
    """
    history = operations(lines)
    index = _Index(history, expected if expected is not None else Expected())
    problems = [Problem(name, what) for name, rule in RULES.items() for what in rule(index)]
    sends = Counter(each.result for each in index.of("send"))
    seen = Counter(
        (each.group, each.message)
        for each in itertools.chain.from_iterable(index.deliveries.values())
        if is_ok(each)
    )
    return Report(
        sent=sends["ok"],
        unknown=sends["unknown"],
        refused=sends["fail"],
        delivered=len(seen),
        duplicates=seen.total() - len(seen),
        problems=problems,
    )


def nothing_lost(index: _Index) -> Iterator[str]:
    """No group misses a message whose send was acknowledged.

    Each group of the topic has read the message (handled it, if the group uses listeners), or the message is
    among the dead letters of the group.
    """
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for message, deliveries in index.deliveries.items():
        for send in index.sends.get(message, [])[:1]:
            for each in deliveries:
                if groups[send.topic].get(each.group) != "handle":
                    groups[send.topic][each.group] = each.op
    for each in index.of("own", "settled"):
        groups[each.topic].setdefault(each.group, "read")
    for message, sends in index.sends.items():
        ok = next(filter(is_ok, sends), None)
        if ok is None or message in index.cancelled:
            continue
        if ok.half and index.outcomes(message) != {"commit"}:
            continue
        if ok.due is not None and ok.due + index.expected.late_s > index.last:
            continue
        wanted = {
            group: op for group, op in groups[ok.topic].items() if group not in index.expected.filtering
        }
        done = {
            each.group
            for each in index.deliveries.get(message, [])
            if is_ok(each) and each.op == wanted.get(each.group)
        }
        done |= {group for group in wanted if index.dead[group, message]}
        if not groups[ok.topic]:
            yield f"{message} was acknowledged, and no group read topic {ok.topic}"
        for group in sorted(wanted.keys() - done):
            yield (
                f"{message} was acknowledged but not {'handled' if wanted[group] == 'handle' else 'read'}"
                + (f" by group {group}" if group else "")
            )


def nothing_invented(index: _Index) -> Iterator[str]:
    """Each delivered message was sent to its topic before the delivery, and its send did not fail."""
    for message, deliveries in index.deliveries.items():
        results = {each.result for each in index.sends.get(message, [])}
        first = deliveries[0]
        if not results:
            yield f"{message} was delivered to {first.process} but never sent"
        elif results == {"fail"}:
            yield f"{message} was delivered to {first.process} although its send failed"
        elif min(each.began for each in index.sends[message]) > first.began:
            yield f"{message} was delivered to {first.process} before it was sent"
        topics = {each.topic for each in index.sends.get(message, [])}
        for each in deliveries:
            if topics and each.topic and each.topic not in topics and not each.topic.startswith("%RETRY%"):
                yield f"{message} was delivered to {each.process} as a message of topic {each.topic}"
                break


def one_message_per_offset(index: _Index) -> Iterator[str]:
    """No offset of a queue is missing between its first and last message, and each holds only one message."""
    messages: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    topics = {each.topic for each in index.of("send")}
    for each in index.of("send", "read", "handle"):
        if each.offset is None or not each.queue or (each.op != "handle" and not is_ok(each)):
            continue
        first = messages[each.topic, each.queue].setdefault(each.offset, each.message)
        if first != each.message:
            yield f"{each.topic} {each.queue} has {first} and {each.message} at offset {each.offset}"
    lows = {(each.topic, each.queue): each.min for each in reversed(index.of("bounds")) if is_ok(each)}
    for (topic, queue), by_offset in messages.items():
        if topic not in topics:
            continue  # Retry topics are skipped, because the history does not contain the sends to them
        low = min(min(by_offset), lows.get((topic, queue), min(by_offset)))
        # The missing offsets are counted by subtraction and not in a loop, because a damaged offset may be as
        # large as 2**62.
        missing = max(by_offset) + 1 - low - len(by_offset)
        if missing:
            gap = next(offset for offset in itertools.count(low) if offset not in by_offset)
            yield f"{topic} {queue}: offset {gap} is missing (missing offsets: {missing})"


def commits_within_bounds(index: _Index) -> Iterator[str]:
    """A group's committed offset lies between the queue's min offset and max offset."""
    highs: dict[tuple[str, str], int] = defaultdict(int)
    lows: dict[tuple[str, str], int] = {}
    for each in index.of("bounds"):
        queue = (each.topic, each.queue)
        highs[queue] = max(highs[queue], each.max)
        lows[queue] = min(lows.get(queue, each.min), each.min)
    for each in index.of("send", "read", "handle"):
        if each.offset is not None:
            highs[each.topic, each.queue] = max(highs[each.topic, each.queue], each.offset + 1)
    for each in index.of("commit"):
        queue = (each.topic, each.queue)
        assert each.offset is not None
        if each.result != "fail" and not lows.get(queue, 0) <= each.offset <= highs[queue]:
            yield f"group {each.group} committed {each.offset} of {queue}, which ends at {highs[queue]}"


def progress(index: _Index) -> Iterator[str]:
    """A group's committed offset decreases only if an operator resets it."""
    queues: dict[tuple[str, str, str], list[Operation]] = defaultdict(list)
    for each in index.of("commit", "reset"):
        if each.result != "fail":
            queues[each.group, each.topic, each.queue].append(each)
    for group_queue, commits in queues.items():
        highest: Operation | None = None
        waiting = deque(sorted((each for each in commits if each.op == "commit" and is_ok(each)), key=_end))
        resets = [each for each in commits if each.op == "reset"]
        for each in commits:
            if each.op == "reset" or not is_ok(each):
                continue
            while waiting and _end(waiting[0]) <= each.began:
                newest = waiting.popleft()
                if any(_end(reset) >= newest.began and reset.began <= _end(newest) for reset in resets):
                    highest = None
                if highest is None or (newest.offset or 0) > (highest.offset or 0):
                    highest = newest
            if highest is None or (each.offset or 0) >= (highest.offset or 0):
                continue
            if not any(reset.began <= _end(each) and _end(reset) >= highest.began for reset in resets):
                yield f"{group_queue} went back from {highest.offset} to {each.offset}"


def _end(operation: Operation) -> float:
    return _FOREVER if operation.ended is None else operation.ended


def reads_in_order(index: _Index) -> Iterator[str]:
    """While a member owns a queue, the offsets of its reads increase."""
    restarts: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in index.of("own", "reset"):
        restarts[each.group, each.topic, each.queue].append(each.began)
    before: dict[tuple[str, str, str, str], Operation] = {}
    for each in index.of("read"):
        if not is_ok(each):
            continue
        group_queue = (each.group, each.topic, each.queue)
        last = before.get((each.process, *group_queue))
        before[each.process, *group_queue] = each
        if last is None or any(last.began <= at <= each.began for at in restarts[group_queue]):
            continue
        if (each.offset or 0) <= (last.offset or 0):
            yield f"{each.process} read {group_queue} at {each.offset} after {last.offset}"


def strict_order(index: _Index) -> Iterator[str]:
    """Messages with the same key are handled one at a time, each after all earlier messages with that key."""
    calls: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    stored: dict[str, set[tuple[int, str]]] = defaultdict(set)
    queues: dict[str, str] = {}
    for each in index.of("send", "handle"):
        if not each.key or each.offset is None:
            continue
        stored[each.key].add((each.offset, each.message))
        queues.setdefault(each.message, each.queue)
        if each.op == "handle":
            calls[each.group, each.key].append(each)
    for (group, key), history in calls.items():
        pending = deque(sorted(stored[key]))
        done = {message for dead_group, message in index.dead if dead_group == group}
        for before, call in itertools.pairwise([None, *history]):
            if call is None:
                continue
            if before is not None:
                if _end(before) > call.began:
                    yield f"{call.message} of key {key} is handled during the call for {before.message}"
                if is_ok(before):
                    done.add(before.message)
            while pending and pending[0][1] in done:
                pending.popleft()
            if pending and pending[0][0] < (call.offset or 0) and queues[pending[0][1]] == call.queue:
                yield f"{call.message} of key {key} overtakes {pending[0][1]} in group {group}"


def one_owner(index: _Index) -> Iterator[str]:
    """While a group's members do not change, exactly one of them owns each queue.

    In a broadcasting group, every member owns each queue.
    """
    owned: dict[tuple[str, str, str], list[Operation]] = defaultdict(list)
    for each in index.of("own"):
        owned[each.group, each.topic, each.queue].append(each)
    for settled in index.of("settled"):
        begin, end = settled.began, min(_end(settled), index.last)
        for queue in settled.queues:
            here = owned[settled.group, settled.topic, queue]
            moments = {begin, end, *(each.began for each in here), *map(_end, here)}
            bounds = sorted(moment for moment in moments if begin <= moment <= end)
            for low, high in itertools.pairwise(bounds):
                owners = sorted(each.process for each in here if each.began <= low and high <= _end(each))
                wanted = sorted(settled.members) if settled.members else owners[:1]
                if not owners or owners != wanted:
                    names = ", ".join(owners) or "no member"
                    yield f"{settled.topic} {queue} of group {settled.group} belongs to {names} at {low:.3f}"
                    break


def transactions(index: _Index) -> Iterator[str]:
    """A half message is committed or rolled back once, in time, and is delivered only if it was committed."""
    for message, sends in index.sends.items():
        ok = next((each for each in sends if each.half and each.result != "fail"), None)
        if ok is None:
            continue
        outcomes = index.outcomes(message)
        if len(outcomes) > 1:
            yield f"{message} was committed and rolled back"
        open_until = _end(ok) + index.expected.check_s
        in_time = any(is_ok(each) and _end(each) <= open_until for each in index.ends.get(message, []))
        if is_ok(ok) and not in_time and index.last > open_until:
            yield f"{message} was still open {index.expected.check_s:g} s after it was sent"
        committed = min(
            (
                each.began
                for each in index.ends.get(message, [])
                if each.outcome == "commit" and each.result != "fail"
            ),
            default=_FOREVER,
        )
        for delivery in index.deliveries.get(message, [])[:1]:
            if delivery.began < committed:
                state = "rolled back" if "rollback" in outcomes else "not committed"
                yield f"{message} was delivered to {delivery.process} but was {state}"


def timers(index: _Index) -> Iterator[str]:
    """A delayed message is delivered at its due time, and never after a successful cancellation."""
    for message, sends in index.sends.items():
        due = sends[0].due
        deliveries = index.deliveries.get(message, [])
        if due is None or not deliveries:
            continue
        first = deliveries[0]
        if first.began < due:
            yield f"{message} was delivered {due - first.began:.3f} s too early"
        elif first.began > max(due, sends[0].ended or sends[0].began) + index.expected.late_s:
            yield f"{message} was delivered {first.began - due:.3f} s too late"
        for cancel in index.cancelled.get(message, []):
            if is_ok(cancel) and deliveries[-1].began > _end(cancel):
                yield f"{message} was delivered after it was cancelled"
                break


def retries(index: _Index) -> Iterator[str]:
    """A message that keeps failing is redelivered up to the limit and then becomes one dead letter."""
    max_calls = index.expected.tries + 1
    failed: Counter[tuple[str, str]] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    handled: set[tuple[str, str]] = set()
    for each in index.of("handle"):
        if each.result == "fail":
            failed[each.group, each.message] += 1
        elif is_ok(each):
            handled.add((each.group, each.message))
        else:
            unknown[each.group, each.message] += 1
    for (group, message), count in failed.items():
        if count > max_calls:
            yield f"{message} failed {count} times in group {group}, whose limit is {max_calls}"
        elif count == max_calls and (group, message) not in handled and not index.dead[group, message]:
            yield f"{message} failed {count} times in group {group} but is not a dead letter"
    for (group, message), count in index.dead.items():
        if count > 1:
            yield f"{message} is {count} dead letters of group {group}"
        if not failed[group, message]:
            yield f"{message} is a dead letter of group {group} but never failed"
        elif failed[group, message] + unknown[group, message] < max_calls:
            count = failed[group, message]
            yield f"{message} is a dead letter of group {group} after {count} of {max_calls} failures"


RULES: dict[str, Callable[[_Index], Iterator[str]]] = {
    "nothing lost": nothing_lost,
    "nothing invented": nothing_invented,
    "one message per offset": one_message_per_offset,
    "commits within bounds": commits_within_bounds,
    "progress": progress,
    "reads in order": reads_in_order,
    "strict order": strict_order,
    "one owner": one_owner,
    "transactions": transactions,
    "timers": timers,
    "retries": retries,
}
"""Rules by the names that `Problem.rule` reports."""
