"""Bodies of shown messages are written to this user's files, and no links are followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cometmq.admin.commands.messages import write_body
from cometmq.message import MessageExt

UNIQUE_KEY = "7F0000010807865541F26FA19EC00000"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "cometmq" / "msgbodys"


def message(msg_id: str = UNIQUE_KEY) -> MessageExt:
    return MessageExt(topic="t", body=b"body", properties={"UNIQ_KEY": msg_id}, store_host="127.0.0.1:10911")


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_directory_and_file_are_the_users_alone(cache: Path) -> None:
    path = write_body(message())

    assert path == str(cache / UNIQUE_KEY)
    assert Path(path).read_bytes() == b"body"
    assert (mode(cache), mode(path)) == (0o700, 0o600)


def test_a_link_under_the_name_is_replaced_and_not_followed(cache: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache.mkdir(parents=True)
    (cache / UNIQUE_KEY).symlink_to(victim)

    path = write_body(message())

    assert victim.read_text() == "precious"
    assert not os.path.islink(path)
    assert Path(path).read_bytes() == b"body"


def test_a_link_in_place_of_the_directory_is_not_followed(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / UNIQUE_KEY).write_text("precious")
    cache.parent.mkdir(parents=True)
    cache.symlink_to(elsewhere)

    path = write_body(message())

    assert (elsewhere / UNIQUE_KEY).read_text() == "precious"
    assert Path(path).parent.parent == tmp_path
    assert mode(Path(path).parent) == 0o700


def test_a_directory_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    uids = iter([uid + 1, uid])
    monkeypatch.setattr("os.getuid", lambda: next(uids))

    path = write_body(message())

    assert cache not in Path(path).parents
    assert Path(path).read_bytes() == b"body"


def test_a_directory_that_others_may_enter_is_closed_to_them(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o777)

    write_body(message())

    assert mode(cache) == 0o700


@pytest.mark.parametrize("name", ["..", "/etc/passwd", "../../x", "a\0b", "x" * 5000, "\x1b[2J"])
def test_an_id_that_is_no_file_name_gives_way_to_the_offset_id(cache: Path, name: str) -> None:
    path = write_body(message(name))

    assert path == str(cache / "7F00000100002A9F0000000000000000")
    assert [found.name for found in cache.iterdir()] == [os.path.basename(path)]
