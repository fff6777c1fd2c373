"""Invalid options are refused when they are set, with the option's name in the error."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cometmq import (
    ClientOptions,
    ConsumeFromWhere,
    FlowLimits,
    MessageModel,
    ProducerOptions,
    PullOptions,
    PushOptions,
    TraceOptions,
)
from cometmq.client import AllocateAveragely, FileOffsets
from cometmq.errors import ConfigError


async def asynchronous(*given: object) -> None:
    """A coroutine function where an option requires a plain function."""


OPTIONS: dict[type[Any], dict[str, list[Any]]] = {
    ClientOptions: {
        "route_interval_s": [0, -1, math.nan],
        "heartbeat_interval_s": [0],
        "api_timeout_s": [0, "3"],
    },
    ProducerOptions: {
        "send_timeout_s": [0, -1, math.nan, None],
        "try_timeout_s": [0],
        "retry_times": [-1, 1.5],
        "compress_over": [-1],
        "compress_level": [10],
        "max_message_size": [0],
        "max_delay_level": [-1],
        "create_topic_key": ["", "a b"],
        "default_topic_queue_nums": [0],
        "max_in_flight": [0],
        "max_requests": [0],
        "transaction_threads": [0],
        "checks_at_once": [0],
        "max_checks_waiting": [-1],
    },
    PushOptions: {
        "message_model": ["CLUSTERING", None],
        "consume_from_where": ["FIRST_OFFSET", MessageModel.CLUSTERING],
        "consume_timestamp_ms": [-1, 1.5],
        "pull_batch_size": [0, 1025],
        "suspend_timeout_s": [0, None],
        "broker_suspend_s": [-1, 31],  # 31 is longer than the timeout of a pull
        "rebalance_interval_s": [0],
        "persist_interval_s": [0],
        "stall_after_s": [0],
        "queue_listener": [asynchronous, "listener"],
        "allocate_strategy": [AllocateAveragely, "AVG"],
        "offset_storage": [FileOffsets, "offsets.json"],
        "consume_concurrency": [0, 1001, "5", 2.5],
        "consume_batch_max_size": [0, 1025],
        "pull_interval_s": [-1, 66],
        "handover_timeout_s": [-1],
        "max_body": [0],
        "topic_max_count": [0, 6_553_501],
        "topic_max_mib": [0, 102_401],
        "suspend_current_queue_s": [0, 31],
        "max_reconsume_times": [-1],
        "consume_timeout_s": [0],
        "drain_timeout_s": [-1],
        "pull_error_delay_s": [-1],
    },
    PullOptions: {
        "suspend_timeout_s": [None],
        "broker_suspend_s": [-1, 31],
        "pull_timeout_s": [0],
        "max_body": [0],
        "max_reconsume_times": [-1],
    },
    TraceOptions: {"sampling": [-0.1, 1.1]},
}


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [(options, key, value) for options, keys in OPTIONS.items() for key in keys for value in keys[key]],
)
def test_nonsense_is_refused(options: type[Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**{key: value})
    assert caught.value.key.rpartition(".")[2] == key


@pytest.mark.parametrize(
    "limits", [FlowLimits(max_count=0), FlowLimits(max_mib=1025), FlowLimits(max_span=0)]
)
def test_flow_limits_have_bounds(limits: FlowLimits) -> None:
    with pytest.raises(ConfigError, match=r"flow_limits\.max_"):
        PushOptions(flow_limits=limits)


def test_what_makes_sense_is_taken() -> None:
    PushOptions(suspend_timeout_s=1, broker_suspend_s=1, drain_timeout_s=0, pull_interval_s=65)
    PushOptions(topic_max_count=None, consume_from_where=ConsumeFromWhere.TIMESTAMP, consume_timestamp_ms=0)
    ProducerOptions(try_timeout_s=None, retry_times=0, compress_over=0, max_delay_level=0)
    ClientOptions(route_interval_s=0.001, heartbeat_interval_s=math.inf)


# Defaults of Java's clients (of 4.9.8; of 5.3 where a comment says so).
DEFAULTS: dict[type[Any], dict[str, object]] = {
    ClientOptions: {
        "client_ip": None,
        "instance_name": None,
        "unit_name": None,
        "namespace": None,
        "namespace_v2": None,  # default of 5.3
        "vip_channel": False,
        "route_interval_s": 30.0,
        "heartbeat_interval_s": 30.0,
        "api_timeout_s": 3.0,
    },
    ProducerOptions: {
        "send_timeout_s": 3.0,
        "try_timeout_s": None,  # 5.3's sendMsgMaxTimeoutPerRequest
        "retry_times": 2,
        "retry_response_codes": {17, 14, 1, 16, 204, 205, 2, 1500},  # 5.3; 4.9.8 lacks the last two
        "retry_another_broker_when_not_store_ok": False,
        "send_latency_fault_enable": False,
        "compress_over": 4096,
        "compress_type": "ZLIB",
        "compress_level": 5,
        "max_message_size": 4_194_304,
        "create_topic_key": "TBW102",
        "default_topic_queue_nums": 4,
        "max_checks_waiting": 2000,
    },
    PushOptions: {
        "message_model": MessageModel.CLUSTERING,
        "consume_from_where": ConsumeFromWhere.LAST_OFFSET,
        "consume_concurrency": 20,
        "consume_batch_max_size": 1,
        "pull_batch_size": 32,
        "pull_interval_s": 0.0,
        "flow_limits": FlowLimits(max_count=1000, max_mib=100, max_span=2000),
        "topic_max_count": None,
        "topic_max_mib": None,
        "max_reconsume_times": None,
        "most_reconsume_times": 16,
        "suspend_current_queue_s": 1.0,
        "consume_timeout_s": 15 * 60.0,
        "persist_interval_s": 5.0,
        "rebalance_interval_s": 20.0,
        "broker_suspend_s": 15.0,
        "suspend_timeout_s": 30.0,
        "pull_error_delay_s": 1.0,
    },
    PullOptions: {
        "message_model": MessageModel.CLUSTERING,
        "broker_suspend_s": 20.0,
        "suspend_timeout_s": 30.0,
        "pull_timeout_s": 10.0,
        "auto_commit": True,
        "max_reconsume_times": 16,
        "persist_interval_s": 5.0,
    },
    TraceOptions: {"topic": "RMQ_SYS_TRACE_TOPIC"},
}


@pytest.mark.parametrize("options", DEFAULTS)
def test_defaults_are_javas(options: type[Any]) -> None:
    made = options()
    assert {key: getattr(made, key) for key in DEFAULTS[options]} == DEFAULTS[options]
    assert made == options()


def test_defaults_of_other_kinds_are_javas() -> None:
    assert PushOptions().allocate_strategy.name == "AVG"
    assert PushOptions(orderly=True).most_reconsume_times == 2**31 - 1
