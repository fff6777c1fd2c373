"""Members of an orderly group that join, leave, are cut off or killed, and a check of their calls.

The members are processes of this module (`python -m tests.client.orderly_members`). Each prints the begin and
the end of every listener call, by the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.client.scenarios import FROM_FIRST, PATIENT_CLIENT, names, sending
from tests.kit.waiting import until

from cometmq import Message, MessageExt, OrderlyContext, OrderlyStatus, PushConsumer, PushOptions, SendStatus
from cometmq.client.consumer import orderly_queue, queue_locks
from cometmq.testing import History, check_history

ROOT = Path(__file__).parents[2]
QUEUES = 4


@dataclass
class Call:
    """One listener call with one message. `ended` is None while the call runs, or if it never ended."""

    member: str
    queue: int
    offset: int
    began: float
    ended: float | None = None
    handled: bool = False


def check_calls(calls: Sequence[Call], killed: dict[str, float], sent: Sequence[int]) -> None:
    """Check that calls for each queue were in strict order and that only a kill repeated handled messages.

    Args:
        killed: The time of death of each killed member.
        sent: The number of messages by queue.
    """
    history = History()
    for queue, count in enumerate(sent):
        for offset in range(count):
            history.note("send", at=0.0, **place(queue, offset))
    for call in calls:
        facts = place(call.queue, call.offset)
        calling = history.begin("handle", process=call.member, at=call.began, group="g", **facts)
        if call.ended is not None:
            (history.ok if call.handled else history.fail)(calling, at=call.ended)
        elif call.member in killed:
            history.unknown(calling, at=max(call.began, killed[call.member]))
    check_history(history.lines()).verify()
    by_queue: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.began):
        by_queue[call.queue].append(call)
    for queue, in_order in by_queue.items():
        done = 0  # all lower offsets have been handled
        for before, call in itertools.pairwise([in_order[0], *in_order]):
            if call.offset < done:
                again = before.member in killed and before.member != call.member
                # A member that repeats messages of a killed one may release the queue before it has caught
                # up.
                same = before.member == call.member or not before.handled
                goes_on = call.offset - before.offset == 1 or (call.offset == before.offset and same)
                assert again or goes_on, f"queue {queue}: {call} repeats, after {before}"
            done += call.handled and call.offset == done


def place(queue: int, offset: int) -> dict[str, Any]:
    """Return the position of a message in the form in which a history contains it."""
    facts = {"message": f"{queue}/{offset}", "topic": "T", "queue": str(queue), "key": str(queue)}
    return {**facts, "offset": offset}


@dataclass
class Member:
    """A consumer in a process of its own."""

    name: str
    process: asyncio.subprocess.Process
    calls: list[Call] = field(default_factory=list)
    errors: str = ""

    async def read(self) -> None:
        """Record the process's calls until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            match line.decode().split():
                case ["began", queue, offset, at]:
                    self.calls.append(Call(self.name, int(queue), int(offset), float(at)))
                case ["ended", handled, queue, offset, at]:
                    call = next(
                        c for c in reversed(self.calls) if (c.queue, c.offset) == (int(queue), int(offset))
                    )
                    call.ended, call.handled = float(at), handled == "handled"
                case _:
                    self.errors += line.decode()


class Group:
    """The members, including dead ones."""

    def __init__(self, namesrv: str, topic: str, group: str, lock_live_s: float) -> None:
        self._arguments = (namesrv, topic, group, str(lock_live_s))
        self.members: list[Member] = []
        self.killed: dict[str, float] = {}
        self._readers: list[asyncio.Task[None]] = []

    @property
    def calls(self) -> list[Call]:
        return [call for member in self.members for call in member.calls]

    async def join(self) -> Member:
        """Start a member and wait for its first handled message."""
        path = os.pathsep.join([str(ROOT), *sys.path])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, *self._arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
        member = Member(f"m{len(self.members)}", process)
        self.members.append(member)
        self._readers.append(asyncio.create_task(member.read()))
        return member

    async def works(self, member: Member, count: int = 10) -> None:
        """Wait until the member has had `count` more calls."""
        wanted = len(member.calls) + count

        async def enough() -> bool:
            assert member.process.returncode is None, member.errors
            return len(member.calls) >= wanted

        await until(enough, f"{count} more calls of {member.name} {member.errors}")

    async def leave(self, member: Member) -> None:
        member.process.send_signal(signal.SIGTERM)
        assert await member.process.wait() == 0, member.errors

    def cut(self, member: Member) -> None:
        """Close the member's connections to brokers from outside the process."""
        member.process.send_signal(signal.SIGUSR1)

    async def kill(self, member: Member) -> None:
        member.process.kill()
        await member.process.wait()
        self.killed[member.name] = time.monotonic()

    async def end(self) -> None:
        for member in self.members:
            if member.process.returncode is None:
                member.process.kill()
                await member.process.wait()
        await asyncio.gather(*self._readers)


@contextlib.asynccontextmanager
async def traffic(namesrv: str, topic: str) -> AsyncIterator[list[int]]:
    """Send messages to every queue until the block ends; the list holds the number sent to each queue."""
    sent = [0] * QUEUES
    stop = asyncio.Event()

    async def send() -> None:
        async with sending(namesrv, "p-orderly") as producer:
            await producer.send(Message(topic, b"first"), selector=lambda queues, *_: min(queues))
            sent[0] += 1
            queues = sorted(await producer.queues(topic))
            assert len(queues) == QUEUES
            while not stop.is_set():
                for queue in queues:
                    result = await producer.send(Message(topic, b"x"), queue=queue)
                    assert result.status is SendStatus.SEND_OK
                    assert result.queue_offset == sent[queue.queue_id]
                    sent[queue.queue_id] += 1
                await asyncio.sleep(0.02)

    task = asyncio.create_task(send())
    try:
        yield sent
    finally:
        stop.set()
        await task


async def members_come_and_go(namesrv: str, lock_live_s: float) -> None:
    """Run the whole scenario; `lock_live_s` is the lifetime of a lock that is not renewed."""
    name = names("order")
    group = Group(namesrv, name.topic, name.group, lock_live_s)
    try:
        async with traffic(namesrv, name.topic) as sent:
            first = await group.join()
            await group.works(first)
            second, third = await group.join(), await group.join()
            await group.works(second)
            await group.works(third)
            await group.leave(first)
            await group.works(second)
            group.cut(third)
            await group.works(second)
            await group.works(third)
            await group.kill(second)
            fourth = await group.join()
            await group.works(third)
            await group.works(fourth, 30)

        async def all_handled() -> bool:
            handled = {(call.queue, call.offset) for call in group.calls if call.handled}
            return len(handled) == sum(sent)

        await until(all_handled, "all messages handled")
        await group.leave(third)
        await group.leave(fourth)
    finally:
        await group.end()
    check_calls(group.calls, group.killed, sent)
    assert len({call.member for call in group.calls}) == 4


# -- a member


async def run(namesrv: str, topic: str, group: str, lock_live_s: float) -> None:
    # A member that a busy machine delays must still renew its locks in time.
    queue_locks.RENEW_INTERVAL_S = lock_live_s / 4
    orderly_queue.LOCK_LIVE_S = lock_live_s * 0.8
    stop = asyncio.Event()
    chance = random.Random(os.getpid())

    async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        (message,) = messages
        which = f"{context.queue.queue_id} {message.queue_offset}"
        print("began", which, time.monotonic(), flush=True)
        await asyncio.sleep(chance.choice((0.002, 0.01, 0.01, 0.05, 0.5 if chance.random() < 0.1 else 0.01)))
        fails = message.queue_offset % 7 == 3 and not message.reconsume_times
        print("ended", "failed" if fails else "handled", which, time.monotonic(), flush=True)
        context.suspend_current_queue_s = 0.01
        return OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT if fails else OrderlyStatus.SUCCESS

    options = PushOptions(orderly=True, consume_from_where=FROM_FIRST.consume_from_where)
    member = PushConsumer(
        group, listener, topic, namesrv=namesrv, options=options, client_options=PATIENT_CLIENT
    )

    def cut() -> None:
        for addr in member.client.routes.addresses(replicas=False):
            connection = member.client.remoting.connection(addr)
            if connection is not None:
                connection.close()

    loop = asyncio.get_running_loop()
    on: dict[int, Callable[[], None]] = {signal.SIGTERM: stop.set, signal.SIGUSR1: cut}
    for signum, handler in on.items():
        loop.add_signal_handler(signum, handler)
    async with member:
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4], float(sys.argv[4])))
