"""The fast path of a send has the same effect as the general path, or leaves the frame to it."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.kit.brokers import records, refused

from cometmq.broker.send import send_templates
from cometmq.errors import CometError, CommandError
from cometmq.protocol.codes import TRANS_HALF_TOPIC, ResponseCode
from cometmq.protocol.frame import decode_frame
from cometmq.store import MessageStore
from cometmq.store.base.refusal import Flag

HEADER = (
    '{"code":310,"extFields":{"a":"PG","b":"Orders","c":"TBW102","d":"4","e":"2","f":"0","g":"%d","h":"7",'
    '"i":"TAGS\\u0001A\\u0002UNIQ_KEY\\u0001%s\\u0002WAIT\\u0001true","j":"3","k":"false","m":"false",'
    '"n":"broker-a"},"flag":0,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":409}'
)
BORN, UNIQUE = 1_795_272_530_142, "C000020278435FFD2B276A2CF0DE0003"
BODY = b"a body"

Stored = tuple[Any, ...]


class Ways:
    """Both send paths of a running broker; the data for the store is recorded instead of stored."""

    def __init__(self, sends: Any, store: MessageStore) -> None:
        self.sends, self.templates, self.queues = sends, sends.templates, store.queues
        self.connection = SimpleNamespace(peer_host=b"\x7f\0\0\1\0\0\xc3P", peer="127.0.0.1:50000")
        self.pending = store.appender.pending
        self.keys: Any = None
        for queue_id in range(4):  # the queues that earlier sends would have created
            store.queues.get_or_make("Orders", queue_id)
        store.queues.get_or_make(TRANS_HALF_TOPIC, 0)

    def _recorded(self) -> Stored:
        recorded: list[Any] = []
        for message in self.pending:
            recorded += (
                message.sender, message.queue.topic, message.queue.queue_id, bytes(message.body),
                message.properties, message.born_timestamp_ms, message.born_host, message.traits,
            )  # fmt: skip
            self.keys = message.keys
        self.pending.clear()
        return tuple(recorded)

    def long(self, header: bytes) -> Stored:
        self.sends.send_message(self.connection, decode_frame(struct.pack(">I", len(header)) + header + BODY))
        return self._recorded()

    def short(self, header: bytes) -> Stored | None:
        buffer = memoryview(b"before" + header + BODY + b"behind")
        end = 6 + len(header)
        taken = self.templates.send(self.connection, buffer, 6, end, end + len(BODY))
        recorded = self._recorded()
        assert taken == bool(recorded)
        return recorded or None

    def learn(self, template: str) -> None:
        for number in range(2):
            self.long(filled(template, BORN + number, f"{number:032X}", 1000 + number))


def filled(template: str = HEADER, born: int = BORN, unique: str = UNIQUE, opaque: int = 1234) -> bytes:
    return (template % (born, unique, opaque)).encode()


@pytest.fixture
async def ways(cluster, peer) -> Ways:
    await peer.send()  # creates the topic
    return Ways(cluster.broker.parts.sends, cluster.broker.parts.store)


HALF = HEADER.replace('"f":"0"', '"f":"4"').replace(
    "TAGS", "TRAN_MSG\\u0001true\\u0002PGROUP\\u0001PG\\u0002TAGS"
)


@pytest.mark.parametrize(
    "template",
    [
        HEADER,
        HALF,
        HALF.replace("TAGS", "TRANSACTION_CHECK_TIMES\\u00013\\u0002REAL_TOPIC\\u0001Other\\u0002TAGS"),
        HALF.replace("TAGS\\u0001A", "KEYS\\u0001k1 k2"),
        HALF.replace('"version":409', '"version":513'),
        HEADER.replace('"f":"0"', '"f":"9"'),
        HEADER.replace("TAGS\\u0001A\\u0002", ""),
        HEADER.replace("WAIT\\u0001true", "WAIT\\u0001false"),
        HEADER.replace("\\u0002WAIT\\u0001true", ""),
        HEADER.replace("TAGS\\u0001A", "KEYS\\u0001k1 k2"),
        HEADER.replace("TAGS\\u0001A", "mine\\u0001ünï\\u0002CLUSTER\\u0001Elsewhere"),
        HEADER.replace("WAIT\\u0001true", "UNIQ_KEY\\u0001other"),
        HEADER.replace('"j":"3",', ""),
        HEADER.replace('"c":"TBW102"', '"c": "TBW102"'),
    ],
)
async def test_a_header_that_has_come_twice_goes_the_short_way_to_the_same_end(ways, template):
    assert ways.short(filled(template)) is None
    ways.learn(template)
    for born, unique, opaque in ((BORN + 9, UNIQUE, 1234), (BORN, "z" * 32, 9999)):
        header = filled(template, born, unique, opaque)
        short = ways.short(header)
        short_keys = ways.keys
        assert short == ways.long(header)
        assert short_keys in (None, unique.encode())
        assert (short_keys is None) == ("KEYS" in template or "other" in template)


@pytest.mark.parametrize(
    "template",
    [
        HEADER.replace('"flag":0,"l', '"flag":2,"l'),  # oneway
        HEADER.replace('"m":"false"', '"m":"true"'),
        HEADER.replace('"e":"2"', '"e":"-1"'),
        HEADER.replace("TAGS\\u0001A", "DELAY\\u00013"),
        HALF.replace("TAGS\\u0001A", "DELAY\\u00013"),
        HALF.replace("PGROUP", "GROUP"),
        HALF.replace('"version":409', '"version":513').replace("WAIT\\u0001true", "UNIQ_KEY\\u0001other"),
        HALF.replace('"b":"Orders"', '"b":"%%RETRY%%PG"'),
        HEADER.replace("UNIQ_KEY", "UNIQUE_KEY"),
        HEADER.replace("%s\\u0002WAIT\\u0001true", "%s\\u0001\\u0002WAIT\\u0001true"),
        HEADER.replace('"h":"7"', '"g":"17","h":"7"'),
        HEADER.replace('"version":409', '"version":409,"opaque":5'),
        HEADER.replace("%s", "%s\\u0041"),
    ],
)
async def test_what_is_no_plain_send_is_never_learnt(ways, template):
    for number in range(4):
        header = filled(template, BORN + number, f"{number:032X}", 1000 + number)
        with suppress(CometError):
            ways.long(header)
        assert ways.short(header) is None


EDITS = st.tuples(
    st.integers(0, 400),
    st.integers(0, 4),
    st.sampled_from(
        ["", "0", "7", "-", "+", " ", "_", ".", '"', "\\", "\\u0001", "\x01", "}", "e5", "Z", "DELAY", "٣"]
    ).map(str.encode),
)


@given(st.lists(EDITS, min_size=1, max_size=3), st.sampled_from([1, 999, 1234, 9_999, 2**31 - 1, 2**31]))
@example([(113, 13, b"0000000000000")], 1234)
@example([], 0)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_damaged_header_never_means_something_else_on_the_short_way(ways, edits, opaque):
    if not len(ways.templates):
        for length in (1, 3, 4, 10):
            for number in range(2):
                ways.long(filled(HEADER, BORN + number, f"{number:032X}", 10 ** (length - 1) + number))
    header = filled(opaque=opaque)
    for at, gone, instead in edits:
        header = header[:at] + instead + header[at + gone :]
    short = ways.short(header)
    if short is not None:
        assert short == ways.long(header)


async def test_every_value_of_digits_and_letters_goes_the_short_way(ways):
    ways.learn(HEADER)
    for header in (filled(), filled(born=9_999_999_999_999), filled(unique="a" * 32), filled(opaque=9999)):
        assert ways.short(header) is not None
    for header in (
        filled().replace(b"1234,", b"0123,"),
        filled().replace(b"%d" % BORN, b"0795272530142"),
        filled().replace(b"%d" % BORN, b"1_9_2_5_0_4_2"),
        filled(unique="-" * 32),
    ):
        assert ways.short(header) is None


async def test_headers_that_differ_in_a_tag_are_known_beside_each_other(ways):
    templates = [HEADER.replace("TAGS\\u0001A", f"TAGS\\u0001{tag}") for tag in "ABC"]
    for template in templates:
        ways.learn(template)
    for template in templates:
        assert ways.short(filled(template)) == ways.long(filled(template))


async def test_senders_with_other_properties_each_time_are_let_be(ways, monkeypatch):
    monkeypatch.setattr(send_templates, "PAUSE_HEADERS", 2_000)
    looked: list[bytes] = []
    parts = send_templates.PARTS
    fullmatch = SimpleNamespace(fullmatch=lambda text: (looked.append(text), parts.fullmatch(text))[1])
    monkeypatch.setattr(send_templates, "PARTS", fullmatch)
    for number in range(send_templates.MAX_MISSES + 1_000):
        ways.long(filled(HEADER.replace("TAGS\\u0001A", f"KEYS\\u0001k{number:05d}")))
    assert len(looked) == send_templates.MAX_MISSES - 1  # the message that created the topic was first
    ways.learn(HEADER)
    assert ways.short(filled()) is None
    for _ in range(1_000):
        ways.long(filled())
    assert ways.short(filled()) is not None


@pytest.mark.parametrize(("limit", "room"), [("MAX_TEMPLATES", 3), ("MAX_BYTES", 3 * len(filled()))])
async def test_no_more_headers_are_kept_than_there_is_room_for(ways, monkeypatch, limit, room):
    monkeypatch.setattr(send_templates, limit, room)
    templates = [HEADER.replace('"e":"2"', f'"e":"0","l":"{number}"') for number in range(5)]
    for template in templates:
        ways.learn(template)
        ways.learn(template)  # relearning a template needs no additional room
    assert len(ways.templates) == 2
    assert [ways.short(filled(template)) is not None for template in templates] == [False] * 3 + [True] * 2


async def test_headers_of_one_length_that_are_cut_elsewhere_are_known_beside_each_other(ways, monkeypatch):
    monkeypatch.setattr(send_templates, "MAX_CUTS", 2)
    templates = [HEADER.replace("TAGS\\u0001A", f"TAGS\\u0001{'A' * length}") for length in (1, 2, 3)]
    numbers = (99_991, 9_991, 991)
    for template, number in zip(templates, numbers, strict=True):
        for one in range(2):
            ways.long(filled(template, BORN + one, f"{one:032X}", number + one))
    headers = [filled(template, opaque=number) for template, number in zip(templates, numbers, strict=True)]
    found = [ways.short(header) for header in headers]
    assert found == [*(ways.long(header) for header in headers[:2]), None]


async def test_headers_whose_first_parts_alone_differ_in_meaning_are_known_beside_each_other(ways):
    templates = [
        HEADER.replace('"f":"0"', f'"f":"{flag}"').replace('"e":"2"', f'"e":"{queue}"')
        for flag in (0, 1)
        for queue in (1, 2)
    ]
    for template in templates:
        ways.learn(template)
    assert len(ways.templates) == 4
    for template in templates:
        assert ways.short(filled(template)) == ways.long(filled(template))


@pytest.mark.parametrize(
    "piece",
    [b'UNIQ_KEY\\u00011"', b'UNIQ_KEY\\u00011"' + b'"opaque":', b"UNIQ_KEY\\u0001" + b"1" * 64, b"1" * 64],
)
def test_a_header_is_cut_in_time_that_grows_with_its_length(piece):
    """The time must grow linearly: quadratic growth would need many seconds here."""
    header = b'1795170712333","i":"' + piece * (600_000 // len(piece))
    begun = time.process_time()
    assert send_templates.PARTS.fullmatch(header) is None
    assert time.process_time() - begun < 1.0


async def test_known_half_messages_follow_the_setting_that_refuses_them(ways):
    ways.learn(HALF)
    assert ways.short(filled(HALF)) is not None
    ways.sends.config.reject_transaction_message = True
    ways.sends.configure()
    assert ways.short(filled(HALF)) is None
    with pytest.raises(CommandError, match="sending transaction message is forbidden"):
        ways.long(filled(HALF))


async def test_a_queue_whose_topic_is_deleted_is_not_written_to_any_more(ways):
    ways.learn(HEADER)
    queues = ways.queues
    gone = queues.get_or_make("Orders", 2)
    queues.move_to_trash("Orders")
    assert gone.deleted
    assert ways.short(filled()) is None
    ways.long(filled())
    assert ways.short(filled()) is None  # the queue does not exist, so nothing is learned
    queues.get_or_make("Orders", 2)
    ways.learn(HEADER)
    assert ways.short(filled()) == ways.long(filled())


async def test_known_headers_follow_the_topic_and_the_store(cluster, peer):
    await peer.send()
    parts = cluster.broker.parts

    async def send(queue_id: int) -> Any:
        unique = "AC10" if queue_id else "BC10"
        return await peer.send(queue_id=queue_id, properties={"UNIQ_KEY": unique, "WAIT": "true"})

    for queue_id in (0, 3):
        for _ in range(3):
            assert (await send(queue_id)).code == 0
    assert len(parts.sends.templates) == 2
    table = parts.tables.topics
    topic = table.get("Orders")
    topic.read_queue_nums = topic.write_queue_nums = 2
    table.put(topic)
    assert (await send(3)).code == ResponseCode.SYSTEM_ERROR
    assert (await send(0)).code == 0
    parts.store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
    refused(await send(0), ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full")
    parts.store.flags.clear(Flag.DISK_FULL)
    assert (await send(0)).code == 0
    assert len(records(await peer.pull(queue_id=0))) == 6
