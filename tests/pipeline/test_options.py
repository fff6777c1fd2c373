"""Options: names known from Kafka's source and from RocketMQ's former connector, and helpful errors."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from tests import option_tables

import cometmq.pipeline
from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.declare import declared
from cometmq.pipeline.base.offsets import EARLIEST, LATEST
from cometmq.pipeline.base.options import Position, Topics, read_options, store_options, write_options
from cometmq.protocol.codes import TOOLS_CONSUMER_GROUP

BASE = {"namesrv": "127.0.0.1:9876", "subscribe": "orders"}


def test_defaults_of_a_batch_and_of_a_stream() -> None:
    batch = read_options(BASE, streaming=False)
    stream = read_options(BASE, streaming=True)
    assert (batch.starting, batch.ending) == (Position(EARLIEST), Position(LATEST))
    assert (stream.starting, stream.max_offsets_per_trigger) == (Position(LATEST), 1_000_000)
    assert batch.consumer_group == TOOLS_CONSUMER_GROUP
    assert batch.commit_group is None
    assert batch.check_crc
    assert batch.fail_on_data_loss


@pytest.mark.parametrize(
    ("option", "text"),
    [("nameServer", "h1:1;h2:2"), ("NAMESRV", "h1:1,h2:2"), ("namesrvAddr", " h1:1 ; h2:2; ")],
)
def test_name_servers_in_every_spelling(option: str, text: str) -> None:
    assert read_options({option: text, "topic": "t"}, streaming=False).namesrv == ("h1:1", "h2:2")


def test_the_name_server_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876")
    assert read_options({"topic": "t"}, streaming=False).namesrv == ("10.0.0.1:9876",)
    monkeypatch.setenv("COMETMQ_NAMESRV", "10.0.0.2:9876")
    assert read_options({"topic": "t"}, streaming=False).namesrv == ("10.0.0.2:9876",)
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("COMETMQ_NAMESRV")
    with pytest.raises(ConfigError, match="COMETMQ_NAMESRV"):
        read_options({"topic": "t"}, streaming=False)


@pytest.mark.parametrize(
    ("options", "topics"),
    [
        ({"subscribe": "a, b,a"}, Topics(names=("a", "b"))),
        ({"topic": "a"}, Topics(names=("a",))),
        ({"subscribePattern": "order.*"}, Topics(pattern="order.*")),
        (
            {"assign": '{"a": {"broker-a": [1, 0]}}'},
            Topics(queues=tuple(MessageQueue("a", "broker-a", n) for n in (0, 1))),
        ),
    ],
)
def test_three_ways_to_say_what_to_read(options: dict[str, str], topics: Topics) -> None:
    assert read_options({"namesrv": "h:1", **options}, streaming=False).topics == topics


def test_positions() -> None:
    offsets = '{"orders": {"broker-a": {"0": 5, "1": -1}}}'
    read = read_options(
        {**BASE, "startingOffsets": offsets, "endingTimestamp": "1700000000000"}, streaming=False
    )
    first, second = (MessageQueue("orders", "broker-a", number) for number in range(2))
    assert read.starting.offsets == {first: 5, second: -1}
    assert read.ending.timestamp_ms == 1_700_000_000_000
    shouted = read_options({**BASE, "startingOffsets": "EARLIEST"}, streaming=True)
    assert shouted.starting == Position(EARLIEST)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"subscribe": "t"}, "namesrv"),
        ({"namesrv": "nowhere", "subscribe": "t"}, "namesrv"),
        ({"namesrv": "h:99999", "subscribe": "t"}, "namesrv"),
        ({"namesrv": "h:1", "nameServer": "h:2", "subscribe": "t"}, "nameServer"),
        ({"namesrv": "h:1"}, "subscribe"),
        ({**BASE, "assign": '{"a": {"b": [0]}}'}, "subscribe"),
        ({**BASE, "subscribe": " , "}, "subscribe"),
        ({"namesrv": "h:1", "subscribePattern": "("}, "subscribePattern"),
        ({"namesrv": "h:1", "assign": "[1]"}, "assign"),
        ({"namesrv": "h:1", "assign": '{"a": {"b": [-1]}}'}, "assign"),
        ({"namesrv": "h:1", "assign": "{}"}, "assign"),
        ({**BASE, "startingOffsets": "begin"}, "startingOffsets"),
        ({**BASE, "endingOffsets": "earliest"}, "endingOffsets"),
        ({**BASE, "endingOffsets": '{"orders": {"b": {"0": -2}}}'}, "endingOffsets"),
        ({**BASE, "startingOffsets": "latest", "startingTimestamp": "5"}, "startingOffsets"),
        ({**BASE, "startingTimestamp": "yesterday"}, "startingTimestamp"),
        ({**BASE, "startingOffsets": '{"orders": {"b": {"2147483648": 1}}}'}, "startingOffsets"),
        ({**BASE, "startingOffsets": '{"orders": {"b": {"0": 9223372036854775808}}}'}, "startingOffsets"),
        ({"namesrv": "h:1", "assign": '{"a": {"b": [2147483648]}}'}, "assign"),
        ({**BASE, "startingTimestamp": "9223372036854775808"}, "startingTimestamp"),
        ({**BASE, "batchBytes": "536870913"}, "batchBytes"),
        ({**BASE, "maxPlainBytes": "536870913"}, "maxPlainBytes"),
        ({**BASE, "timeoutMs": "2147483648"}, "timeoutMs"),
        ({**BASE, "minPartitions": "0"}, "minPartitions"),
        ({**BASE, "maxRecordsPerPartition": "many"}, "maxRecordsPerPartition"),
        ({**BASE, "failOnDataLoss": "perhaps"}, "failOnDataLoss"),
        ({**BASE, "onBadRecord": "drop"}, "onBadRecord"),
        ({**BASE, "pullsInFlight": "0"}, "pullsInFlight"),
        ({**BASE, "startingOfsets": "latest"}, "startingOfsets"),
    ],
)
def test_a_bad_option_is_named_with_its_value(options: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(options, streaming=False)
    assert caught.value.key == key


TIMES = '{"orders": {"broker-a": {"0": 1700000000000}}}'


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"startingOffsetsByTimestamp": "1700000000000"}, "startingOffsetsByTimestamp"),
        ({"startingOffsetsByTimestamp": '{"orders": {"b": {"0": -1}}}'}, "startingOffsetsByTimestamp"),
        ({"startingOffsetsByTimestamp": '{"orders": {"b": {"0": "noon"}}}'}, "startingOffsetsByTimestamp"),
        ({"startingOffsetsByTimestamp": TIMES, "startingOffsets": "latest"}, "startingOffsets"),
        ({"startingOffsetsByTimestamp": TIMES, "startingTimestamp": "5"}, "startingTimestamp"),
        ({"endingOffsetsByTimestamp": TIMES}, "endingOffsetsByTimestamp"),
        ({"startingGroup": "g", "startingTimestamp": "5"}, "startingGroup"),
        ({"startingGroup": "two words"}, "startingGroup"),
        ({"startingGroup": ""}, "startingGroup"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger"),
        ({"maxBytesPerTrigger": "1g"}, "maxBytesPerTrigger"),
        ({"minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"}, "minOffsetsPerTrigger"),
        ({"maxTriggerDelay": "10m"}, "maxTriggerDelay"),  # has no effect without the other option
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "-1s"}, "maxTriggerDelay"),
        ({"sql": "a >"}, "sql"),
        ({"sql": "a CONTAINS 'b'"}, "sql"),
        ({"sql": ""}, "sql"),
        ({"sql": "a > 1", "tags": "A"}, "sql"),
        ({"path": "payments"}, "path"),
        ({"subscribe": "%LMQ%light"}, "subscribe"),
    ],
)
def test_a_bad_option_of_a_stream_is_named(options: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options({**BASE, **options}, streaming=True)
    assert caught.value.key == key


def test_words_of_5x_may_stand_in_the_texts_of_an_expression() -> None:
    text = "what = 'it''s CONTAINS' AND n > 3"
    assert read_options({**BASE, "sql": text}, streaming=True).sql == text


def test_times_of_queues_and_offsets_of_a_group() -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    times = read_options(
        {**BASE, "startingOffsetsByTimestamp": TIMES, "endingOffsetsByTimestamp": TIMES}, streaming=False
    )
    assert times.starting == Position(EARLIEST, times={queue: 1_700_000_000_000})
    assert times.ending == Position(LATEST, times={queue: 1_700_000_000_000})
    group = read_options({**BASE, "startingGroup": "g", "startingOffsets": "earliest"}, streaming=True)
    assert group.starting == Position(EARLIEST, group="g")
    assert read_options({**BASE, "startingGroup": "g"}, streaming=True).starting.word == LATEST


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1500", 1.5), ("20 ms", 0.02), ("2min", 120), ("1H", 3600)]
)
def test_delays_as_spark_writes_them(text: str, seconds: float) -> None:
    options = {**BASE, "minOffsetsPerTrigger": "5", "maxTriggerDelay": text}
    assert read_options(options, streaming=True).max_trigger_delay_s == pytest.approx(seconds)
    assert read_options(BASE, streaming=True).max_trigger_delay_s == 15 * 60


def test_the_path_of_load_is_the_topic() -> None:
    assert read_options({"namesrv": "h:1", "path": "a"}, streaming=False).topics == Topics(names=("a",))
    assert write_options({"namesrv": "h:1", "path": "a"}).topic == "a"


def test_bad_records_of_a_relative_path_lie_below_the_drivers_directory(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert write_options({"namesrv": "h:1", "badRecordsPath": "bad"}).bad_records_path == str(
            tmp_path / "bad"
        )
    far = write_options({"namesrv": "h:1", "badRecordsPath": "s3://bucket/bad"})
    assert far.bad_records_path == "s3://bucket/bad"
    with pytest.raises(ConfigError, match="badRecordsPath"):
        write_options({"namesrv": "h:1", "badRecordsPath": " "})


def test_a_typing_error_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean startingOffsets"):
        read_options({**BASE, "startingOfsets": "latest"}, streaming=False)


@pytest.mark.parametrize("option", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(option: str) -> None:
    with pytest.raises(ConfigError, match="batch"):
        read_options({**BASE, option: "latest"}, streaming=True)


def test_sink_options() -> None:
    options = write_options(
        {"nameServer": "h:1", "topic": "t", "batchRecords": "10", "checkpointLocation": "/x"}
    )
    assert (options.topic, options.batch_records, options.retries) == ("t", 10, 5)
    assert write_options({"namesrv": "h:1"}).topic is None
    with pytest.raises(ConfigError, match="did you mean retries"):
        write_options({"namesrv": "h:1", "retry": "3"})


SECONDS = int(time.time())
QUEUE_AT = '{{"orders": {{"b": {{"0": {}}}}}}}'.format


@pytest.mark.parametrize(
    ("given", "option", "hint"),
    [
        ({"startingTimestamp": str(SECONDS)}, "startingTimestamp", r"if these are seconds: \d+000"),
        ({"endingTimestamp": str(SECONDS)}, "endingTimestamp", r"if these are seconds: \d+000"),
        ({"startingOffsetsByTimestamp": QUEUE_AT(SECONDS)}, "startingOffsetsByTimestamp", "seconds"),
        ({"startingTimestamp": f"{SECONDS + 3600}000"}, "startingTimestamp", "not in the future"),
        ({"startingOffsetsByTimestamp": QUEUE_AT(SECONDS * 10**6)}, "startingOffsetsByTimestamp", "future"),
        ({"endingTimestamp": f"{SECONDS + 90_000}000"}, "endingTimestamp", "at most a day ahead"),
        (
            {"startingTimestamp": "1700000000001", "endingTimestamp": "1700000000000"},
            "endingTimestamp",
            "before",
        ),
        (
            {"startingOffsets": QUEUE_AT(7), "endingOffsets": QUEUE_AT(6)},
            "endingOffsets",
            "before the start, 7",
        ),
        (
            {"startingTimestamp": "1700000000001", "endingOffsetsByTimestamp": QUEUE_AT(1700000000000)},
            "endingOffsetsByTimestamp",
            "before the start, 1700000000001",
        ),
        (
            {"startingOffsetsByTimestamp": QUEUE_AT(1700000000001), "endingTimestamp": "1700000000000"},
            "endingTimestamp",
            "before the start, 1700000000001",
        ),
        (
            {"startingOffsets": "latest", "endingTimestamp": "1700000000000"},
            "startingOffsets",
            "a start before the end, which is a time",
        ),
    ],
)
def test_times_and_ends_that_cannot_be_meant(given: dict[str, str], option: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        read_options({**BASE, **given}, streaming=False)
    assert caught.value.key == option
    if "Offsets" not in "".join(given):
        with pytest.raises(ConfigError, match=hint):
            store_options({"path": "/a", **given})


def test_the_end_of_today_is_an_end() -> None:
    tonight = f"{SECONDS + 3600}000"
    assert read_options({**BASE, "endingTimestamp": tonight}, streaming=False).ending.timestamp_ms == int(
        tonight
    )


# -- Tables in the documentation


@pytest.mark.parametrize("page", option_tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_options(page: Path) -> None:
    text = page.read_text("utf-8")
    assert option_tables.written(text) == text, "python -m tests.option_tables"


def test_every_job_and_every_format_has_a_table() -> None:
    shown = {name for page in option_tables.PAGES for name in option_tables.TABLE.findall(page.read_text())}
    assert shown == {
        *option_tables.FORMATS, "archive", "audit", "dedup", "dlq", "lag", "rebuild", "replay", "throughput",
        "trace",
    }  # fmt: skip


@pytest.mark.parametrize("struct", option_tables.FORMATS.values())
def test_every_option_of_a_format_is_described(struct: type) -> None:
    texts = [(key, text) for each in declared(struct) for key, text in each.spark.items()]
    assert [key for key, text in texts if not text] == []


# -- Names that `cometmq.pipeline` exports


@pytest.mark.parametrize("name", cometmq.pipeline.__all__)
def test_every_name_is_the_function_of_that_name(name: str) -> None:
    assert getattr(cometmq.pipeline, name).__name__ == name
    assert name in dir(cometmq.pipeline)


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(AttributeError, match="no attribute 'arhive'"):
        cometmq.pipeline.arhive  # noqa: B018
