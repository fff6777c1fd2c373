"""Consumer offsets: stored values by group and topic, and limits on their number."""

from __future__ import annotations

import random

from cometmq.broker.tables import consumer_offsets as offsets_module
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets


class TestOffsets:
    def test_what_is_committed_is_found_and_lower_offsets_count_too(self):
        offsets = ConsumerOffsets()
        assert offsets.query("G", "T", 0) == -1
        offsets.commit("G", "T", 0, 8)
        offsets.commit("G", "T", 0, 3)
        assert [offsets.query(*place) for place in (("G", "T", 0), ("G", "T", 1), ("X", "T", 0))] == [
            3,
            -1,
            -1,
        ]
        assert offsets.take_changes()

    def test_groups_and_topics_are_told_apart_and_removed(self):
        offsets = ConsumerOffsets()
        for group, topic in (("G", "T"), ("G", "%RETRY%G"), ("H", "T")):
            offsets.commit(group, topic, 2, 5)
        assert offsets.topics_of("G") == {"T", "%RETRY%G"}
        assert offsets.groups_of("T") == {"G", "H"}
        offsets.clone("G", "New", "T")
        assert offsets.query("New", "T", 2) == 5
        offsets.remove_group("G")
        offsets.remove_topic("Nothing")
        assert offsets.groups() == {"H", "New"}
        offsets.remove_topic("T")
        assert offsets.to_table() == {"offsetTable": {}}

    def test_there_are_so_many_offsets_and_no_more(self, monkeypatch):
        monkeypatch.setattr("cometmq.broker.tables.consumer_offsets.MAX_OFFSETS", 4)
        offsets = ConsumerOffsets()
        offsets.load({"offsetTable": {"T@G": {0: 4, "1": 9}}})
        offsets.clone("G", "H", "T")
        offsets.clone("G", "I", "T")
        assert (len(offsets), offsets.groups()) == (4, {"G", "H"})
        assert not offsets.commit("G", "T", 2, 5)
        assert not offsets.commit("I", "T", 0, 5)
        assert offsets.commit("G", "T", 1, 5)
        offsets.clone("G", "H", "T")
        offsets.clone("G", "G", "T")
        assert (len(offsets), offsets.query("H", "T", 1)) == (4, 5)
        offsets.remove_group("H")
        assert offsets.commit("G", "T", 2, 5)
        assert offsets.commit("I", "T", 0, 5)
        offsets.remove_topic("T")
        assert (len(offsets), offsets.to_table()) == (0, {"offsetTable": {}})

    def test_the_file_is_read_with_keys_of_either_kind(self):
        offsets = ConsumerOffsets()
        offsets.load({"offsetTable": {"T@G": {0: 4, "1": "9"}}})
        assert offsets.to_table() == {"offsetTable": {"T@G": {0: 4, 1: 9}}}
        assert not offsets.take_changes()

    def test_the_topics_of_each_group_are_known_without_a_look_at_every_entry(self, monkeypatch):
        offsets = ConsumerOffsets()
        for number in range(1000):
            offsets.commit(f"G{number}", f"T{number % 10}", 0, number)
        looked_at = []
        split = offsets_module.split_key
        monkeypatch.setattr(offsets_module, "split_key", lambda key: looked_at.append(key) or split(key))
        assert all(offsets.topics_of(f"G{number}") == {f"T{number % 10}"} for number in range(1000))
        assert sum(len(offsets.groups_of(f"T{number}")) for number in range(10)) == 1000
        offsets.remove_group("G7")
        offsets.remove_topic("T3")
        assert looked_at == []

    def test_what_is_known_of_groups_and_topics_is_what_the_table_holds(self):
        draw = random.Random(5)
        offsets = ConsumerOffsets()
        for _ in range(3000):
            group, topic = draw.choice("GHIJ"), draw.choice(["T", "U", "%RETRY%G", "odd@V"])
            change = draw.randrange(8)
            if change < 5:
                offsets.commit(group, topic, draw.randrange(2), 1)
            elif change == 5:
                offsets.clone(group, draw.choice("GHIJ"), topic)
            elif change == 6:
                draw.choice([offsets.remove_group, offsets.remove_topic])(draw.choice([group, topic]))
            else:
                offsets.load(
                    {"offsetTable": {**offsets.to_table()["offsetTable"], f"{topic}@{group}": {0: 1}}}
                )
            held = [offsets_module.split_key(key) for key in offsets.to_table()["offsetTable"]]
            assert offsets.groups() == {name for _, name in held}
            for name in ("G", "H", "V@G"):
                assert offsets.topics_of(name) == {there for there, other in held if other == name}
            for name in ("T", "odd"):
                assert offsets.groups_of(name) == {other for there, other in held if there == name}
