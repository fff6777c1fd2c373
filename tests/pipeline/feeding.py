"""Topics with known messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from cometmq.admin.admin import Admin
from cometmq.client.cluster.requests import committed_request, offset_in
from cometmq.message import MessageQueue
from cometmq.pipeline.base.options import Topics, write_options
from cometmq.pipeline.base.plan import Bounds
from cometmq.pipeline.base.wire import Wire
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import SendMessageRequestHeaderV2


@dataclass
class Topic:
    """A topic of one test and the messages that were sent to it."""

    name: str
    namesrv: str
    sent: list[str] = field(default_factory=list)

    def send(self, count: int, *, tags: Sequence[str] = ("A", "B", "C"), body_size: int = 0) -> list[str]:
        """Send `count` messages with the next numbers as keys; return their bodies."""
        first = len(self.sent)
        bodies = [f"{number}:".ljust(body_size, "x") for number in range(first, first + count)]
        options = write_options({"namesrv": self.namesrv, "topic": self.name, "batchRecords": "16"})
        with Sender(options) as sender:
            for number, body in enumerate(bodies, first):
                properties = (
                    f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01k{number}\x02TAGS\x01{tags[number % len(tags)]}"
                    f"\x02parity\x01{number % 2}"
                )
                sender.send(RowMessage(self.name, body.encode(), properties.encode(), number % 7, 0, None))
            sender.flush()
        self.sent += bodies
        return bodies

    def send_raw(self, body: bytes, sys_flag: int, born_ms: int = 0) -> None:
        """Send a message to queue 0 with the given sysFlag and born time; `sent` does not include it."""
        header = SendMessageRequestHeaderV2(
            topic=self.name, queue_id=0, sys_flag=sys_flag, born_timestamp=born_ms, flag=0,
            producer_group="g", default_topic="TBW102", default_topic_queue_nums=4,
            properties="TAGS\x01A", reconsume_times=0,
        )  # fmt: skip
        with Cluster((self.namesrv,), timeout_ms=10_000) as cluster:
            address = cluster.master_of(cluster.write_queues(self.name)[0])
        with closing(Wire(address, 10.0)) as wire:
            (answer,) = wire.call_many([Frame.request(RequestCode.SEND_MESSAGE_V2, header, body)])
        assert answer.code == 0

    def delete(self) -> None:
        """Delete the topic from brokers and name servers."""

        async def delete() -> None:
            async with Admin(self.namesrv) as admin:
                await admin.delete_topic_in_brokers(self.name, "DefaultCluster")
                await admin.delete_topic_in_name_servers(self.name)

        asyncio.run(delete())

    def bounds(self) -> dict[MessageQueue, Bounds]:
        with Cluster((self.namesrv,), timeout_ms=10_000) as cluster:
            return cluster.bounds(cluster.queues(Topics(names=(self.name,))))

    def committed(self, group: str) -> dict[MessageQueue, int]:
        """Return a group's stored offsets by queue."""
        queues = sorted(self.bounds())
        with Cluster((self.namesrv,), timeout_ms=10_000) as cluster:
            address = cluster.master_of(queues[0])
        with closing(Wire(address, 10.0)) as wire:
            answers = wire.call_many(
                [committed_request(group, queue, set_zero_if_not_found=False) for queue in queues]
            )
        return {
            queue: offset_in(frame, address, queue)
            for queue, frame in zip(queues, answers, strict=True)
            if frame.code != ResponseCode.QUERY_NOT_FOUND
        }

    @property
    def options(self) -> dict[str, str]:
        return {"namesrv": self.namesrv, "subscribe": self.name}
