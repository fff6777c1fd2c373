"""Push consumers in BROADCASTING mode: each member receives every message."""

from __future__ import annotations

from pathlib import Path

from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConsumeStatus,
    MessageModel,
    MessageQueue,
    PushOptions,
)
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.offset_files import parse_offsets

QUEUE = MessageQueue("T", "broker-a", 0)


async def test_a_broadcasting_member_has_its_own_offsets(
    broker: FakeBroker, box: Box, tmp_path: Path
) -> None:
    broker.store("T", 0, b"a")
    options = {"message_model": MessageModel.BROADCASTING, "offset_dir": str(tmp_path)}
    async with box.consumer(**options) as member:
        await box.has(1)
        # The path of the offset file contains the client id, which therefore must not contain the process id.
        assert member.client.client_id == "127.0.0.1@DEFAULT"
        (group,) = broker.heartbeats[-1].consumer_data_set
        assert [subscription.topic for subscription in group.subscription_data_set] == ["T"]
    assert broker.offsets == {}
    assert parse_offsets((tmp_path / "127.0.0.1@DEFAULT" / "g" / "offsets.json").read_bytes()) == {QUEUE: 1}


async def test_a_broadcasting_member_waits_for_the_file_of_another(
    broker: FakeBroker, namesrv: FakeNamesrv, box: Box, tmp_path: Path
) -> None:
    """Both members run in this process, so only the first one's stop can unlock the file."""
    broker.store("T", 0, b"a")
    options = {"message_model": MessageModel.BROADCASTING, "offset_dir": str(tmp_path)}
    first, waiting = box.consumer(**options), Box(namesrv)
    async with first:
        await box.has(1)
        second = waiting.consumer(**options)
        await second.start()
        assert second.assignment == ()
        assert any("another consumer uses this file" in each for each in second.health().problems)
    broker.store("T", 0, b"b")
    await waiting.has(1)
    await second.stop()
    assert (first.state, waiting.bodies) == ("stopped", [b"b"])


async def test_broadcasting_members_of_two_namespaces_have_a_file_each(
    namesrv: FakeNamesrv, broker: FakeBroker, tmp_path: Path
) -> None:
    for space in ("left", "right"):
        namesrv.serve(f"{space}%T", broker)
        offsets = ConsumerGroup(
            "g",
            ClientInstance(namesrv.addr, ClientOptions(namespace=space, client_ip="10.0.0.1")),
            PushOptions(message_model=MessageModel.BROADCASTING, offset_dir=str(tmp_path)),
        ).offsets
        assert await offsets.stored(QUEUE) is None
        offsets.update(QUEUE, 7)
        await offsets.persist()
        assert await offsets.stored(QUEUE) == 7
        (file,) = tmp_path.glob(f"*/{space}%g/offsets.json")
        assert parse_offsets(file.read_bytes()) == {MessageQueue(f"{space}%T", "broker-a", 0): 7}


async def test_a_failed_broadcast_message_is_dropped(broker: FakeBroker, box: Box, tmp_path: Path) -> None:
    for body in (b"a", b"b"):
        broker.store("T", 0, body)
    box.status = ConsumeStatus.RECONSUME_LATER
    options = {"message_model": MessageModel.BROADCASTING, "offset_dir": str(tmp_path)}
    async with box.consumer(**options):
        await box.has(2)
    assert broker.sent_back == []
    assert parse_offsets((tmp_path / "127.0.0.1@DEFAULT" / "g" / "offsets.json").read_bytes()) == {QUEUE: 2}
