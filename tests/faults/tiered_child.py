"""A broker with tiered storage that kills itself (kill -9) before or after one of its steps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cometmq import broker_process
from cometmq.broker import object_store
from cometmq.store.background import retention
from cometmq.store.tables.tiered_segments import TieredSegments
from cometmq.store.tiered.uploads import TieredUploads

STEPS = [
    *("put .log", "within .log", "put .crc", "put .json", "add", "unlink commitlog"),
    *("remove", "delete .json", "delete .log", "delete .crc"),
]
SEGMENTS_EXPIRED = 3


class Killer:
    """Ends the process at a step, the third time that it is reached."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.reached = 0

    def at(self, step: str) -> None:
        self.reached += step == self.step
        if self.reached == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, method: str, name: Callable[..., str]) -> None:
        whole = getattr(owner, method)

        def call(*given: Any) -> Any:
            step = name(*given)
            self.at(f"before {step}")
            found = whole(*given)
            self.at(f"after {step}")
            return found

        setattr(owner, method, call)


def main(step: str, conf: str) -> int:
    killer = Killer(step)
    put = object_store.Objects.put

    def put_with_a_kill_within(self: Any, name: str, content: Any) -> None:
        def blocks() -> Iterator[bytes]:
            for number, block in enumerate(content):
                if number:
                    killer.at("before within .log")
                    killer.at("after within .log")
                yield block

        put(self, name, content if isinstance(content, bytes) else blocks())

    object_store.Objects.put = put_with_a_kill_within  # type: ignore[method-assign]
    for method in ("put", "delete"):
        killer.around(
            object_store.Objects, method, lambda _self, name, *_, m=method: f"{m} .{name[-4:].strip('.')}"
        )
    for method in ("add", "remove"):
        killer.around(TieredSegments, method, lambda *_, m=method: m)
    killer.around(retention, "unlink_any", lambda _disk, path: "unlink " + path.split("/")[-2])
    if step.endswith(("remove", "delete .json", "delete .log", "delete .crc")):
        # The oldest segments expire in the object store as soon as they are deleted here.
        TieredUploads._expired = lambda self, _: (  # type: ignore[method-assign]  # noqa: SLF001
            bool(self.table.by_base) and self.table.begin < SEGMENTS_EXPIRED * self.commit_log.segment_size
        )
    return broker_process.main(["-c", conf])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
