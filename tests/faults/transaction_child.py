"""A producer that kills itself (kill -9) at one step of a transaction.

Its database is a directory with a file for each completed local transaction.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from cometmq import Message, MessageExt, TransactionProducer, TransactionState

STEPS = ("begun", "done", "told", "asked", "answered")


class Database:
    """A transaction listener; `step` is the step at which it ends its process."""

    def __init__(self, directory: Path, step: str = "") -> None:
        self.directory = directory
        self.step = step

    def die(self, step: str) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        del argument
        self.die("begun")
        (self.directory / message.msg_id).touch()
        self.die("done")
        if self.step in ("asked", "answered"):
            return TransactionState.UNKNOWN
        return TransactionState.COMMIT

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.die("asked")
        done = (self.directory / message.msg_id).exists()
        if self.step == "answered":
            asyncio.get_running_loop().call_later(0.05, self.die, "answered")
        return TransactionState.COMMIT if done else TransactionState.ROLLBACK


async def main(namesrv: str, directory: str, step: str) -> None:
    database = Database(Path(directory), step)
    async with TransactionProducer("PG", database, topics=["Orders"], namesrv=namesrv) as producer:
        await producer.send_in_transaction(Message("Orders", step.encode()))
        database.die("told")
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
