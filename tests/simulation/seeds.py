"""Many seeds in a row; `python -m tests.simulation.seeds FIRST COUNT` for more than the tests run."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.raft.chaos import live
from tests.simulation.run import Plan, Run, plan_of

CLUSTERS = 20
"""Each so many-th seed is a run of whole brokers and clients; the others are lives of a raft group, whose
core alone is real."""
_STEPS = 16
"""Of such a life: shorter than in tests/raft, for many more seeds."""
_BETWEEN_COLLECTIONS = 10


class _NoLoop(asyncio.DefaultEventLoopPolicy):
    """There is no loop but that of a run: else what dying tasks still want would wait in one for ever."""

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        raise RuntimeError("the run is over")


class SeedFailed(AssertionError):
    """A seed that showed a problem."""

    def __init__(self, seed: int, what: str) -> None:
        super().__init__(f"seed {seed} ({what_is(seed)}): {what}\nCOMETMQ_SIM_SEED={seed} runs it alone")
        self.seed = seed


def what_is(seed: int) -> str:
    """What a seed stands for."""
    return str(plan_of(seed)) if seed % CLUSTERS == 0 else "a raft group"


def simulate(seed: int) -> Counter[str]:
    """Run a seed; returns which faults struck, and what was done. Raises SeedFailed."""
    if seed % CLUSTERS:
        try:
            life = live(seed, steps=_STEPS)
        except Exception as broken:
            raise SeedFailed(seed, repr(broken)) from broken
        return Counter({"raft groups": 1, "raft events": life.events, "raft entries": len(life.committed)})
    try:
        outcome = Run(seed)()
    except Exception as failure:
        raise SeedFailed(seed, repr(failure)) from failure
    if outcome.problems:
        raise SeedFailed(seed, "\n".join(f"{each.rule}: {each.what}" for each in outcome.problems[:10]))
    return outcome.seen + Counter(
        {"clusters": 1, outcome.plan.shape: 1, outcome.plan.kind: 1, "acknowledged": outcome.sent}
    )


@contextmanager
def many() -> Iterator[None]:
    """For runs in a row. A run leaves tasks of killed processes behind; what the interpreter says while it
    throws them away means nothing."""
    hook, level, policy = sys.unraisablehook, logging.root.manager.disable, asyncio.get_event_loop_policy()
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _what: None
    asyncio.set_event_loop_policy(_NoLoop())
    warm_up()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        asyncio.set_event_loop_policy(policy)
        sys.unraisablehook = hook
        logging.disable(level)


def warm_up() -> None:
    """What is done once in a process (caches, imports) must not make its first run another one."""
    for shape in ("two", "pair", "raft"):
        Run(0, Plan(shape, "plain", frozenset(), True))()


def each_of(seeds: Iterable[int]) -> Counter[str]:
    """Run these seeds; raises SeedFailed at the first problem."""
    seen: Counter[str] = Counter()
    for seed in rarely_collecting(seeds):
        seen += simulate(seed)
    return seen


def rarely_collecting(seeds: Iterable[int]) -> Iterator[int]:
    """The same, with a look for garbage now and then: within `many` nothing else looks."""
    for number, seed in enumerate(seeds):
        yield seed
        if number % _BETWEEN_COLLECTIONS == 0:
            gc.collect()


def main(first: int, count: int) -> None:
    """Run seeds, and say what they showed; goes on after failures."""
    seen: Counter[str] = Counter()
    with many():
        for seed in rarely_collecting(range(first, first + count)):
            try:
                seen += simulate(seed)
            except SeedFailed as failed:
                seen["FAILED"] += 1
                print(failed, flush=True)
    print(", ".join(f"{what}: {count}" for what, count in sorted(seen.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
