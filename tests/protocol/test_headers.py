"""Header classes: wire names as in the reference, and values parsed by Java's rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.errors import HeaderError, MessageIllegal
from cometmq.message import check_group_name, check_topic_name
from cometmq.protocol import headers
from cometmq.protocol.codes import LANGUAGES, language_name, response_name, version_name
from cometmq.protocol.ext import Header, decode_ext, encode_ext, parse_value, plan_of
from cometmq.protocol.headers import (
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SendMessageResponseHeader,
)

CLASSES = sorted(
    (
        found
        for found in vars(headers).values()
        if isinstance(found, type) and issubclass(found, Header) and found is not Header
    ),
    key=lambda cls: cls.__name__,
)

# Wire names by class, as in docs/reference/remoting.md; `!` marks required fields.
WIRE_NAMES = {
    "SendMessageRequestHeader": (
        "producerGroup topic! defaultTopic defaultTopicQueueNums queueId! sysFlag! bornTimestamp! flag! "
        "properties reconsumeTimes unitMode maxReconsumeTimes batch bname"
    ),
    "SendMessageRequestHeaderV2": "a b! c d e! f! g! h! i j k l m n",
    "SendMessageResponseHeader": (
        "msgId! queueId! queueOffset! transactionId batchUniqId recallHandle firstMsgId MSG_REGION TRACE_ON"
    ),
    "PullMessageRequestHeader": (
        "consumerGroup! topic! queueId! queueOffset! maxMsgNums! sysFlag! commitOffset "
        "suspendTimeoutMillis subscription subVersion expressionType bname maxMsgBytes requestSource "
        "proxyFrowardClientId bulk"
    ),
    "PullMessageResponseHeader": "suggestWhichBrokerId! nextBeginOffset! minOffset! maxOffset!",
    "PopMessageRequestHeader": (
        "consumerGroup! topic! queueId! maxMsgNums! invisibleTime! pollTime bornTime initMode expType exp "
        "order attemptId bname"
    ),
    "PopMessageResponseHeader": (
        "popTime! invisibleTime! reviveQid! restNum startOffsetInfo msgOffsetInfo orderCountInfo"
    ),
    "AckMessageRequestHeader": "consumerGroup! topic! queueId! extraInfo! offset! liteTopic bname",
    "ChangeInvisibleTimeRequestHeader": (
        "consumerGroup! topic! queueId! extraInfo! offset! invisibleTime! suspend liteTopic bname"
    ),
    "ChangeInvisibleTimeResponseHeader": "popTime! invisibleTime! reviveQid!",
    "PeekMessageRequestHeader": "topic! queueId! maxMsgNums! consumerGroup! bname",
    "NotificationRequestHeader": (
        "consumerGroup! topic! queueId! pollTime! bornTime order attemptId expType exp bname"
    ),
    "NotificationResponseHeader": "hasMsg! pollingFull",
    "GroupQueueRequestHeader": "consumerGroup! topic! queueId! bname",
    "PollingInfoResponseHeader": "pollingNum!",
    "RecallMessageRequestHeader": "topic! recallHandle producerGroup bname",
    "RecallMessageResponseHeader": "msgId!",
    "ListTimersRequestHeader": "maxMsgNums afterMs afterPosition topic key",
    "ListTimersResponseHeader": "afterMs! afterPosition! more! waiting! deliverAt!",
    "ConsumerSendMsgBackRequestHeader": (
        "offset! group! delayLevel! originMsgId originTopic unitMode maxReconsumeTimes bname"
    ),
    "EndTransactionRequestHeader": (
        "producerGroup! tranStateTableOffset! commitLogOffset! commitOrRollback! fromTransactionCheck msgId "
        "transactionId bname topic"
    ),
    "CheckTransactionStateRequestHeader": (
        "tranStateTableOffset! commitLogOffset! msgId transactionId offsetMsgId bname topic"
    ),
    "ResumeCheckHalfMessageRequestHeader": "msgId! topic bname",
    "UnregisterClientRequestHeader": "clientID! producerGroup consumerGroup",
    "ConsumerGroupRequestHeader": "consumerGroup! bname",
    "QueryConsumerOffsetRequestHeader": "consumerGroup! topic! queueId! bname setZeroIfNotFound",
    "UpdateConsumerOffsetRequestHeader": "consumerGroup! topic! queueId! commitOffset! bname",
    "SearchOffsetRequestHeader": "topic! queueId! timestamp! bname boundaryType",
    "QueueRequestHeader": "topic! queueId! bname committed",
    "QueryMessageRequestHeader": "topic! key! maxNum! beginTimestamp! endTimestamp! _UNIQUE_KEY_QUERY",
    "ViewMessageRequestHeader": "offset! topic",
    "ResetOffsetRequestHeader": "topic! group! timestamp! isForce queueId offset",
    "GroupTopicRequestHeader": "topic! group! clientAddr",
    "GetConsumerRunningInfoRequestHeader": "consumerGroup! clientId! jstackEnable",
    "PushReplyMessageRequestHeader": (
        "producerGroup! topic! defaultTopic! defaultTopicQueueNums! queueId! sysFlag! bornTimestamp! flag! "
        "bornHost! storeHost! storeTimestamp! properties reconsumeTimes unitMode"
    ),
    "ConsumeMessageDirectlyRequestHeader": (
        "consumerGroup! clientId msgId brokerName topic topicSysFlag groupSysFlag"
    ),
    "GetRouteInfoRequestHeader": "topic! acceptStandardJsonOnly",
    "RegisterBrokerRequestHeader": (
        "brokerName! brokerAddr! clusterName! haServerAddr brokerId! compressed bodyCrc32 "
        "heartbeatTimeoutMillis enableActingMaster zoneName"
    ),
    "RegisterBrokerResponseHeader": "haServerAddr masterAddr",
    "UnregisterBrokerRequestHeader": "brokerName! brokerAddr! clusterName! brokerId!",
    "BrokerHeartbeatRequestHeader": "clusterName! brokerAddr! brokerName!",
    "PutKVConfigRequestHeader": "namespace! key! value!",
    "GetKVConfigRequestHeader": "namespace! key!",
    "WipeWritePermOfBrokerResponseHeader": "wipeTopicCount!",
    "AddWritePermOfBrokerResponseHeader": "addTopicCount!",
    "CreateTopicRequestHeader": (
        "topic! defaultTopic readQueueNums! writeQueueNums! perm! topicFilterType topicSysFlag order "
        "attributes force"
    ),
    "DeleteSubscriptionGroupRequestHeader": "groupName! removeOffset cleanOffset",
    "GetConsumeStatsRequestHeader": "consumerGroup! topic topicList",
    "CloneGroupOffsetRequestHeader": "srcGroup! destGroup! topic offline",
    "QueryCorrectionOffsetRequestHeader": "topic! compareGroup! filterGroups",
    "QueryConsumeQueueRequestHeader": "topic! queueId! index! count! consumerGroup",
    "RegisterFilterServerRequestHeader": "filterServerAddr! token",
    "RegisterFilterServerResponseHeader": "brokerName! brokerId!",
    "RegisterMessageFilterClassRequestHeader": "consumerGroup! topic! className! classCRC!",
}

VALUES = {
    "s": st.text(st.characters(exclude_categories=("Cs",))),
    "b": st.booleans(),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
}


def filled(cls: type[Header]) -> st.SearchStrategy[Header]:
    fields = {
        attribute: VALUES[kind] if required else st.none() | VALUES[kind]
        for attribute, _, kind, required in plan_of(cls)
    }
    return st.builds(cls, **fields)


@pytest.mark.parametrize("name", WIRE_NAMES)
def test_wire_names(name: str) -> None:
    plan = plan_of(getattr(headers, name))

    assert {wire_name + "!" * required for _, wire_name, _, required in plan} == set(WIRE_NAMES[name].split())


@settings(max_examples=60)
@given(st.sampled_from(CLASSES).flatmap(filled))
def test_every_header_survives_the_wire(header: Header) -> None:
    ext = encode_ext(header)

    assert all(type(text) is str for text in ext.values())
    assert decode_ext(type(header), {**ext, "noFieldOfAny": "x"}) == header


@settings(max_examples=60)
@given(st.sampled_from(CLASSES), st.dictionaries(st.text(max_size=3), st.text(max_size=12)), st.data())
def test_any_text_is_a_header_or_an_error_that_names_a_field(
    cls: type[Header], noise: dict[str, str], data: st.DataObject
) -> None:
    names = [wire_name for _, wire_name, _, _ in plan_of(cls)]
    ext = noise | {
        name: data.draw(
            st.text(max_size=12) | st.integers().map(str) | st.sampled_from(["true", "null", "1e5", "-0"])
        )
        for name in data.draw(st.sets(st.sampled_from(names)))
    }
    try:
        header = decode_ext(cls, ext)
    except HeaderError as error:
        named = error.field in names and error.field in str(error)
    else:
        named = True
        for attribute, wire_name, kind, _ in plan_of(cls):
            value = getattr(header, attribute)
            assert value is None or wire_name in ext
            if kind == "i32" and value is not None:
                assert -(2**31) <= value < 2**31
    assert named


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", "i32", 5),
        ("+5", "i32", 5),
        ("-5", "i64", -5),
        ("007", "i32", 7),
        ("2147483647", "i32", 2147483647),
        ("-2147483648", "i32", -2147483648),
        ("9223372036854775807", "i64", 2**63 - 1),
        ("true", "b", True),
        ("TRUE", "b", True),
        ("false", "b", False),
        ("yes", "b", False),
        ("", "b", False),
        ("", "s", ""),
    ],
)
def test_values_as_java_parses_them(text: str, kind: str, value: Any) -> None:
    assert parse_value(text, kind) == value


@pytest.mark.parametrize("text", ["", "-", "+", " 5", "5 ", "1_000", "1.5", "0x5", "five", "--5", "9" * 5000])
def test_what_is_no_number_in_java(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse_value(text, "i64")


@pytest.mark.parametrize(
    ("text", "kind"), [("2147483648", "i32"), ("-2147483649", "i32"), ("9223372036854775808", "i64")]
)
def test_ranges(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match="out of range"):
        parse_value(text, kind)


def test_absent_fields_are_none_and_not_written() -> None:
    header = decode_ext(
        QueryConsumerOffsetRequestHeader, {"consumerGroup": "G", "topic": "T", "queueId": "+3"}
    )

    assert header == QueryConsumerOffsetRequestHeader("G", "T", 3)
    assert encode_ext(header) == {"consumerGroup": "G", "queueId": "3", "topic": "T"}


@pytest.mark.parametrize("ext", [None, {}])
def test_no_ext_at_all(ext: dict[str, str] | None) -> None:
    with pytest.raises(HeaderError, match="consumerGroup: missing"):
        decode_ext(PullMessageRequestHeader, ext)


def test_an_answer_of_5x_with_fields_of_its_own() -> None:
    ext = {
        "suggestWhichBrokerId": "0", "nextBeginOffset": "7", "minOffset": "0", "maxOffset": "9",
        "topicSysFlag": "0", "groupSysFlag": "0", "offsetDelta": "0",
    }  # fmt: skip

    assert decode_ext(PullMessageResponseHeader, ext) == PullMessageResponseHeader(0, 7, 0, 9)


def test_region_and_trace_of_a_send_answer() -> None:
    ext = {
        "msgId": "7F",
        "queueId": "1",
        "queueOffset": "2",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }

    answer = decode_ext(SendMessageResponseHeader, ext)

    assert (answer.region, answer.trace_on) == ("DefaultRegion", "true")
    assert encode_ext(answer) == ext


def test_headers_hold_only_what_the_codec_knows() -> None:
    assert len(CLASSES) >= 50
    for cls in CLASSES:
        assert all(kind in VALUES for _, _, kind, _ in plan_of(cls))
        assert len({field.encode_name for field in msgspec.structs.fields(cls)}) == len(plan_of(cls))


# -- Names of codes, versions and languages; valid names of topics and groups


def test_names_of_codes_and_versions() -> None:
    assert (response_name(22), response_name(9999)) == ("QUERY_NOT_FOUND", "RESPONSE_CODE_9999")
    numbers = [28, 213, 232, 253, 317, 399, 406, 407, 409, 413, 479, 513, 611, 612, 5000]
    assert [version_name(number) for number in numbers] == [
        "V3", "V4_0_0", "V4_1_0_SNAPSHOT", "V4_2_0", "V4_5_2", "V4_9_3", "V4_9_7_SNAPSHOT", "V4_9_7",
        "V4_9_8", "V5_0_0", "V5_3_3", "V5_5_0", "V5_9_9", "HIGHER_VERSION", "HIGHER_VERSION",
    ]  # fmt: skip


def test_names_of_languages() -> None:
    assert (LANGUAGES[3], LANGUAGES[9]) == ("PYTHON", "GO")
    assert (language_name(200), language_name(-1)) == ("OTHER", "OTHER")


@pytest.mark.parametrize("name", ["T", "%RETRY%group", "a|b-c_d", "x" * 127])
def test_good_names(name: str) -> None:
    check_topic_name(name)
    check_group_name(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "a.b", "a\n", "x" * 256])
def test_bad_names(name: str) -> None:
    with pytest.raises(MessageIllegal, match="topic name"):
        check_topic_name(name)
    with pytest.raises(MessageIllegal, match="group name"):
        check_group_name(name)
