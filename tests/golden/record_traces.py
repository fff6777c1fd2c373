"""Record tests/data/traces.json: trace records as Apache's own encoders write them.

``python -m tests.golden.record_traces``. A row has the version of the client, the record's fields, its text
and the keys that Apache's client puts on its message.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from tests.interop.driver import Driver
from tests.interop.jars import CLIENT_VERSIONS

from cometmq.protocol.traces import (
    AnyTrace,
    ConsumeCode,
    EndTransaction,
    MessageType,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
)

TARGET = Path(__file__).parent.parent / "data" / "traces.json"
MSG_ID, REQUEST_ID = "7F0000011F9C5ACD4B2D8B2D1C2A0000", "7F0000011F9C5ACD4B2D8B2D1C2A0001"
OFFSET_ID = "7F000001000051AF0000000000003E66"
NOW = 1_795_172_444_873

AT: dict[str, Any] = {"timestamp_ms": NOW, "region": "DefaultRegion", "msg_id": MSG_ID}
SENT: dict[str, Any] = {**AT, "group": "producers", "topic": "Orders"}
STORED: dict[str, Any] = {**SENT, "tags": "TagA", "store_host": "127.0.0.1:10911"}

PUB = Pub(
    **STORED,
    keys="k1 k2",
    body_length=5,
    cost_ms=3,
    message_type=MessageType.NORMAL,
    offset_msg_id=OFFSET_ID,
    success=True,
)
BEFORE = SubBefore(**AT, group="readers", request_id=REQUEST_ID, retry_times=2, keys="k1 k2")
AFTER = SubAfter(
    request_id=REQUEST_ID,
    msg_id=MSG_ID,
    cost_ms=12,
    success=True,
    keys="k1 k2",
    context_code=ConsumeCode.SUCCESS,
    timestamp_ms=NOW,
    group="readers",
)
END = EndTransaction(
    **STORED,
    keys="k1",
    message_type=MessageType.COMMIT,
    transaction_id=MSG_ID,
    state="COMMIT_MESSAGE",
    from_check=False,
)
RECALL = Recall(**SENT, success=True)

replaced = msgspec.structs.replace
TRACES: list[AnyTrace] = [
    PUB,
    replaced(PUB, tags=None, keys=None, offset_msg_id=None, success=False),
    replaced(PUB, tags="订单", keys="Grüße 🚀", message_type=MessageType.DELAY),
    replaced(PUB, msg_id=f"{MSG_ID},{REQUEST_ID}", tags="", keys="", message_type=MessageType.HALF),
    BEFORE,
    replaced(BEFORE, region=None, retry_times=0, keys=None),
    AFTER,
    replaced(AFTER, success=False, context_code=ConsumeCode.EXCEPTION, keys=None, cost_ms=0),
    END,
    replaced(END, tags=None, keys=None, transaction_id=None, state="ROLLBACK_MESSAGE", from_check=True),
    replaced(END, state="UNKNOW"),
    RECALL,
    replaced(RECALL, success=False),
]


def main() -> None:
    rows = []
    for version in CLIENT_VERSIONS:
        with tempfile.TemporaryDirectory() as directory:
            java = Driver(version, Path(directory))
            traces = [
                msgspec.to_builtins(trace)
                for trace in TRACES
                if version.startswith("5") or not isinstance(trace, Recall)
            ]
            made = java.call("trace_encode", traces=traces)
            java.stop()
        rows += [
            {"version": version, "trace": trace, **line} for trace, line in zip(traces, made, strict=True)
        ]
    TARGET.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    sys.stderr.write(f"{TARGET}: {len(rows)} records\n")


if __name__ == "__main__":
    main()
