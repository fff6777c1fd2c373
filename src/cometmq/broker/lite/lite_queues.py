"""The queues of lite topics: for each message its place in the log, and the groups' offsets, in a database.

Apache's broker keeps a directory with a file of 6 MB for each lite topic, or all of them in RocksDB. This
broker keeps them in one SQLite database, `config/liteTopics.db`. A lite topic takes no memory and no file of
its own, so a million of them cost little more than none. The database is derived from the log, like a
consume queue: each record in a queue of the parent topic contains the name of its lite topic and its offset.
For each parent queue, the database holds the offset up to which it has been read. Changes are collected in a
transaction for a short time, so a crash loses the newest changes. Then the messages are read again from the
parent's queues; consumer offsets fall back, so that messages are delivered again.

A replica (a slave, or a follower in a raft group) derives its database from its own copy of the log. It
copies the consumer offsets: each change of an offset has a number, so a replica requests the changes after
the last number that it has. The numbers are valid as long as the database is open, for a time that has an id.

Budget: 15 µs of CPU for a message that arrives, 10 µs for a stored consumer offset.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cometmq import logs
from cometmq.protocol.lite import all_of, lmq_range

if TYPE_CHECKING:
    import sqlite3

log = logs.logger(__name__)

MAX_CACHED = 16_384
"""The maximum number of lite topics, and of consumer offsets, that are kept in memory."""
CHECKPOINT_BYTES = 8 << 20
"""The size of the write-ahead log at which a thread moves its content to the database."""
_VERSION = 2
_FILES = ("", "-wal", "-shm")
Lag = tuple[str, int, int]
"""The queue name of a lite topic, a group's lag, and the log position of the first unconsumed message."""
_LAGS = """
WITH wanted(id) AS (
    SELECT topic FROM offsets WHERE consumers = ?1
    UNION SELECT id FROM subscriptions JOIN topics USING (lmq) WHERE consumers = ?1
    UNION SELECT id FROM subscriptions AS every JOIN topics ON topics.lmq > every.lmq
        AND topics.lmq < rtrim(every.lmq, '$') || '%' WHERE consumers = ?1 AND every.lmq LIKE '%$'),
behind AS (
    SELECT id, lmq, end, coalesce(offset, 0) AS offset FROM wanted JOIN topics USING (id)
    LEFT JOIN offsets ON topic = id AND consumers = ?1),
lags AS (
    SELECT lmq, end - behind.offset AS lag, (
        SELECT position FROM units WHERE topic = id AND units.offset >= behind.offset
        ORDER BY units.offset LIMIT 1) AS position
    FROM behind WHERE end > behind.offset)
"""
_UNIT = "SELECT position FROM units WHERE topic = ?"
_TABLES = """
CREATE TABLE IF NOT EXISTS topics(
    id INTEGER PRIMARY KEY, lmq TEXT NOT NULL UNIQUE, end INTEGER NOT NULL, last INTEGER NOT NULL,
    stored_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS units(
    topic INTEGER, offset INTEGER, position INTEGER, PRIMARY KEY(topic, offset)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets(
    topic INTEGER, consumers TEXT, offset INTEGER, change INTEGER,
    PRIMARY KEY(topic, consumers)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changes ON offsets(change);
CREATE TABLE IF NOT EXISTS followed(
    parent TEXT, queue INTEGER, next INTEGER, PRIMARY KEY(parent, queue)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS subscriptions(
    client TEXT, consumers TEXT, parent TEXT, lmq TEXT,
    PRIMARY KEY(client, consumers, lmq)) WITHOUT ROWID;
"""


class _Topic:
    """A lite topic in memory.

    Attributes:
        id: The number of its row; 0 before its first message is visible.
        end: The offset after its last visible message.
        last: The log position of its last visible message.
        next: The offset of its next message. It is greater than `end` while messages are being stored.
    """

    __slots__ = ("end", "id", "last", "next")

    def __init__(self, row_id: int, end: int, last: int) -> None:
        self.id = row_id
        self.end = self.next = end
        self.last = last


class LiteQueues:
    """The queues of all lite topics of a broker. For one thread only, unless a method says otherwise.

    Attributes:
        path: The path of the database.
        count: The number of lite topics.
        errors: The exceptions that the methods raise.
        epoch: The id of the time for which the numbers of changes are valid; "" before the first `open`.
        subscription_change: The number of the last change of a subscription.
    """

    def __init__(self, path: str, on_change: Callable[[], None]) -> None:
        """Prepare to open the database. `on_change` is called after the first change; `flush` must follow."""
        self.path = path
        self.count = 0
        self.errors: tuple[type[Exception], ...] = (OSError, ImportError)
        self.epoch = ""
        self._change = 0  # The number of the last change of a consumer offset
        self.subscription_change = 0
        self._on_change = on_change
        self._log_limit = logs.LogLimiter()
        self._db: sqlite3.Connection
        self._topics: dict[str, _Topic] = {}
        self._trim_at = 2 * MAX_CACHED  # The number of topics in memory at which `_trim` searches next
        self._offsets: dict[tuple[str, str], int] = {}

    # -- opening

    def open(self, log_end: int) -> None:
        """Open the database, or create it. A damaged one is replaced by an empty one.

        Units of records behind `log_end` are removed, because a crash or a truncation has removed these.
        Raises ImportError if Python lacks the SQLite library, or sqlite3.Error.
        """
        import sqlite3  # only brokers with lite topics need it

        self.errors = OSError, sqlite3.Error
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        try:
            self._connect()
            self._cut_end(log_end)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # The file may be intact: the disk is full, or the file cannot be opened
            log.error("%s is damaged, lite topics are read from the log once more: %s", self.path, error)
            self._db.close()
            for suffix in _FILES:
                if os.path.exists(self.path + suffix):
                    os.unlink(self.path + suffix)
            self._connect()
        (self.count,) = self._row("SELECT count(*) FROM topics")
        (self._change,) = self._row("SELECT coalesce(max(change), 0) FROM offsets")
        self.epoch = secrets.token_hex(8)

    def _connect(self) -> None:
        import sqlite3

        db = self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cache_size=-8192")
        (version,) = self._row("PRAGMA user_version")
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"version {version} instead of {_VERSION}")
        db.executescript(_TABLES)
        db.execute(f"PRAGMA user_version={_VERSION}")

    def _cut_end(self, log_end: int) -> None:
        for topic, lmq in self._rows("SELECT id, lmq FROM topics WHERE last >= ?", log_end):
            (first,) = self._row(
                "SELECT min(offset) FROM units WHERE topic = ? AND position >= ?", topic, log_end
            )
            self._cut_units(topic, lmq, first or 0, log_end, 1 << 62)

    def _cut_units(self, topic: int, lmq: str, first: int, begin: int, end: int) -> None:
        """Remove the units from the offset `first` on whose log position is in a range."""
        self._write(
            "DELETE FROM units WHERE topic = ? AND offset >= ? AND position >= ? AND position < ?",
            topic, first, begin, end,
        )  # fmt: skip
        self._write(
            "UPDATE topics SET (end, last) = (SELECT coalesce(max(offset) + 1, 0), "
            "coalesce(max(position), -1) FROM units WHERE topic = id) WHERE id = ?",
            topic,
        )
        groups = self._rows("SELECT consumers FROM offsets WHERE topic = ? AND offset > ?", topic, first)
        for (group,) in groups:
            self._write_offset(topic, group, first)
            self._offsets.pop((group, lmq), None)
        self._topics.pop(lmq, None)

    def close(self) -> None:
        """Write all changes and close the database."""
        self.flush()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    # -- statements

    def _row(self, statement: str, *values: Any) -> Any:
        return self._db.execute(statement, values).fetchone()

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        return self._db.execute(statement, values).fetchall()

    def _write(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if not self._db.in_transaction:
            self._db.execute("BEGIN")
            self._on_change()
        return self._db.execute(statement, values)

    def flush(self) -> bool:
        """Write the changes to the write-ahead log. Return whether `checkpoint` should be called."""
        if self._db.in_transaction:
            self._db.execute("COMMIT")
        try:
            return os.path.getsize(self.path + "-wal") >= CHECKPOINT_BYTES
        except FileNotFoundError:
            return False

    def checkpoint(self) -> None:
        """Move committed changes to the database file and sync it. Must run in a thread."""
        self._elsewhere("PRAGMA wal_checkpoint(PASSIVE)")

    def _elsewhere(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a statement that a connection of its own executes. Any thread may call this."""
        import sqlite3

        db = sqlite3.connect(self.path)
        try:
            return db.execute(statement, values).fetchall()
        finally:
            db.close()

    # -- messages

    def _find(self, lmq: str) -> _Topic | None:
        found = self._topics.get(lmq)
        if found is None and (row := self._row("SELECT id, end, last FROM topics WHERE lmq = ?", lmq)):
            found = self._topics[lmq] = _Topic(*row)
            self._trim()
        return found

    def _trim(self) -> None:
        """Forget the topics that were loaded first, except those with messages that are being stored."""
        if len(self._topics) > self._trim_at:
            for lmq in [lmq for lmq, topic in self._topics.items() if topic.next == topic.end][:MAX_CACHED]:
                del self._topics[lmq]
            self._trim_at = max(len(self._topics), MAX_CACHED) + MAX_CACHED

    def end(self, lmq: str) -> int:
        """Return the offset after the last message of a lite topic; 0 for an unknown one."""
        topic = self._find(lmq)
        return 0 if topic is None else topic.end

    def is_known(self, lmq: str) -> bool:
        """Return whether a lite topic exists or will exist once its first message is visible."""
        return self._find(lmq) is not None

    def reserve(self, lmq: str) -> int:
        """Return the offset of the next message of a lite topic. No other message gets this offset."""
        topic = self._find(lmq)
        if topic is None:
            topic = self._topics[lmq] = _Topic(0, 0, -1)
        topic.next += 1
        return topic.next - 1

    def release(self, lmq: str, offset: int) -> None:
        """Take back the newest reserved offset of a lite topic, because its message is not stored.

        Without this, the lite topic would stay in memory, as its message could still become visible.
        """
        topic = self._topics.get(lmq)
        if topic is not None and topic.next == offset + 1 > topic.end:
            topic.next = offset
            if not topic.next:
                del self._topics[lmq]

    def add(self, lmq: str, offset: int, position: int, stored_ms: int) -> bool:
        """Add a message that has become visible. Return False if it is known or outdated.

        A lite topic that was removed may be created again, and its offsets then begin at 0 once more. A
        broker that has not removed it, because it was a replica or has lost its database, finds messages of
        both lives in the log. Those of the later life replace the others.
        """
        topic = self._find(lmq)
        if topic is not None and topic.id and (offset < topic.end or position < topic.last):
            at = topic.id, offset
            before = self._row(f"{_UNIT} AND offset <= ? ORDER BY offset DESC LIMIT 1", *at)
            if before and before[0] >= position:
                return False
            behind = self._row(f"{_UNIT} AND offset >= ? ORDER BY offset LIMIT 1", *at)
            if behind and behind[0] < position:
                self._cut_units(topic.id, lmq, offset, 0, position)
                topic = self._find(lmq)
        if topic is None:
            topic = self._topics[lmq] = _Topic(0, 0, -1)
        end, last = max(topic.end, offset + 1), max(topic.last, position)
        if topic.id:
            self._write(
                "UPDATE topics SET end = ?, last = ?, stored_ms = ? WHERE id = ?",
                end, last, stored_ms, topic.id,
            )  # fmt: skip
        else:
            cursor = self._write(
                "INSERT INTO topics(lmq, end, last, stored_ms) VALUES(?, ?, ?, ?)", lmq, end, last, stored_ms
            )
            topic.id = cursor.lastrowid or 0
            self.count += 1
        self._write("INSERT INTO units VALUES(?, ?, ?)", topic.id, offset, position)
        topic.end, topic.last, topic.next = end, last, max(topic.next, end)
        self._trim()
        return True

    def forget_reservations(self) -> None:
        """Continue each lite topic after its last visible message, because no message is being stored."""
        self._topics.clear()

    def units(self, lmq: str, offset: int, count: int, log_begin: int) -> list[tuple[int, int]]:
        """Return offset and log position of up to `count` messages, beginning at `offset`.

        Messages before the log position `log_begin` no longer exist and are omitted.
        """
        topic = self._find(lmq)
        if topic is None:
            return []
        return self._rows(
            "SELECT offset, position FROM units WHERE topic = ? AND offset >= ? AND position >= ? "
            "ORDER BY offset LIMIT ?",
            topic.id, offset, log_begin, count,
        )  # fmt: skip

    def stored_ms(self, lmq: str) -> int:
        """Return the store time of the last message of a lite topic, in epoch ms; 0 for an unknown one."""
        row = self._row("SELECT stored_ms FROM topics WHERE lmq = ?", lmq)
        return row[0] if row else 0

    def count_of(self, parent: str) -> int:
        """Return the number of lite topics of a parent. Must run in a thread."""
        ((count,),) = self._elsewhere(
            "SELECT count(*) FROM topics WHERE lmq >= ? AND lmq < ?", *lmq_range(parent)
        )
        return int(count)

    def listed(self, parent: str, prefix: str, at_most: int) -> list[tuple[str, int, int, int, str, int]]:
        """Return the first lite topics of a parent whose names begin with `prefix`. Must run in a thread.

        There is a row for each group with an offset, at least one for each lite topic: queue name, first
        offset, offset after the last message, store time of the last message (epoch ms), group or None, and
        its offset.
        """
        begin = all_of(parent)
        return self._elsewhere(
            "SELECT lmq, coalesce((SELECT offset FROM units WHERE topic = id ORDER BY offset LIMIT 1), end), "
            "end, stored_ms, consumers, offset FROM (SELECT * FROM topics WHERE lmq >= ? AND lmq < ? "
            "ORDER BY lmq LIMIT ?) LEFT JOIN offsets ON topic = id ORDER BY lmq",
            begin + prefix, f"{begin}{prefix}\U0010ffff", at_most,
        )  # fmt: skip

    def lags(self, group: str, at_most: int) -> tuple[int, list[Lag], list[Lag]]:
        """Return the total lag of a group in all lite topics that it has consumed or to which it subscribes.

        Also return those with the largest lags and those with the oldest messages. Must run in a thread.
        """
        ((total,),) = self._elsewhere(f"{_LAGS} SELECT coalesce(sum(lag), 0) FROM lags", group)
        first = f"{_LAGS} SELECT lmq, lag, position FROM lags ORDER BY"
        largest = self._elsewhere(f"{first} lag DESC, lmq LIMIT ?2", group, at_most)
        oldest = self._elsewhere(f"{first} position LIMIT ?2", group, at_most)
        return int(total), largest, oldest

    def behind(self, group: str, parent: str, after: str, at_most: int) -> list[str]:
        """Return lite topics of a parent with messages that a group has not consumed, in the order of names.

        Those after the queue name `after` are returned. Must run in a thread.
        """
        stored = "(SELECT offset FROM offsets WHERE topic = id AND consumers = ?)"
        condition = f"end > coalesce({stored}, 0) ORDER BY lmq LIMIT ?"
        return self._names(parent, condition, group, at_most, after=after)

    # -- consumer offsets (the interface `Offsets` of the leases)

    def query(self, group: str, topic: str, queue_id: int) -> int:  # noqa: ARG002 (part of the interface)
        """Return the stored offset of a group in a lite topic, given its queue name, or -1."""
        key = (group, topic)
        offset = self._offsets.get(key)
        if offset is None:
            known = self._find(topic)
            row = known and self._row(
                "SELECT offset FROM offsets WHERE topic = ? AND consumers = ?", known.id, group
            )
            offset = row[0] if row else -1
            self._keep(key, offset)
        return offset

    def _keep(self, key: tuple[str, str], offset: int) -> None:
        self._offsets[key] = offset
        if len(self._offsets) > 2 * MAX_CACHED:
            for each in list(self._offsets)[:MAX_CACHED]:
                del self._offsets[each]

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:  # noqa: ARG002
        """Store the offset of a group in a lite topic. Return False for an unknown lite topic."""
        known = self._find(topic)
        if known is None or not known.id:
            return False
        self._keep((group, topic), offset)
        try:
            self._write_offset(known.id, group, offset)
        except self._db.Error as error:  # The disk is full. The next commit for this queue tries again
            if self._log_limit.allows():
                log.error("the offset of %s in %s could not be written: %s", group, topic, error)
        return True

    def _write_offset(self, topic: int, group: str, offset: int) -> None:
        self._change += 1
        self._write("INSERT OR REPLACE INTO offsets VALUES(?, ?, ?, ?)", topic, group, offset, self._change)

    def changed_offsets(self, since: int, at_most: int) -> list[tuple[int, str, str, int]]:
        """Return the consumer offsets changed after the change `since`. Must run in a thread.

        Each is the number of its change, the queue name, the group and the offset, in the order of changes.
        """
        return self._elsewhere(
            "SELECT change, lmq, consumers, offset FROM offsets JOIN topics ON topic = id WHERE change > ? "
            "ORDER BY change LIMIT ?",
            since, at_most,
        )  # fmt: skip

    # -- parent queues

    def followed(self) -> dict[tuple[str, int], int]:
        """Return for each parent queue the offset of the first message that has not been added."""
        return {(parent, queue): offset for parent, queue, offset in self._rows("SELECT * FROM followed")}

    def set_followed(self, parent: str, queue_id: int, offset: int) -> None:
        """Store that all messages of a parent queue before `offset` have been added."""
        self._write("INSERT OR REPLACE INTO followed VALUES(?, ?, ?)", parent, queue_id, offset)

    # -- removal

    def silent(self, parent: str, before_ms: int, at_most: int) -> list[str]:
        """Return lite topics of a parent without a message since `before_ms`. Must run in a thread."""
        return self._names(parent, "stored_ms < ? LIMIT ?", before_ms, at_most)

    def _names(self, parent: str, condition: str, *values: Any, after: str = "") -> list[str]:
        """Return the lite topics of a parent, or of all if it is "", that meet a condition."""
        begin, end = lmq_range(parent) if parent else ("", "\U0010ffff")
        statement = f"SELECT lmq FROM topics WHERE lmq > ? AND lmq < ? AND {condition}"
        return [lmq for (lmq,) in self._elsewhere(statement, max(begin, after), end, *values)]

    def expired(self, position: int, at_most: int, parent: str = "") -> list[str]:
        """Return lite topics, of a parent or of all, whose first message is before a log position.

        Must run in a thread.
        """
        first = "(SELECT position FROM units WHERE topic = id ORDER BY offset LIMIT 1)"
        return self._names(parent, f"coalesce({first}, -1) < ? LIMIT ?", position, at_most)

    def cut(self, lmq: str, log_begin: int) -> None:
        """Remove the messages of a lite topic before a log position; without others, the topic itself."""
        topic = self._find(lmq)
        if topic is None:
            return
        self._write("DELETE FROM units WHERE topic = ? AND position < ?", topic.id, log_begin)
        if not self._row("SELECT 1 FROM units WHERE topic = ? LIMIT 1", topic.id):
            self.remove(lmq)

    def remove(self, lmq: str, before_ms: int | None = None) -> bool:
        """Remove a lite topic with its consumer offsets.

        Return False if it is not removed, because messages are being stored, or because one was stored since
        `before_ms`.
        """
        topic = self._find(lmq)
        if topic is None or not topic.id or topic.next > topic.end:
            return False
        if before_ms is not None:
            (stored_ms,) = self._row("SELECT stored_ms FROM topics WHERE id = ?", topic.id)
            if stored_ms >= before_ms:
                return False
        self._write("DELETE FROM units WHERE topic = ?", topic.id)
        for (group,) in self._rows("SELECT consumers FROM offsets WHERE topic = ?", topic.id):
            self._offsets.pop((group, lmq), None)
        self._write("DELETE FROM offsets WHERE topic = ?", topic.id)
        self._write("DELETE FROM topics WHERE id = ?", topic.id)
        del self._topics[lmq]
        self.count -= 1
        return True

    def of_parent(self, parent: str, at_most: int) -> list[str]:
        """Return some lite topics of a parent."""
        begin, end = lmq_range(parent)
        found = self._rows("SELECT lmq FROM topics WHERE lmq >= ? AND lmq < ? LIMIT ?", begin, end, at_most)
        return [lmq for (lmq,) in found]

    def forget_parent(self, parent: str) -> None:
        """Remove what is stored about the queues of a parent topic that has been deleted."""
        self._write("DELETE FROM followed WHERE parent = ?", parent)

    # -- subscriptions

    def subscriptions(self) -> list[tuple[str, str, str, str]]:
        """Return client, group, parent topic and queue name of each stored subscription."""
        return self._rows("SELECT client, consumers, parent, lmq FROM subscriptions")

    def save_subscriptions(
        self, client: str, group: str, parent: str, added: Sequence[str], removed: Sequence[str]
    ) -> None:
        """Store a change of a client's subscriptions."""
        if added or removed:
            self.subscription_change += 1
        for lmq in removed:
            self._write(
                "DELETE FROM subscriptions WHERE client = ? AND consumers = ? AND lmq = ?", client, group, lmq
            )
        for lmq in added:
            self._write("INSERT OR REPLACE INTO subscriptions VALUES(?, ?, ?, ?)", client, group, parent, lmq)

    def replace_subscriptions(self, given: Iterable[tuple[str, str, str, str]]) -> None:
        """Store exactly these subscriptions: client, group, parent topic and queue name of each."""
        old, new = set(self.subscriptions()), set(given)
        for client, group, parent, lmq in old - new:
            self.save_subscriptions(client, group, parent, (), [lmq])
        for client, group, parent, lmq in new - old:
            self.save_subscriptions(client, group, parent, [lmq], ())
