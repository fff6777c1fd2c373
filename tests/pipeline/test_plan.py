"""Planning without I/O: positions, limits, ranges and packing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.base.offsets import batch_range, from_tree, parse_offsets, to_tree, with_start
from cometmq.pipeline.base.plan import (
    Bounds,
    QueueRange,
    default_tasks,
    limit_bytes,
    limit_ends,
    pack,
    queue_ranges,
    spread,
)


def queue(number: int, topic: str = "T", broker: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker, number)


SIZES = {queue(0): 1000.0, queue(1): 100.0}

queues = st.builds(
    MessageQueue,
    st.sampled_from(["T", "%RETRY%g", "orders"]),
    st.sampled_from(["broker-a", "broker-b"]),
    st.integers(0, 20),
)
offset_maps = st.dictionaries(queues, st.integers(0, 2**62), max_size=12)


class TestOffsets:
    def test_the_text_of_a_map_is_sorted_with_queues_by_number(self) -> None:
        offsets = {queue(10): 1, queue(2): 2, queue(0, "A"): 3, queue(1, broker="broker-b"): 4}
        assert json.dumps(to_tree(offsets)) == (
            '{"A": {"broker-a": {"0": 3}}, "T": {"broker-a": {"2": 2, "10": 1}, "broker-b": {"1": 4}}}'
        )

    @given(offset_maps)
    def test_any_map_survives_the_tree_and_its_text(self, offsets: dict[MessageQueue, int]) -> None:
        assert from_tree(json.loads(json.dumps(to_tree(offsets)))) == offsets

    @given(offset_maps, st.randoms())
    def test_insertion_order_never_shows(self, offsets: dict[MessageQueue, int], random: object) -> None:
        items = list(offsets.items())
        random.shuffle(items)  # type: ignore[attr-defined]
        assert json.dumps(to_tree(dict(items))) == json.dumps(to_tree(offsets))

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "newest",
            "[]",
            "3",
            '{"T": 3}',
            '{"T": {"b": 3}}',
            '{"T": {"b": {"x": 3}}}',
            '{"T": {"b": {"0": "3"}}}',
            '{"T": {"b": {"0": 1.5}}}',
            '{"T": {"b": {"0": true}}}',
            '{"T": {"b": {"-1": 3}}}',
            '{"T": {"b": {"0": -3}}}',
        ],
    )
    def test_bad_offsets_are_refused_with_the_option_and_its_value(self, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_offsets(text, "startingOffsets")
        assert caught.value.key == "startingOffsets"

    def test_minus_one_and_minus_two_are_positions(self) -> None:
        assert parse_offsets('{"T": {"broker-a": {"0": -1, "1": -2}}}', "o") == {queue(0): -1, queue(1): -2}

    def test_the_first_batch_keeps_its_start_whatever_the_engine_says_later(self) -> None:
        end = with_start({queue(0): 103}, {queue(0): 100})
        resolved_again = to_tree({queue(0): 500})
        first, last = batch_range(resolved_again, json.loads(json.dumps(end)))
        assert (first, last) == ({queue(0): 100}, {queue(0): 103})

    def test_the_second_batch_starts_at_the_first_ones_end(self) -> None:
        end_of_first = with_start({queue(0): 103}, {queue(0): 100})
        assert batch_range(end_of_first, to_tree({queue(0): 200})) == ({queue(0): 103}, {queue(0): 200})


class TestLimits:
    def test_shares_are_in_proportion_to_the_backlog(self) -> None:
        start = {queue(0): 0, queue(1): 100}
        ends = limit_ends(start, {queue(0): 3000, queue(1): 1100}, 400)
        assert ends == {queue(0): 300, queue(1): 200}

    def test_a_small_queue_is_never_starved(self) -> None:
        ends = limit_ends({queue(0): 0, queue(1): 0}, {queue(0): 1_000_000, queue(1): 3}, 10)
        assert ends[queue(1)] == 1

    def test_a_limit_above_the_backlog_takes_all(self) -> None:
        assert limit_ends({queue(0): 5}, {queue(0): 9}, 100) == {queue(0): 9}

    def test_a_queue_that_shrank_stays_where_it_is(self) -> None:
        assert limit_ends({queue(0): 50, queue(1): 0}, {queue(0): 10, queue(1): 9}, 4)[queue(0)] == 50

    @given(
        st.dictionaries(queues, st.tuples(st.integers(0, 1000), st.integers(0, 10**6)), max_size=8),
        st.integers(1, 5000),
    )
    def test_repeated_steps_reach_the_end_and_never_pass_it(
        self, spans: dict[MessageQueue, tuple[int, int]], limit: int
    ) -> None:
        position = {q: first for q, (first, _) in spans.items()}
        latest = {q: first + more for q, (first, more) in spans.items()}
        for _ in range(60):
            step = limit_ends(position, latest, limit)
            taken = sum(step[q] - position[q] for q in spans)
            assert all(position[q] <= step[q] <= latest[q] for q in spans)
            assert taken <= limit + len(spans)
            assert taken > 0 or position == latest
            position = step


class TestLimitedBytes:
    def test_the_limit_is_shared_by_the_sizes_of_the_queues(self) -> None:
        ends = limit_bytes({queue(0): 0, queue(1): 50}, {queue(0): 100, queue(1): 150}, SIZES, 20_000)
        assert ends == {queue(0): 18, queue(1): 68}  # 18 * 1000 + 18 * 100 bytes

    @pytest.mark.parametrize(
        ("sizes", "limit", "end"),
        [
            (SIZES, 100_000, 100),
            (SIZES, 99_999, 99),
            (SIZES, 1, 1),  # a batch contains at least one record
            ({}, 1, 100),  # no sizes are known: the broker is unreachable
            ({queue(1): 1.0}, 1, 100),
        ],
    )
    def test_one_queue(self, sizes: dict[MessageQueue, float], limit: int, end: int) -> None:
        assert limit_bytes({queue(0): 0}, {queue(0): 100}, sizes, limit) == {queue(0): end}

    def test_a_queue_of_unknown_sizes_counts_as_the_others(self) -> None:
        ends = limit_bytes({queue(1): 0, queue(2): 0}, {queue(1): 100, queue(2): 100}, SIZES, 10_000)
        assert ends == {queue(1): 50, queue(2): 50}

    def test_a_new_queue_is_kept(self) -> None:
        assert limit_bytes({queue(0): 0}, {queue(0): 9, queue(5): 7}, SIZES, 3000)[queue(5)] == 7

    def test_samples_are_spread_over_what_waits(self) -> None:
        start, ends = {queue(0): 0, queue(1): 10, queue(2): 5}, {queue(0): 600, queue(1): 12, queue(2): 5}
        found = spread(start, ends, 6)
        assert found == [*((queue(0), 60 + 120 * part) for part in range(5)), (queue(1), 11)]
        assert spread({queue(0): 3}, {queue(0): 5}, 64) == [(queue(0), 3), (queue(0), 4)]


class TestRanges:
    def test_empty_queues_give_no_range(self) -> None:
        bounds = {queue(0): Bounds(0, 0), queue(1): Bounds(0, 5)}
        assert queue_ranges(
            {queue(0): 0, queue(1): 0}, {queue(0): 0, queue(1): 5}, bounds, fail_on_data_loss=True
        ) == [QueueRange(queue(1), 0, 5)]

    @pytest.mark.parametrize(
        ("start", "end", "held", "expected"),
        [
            (0, 10, Bounds(4, 20), QueueRange(queue(0), 4, 10, 4)),  # retention deleted part of it
            (0, 10, Bounds(15, 20), QueueRange(queue(0), 10, 10, 10)),  # retention deleted all of it
            (0, 10, Bounds(0, 7), QueueRange(queue(0), 0, 7, 3)),  # the topic was deleted and created again
        ],
    )
    def test_lost_records_fail_or_are_counted(
        self, start: int, end: int, held: Bounds, expected: QueueRange
    ) -> None:
        with pytest.raises(DataLossError) as caught:
            queue_ranges({queue(0): start}, {queue(0): end}, {queue(0): held}, fail_on_data_loss=True)
        assert (caught.value.minimum, caught.value.maximum) == (held.minimum, held.maximum)
        assert queue_ranges(
            {queue(0): start}, {queue(0): end}, {queue(0): held}, fail_on_data_loss=False
        ) == [expected]

    def test_a_range_that_ends_before_it_starts_is_loud(self) -> None:
        with pytest.raises(DataLossError, match="ends before it starts"):
            queue_ranges({queue(0): 500}, {queue(0): 103}, {queue(0): Bounds(0, 600)}, fail_on_data_loss=True)

    def test_a_new_queue_begins_at_its_minimum_without_loss(self) -> None:
        found = queue_ranges({}, {queue(0): 10}, {queue(0): Bounds(4, 10)}, fail_on_data_loss=True)
        assert found == [QueueRange(queue(0), 4, 10)]

    def test_a_queue_whose_broker_is_away_is_planned_as_it_was(self) -> None:
        found = queue_ranges({queue(0): 2}, {queue(0): 9}, {}, fail_on_data_loss=True)
        assert found == [QueueRange(queue(0), 2, 9)]


class TestPacking:
    def test_many_small_queues_share_few_tasks(self) -> None:
        ranges = [QueueRange(queue(n), 0, 10) for n in range(64)]
        packed = pack(ranges, 4)
        assert len(packed) == 4
        assert {sum(item.count for item in group) for group in packed} == {160}

    def test_one_long_queue_is_cut_into_all_tasks(self) -> None:
        packed = pack([QueueRange(queue(0), 100, 1100)], 4)
        assert [[(item.start, item.end) for item in group] for group in packed] == [
            [(100, 350)], [(350, 600)], [(600, 850)], [(850, 1100)]
        ]  # fmt: skip

    def test_no_task_exceeds_the_record_limit(self) -> None:
        ranges = [QueueRange(queue(n), 0, 700) for n in range(5)]
        packed = pack(ranges, 1, max_records=1000)
        assert all(sum(item.count for item in group) <= 1000 for group in packed)

    @settings(max_examples=100)
    @given(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5000)), max_size=30),
        st.integers(1, 20),
        st.one_of(st.none(), st.integers(1, 3000)),
    )
    def test_each_offset_is_in_one_task(
        self, spans: list[tuple[int, int]], tasks: int, max_records: int | None
    ) -> None:
        ranges = [QueueRange(queue(n), start, start + count) for n, (start, count) in enumerate(spans)]
        packed = pack(ranges, tasks, max_records)
        pieces = sorted(
            (item for group in packed for item in group), key=lambda item: (item.queue, item.start)
        )
        for source in ranges:
            own = [piece for piece in pieces if piece.queue == source.queue]
            edges = [source.start, *(piece.end for piece in own)]
            assert [piece.start for piece in own] == edges[:-1]
            assert edges[-1] == source.end
        if max_records:
            assert all(sum(item.count for item in group) <= max_records for group in packed)

    def test_small_reads_take_few_tasks(self) -> None:
        assert [default_tasks(n, 8) for n in (1, 20_000, 20_001, 10**6)] == [1, 1, 2, 16]
