"""Tables of a store whose names are not ours."""

from __future__ import annotations

import msgspec
import pytest

from cometmq.cli.store_text import print_stats
from cometmq.store.inspect.stats import Outlook, QueueStats, StoreStats, TopicStats

NAME = "[red]:smile:\x1b[2J"


def blank(kind: type[msgspec.Struct], **given: object) -> dict[str, object]:
    """Fields of a struct, nothing in those that are not given."""
    empty = {int: -1, float: 0.0, str: "", bool: False}
    fields = msgspec.structs.fields(kind)
    return {field.name: given.get(field.name, empty.get(field.type)) for field in fields}


@pytest.mark.parametrize("by_queue", [False, True])
def test_a_topics_name_is_neither_markup_nor_an_escape(
    capsys: pytest.CaptureFixture[str], by_queue: bool
) -> None:
    outlook = Outlook(**blank(Outlook))
    topics = [TopicStats(**blank(TopicStats, topic=NAME))]
    queues = [QueueStats(**blank(QueueStats, topic=NAME))]
    print_stats(
        StoreStats(**blank(StoreStats, topics=topics, queues=queues, outlook=outlook)), by_queue=by_queue
    )

    shown = capsys.readouterr().out
    assert "[red]:smile:\\x1b[2J" in shown
    assert "\x1b" not in shown
