"""The checker: correct histories of a small model pass, and each planted fault is found by its rule."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cometmq.testing import Expected, History, HistoryError, HistoryViolation, Report, check_history
from cometmq.testing.checker import RULES

Op = dict[str, Any]
EXPECTED = Expected(tries=2, check_s=20.0, late_s=1.0)
seeds = st.integers(0, 10_000)


def op(name: str, process: str, began: float, ended: float | None, result: str = "ok", **facts: Any) -> Op:
    return {"op": name, "process": process, "began": began, "ended": ended, "result": result, **facts}


def lines_of(history: list[Op]) -> list[str]:
    events = []
    for number, each in enumerate(history):
        facts = {k: v for k, v in each.items() if k not in ("op", "process", "began", "ended", "result")}
        base = {"op": each["op"], "process": each["process"], "id": number}
        events.append({"type": "invoke", "at": each["began"], **base, **facts})
        if each["ended"] is not None:
            events.append({"type": each["result"], "at": each["ended"], **base})
    events.sort(key=lambda event: (event["at"], event["id"], event["type"] != "invoke"))
    return [json.dumps(event) for event in events]


def check(history: list[Op]) -> Report:
    return check_history(lines_of(history), EXPECTED)


def sound(seed: int) -> list[Op]:
    """Return the history of a correct cluster: 30 messages, group g of two members, a reader r."""
    dice = random.Random(seed)
    ops: list[Op] = []
    stored: list[tuple[float, Op]] = []
    for number in range(30):
        at, message = float(number), f"m{number}"
        kind = dice.choice(["plain", "plain", "key", "key", "half", "due", "refused"])
        queue = f"q{dice.randrange(2)}"
        send = op("send", "p", at, at + 0.1, message=message, topic="T")
        ops.append(send)
        if kind == "refused":
            send["result"] = "fail"
            continue
        send["queue"] = queue
        if kind == "key":
            send |= {"key": f"k{queue}"}
        if dice.random() < 0.15:
            send |= {"result": "unknown", "ended": dice.choice([None, at + 5])}
            del send["queue"]
            if dice.random() < 0.5 and kind == "plain":
                continue  # the message was not stored
        if kind == "half":
            send.pop("queue", None)
            send["half"] = True
            outcome = dice.choice(["commit", "rollback"])
            ops.append(op("end", "p", at + 6, at + 6.1, message=message, outcome=outcome))
            if outcome == "commit":
                stored.append((at + 6.05, {**send, "queue": queue}))
        elif kind == "due":
            send.pop("queue", None)
            send["due"] = at + 8
            if dice.random() < 0.3:
                ops.append(op("cancel", "p", at + 2, at + 2.1, message=message))
            else:
                stored.append((at + 8.01, {**send, "queue": queue}))
        else:
            send.setdefault("queue", queue)
            stored.append((at + 0.05, send))
    return ops + deliveries(dice, stored)


def deliveries(dice: random.Random, stored: list[tuple[float, Op]]) -> list[Op]:
    """Return the reads of r and the handled messages of g, for messages with the times of their stores."""
    ops: list[Op] = []
    offsets = {"q0": 0, "q1": 0}
    free = {"q0": 0.0, "q1": 0.0}
    owner = {"q0": "m1", "q1": "m2"}
    for at, send in sorted(stored, key=lambda each: each[0]):
        queue = send["queue"]
        place = {"message": send["message"], "topic": "T", "queue": queue, "offset": offsets[queue]}
        offsets[queue] += 1
        if "half" not in send and "due" not in send:
            send["offset"] = place["offset"]
        ops.append(op("read", "r1", at + 0.1, at + 0.1, group="r", **place))
        key = {"key": send["key"]} if "key" in send else {}
        fails = dice.choice([0, 0, 0, 1, 3])
        for _ in range(fails):
            began = max(at + 0.2, free[queue])
            free[queue] = began + 0.01
            ops.append(op("handle", owner[queue], began, free[queue], "fail", group="g", **place, **key))
        if fails == 3:
            ops.append(op("dead", "admin", free[queue], free[queue], group="g", message=send["message"]))
        else:
            began = max(at + 0.2, free[queue])
            free[queue] = began + 0.01
            ops.append(op("handle", owner[queue], began, free[queue], group="g", **place, **key))
        now = free[queue]
        ops.append(
            op("commit", owner[queue], now, now, group="g", topic="T", queue=queue, offset=offsets[queue])
        )
    for queue, member in owner.items():
        ops.append(op("own", member, 0.0, None, "unknown", group="g", topic="T", queue=queue))
        ops.append(op("bounds", "admin", 70.0, 70.0, topic="T", queue=queue, min=0, max=offsets[queue]))
    ops.append(op("settled", "admin", 1.0, 60.0, group="g", topic="T", queues=["q0", "q1"]))
    return ops


def of(history: list[Op], name: str, **facts: Any) -> list[Op]:
    return [each for each in history if each["op"] == name and facts.items() <= each.items()]


def some(found: list[Op], dice: random.Random) -> Op:
    assume(found)
    return dice.choice(found)


Plant = Callable[[list[Op], random.Random], None]


def lose(history: list[Op], dice: random.Random) -> None:
    sent = {each["message"] for each in of(history, "send", result="ok") if "queue" in each}
    message = some([each for each in of(history, "read") if each["message"] in sent], dice)["message"]
    history[:] = [each for each in history if each["op"] != "read" or each["message"] != message]


def lose_in_a_group(history: list[Op], dice: random.Random) -> None:
    sent = {each["message"] for each in of(history, "send", result="ok") if "queue" in each}
    found = [each for each in of(history, "handle", result="ok") if each["message"] in sent]
    some(found, dice)["result"] = "unknown"


def read_and_not_handle(history: list[Op], dice: random.Random) -> None:
    lose_in_a_group(history, dice)
    history.extend({**each, "group": "g"} for each in of(history, "read"))


def lose_for_a_whole_group(history: list[Op], dice: random.Random) -> None:
    history.append(op("own", "m9", 0.0, None, "unknown", group="idle", topic="T", queue="q0"))


def die_too_early(history: list[Op], dice: random.Random) -> None:
    letter = some(of(history, "dead"), dice)
    history.remove(of(history, "handle", result="fail", message=letter["message"])[0])


def nobody_reads(history: list[Op], dice: random.Random) -> None:
    history[:] = [op("send", "p", 1.0, 2.0, message="only", topic="T", queue="q0", offset=0)]


def invent(history: list[Op], dice: random.Random) -> None:
    where = some(of(history, "read"), dice)
    history.append({**where, "message": "never sent", "queue": "q9"})


def deliver_under_another_topic(history: list[Op], dice: random.Random) -> None:
    where = some(of(history, "read"), dice)
    history.append({**where, "topic": "another", "queue": "q9", "offset": 0})


def deliver_a_refused_one(history: list[Op], dice: random.Random) -> None:
    refused = some(of(history, "send", result="fail"), dice)
    history.append(
        op("read", "r1", 90.0, 90.0, group="r", message=refused["message"], topic="T", queue="q9", offset=0)
    )


def deliver_before_the_send(history: list[Op], dice: random.Random) -> None:
    some(of(history, "read"), dice)["began"] = -1.0


def put_another_there(history: list[Op], dice: random.Random) -> None:
    one, other = dice.sample(of(history, "read"), 2)
    other |= {"queue": one["queue"], "offset": one["offset"]}


def leave_a_gap(history: list[Op], dice: random.Random) -> None:
    longest = max(("q0", "q1"), key=lambda queue: len(of(history, "read", queue=queue)))
    for each in history:
        if each.get("queue") == longest and each.get("offset", -1) >= 2 and each["op"] != "commit":
            each["offset"] += 1


def jump_far(history: list[Op], dice: random.Random) -> None:
    """A bit of an offset is flipped: the resulting gap must not cost memory."""
    of(history, "read")[-1]["offset"] += 1 << 61


def commit_beyond(history: list[Op], dice: random.Random) -> None:
    some(of(history, "commit"), dice)["offset"] = 1000


def go_back(history: list[Op], dice: random.Random) -> None:
    last = some([each for each in of(history, "commit") if each["offset"] > 1], dice)
    history.append({**last, "began": 80.0, "ended": 80.0, "offset": 0})


def read_backwards(history: list[Op], dice: random.Random) -> None:
    first = some(of(history, "read", offset=0), dice)
    history.append({**first, "began": 80.0, "ended": 80.0})


def keyed_neighbours(history: list[Op], dice: random.Random) -> tuple[Op, Op]:
    """Return the calls for two messages of a key, the earlier first."""
    key = some([each for each in of(history, "handle", result="ok") if "key" in each], dice)["key"]
    calls = sorted(of(history, "handle", key=key), key=lambda each: each["began"])
    pairs = [
        (a, b) for a, b in itertools.pairwise(calls) if a["message"] != b["message"] and a["result"] == "ok"
    ]
    assume(pairs)
    return dice.choice(pairs)


def overlap(history: list[Op], dice: random.Random) -> None:
    before, call = keyed_neighbours(history, dice)
    before["ended"] = call["began"] + 0.005


def overtake(history: list[Op], dice: random.Random) -> None:
    before, _ = keyed_neighbours(history, dice)
    before |= {"began": before["began"] + 50, "ended": before["ended"] + 50}


def two_owners(history: list[Op], dice: random.Random) -> None:
    history.append(op("own", "m3", 20.0, 21.0, group="g", topic="T", queue="q0"))


def no_owner(history: list[Op], dice: random.Random) -> None:
    some(of(history, "own"), dice)["ended"] = 30.0


def show_a_half(history: list[Op], dice: random.Random) -> None:
    half = some([each for each in of(history, "send") if each.get("half")], dice)
    history[:] = [e for e in history if e["op"] != "end" or e["message"] != half["message"]]
    history.append(
        op("read", "r1", 90.0, 90.0, group="r", message=half["message"], topic="T", queue="q9", offset=0)
    )


def show_a_rolled_back_one(history: list[Op], dice: random.Random) -> None:
    end = some(of(history, "end", outcome="rollback"), dice)
    history.append(
        op("read", "r1", 90.0, 90.0, group="r", message=end["message"], topic="T", queue="q9", offset=0)
    )


def end_twice(history: list[Op], dice: random.Random) -> None:
    end = some(of(history, "end"), dice)
    other = "rollback" if end["outcome"] == "commit" else "commit"
    history.append({**end, "outcome": other, "began": end["began"] + 1, "ended": end["ended"] + 1})


def leave_open(history: list[Op], dice: random.Random) -> None:
    rolled = of(history, "end", outcome="rollback")
    sure = {each["message"] for each in of(history, "send", result="ok")}
    end = some([each for each in rolled if each["message"] in sure], dice)
    history.remove(end)


def due_and_came(history: list[Op], dice: random.Random) -> tuple[Op, list[Op]]:
    send = some(
        [e for e in of(history, "send") if "due" in e and of(history, "read", message=e["message"])], dice
    )
    return send, [e for e in history if e["op"] in ("read", "handle") and e["message"] == send["message"]]


def come_early(history: list[Op], dice: random.Random) -> None:
    send, came = due_and_came(history, dice)
    came[0] |= {"began": send["due"] - 0.01}


def come_late(history: list[Op], dice: random.Random) -> None:
    send, _ = due_and_came(history, dice)
    send["due"] -= 5


def come_though_cancelled(history: list[Op], dice: random.Random) -> None:
    send, _ = due_and_came(history, dice)
    history.append(op("cancel", "p", send["began"] + 1, send["began"] + 2, message=send["message"]))


def fail_for_ever(history: list[Op], dice: random.Random) -> None:
    fail = some(of(history, "handle", result="fail"), dice)
    history.extend({**fail, "began": 70.0 + n, "ended": 70.5 + n} for n in range(3))


def die_twice(history: list[Op], dice: random.Random) -> None:
    history.append(dict(some(of(history, "dead"), dice)))


def die_without_a_letter(history: list[Op], dice: random.Random) -> None:
    history.remove(some(of(history, "dead"), dice))


def die_at_once(history: list[Op], dice: random.Random) -> None:
    failed = {each["message"] for each in of(history, "handle", result="fail")}
    fine = some([e for e in of(history, "handle", result="ok") if e["message"] not in failed], dice)
    history.append(op("dead", "admin", 90.0, 90.0, group="g", message=fine["message"]))


PLANTED: list[tuple[Plant, str]] = [
    (lose, "nothing lost"),
    (lose_in_a_group, "nothing lost"),
    (read_and_not_handle, "nothing lost"),
    (lose_for_a_whole_group, "nothing lost"),
    (nobody_reads, "nothing lost"),
    (invent, "nothing invented"),
    (deliver_under_another_topic, "nothing invented"),
    (deliver_a_refused_one, "nothing invented"),
    (deliver_before_the_send, "nothing invented"),
    (put_another_there, "one message per offset"),
    (leave_a_gap, "one message per offset"),
    (jump_far, "one message per offset"),
    (commit_beyond, "commits within bounds"),
    (go_back, "progress"),
    (read_backwards, "reads in order"),
    (overlap, "strict order"),
    (overtake, "strict order"),
    (two_owners, "one owner"),
    (no_owner, "one owner"),
    (show_a_half, "transactions"),
    (show_a_rolled_back_one, "transactions"),
    (end_twice, "transactions"),
    (leave_open, "transactions"),
    (come_early, "timers"),
    (come_late, "timers"),
    (come_though_cancelled, "timers"),
    (fail_for_ever, "retries"),
    (die_twice, "retries"),
    (die_without_a_letter, "retries"),
    (die_at_once, "retries"),
    (die_too_early, "retries"),
]


@given(seeds)
def test_a_sound_history_has_no_problem(seed: int) -> None:
    history = sound(seed)
    report = check(history)
    assert report.problems == []
    assert report.verify() is report
    assert report.sent == len(of(history, "send", result="ok"))
    assert report.duplicates == 0


@pytest.mark.parametrize(("plant", "rule"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=15)
@given(seed=seeds)
def test_a_planted_fault_is_found_by_its_rule(plant: Plant, rule: str, seed: int) -> None:
    history = copy.deepcopy(sound(seed))
    plant(history, random.Random(seed))
    report = check(history)
    assert rule in {problem.rule for problem in report.problems}
    with pytest.raises(HistoryViolation, match=rule):
        report.verify()


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for _, rule in PLANTED} == RULES.keys()


@given(seeds)
def test_duplicates_are_counted_and_no_problem(seed: int) -> None:
    history = sound(seed)
    read = max(of(history, "read"), key=lambda each: each["began"])
    history.append({**read, "process": "r2", "began": 90.0, "ended": 90.0})
    report = check(history)
    assert (report.problems, report.duplicates) == ([], 1)


@given(seeds)
def test_an_operator_may_move_a_group_back(seed: int) -> None:
    history = sound(seed)
    go_back(history, random.Random(seed))
    moved = {key: history[-1][key] for key in ("group", "topic", "queue")}
    history.append(op("reset", "operator", 75.0, 76.0, **moved))
    assert check(history).problems == []


def test_broadcasting_members_all_own_every_queue() -> None:
    owned = [
        op("own", member, 0.0, 50.0, group="b", topic="T", queue=queue)
        for member in ("m1", "m2")
        for queue in ("q0", "q1")
    ]
    settled = op(
        "settled", "admin", 1.0, 40.0, group="b", topic="T", queues=["q0", "q1"], members=["m2", "m1"]
    )
    assert check([*owned, settled]).problems == []
    (problem,) = check([*owned[1:], settled]).problems
    assert problem.what == "T q0 of group b belongs to m2 at 1.000"


SEND = {"type": "invoke", "op": "send", "process": "p", "id": 1, "at": 1.0, "message": "m", "topic": "T"}
OK = {"type": "ok", "op": "send", "process": "p", "id": 1, "at": 2.0}


@pytest.mark.parametrize(
    ("events", "line", "problem"),
    [
        (["{"], 1, "truncated"),
        ([json.dumps({**SEND, "op": "sing"})], 1, "sing"),
        ([json.dumps({**SEND, "colour": "red"})], 1, "colour"),
        ([json.dumps({**SEND, "at": "noon"})], 1, "at"),
        ([json.dumps(SEND), "", json.dumps(SEND)], 3, "already begun"),
        ([json.dumps(OK)], 1, "has not begun"),
        ([json.dumps(SEND), json.dumps({**OK, "op": "read"})], 2, "has not begun"),
        ([json.dumps(SEND), json.dumps({**OK, "at": 0.5})], 2, "before it begins"),
        ([json.dumps({**SEND, "topic": ""}), json.dumps(OK)], 2, "topic"),
        (
            [json.dumps({**SEND, "op": "commit"}), json.dumps({**OK, "op": "commit"})],
            2,
            "group and queue and offset",
        ),
    ],
)
def test_a_line_that_means_nothing_is_refused_with_its_number(
    events: list[str], line: int, problem: str
) -> None:
    with pytest.raises(HistoryError, match=problem) as raised:
        check_history(events)
    assert raised.value.line == line
    assert pickle.loads(pickle.dumps(raised.value)).line == line


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_rubbish_is_a_history_error(lines: list[bytes]) -> None:
    try:
        check_history(lines)
    except HistoryError:
        pass


def test_a_recorded_history_is_a_history() -> None:
    times = iter(range(100))
    history = History("p1", clock=lambda: float(next(times)))
    first = history.begin("send", message="a", topic="T")
    history.ok(first, queue="q", offset=0)
    refused = history.begin("send", message="b", topic="T")
    history.fail(refused)
    owning = history.begin("own", process="m1", group="g", topic="T", queue="q")
    history.begin("handle", process="m1", group="g", message="a")
    history.died("m1")
    history.note("handle", process="m2", group="g", message="a", topic="T", queue="q", offset=0)
    report = check_history(history.lines()).verify()
    assert (report.sent, report.refused, report.delivered) == (1, 1, 1)
    with pytest.raises(KeyError):
        history.ok(owning)


def test_a_violation_tells_the_first_problems() -> None:
    lines = lines_of([op("send", "p", 1.0, 2.0, message=f"m{n}", topic="T") for n in range(30)])
    report = check_history(lines)
    with pytest.raises(HistoryViolation) as raised:
        report.verify()
    assert "m0 was acknowledged, and no group read topic T" in str(raised.value)
    assert str(raised.value).endswith("and 10 more")
    assert len(pickle.loads(pickle.dumps(raised.value)).problems) == 30
