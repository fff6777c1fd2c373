"""Members of a group with different subscriptions get a warning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.client.fakes import ignore, push_consumer
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import ClientOptions, Message, Producer, PullConsumer, PushConsumer
from cometmq.client.group import subscription
from cometmq.client.group.member import disagreements
from cometmq.protocol.bodies import ClientConnection, ConsumerConnection, SubscriptionData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.testing import LocalBroker

OWN = frozenset({("T", "a")})


def of_apache(*clients: str, **table: str) -> ConsumerConnection:
    """Build the response of Apache's broker about a group, with one subscription table for all members."""
    return ConsumerConnection(
        connection_set=[ClientConnection(client_id=name) for name in clients],
        subscription_table={
            topic: SubscriptionData(topic=topic, sub_string=expression) for topic, expression in table.items()
        },
    )


def of_ours(**members: dict[str, str]) -> ConsumerConnection:
    return ConsumerConnection(
        connection_set=[
            ClientConnection(client_id=name, subscriptions=each) for name, each in members.items()
        ]
    )


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        (of_apache("me", "you", T="a"), []),
        (of_apache("me", T="b"), []),  # this member's own earlier subscription
        (of_apache("me", "you", T="b"), ["T differently.*: b (another member), a (me)"]),
        (of_apache("you", T="a", U="*"), ["U differently.*: * (another member), not subscribed (me)"]),
        (of_ours(me={"T": "b"}, you={"T": "a"}), []),
        (of_ours(you={"T": "b"}, she={"T": "a"}), ["T differently.*: b (you), a (she and 1 more)"]),
        (of_ours(you={"U": "*"}), ["T differently.*: a (me), not subscribed (you)", "U differently"]),
    ],
)
def test_the_others_are_compared_with_us(found: ConsumerConnection, problems: list[str]) -> None:
    said = disagreements("me", OWN, found)
    assert len(said) == len(problems)
    for sentence, wanted in zip(said, problems, strict=True):
        assert all(part in sentence for part in wanted.split(".*")), sentence


@pytest.mark.parametrize("namespace", [None, "shop"])
async def test_who_joins_and_who_was_there_are_both_told(
    local: LocalBroker, caplog: pytest.LogCaptureFixture, namespace: str | None
) -> None:
    quick = ClientOptions(heartbeat_interval_s=0.1, namespace=namespace)

    def member(expression: str) -> PushConsumer:
        return PushConsumer(
            "g-differ", ignore, {"Differ": expression}, namesrv=local.namesrv, client_options=quick
        )

    async def told(consumer: PushConsumer | PullConsumer, *, expected: bool = True) -> None:
        await until(lambda: any("differently" in each for each in consumer.health().problems) is expected)

    async with Producer("p", namesrv=local.namesrv, client_options=quick) as producer:
        await producer.send(Message("Differ", b"makes the topic"))
    async with member("a") as one:
        await told(one, expected=False)
        async with member("b") as two:
            await told(two)
            await told(one)
            assert "members subscribe Differ differently" in caplog.text
            await two.subscribe("Differ", "a")
            await told(one, expected=False)
            await told(two, expected=False)
            await two.subscribe("Differ", "c")
            await told(one)
        await told(one, expected=False)
    async with PullConsumer("g-differ-2", namesrv=local.namesrv, client_options=quick) as pulling:
        await pulling.subscribe("Differ", "a")
        async with PullConsumer("g-differ-2", namesrv=local.namesrv, client_options=quick) as another:
            await another.subscribe("Differ", "b")
            await told(pulling)
            await told(another)


async def test_a_broker_that_does_not_tell_is_no_problem(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    def hang(frame: Frame) -> Frame | None:
        del frame
        return None

    async with push_consumer(namesrv, ignore) as member:
        assert member.health().ok
    broker.refuse(RequestCode.GET_CONSUMER_CONNECTION_LIST, ResponseCode.CONSUMER_NOT_ONLINE)
    async with push_consumer(namesrv, ignore) as member:
        assert member.health().ok
    broker.on(RequestCode.GET_CONSUMER_CONNECTION_LIST, hang)
    async with push_consumer(namesrv, ignore) as member:
        assert member.health().ok


async def test_a_member_with_many_topics_fills_no_log(
    namesrv: FakeNamesrv, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    found = of_ours(you={f"U{number}": "*" for number in range(1000)})
    broker.on(RequestCode.GET_CONSUMER_CONNECTION_LIST, lambda frame: frame.response(0, body=found.encode()))
    async with push_consumer(namesrv, ignore) as member:
        assert "members differ in 1001 topics in all" in member.health().problems
    assert len([line for line in caplog.text.splitlines() if "subscribe" in line]) <= 20


# -- Subscriptions as brokers see them: which of two is the newer one


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
async def test_a_changed_subscription_is_newer_though_the_clock_was_set_back(
    kind: type[PushConsumer | PullConsumer],
    namesrv: FakeNamesrv,
    broker: FakeBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brokers keep the stored subscription unless the new one has a higher version."""
    times = iter([5000.0, 5000.0, 5000.0, 1400.0, 1400.0])
    monkeypatch.setattr(subscription, "time", SimpleNamespace(time=lambda: next(times, 1400.0)))
    member = (
        PushConsumer("g", ignore, {"T": "a"}, namesrv=namesrv.addr)
        if kind is PushConsumer
        else PullConsumer("g", namesrv=namesrv.addr)
    )
    async with member:
        for expression in ("a", "b", "c", "d"):
            await member.subscribe("T", expression)
    told = {
        each.sub_string: each.sub_version
        for beat in broker.heartbeats
        for group in beat.consumer_data_set
        for each in group.subscription_data_set
        if each.topic == "T"
    }
    assert sorted(told, key=told.__getitem__) == ["a", "b", "c", "d"]
    assert len(set(told.values())) == 4
