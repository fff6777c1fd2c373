"""Members join and leave a group while messages flow, and the history of their listener calls is checked.

Every member stops cleanly, so each message must be handled exactly once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

from tests.client.scenarios import FROM_FIRST, PATIENT_CLIENT, names, sending
from tests.kit.waiting import until
from tests.long_form import LONG

from cometmq import Message, MessageExt, PushConsumer

SECONDS = 120 if LONG else 8
FEWEST, MOST = 2, 8


@dataclass
class Call:
    """A listener call for one message. `ended` is None while the call runs."""

    member: int
    body: bytes
    queue: str
    offset: int
    ended: bool = False


def check(calls: list[Call], sent: list[bytes]) -> None:
    """Check that each sent message was handled exactly once and that no other message was handled."""
    handled = Counter(call.body for call in calls)
    again = {body for body, count in handled.items() if count > 1}
    repeated = defaultdict(list)
    for call in calls:
        if call.body in again:
            repeated[f"{call.queue}/{call.offset}"].append(call.member)
    assert not repeated, f"{len(repeated)} handled again, by members {dict(list(repeated.items())[:5])}"
    assert handled.keys() == set(sent), f"{len(set(sent) - handled.keys())} lost"
    running = [call for call in calls if not call.ended]
    assert not running, f"{len(running)} calls never ended"


class Crowd:
    """The members of one group."""

    def __init__(self, namesrv: str, seed: int) -> None:
        self._namesrv = namesrv
        self._random = random.Random(seed)
        self.name = names("crowd")
        self.members: list[PushConsumer] = []
        self.calls: list[Call] = []
        self.sent: list[bytes] = []
        self.joined = 0

    async def join(self) -> None:
        number, self.joined = self.joined, self.joined + 1

        async def listener(messages: list[MessageExt]) -> None:
            for message in messages:
                place = f"{message.broker_name}/{message.queue_id}"
                call = Call(number, message.body, place, message.queue_offset)
                self.calls.append(call)
                await asyncio.sleep(self._random.random() * 0.02)
                call.ended = True

        member = PushConsumer(
            self.name.group, listener, self.name.topic,
            namesrv=self._namesrv, options=FROM_FIRST, client_options=PATIENT_CLIENT,
        )  # fmt: skip
        await member.start()
        self.members.append(member)

    async def leave(self) -> None:
        await self.members.pop(self._random.randrange(len(self.members))).stop()

    async def send(self, seconds: float) -> None:
        """Send ten messages every 50 ms for the given number of seconds."""
        end = asyncio.get_running_loop().time() + seconds
        async with sending(self._namesrv, "p-crowd") as producer:
            while asyncio.get_running_loop().time() < end:
                some = [b"%d" % (len(self.sent) + number) for number in range(10)]
                self.sent += some
                await producer.send_many(Message(self.name.topic, body) for body in some)
                await asyncio.sleep(0.05)

    async def change(self) -> None:
        """Start members, stop members, or do both concurrently."""
        count = len(self.members)
        joins = self._random.randint(0, min(3, MOST - count))
        leaves = self._random.randint(0, min(3, count - FEWEST))
        await asyncio.gather(*(self.join() for _ in range(joins)), *(self.leave() for _ in range(leaves)))
        await asyncio.sleep(self._random.random())


async def members_come_and_go(namesrv: str, seconds: float, seed: int) -> Crowd:
    """Change the members at random for a number of seconds; check() verifies the resulting history."""
    crowd = Crowd(namesrv, seed)
    for _ in range(FEWEST):
        await crowd.join()
    sending_task = asyncio.create_task(crowd.send(seconds))
    try:
        while not sending_task.done():
            await crowd.change()
        await sending_task

        async def all_handled() -> bool:
            return len({call.body for call in crowd.calls if call.ended}) == len(crowd.sent)

        await until(all_handled, f"all {len(crowd.sent)} messages handled")
    finally:
        sending_task.cancel()
        await asyncio.gather(*(member.stop() for member in crowd.members), return_exceptions=True)
    return crowd


async def members_that_come_and_go_handle_each_message_once(namesrv: str) -> None:
    crowd = await members_come_and_go(namesrv, SECONDS, seed=17)
    check(crowd.calls, crowd.sent)
    assert crowd.joined > 4
