"""Messages with a delivery time: delivery, recalls, moves to the end of the log, and restarts."""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from unittest.mock import Mock

import pytest
from tests.broker.timers.kit import fill, move_all, now_ms, recall, short_retention, waiting
from tests.kit.brokers import copy_running, records, refused, running, take
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until

from cometmq.broker.tables.durable import save_changes
from cometmq.broker.timers.following import Follower
from cometmq.protocol.bodies import TimerMetrics
from cometmq.protocol.codes import TIMER_TOPIC, RequestCode
from cometmq.protocol.headers import (
    TopicRequestHeader,
)
from cometmq.protocol.timers import RecallHandle
from cometmq.store.base.clock import ManualClock
from cometmq.store.base.disk import DiskUsage
from cometmq.store.base.refusal import Flag
from cometmq.store.inspect import verify
from cometmq.store.inspect.findings import ERROR

WALL = 1_700_000_000_000


class TestDelivery:
    @pytest.mark.parametrize("name", ["TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
    @pytest.mark.parametrize("version", [407, 500])
    async def test_a_message_comes_after_its_time_and_within_a_second(self, peer, name, version):
        await peer.send()
        begun = now_ms()
        value = {"TIMER_DELAY_MS": 1_200, "TIMER_DELAY_SEC": 1, "TIMER_DELIVER_MS": begun + 1_200}[name]
        least = 1_000 if name == "TIMER_DELAY_SEC" else 1_200
        properties = {name: str(value), "TAGS": "A", "KEYS": "k", "UNIQ_KEY": "U1"}
        answer = await peer.send(body=b"later", properties=properties, version=version)
        assert answer.code == 0
        _, message = await take(peer, "Orders", 2)
        assert least <= now_ms() - begun < least + 1_500
        assert (message.body, message.queue_id, message.tags) == (b"later", 0, "A")
        out_ms = int(message.properties["TIMER_OUT_MS"])
        assert out_ms % 1_000 == 0
        assert RecallHandle.decode(answer.ext["recallHandle"]) == ("Orders", "broker-a", out_ms + 1, "U1")
        assert message.properties["REAL_TOPIC"] == "Orders"
        assert len(records(await peer.pull(offset=1, expression="A"))) == 1

    async def test_many_of_one_second_keep_their_order(self, cluster, peer):
        at = now_ms() + 1_000
        sends = (peer.send(body=b"%d" % n, properties={"TIMER_DELIVER_MS": str(at)}) for n in range(150))
        await asyncio.gather(*sends)
        assert [m.body for m in await take(peer, "Orders", 150)] == [b"%d" % n for n in range(150)]

    async def test_the_first_of_several_times_counts_and_a_level_before_all(self, fast, peer):
        late = {"TIMER_DELAY_MS": "900000", "TIMER_DELIVER_MS": str(now_ms() + 900_000)}
        await peer.send(body=b"sec", properties={"TIMER_DELAY_SEC": "1", **late})
        await peer.send(body=b"level", properties={"DELAY": "1", **late})
        found = await take(peer, "Orders", 2)
        assert [m.body for m in found] == [b"level", b"sec"]
        assert "TIMER_DELAY_MS" not in found[0].properties

    @pytest.mark.parametrize("properties", [{"TIMER_DELAY_MS": "0"}, {"TIMER_DELIVER_MS": "1"}])
    async def test_what_is_due_already_is_stored_at_once(self, peer, properties):
        answer = await peer.send(body=b"now", properties={**properties, "UNIQ_KEY": "U"})
        assert "recallHandle" not in answer.ext
        assert [m.body for m in records(await peer.pull())] == [b"now"]

    async def test_one_that_came_is_not_timed_again(self, peer):
        """A client sends a received message's properties again."""
        await peer.send(properties={"TIMER_DELAY_MS": "900000", "TIMER_OUT_MS": "1700000000000"})
        assert len(records(await peer.pull())) == 1

    async def test_a_oneway_send(self, cluster, peer):
        await peer.send(properties={"TIMER_DELAY_MS": "1"}, oneway=True)
        assert len(await take(peer, "Orders", 1)) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("properties", "words"),
        [
            ({"TIMER_DELAY_SEC": str(40 * 86_400 + 1)}, "the max delay 3456000000ms"),
            ({"TIMER_DELAY_MS": str(40 * 86_400_000 + 1)}, "the delay is 3456000001ms"),
            ({"TIMER_DELIVER_MS": "9" * 18}, "the max delay 3456000000ms"),
            ({"TIMER_DELIVER_MS": "9" * 19}, "is not a number"),
            ({"TIMER_DELAY_MS": "soon"}, "soon is not a number"),
            ({"TIMER_DELAY_MS": "1_000"}, "1_000 is not a number"),
            ({"TIMER_DELAY_MS": " 1000"}, " 1000 is not a number"),
            ({"DELAY": "1_0"}, "DELAY is not a number: 1_0"),
            ({"TIMER_DELAY_MS": "1000", "a": "x" * 32_650}, "the properties have"),
        ],
    )
    async def test_an_impossible_time(self, cluster, peer, properties, words):
        refused(await peer.send(properties=properties), 13, words)
        assert cluster.broker.parts.store.queues.find_queue(TIMER_TOPIC, 0) is None

    @pytest.mark.parametrize("name", ["TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
    async def test_numbers_are_those_that_java_reads(self, cluster, peer, name):
        later = now_ms() + 60_000 if name == "TIMER_DELIVER_MS" else 60_000
        for text in (f"+{later}", f"{later:020}"):
            answer = await peer.send(properties={name: text, "UNIQ_KEY": "U"})
            assert RecallHandle.decode(answer.ext["recallHandle"]).deliver_ms > now_ms()
        assert (await peer.send(body=b"past", properties={name: str(-(2**63))})).code == 0
        assert [message.body for message in await take(peer, "Orders", 1)] == [b"past"]

    async def test_the_longest_delay_is_taken_and_the_limit_can_be_changed(self, peer):
        longest = {"TIMER_DELAY_SEC": str(40 * 86_400)}
        assert (await peer.send(properties=longest)).code == 0
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"timerMaxDelaySec=60\n")
        refused(await peer.send(properties={"TIMER_DELAY_SEC": "61"}), 13, "the max delay 60000ms")

    async def test_when_too_many_wait(self, started):
        cluster, peer = await started(timerMaxWaiting="2")
        for _ in range(2):
            assert (await peer.send(properties={"TIMER_DELAY_SEC": "60"})).code == 0
        await until(lambda: cluster.broker.parts.tables.timers.waiting == 2)
        refused(await peer.send(properties={"TIMER_DELAY_SEC": "60"}), 1, "max num limit is 2")
        assert (await peer.send()).code == 0

    async def test_recalls_are_taken_when_too_many_wait_and_have_a_limit_of_their_own(self, started):
        cluster, peer = await started(timerMaxWaiting="2")
        state = cluster.broker.parts.tables.timers
        handles = []
        for key in ("a", "b"):
            answer = await peer.send(properties={"TIMER_DELAY_SEC": "60", "UNIQ_KEY": key})
            handles.append(answer.ext["recallHandle"])
        await until(lambda: state.waiting == 2)
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"timerMaxWaiting=1\n")
        for handle in handles:
            assert (await recall(peer, handle)).code == 0
        assert (await waiting(peer))[0] == []
        await until(lambda: state.recalls == 2)
        refused(await recall(peer, handles[0]), 1, "2 recalls wait")

    async def test_switched_off(self, started):
        _, peer = await started(timerWheelEnable="false")
        refused(await peer.send(properties={"TIMER_DELAY_SEC": "60"}), 1, "timerWheelEnable is false")

    async def test_nobody_stores_into_the_timer_topic_by_himself(self, peer):
        refused(await peer.send(topic=TIMER_TOPIC), 16, "forbidden")


class TestRecall:
    async def test_a_message_that_was_taken_back_never_comes(self, cluster, peer):
        handles = {}
        at = str(now_ms() + 1_500)
        for key in ("a", "b", "c"):
            answer = await peer.send(body=key.encode(), properties={"TIMER_DELIVER_MS": at, "UNIQ_KEY": key})
            handles[key] = answer.ext["recallHandle"]
        answer = await recall(peer, handles["b"])
        assert (answer.code, answer.ext["msgId"]) == (0, "b")
        listed, page = await waiting(peer)
        assert ([m.body for m in listed], page.waiting) == ([b"a", b"c"], 4)
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"a", b"c"]
        await until(
            lambda: cluster.broker.parts.timers.pending.wait_ms(cluster.broker.parts.timers.times()) > 10**9
        )
        assert (await peer.pull()).ext["maxOffset"] == "2"

    async def test_also_of_a_delay_and_after_a_restart(self, cluster, peer):
        answer = await peer.send(body=b"gone", properties={"TIMER_DELAY_MS": "1500", "UNIQ_KEY": "x"})
        await peer.send(body=b"stays", properties={"TIMER_DELAY_MS": "1500", "UNIQ_KEY": "y"})
        assert (await recall(peer, answer.ext["recallHandle"])).code == 0
        await cluster.restart()
        peer = cluster.peer()
        assert [m.body for m in await take(peer, "Orders", 1)] == [b"stays"]

    @pytest.mark.parametrize(
        ("changed", "code", "words"),
        [
            ({"topic": "Others"}, 604, "topic not match"),
            ({"broker_name": "broker-z"}, 604, "broker service not available"),
            ({"deliver_ms": 1}, 604, "timestamp invalid"),
            ({"deliver_ms": 1 << 60}, 604, "timestamp invalid"),
        ],
    )
    async def test_a_handle_that_does_not_fit(self, peer, changed, code, words):
        await peer.send()
        handle = RecallHandle("Orders", "broker-a", now_ms() + 60_000, "U")._replace(**changed)
        refused(await recall(peer, handle.encode()), code, words)

    async def test_what_is_no_handle_or_no_topic(self, peer):
        await peer.send()
        no_key = RecallHandle("Orders", "broker-a", now_ms() + 60_000, "").encode()
        for handle in ("djEg", no_key):
            refused(await recall(peer, handle), 604, "recall handle is invalid")
        answer = await peer.call(RequestCode.RECALL_MESSAGE, TopicRequestHeader(topic="Orders"))
        refused(answer, 604, "recall handle is invalid")
        refused(await recall(peer, "djEg", topic="Absent"), 17, "not exist")

    async def test_switched_off(self, started):
        _, peer = await started(recallMessageEnable="false")
        refused(await recall(peer, "djEg"), 16, "operation is forbidden")


class TestRestarts:
    async def test_what_waits_survives_and_what_came_does_not_come_again(self, cluster, peer):
        await peer.send(body=b"early", properties={"TIMER_DELAY_MS": "1"})
        await take(peer, "Orders", 1)
        await peer.send(body=b"late", properties={"TIMER_DELAY_MS": "2500"})
        await cluster.restart()
        peer = cluster.peer()
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"early", b"late"]
        assert (await peer.pull()).ext["maxOffset"] == "2"

    @pytest.mark.parametrize("damage", ["none", "missing", "torn", "queue"])
    async def test_without_a_mark_the_log_tells_what_came(self, cluster, peer, tmp_path, damage):
        for number, delay in enumerate((1, 1, 3_000)):
            await peer.send(body=b"%d" % number, properties={"TIMER_DELAY_MS": str(delay)})
        await take(peer, "Orders", 2)
        await cluster.close_peers()
        await cluster.standalone.stop()
        (path,) = tmp_path.rglob("timers.json")
        if damage == "missing":
            path.unlink()
        elif damage == "torn":
            path.write_bytes(path.read_bytes()[:20])
        elif damage == "queue":
            shutil.rmtree(path.parents[1] / "consumequeue" / TIMER_TOPIC)
            (path.parents[1] / "abort").touch()
            (path.parents[1] / "checkpoint").unlink()
        if damage in ("missing", "torn"):
            path.with_suffix(".json.bak").unlink(missing_ok=True)
        await cluster.standalone.start()
        peer = cluster.peer()
        found = await take(peer, "Orders", 3)
        assert [m.body for m in found] == [b"0", b"1", b"2"]
        config = cluster.broker.parts.store.config
        report = await asyncio.to_thread(verify, str(path.parents[1]), config=config)
        errors = [finding.path for finding in report.findings if finding.severity == ERROR]
        assert errors == ([str(path)] if damage == "torn" else [])  # the file is written again within 10 s
        metrics = TimerMetrics.decode((await peer.call(RequestCode.GET_TIMER_METRICS)).body)
        assert sum(metric.count for metric in metrics.timing_count.values()) == 0


async def test_a_start_that_fails_on_its_way_takes_nothing_in_twice(tmp_path, monkeypatch):
    async with running(tmp_path / "a") as (_, peer):
        for key in ("a", "b", "c"):
            properties = {"TIMER_DELAY_MS": "2500", "UNIQ_KEY": key}
            answer = await peer.send(body=key.encode(), properties=properties)
        await recall(peer, answer.ext["recallHandle"])
        await peer.send(body=b"d", properties={"TIMER_DELAY_MS": "2500"})
        copy_running(tmp_path / "a", tmp_path / "b")
    real, tried = Follower.record, []

    async def record(self, position):
        tried.append(position)
        if len(tried) in (2, 5):
            raise OSError(errno.EMFILE, "too many open files")
        return await real(self, position)

    monkeypatch.setattr(Follower, "record", record)
    monkeypatch.setattr("cometmq.broker.timers.timers.ERROR_S", 0.1)
    async with running(tmp_path / "b") as (broker, peer):
        await until(lambda: broker.parts.timers.pending.followed == 5)
        assert len(broker.parts.timers.pending) == 5
        assert broker.parts.tables.timers.counts == {"Orders": 3}
        assert [m.body for m in await take(peer, "Orders", 3)] == [b"a", b"b", b"d"]
        await asyncio.sleep(0.3)
        assert (await peer.pull()).ext["maxOffset"] == "3"


@pytest.mark.slow("messages with four seconds of delay")
@pytest.mark.representative
async def test_what_would_go_with_its_segment_is_moved_on(started):
    cluster, peer = await started(mappedFileSizeCommitLog="65536", fileReservedTime="0", deleteWhen="25")
    at = now_ms() + 4_000
    await peer.send(body=b"timed", properties={"TIMER_DELIVER_MS": str(at), "UNIQ_KEY": "U"})
    await peer.send(body=b"delayed", properties={"TIMER_DELAY_MS": "4000"})
    answer = await peer.send(body=b"recalled", properties={"TIMER_DELAY_MS": "4000", "UNIQ_KEY": "R"})
    await recall(peer, answer.ext["recallHandle"])
    store = cluster.broker.parts.store
    await fill(cluster.broker, peer)
    for _ in range(2):  # the message is moved twice
        store.retention.delete_now()
        await store.retention.run_now(log_too=True)
        while len(store.log.segments) < 3:
            await peer.send(topic="Filler", body=b"x" * 8_000)
    assert store.log.min_position >= 2 * 65_536
    assert len((await waiting(peer))[0]) == 2
    found = {m.body: m.properties for m in await take(peer, "Orders", 2)}
    assert found[b"timed"]["TIMER_ROLL_TIMES"] in ("1", "2")
    assert found.keys() == {b"timed", b"delayed"}
    assert now_ms() >= at
    await asyncio.sleep(1.2)
    assert (await peer.pull()).ext["maxOffset"] == "2"


class Partition(FaultyDisk):
    """A disk whose usage the test sets."""

    percent = 10

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(100, self.percent, 100 - self.percent)


SMALL = {"mappedFileSizeCommitLog": "65536", "deleteWhen": "25", "deleteCommitLogFilesInterval": "0"}


class TestFullDisks:
    """Above the watermark, segments are deleted whatever their age, and sends are refused."""

    async def test_what_waits_does_not_keep_the_disk_full(self, tmp_path):
        disk = Partition(really_sync=False)
        async with running(tmp_path, disk, **SMALL) as (broker, peer):
            store, timers = broker.parts.store, broker.parts.timers
            at = now_ms() + 2_000
            await peer.send(body=b"soon", properties={"TIMER_DELIVER_MS": str(at)})
            await peer.send(body=b"late", properties={"TIMER_DELAY_SEC": "600"})
            await fill(broker, peer)
            disk.percent = 95
            store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
            await until(lambda: timers.pending.due(timers.times(), 1))  # due, but not deliverable
            await store.retention.run_now(log_too=True)
            assert len(store.log.segments) == 1
            refused(await peer.send(), 14, "the disk is full")
            disk.percent = 10
            await store.retention.run_now(log_too=True)
            assert (await peer.send(topic="Filler")).code == 0
            assert [m.body for m in await take(peer, "Orders", 1)] == [b"soon"]
            assert [m.body for m in (await waiting(peer))[0]] == [b"late"]

    async def test_a_log_of_waiting_messages_is_not_moved_round_and_round(self, tmp_path, caplog):
        disk = Partition(really_sync=False)
        async with running(tmp_path, disk, **SMALL) as (broker, peer):
            store = broker.parts.store
            sent = 0
            while len(store.log.segments) < 5:
                await peer.send(body=b"x" * 30_000, properties={"TIMER_DELAY_SEC": "600"})
                sent += 1
            disk.percent = 95
            ends = []
            for _ in range(5):
                await store.retention.run_now(log_too=True)
                ends.append(store.log.end)
            assert ends[1:] == ends[:1] * 4
            assert store.log.min_position > 0
            said = [record for record in caplog.records if "frees no space" in record.message]
            assert len(said) == 1
            assert len((await waiting(peer))[0]) == sent


class TestClocks:
    """Steps of the wall clock and sleep of the machine.

    Delays follow the monotonic clock. A message with a delivery time is never delivered before the wall clock
    shows that time, nor because the wall clock was ahead for a moment.
    """

    async def run(self, tmp_path, monkeypatch, properties, steps=(), sleeps=()):
        """Return how long a message waits, in seconds without sleep.

        Args:
            steps: Steps of the wall clock in ms, by the second at which they happen.
            sleeps: Durations of sleep in seconds, by the second at which they begin.
        """
        steps, sleeps = dict(steps), dict(sleeps)
        monkeypatch.setattr("cometmq.broker.timers.timers.CLOCK_CHECK_INTERVAL_MS", 1)
        clock = ManualClock(now_ms=WALL)
        async with running(tmp_path, clock=clock) as (broker, peer):
            await peer.send(body=b"first")
            begun = clock.now_s
            await peer.send(body=b"later", properties=properties)
            for second in range(200):
                clock.now_ms += steps.get(second, 0)
                clock.sleep(sleeps.get(second, 0))
                if await self.second_passed(broker, clock, monkeypatch, 2):
                    return clock.now_s - begun
        return None

    async def second_passed(self, broker, clock, monkeypatch, messages):
        """Advance by one second, deliver due messages, and return whether `messages` have arrived by then."""
        timers, store = broker.parts.timers, broker.parts.store
        clock.advance(1)
        with monkeypatch.context() as patch:
            looks = Mock(wraps=timers.times)
            patch.setattr(timers, "times", looks)
            while looks.call_count < 6:  # The timers read the clocks two or three times per iteration.
                if store.max_offset("Orders", 0) == messages:
                    return True
                await asyncio.sleep(0.001)
        return False

    @pytest.mark.parametrize("step_s", [0, -3_600, 3_600, -86_400 * 400])
    async def test_a_delay(self, tmp_path, monkeypatch, step_s):
        waited = await self.run(tmp_path, monkeypatch, {"TIMER_DELAY_SEC": "60"}, {20: step_s * 1_000})
        assert 60 <= waited <= 64

    async def test_a_delay_that_was_stored_while_the_clock_was_ahead(self, tmp_path, monkeypatch):
        """A leader with a fast clock may have stored the delay.

        The next leader recognizes that by its own records.
        """
        monkeypatch.setattr("cometmq.broker.timers.timers.CLOCK_CHECK_INTERVAL_MS", 1)
        clock = ManualClock(now_ms=WALL + 3_600_000)
        async with running(tmp_path, clock=clock) as (broker, peer):
            await peer.send(body=b"later", properties={"TIMER_DELAY_SEC": "60"})
            clock.now_ms = WALL
            await peer.send(topic="Others", body=b"now")
            timers = broker.parts.timers
            await timers.stop()
            timers.restart()
            timers.start()
            waited = 0
            while waited < 70 and not await self.second_passed(broker, clock, monkeypatch, 1):
                waited += 1
            assert 58 <= waited <= 64

    @pytest.mark.parametrize(("step_s", "least"), [(0, 60), (-50, 110), (30, 60), (3_600, 60)])
    async def test_a_time(self, tmp_path, monkeypatch, step_s, least):
        properties = {"TIMER_DELIVER_MS": str(WALL + 60_000)}
        waited = await self.run(tmp_path, monkeypatch, properties, {20: step_s * 1_000})
        assert least <= waited <= least + 4

    @pytest.mark.parametrize(
        ("steps", "least"),
        [
            ({20: 3_600_000}, 80),  # delivered one minute after the step
            ({20: 3_600_000, 75: -3_600_000}, 150),
            (dict.fromkeys(range(20, 60), 1500), 90),
        ],
    )
    async def test_a_time_comes_soon_after_a_step_that_stays(self, tmp_path, monkeypatch, steps, least):
        waited = await self.run(tmp_path, monkeypatch, {"TIMER_DELIVER_MS": str(WALL + 150_000)}, steps)
        assert least <= waited <= least + 4

    @pytest.mark.parametrize("restarts", [1, 2])
    async def test_what_came_before_a_step_back_does_not_come_again(self, tmp_path, monkeypatch, restarts):
        """After the step, a message arrives whose due time is earlier than that of a delivered message."""
        monkeypatch.setattr("cometmq.broker.timers.timers.CLOCK_CHECK_INTERVAL_MS", 1)
        clock = ManualClock(now_ms=WALL)
        async with running(tmp_path, clock=clock) as (broker, peer):
            await peer.send(body=b"late", properties={"TIMER_DELAY_SEC": "36000"})
            await peer.send(body=b"before", properties={"TIMER_DELAY_SEC": "1"})
            clock.advance(3)
            await take(peer, "Orders", 1)
            tables = broker.parts.tables
            save_changes(tables.timers, tables.timers_file)
            if restarts == 1:
                clock.now_ms -= 3_600_000
                await peer.send(body=b"behind", properties={"TIMER_DELAY_SEC": "600"})
        if restarts == 2:
            async with running(tmp_path, clock=clock) as (broker, peer):
                clock.now_ms -= 3_600_000
                await peer.send(body=b"behind", properties={"TIMER_DELAY_SEC": "600"})
        async with running(tmp_path, clock=clock) as (broker, peer):
            await until(lambda: len(broker.parts.timers.pending) == 2)
            clock.advance(3_700)
            assert [m.body for m in await take(peer, "Orders", 2)] == [b"before", b"behind"]
            await until(lambda: len(broker.parts.timers.pending) == 1)
            assert broker.parts.timers.state.take().log_position == broker.parts.store.log.end

    @pytest.mark.parametrize(
        "properties", [{"TIMER_DELIVER_MS": str(WALL + 150_000)}, {"TIMER_DELAY_SEC": "150"}]
    )
    @pytest.mark.parametrize(("sleep_s", "least"), [(100, 50), (86_400, 21)])
    async def test_sleep_counts(self, tmp_path, monkeypatch, properties, sleep_s, least):
        waited = await self.run(tmp_path, monkeypatch, properties, sleeps={20: sleep_s})
        assert least <= waited <= least + 4


@pytest.mark.parametrize(("times", "then"), [("9" * 9, "1000000000"), ("9" * 5_000, "1"), ("x", "1")])
async def test_a_count_of_moves_that_a_client_made_up(started, times, then):
    cluster, peer = await started(**short_retention())
    await peer.send(properties={"TIMER_DELAY_SEC": "60", "TIMER_ROLL_TIMES": times})
    await move_all(cluster.broker, peer)
    assert cluster.broker.parts.store.log.min_position > 0
    (message,), _ = await waiting(peer)
    assert message.properties["TIMER_ROLL_TIMES"] == then


async def test_a_failed_move_leaves_no_due_time_behind(tmp_path):
    """The next message is stored at the log position of the failed copy and keeps its own due time."""
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk=disk, **short_retention()) as (broker, peer):
        await peer.send(properties={"TIMER_DELAY_SEC": "2"})
        await fill(broker, peer)
        disk.fail("pwrite", match="commitlog", times=1)
        await move_all(broker, peer)
        disk.heal()
        assert broker.parts.store.log.min_position == 0
        await peer.send(body=b"other", properties={"TIMER_DELAY_SEC": "60"})
        await take(peer, "Orders", 1)
        await asyncio.sleep(1)
        assert [m.body for m in (await waiting(peer))[0]] == [b"other"]


async def test_a_recall_is_moved_on_once_its_copy_is_flushed(tmp_path):
    """The message to recall is in a segment that stays, and becomes due during the move."""
    disk, clock = FaultyDisk(really_sync=False), ManualClock(now_ms())
    settings = {"flushDiskType": "SYNC_FLUSH", **short_retention()}
    async with running(tmp_path, disk=disk, clock=clock, **settings) as (broker, peer):
        at = str(clock.now_ms + 60_000)
        await peer.send(properties={"TIMER_DELIVER_MS": at, "TIMER_DEL_UNIQKEY": "U"})
        await fill(broker, peer)
        for key in ("U", "V"):
            await peer.send(body=key.encode(), properties={"TIMER_DELIVER_MS": at, "UNIQ_KEY": key})

        def meanwhile(operation, path):
            if "commitlog" in path and operation == "pwrite":
                clock.advance(31)
            elif "commitlog" in path and operation == "fdatasync":
                time.sleep(0.2)

        disk.before = meanwhile
        clock.advance(30)  # retention also depends on the files' times
        await move_all(broker, peer)
        assert [m.body for m in await take(peer, "Orders", 1)] == [b"V"]


async def test_a_record_that_the_device_cannot_read_is_stepped_over(tmp_path):
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk=disk) as (broker, peer):
        await peer.send()
        at = str(now_ms() + 2_000)
        position = broker.parts.store.log.end
        await peer.send(body=b"bad" * 100, properties={"TIMER_DELIVER_MS": at})
        await peer.send(body=b"x" * 300_000)
        await peer.send(body=b"good", properties={"TIMER_DELIVER_MS": at})
    async with running(tmp_path, disk=disk) as (broker, peer):
        disk.cannot_read("commitlog", position + 100)
        await until(lambda: broker.parts.store.max_offset("Orders", 0) == 3)
        disk.heal()
        assert [m.body for m in records(await peer.pull(offset=2))] == [b"good"]


@pytest.mark.slow("messages are due 6 s after the first send")
@pytest.mark.representative
async def test_a_bad_sector_among_its_files_stops_no_timer(tmp_path, caplog):
    """Queue units are rebuilt from the log; without the offset file Apache's deliveries are unknown."""
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk=disk) as (broker, peer):
        at = (
            now_ms() + 6_000
        )  # After all sends, also on a busy machine: together they take 0.2 s on a quiet one
        answers = await asyncio.gather(
            *(
                peer.send(
                    body=b"%d" % number,
                    properties={
                        "TIMER_DELIVER_MS": str(at + number % 3 * 600_000),
                        "UNIQ_KEY": f"U{number}",
                    },
                )
                for number in range(600)
            )
        )
        await recall(peer, answers[30].ext["recallHandle"])
    disk.cannot_read(TIMER_TOPIC, 100)
    disk.cannot_read("timercheck", 0)
    async with running(tmp_path, disk=disk) as (broker, peer):
        found = await take(peer, "Orders", 199)
        assert [int(m.body) for m in found] == [number for number in range(0, 600, 3) if number != 30]
        pending = broker.parts.timers.pending
        assert len(pending) - pending.recalls == 400
    said = [record.message for record in caplog.records if "unreadable" in record.message]
    assert sorted(line.split(" is unreadable")[0].rsplit("/", 1)[1] for line in said) == ["0", "timercheck"]


async def test_a_refused_delivery_does_not_hold_up_a_move(tmp_path):
    """The full disk refuses the delivery. The retention pass that would free space completes all the same.

    The same holds for the pass that follows an aborted pass.
    """
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk=disk, **short_retention()) as (broker, peer):
        timers = broker.parts.timers
        await peer.send(properties={"TIMER_DELAY_SEC": "1"})
        await peer.send(properties={"TIMER_DELAY_SEC": "60"})
        await fill(broker, peer)
        disk.fail("pwrite", match="commitlog", times=10**9)
        await until(lambda: timers.pending.due(timers.times(), 1), 10)
        assert await asyncio.wait_for(timers.move_on(65_536), 10) is False
        given_up = asyncio.ensure_future(timers.move_on(65_536))
        await asyncio.sleep(0)
        given_up.cancel()
        disk.heal()
        await take(peer, "Orders", 1)
        await until(lambda: asyncio.wait_for(timers.move_on(65_536), 10))
        (message,), _ = await waiting(peer)
        assert message.properties["TIMER_ROLL_TIMES"] == "1"


async def test_the_check_point_is_written_behind_the_log(tmp_path):
    disk = FaultyDisk(really_sync=False)
    done = []
    async with running(tmp_path, disk=disk) as (_, peer):
        await peer.send(properties={"TIMER_DELAY_MS": "1"})
        await take(peer, "Orders", 1)
        disk.fail("fdatasync", match="commitlog", times=10**9)
        disk.before = lambda operation, path: done.append((operation, path))
    assert not [path for operation, path in done if "timercheck" in path and operation == "rename"]
