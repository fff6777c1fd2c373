"""One question asked of many brokers, of which one that is silent holds up nobody.

The answers that are there after a while are given; a question that is still under way goes on, is not asked
again meanwhile, and whoever wants the answers is told when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cometmq.errors import CometError

T = TypeVar("T")

PATIENCE_S = 2.0
"""So long the answers of others wait for a broker."""
TAKEN_WITHIN_S = 5.0
"""A late answer is one of now for so long."""


class StillSilent(CometError):
    """A server has not answered yet."""

    addr: str
    span_s: float

    def __str__(self) -> str:
        return f"{self.addr} has not answered for {self.span_s:.0f} s; it is still waited for"


@dataclass(frozen=True)
class Answers(Generic[T]):
    """values: name -> answer; missing: name -> why there is none."""

    values: dict[str, T]
    missing: dict[str, CometError]

    @property
    def problems(self) -> dict[str, str]:
        """`missing` in words."""
        return {name: str(error) for name, error in self.missing.items()}

    def check(self) -> None:
        """Raises why there is no answer at all, if some were asked."""
        if self.missing and not self.values:
            raise next(iter(self.missing.values()))


@dataclass
class _Asked(Generic[T]):
    task: asyncio.Future[T]
    began_s: float
    ended_s: float | None = None
    late: bool = False


class Patience(Generic[T]):
    """came: called when a late question has ended. within_s: instead of PATIENCE_S."""

    def __init__(self, came: Callable[[], None], within_s: float | None = None) -> None:
        self._came = came
        self._within_s = PATIENCE_S if within_s is None else within_s
        self._asked: dict[tuple[str, str], _Asked[T]] = {}

    async def ask(self, addrs: Mapping[str, str], question: Callable[[str], Awaitable[T]]) -> Answers[T]:
        """The answers to `question(addr)` by name, of those that answer in time. Raises what is no
        CometError."""
        now_s = asyncio.get_running_loop().time()
        for key, asked in list(self._asked.items()):
            if asked.ended_s is not None and now_s - asked.ended_s > TAKEN_WITHIN_S:
                del self._asked[key]
        for place in addrs.items():
            if place not in self._asked:
                self._begin(place, question)
        under_way = {place: self._asked[place] for place in addrs.items()}
        if under_way:
            await asyncio.wait([each.task for each in under_way.values()], timeout=self._within_s)
        values: dict[str, T] = {}
        missing: dict[str, CometError] = {}
        for (name, addr), asked in sorted(under_way.items()):
            if not asked.task.done():
                asked.late = True
                span_s = asyncio.get_running_loop().time() - asked.began_s
                missing[name] = StillSilent(addr, span_s)
                continue
            self._asked.pop((name, addr), None)
            try:
                values[name] = asked.task.result()
            except CometError as error:
                missing[name] = error
        return Answers(values, missing)

    def _begin(self, place: tuple[str, str], question: Callable[[str], Awaitable[T]]) -> None:
        loop = asyncio.get_running_loop()
        asked: _Asked[T] = _Asked(asyncio.ensure_future(question(place[1])), loop.time())
        self._asked[place] = asked

        def ended(task: asyncio.Future[T]) -> None:
            asked.ended_s = loop.time()
            if not task.cancelled():
                task.exception()  # seen, though nobody may ask for it any more
            if asked.late:
                self._came()

        asked.task.add_done_callback(ended)
