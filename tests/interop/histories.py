"""Programs whose histories must be the same on our servers and on Apache's.

A history contains what a user sees, in order where order is guaranteed, without times, ids and addresses.
Each program takes the names and the client of a :class:`Space` and returns its events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.client.scenarios import read_all
from tests.interop.driver import JavaError, Json, body_of, message
from tests.interop.processes import PATIENCE_S
from tests.interop.space import Space
from tests.kit.waiting import wait_until

from cometmq.admin import Admin, Resending, Selection
from cometmq.admin.dead_letters import original_topic
from cometmq.errors import NoRouteError

History = list[tuple[object, ...]]
Program = Callable[[Space], History]

COMMIT, ROLLBACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"
AGAIN = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


def text(received: Json) -> str:
    return body_of(received).decode()


def calls(delivered: Iterable[Json]) -> History:
    """Return the calls of a listener in order."""
    return [
        ("called", text(each), "try", each["reconsumeTimes"], "fails" if each["failed"] else "done")
        for each in delivered
    ]


def send(space: Space, messages: list[Json], mode: str = "sync", **how: Any) -> list[Json]:
    results = space.java.send(space.producer(), messages, mode, **how)
    assert {each["status"] for each in results} == {"SEND_OK"}
    return results


def named(space: Space, name: object) -> str:
    """Replace this run's unique names by fixed ones."""
    return str(name).replace(space.topic, "TOPIC").replace(space.group, "GROUP")


def dead_letters(space: Space, count: int) -> History:
    """Return the group's dead letters once there are `count`; those of a message are in order."""

    async def all_dead() -> History:
        async with Admin(space.cluster.namesrv) as admin:
            counts = {each.group: each.count for each in await admin.dead_letter_counts()}
            if counts.get(space.group, 0) < count:
                return []
            return sorted(
                ("dead", letter.body.decode(), "try", letter.reconsume_times, named(space, topic), *carried)
                for letter in [each async for each in admin.dead_letters(Selection(group=space.group))]
                for topic, carried in [(original_topic(letter), (letter.tags, letter.keys))]
            )

    return wait_until(f"{count} dead letters", lambda: asyncio.run(all_dead()), 90, every_s=0.5)


def stored(space: Space) -> History:
    """Return the messages in the topic by queue."""
    found = asyncio.run(read_all(space.cluster.namesrv, space.topic))
    places = sorted(found, key=lambda each: (each.queue_id, each.queue_offset))
    return [("stored", each.queue_id, each.body.decode(), each.tags, each.keys) for each in places]


def order(space: Space) -> History:
    """Send messages with four keys, each of which fails once."""
    for key in range(4):
        messages = [message(space.topic, b"%d:%d" % (key, number)) for number in range(6)]
        send(space, messages, "selector", select=key)
    consumer = space.push(orderly=True, failTimes=1, suspendMillis=10)
    got = space.java.wait_delivered(consumer, 48)
    by_queue = sorted(got, key=lambda each: int(each["queueId"]))  # a stable sort keeps each queue's order
    return [*stored(space), *calls(by_queue)]


def orderly_answers(space: Space) -> History:
    """Use COMMIT and ROLLBACK in an orderly listener; a second consumer gets the uncommitted messages."""
    send(space, [message(space.topic, b"%d" % number) for number in range(6)], "selector", select=0)
    answers = ["SUCCESS", "COMMIT", "SUCCESS", "ROLLBACK", "SUCCESS", AGAIN, "SUCCESS", "COMMIT"]
    first = space.push(orderly=True, answers=answers, suspendMillis=10)
    space.java.wait_delivered(first, 9)
    space.stop(first)
    second = space.push(orderly=True)
    space.java.wait_delivered(second, 1)
    return [*calls(space.java.delivered(first)), ("next member",), *calls(space.java.delivered(second))]


def orderly_death(space: Space) -> History:
    """Let an orderly message use up its attempts and become a dead letter; the queue continues."""
    fails = {"1": {"fails": "99"}}
    sent = [
        message(space.topic, word.encode(), tags="T", keys=f"k{word}", properties=fails.get(word))
        for word in "012"
    ]
    send(space, sent, "selector", select=0)
    consumer = space.push(orderly=True, maxReconsumeTimes=2, suspendMillis=10)
    space.java.wait_delivered(consumer, lambda got: "2" in map(text, got))
    return [*dead_letters(space, 1), *calls(space.java.delivered(consumer))]


def retries(space: Space) -> History:
    """Let messages fail once, twice and always; the dead letter is sent again and fails again."""
    plan = {"once": 1, "twice": 2, "always": 99, "never": 0}
    sent = [
        message(space.topic, word.encode(), tags="T", keys=f"k-{word}", properties={"fails": str(count)})
        for word, count in plan.items()
    ]
    send(space, sent)
    consumer = space.push(failDelayLevel=1, maxReconsumeTimes=2)
    dead_letters(space, 1)

    async def again() -> list[str]:
        async with Admin(space.cluster.namesrv) as admin:
            return [each.state async for each in admin.resend(Selection(group=space.group), Resending())]

    resent = asyncio.run(again())
    dead = dead_letters(space, 2)
    got = space.java.wait_delivered(consumer, 12)
    by_message = sorted(got, key=text)
    topics = {(each["topic"], each["tags"], each["keys"]) for each in got}
    return [
        *calls(by_message),
        *sorted(("seen", named(space, topic), tags, keys) for topic, tags, keys in topics),
        *dead,
        ("sent again", *resent),
    ]


def transactions(space: Space) -> History:
    plans = {
        "commit": (COMMIT, ROLLBACK),
        "rollback": (ROLLBACK, COMMIT),
        "asked, commit": (UNKNOWN, COMMIT),
        "asked, rollback": (UNKNOWN, ROLLBACK),
        "throws": ("UNHEARD OF", COMMIT),
    }
    java, name = space.java, f"tp-{space.topic}"
    java.call("transaction_start", name=name, group=f"tg-{space.group}", namesrv=space.cluster.namesrv)
    try:
        sent = [
            message(
                space.topic, word.encode(), tags="T", keys=f"k{number}",
                properties={"local": local, "check": check},
            )
            for number, (word, (local, check)) in enumerate(plans.items())
        ]  # fmt: skip
        results = java.call("transaction_send", name=name, messages=sent)
        consumer = space.push(expression="T")
        java.wait_delivered(consumer, 3)

        def asked() -> set[str]:
            return {text(each) for each in java.call("transaction_asked", name=name)}

        wait_until("asked about what is rolled back", lambda: "asked, rollback" in asked())
        questions = asked()
    finally:
        java.call("transaction_stop", name=name)
    return [
        *(("ended", word, each["state"]) for word, each in zip(plans, results, strict=True)),
        *sorted(("asked", word) for word in questions),
        *sorted(calls(java.delivered(consumer))),
        *sorted((kind, *rest) for kind, _queue, *rest in stored(space)),
    ]


def sql(space: Space) -> History:
    """Filter for a push consumer that fails once and for a parked lite pull; then use a wrong expression."""
    wanted, wrong = "n > 10 AND (s IS NULL OR s <> 'it''s')", "n > > 10"
    properties: dict[str, dict[str, str]] = {
        "passes": {"n": "11"}, "fails once": {"n": "12", "s": "x", "fails": "1"}, "too small": {"n": "10"},
        "wrong text": {"n": "11", "s": "it's"}, "no number": {"n": "many"}, "nothing": {},
    }  # fmt: skip
    send(space, [message(space.topic, b.encode(), properties=own) for b, own in properties.items()])
    held = space.lite(topics={space.topic: wanted}, group=space.group + "-lite", sql=True)
    found: list[Json] = []

    def polled(count: int) -> bool:
        found.extend(space.java.call("lite_poll", name=held))
        return len(found) >= count

    wait_until("what is there", lambda: polled(2))
    consumer = space.push(expression=wanted, sql=True, failDelayLevel=1)
    space.java.wait_delivered(consumer, 3)
    # Both consumers now wait for all queues, and a message that does not match arrives before the one that
    # does.
    waiting = space.java.start("lite_poll", name=held, timeout=20_000)
    late = {"late, too small": "1", "late, passes": "11"}
    send(space, [message(space.topic, body.encode(), properties={"n": n}) for body, n in late.items()])
    found += waiting.result(PATIENCE_S)
    space.java.wait_delivered(consumer, 4)
    try:
        space.push(expression=wrong, sql=True, group=space.group + "-wrong")
        refused = 0
    except JavaError as error:
        refused = error.code
    return [
        *sorted(calls(space.java.delivered(consumer))),
        *sorted(("polled", text(each)) for each in found),
        ("refused", refused),
    ]


def levels(space: Space) -> History:
    sent = [message(space.topic, b"level %d" % level, tags="T", delay=level) for level in (2, 1)]
    send(space, [*sent, message(space.topic, b"at once")])
    got = space.java.wait_delivered(space.push(), 3)
    return sorted(
        (
            *("came", text(each), str(each["tags"]), str(each["properties"].get("DELAY"))),
            "early" if waited < {"level 1": 1000, "level 2": 5000}.get(text(each), 0) else "due",
        )
        for each in got
        for waited in [each["storeTimestamp"] - each["bornTimestamp"]]
    )


def timed(space: Space, body: bytes, after_ms: int, *, at: bool = False) -> Json:
    """Build a message with a delivery time; 4.9's client can only set user properties."""
    begun = time.time_ns() // 1_000_000
    value = begun + after_ms if at else after_ms
    if space.java.version.startswith("4"):
        return message(
            space.topic, body, properties={"TIMER_DELIVER_MS" if at else "TIMER_DELAY_MS": str(value)}
        )
    return message(space.topic, body, **{"setDeliverTimeMs" if at else "setDelayTimeMs": value})


def timers(space: Space) -> History:
    """Send two messages with delivery times, one that is recalled, and one too far in the future."""
    due = {"at": 5_000, "after": 3_000, "back": 4_000}
    begun = time.time_ns() // 1_000_000
    producer = space.producer()
    space.java.send(producer, [message(space.topic, b"at once")])
    sent = [timed(space, word.encode(), ms, at=word == "at") for word, ms in due.items()]
    results = space.java.send(producer, sent)
    events: History = [
        ("handle", word, bool(each["recallHandle"])) for word, each in zip(due, results, strict=True)
    ]
    if not space.java.version.startswith("4"):
        handle = results[2]["recallHandle"]
        recalled = space.java.call("recall", name=producer, topic=space.topic, handle=handle)
        events.append(("recalled", recalled == results[2]["msgId"]))
    try:
        space.java.send(producer, [timed(space, b"far", 41 * 86_400_000)])
        events.append(("too far away", "taken"))
    except JavaError as error:
        events.append(("too far away", error.code))
    consumer = space.push()
    last = 4 if space.java.version.startswith("4") else 3
    got = space.java.wait_delivered(consumer, last)
    return [
        *events,
        *sorted(
            ("came", text(each), "early" if waited < due.get(text(each), 0) else "due")
            for each in got
            for waited in [each["storeTimestamp"] - begun]
        ),
    ]


# Fields of traces that differ between runs.
PASSING = {"timestamp_ms", "msg_id", "offset_msg_id", "request_id", "cost_ms", "transaction_id"}
PASSING |= {"store_host", "client_host", "region"}


def traces(space: Space) -> History:
    """Return each client's traces of a committed transaction and of a sent message."""
    java, name = space.java, f"tp-{space.topic}"
    producer = space.producer(trace=True, group=f"p-{space.group}")
    (sent,) = java.send(producer, [message(space.topic, b"sent", tags="T", keys="k1 k2")])
    group = {"group": f"tg-{space.group}", "namesrv": space.cluster.namesrv}
    java.call("transaction_start", name=name, trace=True, **group)
    plan = {"local": COMMIT, "check": COMMIT}
    half = message(space.topic, b"half", tags="T", keys="k3", properties=plan)
    (ended,) = java.call("transaction_send", name=name, messages=[half])
    consumer = space.push(trace=True)
    java.wait_delivered(consumer, 2)
    events = traced(space, {"sent": sent["msgId"], "half": ended["msgId"]})
    java.call("transaction_stop", name=name)
    return events


def traced(space: Space, ids: dict[str, str]) -> History:
    """Return the traces of these messages once no more arrive.

    The clients must still run: 5.x sends traces every 5 s and loses waiting ones at its stop; 4.9 and ours
    send every 0.5 s.
    """
    counted, since = 0, 0.0

    async def told() -> list[tuple[str, Any]]:
        async with Admin(space.cluster.namesrv) as admin:
            try:
                return [(word, view.trace) for word, each in ids.items() for view in await admin.traces(each)]
            except NoRouteError:
                return []  # the first trace creates the topic

    def settled() -> list[tuple[str, Any]]:
        nonlocal counted, since
        found = asyncio.run(told())
        if len(found) != counted:
            counted, since = len(found), time.monotonic()
        # Producers write three traces; which consumers write traces depends on the servers.
        return found if counted >= 3 and time.monotonic() - since > 8 else []

    events: History = []
    for word, trace in wait_until("traces", settled, every_s=0.5):
        facts = {field: getattr(trace, field) for field in trace.__struct_fields__}
        told_of = tuple(
            f"{field}={named(space, value)}" for field, value in facts.items() if field not in PASSING
        )
        events.append((word, type(trace).__name__, *told_of))
    return sorted(events)


PROGRAMS: list[Program] = [
    order, orderly_answers, orderly_death, retries, transactions, sql, levels, timers, traces,
]  # fmt: skip
