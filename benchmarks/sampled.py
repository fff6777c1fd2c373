"""Run one of our commands under a sampling profiler: ``python sampled.py FILE mqbroker -c broker.conf``.

Every millisecond of CPU time the main thread's stack is counted; SIGUSR1 resets the counts. At the end they
are written to FILE as JSON lines ``[samples, ["file:function", …]]``, innermost first. Time inside C
(sockets, files, the event loop) counts for the Python function that called it.
"""

from __future__ import annotations

import atexit
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.interop import attached

import cometmq

INTERVAL_S = 0.001
_ROOT = str(Path(cometmq.__file__).parent)
_counts: Counter[tuple[str, ...]] = Counter()


def _sample(_: int, frame: FrameType | None) -> None:
    stack = []
    while frame is not None:
        name = frame.f_code.co_filename
        place = name[len(_ROOT) + 1 :] if name.startswith(_ROOT) else Path(name).name
        stack.append(f"{place}:{frame.f_code.co_name}")
        frame = frame.f_back
    _counts[tuple(stack)] += 1


def _write(target: Path) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    target.write_text("\n".join(json.dumps([count, stack]) for stack, count in _counts.items()))


def main() -> None:
    target = Path(sys.argv.pop(1))
    atexit.register(_write, target)
    signal.signal(signal.SIGUSR1, lambda *_: _counts.clear())
    signal.signal(signal.SIGPROF, _sample)
    signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
    attached.main()


if __name__ == "__main__":
    main()
