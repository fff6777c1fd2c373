"""How our broker bears size: ``python -m benchmarks.scale PART``, see docs/performance.md.

The stores of `backlog` (3 GiB) and `start` (21 GiB) are kept in --data, if that is given, and used again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks import scale_backlog, scale_java, scale_queues, scale_start

PARTS = {"queues": scale_queues, "java": scale_java, "backlog": scale_backlog, "start": scale_start}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--turns", type=int, default=5, help="counted turns (default 5; one more is dropped)")
    parser.add_argument("--seconds", type=float, default=6, help="length of a turn of sends (default 6)")
    parser.add_argument("--data", help="directory for the stores (default: a temporary one)")
    parser.add_argument("--out", default="build/benchmarks", help="directory of the results")
    options = parser.parse_args()
    part = PARTS[options.part]
    with tempfile.TemporaryDirectory(prefix="cometmq-scale-") as scratch:
        found = part.run(Path(options.data or scratch), options.turns, options.seconds)
    text = part.table(found)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"scale-{options.part}.json").write_text(json.dumps(found, indent=1))
    (out / f"scale-{options.part}.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
