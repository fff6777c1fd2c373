"""Formatting of texts and times, tested without a cluster."""

from __future__ import annotations

import time

import pytest

from cometmq.admin.commands import formats
from cometmq.admin.stats import counted_runtime, quota
from cometmq.admin.values import (
    BrokerStatus,
    GroupProgress,
    GroupSummary,
    MessageTrack,
    MessageView,
    QueueProgress,
    QueueStatus,
    TopicStats,
    TraceView,
    TrackType,
    role_of,
    with_lags,
)
from cometmq.cli import store as store_text
from cometmq.message import MessageExt
from cometmq.protocol.bodies.admin import HaClientInfo, HaConnectionInfo, HaRuntimeInfo
from cometmq.protocol.traces import Pub, Recall, SubAfter
from cometmq.text import local_time


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_times_are_shown_with_and_without_milliseconds() -> None:
    assert local_time(1_700_000_000_042, ",") == "2023-11-14 22:13:20,042"
    assert local_time(1_700_000_000_042) == "2023-11-14 22:13:20"
    assert local_time(0) == local_time(0, ",") == ""


# Invalid times that a producer may send or a damaged record may contain.
NO_TIMES = (2**62, 2**63 - 1, -1, -(2**63), 253_402_300_800_000 + 86_400_000)


@pytest.mark.parametrize("moment", NO_TIMES)
def test_a_number_that_is_no_time_is_shown_as_it_is(moment: int) -> None:
    message = MessageExt(
        topic="t", body=b"x", born_timestamp_ms=moment, store_timestamp_ms=moment, store_host="127.0.0.1:1"
    )
    lines = list(formats.message_details(message, body_path="p", offset_id=True))

    assert f"{'Born Timestamp:':<20} {moment} ms" in lines
    assert f"{'Store Timestamp:':<20} {moment} ms" in lines
    assert f"{moment} ms" in store_text.message_text(message, "auto", raw=False)


@pytest.mark.parametrize("moment", NO_TIMES)
def test_neither_does_it_end_a_table(moment: int) -> None:
    queue = QueueStatus(broker_name="b", queue_id=0, min_offset=0, max_offset=1, last_update_timestamp=moment)
    progress = QueueProgress(
        topic="t", broker_name="b", queue_id=0, broker_offset=1, consumer_offset=0, last_timestamp=moment
    )
    group = GroupProgress(group="g", consume_tps=0.0, queues=[progress])

    assert len(list(formats.topic_status([queue]))) == 2
    assert len(list(formats.group_progress(group, show_client_ip=False, total=None))) == 5


@pytest.mark.parametrize("text", ["²", "9" * 5000, str(2**63), "", "x"])
def test_what_a_broker_says_that_is_no_counter_counts_as_none(text: str) -> None:
    assert broker({"earliestMessageTimeStamp": text}).count("earliestMessageTimeStamp") == 0
    assert len(list(formats.cluster_list([broker({"earliestMessageTimeStamp": text})], now_ms=0))) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1700000000042", 1_700_000_000_042),
        (" 1700000000042 ", 1_700_000_000_042),
        ("2023-11-14#22:13:20:042", 1_700_000_000_042),
        ("2023-11-14#22:13:20:5", 1_700_000_000_005),
    ],
)
def test_times_are_read_as_javas_tools_read_them(text: str, expected: int) -> None:
    assert formats.parse_time(text) == expected


@pytest.mark.parametrize("text", ["", "now", "-1", str(2**63), "2023-11-14", "2023-11-14 22:13:20", "٣"])
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ValueError):
        formats.parse_time(text)


def broker(runtime: dict[str, str]) -> BrokerStatus:
    return BrokerStatus(cluster_name="C", broker_name="b", broker_id=0, broker_addr="h:1", runtime=runtime)


def test_the_cluster_list_counts_hours_rates_and_space() -> None:
    runtime = {
        "putTps": "12.5 3 1",
        "getTransferedTps": "7.25 1 1",
        "sendThreadPoolQueueSize": "2",
        "sendThreadPoolQueueHeadWaitTimeMills": "9",
        "earliestMessageTimeStamp": "1000",
        "commitLogDiskRatio": "0.25",
        "brokerVersionDesc": "V4_9_7",
    }

    _, line = formats.cluster_list([broker(runtime)], now_ms=1000 + 90 * 60 * 1000)

    facts = ["C", "b", "0", "h:1", "V4_9_7", "12.50(2,9ms)", "7.25(,ms)", "1.50", "0.2500"]
    assert line.split() == [*facts, "-", "-"]


@pytest.mark.parametrize(
    ("runtime", "broker_id", "role"),
    [
        ({"brokerRole": "SYNC_MASTER"}, 0, "SYNC_MASTER"),
        ({"brokerRole": "SLAVE"}, 1, "SLAVE"),
        ({"brokerRole": "SLAVE", "raftRole": "candidate"}, 2, "candidate"),
        ({"putTps": "0"}, 0, "MASTER"),  # Apache's brokers do not report their role
        ({"putTps": "0"}, 1, "SLAVE"),
        ({}, 0, ""),
    ],
)
def test_the_role_of_a_broker(runtime: dict[str, str], broker_id: int, role: str) -> None:
    assert role_of(runtime, broker_id) == role


def test_a_slave_is_so_many_bytes_behind_the_master_of_its_name() -> None:
    def one(name: str, broker_id: int, end: str, cluster: str = "C") -> BrokerStatus:
        return BrokerStatus(
            cluster_name=cluster, broker_name=name, broker_id=broker_id, broker_addr=f"{name}{broker_id}",
            runtime={"commitLogMaxOffset": end} if end else {}, role="SLAVE",
        )  # fmt: skip

    brokers = [
        one("a", 0, "1000"), one("a", 1, "400"), one("a", 2, "1200"), one("a", 3, ""),
        one("b", 0, ""), one("b", 1, "5"), one("b", 0, "9", "D"), one("c", 1, "7"),
    ]  # fmt: skip

    found = with_lags(brokers)

    assert [each.lag for each in found] == [None, 600, 0, None, None, None, None, None]
    lines = list(formats.cluster_list(found, now_ms=0))
    assert lines[0].split()[-2:] == ["#Role", "#Behind"]
    assert [line.split()[-2:] for line in lines[1:4]] == [["SLAVE", "-"], ["SLAVE", "600"], ["SLAVE", "0"]]


def test_the_ha_status_of_a_master_has_a_line_for_each_slave() -> None:
    slaves = [
        HaConnectionInfo(addr="10.0.0.2:4000", slave_ack_offset=900, diff=100, in_sync=True,
                         transferred_byte_in_second=2048, transfer_from_where=950),
        HaConnectionInfo(addr="10.0.0.3:4000", slave_ack_offset=-1, diff=1000, in_sync=False),
    ]  # fmt: skip
    status = HaRuntimeInfo(
        master=True, master_commit_log_max_offset=1000, in_sync_slave_nums=1, ha_connection_info=slaves
    )

    assert [line.split() for line in formats.ha_status("h:1", status)] == [
        [],
        ["#MasterAddr", "h:1"],
        ["#MasterCommitLogMaxOffset", "1000"],
        ["#SlaveNum", "2"],
        ["#InSyncSlaveNum", "1"],
        ["#SlaveAddr", "#SlaveAckOffset", "#Diff", "#TransferSpeed(KB/s)", "#Status", "#TransferFromWhere"],
        ["10.0.0.2:4000", "900", "100", "2.00", "OK", "950"],
        ["10.0.0.3:4000", "-1", "1000", "0.00", "Fall", "Behind", "0"],
    ]


def test_the_ha_status_of_a_slave_names_its_master() -> None:
    info = HaClientInfo(
        master_addr="h:2", transferred_byte_in_second=512, max_offset=900, master_flush_offset=7,
        last_read_timestamp=1_700_000_000_042,
    )  # fmt: skip

    lines = list(formats.ha_status("h:1", HaRuntimeInfo(master=False, ha_client_runtime_info=info)))

    assert [line.split() for line in lines] == [
        [],
        ["#MasterAddr", "h:2"],
        ["#CommitLogMaxOffset", "900"],
        ["#TransferSpeed(KB/s)", "0.50"],
        ["#LastReadTime", "2023-11-14", "22:13:20,042"],
        ["#LastWriteTime"],
        ["#MasterFlushOffset", "7"],
    ]
    assert list(formats.ha_status("h", HaRuntimeInfo(master=False)))[1].split() == ["#MasterAddr", "null"]


def test_a_broker_that_does_not_answer_still_has_its_line() -> None:
    _, line = formats.cluster_list([broker({})], now_ms=0)

    assert line.split()[:4] == ["C", "b", "0", "h:1"]


def test_totals_are_differences_of_the_counters_at_midnight() -> None:
    runtime = {
        "msgPutTotalYesterdayMorning": "10",
        "msgPutTotalTodayMorning": "15",
        "msgPutTotalTodayNow": "22",
        "msgGetTotalYesterdayMorning": "1",
        "msgGetTotalTodayMorning": "3",
        "msgGetTotalTodayNow": "9",
    }

    _, line = formats.cluster_totals([broker(runtime)])

    assert line.split() == ["C", "b", "5", "2", "7", "6"]


def test_a_track_is_shown_as_java_shows_it() -> None:
    track = MessageTrack(consumer_group="g", track_type=TrackType.CONSUMED)

    assert list(formats.message_tracks([track])) == [
        "",
        "MessageTrack [consumerGroup=g, trackType=CONSUMED, exceptionDesc=null]",
    ]
    assert list(formats.message_tracks([])) == ["", "WARN: No Consumer"]


@pytest.mark.parametrize(
    ("body", "shown", "encoding"), [("é".encode(), "é", "utf-8"), (b"\xff\x00", "/wA=", "base64")]
)
def test_a_body_is_shown_as_text_or_base64(body: bytes, shown: str, encoding: str) -> None:
    view = MessageView.of(MessageExt(topic="t", body=body))

    assert (view.body, view.body_encoding) == (shown, encoding)


def test_traces_are_a_table_for_each_send_and_for_each_group() -> None:
    pub = Pub(
        timestamp_ms=1_700_000_000_042,
        region="R",
        group="producers",
        topic="T",
        msg_id="ID",
        tags=None,
        keys=None,
        store_host="a:1",
        body_length=1,
        cost_ms=12,
        message_type=0,
        offset_msg_id=None,
        success=True,
    )

    def after(group: str | None, success: bool) -> SubAfter:
        return SubAfter(
            request_id="r", msg_id="ID", cost_ms=3, success=success, keys=None, context_code=0, group=group
        )

    recall = Recall(timestamp_ms=1, region=None, group="g", topic="T", msg_id="ID", success=True)
    traces = [after("b", True), pub, after("a", False), after("b", False), after(None, True), recall]
    views = [TraceView(trace=trace, client_host="10.0.0.1", store_timestamp=1) for trace in traces]

    assert [line.rstrip() for line in formats.message_traces(views)] == [
        "#Type      #ProducerGroup       #ClientHost          #SendTime            #CostTimes #Status",
        "Pub        producers            10.0.0.1             2023-11-14 22:13:20  12ms       success",
        "",
        "#Type      #ConsumerGroup       #ClientHost          #ConsumerTime        #CostTimes #Status",
        "Sub        b                    10.0.0.1                                  3ms        success",
        "Sub        b                    10.0.0.1                                  3ms        failed",
        "",
        "#Type      #ConsumerGroup       #ClientHost          #ConsumerTime        #CostTimes #Status",
        "Sub        a                    10.0.0.1                                  3ms        failed",
        "",
        "#Type      #ConsumerGroup       #ClientHost          #ConsumerTime        #CostTimes #Status",
        "Sub                             10.0.0.1                                  3ms        success",
        "",
    ]


def test_what_nothing_was_counted_of_is_a_dash_and_not_0() -> None:
    _, silent = formats.cluster_list([broker({})], now_ms=0)
    assert silent.split() == ["C", "b", "0", "h:1", *["-"] * 6]  # unknown: rates, hours, space, role, lag
    _, totals = formats.cluster_totals([broker({})])
    assert totals.split() == ["C", "b", "-", "-", "-", "-"]
    _, line = formats.group_summaries(
        [
            GroupSummary(
                group="g",
                count=0,
                version="",
                consume_type="",
                message_model="",
                consume_tps=None,
                diff_total=None,
            )
        ]
    )
    assert line.split() == ["g", "0", "OFFLINE", "-", "-"]
    empty = counted_runtime({"putMessageAverageSize": "0.0", "putMessageTimesTotal": "0"})
    assert [text.split()[-1] for text in formats.broker_status(empty)] == ["-", "0"]
    load = quota({"putMessageAverageSize": "0.0", "putMessageTimesTotal": "0"}, None, None)
    assert load["messageAverageSize"] is None
    assert {load["tps"][key] for key in ("transInTps", "scheduleInTps")} == {None}
    unknown = TopicStats(
        topic="T", consumer_group="g", accumulation=None, in_tps=None, out_tps=None, in_msg_24_hours=None,
        out_msg_24_hours=None,
    )  # fmt: skip
    assert next(formats.topic_stats([unknown], title=False)).split() == ["T", "g", *["-"] * 5]
