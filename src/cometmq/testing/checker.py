"""What a history must look like: sets, places, order, owners, progress, transactions, timers, retries.

`check_history(lines)` is a function of the history alone. Each rule is linear in it, but for sorting.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property

import msgspec

from cometmq.testing.history import Operation, operations

SHOWN = 20
_FOREVER = float("inf")


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed on with the servers. Times are seconds.

    tries: how often a message may come again after its first delivery before it is a dead letter
    (maxReconsumeTimes). check_s: how long after its sending a transaction may be open. late_s: how long after
    its time a message may come. filtering: groups that do not want all messages.
    """

    tries: int = 16
    check_s: float = 60.0
    late_s: float = 2.0
    filtering: frozenset[str] = frozenset()


class Problem(msgspec.Struct, frozen=True):
    """Something that was promised otherwise. rule: the name of the promise."""

    rule: str
    what: str


class HistoryViolation(AssertionError):
    """A history has problems."""

    def __init__(self, problems: list[Problem]) -> None:
        shown = [f"{problem.rule}: {problem.what}" for problem in problems[:SHOWN]]
        more = f"and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        super().__init__("\n".join(["the history breaks what is promised", *shown, more]).rstrip())
        self.problems = problems

    def __reduce__(self) -> tuple[type[HistoryViolation], tuple[list[Problem]]]:
        return type(self), (self.problems,)


class Report(msgspec.Struct, kw_only=True):
    """What a history says. sent: acknowledged; unknown: those that may have been. duplicates: reads and
    handled calls of a group beyond the first of each message, which at-least-once delivery allows."""

    sent: int
    unknown: int
    refused: int
    delivered: int
    duplicates: int
    problems: list[Problem]

    def verify(self) -> Report:
        """The report itself. Raises HistoryViolation if there is a problem."""
        if self.problems:
            raise HistoryViolation(self.problems)
        return self


class _Index:
    """The operations of a history by what rules ask for."""

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
        """Of a message: pulls that gave it, and calls of listeners."""
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


def by_message(found: Iterable[Operation]) -> dict[str, list[Operation]]:
    grouped: dict[str, list[Operation]] = defaultdict(list)
    for each in found:
        grouped[each.message].append(each)
    return grouped


def is_ok(operation: Operation) -> bool:
    return operation.result == "ok"


def check_history(lines: Iterable[str | bytes], expected: Expected | None = None) -> Report:
    """Check a history against all promises. Raises HistoryError for lines that are none."""
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
    """What was acknowledged reaches every group that takes the topic: read, or handled, or a dead letter."""
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
            yield f"{message} was acknowledged, and nobody read topic {ok.topic}"
        for group in sorted(wanted.keys() - done):
            yield (
                f"{message} was acknowledged and not {'handled' if wanted[group] == 'handle' else 'read'}"
                + (f" by group {group}" if group else "")
            )


def nothing_invented(index: _Index) -> Iterator[str]:
    """What is delivered was sent, to this topic, and not refused."""
    for message, deliveries in index.deliveries.items():
        results = {each.result for each in index.sends.get(message, [])}
        first = deliveries[0]
        if not results:
            yield f"{message} came to {first.process} and was never sent"
        elif results == {"fail"}:
            yield f"{message} came to {first.process} and its sending had failed"
        elif min(each.began for each in index.sends[message]) > first.began:
            yield f"{message} came to {first.process} before it was sent"
        topics = {each.topic for each in index.sends.get(message, [])}
        for each in deliveries:
            if topics and each.topic and each.topic not in topics and not each.topic.startswith("%RETRY%"):
                yield f"{message} came to {each.process} as one of topic {each.topic}"
                break


def one_message_a_place(index: _Index) -> Iterator[str]:
    """Everybody agrees on the message at an offset of a queue, and no offset is left out."""
    places: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    topics = {each.topic for each in index.of("send")}
    for each in index.of("send", "read", "handle"):
        if each.offset is None or not each.queue or (each.op != "handle" and not is_ok(each)):
            continue
        known = places[each.topic, each.queue].setdefault(each.offset, each.message)
        if known != each.message:
            yield f"{each.topic} {each.queue} has {known} and {each.message} at offset {each.offset}"
    lows = {(each.topic, each.queue): each.min for each in reversed(index.of("bounds")) if is_ok(each)}
    for (topic, queue), found in places.items():
        if topic not in topics:
            continue  # a retry topic: nobody says what is stored there
        low = min(min(found), lows.get((topic, queue), min(found)))
        missing = set(range(low, max(found))) - found.keys()
        if missing:
            yield f"{topic} {queue}: nobody saw offset {min(missing)} ({len(missing)} in all)"


def commits_within_bounds(index: _Index) -> Iterator[str]:
    """A group's offset lies within its queue."""
    highs: dict[tuple[str, str], int] = defaultdict(int)
    lows: dict[tuple[str, str], int] = {}
    for each in index.of("bounds"):
        place = (each.topic, each.queue)
        highs[place] = max(highs[place], each.max)
        lows[place] = min(lows.get(place, each.min), each.min)
    for each in index.of("send", "read", "handle"):
        if each.offset is not None:
            highs[each.topic, each.queue] = max(highs[each.topic, each.queue], each.offset + 1)
    for each in index.of("commit"):
        place = (each.topic, each.queue)
        assert each.offset is not None
        if each.result != "fail" and not lows.get(place, 0) <= each.offset <= highs[place]:
            yield f"group {each.group} is at {each.offset} of {place}, which ends at {highs[place]}"


def progress(index: _Index) -> Iterator[str]:
    """A group's offset goes back only if an operator moves it."""
    queues: dict[tuple[str, str, str], list[Operation]] = defaultdict(list)
    for each in index.of("commit", "reset"):
        if each.result != "fail":
            queues[each.group, each.topic, each.queue].append(each)
    for place, found in queues.items():
        highest: Operation | None = None
        waiting = deque(sorted((each for each in found if each.op == "commit" and is_ok(each)), key=_end))
        resets = [each for each in found if each.op == "reset"]
        for each in found:
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
                yield f"{place} went back from {highest.offset} to {each.offset}"


def _end(operation: Operation) -> float:
    return _FOREVER if operation.ended is None else operation.ended


def reads_in_order(index: _Index) -> Iterator[str]:
    """While a member has a queue, its reads follow the offsets."""
    anew: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in index.of("own", "reset"):
        anew[each.group, each.topic, each.queue].append(each.began)
    before: dict[tuple[str, str, str, str], Operation] = {}
    for each in index.of("read"):
        if not is_ok(each):
            continue
        place = (each.group, each.topic, each.queue)
        last = before.get((each.process, *place))
        before[each.process, *place] = each
        if last is None or any(last.began <= at <= each.began for at in anew[place]):
            continue
        if (each.offset or 0) <= (last.offset or 0):
            yield f"{each.process} read {place} at {each.offset} behind {last.offset}"


def strict_order(index: _Index) -> Iterator[str]:
    """Of a key, one message is in flight at a time, and none comes before those in front of it are done."""
    calls: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    stored: dict[str, set[tuple[int, str]]] = defaultdict(set)
    where: dict[str, str] = {}
    for each in index.of("send", "handle"):
        if not each.key or each.offset is None:
            continue
        stored[each.key].add((each.offset, each.message))
        where.setdefault(each.message, each.queue)
        if each.op == "handle":
            calls[each.group, each.key].append(each)
    for (group, key), history in calls.items():
        in_front = deque(sorted(stored[key]))
        done = {message for whose, message in index.dead if whose == group}
        for before, call in itertools.pairwise([None, *history]):
            if call is None:
                continue
            if before is not None:
                if _end(before) > call.began:
                    yield f"{call.message} of key {key} is handled while {before.message} still is"
                if is_ok(before):
                    done.add(before.message)
            while in_front and in_front[0][1] in done:
                in_front.popleft()
            if in_front and in_front[0][0] < (call.offset or 0) and where[in_front[0][1]] == call.queue:
                yield f"{call.message} of key {key} overtakes {in_front[0][1]} in group {group}"


def one_owner(index: _Index) -> Iterator[str]:
    """While nobody comes or goes, each queue has one owner in its group, or all members if broadcasting."""
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
                    who = ", ".join(owners) or "nobody"
                    yield f"{settled.topic} {queue} of group {settled.group} belongs to {who} at {low:.3f}"
                    break


def transactions(index: _Index) -> Iterator[str]:
    """A half message ends, once and in time, and is seen only if it was committed."""
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
                yield f"{message} came to {delivery.process} and was {state}"


def timers(index: _Index) -> Iterator[str]:
    """A message that is due later comes at its time, never if it was cancelled."""
    for message, sends in index.sends.items():
        due = sends[0].due
        deliveries = index.deliveries.get(message, [])
        if due is None or not deliveries:
            continue
        first = deliveries[0]
        if first.began < due:
            yield f"{message} came {due - first.began:.3f} s before its time"
        elif first.began > max(due, sends[0].ended or sends[0].began) + index.expected.late_s:
            yield f"{message} came {first.began - due:.3f} s after its time"
        for cancel in index.cancelled.get(message, []):
            if is_ok(cancel) and deliveries[-1].began > _end(cancel):
                yield f"{message} came after it was cancelled"
                break


def retries(index: _Index) -> Iterator[str]:
    """A message that fails comes again so many times, then it is one dead letter."""
    most = index.expected.tries + 1
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
        if count > most:
            yield f"{message} failed {count} times in group {group}, which gives it {most}"
        elif count == most and (group, message) not in handled and not index.dead[group, message]:
            yield f"{message} failed {count} times in group {group} and is no dead letter"
    for (group, message), count in index.dead.items():
        if count > 1:
            yield f"{message} is {count} dead letters of group {group}"
        if not failed[group, message]:
            yield f"{message} is a dead letter of group {group} and never failed"
        elif failed[group, message] + unknown[group, message] < most:
            count = failed[group, message]
            yield f"{message} is a dead letter of group {group} after {count} of {most} fails"


RULES: dict[str, Callable[[_Index], Iterator[str]]] = {
    "nothing lost": nothing_lost,
    "nothing invented": nothing_invented,
    "one message a place": one_message_a_place,
    "commits within bounds": commits_within_bounds,
    "progress": progress,
    "reads in order": reads_in_order,
    "strict order": strict_order,
    "one owner": one_owner,
    "transactions": transactions,
    "timers": timers,
    "retries": retries,
}
"""By the names that problems carry."""
