"""A valid request for every code that the servers handle; malformed requests are derived from these."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from tests.faults.malformed import HUGE, command

from cometmq.protocol.timers import RecallHandle


class Request(NamedTuple):
    """Ext fields and body of a request.

    `held`: the server may hold the response back, so tests do not wait for it.
    """

    ext: dict[str, Any]
    body: bytes = b""
    held: bool = False


BROKER = {
    "brokerName": "broker-a",
    "brokerAddr": "10.0.0.1:10911",
    "clusterName": "DefaultCluster",
    "haServerAddr": "10.0.0.1:10912",
    "brokerId": "0",
}
TOPIC_A = {"topicName": "TopicA", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicSysFlag": 0}
REGISTRATION = {
    "filterServerList": [],
    "topicConfigSerializeWrapper": {
        "dataVersion": {"counter": 1, "timestamp": 1},
        "topicConfigTable": {"TopicA": TOPIC_A},
    },
}
VERSION = b'{"counter":1,"timestamp":1}'
OF_BROKER = {"brokerName": "broker-a"}

NAMESRV_REQUESTS = {
    100: Request({"namespace": "n", "key": "k", "value": "v"}),
    101: Request({"namespace": "n", "key": "k"}),
    102: Request({"namespace": "n", "key": "k"}),
    103: Request(
        {**BROKER, "compressed": "false", "bodyCrc32": "0", "heartbeatTimeoutMillis": "1000"},
        json.dumps(REGISTRATION).encode(),
    ),
    104: Request(BROKER),
    105: Request({"topic": "TopicA", "acceptStandardJsonOnly": "true"}),
    106: Request({}),
    205: Request(OF_BROKER),
    206: Request({}),
    216: Request({"topic": "TopicA", "clusterName": "c"}),
    217: Request({"topic": "TopicA"}, b'{"queueDatas":[]}'),
    219: Request({"namespace": "n"}),
    224: Request({"cluster": "DefaultCluster"}),
    304: Request({}),
    311: Request({}),
    312: Request({}),
    313: Request({}),
    318: Request({}, b"orderMessageEnable=true\n"),
    319: Request({}),
    322: Request(BROKER, VERSION),
    327: Request(OF_BROKER),
    901: Request({"clusterName": "DefaultCluster", **OF_BROKER}),
    904: Request({**BROKER, "epoch": "1", "maxOffset": "5", "heartbeatTimeoutMills": "1000"}),
}

LITE_SUBSCRIPTION = {
    "action": "PARTIAL_ADD",
    "clientId": "c1",
    "group": "CG",
    "topic": "TopicA",
    "liteTopicSet": ["s1"],
    "version": 1,
}
QUEUE = {"topic": "TopicA", "queueId": "0"}
PROPERTIES = (
    "UNIQ_KEY\x01FD00000000000000000000000000000269E95FFD2B27641B65E70000\x02KEYS\x01k1 k2\x02TAGS\x01t\x02"
)
SEND = {
    "producerGroup": "PG",
    "topic": "TopicA",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "0",
    "sysFlag": "0",
    "bornTimestamp": "1795170712333",
    "flag": "0",
    "properties": PROPERTIES,
    "reconsumeTimes": "0",
    "unitMode": "false",
    "batch": "false",
}
SEND_V2 = dict(zip("abcdefghijkm", SEND.values(), strict=True))
PULL = {
    "consumerGroup": "CG",
    "topic": "TopicA",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "1",
    "subscription": "*",
    "subVersion": "1",
    "expressionType": "TAG",
}
HEARTBEAT = {
    "clientID": "10.0.0.9@1",
    "consumerDataSet": [
        {
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": "CG",
            "messageModel": "CLUSTERING",
            "subscriptionDataSet": [
                {
                    "classFilterMode": False,
                    "codeSet": [],
                    "expressionType": "TAG",
                    "subString": "*",
                    "subVersion": 1,
                    "tagsSet": [],
                    "topic": "TopicA",
                }
            ],
            "unitMode": False,
        }
    ],
    "producerDataSet": [{"groupName": "PG"}],
}
LOCK = {
    "clientId": "10.0.0.9@1",
    "consumerGroup": "CG",
    "mqSet": [{"brokerName": "broker-a", "queueId": 0, "topic": "TopicA"}],
}
GROUP = {"groupName": "CG", "consumeEnable": True, "retryQueueNums": 1, "retryMaxTimes": 16, "brokerId": 0}
CHECK = {
    "clientId": "10.0.0.9@1",
    "group": "CG",
    "subscriptionData": HEARTBEAT["consumerDataSet"][0]["subscriptionDataSet"][0],  # type: ignore[index]
}


def batch_item(body: bytes, properties: bytes = b"") -> bytes:
    """Build a message of a batch body."""
    size = 22 + len(body) + len(properties)
    return (
        struct.pack(">iiiii", size, 0, 0, 0, len(body))
        + body
        + struct.pack(">h", len(properties))
        + properties
    )


BATCH = batch_item(b"one") + batch_item(b"two", PROPERTIES.encode())

HANDLE = "0 1795170712333 60000 0 0 broker-a 0 0"
LEASED = {"consumerGroup": "CG", "topic": "TopicA", "queueId": "0", "extraInfo": HANDLE, "offset": "0"}
POP = {"consumerGroup": "CG", "topic": "TopicA", "queueId": "-1"}
BATCH_ACK = {
    "brokerName": "broker-a",
    "acks": [
        {
            "c": "CG", "t": "TopicA", "r": "0", "so": 0, "q": 0, "rq": 0, "pt": 1795170712333, "it": 60000,
            "b": "AQ==",
        }
    ],
}  # fmt: skip
MODE = {"topic": "TopicA", "consumerGroup": "CG", "mode": "POP", "popShareQueueNum": 0}
ASSIGNMENT = {
    "topic": "TopicA",
    "consumerGroup": "CG",
    "clientId": "10.0.0.9@1",
    "strategyName": "AVG",
    "messageModel": "CLUSTERING",
}

BROKER_REQUESTS = {
    10: Request(SEND, b"body"),
    11: Request(PULL, held=True),
    12: Request(
        {
            "topic": "TopicA",
            "key": "k1",
            "maxNum": "32",
            "beginTimestamp": "0",
            "endTimestamp": "9999999999999",
        }
    ),
    14: Request({"consumerGroup": "CG", **QUEUE}),
    15: Request({"consumerGroup": "CG", **QUEUE, "commitOffset": "0"}),
    17: Request(
        {
            "topic": "TopicA",
            "defaultTopic": "TBW102",
            "readQueueNums": "4",
            "writeQueueNums": "4",
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
    ),
    18: Request({}, json.dumps({"topicConfigList": [{"topicName": "TopicA", "perm": 6}]}).encode()),
    21: Request({}),
    25: Request({}, b"traceTopicEnable=false\n"),
    26: Request({}),
    28: Request({}),
    29: Request({**QUEUE, "timestamp": "1795170712333"}),
    30: Request(QUEUE),
    31: Request(QUEUE),
    32: Request(QUEUE),
    33: Request({"offset": "0"}),
    34: Request({}, json.dumps(HEARTBEAT).encode()),
    35: Request({"clientID": "10.0.0.9@1", "producerGroup": "PG", "consumerGroup": "CG"}),
    36: Request(
        {
            "offset": "0",
            "group": "CG",
            "delayLevel": "3",
            "originMsgId": "x",
            "originTopic": "TopicA",
            "unitMode": "false",
            "maxReconsumeTimes": "16",
        }
    ),
    37: Request(
        {
            "producerGroup": "PG",
            "tranStateTableOffset": "0",
            "commitLogOffset": "0",
            "commitOrRollback": "8",
            "fromTransactionCheck": "false",
            "msgId": "x",
            "transactionId": "x",
        }
    ),
    38: Request({"consumerGroup": "CG"}),
    41: Request({}, json.dumps(LOCK).encode()),
    42: Request({}, json.dumps(LOCK).encode()),
    43: Request({}),
    45: Request({}),
    46: Request({}, json.dumps(CHECK).encode()),
    50: Request({"accessKey": "somebody", "secretKey": "12345678", "topicPerms": "T=PUB", "admin": "false"}),
    51: Request({"accessKey": "somebody"}),
    52: Request({}),
    53: Request({"globalWhiteAddrs": "10.0.0.*", "aclFileFullPath": ""}),
    60: Request({}),
    61: Request({}),
    200: Request({}, json.dumps(GROUP).encode()),
    201: Request({}),
    202: Request({"topic": "TopicA"}),
    203: Request({"consumerGroup": "CG"}),
    204: Request({"producerGroup": "PG"}),
    207: Request({"groupName": "CG"}),
    208: Request({"consumerGroup": "CG", "topic": "TopicA"}),
    215: Request({"topic": "TopicB"}),
    222: Request({"topic": "TopicA", "group": "CG", "timestamp": "0", "isForce": "true"}),
    223: Request({"topic": "TopicA", "group": "CG", "clientAddr": ""}),
    225: Request({}, json.dumps({"groupConfigList": [GROUP]}).encode()),
    300: Request({"topic": "TopicA"}),
    301: Request({"filterServerAddr": "127.0.0.1:1", "token": "0"}),
    303: Request({"topic": "TopicA", "group": "CG"}),
    305: Request({}),
    306: Request({}),
    307: Request({"consumerGroup": "CG", "clientId": "10.0.0.9@1", "jstackEnable": "false"}),
    309: Request(
        {"consumerGroup": "CG", "clientId": "10.0.0.9@1", "msgId": "7F000001000051AF00000000000002CF"}
    ),
    310: Request(SEND_V2, b"body"),
    308: Request({"topic": "TopicA", "compareGroup": "CG", "filterGroups": "CG2,CG3"}),
    314: Request({"srcGroup": "CG", "destGroup": "CG2", "topic": "TopicA", "offline": "false"}),
    315: Request({"statsName": "TOPIC_PUT_NUMS", "statsKey": "TopicA"}),
    316: Request({}),
    317: Request({"isOrder": "false"}),
    320: Request({**SEND_V2, "m": "true"}, BATCH),
    321: Request({**QUEUE, "index": "0", "count": "10", "consumerGroup": "CG"}),
    323: Request({"msgId": "7F000001000051AF00000000000002CF"}),
    324: Request(SEND, b"reply"),
    325: Request(SEND_V2, b"reply"),
    328: Request({}),
    329: Request({}),
    343: Request({"group": "CG"}),
    345: Request({"group": "CG", "topic": "TopicA"}),
    351: Request({"topic": "TopicA"}),
    352: Request({"group": "CG"}),
    361: Request(PULL, held=True),
    370: Request(
        {
            "topic": "TopicA",
            "recallHandle": RecallHandle("TopicA", "broker-a", 9_999_999_999_999, "K").encode(),
            "producerGroup": "PG",
        }
    ),
    902: Request({"configPath": "/tmp/broker.conf"}),
    903: Request({"brokerClusterName": "DefaultCluster", "brokerName": "broker-a", "brokerId": "0"}),
    906: Request({}),
    907: Request({}),
    908: Request({"masterFlushOffset": "5"}),
    21001: Request({"topic": "TopicA", "queueId": "0", "before": "0", "execute": "false"}),
    21002: Request({"topic": "TopicA", "key": "k1", "maxMsgNums": "3", "afterMs": "0", "afterPosition": "0"}),
    21006: Request({}),
    21008: Request({"request": "1"}),
    21009: Request({"epoch": "", "since": "0", "subscriptions": "0"}),
    21010: Request({"parentTopic": "TopicA", "prefix": "s", "maxCount": "3"}),
    21007: Request({"user": "somebody", "action": "pub", "resource": "topic:TopicA"}),
    400: Request({}, json.dumps(ASSIGNMENT).encode()),
    401: Request({}, json.dumps(MODE).encode()),
    402: Request({}),
    200050: Request(
        {**POP, "maxMsgNums": "32", "invisibleTime": "60000", "pollTime": "1", "initMode": "0", "exp": "*"},
        held=True,
    ),
    200051: Request(LEASED),
    200052: Request({**POP, "maxMsgNums": "32"}),
    200053: Request({**LEASED, "invisibleTime": "60000"}),
    200054: Request({**POP, "pollTime": "1", "bornTime": "1795170712333"}, held=True),
    200055: Request(POP),
    200056: Request({}),
    200070: Request(
        {
            "clientId": "c1",
            "consumerGroup": "CG",
            "topic": "TopicA",
            "maxMsgNum": "32",
            "invisibleTime": "60000",
            "pollTime": "1",
            "bornTime": "0",
        }
    ),
    200071: Request({}, json.dumps({"subscriptionSet": [LITE_SUBSCRIPTION]}).encode()),
    200074: Request({}),
    200075: Request({"topic": "TopicA"}),
    200076: Request({"parentTopic": "TopicA", "liteTopic": "s1"}),
    200077: Request({"parentTopic": "TopicA", "group": "CG", "clientId": "c1", "maxCount": "3"}),
    200078: Request({"group": "CG", "liteTopic": "s1", "topK": "3"}),
    200079: Request({"group": "CG", "clientId": "c1"}),
    200151: Request({}, json.dumps(BATCH_ACK).encode()),
}


def hostile_broker_bodies() -> list[tuple[str, bytes]]:
    """Return bodies with wrong counts and lengths: batches, and properties that end anywhere."""
    batches = {
        "empty": b"",
        "cut in the size": BATCH[:3],
        "size 0": struct.pack(">i", 0) + BATCH[4:],
        "size -1": struct.pack(">i", -1) + BATCH[4:],
        "size huge": struct.pack(">i", HUGE) + BATCH[4:],
        "size too small": struct.pack(">i", 21) + BATCH[4:],
        "body length -1": BATCH[:16] + struct.pack(">i", -1) + BATCH[20:],
        "body length huge": BATCH[:16] + struct.pack(">i", HUGE) + BATCH[20:],
        "properties length -1": batch_item(b"one")[:-2] + struct.pack(">h", -1),
        "properties length huge": batch_item(b"one")[:-2] + struct.pack(">h", 32767),
        "trailing bytes": BATCH + b"xyz",
        "zeros": bytes(10_000),
        "a million of nothing": b"".join([batch_item(b"")] * 100_000),
        "a body of 5 MiB": batch_item(bytes(5 << 20)),
    }
    ext = {**SEND_V2, "m": "true"}
    cases = [(f"batch: {name}", command(320, body, ext=ext)) for name, body in batches.items()]
    cases += [(f"batch cut at {end}", command(320, BATCH[:end], ext=ext)) for end in range(1, len(BATCH))]
    for name, body in {"none": b"", "5 MiB": bytes(5 << 20), "15 MiB": bytes(15 << 20)}.items():
        cases.append((f"body: {name}", command(310, body, ext=SEND_V2)))
    for text in (
        "\x01",
        "\x02",
        "\x01\x02",
        "a\x01",
        "a\x01b",
        "\x02\x02\x02",
        "a\x01b\x01c\x02",
        "TAGS\x01" + "t" * (1 << 20),
        "KEYS\x01" + "k " * (1 << 20),
        "UNIQ_KEY\x01" + "u" * (1 << 20) + "\x02",
        "UNIQ_KEY\x01u\x02" * 100_000,
        "x" * 40_000,
        "\x01" * 9999,
    ):
        cases.append((f"properties {text[:20]!r}", command(310, b"body", ext={**SEND_V2, "i": text})))
    for count in (1, 10_000):
        body = batch_item(b"", b"KEYS\x01k") * count
        for length in (30_000, 1 << 20):
            ext_of_batch = {**ext, "i": "A\x01" + "x" * length}
            cases.append((f"{count} with {length} shared", command(320, body, ext=ext_of_batch)))
    for name in ("x/../Good", "../../evil", "n\0ul", "t" * 70_000, "a\x02REAL_TOPIC\x01b"):
        cases.append((f"send to {name[:20]!r}", command(310, b"body", ext={**SEND_V2, "b": name})))
        back = {**BROKER_REQUESTS[36].ext, "group": name}
        cases.append((f"send back of {name[:20]!r}", command(36, ext=back)))
    pull = {**PULL, "subscription": "t" * (1 << 20)}
    cases.append(("a long subscription", command(11, ext=pull)))
    for text in ("(" * 8_000, "NOT " * 2_000 + "a", "a = 1 OR " * 900 + "a", "a" * (1 << 20), "'" * 8_191):
        pull = {**PULL, "subscription": text, "expressionType": "SQL92"}
        cases.append((f"SQL92 {text[:10]!r}", command(11, ext=pull)))
    for level in ("-1", "19", "x", "99999999999999999999"):
        for name in ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"):
            properties = f"{name}\x01{level}\x02"
            cases.append((f"{name} {level}", command(310, b"body", ext={**SEND_V2, "i": properties})))
    return cases
