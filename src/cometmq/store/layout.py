"""Record layout as the store's hot path wants it (stand-in until protocol/record.py is there)."""

from __future__ import annotations

import struct

MAGIC_V1 = -626843481
MAGIC_V2 = -626843477
BLANK_MAGIC = -875286124
BLANK_STRUCT = struct.Struct(">ii")
HEAD = {
    (born, store): struct.Struct(f">iiiiiqqiq{born}sq{store}siqi") for born in (8, 20) for store in (8, 20)
}
