"""The recorded frames, for tests: ``recordings()`` lists the files, ``load`` reads one."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

from tests.golden.tap import Recorded

DATA = Path(__file__).parent.parent / "data"


def recordings() -> list[Path]:
    found = sorted(DATA.glob("frames-*.json.gz"))
    assert found, f"no recordings in {DATA}"
    return found


def load(path: Path) -> list[Recorded]:
    return [
        Recorded(row["from"], row["to"], row["request"], row["response"], base64.b64decode(row["frame"]))
        for row in json.loads(gzip.decompress(path.read_bytes()))
    ]
