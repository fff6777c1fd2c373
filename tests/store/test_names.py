"""The store validates names that become directories, both from its callers and from disk."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import contextmanager

import pytest
from tests.store.kit import (
    by_key,
    committed,
    delete_topic,
    everything,
    open_store,
    put,
    put_batch,
    restarted,
    send,
    send_all,
    small,
)

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import ResponseCode
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived import queue_table
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.verify import verify

ELSEWHERE = [
    "x/../Good",
    "../../evil",
    "/tmp/cometmq-evil",
    "x/../../config/topics.json",
    ".",
    "..",
    "a/b",
    ".deleted",
]
NAMES = [*ELSEWHERE, "", " ", "a b", "a.b", "n\0ul", "订单", "T\n", "t" * 256, "\ud800"]


def tree(root):
    return sorted(os.path.join(path, name) for path, _, names in os.walk(root) for name in names)


@contextmanager
def careless(monkeypatch):
    """Disable the validation, as in earlier versions."""
    with monkeypatch.context() as patches:
        patches.setattr(queue_table, "is_legal_name", lambda _name, _longest: True)
        yield patches


@pytest.mark.parametrize(("topic", "queue_id"), [*((name, 0) for name in NAMES), ("T", -1)])
def test_no_queue_is_made_for_a_name_that_is_none(tmp_path, topic, queue_id):
    root = tmp_path / "a" / "store"
    store = open_store(root)
    send(store, topic="Good")
    before = store.log.next
    with pytest.raises(QueueRefused) as refusal:
        put(store, topic=topic, queue_id=queue_id)
    assert refusal.value.response_code == ResponseCode.MESSAGE_ILLEGAL
    assert pickle.loads(pickle.dumps(refusal.value)).remark == refusal.value.remark
    with pytest.raises(QueueRefused):
        put_batch(store, encode_batch([(0, b"x", b"")]), topic, queue_id)
    assert store.log.next == before
    committed(store.commit())
    store.close()
    assert os.listdir(tmp_path / "a") == ["store"]
    assert os.listdir(root / "consumequeue") == ["Good"]


@pytest.mark.parametrize("topic", ELSEWHERE)
def test_no_deletion_reaches_beyond_the_topics(tmp_path, topic):
    root = tmp_path / "a" / "store"
    store = open_store(root)
    send(store, topic="Good")
    store.writer.make_durable()
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text("{}")
    before = tree(tmp_path)
    assert delete_topic(store, topic) == 0
    assert set(before) <= set(tree(tmp_path))
    assert everything(store, "Good") == [b"hello"]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("topic", [*ELSEWHERE[:4], "n\0ul"])
def test_a_store_opens_that_has_taken_messages_for_such_a_name(tmp_path, monkeypatch, topic, clean):
    """Earlier versions stored such records in the log. They are skipped, and all other records are served."""
    root = tmp_path / "a" / "store"
    with careless(monkeypatch) as patches:
        patches.setattr(ConsumeQueue, "write", lambda _queue: None)
        store = open_store(root)
        for number in range(3):
            send(store, b"good %d" % number, "Good")
            send(store, b"bad", topic)
        store.crash()
    if clean:
        os.unlink(root / "abort")
    for _ in range(2):
        store = open_store(root)
        assert everything(store, "Good") == [b"good 0", b"good 1", b"good 2"]
        assert store.queues.find_queue(topic, 0) is None
        store.close()
    assert os.listdir(root / "consumequeue") == ["Good"]
    assert not (tmp_path / "evil").exists()
    rebuild(str(root), config=small(root))
    store = open_store(root)
    assert everything(store, "Good") == [b"good 0", b"good 1", b"good 2"]


@pytest.mark.parametrize("clean", [True, False])
def test_a_topic_that_was_mixed_with_another_is_set_right(tmp_path, monkeypatch, clean):
    with careless(monkeypatch):
        store = open_store(tmp_path)
        for body in (b"1", b"2"):
            send(store, body, "Good")
            send(store, b"bad", "x/../Good")
        store.close() if clean else store.crash()
    store = open_store(tmp_path)
    assert everything(store, "Good") == [b"1", b"2"]


def test_of_many_such_messages_some_are_named_and_all_counted(tmp_path, monkeypatch):
    with careless(monkeypatch) as patches:
        patches.setattr(ConsumeQueue, "write", lambda _queue: None)
        store = open_store(tmp_path)
        send_all(store, [b"bad"] * 300, "x/../Good")
        store.crash()
    store = open_store(tmp_path)
    *named, last = [note for note in store.recovered.notes if "not served" in note]
    assert len(named) == 200
    assert last == "300 records in all are not served"


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("topic", ["a b", "a.b", "订单"])
def test_what_a_directory_with_an_odd_name_holds_stays_readable(tmp_path, monkeypatch, topic, clean):
    with careless(monkeypatch):
        store = open_store(tmp_path)
        send(store, b"first", topic)
        store = restarted(store)
        send(store, b"second", topic)
        store.close() if clean else store.crash()
    store = open_store(tmp_path)
    assert everything(store, topic) == [b"first", b"second"]
    store.close()
    rebuild(str(tmp_path), config=small(tmp_path))
    store = open_store(tmp_path)
    assert everything(store, topic) == [b"first", b"second"]
    assert delete_topic(store, topic) == 1
    store.close()
    assert os.listdir(tmp_path / "consumequeue") == []


@pytest.mark.parametrize("name", ["²", "٣", "00", "-1", "x"])
def test_a_directory_that_is_no_queue_does_not_keep_a_store_from_opening(tmp_path, store, name):
    send(store)
    store.close()
    (tmp_path / "consumequeue" / "T" / name).mkdir()
    store = open_store(tmp_path)
    assert everything(store) == [b"hello"]


@pytest.mark.parametrize("place", ["commitlog", "consumequeue/T/0", "consumequeue_ext/T/0", "index"])
@pytest.mark.parametrize("digit", ["²", "٣"])
def test_a_file_whose_digits_are_no_number_is_left_alone(tmp_path, store, place, digit):
    send(store, properties=b"KEYS\x01k")
    store.close()
    file = tmp_path / place / (digit * (17 if place == "index" else 20))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    for _ in range(2):
        store = open_store(tmp_path)
        assert everything(store) == [b"hello"]
        store.crash()
    assert file.exists()


def test_a_numbered_file_of_somebody_elses_is_not_deleted_with_a_damaged_index(tmp_path, store):
    send(store, properties=b"KEYS\x01k")
    store.close()
    (index,) = (tmp_path / "index").iterdir()
    index.write_bytes(b"damaged")
    other = tmp_path / "index" / "99"
    other.touch()
    store = open_store(tmp_path)
    assert by_key(store, "T", "k", 1, 0, 1 << 62)
    store.close()
    assert other.exists()


def test_a_directory_whose_name_is_no_utf8_is_left_alone(tmp_path, store):
    """Tables cannot contain such a name: earlier versions opened the store and failed when it was closed."""
    send(store)
    store.close()
    queues = os.fsencode(tmp_path / "consumequeue")
    shutil.copytree(queues + b"/T", queues + b"/\xff")
    for _ in range(2):
        store = open_store(tmp_path)
        assert store.queues.topics() == ["T"]
        store.close()
    assert b"\xff" in os.listdir(queues)
    report = verify(str(tmp_path), config=small(tmp_path))
    assert report.sound
    assert [finding.path for finding in report.findings] == [f"{tmp_path}/consumequeue/\udcff"]
