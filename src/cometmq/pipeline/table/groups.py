"""Snapshots of consumer groups' offsets in an archive. They let the groups continue after a restore.

    output/_cometmq/groups/00000000000000000007.json      a snapshot as of this batch: one line of JSON

No offset exceeds the archived end of its queue: the offset of a group that had read further is reduced to
that end. The newest 100 snapshots are kept. Of the older ones, the last snapshot of each day is kept, for the
newest 100 days that have one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import fs

from cometmq import logs
from cometmq.errors import BrokerError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.offsets import Offsets
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.table.log import WRONG_TYPES, listing
from cometmq.pipeline.table.small_files import read_json, replace_json
from cometmq.protocol.bodies.admin import GroupList
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import TopicRequestHeader

log = logs.logger(__name__)

_TEXTS = [(name, pa.string()) for name in ("time", "group", "topic", "broker_name")]
POSITIONS = pa.schema([("batch", pa.int64()), *_TEXTS, ("queue_id", pa.int32()), ("offset", pa.int64())])
MOST_GROUPS = 1000
"""Maximum number of groups whose offsets are recorded."""
_MOST_POSITIONS = 100_000  # Maximum number of offsets in a snapshot, which then has about 15 MB of JSON
_MOST_READ = 1_000_000  # Maximum number of offsets that are read, over all snapshots
_NEWEST, _DAYS = 100, 100
_HOME = "_cometmq/groups"
_TIME, _HEAD = re.compile(rb'"time": "([0-9]{4}-[0-9]{2}-[0-9]{2})T'), 100
"""The pattern of a snapshot's time, and the number of bytes at the start of the file to search for it."""
_IS_PICTURE = re.compile(r"[0-9]{20}\.json")


def stored_groups(cluster: Cluster, queues: Iterable[MessageQueue]) -> list[str]:
    """Return the groups that have stored offsets for the queues' topics. Raises BrokerError."""
    names: set[str] = set()
    for queue in {(queue.broker_name, queue.topic): queue for queue in queues}.values():
        header = TopicRequestHeader(topic=queue.topic)
        address, (answer,) = cluster.ask(
            queue, [Frame.request(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)]
        )
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, remark=answer.remark or "", broker_addr=address, topic=queue.topic)
        names.update(GroupList.decode(answer.body).group_list)
    return sorted(names)


def _picture(kept: dict[str, Any]) -> pa.Table:
    facts = {"batch": kept["batch"], "time": kept["time"]}
    picture = pa.Table.from_pylist([facts | row for row in kept["positions"]], POSITIONS)
    if any(column.null_count for column in picture.columns):
        raise ValueError("a stored offset of a group lacks a field")
    return picture


class GroupLog:
    """The log of consumer groups' offsets, which is stored in the archive's directory."""

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._home = f"{root}/{_HOME}"
        self._written: list[dict[str, Any]] | None = None
        self._days: dict[str, str] = {}

    def keep(self, batch: int, groups: Mapping[str, Offsets], archived: Offsets) -> int:
        """Write a snapshot, up to the ends in `archived`, if it is new. Return how many are left out."""
        rows: list[dict[str, Any]] = []
        left_out = 0
        for group, offsets in groups.items():
            known = sorted((queue, offset) for queue, offset in offsets.items() if queue in archived)
            if len(rows) + len(known) > _MOST_POSITIONS:
                left_out += 1
                continue
            rows += [
                {"group": group, **msgspec.structs.asdict(queue), "offset": min(offset, archived[queue])}
                for queue, offset in known
            ]
        if rows != (self._written or []):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            content = {"batch": batch, "time": time, "positions": rows}
            replace_json(self._filesystem, f"{self._home}/{batch:020d}.json", content)
            self._written = rows
            self._thin_out()
        return left_out

    def read(self) -> pa.Table:
        """Return the recorded offsets (POSITIONS), oldest first, of the newest up to a million."""
        pictures: list[pa.Table] = []
        for picture in self._pictures():
            if sum(one.num_rows for one in pictures) + picture.num_rows > _MOST_READ:
                break
            pictures.insert(0, picture)
        return pa.concat_tables([POSITIONS.empty_table(), *pictures])

    def newest(self) -> pa.Table:
        """Return the newest snapshot with offsets, with the columns POSITIONS, or no row if there is none."""
        return next((one for one in self._pictures() if one.num_rows), POSITIONS.empty_table())

    def _pictures(self) -> Iterator[pa.Table]:
        """Yield the snapshots of consumer offsets as tables, the newest first."""
        for info in self._files():
            try:
                kept = read_json(self._filesystem, info.path)
                # The content is None if another job has deleted the file.
                picture = None if kept is None else _picture(kept)
            except (ArchiveError, *WRONG_TYPES) as error:
                log.warning("skipping the damaged file %s: %s", info.path, error)
            else:
                if picture is not None:
                    yield picture

    def _files(self) -> list[fs.FileInfo]:
        found = [
            info for info in listing(self._filesystem, self._home) if _IS_PICTURE.fullmatch(info.base_name)
        ]
        return sorted(found, key=lambda info: str(info.base_name), reverse=True)

    def _thin_out(self) -> None:
        """Delete old snapshots.

        Several jobs may do this at the same time, because they choose the same files: the files are numbered
        by batch, and numbers only grow, so a snapshot that is not among the newest never becomes one of them.
        """
        days: set[str] = set()
        known, self._days = self._days, {}
        for info in self._files()[_NEWEST:]:
            with contextlib.suppress(FileNotFoundError):
                day = known.get(info.path) or self._day(info.path)
                if day in days or len(days) >= _DAYS:
                    self._filesystem.delete_file(info.path)
                else:
                    self._days[info.path] = day
                days.add(day)

    def _day(self, path: str) -> str:
        """Return the day that a snapshot states, or "": copied files have the time of the copy."""
        with self._filesystem.open_input_stream(path) as stream:
            found = _TIME.search(stream.read(_HEAD))
        return found[1].decode() if found else ""
