"""The data pipeline on Spark: one function per job. The first use of a function imports its module.

from cometmq.pipeline import archive, spark_session
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.archive import archive
    from cometmq.pipeline.jobs.archive_query import archived
    from cometmq.pipeline.jobs.audit import audit
    from cometmq.pipeline.jobs.compaction import compact
    from cometmq.pipeline.jobs.dedup import dedup, deduplicated
    from cometmq.pipeline.jobs.dlq import dlq, letters, redrive
    from cometmq.pipeline.jobs.inputs import messages
    from cometmq.pipeline.jobs.lag import lag
    from cometmq.pipeline.jobs.rebuild import rebuild
    from cometmq.pipeline.jobs.replay.replay import replay
    from cometmq.pipeline.jobs.run.run import run
    from cometmq.pipeline.jobs.throughput import throughput
    from cometmq.pipeline.jobs.trace import consumptions, sends, trace, traces
    from cometmq.pipeline.session import spark_session

__all__ = [
    "archive", "archived", "audit", "compact", "consumptions", "dedup", "deduplicated", "dlq", "lag",
    "letters", "messages", "rebuild", "redrive", "replay", "run", "sends", "spark_session", "throughput",
    "trace", "traces",
]  # fmt: skip

# The modules of functions, by function name. A function that is not listed here is defined in the module of
# its own name in `jobs`.
_MODULES = {
    "archived": "jobs.archive_query",
    "compact": "jobs.compaction",
    "consumptions": "jobs.trace",
    "deduplicated": "jobs.dedup",
    "letters": "jobs.dlq",
    "messages": "jobs.inputs",
    "redrive": "jobs.dlq",
    "replay": "jobs.replay.replay",
    "run": "jobs.run.run",
    "sends": "jobs.trace",
    "spark_session": "session",
    "traces": "jobs.trace",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, f'jobs.{name}')}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
