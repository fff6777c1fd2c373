"""JSON bodies: those of Apache's programs are parsed and written back unchanged; foreign, hostile forms."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden.frames import load, recordings
from tests.protocol.cutting import mutations, never_escapes, truncations
from tests.protocol.frames import frames_of

from cometmq.errors import BodyError, MessageIllegal
from cometmq.message import MessageQueue
from cometmq.protocol import bodies as b
from cometmq.protocol.batch import BatchItem, count_items, encode_batch, iter_batch
from cometmq.protocol.lenient import ObjectKey, loads

# Body classes by (request code, is response).
RECORDED: dict[tuple[int, bool], type[b.Body]] = {
    (28, True): b.KVTable,
    (34, False): b.HeartbeatData,
    (38, True): b.ConsumerList,
    (41, False): b.LockBatchBody,
    (41, True): b.LockBatchResult,
    (42, False): b.LockBatchBody,
    (103, False): b.RegisterBrokerBody,
    (105, True): b.TopicRouteData,
    (106, True): b.ClusterInfo,
    (200, False): b.SubscriptionGroupConfig,
    (202, True): b.TopicStatsTable,
    (203, True): b.ConsumerConnection,
    (204, True): b.ProducerConnection,
    (206, True): b.TopicList,
    (208, True): b.ConsumeStats,
    (222, True): b.ResetOffsetBody,
    (300, True): b.GroupList,
    (307, True): b.ConsumerRunningInfo,
    (315, True): b.BrokerStatsData,
    (317, True): b.BrokerConsumeStats,
    (351, True): b.TopicConfig,
}
# Fields that only 5.x writes and CometMQ does not use: ignored when read and not written back.
DROPPED = {
    "mappingDataVersion",
    "topicQueueMappingDetailMap",
    "topicQueueMappingInfoMap",
    "totalInflightDiff",
    "userConsumerInfo",
}
QUEUE = MessageQueue("T", "broker-a", 3)
QUEUE_KEY = b'{"brokerName":"broker-a","queueId":3,"topic":"T"}'


def recorded(path: Path) -> list[tuple[type[b.Body], bytes]]:
    """Return (class, body) of every JSON body in a recording."""
    found = []
    for row in load(path):
        (frame,) = frames_of(row.data)
        body = bytes(frame.body)
        if body[:1] == b"{":
            found.append((RECORDED[row.request, row.response], body))
    return found


def comparable(value: Any) -> Any:
    """Return the value without the dropped fields."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in DROPPED}
    return [comparable(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.name.removesuffix(".json.gz"))
class TestRecordings:
    def test_every_body_is_written_back_as_it_was(self, path: Path) -> None:
        found = recorded(path)

        assert len(found) >= 14
        for cls, body in found:
            assert comparable(loads(cls.decode(body).encode())) == comparable(loads(body)), body

    def test_bytes_with_integers_and_queues_as_keys_are_fastjsons(self, path: Path) -> None:
        for cls, body in recorded(path):
            if cls in (b.ClusterInfo, b.LockBatchBody, b.LockBatchResult, b.ResetOffsetBody):
                written = cls.decode(body).encode()
                # Java writes map entries in hash order and we sort them, but each entry is the same.
                assert sorted(written.split(b"},")) == sorted(body.split(b"},")) or len(written) == len(body)

    def test_cut_bodies_are_refused(self, path: Path) -> None:
        for cls in set(RECORDED.values()):
            body = min((body for found, body in recorded(path) if found is cls), key=len, default=b"")
            if 0 < len(body) < 700:  # longer bodies would cost seconds
                assert never_escapes(cls.decode, truncations(body)) == (0, len(body))
                never_escapes(cls.decode, mutations(body, step=11))


class TestHeartbeats:
    def test_ordinals_of_the_cpp_client(self) -> None:
        data = b.HeartbeatData.decode(
            b'{"clientID":"c@1","consumerDataSet":[{"consumeFromWhere":4,"consumeType":1,"groupName":"G",'
            b'"messageModel":0,"subscriptionDataSet":[{"classFilterMode":false,"codeSet":["-1236860927"],'
            b'"expressionType":"TAG","subString":"aaaaaaa","subVersion":"17","tagsSet":["aaaaaaa"],"topic":"T"}]}],'
            b'"producerDataSet":[]}\n'
        )

        (consumer,) = data.consumer_data_set
        assert consumer.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
        assert consumer.consume_type == "CONSUME_PASSIVELY"
        assert consumer.message_model == "BROADCASTING"
        assert consumer.subscription_data_set[0].code_set == [-1236860927]
        assert consumer.subscription_data_set[0].sub_version == 17

    def test_an_ordinal_that_names_nothing(self) -> None:
        with pytest.raises(BodyError, match="ordinal 9"):
            b.HeartbeatData.decode(b'{"consumerDataSet":[{"groupName":"G","consumeType":9}]}')

    @pytest.mark.parametrize(
        "body", [b"{}", b'{"consumerDataSet":null,"producerDataSet":null}', b'{"clientID":"","x":{"y":[1]}}']
    )
    def test_missing_sets_are_empty(self, body: bytes) -> None:
        assert b.HeartbeatData.decode(body) == b.HeartbeatData()

    def test_no_body_is_an_error(self) -> None:
        with pytest.raises(BodyError, match="no body"):
            b.HeartbeatData.decode(b"")


class TestRoutes:
    route = b.TopicRouteData(
        [b.QueueData("broker-a", 4, 4)],
        [b.BrokerData("C", "broker-a", {1: "10.0.0.1:10921", 0: "10.0.0.1:10911"})],
    )

    def test_the_standard_form(self) -> None:
        assert self.route.encode() == (
            b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.1:10921"},"brokerName":"broker-a",'
            b'"cluster":"C"}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
            b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
        )

    def test_the_form_of_old_clients_has_bare_integers(self) -> None:
        old = self.route.encode(standard=False)

        assert b'"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.1:10921"}' in old
        assert b.TopicRouteData.decode(old) == b.TopicRouteData.decode(self.route.encode()) == self.route

    def test_text_beyond_ascii_is_escaped_in_the_standard_form_only(self) -> None:
        route = b.TopicRouteData(order_topic_conf="é\U0001f600")

        assert b'"\\u00e9\\ud83d\\ude00"' in route.encode()
        assert "é\U0001f600".encode() in route.encode(standard=False)
        assert b.TopicRouteData.decode(route.encode()) == route

    def test_the_old_misspelling_of_the_system_flag(self) -> None:
        body = b"{'queueDatas':[{brokerName:'b',topicSynFlag:2,perm:6,readQueueNums:1,writeQueueNums:1}]}"

        assert b.TopicRouteData.decode(body).queue_datas == [b.QueueData("b", 1, 1, 6, 2)]

    def test_empty_collections_are_written(self) -> None:
        assert b.TopicRouteData().encode() == b'{"brokerDatas":[],"filterServerTable":{},"queueDatas":[]}'
        assert b.ClusterInfo().encode() == b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
        assert b.ConsumerConnection().encode() == b'{"connectionSet":[],"subscriptionTable":{}}'

    def test_a_member_group_has_bare_integers(self) -> None:
        group = b.BrokerMemberGroup(b.BrokerData("C", "b", {0: "a:1"}))

        assert group.encode() == (
            b'{"brokerMemberGroup":{"brokerAddrs":{0:"a:1"},"brokerName":"b","cluster":"C"}}'
        )


class TestRegistration:
    topics = {  # noqa: RUF012
        "A": b.TopicConfig("A", 4, 4, 6, order=True),
        "B": b.TopicConfig("B", 1, 2, 4, "MULTI_TAG", 1),
    }
    version = b.DataVersion(timestamp=1795170712333, counter=7)

    def test_plain(self) -> None:
        sent = b.RegisterBrokerBody.of(self.topics, self.version, ["f:1"])
        got = b.RegisterBrokerBody.decode(sent.encode())

        assert (got.topics, got.data_version, got.filter_server_list) == (self.topics, self.version, ["f:1"])

    def test_an_empty_data_version_is_the_first_one(self) -> None:
        """Apache's brokers read such files, which people write by hand."""
        got = b.TopicConfigTable.decode(b'{"topicConfigTable":{},"dataVersion":{}}')
        assert got.data_version == b.DataVersion(timestamp=0, counter=0)

    def test_compressed_has_five_words_a_topic(self) -> None:
        data = b.RegisterBrokerBody.of(self.topics, self.version).encode(compressed=True)
        plain = zlib.decompress(data)
        got = b.RegisterBrokerBody.decode(data, compressed=True)

        assert b"\0\0\0\x12A 4 4 6 SINGLE_TAG\0\0\0\x11B 1 2 4 MULTI_TAG" in plain
        assert got.data_version == self.version
        assert got.topics["B"] == b.TopicConfig("B", 1, 2, 4, "MULTI_TAG")
        for cut in truncations(data):
            with pytest.raises(BodyError):
                b.RegisterBrokerBody.decode(cut, compressed=True)
        for cut in truncations(plain[: plain.index(b"MULTI_TAG") + 9]):
            with pytest.raises(BodyError):
                b.RegisterBrokerBody.decode(zlib.compress(cut), compressed=True)

    def test_compressed_by_5x_with_attributes_and_mappings(self) -> None:
        topic = b'T 4 4 6 SINGLE_TAG {"message.type":"NORMAL"}'
        version = b'{"counter":1,"stateVersion":2,"timestamp":3}'
        parts = [version, None, topic, b"[]", None]
        plain = (
            b"".join(b"\0\0\0\x01" if part is None else len(part).to_bytes(4, "big") + part for part in parts)
            + (2).to_bytes(4, "big")
            + b"{}"
        )

        got = b.RegisterBrokerBody.decode(zlib.compress(plain), compressed=True)

        assert got.topics["T"].attributes == {"message.type": "NORMAL"}
        assert got.data_version.state_version == 2

    @pytest.mark.parametrize(
        ("plain", "words"),
        [
            (b"\xff\xff\xff\xff", "data version"),
            (b"\x7f\xff\xff\xff{}", "data version"),
            (b'\0\0\0\x1b{"counter":1,"timestamp":3}\xff\xff\xff\xff', "number of topics: -1"),
            (b'\0\0\0\x1b{"counter":1,"timestamp":3}\x7f\xff\xff\xff', "number of topics: 2147483647"),
            (b'\0\0\0\x1b{"counter":1,"timestamp":3}\0\0\0\x01\0\0\0\x03T 4', "2 words"),
            (b'\0\0\0\x1b{"counter":1,"timestamp":3}\0\0\0\x01\0\0\0\x12T x 4 6 SINGLE_TAG', "no number"),
        ],
    )
    def test_lies_in_a_compressed_body(self, plain: bytes, words: str) -> None:
        with pytest.raises(BodyError, match=words):
            b.RegisterBrokerBody.decode(zlib.compress(plain), compressed=True)

    def test_a_compressed_bomb(self) -> None:
        with pytest.raises(BodyError, match="larger than"):
            b.RegisterBrokerBody.decode(zlib.compress(bytes(80 << 20), 9), compressed=True)

    def test_a_broker_before_3_0_11_sends_the_table_alone(self) -> None:
        body = b.TopicConfigTable(self.topics, self.version).encode()

        assert b.RegisterBrokerBody.decode(body, version=36).topics == self.topics
        assert b.RegisterBrokerBody.decode(body, version=36).filter_server_list is None
        assert b.RegisterBrokerBody.decode(body, version=37).topics == {}


class TestQueueKeys:
    """Queues as keys, which Java's map types expect (docs/reference/remoting.md, JSON dialect)."""

    @pytest.mark.parametrize(
        ("body", "written"),
        [
            (b.ResetOffsetBody({QUEUE: 5}), b'{"offsetTable":{%b:5}}'),
            (
                b.GetConsumerStatusBody({QUEUE: 5}, {"c": {QUEUE: 6}}),
                b'{"consumerTable":{"c":{%b:6}},"messageQueueTable":{%b:5}}',
            ),
            (
                b.TopicStatsTable({QUEUE: b.TopicOffset(1, 2, 3)}),
                b'{"offsetTable":{%b:{"lastUpdateTimestamp":3,"maxOffset":2,"minOffset":1}}}',
            ),
            (
                b.ConsumeStats({QUEUE: b.OffsetWrapper(1, 2, 3)}, 0.5),
                b'{"consumeTps":0.5,"offsetTable":{%b:{"brokerOffset":1,"consumerOffset":2,"lastTimestamp":3}}}',
            ),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_written_and_read(self, body: b.Body, written: bytes) -> None:
        expected = written.replace(b"%b", QUEUE_KEY)

        assert body.encode() == expected
        assert type(body).decode(expected) == body
        shuffled = expected.replace(QUEUE_KEY, b'{ \'topic\':"T", brokerName : \'broker-a\',\n"queueId":"3"}')
        assert type(body).decode(shuffled) == body

    def test_the_list_form_of_cpp(self) -> None:
        body = b.ResetOffsetBody({QUEUE: 5})

        assert body.encode_for_cpp() == (
            b'{"offsetTable":[{"brokerName":"broker-a","offset":5,"queueId":3,"topic":"T"}]}'
        )
        assert b.ResetOffsetBody.decode(body.encode_for_cpp()) == body

    @pytest.mark.parametrize(
        "data",
        [
            b'{"offsetTable":{{"topic":"T"}:5}}',
            b'{"offsetTable":{"T":5}}',
            b'{"offsetTable":{{"brokerName":"b","queueId":"x","topic":"T"}:5}}',
            b'{"offsetTable":[{"topic":"T"}]}',
            b'{"offsetTable":[{"brokerName":"b","queueId":[],"topic":"T","offset":1}]}',
            b'{"offsetTable":7}',
            b"[]",
            b"{",
        ],
    )
    def test_what_is_no_table_of_queues(self, data: bytes) -> None:
        with pytest.raises(BodyError, match="ResetOffsetBody"):
            b.ResetOffsetBody.decode(data)

    def test_the_go_clients_running_info(self) -> None:
        data = (
            b'{"jstack":"","properties":{"PROP_CLIENT_VERSION":"V1","x":true,"n":1},"subscriptionSet":[],'
            b'"mqTable":{%b:{"commitOffset":3,"dropped":true,"cachedMsgCount":"4"}},"statusTable":{}}'
            % QUEUE_KEY
        )
        info = b.ConsumerRunningInfo.decode(data)

        assert info.properties == {"PROP_CLIENT_VERSION": "V1", "x": "true", "n": "1"}
        assert info.mq_table[QUEUE].droped
        assert info.mq_table[QUEUE].cached_msg_count == 4


class TestTables:
    def test_offsets_have_bare_integers(self) -> None:
        table = b.ConsumerOffsetTable({"TopicA@CG1": {1: 3, 0: 2}})

        assert table.encode() == b'{"offsetTable":{"TopicA@CG1":{0:2,1:3}}}'
        assert b.ConsumerOffsetTable.decode(table.encode()) == table
        assert b.DelayOffsetTable({2: 4, 3: 8}).encode() == b'{"offsetTable":{2:4,3:8}}'

    def test_the_file_as_4_9_writes_it(self) -> None:
        text = (
            b'{\n\t"offsetTable":{\n\t\t"%RETRY%g1@g1":{0:0\n\t\t},\n\t\t"T@g1":{0:250,1:251\n\t\t}\n\t}\n}'
        )

        table = b.ConsumerOffsetTable.decode(text).offset_table
        assert table == {"%RETRY%g1@g1": {0: 0}, "T@g1": {0: 250, 1: 251}}
        assert loads(text) == {"offsetTable": {"%RETRY%g1@g1": {"0": 0}, "T@g1": {"0": 250, "1": 251}}}

    def test_a_group_written_as_4_9_writes_it(self) -> None:
        assert b.SubscriptionGroupConfig("G").encode() == (
            b'{"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,'
            b'"groupName":"G","notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,'
            b'"whichBrokerWhenConsumeSlowly":1}'
        )

    def test_defaults_are_not_shared(self) -> None:
        first, second = b.TopicList(), b.TopicList()
        first.topic_list.append("x")

        assert second.topic_list == []

    @pytest.mark.parametrize(
        ("cls", "data", "field"),
        [
            (b.TopicConfig, b'{"perm":"six"}', "perm"),
            (b.ConsumerList, b'{"consumerIdList":[1]}', "consumerIdList"),
            (b.KVTable, b'{"table":[]}', "table"),
            (b.SubscriptionGroupConfig, b"{}", "groupName"),
        ],
    )
    def test_wrong_types_are_named(self, cls: type[b.Body], data: bytes, field: str) -> None:
        with pytest.raises(BodyError, match=f"{cls.__name__}.*{field}"):
            cls.decode(data)

    def test_servers_do_not_spend_seconds_on_a_long_body_of_the_other_dialect(self) -> None:
        ids = b"a" * (1 << 20)

        assert b.ConsumerList.decode(b'{"consumerIdList":["%b"]}' % ids).consumer_id_list == [ids.decode()]
        with pytest.raises(BodyError, match="not standard JSON"):
            b.ConsumerList.decode(b"{'consumerIdList':['%b']}" % ids)
        info = b.ClusterInfo.decode(b"{'clusterAddrTable':{'%b':[]}}" % ids)
        assert info.cluster_addr_table == {ids.decode(): []}
        with pytest.raises(BodyError, match="too many values"):
            b.ConsumerList.decode(b"{'consumerIdList':[" + b"0," * 70_000 + b"]}")

    @pytest.mark.parametrize("cls", sorted(set(RECORDED.values()), key=lambda cls: cls.__name__))
    def test_hostile_text(self, cls: type[b.Body]) -> None:
        for data in (
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"{{" * 100_000,
            b"\xff\xfe",
            b'{"a":1e999}',
            b"nul",
            b"0",
        ):
            with pytest.raises(BodyError):
                cls.decode(
                    data if data != b'{"a":1e999}' else b'{"topicList":1e999,"offsetTable":1e999,"table":1}x'
                )


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.builds(MessageQueue, st.text(max_size=8), st.text(max_size=8), st.integers(-5, 5)),
        st.integers(-(2**63), 2**63 - 1),
        max_size=5,
    )
)
def test_any_queues_survive_as_keys(table: dict[MessageQueue, int]) -> None:
    assert b.ResetOffsetBody.decode(b.ResetOffsetBody(table).encode()).offset_table == table


def test_object_keys_compare_by_content() -> None:
    (first,) = loads(b"{{a:1,b:[2]}:0}")
    (second,) = loads(b'{{"b":[2],"a":1}:0}')

    assert isinstance(first, ObjectKey)
    assert first == second
    assert first.as_dict() == {"a": 1, "b": (2,)}
    assert json.loads(json.dumps(first.as_dict())) == {"a": 1, "b": [2]}


def test_what_only_our_slaves_know_has_no_integers_as_keys() -> None:
    """5.5's slave parses its own fields in any form, but fails at unquoted keys in unknown fields."""
    body = b.ConsumerOffsetTable(offset_table={"T@G": {0: 1}}, min_offsets={"T": [(1, 5)]})
    assert body.encode() == b'{"minOffsets":{"T":[[1,5]]},"offsetTable":{"T@G":{0:1}}}'
    assert b.ConsumerOffsetTable.decode(body.encode()) == body


# -- The body of a batch send: concatenated items


int32 = st.integers(-(2**31), 2**31 - 1)
items = st.tuples(int32, st.binary(max_size=60), st.binary(max_size=60))


@given(st.lists(items, max_size=5))
def test_batches(sent: list[tuple[int, bytes, bytes]]) -> None:
    data = encode_batch(sent)

    assert list(iter_batch(data)) == [BatchItem(*item) for item in sent]
    assert [tuple(map(bytes, item[1:])) for item in iter_batch(memoryview(data))] == [
        item[1:] for item in sent
    ]


def test_a_batch_item_byte_for_byte() -> None:
    data = encode_batch([(5, b"b1", b"TAGS\x01TagA")])

    assert (
        data.hex()
        == "00000021 00000000 00000000 00000005 00000002 6231 0009 54414753 01 54616741".replace(" ", "")
    )


def test_magic_and_crc_of_items_are_ignored() -> None:
    data = bytearray(encode_batch([(5, b"b1", b"")]))
    data[4:12] = b"\xda\xa3\x20\xa7\x12\x34\x56\x78"

    assert list(iter_batch(bytes(data))) == [BatchItem(5, b"b1", b"")]


def test_a_cut_batch_is_refused_unless_cut_between_items() -> None:
    first, second = encode_batch([(1, b"one", b"p")]), encode_batch([(2, b"two", b"q")])
    whole = {b"", first}

    for data in truncations(first + second):
        if data in whole:
            list(iter_batch(data))
        else:
            with pytest.raises(BodyError, match=r"item [01]"):
                list(iter_batch(data))
    never_escapes(lambda data: list(iter_batch(data)), mutations(first + second))


def test_a_batch_item_with_properties_beyond_16_bits() -> None:
    with pytest.raises(MessageIllegal, match="32768"):
        encode_batch([(0, b"", bytes(32_768))])


@pytest.mark.parametrize(
    ("body", "number"),
    [(b"", 1), (b"\0\0", 1), (bytes(9), 1), (b"\xff" * 66, 3), (bytes(44), 2), (bytes(100_000), 4546)],
)
def test_the_messages_of_a_damaged_batch_are_counted_within_bounds(body, number):
    assert count_items(body) == number


def test_the_messages_of_a_batch_are_counted():
    assert count_items(encode_batch((0, bytes(size), b"") for size in range(50))) == 50
