"""Messages that no member would send are refused with the field's name, at no cost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.raft.solo import Solo, append, ask, has, yes

from cometmq.errors import ConfigError, RaftMessageError
from cometmq.raft import AnyMessage, Members, MembersEntry, RaftOptions
from cometmq.raft.messages import MAX_INCARNATION

HUGE = 1 << 63


def entry(index: int, size: int = 3, term: int = 1) -> MembersEntry:
    return MembersEntry(index, term, Members(frozenset(f"n{i}" for i in range(size))))


def named(name: str) -> MembersEntry:
    return MembersEntry(1, 1, Members(frozenset(("n0", name))))


@pytest.mark.parametrize(
    ("message", "changes", "field"),
    [
        (ask("n1", 2), {"group": "other"}, "group"),
        (ask("n1", 2), {"group": ""}, "group"),
        (ask("n1", 2), {"to": "n7"}, "to"),
        (ask("n1", 2), {"sender": "n0"}, "to"),
        (ask("n1", 2), {"sender": "n" * 256}, "sender"),
        *((ask("n1", 2), {"term": term}, "term") for term in (-1, HUGE - 1, HUGE)),
        (ask("n1", 2), {"last_index": HUGE}, "last_index"),
        (ask("n1", 2), {"last_term": 3}, "last_term"),
        (append("n1", 2, (0, 1)), {"prev_index": -2}, "prev_index"),
        (append("n1", 2, (0, 1)), {"prev_term": 3}, "prev_term"),
        (append("n1", 2, (0, 1)), {"count": 1 << 40, "last": 1 << 41}, "count"),
        (append("n1", 2, (0, 1)), {"count": -1}, "count"),
        (append("n1", 2, (0, 1), 1), {"entries_term": 3}, "entries_term"),
        (append("n1", 2, (0, 1), 1), {"entries_term": 0}, "entries_term"),
        (append("n1", 2, (0, 1), 1), {"last": 0}, "last"),
        (append("n1", 2, (0, 1)), {"commit": 1}, "commit"),
        (append("n1", 2, (0, 1), 1), {"members": (entry(7),)}, "index of members"),
        (append("n1", 2, (0, 1), 1), {"members": (entry(1), entry(1))}, "index of members"),
        (append("n1", 2, (0, 1), 1), {"members": (entry(1, size=32),)}, "number of members"),
        (append("n1", 2, (0, 1), 1), {"members": (entry(1, term=5),)}, "term of members"),
        (append("n1", 2, (0, 1), 1), {"members": (named("n" * 256),)}, "length of a member's name"),
        *((ask("n1", 2), {"run": run}, "run") for run in (-1, MAX_INCARNATION + 1)),
        (has("n1", 2, 0), {"match": HUGE}, "match"),
        (has("n1", 2, 0), {"match": 1}, "match"),
        (has("n1", 2, 0), {"written": HUGE}, "written"),
    ],
)
def test_a_field_that_cannot_be(message: AnyMessage, changes: dict[str, Any], field: str) -> None:
    solo = Solo([1])

    with pytest.raises(RaftMessageError) as refused:
        solo.step(msgspec.structs.replace(message, **changes))

    assert refused.value.field == field
    assert solo.node.term == 1


@pytest.mark.parametrize("wrong", [{"election_ms": 399}, {"heartbeat_ms": 0}, {"frame_entries": 4_097}])
def test_options_that_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("heartbeat", "election")):
        RaftOptions(**wrong)


def test_an_answer_about_entries_that_do_not_exist_is_refused() -> None:
    solo = Solo([1])
    solo.lead()

    with pytest.raises(RaftMessageError, match="the leader's log ends at 1"):
        solo.step(has("n1", 2, 9))


numbers = st.one_of(st.integers(-2, 6), st.sampled_from((1 << 56, 1 << 62, HUGE - 1, HUGE, -HUGE)))


@st.composite
def messages(draw: st.DrawFn) -> AnyMessage:
    kind = draw(st.sampled_from((ask("n1", 2), append("n1", 2, (0, 1), 1), has("n1", 2, 0), yes("n2", 2))))
    fields = {
        name: draw(st.booleans() if isinstance(value, bool) else numbers)
        for name, value in msgspec.structs.asdict(kind).items()
        if isinstance(value, int) and draw(st.booleans())
    }
    return msgspec.structs.replace(kind, sender=draw(st.sampled_from(("n1", "n2", "n9"))), **fields)


@settings(max_examples=300, deadline=None)
@given(st.lists(messages(), max_size=12), st.booleans())
def test_any_messages_are_taken_or_refused(many: list[AnyMessage], leads: bool) -> None:
    solo = Solo([1, 1], committed=0)
    if leads:
        solo.lead()
    for message in many:
        try:
            solo.step(message)
        except RaftMessageError:
            continue
        status = solo.node.status()
        assert status.last == solo.disk.last
        assert solo.terms == sorted(solo.terms)
        assert solo.terms[:1] == [1] or solo.disk.first > 0
        assert 0 <= status.committed <= status.last
