"""Uploads and pulls of a filter server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.filtersrv.conftest import EVEN, Consumer, bodies, matching, next_offset
from tests.kit.brokers import refused
from tests.kit.fakes import pull_answer

from cometmq.filtersrv import filters
from cometmq.filtersrv import server as filter_server
from cometmq.filtersrv.server import FilterServer
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import encode_frame


class TestUploads:
    @pytest.mark.parametrize(
        ("upload", "words"),
        [
            ({"source": EVEN, "crc": 1}, "classCRC 1 is not that of the source"),
            ({"source": EVEN, "name": "../x"}, "className is no name of a Python class"),
            ({"source": EVEN, "name": "W" * 300}, "className is no name of a Python class"),
            ({"source": EVEN, "group": "a/b"}, "consumerGroup is no name of a group"),
            ({"source": EVEN, "topic": ""}, "topic is no name of a topic"),
            ({"source": b"\xff"}, "the source is no UTF-8: invalid start byte at byte 0"),
            (
                {"source": b"#" * (256 << 10) + b"#"},
                "the source has 262145 bytes, at most 262144 are allowed",
            ),
            (
                {"source": "import no_such"},
                "filter class Wanted: ModuleNotFoundError: No module named 'no_such'",
            ),
            (
                {"source": EVEN, "name": "Other"},
                "filter class Other: TypeError: the source code of the filter defines no class Other",
            ),
        ],
    )
    async def test_what_cannot_be_a_class_is_refused_and_leaves_what_was_there(
        self, broker, server, consumer, upload, words
    ):
        broker.store_numbers(4)
        assert (await consumer.upload(EVEN)).code == 0
        refused(await consumer.upload(**upload), ResponseCode.SYSTEM_ERROR, words)
        assert len(server.filters) == 1
        assert bodies(await consumer.pull()) == [b"0", b"2"]

    async def test_the_same_class_is_not_loaded_again_and_another_takes_its_place(
        self, broker, server, consumer, caplog
    ):
        broker.store_numbers(4)
        await consumer.upload(EVEN)
        first = server.filters["g", "T"].process
        assert (await consumer.upload(EVEN)).code == 0
        assert server.filters["g", "T"].process is first
        assert "a new filter source now applies" not in caplog.text
        assert (await consumer.upload(matching("message.body == b'3'"))).code == 0
        assert server.filters["g", "T"].process is not first
        assert "group g on topic T: a new filter source now applies to all members" in caplog.text
        assert bodies(await consumer.pull()) == [b"3"]

    async def test_its_worker_goes_first_when_memory_is_short(self, server, consumer):
        await consumer.upload(EVEN)
        pid = server.filters["g", "T"].process.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"

    async def test_each_group_and_topic_has_its_own(self, broker, consumer):
        broker.store_numbers(4)
        broker.store("U", 0, b"8")
        await consumer.upload(EVEN)
        await consumer.upload(matching("message.body == b'1'"), group="h")
        await consumer.upload(matching("True"), topic="U")
        assert bodies(await consumer.pull()) == [b"0", b"2"]
        assert bodies(await consumer.pull(group="h")) == [b"1"]
        assert bodies(await consumer.pull(topic="U")) == [b"8"]
        refused(await consumer.pull(group="h", topic="U"), ResponseCode.FILTER_DATA_NOT_EXIST, "group h")

    async def test_their_number_is_bounded_and_those_nobody_uses_make_room(
        self, server, consumer, monkeypatch
    ):
        monkeypatch.setattr(filter_server, "MAX_FILTERS", 2)
        assert [(await consumer.upload(EVEN, group=group)).code for group in "ghh"] == [0, 0, 0]
        refused(await consumer.upload(EVEN, group="i"), ResponseCode.SYSTEM_BUSY, "2 filter classes")
        monkeypatch.setattr(filter_server, "IDLE_TIMEOUT_S", 0)
        await server.look_round()
        assert server.filters == {}
        assert (await consumer.upload(EVEN, group="i")).code == 0

    async def test_one_that_comes_while_others_are_forgotten_stays(self, server, consumer, monkeypatch):
        for group in "gh":
            await consumer.upload(EVEN, group=group)
        first = server.filters["g", "T"]
        close = first.close

        async def close_slowly():
            await consumer.upload(matching("True"), group="h")
            await close()

        monkeypatch.setattr(first, "close", close_slowly)
        monkeypatch.setattr(filter_server, "IDLE_TIMEOUT_S", 0)
        await server.look_round()
        assert list(server.filters) == [("h", "T")]


class TestPulls:
    async def test_what_matches_is_given_as_it_is_stored_with_the_brokers_offsets(self, broker, consumer):
        broker.store_numbers(6)
        await consumer.upload(EVEN)
        answer = await consumer.pull(1)
        assert answer.body == broker.records["T", 0][2] + broker.records["T", 0][4]
        assert answer.ext == {
            "suggestWhichBrokerId": "0", "nextBeginOffset": "5", "minOffset": "0", "maxOffset": "6"
        }  # fmt: skip

    async def test_the_broker_is_asked_for_all_messages_on_behalf_of_the_group(self, broker, consumer):
        broker.store_numbers(1)
        await consumer.upload(EVEN)
        await consumer.pull(flags=8 | 1, hold_ms=5_000)
        (asked,) = broker.pulls
        assert asked.sys_flag == 1 | 2 | 4  # commit, wait, subscription
        assert (asked.consumer_group, asked.subscription, asked.expression_type) == ("g", "*", "TAG")
        assert asked.commit_offset == 3
        assert 4_000 < asked.suspend_timeout_millis <= 5_000

    async def test_a_pull_that_does_not_wait_looks_at_one_answer_of_the_broker(self, broker, consumer):
        broker.store_numbers(20)
        await consumer.upload(matching("message.body == b'17'"))
        answer = await consumer.pull()
        assert (answer.code, next_offset(answer), len(broker.pulls)) == (20, 4, 1)

    async def test_a_pull_that_waits_goes_on_to_the_first_match(self, broker, consumer):
        broker.store_numbers(20)
        await consumer.upload(matching("message.body == b'17'"))
        answer = await consumer.pull(hold_ms=10_000, flags=8 | 1)
        assert (bodies(answer), next_offset(answer)) == ([b"17"], 20)
        assert [pull.queue_offset for pull in broker.pulls] == [0, 4, 8, 12, 16]
        assert [pull.sys_flag & 1 for pull in broker.pulls] == [1, 0, 0, 0, 0]  # only the first pull commits

    async def test_its_time_ends_it_with_the_offset_behind_all_that_was_judged(self, broker, consumer):
        await consumer.upload(matching("False"))

        def endless(frame):
            return pull_answer(frame, 0, offset_asked(frame) + 1, 1 << 40, broker.records["T", 0][0])

        broker.store_numbers(1)
        broker.on(RequestCode.PULL_MESSAGE, endless)
        begun = asyncio.get_running_loop().time()
        answer = await consumer.pull(hold_ms=300)
        assert 0.3 <= asyncio.get_running_loop().time() - begun < 5
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        pulls = broker.requests.count(RequestCode.PULL_MESSAGE)
        assert next_offset(answer) == pulls > 1

    @pytest.mark.parametrize("code", [1, 19, 20, 21, 26])
    async def test_other_answers_of_the_broker_are_passed_on(self, broker, consumer, code):
        await consumer.upload(EVEN)
        broker.on(RequestCode.PULL_MESSAGE, lambda frame: pull_answer(frame, code, 7, 9))
        answer = await consumer.pull(hold_ms=1_000)
        assert (answer.code, next_offset(answer)) == (code, 7)

    async def test_a_class_that_raises_refuses_the_pull_and_others_are_served(self, broker, consumer):
        broker.store_numbers(4)
        await consumer.upload(matching("1 / int(message.body)"))
        await consumer.upload(EVEN, group="h")
        words = "filter class Wanted: ZeroDivisionError: division by zero for message"
        refused(await consumer.pull(), ResponseCode.SYSTEM_ERROR, words)
        assert bodies(await consumer.pull(group="h")) == [b"0", b"2"]
        assert bodies(await consumer.pull(1)) == [b"1", b"2", b"3"]

    async def test_what_was_judged_before_a_failure_is_not_judged_again(self, broker, consumer):
        broker.store_numbers(20)
        await consumer.upload(matching("message.body == b'10' and 1 / 0"))
        answer = await consumer.pull(hold_ms=10_000)
        assert (answer.code, next_offset(answer)) == (20, 8)
        refused(await consumer.pull(8, hold_ms=10_000), ResponseCode.SYSTEM_ERROR, "at offset 10")

    async def test_a_slow_class_holds_up_its_own_group_only(self, broker, consumer, monkeypatch):
        monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 2.0)
        monkeypatch.setattr(filters, "QUEUE_TIMEOUT_S", 1.0)
        broker.store_numbers(4)
        await consumer.upload(matching("any(None for _ in iter(int, 1))"))
        await consumer.upload(EVEN, group="h")
        slow = [asyncio.create_task(consumer.pull()) for _ in range(3)]
        assert bodies(await consumer.pull(group="h")) == [b"0", b"2"]
        assert not any(task.done() for task in slow)
        codes = sorted(answer.code for answer in await asyncio.gather(*slow))
        assert codes == [ResponseCode.SYSTEM_ERROR, ResponseCode.FLOW_CONTROL, ResponseCode.FLOW_CONTROL]

    async def test_what_waits_for_verdicts_is_bounded(self, broker, consumer, monkeypatch):
        monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 1.0)
        monkeypatch.setattr(filter_server, "MAX_FILTERED_BYTES", 100)
        broker.store_numbers(4)
        await consumer.upload(matching("any(None for _ in iter(int, 1))"))
        answers = await asyncio.gather(consumer.pull(), consumer.pull())
        busy = next(answer for answer in answers if answer.code == ResponseCode.FLOW_CONTROL)
        assert "too many messages are waiting" in busy.remark

    async def test_what_waits_for_a_slow_class_leaves_room_for_others(self, broker, consumer, monkeypatch):
        monkeypatch.setattr(filters, "BATCH_TIMEOUT_S", 1.0)
        monkeypatch.setattr(filter_server, "MAX_FILTERED_BYTES", 1_000)
        monkeypatch.setattr(filter_server, "MAX_FILTERED_BYTES_PER_CLASS", 100)
        broker.store_numbers(4)
        await consumer.upload(matching("any(None for _ in iter(int, 1))"))
        await consumer.upload(EVEN, group="h")
        slow = [asyncio.create_task(consumer.pull()) for _ in range(5)]
        done, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().code for task in done} == {ResponseCode.FLOW_CONTROL}
        assert bodies(await consumer.pull(group="h")) == [b"0", b"2"]
        await asyncio.gather(*slow)

    async def test_a_pull_takes_the_class_that_came_while_it_waited(self, broker, consumer):
        await consumer.upload(matching("False"))
        held = []
        broker.on(RequestCode.PULL_MESSAGE, held.append)
        pulling = asyncio.create_task(consumer.pull(hold_ms=20_000))
        await broker.wait_for(lambda: held)
        await consumer.upload(EVEN)
        broker.store_numbers(4)
        broker.connections[-1].write(encode_frame(broker.pull(held[0])))
        assert bodies(await pulling) == [b"0", b"2"]

    async def test_a_broker_that_is_gone_refuses_the_pull(self, broker, consumer):
        await consumer.upload(EVEN)
        held = []
        broker.on(RequestCode.PULL_MESSAGE, held.append)
        pulling = asyncio.create_task(consumer.pull(hold_ms=20_000))
        await broker.wait_for(lambda: held)
        broker.connections[-1].abort()
        refused(await pulling, ResponseCode.SYSTEM_ERROR, "the pull failed: ")


def offset_asked(frame) -> int:
    return int(frame.ext["queueOffset"])


async def test_it_registers_again_and_again_and_goes_on_when_it_is_refused(broker, server, consumer):
    broker.refuse(RequestCode.REGISTER_FILTER_SERVER, ResponseCode.NO_PERMISSION)
    await server.look_round()
    assert broker.requests.count(RequestCode.REGISTER_FILTER_SERVER) == 2
    assert (await consumer.upload(EVEN)).code == 0


async def test_a_stop_ends_its_processes(settings):
    running = FilterServer(settings)
    await running.start()
    client = Consumer(running.addr)
    await client.upload(EVEN)
    one = running.filters["g", "T"]
    await running.stop()
    assert one.process is None
    await client.remoting.close()
