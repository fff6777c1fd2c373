"""Where consumer groups stand, kept beside an archive: a restore needs it to let them go on where they were.

    output/_cometmq/groups/00000000000000000007.json      as of this batch: one line of JSON

No position is beyond what the archive holds of its queue: a group that was further has read all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import fs

from cometmq.errors import BrokerError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.offsets import Offsets
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.table.small_files import read_json, replace_json
from cometmq.protocol.bodies_admin import GroupList
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import TopicRequestHeader

POSITIONS = pa.schema(
    [
        ("batch", pa.int64()),
        ("time", pa.string()),
        ("group", pa.string()),
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("offset", pa.int64()),
    ]
)
_HOME = "_cometmq/groups"


def stored_groups(cluster: Cluster, queues: Iterable[MessageQueue]) -> list[str]:
    """Groups that have stored offsets for the queues' topics on their brokers. Raises BrokerError."""
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


class GroupLog:
    """The groups' positions beside the archive in this directory."""

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._home = f"{root}/{_HOME}"
        self._written: list[dict[str, Any]] | None = None

    def keep(self, batch: int, groups: Mapping[str, Offsets], archived: Offsets) -> None:
        """Write what changed since the last time. archived: up to where the archive has each queue."""
        rows = [
            {"group": group, **msgspec.structs.asdict(queue), "offset": min(offset, archived[queue])}
            for group, offsets in sorted(groups.items())
            for queue, offset in sorted(offsets.items())
            if queue in archived
        ]
        if rows != self._written:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            content = {"batch": batch, "time": time, "positions": rows}
            replace_json(self._filesystem, f"{self._home}/{batch:020d}.json", content)
            self._written = rows

    def read(self) -> pa.Table:
        """All that was kept, oldest first, with the columns POSITIONS."""
        selector = fs.FileSelector(self._home, allow_not_found=True)
        rows: list[dict[str, Any]] = []
        for path in sorted(info.path for info in self._filesystem.get_file_info(selector)):
            kept = read_json(self._filesystem, path) if path.endswith(".json") else None
            if kept is not None:
                rows += [{"batch": kept["batch"], "time": kept["time"], **row} for row in kept["positions"]]
        return pa.Table.from_pylist(rows, POSITIONS)
