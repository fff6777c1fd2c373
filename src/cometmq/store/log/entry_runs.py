"""Reading the entries of a raft log from bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, HEAD_KIND, follows
from cometmq.protocol.record.many import MAX_BATCH_RECORDS, SHORTEST_RUN, Run, valid_run
from cometmq.protocol.record.one import Facts, record_facts


def entry_runs(data: bytes, position: int, *, check_crc: bool = True) -> Iterator[Run]:
    """Yield the consecutive valid entries in `data`, which begins at log position `position`.

    It ends before the first bytes that are not a valid entry.
    """
    at = 0
    while at < len(data):
        run = valid_run(data, at, position + at, MAX_BATCH_RECORDS, check_crc=check_crc, framing=ENTRIES)
        if run is None:
            run = _few(data, at, position, check_crc)
            if run is None:
                return
        yield run
        at = run.end - position


def _few(data: bytes, at: int, position: int, check_crc: bool) -> Run | None:
    found: list[Facts] = []
    heads = b""
    while at + ENTRY_SIZE < len(data) and len(found) < SHORTEST_RUN:
        facts = record_facts(data, at + ENTRY_SIZE, position + at + ENTRY_SIZE, check_crc=check_crc)
        head = data[at : at + ENTRY_SIZE]
        if facts is None or not follows(head, heads[-ENTRY_SIZE:], position + at, facts.size):
            break
        found.append(facts)
        heads += head
        at += facts.size + ENTRY_SIZE
    return Run.of(found)._replace(heads=np.frombuffer(heads, HEAD_KIND)) if found else None
