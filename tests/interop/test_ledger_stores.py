"""The stores of raft members: Apache's 4.9.7 broker opens ours, and ours opens the result.

A recorded store (tests/store/raft_log/test_apache_member.py) tests ours with files of Apache's alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.record_ledger import settings
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.kit.waiting import wait_until
from tests.long_form import long_form
from tests.ports import free_port
from tests.store.kit import open_configured, put_batch
from tests.store.raft_log.members import add, agree, elect, raft_log, seen

from cometmq.protocol.batch import encode_batch
from cometmq.store import MessageStore, StoreConfig
from cometmq.store.raft_log.member_files import TermAndVote, write_term

QUEUES = 3
TOPIC = "Alpha"


def opened(root: Path) -> MessageStore:
    return open_configured(
        StoreConfig.from_properties({**settings(0), "storePathRootDir": str(root), "maxMessageSize": "16384"})
    )


def fill(store: MessageStore, term: int, count: int) -> None:
    """Append a term: a first entry without a message, numbered messages and a batch, all committed."""
    elect(store, term)
    for number in range(count):
        add(
            store,
            b"%d.%d:" % (term, number) + bytes(number * 37 % 1500),
            topic=TOPIC,
            queue_id=number % QUEUES,
        )
    put_batch(store, encode_batch([(0, b"part %d" % part, b"KEYS\x01p") for part in range(5)]), TOPIC)
    store.commit()
    agree(store)


def ours(root: Path, end: str) -> list[list[bytes]]:
    """Create a member's store with several segments and a truncated tail; return the bodies of each queue.

    The truncation ends in an earlier segment than the log had.
    """
    store = opened(root)
    fill(store, 1, 60)
    agree(store)
    last = raft_log(store).last
    for number in range(40):
        add(store, b"never committed %d" % number + bytes(1500), topic=TOPIC)
    raft_log(store).follow()
    raft_log(store).cut(last + 4)
    raft_log(store).commit_to(last + 3)
    fill(store, 3, 30)
    write_term(store.disk, store.config.raft_log_dir, TermAndVote(3, "n0"))
    found = [seen(store, TOPIC, queue_id) for queue_id in range(QUEUES)]
    if end == "stopped":
        store.close()
    else:
        store.flusher.flush_now()
        raft_log(store).save()
        store.crash()
    return found


def leads(feeder: store_input.Feeder) -> bool:
    """Return whether the broker accepts changes; if so, the topic is created."""
    try:
        feeder.update_topic(TOPIC, QUEUES)
    except store_input.RefusedError:
        return False
    return True


def apaches(port: int) -> list[list[bytes]]:
    return [[each.body for each in store_input.served(port, TOPIC, queue)] for queue in range(QUEUES)]


@long_form("starts Apache's broker; a recorded store of Apache's is opened in every run")
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_apaches_member_goes_on_with_ours_and_ours_with_its(names: str, tmp_path: Path, end: str) -> None:
    root = tmp_path / "store"
    written = ours(root, end)
    broker = ApacheBroker("4.9.7", tmp_path, names, store=root, settings=settings(free_port()))
    try:
        with wire.Connection(broker.port) as connection:
            feeder = store_input.Feeder(connection)
            wait_until("the broker leads", lambda: leads(feeder))
            assert apaches(broker.port) == written
            for number in range(50):
                feeder.send(TOPIC, number % QUEUES, b"apache %d" % number + bytes(900), [("KEYS", "a")])
        both = apaches(broker.port)
        broker.stop()
    finally:
        if broker.process.running:
            broker.kill()
    assert [queue[: len(old)] for queue, old in zip(both, written, strict=True)] == written
    assert sum(map(len, both)) == sum(map(len, written)) + 50
    store = opened(root)
    assert raft_log(store).committed == raft_log(store).last
    assert store.recovered.damage == []
    assert [seen(store, TOPIC, queue_id) for queue_id in range(QUEUES)] == both
    elect(store, 9)
    store.close()
