"""Run many seeds; `python -m tests.simulation.seeds FIRST COUNT` runs more seeds than the tests do."""

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
"""Of this many seeds one is a run of whole brokers and clients.

The others simulate a raft group, of which only the core is real.
"""
_STEPS = 16
"""Steps of a simulated raft group: fewer than in tests/raft, for many more seeds."""
_BETWEEN_COLLECTIONS = 10


class _NoLoop(asyncio.DefaultEventLoopPolicy):
    """A policy without a default loop: callbacks of dying tasks would otherwise wait in it forever."""

    def get_event_loop(self) -> asyncio.AbstractEventLoop:
        raise RuntimeError("the run is over")


class SeedFailed(AssertionError):
    """A seed whose run had a problem."""

    def __init__(self, seed: int, what: str) -> None:
        super().__init__(f"seed {seed} ({what_is(seed)}): {what}\nCOMETMQ_SIM_SEED={seed} runs it alone")
        self.seed = seed


def what_is(seed: int) -> str:
    """Describe the run of a seed."""
    return str(plan_of(seed)) if seed % CLUSTERS == 0 else "a raft group"


def simulate(seed: int) -> Counter[str]:
    """Run a seed and count its faults and operations. Raises SeedFailed."""
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
    """Prepare the process for a series of runs.

    A run leaves tasks of killed processes behind; the interpreter's warnings about them are suppressed.
    """
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
        asyncio.set_event_loop_policy(policy)
        sys.unraisablehook = hook
        logging.disable(level)


def warm_up() -> None:
    """Fill caches and import modules, so that the first run of a process does not differ from later ones."""
    for shape in ("two", "pair", "raft"):
        Run(0, Plan(shape, "plain", frozenset(), True))()


def each_of(seeds: Iterable[int]) -> Counter[str]:
    """Run these seeds and count their faults; raises SeedFailed at the first problem."""
    seen: Counter[str] = Counter()
    for seed in rarely_collecting(seeds):
        seen += simulate(seed)
    return seen


def rarely_collecting(seeds: Iterable[int]) -> Iterator[int]:
    """Yield the seeds and run the garbage collector at intervals; `many` disables it otherwise."""
    for number, seed in enumerate(seeds):
        yield seed
        if number % _BETWEEN_COLLECTIONS == 0:
            gc.collect()


def main(first: int, count: int) -> None:
    """Run seeds and print their results; failures do not stop the series."""
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
