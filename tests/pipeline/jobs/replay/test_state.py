"""The state directory of a replay: its owner, its content, and the remains of a killed run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.pipeline.s3_server import KEY

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplayError
from cometmq.pipeline.jobs.replay.state import Asked, Progress, Replay, ReplayState, Sent, reached

ASKED = Asked(source="/data", into="{topic}-replay", order="queue")


def begun(state: ReplayState, asked: Asked = ASKED, run: str = "one") -> Replay:
    """Begin a replay."""
    replay = state.begin(asked)
    replay.queues["T2"] = [MessageQueue("T2", "broker-a", 0)]
    state.start(replay, run, begun=False)
    return replay


def test_a_state_directory_belongs_to_one_replay(tmp_path: Path) -> None:
    state = ReplayState(str(tmp_path / "state"))
    assert state.begin(ASKED).id != state.begin(ASKED).id
    assert state.begin(ASKED).id != begun(state).id == state.begin(ASKED).id
    other = Asked(source="/other", into="{topic}-replay", order="queue")
    with pytest.raises(ReplayError, match="source /data"):
        state.begin(other)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(ReplayError, match="not the state directory"):
        ReplayState(str(tmp_path / "photos")).begin(ASKED)


@pytest.mark.slow("an object store starts")
@pytest.mark.representative
@pytest.mark.parametrize("where", ["local", "s3"])
def test_of_two_first_runs_one_begins(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = str(tmp_path / "state") if where == "local" else request.getfixturevalue("s3").uri(tmp_path.name)
    one, two = ReplayState(path), ReplayState(path)
    late = two.begin(ASKED)
    late.queues["T2"] = [MessageQueue("T2", "broker-a", 1)]
    first = begun(one)
    with pytest.raises(ReplayError, match="another run uses this directory, too") as raised:
        two.start(late, "two", begun=False)
    assert KEY not in str(raised.value)
    assert (two.begin(ASKED), two.owned_by("one")) == (first, True)
    two.take_over("two")
    with pytest.raises(ReplayError, match="another run has taken over"):
        one.start(first, "one", begun=True)


def test_the_state_keeps_no_secret_of_the_source(tmp_path: Path) -> None:
    state, source = ReplayState(str(tmp_path)), "s3://key:secret@bucket/archive?endpoint_override=host:1"
    asked = msgspec.structs.replace(ASKED, source=source)
    replay = begun(state, asked)
    content = (tmp_path / "replay.json").read_text()
    assert not any(word in content for word in ("key:", "secret", "host"))
    assert state.begin(asked).id == replay.id
    (tmp_path / "replay.json").write_text(content.replace("s3://bucket/archive", source))
    assert state.begin(asked).id == replay.id, "as older versions wrote it"
    other = msgspec.structs.replace(ASKED, source="s3://key:secret@bucket/other")
    with pytest.raises(ReplayError, match="a replay with source s3://bucket/archive; continue it") as raised:
        state.begin(other)
    assert "key:" not in str(raised.value)


@pytest.mark.parametrize(
    "older", ["s3://bucket/archive", "s3://k:s@bucket/archive?endpoint_override=minio-east"]
)
def test_a_state_belongs_to_one_store_of_several(older: str, tmp_path: Path) -> None:
    state = ReplayState(str(tmp_path / "state"))
    east, west = (
        msgspec.structs.replace(ASKED, source=f"s3://k:s@bucket/archive?endpoint_override=minio-{name}")
        for name in ("east", "west")
    )
    id_ = begun(state, east).id
    with pytest.raises(ReplayError, match="a replay of source s3://bucket/archive with other options"):
        state.begin(west)
    other_key = msgspec.structs.replace(east, source=east.source.replace("k:s", "l:t/"))
    assert state.begin(other_key).id == id_
    file = tmp_path / "state" / "replay.json"
    content = msgspec.json.decode(file.read_bytes())
    del content["asked"]["source_hash"]
    content["asked"]["source"] = older
    file.write_bytes(msgspec.json.encode(content))
    assert state.begin(east).id == id_
    if "?" in older:
        with pytest.raises(ReplayError, match="other options"):
            state.begin(west)


def test_a_state_that_a_kill_left_half_written_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ReplayState(str(tmp_path))

    def died(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as killed:
        killed.setattr(os, "unlink", lambda _: None)
        killed.setattr(os, "link", died)
        with pytest.raises(ReplayError, match="killed"):
            begun(state)
    assert len(list(tmp_path.iterdir())) == 1
    assert state.begin(ASKED).queues == {}


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    state = ReplayState(str(tmp_path / "state"))
    begun(state)
    state.save("one", 0, Progress([Sent(MessageQueue("T", "broker-a", 1), 7)], messages=8))
    state.save_positions(3)
    readers = {
        "replay.json": state.replay,
        "progress/one-0.json": state.all_saved,
        "positions.json": state.positions_set,
    }
    for name, read in readers.items():
        path = tmp_path / "state" / name
        content = path.read_bytes()
        foreign = [b"\xff\xfe", b"null", b"[]", b"[" * 2000, content.replace(b":", b"="), b"0" * 100]
        for damaged in (*foreign, *(content[:size] for size in range(len(content)))):
            path.write_bytes(damaged)
            with pytest.raises(ReplayError, match="cannot be read"):
                read()
        path.write_bytes(content)
        read()
    path = tmp_path / "state" / "replay.json"
    content = path.read_bytes()
    for damage in ({"id": "x' OR '1"}, {"queues": {}}, {"queues": {"T2": []}}):
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(content) | damage))
        with pytest.raises(ReplayError, match="is invalid"):
            state.replay()
    path.write_bytes(content.replace(b'"format":1', b'"format":2'))
    with pytest.raises(ReplayError, match="of format 2"):
        state.replay()
    path.unlink()
    path.mkdir()
    with pytest.raises(ReplayError, match=r"replay\.json cannot be"):
        state.replay()
    (tmp_path / "file").touch()
    with pytest.raises(ReplayError, match="cannot be"):
        begun(ReplayState(str(tmp_path / "file")))


def test_the_newest_owner_sends_and_progress_adds_up(tmp_path: Path) -> None:
    state, queue = ReplayState(str(tmp_path / "state")), MessageQueue("T", "broker-a", 1)
    state.take_over("one")
    state.save("one", 0, Progress([Sent(queue, 7)], messages=8))
    state.take_over("two")
    assert (state.owned_by("one"), state.owned_by("two")) == (False, True)
    state.save("two", 0, Progress([Sent(queue, 9)], messages=2))
    assert reached(state.all_saved()) == {queue: Sent(queue, 9)}
    assert [progress.messages for progress in state.all_saved("one")] == [8]
    assert state.saved("two", 5) == Progress()
