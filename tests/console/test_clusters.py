"""The console's list of clusters, its file, and the rights to change it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cometmq.admin import Admin
from cometmq.console.auth.audit import Audit
from cometmq.console.base.clusters import (
    MAX_CLUSTERS,
    MAX_FILE_BYTES,
    STARTED,
    ClusterConnection,
    ClusterError,
    Clusters,
)
from cometmq.console.base.errors import NotAllowed
from cometmq.console.pages import clusters as page
from cometmq.console.widgets.actions import Action, ActionProgress
from cometmq.protocol.bodies import ClusterInfo
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, RemotingServer


async def test_the_file_keeps_clusters_and_is_its_users_own(tmp_path: Path) -> None:
    path = tmp_path / "data" / "clusters.json"
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    await clusters.put("b", " 127.0.0.1:2,127.0.0.1:3 ", signed=True)
    await clusters.make_standard(clusters.connections["b"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ended: list[str] = []
    clusters.connections["b"].on_end["page"] = lambda: ended.append("b")
    await clusters.put("b", "127.0.0.1:4", shown=clusters.connections["b"], signed=True)
    assert ended == ["b"]
    await clusters.put("c", "127.0.0.1:5")
    await clusters.stop()

    again = Clusters(path, "127.0.0.1:9")
    await again.start()
    assert [(each.name, each.namesrv, each.signed) for each in again.connections.values()] == [
        (STARTED, "127.0.0.1:9", True),
        ("b", "127.0.0.1:4", True),
        ("c", "127.0.0.1:5", False),
    ]
    assert again.find("") is again.connections["b"]
    assert again.find("gone") is None
    await again.remove(again.connections["b"])
    assert again.find("b") is None
    assert again.find("") is again.connections[STARTED]
    await again.stop()


@pytest.mark.parametrize(
    ("name", "namesrv"),
    [
        (STARTED, "127.0.0.1:1"), ("", "127.0.0.1:1"), ("a;b", "127.0.0.1:1"), ("a" * 65, "127.0.0.1:1"),
        ("a", ""), ("a", "127.0.0.1"), ("a", "x:1;" * 300),
    ],
)  # fmt: skip
async def test_what_is_no_cluster_is_refused_and_changes_nothing(
    tmp_path: Path, name: str, namesrv: str
) -> None:
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    with pytest.raises(ClusterError):
        await clusters.put(name, namesrv)
    assert list(clusters.connections) == [STARTED]
    assert not (tmp_path / "clusters.json").exists()


async def test_a_console_shows_a_bounded_number_of_clusters(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    for number in range(MAX_CLUSTERS - 1):
        clusters.connections[f"c{number}"] = clusters.connections[STARTED]
    with pytest.raises(ClusterError, match="at most 32"):
        await clusters.put("more", "127.0.0.1:1")


async def test_entries_that_cannot_be_used_are_named_and_left_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "clusters.json"
    wrong = {STARTED: "127.0.0.1:6", "a b": "127.0.0.1:2", "number": 5, "none": None, "typo": "127.0.0.1"}
    many = {f"c{number}": "127.0.0.1:2" for number in range(MAX_CLUSTERS)}
    path.write_text(json.dumps({"clusters": wrong | many}))
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    assert clusters.connections[STARTED].namesrv == "127.0.0.1:1"
    assert list(clusters.connections) == [STARTED, *list(many)[:-1]]
    for name in [*wrong, list(many)[-1]]:
        assert f"{path}: entry {name!r} of clusters is ignored: " in caplog.text
    await clusters.remove(clusters.connections["c0"])
    await clusters.put("typo", "127.0.0.1:7")
    kept = json.loads(path.read_text())["clusters"]
    assert kept.pop("typo") == "127.0.0.1:7"
    assert kept == {name: each for name, each in (wrong | many).items() if name not in ("c0", "typo")}
    await clusters.stop()


@pytest.mark.parametrize("edited", ['{"clusters": {"mine": "127.0.0.1:7"}}', "{", None])
async def test_an_edit_of_the_file_beside_the_running_console_is_not_overwritten(
    tmp_path: Path, edited: str | None
) -> None:
    path = tmp_path / "clusters.json"
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    await clusters.put("b", "127.0.0.1:2")
    path.unlink() if edited is None else path.write_text(edited)
    b = clusters.connections["b"]
    for change in (clusters.put("c", "127.0.0.1:3"), clusters.remove(b), clusters.make_standard(b)):
        with pytest.raises(ClusterError, match="was changed outside this console"):
            await change
    assert (path.read_text() if path.exists() else None) == edited
    assert (list(clusters.connections), clusters.standard) == ([STARTED, "b"], STARTED)
    await clusters.stop()


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def of_another_user(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize(
    "made",
    [
        b"", b"{", b"\xff", b'{"standard": "\xff"}', b"[" * 500_000, b'{"clusters": {"a":' * 100_000, b"[]",
        b"null", b'{"clusters": []}', b'{"clusters": {"a": "x:1"}, "standard": 5}', b'{"signed": "a"}',
        b" " * (MAX_FILE_BYTES + 1), directory, pipe, of_another_user,
    ],
    ids=lambda made: made.__name__ if callable(made) else repr(made[:40]),
)  # fmt: skip
async def test_a_console_starts_without_a_file_that_it_cannot_read(
    tmp_path: Path, made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clusters.json"
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        made(path)
    if made is of_another_user:  # root, as which tests may run, ignores file modes

        def refuse(path: Path, _mode: str) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", refuse)
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    assert list(clusters.connections) == [STARTED]
    assert f"{path} cannot be read: " in caplog.text
    assert "Traceback" not in caplog.text
    with pytest.raises(ClusterError, match=r"cannot be read.*Repair or remove it"):
        await clusters.put("b", "127.0.0.1:2")
    if isinstance(made, bytes):
        assert path.read_bytes() == made
    await clusters.stop()


@pytest.fixture
def admins(monkeypatch: pytest.MonkeyPatch) -> list[Admin]:
    """Collect all started admin clients.

    A start yields to other tasks, which may change the list meanwhile.
    """
    started: list[Admin] = []
    start = Admin.start

    async def slow(admin: Admin) -> None:
        started.append(admin)
        await start(admin)
        await asyncio.sleep(0.02)

    monkeypatch.setattr(Admin, "start", slow)
    return started


async def test_concurrent_changes_happen_one_after_the_other(tmp_path: Path, admins: list[Admin]) -> None:
    path = tmp_path / "clusters.json"
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    await clusters.put("c", "127.0.0.1:5")
    c = clusters.connections["c"]
    outcomes = await asyncio.gather(
        clusters.put("b", "127.0.0.1:2"),
        clusters.put("b", "127.0.0.1:3"),  # a change by another administrator
        clusters.make_standard(c),
        clusters.put("c", "127.0.0.1:6", shown=c, signed=True),
        clusters.put("c", "127.0.0.1:7", shown=c),
        clusters.make_standard(c),
        clusters.remove(c),
        return_exceptions=True,
    )
    changed = (
        "cluster c has been changed meanwhile: its name servers are 127.0.0.1:6, requests are signed. "
        "Reload the page"
    )
    assert [str(each) for each in outcomes if each is not None] == [
        "cluster b already exists",
        *[changed] * 3,
    ]
    b, c = clusters.connections["b"], clusters.connections["c"]
    outcomes = await asyncio.gather(
        clusters.remove(b), clusters.put("b", "127.0.0.1:4", shown=b), return_exceptions=True
    )
    assert [str(each) for each in outcomes if each is not None] == ["cluster b does not exist"]
    used = [each.admin for each in clusters.connections.values()]
    assert [each.state for each in used] == ["running"] * 2
    assert {each.state for each in admins if each not in used} == {"stopped"}
    written = json.loads(path.read_text())
    assert (written["standard"], written["clusters"]) == ("c", {"c": "127.0.0.1:6"})
    await asyncio.gather(clusters.put("d", "127.0.0.1:7"), clusters.stop())
    assert {each.state for each in admins} == {"stopped"}


async def test_what_cannot_be_used_is_written_back_unchanged_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "clusters.json"
    file = {
        "standard": "typo",
        "clusters": {"typo": "127.0.0.1", "b": "127.0.0.1:2"},
        "signed": ["typo", "b"],
    }
    path.write_text(json.dumps(file))
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    assert clusters.standard == STARTED
    problems = clusters.problems
    assert [each.split(": ")[1] for each in problems] == [
        "entry 'typo' of clusters is ignored", "there is no cluster 'typo' to be the default",
    ]  # fmt: skip
    await clusters.put("c", "127.0.0.1:3")
    await clusters.remove(clusters.connections["c"])
    assert json.loads(path.read_text()) == file
    assert clusters.problems == problems
    await clusters.put("typo", "127.0.0.1:4")
    file |= {"clusters": {"typo": "127.0.0.1:4", "b": "127.0.0.1:2"}, "signed": ["b"]}
    assert json.loads(path.read_text()) == file
    assert (clusters.standard, clusters.problems) == ("typo", [])
    await clusters.stop()


async def test_a_file_is_not_written_longer_than_it_may_be_read(tmp_path: Path) -> None:
    path = tmp_path / "clusters.json"
    path.write_text(json.dumps({"clusters": {"bad": [1] * 200_000}}))
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    before = path.read_text()
    with pytest.raises(ClusterError, match="would exceed 1048576 bytes"):
        await clusters.put("b", "127.0.0.1:2")
    assert path.read_text() == before
    await clusters.stop()


async def test_a_failing_write_leaves_no_client_running(tmp_path: Path, admins: list[Admin]) -> None:
    (tmp_path / "clusters.json.new").mkdir()
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    with pytest.raises(ClusterError, match="cannot be written"):
        await clusters.put("b", "127.0.0.1:2")
    assert list(clusters.connections) == [STARTED]
    assert [each.state for each in admins] == ["stopped"]


async def test_a_page_that_cannot_be_notified_does_not_keep_a_cluster_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, ended = ClusterConnection("b", "127.0.0.1:1", signed=False), []

    def fail() -> None:
        raise RuntimeError("the page is gone")

    connection.on_end |= {1: fail, 2: lambda: ended.append(2)}
    await connection.admin.start()
    await connection.close()
    assert connection.admin.state == "stopped"
    assert ended == [2]
    assert "a page could not be notified that cluster b" in caplog.text


# -- the console's account


async def test_requests_are_signed_only_where_an_administrator_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of other clusters receive neither the access key nor a signature."""
    monkeypatch.setenv("COMETMQ_ACCESS_KEY", "console")
    monkeypatch.setenv("COMETMQ_SECRET_KEY", "the-secret-of-the-console")
    received: list[Frame] = []

    def answer(_connection: Connection, frame: Frame) -> Frame:
        received.append(frame)
        names = frame.code == RequestCode.GET_BROKER_CLUSTER_INFO
        return frame.response(0, ext={}, body=ClusterInfo().encode() if names else b"{}")

    server = RemotingServer({}, default=answer)
    addr = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    clusters = Clusters(tmp_path / "clusters.json", addr)
    await clusters.start()
    await clusters.put("foreign", addr)
    await clusters.put("ours", addr, signed=True)
    signed = {}
    for name, connection in clusters.connections.items():
        received.clear()
        await connection.admin.cluster_info()
        await connection.admin.broker_config(addr)
        assert received[-1].code == RequestCode.GET_BROKER_CONFIG
        fields = [frame.ext or {} for frame in received]
        assert "the-secret-of-the-console" not in str(fields)
        signed[name] = any("Signature" in each or "AccessKey" in each for each in fields)
    assert signed == {STARTED: True, "foreign": False, "ours": True}
    await clusters.stop()
    await server.stop(0)


# -- rights


class FilledForm:
    """A form of the page, filled in and submitted."""

    def __init__(self, *_given: object) -> None:
        self.values = {"clusters.name": "new", "clusters.namesrv": "127.0.0.1:8", "clusters.account": "no"}

    def text(self, key: str, *_given: object, **_more: object) -> SimpleNamespace:
        return SimpleNamespace(value=self.values[key])

    choice = text

    async def submitted(self) -> bool:
        return True


CHANGES = {
    "cluster.add": lambda view: page.put(view, None),
    "cluster.change": lambda view: page.put(view, view.services.clusters.connections["b"]),
    "cluster.standard": lambda view: page.make_standard(view, view.services.clusters.connections["b"]),
    "cluster.remove": lambda view: page.remove(view, view.services.clusters.connections["b"]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("role_changes", ["before the dialog", "before the confirmation"])
async def test_the_server_refuses_each_change_to_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, role_changes: str
) -> None:
    monkeypatch.setattr(page, "Form", FilledForm)
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    await clusters.start()
    await clusters.put("b", "127.0.0.1:2")
    before = (tmp_path / "clusters.json").read_bytes()
    audit, told = Audit(tmp_path / "audit.jsonl"), []
    view: Any = SimpleNamespace(
        services=SimpleNamespace(
            clusters=clusters, audit=audit, sessions=SimpleNamespace(is_valid=lambda _session: True)
        ),
        session=SimpleNamespace(name="eve", address="::1"),
        may_change=False,
        t=lambda key, **_values: key,
        notify_error=told.append,
        connection=clusters.connections[STARTED],
    )
    if role_changes == "before the dialog":
        with pytest.raises(NotAllowed):
            await CHANGES[change](view)
    else:
        confirmed: list[Action] = []

        async def run(action: Action, _view: object) -> None:
            confirmed.append(action)

        monkeypatch.setattr(Action, "run", run)
        await CHANGES[change](view)
        assert not await confirmed[0].execute(view, ActionProgress.__new__(ActionProgress))
        assert told == ["common.refused_role"]
    assert [(each.action, each.result) for each in audit.newest] == [(change, "refused")]
    assert (tmp_path / "clusters.json").read_bytes() == before
    assert list(clusters.connections) == [STARTED, "b"]
    await clusters.stop()
