"""Membership of producer and consumer groups, tested with a manual clock."""

from __future__ import annotations

from tests.kit.brokers import subscription

from cometmq.broker.groups.clients import EXPIRED_MS, ConsumerTable, ProducerTable
from cometmq.logs import LogLimiter

T0 = 1_000_000
PUSH = ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET")


class TestConsumerTable:
    def register(self, table, channel, client_id, topics=("T",), version=1, now=T0):
        return table.register(
            "G", channel, (client_id, "JAVA", 407), PUSH, [subscription(t, version) for t in topics], now
        )

    def test_what_counts_as_a_change(self):
        table = ConsumerTable()
        assert self.register(table, "ch1", "c1")
        assert not self.register(table, "ch1", "c1")
        assert not self.register(table, "ch1", "c1", version=2)
        assert self.register(table, "ch1", "c1", topics=("T", "U"))
        assert self.register(table, "ch1", "c1", topics=("U",))
        assert self.register(table, "ch2", "c2", topics=("U",))
        assert self.register(table, "ch2", "another id on the same channel", topics=("U",))
        assert table.subscription("G", "T") is None

    def test_a_topic_is_removed_once_no_member_subscribes_to_it(self):
        table = ConsumerTable()
        self.register(table, "ch1", "4.x", topics=("T", "%RETRY%G"))
        self.register(table, "ch2", "5.x", topics=("U",), version=0)
        for _ in range(2):
            assert not self.register(table, "ch1", "4.x", topics=("T", "%RETRY%G"))
            assert not self.register(table, "ch2", "5.x", topics=("U",), version=0)
        assert table.topics_of("G") == {"T", "U", "%RETRY%G"}
        assert self.register(table, "ch2", "5.x", topics=("T",), version=0)
        assert table.topics_of("G") == {"T", "%RETRY%G"}
        table.channel_closed("ch1")
        assert self.register(table, "ch2", "5.x", topics=("T",), version=0)
        assert table.topics_of("G") == {"T"}

    def test_members_with_the_same_topics_share_them(self):
        table = ConsumerTable()
        for number in range(3):
            self.register(table, number, str(number), topics=("T", "U"))
        assert len({id(each.topics) for each in table.online("G")}) == 1

    def test_a_subscription_is_replaced_by_a_higher_version_only(self):
        table = ConsumerTable()
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 5, "A")], T0)
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 4, "B")], T0)
        assert table.subscription("G", "T").sub_string == "A"
        table.register("G", "ch", ("c", "JAVA", 1), PUSH, [subscription("T", 6, "C")], T0)
        assert table.subscription("G", "T").sub_string == "C"

    def test_silence_of_120_s_ends_a_membership_and_a_heartbeat_prolongs_it(self):
        table = ConsumerTable()
        self.register(table, "ch1", "c1")
        self.register(table, "ch2", "c2", now=T0 + 60_000)
        assert table.expire(T0 + EXPIRED_MS) == ([], [])
        assert table.expire(T0 + EXPIRED_MS + 1) == (["ch1"], ["G"])
        assert table.groups["G"].client_ids() == ["c2"]
        self.register(table, "ch2", "c2", now=T0 + 100_000)
        assert table.expire(T0 + 60_000 + EXPIRED_MS + 1) == ([], [])
        assert table.expire(T0 + 100_001 + EXPIRED_MS) == (["ch2"], ["G"])
        assert table.groups == {}

    def test_a_closed_channel_leaves_every_group(self):
        table = ConsumerTable()
        for group in ("G", "H"):
            table.register(group, "ch1", ("c1", "JAVA", 1), PUSH, [], T0)
        table.register("H", "ch2", ("c2", "JAVA", 1), PUSH, [], T0)
        assert table.channel_closed("ch1") == ["G", "H"]
        assert list(table.groups) == ["H"]
        assert table.channel_closed("ch1") == []
        assert not table.unregister("Nobody", "ch1")

    def test_members_whose_retry_limits_differ_are_named_once(self, caplog):
        table = ConsumerTable()
        for channel in ("ch1", "ch2"):
            self.register(table, channel, f"client {channel}")
        table.note_retry_limit("G", "ch1", 3, 16)
        table.note_retry_limit("G", "nobody's", 7, 16)
        table.note_retry_limit("Nobody", "ch1", 7, 16)
        table.note_retry_limit("G", "ch1", 4, 16)
        table.note_retry_limit("G", "ch1", 3, 16)
        assert caplog.messages == []
        for limit in (16, 5, 16):
            table.note_retry_limit("G", "ch2", limit, 16)
        assert caplog.messages == [
            "group G: client client ch2 sends maxReconsumeTimes 16, client client ch1 sends 3: "
            "the value of the client that sends a message back applies"
        ]

    def test_a_member_that_changes_its_own_limit_is_compared_with_the_others(self, caplog):
        table = ConsumerTable()
        for channel in ("ch1", "ch2"):
            self.register(table, channel, channel)
            table.note_retry_limit("G", channel, 3, 16)
        table.note_retry_limit("G", "ch1", 4, 16)
        assert [line.partition(": ")[2] for line in caplog.messages] == [
            "client ch1 sends maxReconsumeTimes 4, client ch2 sends 3: "
            "the value of the client that sends a message back applies"
        ]

    def test_a_limit_that_the_group_was_given_and_that_does_not_count_is_named_once(self, caplog):
        table = ConsumerTable()
        self.register(table, "ch1", "c1")
        for own in (16, 3):  # 16 is the default and 3 equals the client's value
            table.note_retry_limit("G", "ch1", 3, own)
        assert caplog.messages == []
        for own in (1, 1, 0):
            table.note_retry_limit("G", "ch1", 3, own)
        text = "group G: client c1 sends maxReconsumeTimes 3, which overrides the group's "
        assert caplog.messages == [f"{text}retryMaxTimes=1", f"{text}retryMaxTimes=0"]

    def test_what_the_log_has_no_room_for_is_said_at_a_later_message(self, caplog, monkeypatch):
        room = [False]
        monkeypatch.setattr(LogLimiter, "allows", lambda self: room[0])
        table = ConsumerTable()
        for channel in ("ch1", "ch2"):
            self.register(table, channel, channel)
        for _ in range(2):
            for channel, limit in (("ch1", 3), ("ch2", 7)):
                table.note_retry_limit("G", channel, limit, 1)
            assert bool(caplog.messages) == room[0]
            room[0] = True
        assert [line.rpartition(", ")[2] for line in caplog.messages] == [
            "which overrides the group's retryMaxTimes=1",
            "client ch1 sends 3: the value of the client that sends a message back applies",
        ]

    def test_a_retry_limit_is_known_until_its_member_leaves(self):
        table = ConsumerTable()
        self.register(table, "ch1", "c1")
        table.note_retry_limit("G", "ch1", 3, 16)
        self.register(table, "ch1", "c1")
        assert [client.retry_limit for client in table.online("G")] == [3]
        self.register(table, "ch1", "another")
        assert [client.retry_limit for client in table.online("G")] == [None]

    def test_a_client_that_reconnects_is_listed_once(self):
        table = ConsumerTable()
        self.register(table, "old", "c1")
        self.register(table, "new", "c1")
        assert table.groups["G"].client_ids() == ["c1"]
        assert table.groups["G"].find("c1").channel == "new"
        assert table.groups["G"].find("c9") is None


def test_producers_come_stay_and_go():
    table = ProducerTable()
    for group in ("P", "Q"):
        table.join(group, "ch1", ("c1", "GO", 317), T0)
    table.join("P", "ch2", ("c2", "JAVA", 407), T0 + 1000)
    assert [client.language for client in table.online("P")] == ["GO", "JAVA"]
    assert table.unregister("Q", "ch1")
    assert list(table.groups) == ["P"]
    assert table.expire(T0 + EXPIRED_MS + 1) == (["ch1"], ["P"])
    assert table.channel_closed("ch2") == ["P"]
    assert table.groups == {}
    assert table.online("P") == []
