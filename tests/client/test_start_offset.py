from __future__ import annotations

import pytest

from cometmq.client.consumer.options import ConsumeFromWhere
from cometmq.client.consumer.start_offset import Start, StartAt, StartAtMax, StartAtTime, start_of

LAST, FIRST, TIME = ConsumeFromWhere.LAST_OFFSET, ConsumeFromWhere.FIRST_OFFSET, ConsumeFromWhere.TIMESTAMP


@pytest.mark.parametrize(
    ("where", "stored", "topic", "expected"),
    [
        (LAST, 7, "T", StartAt(7)),
        (LAST, 0, "T", StartAt(0)),
        (FIRST, 7, "T", StartAt(7)),
        (TIME, 7, "%RETRY%G", StartAt(7)),
        (LAST, None, "T", StartAtMax()),
        (LAST, None, "%RETRY%G", StartAt(0)),
        (FIRST, None, "T", StartAt(0)),
        (FIRST, None, "%RETRY%G", StartAt(0)),
        (TIME, None, "T", StartAtTime(1234)),
        (TIME, None, "%RETRY%G", StartAtMax()),
    ],
)
def test_where_a_queue_starts(
    where: ConsumeFromWhere, stored: int | None, topic: str, expected: Start
) -> None:
    assert start_of(where, stored, topic, 1234) == expected
