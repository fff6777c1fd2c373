"""Dead letters on a real cluster are counted, read, selected and sent again."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.broker.conftest import start_cluster  # noqa: F401 - a fixture
from tests.kit.brokers import StartCluster
from tests.kit.waiting import until

from cometmq import ConsumeFromWhere, PushConsumer, PushOptions, SimpleConsumer
from cometmq.admin import (
    Admin,
    DeadLettersHidden,
    IndexSilent,
    Resending,
    ResendResult,
    ResendStopped,
    Selection,
    UnknownNameError,
)
from cometmq.admin.dead_letters import MAX_FAILURES, Resend, check_copy, original_topic, resend_times, view
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.client.cluster.requests import send_request
from cometmq.errors import ConfigError, SqlError
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import SendMessageResponseHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.properties import values as names
from cometmq.testing import LocalBroker, local_broker

EACH_ONCE = Resending()
numbers = itertools.count(1)


class Dying:
    """A group of one test, and messages that become its dead letters."""

    def __init__(self, admin: Admin, addr: str) -> None:
        self.admin = admin
        self.addr = addr
        number = next(numbers)
        self.group = f"g{number}"
        self.topic = f"orders{number}"

    async def die(self, *bodies: bytes, topic: str | None = None, **more: object) -> list[MessageExt]:
        """Send messages, make each a dead letter immediately, and return the dead letters."""
        for body in bodies:
            message = Message(topic or self.topic, body, **more)  # type: ignore[arg-type]
            await self.give_up((await self.admin.send(message)).offset_msg_id)
        await self.registered(f"%DLQ%{self.group}")
        return await self.letters()

    async def registered(self, topic: str) -> None:
        """Wait until a topic is registered with the name server."""
        async with asyncio.timeout(60):
            while topic not in await self.admin.topics():
                await asyncio.sleep(0.005)

    async def give_up(self, offset_msg_id: str) -> None:
        brokers = self.admin.client.brokers
        stored = await brokers.view_message(self.addr, decode_offset_id(offset_msg_id).physical_offset)
        await brokers.send_message_back(self.addr, stored, self.group, delay_level=-1)

    async def letters(self, **wanted: object) -> list[MessageExt]:
        chosen = Selection(group=self.group, **wanted)  # type: ignore[arg-type]
        return [message async for message in self.admin.dead_letters(chosen)]

    async def bodies(self, **wanted: object) -> list[bytes]:
        return [message.body for message in await self.letters(**wanted)]

    async def resend(self, how: Resending = EACH_ONCE, **wanted: object) -> list[ResendResult]:
        chosen = Selection(group=self.group, **wanted)  # type: ignore[arg-type]
        return [result async for result in self.admin.resend(chosen, how)]

    async def states(self, how: Resending = EACH_ONCE, **wanted: object) -> str:
        return " ".join(result.state for result in await self.resend(how, **wanted))

    async def copy(self, result: ResendResult) -> MessageExt:
        place = decode_offset_id(result.copy_offset_msg_id)
        return await self.admin.client.brokers.view_message(self.addr, place.physical_offset)


@pytest.fixture
async def dying(broker: LocalBroker) -> AsyncIterator[Dying]:
    async with Admin(broker.namesrv) as admin:
        yield Dying(admin, broker.broker_addr)


def test_a_retry_topic_of_pop_is_no_original_topic() -> None:
    named = {"%RETRY%g_T": "T", "%RETRY%g+T": "T", "%RETRY%h_T": "%RETRY%h_T", "T": "T"}
    letters = [MessageExt("%DLQ%g", b"", properties={"RETRY_TOPIC": each}) for each in named]
    assert [original_topic(each) for each in letters] == list(named.values())


class TestReading:
    async def test_what_is_known_of_one(self, dying: Dying) -> None:
        (letter,) = await dying.die(b"poison", tags="T", keys=["k1", "k2"])
        found = view(letter)
        assert (found.topic, found.original_topic, found.body) == (
            f"%DLQ%{dying.group}", dying.topic, "poison"
        )  # fmt: skip
        assert (found.tags, found.keys, found.reconsume_times, found.resend_times) == (
            "T",
            ["k1", "k2"],
            1,
            0,
        )
        original = await dying.admin.message_by_id(found.origin_msg_id)
        assert (original.topic, original.msg_id) == (dying.topic, found.msg_id)
        counts = {each.group: each for each in await dying.admin.dead_letter_counts()}
        assert (counts[dying.group].count, counts[dying.group].problem) == (1, "")

    async def test_how_they_are_chosen(self, dying: Dying) -> None:
        await dying.die(b"a", keys=["k", "only"])
        await dying.die(b"b", keys=["k"], topic=f"{dying.topic}-other")
        between = time.time_ns() // 1_000_000 + 5
        await asyncio.sleep(0.01)
        a, b, c = await dying.die(b"c")
        assert await dying.bodies() == [b"a", b"b", b"c"]
        assert await dying.bodies(key="k") == [b"a", b"b"]
        assert await dying.bodies(key="k", topic=dying.topic) == [b"a"]
        assert await dying.bodies(topic=f"{dying.topic}-other") == [b"b"]
        assert await dying.bodies(begin_ms=between) == [b"c"]
        assert await dying.bodies(end_ms=between) == [b"a", b"b"]
        ids = {a.msg_id.lower(), b.offset_msg_id, view(c).origin_msg_id}
        assert await dying.bodies(ids=frozenset(ids)) == [b"a", b"b", b"c"]
        assert await dying.bodies(ids=frozenset({a.msg_id}), key="nobody's") == []

    async def test_sql_sees_the_properties(self, dying: Dying) -> None:
        await dying.die(b"cheap", tags="T", properties={"amount": "3"})
        await dying.die(b"dear", tags="T", properties={"amount": "30"})
        await dying.die(b"other")
        assert await dying.bodies(sql="amount > 5") == [b"dear"]
        assert await dying.bodies(sql=f"RETRY_TOPIC = '{dying.topic}' AND TAGS IS NULL") == [b"other"]
        assert await dying.states(sql="amount < 5") == "RESENT"
        with pytest.raises(SqlError, match="column"):
            await dying.letters(sql="amount >")

    async def test_a_span_ends_after_its_begin(self) -> None:
        with pytest.raises(ConfigError, match="a time after the begin, 7"):
            Selection(group="g", begin_ms=7, end_ms=7)

    async def test_a_group_without_dead_letters_has_none(self, dying: Dying) -> None:
        sent = await dying.admin.send(Message(dying.topic, b"x"))
        stored = await dying.admin.message_by_id(sent.offset_msg_id)
        await dying.admin.client.brokers.send_message_back(dying.addr, stored, dying.group)
        await dying.registered(f"%RETRY%{dying.group}")
        assert await dying.letters() == []
        assert f"%DLQ%{dying.group}" not in await dying.admin.topics()
        assert await dying.states() == ""

    async def test_a_group_that_nobody_knows_is_named(self, dying: Dying) -> None:
        await dying.die(b"x")
        dying.group += "x"
        with pytest.raises(UnknownNameError, match=f"no consumer group named {dying.group}; did you mean"):
            await dying.letters()

    async def test_a_topic_that_may_not_be_read_is_no_empty_one(self, dying: Dying) -> None:
        await dying.die(b"x")
        topic = f"%DLQ%{dying.group}"
        allow = dying.admin.client.brokers.create_topic
        await allow(dying.addr, topic, read_queue_nums=1, write_queue_nums=1, perm=2)
        with pytest.raises(DeadLettersHidden, match="-p 6"):
            await dying.letters()
        await allow(dying.addr, topic, read_queue_nums=1, write_queue_nums=1, perm=6)
        assert await dying.bodies() == [b"x"]


class TestResend:
    async def test_to_the_group_each_goes_once(self, dying: Dying) -> None:
        (letter,) = await dying.die(b"poison", tags="T", keys=["k"], flag=7, properties={"clerk": "Ann"})
        (result,) = await dying.resend()
        copy = await dying.copy(result)
        assert (result.state, result.target, copy.topic) == ("RESENT", *[f"%RETRY%{dying.group}"] * 2)
        assert (copy.body, copy.flag, copy.tags, copy.keys) == (b"poison", 7, "T", ("k",))
        assert (copy.msg_id, copy.reconsume_times) == (letter.msg_id, 0)
        assert copy.user_properties == {"clerk": "Ann", "DLQ_RESEND_TIMES": "1"}
        assert (original_topic(copy), view(copy).origin_msg_id) == (dying.topic, view(letter).origin_msg_id)
        assert "DELAY" not in copy.properties
        assert await dying.admin.was_resent(dying.group, letter)
        assert await dying.states() == "SKIPPED"
        assert await dying.states(Resending(to_topic=True)) == "SKIPPED"
        assert await dying.states(Resending(again=True)) == "RESENT"

    async def test_a_run_that_is_repeated_finds_what_it_has_sent(self, dying: Dying) -> None:
        await dying.die(b"poison", b"other")
        for how in (Resending(run="first"), Resending(run="second", again=True)):
            sent, repeated = await dying.resend(how), await dying.resend(how)
            assert [result.state for result in sent] == ["RESENT"] * 2
            assert repeated == sent, "the same copies, counted as sent"
        assert await dying.states(Resending(run="third")) == "SKIPPED SKIPPED"
        assert await dying.states(Resending(run="third", again=True, dry_run=True)) == "PLANNED PLANNED"
        (copy, _) = [await dying.copy(result) for result in repeated]
        await dying.give_up(repeated[0].copy_offset_msg_id)
        (*_, last) = await dying.resend()
        assert "DLQ_RESEND_RUN" in copy.properties
        assert "DLQ_RESEND_RUN" not in (await dying.copy(last)).properties

    async def test_to_its_topic_it_goes_to_all_groups(self, dying: Dying) -> None:
        await dying.die(b"poison")
        (result,) = await dying.resend(Resending(to_topic=True))
        copy = await dying.copy(result)
        assert (copy.topic, copy.body, resend_times(copy)) == (dying.topic, b"poison", 1)
        assert "RETRY_TOPIC" not in copy.properties
        assert await dying.states() == "SKIPPED"

    async def test_a_group_that_pops_gets_it_from_its_topic_only(self, dying: Dying) -> None:
        await dying.admin.send(Message(dying.topic, b"poison"))
        await dying.registered(dying.topic)
        async with SimpleConsumer(dying.group, dying.topic, client=dying.admin.client) as member:
            (message,) = await member.receive(wait_s=60)
            await member.change_invisibility(message, 0)
            (message,) = await member.receive(wait_s=60)
            await member.dead_letter(message)
            await dying.registered(f"%DLQ%{dying.group}")
            (result,) = await dying.resend()
            assert (result.state, result.original_topic) == ("FAILED", dying.topic)
            assert "the members of the group pop" in result.problem
        assert await dying.states() == "FAILED"  # It was popped more than once
        assert await dying.states(Resending(to_topic=True)) == "RESENT"

    async def test_what_died_again_is_sent_again(self, dying: Dying) -> None:
        await dying.die(b"poison")
        for times in (1, 2):
            results = await dying.resend()
            assert [result.state for result in results] == ["SKIPPED"] * (times - 1) + ["RESENT"]
            await dying.give_up(results[-1].copy_offset_msg_id)
        assert [resend_times(letter) for letter in await dying.letters()] == [0, 1, 2]
        assert len({view(letter).origin_msg_id for letter in await dying.letters()}) == 1

    async def test_a_group_that_allows_no_retries_gets_it_too(self, dying: Dying) -> None:
        settings = f'{{"groupName":"{dying.group}","retryMaxTimes":0}}'.encode()
        await dying.admin.client.brokers.call(
            dying.addr, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, settings
        )
        await dying.die(b"poison")
        (result,) = await dying.resend()
        assert (await dying.copy(result)).topic == f"%RETRY%{dying.group}"

    async def test_a_large_body_arrives_as_it_was(self, dying: Dying) -> None:
        body = b"x" * 50_000 + os.urandom(1000)
        await dying.die(body)
        (result,) = await dying.resend()
        copy = await dying.copy(result)
        assert copy.body == body
        assert copy.store_size < 10_000

    async def test_one_without_a_unique_key_is_sent_once(self, dying: Dying) -> None:
        queue = MessageQueue(dying.topic, "broker-a", 0)
        frame = send_request("p", dying.topic, queue, b"bare", "")
        answer = await dying.admin.client.brokers.ask(dying.addr, frame)
        await dying.give_up(answer.header(SendMessageResponseHeader).msg_id)
        await dying.registered(f"%DLQ%{dying.group}")
        (letter,) = await dying.letters()
        assert await dying.states() == "RESENT"
        assert await dying.states(ids=frozenset({letter.offset_msg_id})) == "SKIPPED"

    async def test_one_that_names_no_topic_is_left(self, dying: Dying) -> None:
        await dying.die(b"good")
        await dying.admin.send(Message(f"%DLQ%{dying.group}", b"stray"))
        results = await dying.resend()
        assert [result.state for result in results] == ["RESENT", "FAILED"]
        assert results[1].problem == "the dead letter has no original topic"

    @pytest.mark.parametrize("name", ["%RETRY%victims", "%DLQ%victims", "rmq_sys_x", "SCHEDULE_TOPIC_XXXX"])
    async def test_a_sender_does_not_lead_it_into_a_topic_of_the_system(
        self, dying: Dying, name: str
    ) -> None:
        await dying.die(b"good")
        topic = f"%DLQ%{dying.group}"
        queue = MessageQueue(topic, "broker-a", 0)
        for _ in range(MAX_FAILURES):
            properties = f"{names.RETRY_TOPIC}\x01{name}\x02"
            frame = send_request("p", topic, queue, b"bad", properties)
            answer = await dying.admin.client.brokers.ask(dying.addr, frame)
            assert answer.code == 0, answer.remark
        await dying.die(b"good")
        how = Resending(to_topic=True, again=True)
        results = await dying.resend(how)
        refused = [result for result in results if result.state == "FAILED"]
        assert [result.state for result in results].count("RESENT") == 2
        assert len(refused) == MAX_FAILURES
        assert all("is reserved" in result.problem for result in refused)

    async def test_a_message_that_died_twice_by_a_mistake_is_sent_once(self, dying: Dying) -> None:
        await dying.die(b"first")  # is sent alone; the others follow in the same millisecond
        _, letter = await dying.die(b"twice")
        await dying.give_up(view(letter).origin_msg_id)
        assert await dying.states() == "RESENT RESENT SKIPPED"

    async def test_a_dry_run_sends_nothing(self, dying: Dying) -> None:
        await dying.die(b"a", b"b")
        assert await dying.states(Resending(dry_run=True)) == "PLANNED PLANNED"
        assert await dying.states(Resending(limit=1)) == "RESENT"
        assert await dying.states(Resending(dry_run=True)) == "SKIPPED PLANNED"

    async def test_a_limit_counts_what_is_sent(self, dying: Dying) -> None:
        await dying.die(*(b"%d" % number for number in range(5)))
        assert await dying.states(Resending(limit=2)) == "RESENT RESENT"
        assert await dying.states(Resending(limit=2)) == "SKIPPED SKIPPED RESENT RESENT"
        assert (await dying.states()).split() == ["SKIPPED"] * 4 + ["RESENT"]

    async def test_a_rate_holds_for_all_together(self, dying: Dying) -> None:
        await dying.die(*(b"%d" % number for number in range(9)))
        begun = time.monotonic()
        assert (await dying.states(Resending(rate=40))).split() == ["RESENT"] * 9
        assert time.monotonic() - begun >= 8 / 40

    async def test_an_interrupted_run_is_continued_by_the_next(self, dying: Dying) -> None:
        count = 40
        await dying.die(*(b"%d" % number for number in range(count)))
        everything = Selection(group=dying.group)
        async with aclosing(dying.admin.resend(everything, Resending())) as results:  # type: ignore[type-var]
            async for result in results:
                if result.msg_id == (await dying.letters())[5].msg_id:
                    break
        states = (await dying.states()).split()
        assert 6 <= states.count("SKIPPED") < count
        assert states.count("SKIPPED") + states.count("RESENT") == count
        retried = await dying.admin.topic_status(f"%RETRY%{dying.group}")
        assert sum(queue.max_offset for queue in retried) == count


class TestTrouble:
    async def test_without_an_index_nothing_is_sent(self, tmp_path: Path) -> None:
        with local_broker(tmp_path, {"messageIndexEnable": "false"}) as broker:
            async with Admin(broker.namesrv) as admin:
                dying = Dying(admin, broker.broker_addr)
                (letter,) = await dying.die(b"poison")
                with pytest.raises(IndexSilent, match=f"does not find message {letter.msg_id}"):
                    await dying.resend()
                assert await dying.states(Resending(again=True)) == "RESENT"

    async def test_failures_in_a_row_end_the_run(self, dying: Dying) -> None:
        await dying.die(*(b"%d" % number for number in range(20)))
        topic = f"%RETRY%{dying.group}"
        allow = dying.admin.client.brokers.create_topic
        await allow(dying.addr, topic, read_queue_nums=1, write_queue_nums=1, perm=4)
        with pytest.raises(ResendStopped, match="10 messages in a row failed"):
            await dying.resend()
        await allow(dying.addr, topic, read_queue_nums=1, write_queue_nums=1, perm=6)
        await dying.admin.client.refresh_routes([topic])
        assert (await dying.states()).split() == ["RESENT"] * 20

    async def test_a_copy_that_is_a_dead_letter_at_once_is_noticed(self, dying: Dying) -> None:
        (letter,) = await dying.die(b"poison")
        result = ResendResult(
            state=Resend.RESENT, msg_id=letter.msg_id, offset_msg_id="", original_topic=dying.topic,
            keys=[], target="", copy_offset_msg_id=letter.offset_msg_id,
        )  # fmt: skip
        with pytest.raises(ResendStopped, match="consume in order"):
            await check_copy(dying.admin.client, result)


async def test_from_the_first_failure_to_the_cure(
    start_cluster: StartCluster,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seventeen attempts fail, the dead letter is sent again, and the eighteenth attempt succeeds."""
    monkeypatch.setattr(DelayLevels, "of", lambda config: DelayLevels((10,) * 18))
    cluster = await start_cluster()
    tries: list[MessageExt] = []

    async def cured_later(messages: list[MessageExt]) -> None:
        tries.extend(messages)
        if "DLQ_RESEND_TIMES" not in messages[0].properties:
            raise ValueError("poison")

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with Admin(cluster.namesrv_addr) as admin:
        sent = await admin.send(Message("orders", b"poison"))
        consumer = PushConsumer("g", cured_later, "orders", namesrv=cluster.namesrv_addr, options=options)
        async with consumer:
            await until(lambda: "%DLQ%g" in cluster.broker.parts.tables.topics.table)
            assert [message.reconsume_times for message in tries] == list(range(17))
            assert {(message.topic, message.msg_id) for message in tries} == {("orders", sent.msg_id)}
            async with asyncio.timeout(60):  # the letter is stored after its topic
                while not (letters := [each async for each in admin.dead_letters(Selection(group="g"))]):
                    await asyncio.sleep(0.005)
            (letter,) = letters
            assert (letter.reconsume_times, view(letter).origin_msg_id) == (17, sent.offset_msg_id)
            assert (await admin.retry_limits("g")).members == {consumer.client.client_id: 16}
            assert [r.state async for r in admin.resend(Selection(group="g"), Resending())] == ["RESENT"]
            await until(lambda: len(tries) == 18)
            assert (tries[-1].topic, tries[-1].msg_id) == ("orders", sent.msg_id)
            assert tries[-1].reconsume_times == 0
