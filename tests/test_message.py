"""A message that every broker would refuse, or no consumer could read, is refused when it is created."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import Message, MessageIllegal, Producer, PullConsumer, PushConsumer, filter_class, sql92, tags
from cometmq.client.group.subscription import as_subscriptions, with_tags
from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue, add_properties
from cometmq.protocol.pop import property_of
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.one import encode_record, iter_records


class Level(IntEnum):
    THIRD = 3


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        ({"topic": None}, "topic", "not NoneType"),
        ({"topic": ["T"]}, "topic", "not list"),
        ({"topic": b"T"}, "topic", "not bytes"),
        ({"topic": ""}, "topic", "blank"),
        ({"topic": "no blanks"}, "topic", "characters other"),
        ({"topic": "../T"}, "topic", "characters other"),
        ({"topic": "T" * 128}, "topic", "128 characters"),
        ({"topic": "\ud800"}, "topic", "characters other"),
        ({"body": "text"}, "body", "not str: encode"),
        ({"body": None}, "body", "not NoneType"),
        ({"body": 5}, "body", "not int"),
        ({"body": [1, 2]}, "body", "not list"),
        ({"tags": ["a"]}, "tags", r"not \['a'\]"),
        ({"tags": 1}, "tags", "not 1"),
        ({"tags": b"a"}, "tags", "not b'a'"),
        ({"tags": "a || b"}, "tags", "cannot be subscribed"),
        ({"tags": " a"}, "tags", "cannot be subscribed"),
        ({"tags": "a |"}, "tags", "cannot be subscribed"),
        ({"tags": "a | b"}, "tags", "cannot be subscribed"),
        ({"tags": "*"}, "tags", "is all"),
        ({"tags": "a\x01b"}, "tags", "separator"),
        ({"tags": "\ud800"}, "tags", "UTF-8"),
        ({"keys": "word"}, "keys", r"\['word'\] is one"),
        ({"keys": ""}, "keys", "list or tuple"),
        ({"keys": b"word"}, "keys", "list or tuple"),
        ({"keys": 7}, "keys", "list or tuple"),
        ({"keys": None}, "keys", "list or tuple"),
        ({"keys": {"a"}}, "keys", r"not \{'a'\}$"),
        ({"keys": [1]}, "keys", "a key must be a str, not 1"),
        ({"keys": ("a b",)}, "keys", "contains a blank"),
        ({"keys": ("a\u3000b",)}, "keys", "contains a blank"),
        ({"keys": [" a"]}, "keys", "contains a blank"),
        ({"keys": ("",)}, "keys", "contains a blank"),
        ({"keys": ("a", 1)}, "keys", "not 1"),
        ({"keys": ("a\x02",)}, "keys", "separator"),
        ({"keys": ("\udfff",)}, "keys", "UTF-8"),
        ({"flag": "1"}, "flag", "32-bit number"),
        ({"flag": True}, "flag", "32-bit number"),
        ({"flag": 2**31}, "flag", "32-bit number"),
        ({"delay_level": -1}, "delay_level", "not -1"),
        ({"delay_level": "3"}, "delay_level", "not '3'"),
        ({"delay_level": 1.5}, "delay_level", "not 1.5"),
        ({"delay_ms": -1}, "delay_ms", "not -1"),
        ({"priority": -1}, "priority", "0 to 2147483647, not -1"),
        ({"priority": True}, "priority", "not True"),
        ({"lite_topic": "a.b"}, "lite_topic", "1 to 64 letters"),
        ({"lite_topic": "a" * 65}, "lite_topic", "1 to 64 letters"),
        ({"deliver_at_ms": 1.5}, "deliver_at_ms", "not 1.5"),
        ({"delay_ms": 1 << 60}, "delay_ms", "a number of milliseconds"),
        ({"properties": None}, "properties", "dict"),
        ({"properties": [("a", "b")]}, "properties", "dict"),
        ({"properties": {1: "b"}}, "properties", "not 1"),
        ({"properties": {"a": 1}}, "a", "not 1"),
        ({"properties": {"a": "b\x02c"}}, "a", "separator"),
        ({"properties": {"a\x01": "b"}}, "properties", "separator"),
        ({"properties": {"a": "\ud83d"}}, "a", "UTF-8"),
        ({"wait_store": "yes"}, "wait_store", "True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_named(wrong: dict[str, Any], field: str, words: str) -> None:
    fields: dict[str, Any] = {"topic": "T", "body": b"x", **wrong}
    with pytest.raises(MessageIllegal, match=words) as caught:
        Message(**fields)
    assert caught.value.field == field

    message = Message("T", b"x")
    setattr(message, *wrong.popitem())
    with pytest.raises(MessageIllegal, match=words):
        message.check()


@pytest.mark.parametrize(
    "good",
    [
        {"tags": "a|b"},
        {"tags": "two words"},
        {"tags": "标签"},
        {"tags": ""},
        {"keys": ("订单-1", "x" * 5000)},
        {"keys": ()},
        {"flag": -(2**31)},
        {"delay_level": 18},
        {"delay_level": Level.THIRD, "flag": Level.THIRD},
        {"delay_ms": 1},
        {"deliver_at_ms": 1_700_000_000_000},
        {"priority": 0},
        {"lite_topic": "session-1_A"},
        {"properties": {"Straße": "a\tb\n"}},
        {"body": b""},
    ],
    ids=str,
)
def test_what_is_unusual_and_right_stays_as_it_is(good: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"topic": "T", "body": b"x", **good}
    message = Message(**fields)
    assert {name: getattr(message, name) for name in good} == good
    message.check()


def test_keys_may_be_a_list_and_a_body_any_bytes() -> None:
    changing = bytearray(b"before")
    message = Message("T", changing, keys=["a", "b"])  # type: ignore[arg-type,unused-ignore]
    changing[:] = b"after!"
    assert (message.body, message.keys) == (b"before", ("a", "b"))
    assert message.wire_properties()["KEYS"] == "a b"
    assert Message("T", memoryview(b"abcd")[::2]).body == b"ac"  # type: ignore[arg-type,unused-ignore]


def test_an_empty_tag_is_none() -> None:
    assert "TAGS" not in Message("T", b"x", tags="").wire_properties()


@pytest.mark.parametrize("wrong", [None, "text", b"bytes", 5, MessageExt("T", b"x")])
async def test_only_messages_are_sent(wrong: Any) -> None:
    async with Producer("p", namesrv="127.0.0.1:1") as producer:
        for send in (producer.send, producer.send_oneway, lambda one: producer.send_batch([one])):
            with pytest.raises(MessageIllegal, match=f"not {type(wrong).__name__}") as caught:
                await send(wrong)
            assert caught.value.field == "message"


# -- groups, listeners, subscriptions


async def listener(messages: list[MessageExt]) -> None: ...


@pytest.mark.parametrize("group", [None, 5, b"g", "", "a b", "../g", "g" * 256, "\ud800"])
def test_wrong_group_names_are_refused_by_every_client(group: Any) -> None:
    for make in (Producer, PullConsumer, lambda name: PushConsumer(name, listener, "T")):
        with pytest.raises(MessageIllegal, match="group name") as caught:
            make(group)
        assert caught.value.field == "group"


@pytest.mark.parametrize("wrong", [None, "name", 5, lambda: None, lambda a, b, c: None])
def test_what_cannot_be_a_listener_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected a function of") as caught:
        PushConsumer("g", wrong, "T")
    assert caught.value.key == "listener"


def test_a_coroutine_in_the_place_of_its_function_is_explained() -> None:
    coroutine = listener([])
    with pytest.raises(ConfigError, match="pass the function"):
        PushConsumer("g", coroutine, "T")  # type: ignore[arg-type]
    asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("wrong", "key", "words"),
    [
        (None, "subscriptions", "a topic, several"),
        (5, "subscriptions", "a topic, several"),
        (b"T", "subscriptions", "a topic, several"),
        ({"T": "a |"}, "subscription of T", r"\|\| between"),
        ({"T": "a | b"}, "subscription of T", r"\|\| between"),
        ({"T": "|a || b"}, "subscription of T", r"\|\| between"),
        ({"T": "a ||| b"}, "subscription of T", r"\|\| between"),
        ({"T": " || "}, "subscription of T", "would match nothing"),
        ({"T": ["a", "b"]}, "subscription of T", "tags as one str"),
        ({"T": 1}, "subscription of T", "tags as one str"),
        ({"T": "a\x01"}, "subscription of T", "separator"),
        ({"T": "\ud800"}, "subscription of T", "UTF-8"),
        ({"T": sql92("")}, "subscription of T", "expression as text"),
        ({"T": sql92(None)}, "subscription of T", "expression as text"),  # type: ignore[arg-type]
        ({"T": filter_class("a.B", "class B: ...")}, "subscription of T", "name of a class"),
        ({"T": filter_class("B", b"class B: ...")}, "subscription of T", "source as text"),  # type: ignore[arg-type]
    ],
    ids=str,
)  # fmt: skip
def test_wrong_subscriptions_are_refused(wrong: Any, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PushConsumer("g", listener, wrong)
    assert caught.value.key == key


@pytest.mark.parametrize("wrong", ["no blanks", [None], [["T"]], {5: "*"}, {"T" * 128: "*"}, ["T", b"U"]])
def test_wrong_topics_of_subscriptions_are_refused(wrong: Any) -> None:
    with pytest.raises(MessageIllegal, match="topic name") as caught:
        PushConsumer("g", listener, wrong)
    assert caught.value.field == "topic"


def test_good_subscriptions_of_every_form() -> None:
    assert as_subscriptions("T").keys() == {"T"}
    assert as_subscriptions(("T", "U")).keys() == {"T", "U"}
    found = as_subscriptions({"T": tags("a|b", "c d"), "U": None, "%RETRY%g": sql92("a > 1")})  # type: ignore[dict-item]
    assert found["T"].tags == {"a|b", "c d"}
    assert found["U"].expression == "*"
    assert found["%RETRY%g"].expression_type == "SQL92"


@pytest.mark.parametrize("wrong", ["a || b", " a", "a |", None, "a\x02"])
def test_tags_that_no_message_has_make_no_expression(wrong: Any) -> None:
    with pytest.raises(MessageIllegal) as caught:
        tags("good", wrong)
    assert caught.value.field == "tags"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 1, "lite_topic": "a"}, "not both a priority and a lite_topic"),
        ({"priority": 1, "delay_level": 1}, "a message with priority has no delay"),
        ({"lite_topic": "a", "delay_ms": 5}, "a message with lite_topic has no delay"),
        ({"priority": 1, "properties": {"__SHARDINGKEY": "k"}}, "no property __SHARDINGKEY"),
        ({"lite_topic": "a", "properties": {"TIMER_DELAY_MS": "5"}}, "no property TIMER_DELAY_MS"),
    ],
)
def test_a_message_is_of_one_kind(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageIllegal, match=words) as caught:
        Message("T", b"x", **fields)
    assert caught.value.field == next(iter(fields))


def test_priority_and_lite_topic_are_properties() -> None:
    sent = [Message("T", b"x", priority=3), Message("T", b"x", lite_topic="a"), Message("T", b"x")]
    properties = [message.wire_properties() for message in sent]
    assert [each.get("_SYS_MSG_PRIORITY_") for each in properties] == ["3", None, None]
    assert [each.get("__LITE_TOPIC") for each in properties] == [None, "a", None]
    received = [MessageExt("T", b"x", properties=each) for each in properties]
    assert [(each.priority, each.lite_topic) for each in received] == [(3, None), (None, "a"), (None, None)]
    assert MessageExt("T", b"x", properties={"_SYS_MSG_PRIORITY_": "high"}).priority is None


@pytest.mark.parametrize("others", [{"delay_level": 1}, {"deliver_at_ms": 1}])
def test_a_message_has_one_delivery_time(others: dict[str, int]) -> None:
    with pytest.raises(MessageIllegal, match="one of delay_level, delay_ms and deliver_at_ms") as caught:
        Message("T", b"x", delay_ms=1, **others)  # type: ignore[arg-type]
    assert caught.value.field == "delay_ms"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("delay_ms", "TIMER_DELAY_SEC"),
        ("delay_ms", "TIMER_DELIVER_MS"),
        ("delay_ms", "DELAY"),
        ("deliver_at_ms", "TIMER_DELAY_MS"),
        ("deliver_at_ms", "TIMER_OUT_MS"),
    ],
)
def test_nor_one_of_its_own_and_one_in_its_properties(field: str, name: str) -> None:
    with pytest.raises(MessageIllegal, match=f"the property {name} says when") as caught:
        Message("T", b"x", properties={name: "50"}, **{field: 3})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_delay_replaces_that_of_a_message_sent_again() -> None:
    again = Message("T", b"x", delay_ms=3, properties={"TIMER_DELAY_MS": "50"})
    assert again.wire_properties()["TIMER_DELAY_MS"] == "3"


def test_wire_properties_of_a_message() -> None:
    message = Message(
        "T", b"x", tags="A", keys=("k1", "k2"), delay_level=3, properties={"user": "1", "DELAY": "9"}
    )

    assert message.wire_properties() == {
        "user": "1", "DELAY": "3", "KEYS": "k1 k2", "TAGS": "A", "WAIT": "true",
    }  # fmt: skip
    assert message.properties == {"user": "1", "DELAY": "9"}
    assert Message("T", b"x", wait_store=False).wire_properties() == {"WAIT": "false"}
    assert Message("T", b"x", delay_ms=5).wire_properties() == {"TIMER_DELAY_MS": "5", "WAIT": "true"}
    assert Message("T", b"x", deliver_at_ms=5).wire_properties() == {"TIMER_DELIVER_MS": "5", "WAIT": "true"}


def test_reserved_names_are_not_the_users() -> None:
    message = MessageExt(
        "T", b"", properties={"TAGS": "A", "mine": "1", "__RMQ.TRANSIENT.x": "y", "CLUSTER": "c"}
    )

    assert message.user_properties == {"mine": "1"}
    assert message.wait_store
    assert not MessageExt("T", b"", properties={"WAIT": "FALSE"}).wait_store
    assert (message.delay_level, MessageExt("T", b"", properties={"DELAY": "x"}).delay_level) == (0, 0)


def test_queues_order_and_hash_and_pickle() -> None:
    queues = [MessageQueue("T", "b", 1), MessageQueue("T", "a", 2), MessageQueue("S", "z", 0)]

    assert [str(queue) for queue in sorted(queues)] == ["S@z:0", "T@a:2", "T@b:1"]
    assert len({*queues, MessageQueue("T", "b", 1)}) == 3
    assert pickle.loads(pickle.dumps(queues)) == queues


# -- received messages, whose properties are parsed when they are read


STORED = b"TAGS\x01A\x02mine\x011"


def received(properties: bytes = STORED) -> MessageExt:
    (message,) = iter_records(encode_record("T", b"x", properties))
    return message


def parsed(properties: bytes = STORED) -> MessageExt:
    message = received(properties)
    assert message.properties == decode_properties(properties)
    return message


@pytest.mark.parametrize(
    "use",
    [
        repr,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda message: pickle.loads(pickle.dumps(message)),
        lambda message: msgspec.structs.replace(message, flag=5),
        lambda message: list(message.__rich_repr__()),
        lambda message: (message == parsed(), parsed() == message, message == received(b""), message == 5),
        lambda message: (message != parsed(), parsed() != message, message != received(b""), message != 5),
        lambda message: (message.tags, message.msg_id, message.keys, message.user_properties),
    ],
)
def test_unparsed_properties_are_not_noticed(use: Callable[[MessageExt], object]) -> None:
    assert use(received()) == use(parsed())


def test_properties_are_the_same_dict_at_each_access() -> None:
    message = received()
    message.properties["mine"] = "2"
    assert message.properties == {"TAGS": "A", "mine": "2"}
    assert copy.copy(message).properties is message.properties
    message.properties = {"TAGS": "B"}
    assert (message.properties, message.tags) == ({"TAGS": "B"}, "B")
    with pytest.raises(TypeError, match="unhashable"):
        hash(message)


@given(st.lists(st.sampled_from([b"TAGS", b"\x01", b"\x02", b"a", b"\xe2", b"\xff", "€".encode()])))
def test_tags_are_found_in_any_property_string(parts: list[bytes]) -> None:
    text = b"".join(parts)
    for some in ({"a"}, {"€", "aa"}):
        wanted = [each for each in (parsed(text),) if each.tags in some]
        assert with_tags([received(text)], some) == with_tags([parsed(text)], some) == wanted


@pytest.mark.parametrize(
    "stored", [b"", b"a\x011", b"a\x011\x02", b"MIN_OFFSET\x017\x02a\x011", b"\x02\x01\xff"]
)
def test_properties_are_added_before_and_after_the_others_are_parsed(stored: bytes) -> None:
    messages = [received(stored), parsed(stored)]
    bounds, begun = {"MIN_OFFSET": "0", "MAX_OFFSET": "3"}, {"CONSUME_START_TIME": "5"}
    for added in (bounds, begun):
        add_properties(messages, added)
    wanted = decode_properties(stored) | bounds | begun
    for message in messages:
        assert list(message.properties.items()) == list(wanted.items())
        message.properties["MIN_OFFSET"] = "1"
    assert bounds == {"MIN_OFFSET": "0", "MAX_OFFSET": "3"}


@pytest.mark.parametrize("stored", [b"", b"a\x011", b"b\x01a\x02c\x01\xff"])
def test_a_property_is_read_without_the_others(stored: bytes) -> None:
    for message in (received(stored), parsed(stored)):
        add_properties([message], {"new": "1"})
        add_properties([message], {"new": "2"})
        wanted = decode_properties(stored) | {"new": "2"}
        assert [property_of(message, name) for name in "abc"] == [wanted.get(name) for name in "abc"]
        assert (property_of(message, "new"), message.properties) == ("2", wanted)
    unread = received(stored)
    assert property_of(unread, "x") is None
    with pytest.raises(TypeError, match="unsupported"):  # Its properties are not parsed yet
        msgspec.json.encode(unread)


def test_functions_that_bypass_the_properties_do_not_return_wrong_ones() -> None:
    for function in (msgspec.to_builtins, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError, match="unsupported"):
            function(received())
    assert msgspec.json.decode(msgspec.json.encode(parsed()), type=MessageExt) == received()


def test_a_received_message_does_not_keep_the_answer_in_memory() -> None:
    answer = encode_record("T", b"x", STORED) * 2
    before = sys.getrefcount(answer)
    messages = list(iter_records(answer))
    assert (len(messages), sys.getrefcount(answer)) == (2, before)
