"""Permission decisions from one table of accounts, rights and addresses."""

from __future__ import annotations

import pytest

from cometmq.broker.access.accounts import Perm, read_acl
from cometmq.broker.access.decision import MAX_HOSTS, Policy
from cometmq.broker.access.rights import Right, Rights, group_right, needed, topic_right
from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import ConsumerData, HeartbeatData, LockBatchBody, SubscriptionData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame

FILE = b"""
globalWhiteRemoteAddresses: [10.0.0.*]
accounts:
- {accessKey: adminer, secretKey: secret-1, admin: true}
- {accessKey: bounded, secretKey: secret-2, admin: true, topicPerms: [T=SUB]}
- accessKey: program
  secretKey: secret-3
  whiteRemoteAddress: 192.168.0.1
  defaultGroupPerm: SUB
  topicPerms: [Orders=PUB|SUB, In=SUB, Out=PUB, No=DENY, "%DLQ%closed=SUB"]
  groupPerms: [closed=DENY]
- {accessKey: nothing, secretKey: secret-4}
- accessKey: a-reader
  secretKey: secret-5
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
  topicPerms: [C_REPLY_TOPIC=SUB]
  groupPerms: [closed=DENY]
"""


@pytest.fixture
def policy() -> Policy:
    found = read_acl("plain_acl.yml", FILE)
    return Policy(found.white, found.accounts)


PUB, SUB = Perm.PUB, Perm.SUB


@pytest.mark.parametrize(
    ("key", "rights", "allowed", "reason"),
    [
        (None, [], False, "No accessKey is configured"),
        ("", [], False, "No accessKey is configured"),
        ("nobody", [], False, "No acl config for nobody"),
        ("nothing", [], True, "a valid signature"),
        ("nothing", [topic_right(PUB, "T")], False, "topic:T (no defaultTopicPerm, which is DENY)"),
        ("nothing", [topic_right(PUB, "RMQ_SYS_TRACE_TOPIC")], True, "every account may send traces"),
        ("nothing", [topic_right(SUB, "RMQ_SYS_TRACE_TOPIC")], False, "topic:RMQ_SYS_TRACE_TOPIC"),
        ("nothing", None, False, "Need admin permission"),
        ("adminer", None, True, "admin: true"),
        ("adminer", [topic_right(PUB, "T"), group_right("G")], True, "admin: true"),
        ("bounded", None, True, "admin: true"),
        ("bounded", [topic_right(SUB, "T")], True, "topicPerms: T=SUB"),
        ("bounded", [topic_right(PUB, "T")], False, "topic:T (topicPerms: T=SUB)"),
        ("bounded", [topic_right(SUB, "U")], False, "no defaultTopicPerm"),
        ("program", None, False, "Need admin permission"),
        ("a-reader", [topic_right(SUB, "T"), group_right("G")], True, "defaultTopicPerm: PUB|SUB"),
        ("a-reader", [topic_right(SUB, "SCHEDULE_TOPIC_XXXX")], False, "only an entry that names it counts"),
        ("a-reader", [topic_right(PUB | SUB, "rmq_sys_wheel_timer")], False, "only an entry that names it"),
        ("a-reader", [topic_right(SUB, "C_REPLY_TOPIC")], True, "topicPerms: C_REPLY_TOPIC=SUB"),
        ("a-reader", [topic_right(SUB, "D_REPLY_TOPIC")], False, "only an entry that names it counts"),
        ("a-reader", [topic_right(PUB, "D_REPLY_TOPIC")], True, "defaultTopicPerm: PUB|SUB"),
        ("a-reader", [group_right("CID_RMQ_SYS_TRANS")], False, "only an entry that names it counts"),
        ("a-reader", [topic_right(SUB, "%DLQ%closed")], False, "groupPerms: closed=DENY"),
        ("a-reader", [topic_right(SUB, "%DLQ%G")], True, "defaultGroupPerm: SUB"),
        ("a-reader", [topic_right(PUB, "%DLQ%G")], False, "defaultGroupPerm: SUB"),
        ("program", [topic_right(SUB, "%DLQ%closed")], True, "topicPerms: %DLQ%closed=SUB"),
        ("program", [topic_right(PUB, "Orders")], True, "topicPerms: Orders=PUB|SUB"),
        ("program", [topic_right(PUB, "In")], False, "topicPerms: In=SUB"),
        ("program", [topic_right(PUB | SUB, "In")], True, "topicPerms: In=SUB"),
        ("program", [topic_right(SUB, "Out")], False, "topicPerms: Out=PUB"),
        ("program", [topic_right(PUB | SUB, "No")], False, "topicPerms: No=DENY"),
        (
            "program",
            [group_right("any"), topic_right(SUB, "In")],
            True,
            "defaultGroupPerm: SUB; topicPerms: In",
        ),
        ("program", [group_right("closed")], False, "group:closed (groupPerms: closed=DENY)"),
        ("program", [topic_right(PUB, "%RETRY%closed")], False, "group:closed"),
        ("program", [topic_right(PUB, "%RETRY%any")], True, "defaultGroupPerm: SUB"),
        ("program", [group_right("%HANDOVER%closed")], False, "group:closed"),
    ],
)
def test_the_verdict_names_the_rule(
    policy: Policy, key: str | None, rights: Rights | None, allowed: bool, reason: str
) -> None:
    verdict = policy.decide(key, lambda: rights, "1.1.1.1", lambda _account: True)

    assert verdict.allowed == allowed
    assert reason in verdict.reason


def test_a_wrong_signature_comes_before_all_rights(policy: Policy) -> None:
    def never() -> Rights:
        raise AssertionError

    verdict = policy.decide("adminer", never, "1.1.1.1", lambda _account: False)

    assert verdict == (False, "Check signature failed for accessKey=adminer")


@pytest.mark.parametrize(
    ("key", "host", "reason"),
    [
        (None, "10.0.0.9", "globalWhiteRemoteAddresses: 10.0.0.*"),
        ("program", "192.168.0.1", "whiteRemoteAddress: 192.168.0.1"),
    ],
)
def test_white_listed_addresses_need_no_signature(
    policy: Policy, key: str | None, host: str, reason: str
) -> None:
    for _ in range(2):  # the second decision comes from the cache
        assert policy.decide(key, lambda: None, host, lambda _account: False) == (True, reason)
    assert not policy.decide("adminer", list, "192.168.0.1", lambda _account: False).allowed


def test_what_is_remembered_of_addresses_is_bounded(policy: Policy) -> None:
    for number in range(MAX_HOSTS + 10):
        policy.decide(None, list, f"h{number}", lambda _account: False)

    assert policy.remembered <= MAX_HOSTS


def frame(code: int, body: bytes = b"", **ext: str) -> Frame:
    return Frame.request(code, None, body, ext=ext)


SEND = {
    "a": "PG",
    "b": "T",
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "g": "1",
    "h": "0",
    "i": "",
    "j": "0",
    "k": "false",
    "m": "false",
}
LONG = {
    "producerGroup": "PG",
    "topic": "T",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "0",
    "sysFlag": "0",
    "bornTimestamp": "1",
    "flag": "0",
}
PULL = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "1",
    "sysFlag": "0",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subVersion": "0",
}
BEAT = HeartbeatData(
    client_id="c",
    consumer_data_set=[
        ConsumerData(
            group_name="G", subscription_data_set=[SubscriptionData(topic=t) for t in ("T", "%RETRY%G")]
        )
    ],
).encode()
LOCK = LockBatchBody(consumer_group="%HANDOVER%G", client_id="c", mq_set=[MessageQueue("T", "b", 0)]).encode()
G, T_SUB = Right(SUB, "G", True), Right(SUB, "T")


@pytest.mark.parametrize(
    ("request_frame", "rights"),
    [
        (frame(310, **SEND), [Right(PUB, "T")]),
        (frame(320, **SEND), [Right(PUB, "T")]),
        (frame(10, **LONG), [Right(PUB, "T")]),
        (frame(310, **{**SEND, "b": "%RETRY%G", "topic": "mine"}), [G]),
        (frame(11, **PULL), [T_SUB, G]),
        (frame(361, **PULL), [T_SUB, G]),
        (frame(36, group="G", originTopic="T"), [T_SUB, G]),
        (frame(34, BEAT), [G, T_SUB]),
        (frame(35, consumerGroup="G"), [G]),
        (frame(35, producerGroup="PG"), []),
        (frame(38, consumerGroup="G"), [G]),
        (frame(203, consumerGroup="G"), [G]),
        (frame(14, consumerGroup="G", topic="T"), [T_SUB, G]),
        (frame(15, consumerGroup="G", topic="T"), [T_SUB, G]),
        (frame(41, LOCK), [G, T_SUB]),
        (frame(30, topic="T"), [Right(PUB | SUB, "T")]),
        (frame(12, topic="T"), [T_SUB]),
        (frame(37), []),
        (frame(325, **SEND), None),
        (frame(325, **{**SEND, "b": "C_REPLY_TOPIC"}), [Right(PUB, "C_REPLY_TOPIC")]),
        (frame(324, **{**LONG, "topic": "C_REPLY_TOPIC"}), [Right(PUB, "C_REPLY_TOPIC")]),
        (frame(36), [group_right("")]),
        (frame(15), [topic_right(SUB, ""), group_right("")]),
        (frame(33), []),
        *((frame(code), None) for code in (17, 25, 26, 28, 50, 51, 52, 53, 200, 207, 215, 222, 301, 21001)),
        (frame(999_999), None),
    ],
)
def test_each_request_needs_these_rights(request_frame: Frame, rights: Rights | None) -> None:
    assert needed(request_frame) == rights


def test_a_heartbeat_with_too_many_names_is_refused_as_a_whole() -> None:
    wanted = [SubscriptionData(topic=f"T{number}") for number in range(10_001)]
    beat = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData(group_name="G", subscription_data_set=wanted)]
    )

    with pytest.raises(BodyError, match="more than 10000"):
        needed(frame(RequestCode.HEART_BEAT, beat.encode()))
