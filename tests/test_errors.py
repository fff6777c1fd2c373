"""Errors keep their attributes, also through pickling."""

from __future__ import annotations

import builtins
import inspect
import pickle
from typing import Any

import pytest

from cometmq import errors
from cometmq.errors import CometError

SAMPLES: dict[str, tuple[Any, ...]] = {
    "CommandError": (17, "no topic", {"a": "b"}),
    "FrameError": ("bad",),
    "HeaderError": ("queueId", "x", "not a whole number"),
    "RaftMessageError": ("term", -1, "below 0"),
    "RaftRefused": ("not the leader", "n1"),
    "BodyError": ("HeartbeatData", "no object", "$.a"),
    "BodyTooLarge": ("compressed body", 5, "max_body"),
    "RecordError": (7, "size", "too small"),
    "ConfigError": ("listenPort", "x", "a port"),
    "ClientStateError": ("closed",),
    "BeingHandled": ("order-7",),
    "MessageIllegal": ("too long", "T", "topic"),
    "MessageNotFound": ("7F000001", "in topic T"),
    "BrokerError": (17, "", "no topic", "a:1", "T", "k", "create it"),
    "ConnectError": ("a:1", "refused"),
    "SendFailed": ("a:1", 310),
    "RequestTimeout": ("a:1", 310, 3.0),
    "ReplyTimeout": ("T", "ID", "c-1", 3.0),
    "RequestNotSent": ("T", 3.0),
    "TooManySends": (8192,),
    "NoRouteError": ("T", [("n:9876", "no route")], "create it"),
    "SqlError": (3, "a text is wanted"),
    "YamlError": (3, "no YAML"),
    "StoreError": ("full", "/x"),
    "StoreCorrupt": ("bad magic", "/x"),
    "StoreInUse": ("another store uses it", "/x"),
}
CONCRETE = [
    name
    for name, cls in vars(errors).items()
    if inspect.isclass(cls)
    and issubclass(cls, CometError)
    and name not in ("CometError", "ProtocolError", "RemotingError")
]


@pytest.mark.parametrize("name", CONCRETE)
def test_errors_keep_their_fields_and_words_through_pickling(name: str) -> None:
    error = getattr(errors, name)(*SAMPLES[name])
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error) != {}
    assert not hasattr(builtins, name)


def test_a_broker_error_says_everything() -> None:
    error = errors.BrokerError(
        17, remark="no topic T", broker_addr="a:1", topic="T", key="K", hint="create it"
    )

    assert (error.code, error.name) == (17, "TOPIC_NOT_EXIST")
    assert str(error) == "TOPIC_NOT_EXIST (17) from a:1 for topic T message K: no topic T (create it)"


def test_no_route_names_who_was_asked() -> None:
    error = errors.NoRouteError("T", [("n1:9876", "code 17"), ("n2:9876", "no connection")])

    assert str(error) == "no route to topic T: n1:9876 answered 'code 17'; n2:9876 answered 'no connection'"


def test_long_values_are_cut_in_words() -> None:
    assert len(str(errors.HeaderError("x", "y" * 100_000, "bad"))) < 300
