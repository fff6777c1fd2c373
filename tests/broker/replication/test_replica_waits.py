"""Who waits for slaves, and until when."""

from __future__ import annotations

from cometmq.broker.replication.replica_waits import ReplicaWaits


def waits(*rows):
    made = ReplicaWaits()
    for slaves, position, deadline in rows:
        made.add(slaves, position, deadline, position)
    return made


def test_waits_end_in_order_with_the_copies():
    made = waits((1, 100, 3.0), (1, 200, 3.0), (1, 300, 3.0))
    assert made.reached(lambda position: int(position <= 200)) == [100, 200]
    assert made.reached(lambda position: int(position <= 200)) == []
    assert len(made) == 1


def test_waits_for_more_slaves_hold_up_nobody():
    made = waits((2, 100, 3.0), (1, 200, 3.0))
    assert made.reached(lambda _position: 1) == [200]
    assert made.reached(lambda _position: 2) == [100]


def test_waits_end_with_their_time():
    made = waits((1, 100, 3.0), (2, 150, 3.5), (1, 200, 4.0))
    assert made.next_deadline() == 3.0
    assert made.expired(2.9) == []
    assert made.expired(3.5) == [100, 150]
    assert (made.next_deadline(), len(made)) == (4.0, 1)
    assert made.expired(4.0) == [200]
    assert made.next_deadline() is None
