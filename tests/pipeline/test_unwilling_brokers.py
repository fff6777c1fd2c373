"""Brokers that refuse, close connections, lag or send decompression bombs.

The pipeline waits for them within limits and takes their errors neither for data nor for an empty queue.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.pipeline.fake_servers import QUEUE, TOPIC, FakeCluster, Stream, fake_cluster, position
from tests.ports import HOST, closed_port

from cometmq.errors import BrokerError, ConnectError, NoRouteError, RecordError, SendFailed
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import BadRecordError, DataLossError, ReplicaBehindError
from cometmq.pipeline.base.options import PullOptions, Topics, read_options
from cometmq.pipeline.base.plan import Bounds, QueueRange
from cometmq.pipeline.base.wire import PLAIN, IdleWires
from cometmq.pipeline.live import reading, source
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.reading import Part, read_batches, read_parts
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.record.arrow import arrow_schema

SCHEMA = arrow_schema(["queue_offset", "body"])
TIMES = [1000 + 10 * number for number in range(40)]


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with fake_cluster() as made:
        made.stored_ms = list(TIMES)
        yield made


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    yield
    for wire in reading.idle_wires(PLAIN).values():
        wire.close()
    reading.idle_wires(PLAIN).clear()


def parts(fake: FakeCluster, end: int = 40, address: str = "", **options: Any) -> Iterator[Part]:
    where = {"broker-a": address} if address else {}
    pull = PullOptions(**{"timeout_ms": 5000, **options})
    return read_parts((fake.addr,), [QueueRange(QUEUE, 0, end)], where, SCHEMA, pull)


def offsets(read: Iterator[Part]) -> list[int]:
    return [offset for part in read for offset in part.batch.column("queue_offset").to_pylist()]


def planned(fake: FakeCluster, **options: str) -> list[Any]:
    given = {"namesrv": fake.addr, "topic": TOPIC, "timeoutMs": "5000", **options}
    return list(source.CometReader(source.full_schema(), read_options(given, streaming=False)).partitions())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each request 30 s, so that the timeout limits only the repetition of what fails."""
    connect = IdleWires.connect
    monkeypatch.setattr(IdleWires, "connect", lambda self, address, _: connect(self, address, 30.0))


@pytest.fixture
def stream(fake: FakeCluster, patient: None) -> Iterator[Stream]:
    made = Stream(fake, timeoutMs="300")
    yield made
    made.reader.stop()


class TestStartingAtATime:
    def at(self, fake: FakeCluster, time_ms: int, timeout_ms: int = 5000) -> int:
        with Cluster((fake.addr,), timeout_ms=timeout_ms) as cluster:
            return cluster.offset_at(QUEUE, Bounds(fake.minimum, fake.maximum), time_ms)

    @pytest.mark.parametrize(("time_ms", "offset"), [(0, 0), (1000, 0), (1001, 1), (1390, 39), (1391, 40)])
    def test_it_is_the_first_message_since_then(self, fake: FakeCluster, time_ms: int, offset: int) -> None:
        assert self.at(fake, time_ms) == offset

    def test_a_busy_broker_is_waited_for(self, fake: FakeCluster) -> None:
        fake.refusals.extend([ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
        assert self.at(fake, 1101) == 11

    @pytest.mark.parametrize(
        "code",
        [
            ResponseCode.SYSTEM_BUSY,
            ResponseCode.NO_PERMISSION,
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            ResponseCode.TOPIC_NOT_EXIST,
            ResponseCode.SYSTEM_ERROR,
        ],
    )
    @pytest.mark.usefixtures("patient")
    def test_a_refusal_is_no_position(self, fake: FakeCluster, code: int) -> None:
        fake.refuse_always = code
        with pytest.raises(BrokerError, match="refused") as caught:
            self.at(fake, 1101, timeout_ms=300)
        assert (caught.value.code, caught.value.topic) == (code, TOPIC)

    @pytest.mark.usefixtures("patient")
    def test_an_offset_that_the_broker_does_not_have_is_no_position(self, fake: FakeCluster) -> None:
        with (
            Cluster((fake.addr,), timeout_ms=300) as cluster,
            pytest.raises(BrokerError, match="PULL_OFFSET_MOVED"),
        ):
            cluster.offset_at(QUEUE, Bounds(0, 400), 10**6)

    @pytest.mark.parametrize("record", [b"x", b"x" * 30, b"\0" * 200])
    def test_a_damaged_message_is_no_position(
        self, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, record: bytes
    ) -> None:
        monkeypatch.setattr(fake, "record", lambda _: record)
        with pytest.raises(RecordError):
            self.at(fake, 1101)

    def test_messages_deleted_meanwhile_are_stepped_over(self, fake: FakeCluster) -> None:
        fake.minimum, fake.stored_ms = 30, TIMES[30:]
        with Cluster((fake.addr,), timeout_ms=30_000) as cluster:
            assert cluster.offset_at(QUEUE, Bounds(0, 40), 1101) == 30
        assert fake.requests.count(RequestCode.PULL_MESSAGE) < 10


@pytest.fixture
def rude(fake: FakeCluster) -> Iterator[FakeCluster]:
    """A broker in the route that accepts connections and closes them."""
    with fake_cluster() as made:
        made.closing, made.stored_ms = True, list(TIMES)
        fake.brokers = {0: made.addr}
        yield made


class TestABrokerThatHangsUp:
    def test_it_is_connected_a_few_times_and_no_more(self, fake: FakeCluster, rude: FakeCluster) -> None:
        with pytest.raises(SendFailed, match=rude.addr):
            list(parts(fake, timeout_ms=2000))
        assert 2 < rude.admitted < 12

    def test_it_is_read_on_when_it_stays(self, fake: FakeCluster, rude: FakeCluster) -> None:
        threading.Timer(0.5, lambda: setattr(rude, "closing", False)).start()
        assert offsets(parts(fake)) == list(range(40))

    def test_planning_paces_itself_too(self, fake: FakeCluster, rude: FakeCluster) -> None:
        with Cluster((fake.addr,), timeout_ms=1000) as cluster, pytest.raises(SendFailed):
            cluster.bounds([QUEUE])
        assert rude.admitted < 12


class TestAReplicaThatLags:
    """The route has only a replica with 40 of 50 messages; the master is unreachable."""

    @pytest.fixture
    def replica(self, fake: FakeCluster) -> FakeCluster:
        fake.brokers = {1: fake.addr}
        return fake

    def test_what_it_does_not_have_is_asked_of_the_master_when_it_is_back(self, replica: FakeCluster) -> None:
        with fake_cluster() as master:
            master.stored_ms = [*TIMES, *range(2000, 2010)]
            back = {0: master.addr, 1: replica.addr}
            threading.Timer(0.5, lambda: setattr(replica, "brokers", back)).start()
            assert offsets(parts(replica, end=50, address=replica.addr)) == list(range(50))

    def test_it_may_catch_up(self, replica: FakeCluster) -> None:
        threading.Timer(2.5, lambda: replica.stored_ms.extend(range(2000, 2010))).start()
        assert offsets(parts(replica, end=50)) == list(range(50))  # longer than the master's timeout

    @pytest.mark.usefixtures("patient")
    @pytest.mark.parametrize("fail", [True, False])
    def test_what_it_lacks_in_time_is_an_error_and_no_loss(self, replica: FakeCluster, fail: bool) -> None:
        with pytest.raises(ReplicaBehindError, match=f"{replica.addr}.*offset 40.*0 to 40"):
            list(parts(replica, end=50, timeout_ms=300, fail_on_data_loss=fail))
        assert replica.requests.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) <= 3

    @pytest.mark.parametrize("fail", ["true", "false"])
    @pytest.mark.parametrize("option", ["startingOffsets", "startingGroup"])
    @pytest.mark.usefixtures("patient")
    def test_a_start_behind_its_end_is_an_error_and_no_loss(
        self, replica: FakeCluster, option: str, fail: str
    ) -> None:
        replica.stored = 45
        given = {option: json.dumps(position(45)) if option == "startingOffsets" else "g"}
        with pytest.raises(ReplicaBehindError, match=f"{replica.addr}.*offset 45.*0 to 40"):
            planned(replica, timeoutMs="300", failOnDataLoss=fail, **given)
        threading.Timer(0.3, lambda: replica.stored_ms.extend(range(2000, 2010))).start()
        (task,) = planned(replica, failOnDataLoss=fail, **given)
        assert task.ranges == [QueueRange(QUEUE, 45, 50)]

    @pytest.mark.usefixtures("patient")
    def test_a_master_that_does_not_have_it_has_lost_it(self, fake: FakeCluster) -> None:
        with pytest.raises(DataLossError, match="10 records are gone"):
            list(parts(fake, end=50, timeout_ms=300))

    def test_a_stream_waits_for_it(self, replica: FakeCluster, stream: Stream) -> None:
        start = position(50)
        assert stream.next(start) == start
        (task,) = stream.reader.partitions(position(30), start)
        assert task.ranges == [QueueRange(QUEUE, 30, 50)]


class TestABusyMaster:
    """The master suggests its replica, as with slaveReadEnable for data that is not in memory."""

    @pytest.fixture
    def replica(self, fake: FakeCluster) -> Iterator[FakeCluster]:
        with fake_cluster() as replica:
            fake.brokers, fake.suggested = {0: fake.addr, 1: replica.addr}, 1
            fake.stored_ms = [1_000_000] * 50
            yield replica

    def test_its_replica_is_read(self, fake: FakeCluster, replica: FakeCluster) -> None:
        replica.stored_ms = list(fake.stored_ms)
        assert offsets(parts(fake, end=50, pull_batch_size=5)) == list(range(50))
        assert replica.requests.count(RequestCode.PULL_MESSAGE) >= 5

    @pytest.mark.parametrize("refusal", [None, ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_BUSY])
    def test_what_the_replica_lacks_or_refuses_is_read_at_the_master(
        self, fake: FakeCluster, replica: FakeCluster, refusal: int | None
    ) -> None:
        replica.stored_ms, replica.refuse_always = fake.stored_ms[:30], refusal
        assert offsets(parts(fake, end=50, pull_batch_size=5)) == list(range(50))
        assert replica.requests.count(RequestCode.PULL_MESSAGE) > 0


class TestAStreamWhoseBrokersAreAway:
    def test_a_broker_that_is_dead_and_still_routed_keeps_its_queues(
        self, fake: FakeCluster, stream: Stream, caplog: pytest.LogCaptureFixture
    ) -> None:
        with fake_cluster() as dying:
            dying.stored_ms = list(TIMES)
            fake.brokers = {0: dying.addr}
            end = stream.next(position(10))
            assert end[TOPIC] == position(40)[TOPIC]
        for _ in range(3):
            assert stream.next(end) == end
        assert [r.message for r in caplog.records if "is unreachable" in r.message] != []
        fake.brokers = {}  # the broker is back at another address
        fake.stored_ms.append(5000)
        assert stream.next(end)[TOPIC] == position(41)[TOPIC]

    def test_a_batch_is_planned_without_those_it_does_not_read(
        self, fake: FakeCluster, stream: Stream
    ) -> None:
        end = stream.next(position(10))
        fake.requests.clear()
        assert stream.reader.partitions(end, end) == []
        assert not fake.requests

    @pytest.mark.usefixtures("patient")
    def test_one_that_stays_away_is_left_alone_for_ever_longer(
        self, fake: FakeCluster, rude: FakeCluster
    ) -> None:
        with Cluster((fake.addr,), timeout_ms=300) as cluster:
            for _ in range(20):
                with pytest.raises(SendFailed):
                    cluster.look(Topics(names=(TOPIC,)), [QUEUE])
            assert rude.admitted == 1

    def test_a_name_server_that_has_just_started_takes_nothing_away(
        self, fake: FakeCluster, stream: Stream
    ) -> None:
        end = stream.next(position(10))
        fake.routed = False
        fake.stored_ms.append(5000)
        later = stream.next(end)
        assert later[TOPIC] == position(41)[TOPIC]

    def test_a_stream_that_starts_again_waits_for_the_first_broker(
        self, fake: FakeCluster, stream: Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source, "_REGISTERED_S", 0.3)
        fake.routed = False
        start = position(10)
        assert stream.next(start) == start
        fake.routed = True
        assert stream.next(start)[TOPIC] == position(40)[TOPIC]
        fake.routed = False
        late = Stream(fake, timeoutMs="300")
        with pytest.raises(NoRouteError, match=TOPIC):
            ask_until_it_raises(late, start)
        late.reader.stop()

    @pytest.mark.parametrize(
        "topics", [Topics(names=(TOPIC,)), Topics(pattern="F.*"), Topics(queues=(QUEUE,))]
    )
    def test_a_topic_that_is_not_meant_any_more_is_left_alone(
        self, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, topics: Topics
    ) -> None:
        monkeypatch.setattr(Cluster, "topic_names", lambda *_, **__: [TOPIC])
        with Cluster((fake.addr,), timeout_ms=30_000) as cluster:
            assert set(cluster.look(topics, [QUEUE, MessageQueue("Dropped", "broker-a", 0)])) == {QUEUE}

    @pytest.mark.usefixtures("patient")
    def test_a_batch_read_names_the_address_after_its_time_out(self, fake: FakeCluster) -> None:
        with closed_port() as port:
            fake.brokers = {0: f"{HOST}:{port}"}
            with Cluster((fake.addr,), timeout_ms=300) as cluster, pytest.raises(ConnectError) as caught:
                cluster.bounds([QUEUE])
        assert caught.value.addr == f"{HOST}:{port}"


def ask_until_it_raises(stream: Stream, start: dict[str, Any]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert stream.next(start) == start


class TestWhatAReadHolds:
    def test_many_small_bodies_that_become_large_come_in_bounded_batches(self, fake: FakeCluster) -> None:
        bomb = zlib.compress(bytes(1 << 20))
        fake.bodies = dict.fromkeys(range(40), (bomb, 769))
        found = list(parts(fake, batch_bytes=4 << 20))
        assert max(part.batch.column("body").nbytes for part in found) <= (4 << 20) + 1024
        assert offsets(iter(found)) == list(range(40))

    def test_a_body_beyond_the_limit_is_a_bad_record(self, fake: FakeCluster) -> None:
        fake.bodies = {7: (zlib.compress(bytes(1 << 20)), 0x301)}
        found = list(parts(fake, max_plain_bytes=(1 << 20) - 1))
        assert offsets(iter(found)) == [offset for offset in range(40) if offset != 7]
        ((_, bad),) = [item for part in found for item in part.bad]
        assert (bad.queue_offset, bad.stage) == (7, "body")
        assert "maxPlainBytes" in bad.problem
        whole = PullOptions(timeout_ms=5000, max_plain_bytes=(1 << 20) - 1)
        with pytest.raises(BadRecordError, match=f"{TOPIC} broker-a 0 offset 7"):
            list(read_batches((fake.addr,), [QueueRange(QUEUE, 0, 40)], {}, SCHEMA, whole))

    def test_other_queues_records_are_bad(self, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = fake.record

        def record(offset: int) -> bytes:
            return whole(
                offset, **({"queue_id": -1} if offset == 3 else {"topic": "X"} if offset == 5 else {})
            )

        monkeypatch.setattr(fake, "record", record)
        found = list(parts(fake))
        assert [(bad.stage, bad.queue_offset) for part in found for _, bad in part.bad] == [
            ("queue", 3), ("queue", 5)
        ]  # fmt: skip
        assert len(offsets(iter(found))) == 38

    def test_lost_records_are_left_out_with_a_warning(
        self, fake: FakeCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake.minimum, fake.stored_ms = 30, TIMES[30:]
        options = PullOptions(timeout_ms=5000, fail_on_data_loss=False)
        rows = read_batches((fake.addr,), [QueueRange(QUEUE, 0, 40)], {}, SCHEMA, options)
        assert sum(batch.num_rows for batch in rows) == 10
        assert [record.getMessage() for record in caplog.records] == [
            f"30 records of {QUEUE} no longer exist at the broker and are skipped"
        ]

    def test_a_connection_is_kept_for_reads_with_the_same_time_out(self, fake: FakeCluster) -> None:
        for timeout_ms in (5000, 5000, 7000):
            assert len(offsets(parts(fake, address=fake.addr, timeout_ms=timeout_ms))) == 40
        assert sorted(timeout_s for _, timeout_s in reading.idle_wires(PLAIN)) == [5.0, 7.0]
        assert fake.admitted == 2
        assert {wire.timeout_s for wire in reading.idle_wires(PLAIN).values()} == {5.0, 7.0}


def test_offsets_that_a_broker_does_not_take_are_named(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(fake, consumerGroup="g")
    stream.reader.commit(stream.next(position(0)))
    stream.reader.stop()
    assert "offsets of group g could not be stored" in caplog.text
    assert "create the group" in caplog.text
