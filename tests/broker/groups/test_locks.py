"""Queue locks: their owners and their expiry."""

from __future__ import annotations

from cometmq.broker.groups.locks import LOCK_LIVE_MS, QueueLocks
from cometmq.client.consumer.orderly_queue import LOCK_LIVE_S
from cometmq.message import MessageQueue

T0 = 1_700_000_000_000
Q0, Q1 = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)


class TestLocks:
    def test_a_queue_belongs_to_one_client_until_it_gives_it_up(self):
        locks = QueueLocks()
        assert locks.lock("G", "c1", [Q0, Q1], T0) == [Q0, Q1]
        assert locks.lock("G", "c2", [Q0, Q1], T0) == []
        locks.unlock("G", "c2", [Q0])
        assert locks.lock("G", "c2", [Q0], T0) == []
        locks.unlock("G", "c1", [Q0])
        assert locks.lock("G", "c2", [Q0, Q1], T0) == [Q0]
        assert locks.lock("Other", "c3", [Q0, Q1], T0) == [Q0, Q1]

    def test_a_lock_lives_60_s_from_its_last_renewal(self):
        locks = QueueLocks()
        locks.lock("G", "c1", [Q0], T0)
        locks.lock("G", "c1", [Q0], T0 + 50_000)
        assert locks.lock("G", "c2", [Q0], T0 + 50_000 + LOCK_LIVE_MS) == []
        assert locks.lock("G", "c2", [Q0], T0 + 50_001 + LOCK_LIVE_MS) == [Q0]
        locks.unlock("Nobody", "c", [Q0])

    def test_our_client_stops_to_believe_before_the_broker_gives_away(self):
        assert LOCK_LIVE_S * 1000 <= LOCK_LIVE_MS / 2

    def test_locks_of_clients_that_are_gone_are_forgotten(self):
        locks = QueueLocks()
        locks.lock("G", "c1", [Q0], T0)
        locks.lock("G", "c2", [Q1], T0 + 1_000)
        locks.lock("H", "c3", [Q1], T0)
        locks.expire(T0 + LOCK_LIVE_MS)
        assert len(locks) == 3
        locks.expire(T0 + LOCK_LIVE_MS + 1)
        assert len(locks) == 1
        locks.unlock("G", "c2", [Q1, Q1])
        assert len(locks) == 0

    def test_there_are_so_many_locks_and_no_more(self, monkeypatch):
        monkeypatch.setattr("cometmq.broker.groups.locks.MAX_LOCKS", 2)
        locks = QueueLocks()
        queues = [MessageQueue("T", "broker-a", n) for n in range(4)]
        assert locks.lock("G", "c1", queues, T0) == queues[:2]
        assert locks.lock("H", "c1", queues, T0) == []
        assert locks.lock("G", "c1", queues, T0 + 1) == queues[:2]
        locks.unlock("G", "c1", queues[:1])
        assert locks.lock("H", "c1", queues, T0) == queues[:1]

    def test_hand_overs_leave_half_of_the_room_to_orderly_groups(self, monkeypatch):
        monkeypatch.setattr("cometmq.broker.groups.locks.MAX_LOCKS", 4)
        locks = QueueLocks()
        queues = [MessageQueue("T", "broker-a", n) for n in range(4)]
        assert locks.lock("%HANDOVER%G", "c1", queues, T0) == queues[:2]
        assert locks.lock("%HANDOVER%H", "c1", queues, T0) == []
        assert locks.lock("G", "c1", queues, T0) == queues[:2]
        locks.unlock("%HANDOVER%G", "c1", queues)
        assert locks.lock("%HANDOVER%H", "c1", queues, T0) == queues[:2]
