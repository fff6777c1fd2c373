"""Idempotency keys in databases: effect and key are committed in one transaction, for any paramstyle."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from cometmq import ClientStateError, ConfigError, DatabaseMarks, SqliteMarks
from cometmq.client.idempotency import database

Connect = Callable[[], Any]


@pytest.fixture(params=[sqlite3.paramstyle, psycopg.paramstyle], ids=["sqlite", "postgres"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(style: str, request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    if style == sqlite3.paramstyle:
        return lambda: sqlite3.connect(tmp_path / "marks.db", timeout=30, check_same_thread=False)
    text = request.getfixturevalue("postgres")
    with psycopg.connect(text) as connection:
        connection.execute("DROP TABLE IF EXISTS cometmq_done, effects")
    return lambda: psycopg.connect(text)


@pytest.fixture
def marks(connect: Connect, style: str) -> Iterator[DatabaseMarks]:
    marks = DatabaseMarks(connect, paramstyle=style)
    marks.create_table()
    marks.create_table()  # a second call changes nothing
    connection = connect()
    connection.cursor().execute("CREATE TABLE effects (what VARCHAR(20))")
    connection.commit()
    connection.close()
    yield marks
    marks.close()


def count(connect: Connect, table: str) -> int:
    connection = connect()
    try:
        cursor = connection.cursor()
        cursor.execute(f"SELECT count(*) FROM {table}")
        return int(cursor.fetchone()[0])
    finally:
        connection.close()


def effect(cursor: Any) -> None:
    cursor.execute("INSERT INTO effects VALUES ('paid')")


def test_effect_and_mark_are_committed_together_and_once(connect: Connect, marks: DatabaseMarks) -> None:
    assert [marks.once("g", "a", effect) for _ in range(3)] == [True, False, False]
    assert marks.once("other", "a", effect)
    assert (count(connect, "effects"), count(connect, "cometmq_done")) == (2, 2)


def test_a_failure_leaves_neither_effect_nor_mark(connect: Connect, marks: DatabaseMarks) -> None:
    def fail(cursor: Any) -> None:
        effect(cursor)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        marks.once("g", "a", fail)
    assert (count(connect, "effects"), count(connect, "cometmq_done")) == (0, 0)
    assert marks.once("g", "a", effect)


def test_a_handler_that_swallows_an_error_of_the_database(
    connect: Connect, marks: DatabaseMarks, style: str
) -> None:
    """PostgreSQL rolls the transaction back although its commit succeeds; SQLite commits it."""

    def swallow(cursor: Any) -> None:
        effect(cursor)
        with contextlib.suppress(psycopg.Error, sqlite3.Error):
            cursor.execute("SELECT * FROM nowhere")

    undone = False
    try:
        marks.once("g", "a", swallow)
    except psycopg.Error:
        undone = True
    kept = 0 if undone else 1
    assert (count(connect, "effects"), count(connect, "cometmq_done")) == (kept, kept)
    assert undone == (style == psycopg.paramstyle)


def test_a_handler_that_rolls_back_is_told(connect: Connect, marks: DatabaseMarks) -> None:
    with pytest.raises(ClientStateError, match="'a' rolled its transaction back"):
        marks.once("g", "a", lambda cursor: cursor.connection.rollback())
    assert marks.once("g", "a", effect)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_handler_that_commits_and_raises_is_called_again(
    connect: Connect, marks: DatabaseMarks, goes_on: bool
) -> None:
    """goes_on: the handler runs another statement after its commit, which opens a new transaction."""

    def commit(cursor: Any) -> None:
        cursor.connection.commit()
        if goes_on:
            effect(cursor)
        raise ValueError("after the commit")

    with pytest.raises(ValueError, match="after the commit"):
        marks.once("g", "a", commit)
    assert (count(connect, "effects"), count(connect, "cometmq_done")) == (0, 0)
    assert marks.once("g", "a", effect)
    assert count(connect, "effects") == 1


def test_a_failed_handler_leaves_the_mark_of_another_alone(connect: Connect, marks: DatabaseMarks) -> None:
    def overtaken(cursor: Any) -> None:
        cursor.connection.rollback()
        assert marks.once("g", "a", effect)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        marks.once("g", "a", overtaken)
    assert marks.once("g", "a", effect) is False


@pytest.mark.parametrize("how", ["commit", "script"])
def test_a_handler_that_ends_its_transaction_in_sqlite_is_told(tmp_path: Path, how: str) -> None:
    path = tmp_path / "ended.db"
    with SqliteMarks(str(path)) as marks:
        marks.once("g", "table", lambda cursor: cursor.execute("CREATE TABLE effects (what TEXT)"))

        def end(cursor: Any) -> None:
            if how == "script":
                cursor.executescript("INSERT INTO effects VALUES ('paid');")
            else:
                cursor.connection.commit()

        for _ in range(2):  # no key was stored
            with pytest.raises(ClientStateError, match="'a' ended its transaction"):
                marks.once("g", "a", end)
        assert marks.once("g", "a", effect)


def test_of_many_at_once_one_has_its_effect(connect: Connect, marks: DatabaseMarks) -> None:
    """Each caller waits for the transaction of the previous one."""
    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(lambda _: marks.once("g", "a", effect), range(16)))
    assert sum(first) == 1
    assert count(connect, "effects") == 1


def test_a_failed_call_leaves_the_key_to_one_that_waits(connect: Connect, marks: DatabaseMarks) -> None:
    begun, end = threading.Event(), threading.Event()

    def fail(cursor: Any) -> None:
        effect(cursor)
        begun.set()
        end.wait(20)
        raise ValueError("no")

    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(marks.once, "g", "a", fail)
        assert begun.wait(20)
        waiting = threads.submit(marks.once, "g", "a", effect)
        end.set()
        assert isinstance(failing.exception(20), ValueError)
        assert waiting.result(20)
    assert count(connect, "effects") == 1


def test_old_marks_are_deleted(connect: Connect, style: str) -> None:
    for number in range(2):  # each purges old keys at its first message
        marks = DatabaseMarks(connect, paramstyle=style, table="old_ones", expiry_s=-1.0)
        marks.create_table()
        assert marks.once("g", f"{number}", lambda cursor: None)
        marks.close()
        assert count(connect, "old_ones") == 0


class Clocks:
    """Replacements for the clocks that the module of the keys uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1e9, 100.0
        monkeypatch.setattr(database, "time", SimpleNamespace(time=lambda: self.wall))
        monkeypatch.setattr(database, "boottime", lambda: self.steady)

    def go_on(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.mark.parametrize("step", [1e7, -1e9])
def test_a_step_of_the_clock_deletes_no_mark_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    clocks = Clocks(monkeypatch)
    with SqliteMarks(str(tmp_path / "marks.db"), expiry_s=1000.0) as marks:

        def first(key: str) -> bool:
            clocks.go_on(100)  # lets each call purge old keys
            return marks.once("g", key, lambda cursor: None)

        assert first("before")
        clocks.wall += step
        assert first("meanwhile")
        assert [first("before"), first("meanwhile")] == [False, False]
        clocks.wall -= step
        assert [first("before"), first("meanwhile")] == [False, False]
        clocks.go_on(1000)
        assert first("after")
        assert first("before")


def test_a_lost_connection_is_replaced(connect: Connect, marks: DatabaseMarks) -> None:
    def lose(cursor: Any) -> None:
        cursor.connection.close()
        raise ValueError("lost")

    with pytest.raises((ValueError, sqlite3.Error, psycopg.Error)):
        marks.once("g", "a", lose)
    assert marks.once("g", "a", effect)
    assert count(connect, "effects") == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(connect: Connect, marks: DatabaseMarks) -> None:
    assert marks.once("g", "a", effect)
    child = multiprocessing.get_context("fork").Process(target=marks.once, args=("g", "b", effect))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert marks.once("g", "b", effect) is False
    assert marks.once("g", "c", effect)
    assert count(connect, "effects") == 3


class Recorder:
    """A DB-API connection that records the statements it receives."""

    def __init__(self, **attributes: object) -> None:
        self.asked: list[tuple[str, object]] = []
        self.rowcount = 1
        for name, value in attributes.items():
            setattr(self, name, value)

    def cursor(self) -> Recorder:
        return self

    def execute(self, statement: str, values: object = ()) -> None:
        self.asked.append((statement, values))

    def fetchone(self) -> tuple[int]:
        return (1,)

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("style", "places", "named"),
    [
        ("qmark", "VALUES (?, ?, ?)", False),
        ("numeric", "VALUES (:1, :2, :3)", False),
        ("format", "VALUES (%s, %s, %s)", False),
        ("named", "VALUES (:scope, :message_key, :done_at)", True),
        ("pyformat", "VALUES (%(scope)s, %(message_key)s, %(done_at)s)", True),
    ],
)
def test_statements_have_the_parameters_of_their_module(style: str, places: str, named: bool) -> None:
    recorder = Recorder()
    DatabaseMarks(lambda: recorder, paramstyle=style, table="app.done").once("g", "a", lambda _: None)
    statement, values = recorder.asked[0]
    assert statement.startswith("INSERT INTO app.done (scope, message_key, done_at)")
    assert places in statement
    if named:
        assert isinstance(values, dict)
        assert (values["scope"], values["message_key"]) == ("g", "a")
    else:
        assert isinstance(values, tuple)
        assert values[:2] == ("g", "a")


@pytest.mark.parametrize(
    "connect",
    [lambda path: Recorder(autocommit=True), lambda path: sqlite3.connect(path, isolation_level=None)],
)
def test_a_connection_that_commits_by_itself_is_refused(
    connect: Callable[[str], Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "own.db")
    SqliteMarks(path).close()
    marks = DatabaseMarks(lambda: connect(path), paramstyle="qmark")
    with pytest.raises(ConfigError, match="without: effect and key are one transaction"):
        marks.once("g", "a", lambda _: None)


@pytest.mark.parametrize(
    ("style", "table", "field"), [("dollar", "t", "paramstyle"), ("qmark", "t; DROP TABLE u", "table")]
)
def test_settings_that_cannot_be_used_are_refused(style: str, table: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DatabaseMarks(Recorder, paramstyle=style, table=table)


def test_sqlite_marks_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file"):
        SqliteMarks(":memory:")
    with SqliteMarks(str(tmp_path / "one.db")) as marks:
        marks.once("g", "a", lambda cursor: cursor.execute("CREATE TABLE effects (what TEXT)"))
    with SqliteMarks(str(tmp_path / "one.db")) as again:
        assert again.once("g", "a", effect) is False
