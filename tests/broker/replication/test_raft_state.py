"""The state that a raft member stores beside its log and restores after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.store.raft_log.members import add, again, elect, leader, member, raft_log

from cometmq.broker.replication import raft_state
from cometmq.raft import HardState, Members, MembersEntry
from cometmq.store import MessageStore
from cometmq.store.raft_log.member_files import write_suspect

NAMES = frozenset({"n0", "n1", "n2"})
START = MembersEntry(-1, -1, Members(NAMES))
LESS = MembersEntry(2, 1, Members(NAMES - {"n2"}))


def load(store: MessageStore, voters: frozenset[str] = NAMES) -> HardState:
    return raft_state.load(store.disk, raft_log(store), voters)


def save(store: MessageStore, state: HardState, before: HardState) -> None:
    raft_state.save(store.disk, raft_log(store).directory, state, before)


def kept(store: MessageStore) -> list[int]:
    """Return the indexes of the membership entries in the file."""
    path = Path(raft_log(store).directory) / "members.json"
    return [entry["index"] for entry in json.loads(path.read_text())["members"]]


def test_a_member_without_anything_is_suspect_until_the_group_begins(tmp_path: Path) -> None:
    store = member(tmp_path)
    assert load(store) == HardState(members=(START,), suspect=True, forgot=True)
    store = again(store, clean=False)
    state = load(store)
    assert state.suspect
    more = NAMES | {"n3"}
    assert load(store, more).members == (MembersEntry(-1, -1, Members(more)),)  # the settings still apply
    save(store, msgspec.structs.replace(state, term=1, vote="n1"), state)
    assert load(store).forgot
    write_suspect(store.disk, raft_log(store).directory, "it has rotted since")
    assert load(store).forgot
    save(store, msgspec.structs.replace(state, suspect=False, forgot=False), state)
    assert load(store, more) == HardState(1, "n1", (START,))
    store.close()


def test_a_directory_of_another_broker_is_trusted(tmp_path: Path) -> None:
    store = leader(tmp_path)  # the log has entries; our state file does not exist
    assert load(store) == HardState(members=(START,))
    store.close()


def test_a_vote_without_a_log_is_trusted(tmp_path: Path) -> None:
    store = member(tmp_path)
    save(store, HardState(3, "n1"), HardState())
    assert load(store) == HardState(3, "n1", (START,))
    store.close()


@pytest.fixture
def changed(tmp_path: Path) -> MessageStore:
    """Create a member whose last entry removes n2 and is not committed."""
    store = leader(tmp_path)
    load(store)
    add(store, b"one")
    raft_log(store).append_own(b"{}")
    store.commit()
    assert raft_log(store).last == LESS.index
    save(store, HardState(1, "", (START, LESS)), HardState())
    assert load(store).members == (START, LESS)
    return store


def test_members_that_a_cut_would_have_taken_hold_if_it_did_not_come_to_it(changed: MessageStore) -> None:
    before, state = load(changed), HardState(2, "", (START,))
    save(changed, raft_state.before_cut(state, before), before)
    store = again(changed, clean=False)
    assert load(store) == HardState(2, "", (START, LESS))
    store.close()


def test_members_that_a_cut_has_taken_are_gone_for_good(changed: MessageStore) -> None:
    before, state = load(changed), HardState(2, "", (START,))
    save(changed, raft_state.before_cut(state, before), before)
    assert kept(changed) == [-1, 2]
    raft_log(changed).cut(LESS.index)
    store = again(changed, clean=False)
    assert load(store).members == (START,)
    assert kept(store) == [-1]
    elect(store, 2)  # replaces the entry at that index
    assert load(store).members == (START,)
    store.close()


def test_what_is_saved_before_a_cut_is_in_the_order_of_the_log() -> None:
    more = MembersEntry(1, 2, Members(NAMES | {"n4"}))
    before, state = HardState(members=(START, LESS)), HardState(2, "", (START, more))
    assert raft_state.before_cut(state, before).members == (START, more, LESS)
    assert raft_state.before_cut(before, state) != before
    assert raft_state.before_cut(state, HardState(members=(START,))) is state
