"""The process that runs one uploaded filter class.

It imports the modules that filters may use, confines itself, and then answers requests from its input.

- Request: a length in 4 bytes, then that many bytes. The first request is a JSON object with the name and
  the source of the class. Each later request holds message records, in the format of a pull response.
- Answer: a byte (1 success, 0 failure), a length in 4 bytes, then that many bytes. For records, a success has
  one byte per record, 1 if it matches. A failure has the reason as text.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cometmq.errors import BodyError
from cometmq.filtersrv.confine import confine
from cometmq.protocol.compression import decompress
from cometmq.protocol.record.layout import COMPRESSED
from cometmq.protocol.record.one import iter_records
from cometmq.text import shortened

LENGTH = struct.Struct(">I")
ANSWER = struct.Struct(">?I")
MAX_BODY = 32 << 20
"""The maximum size of a decompressed message body, in bytes. A filter class gets a larger body compressed."""
MAX_REASON_CHARACTERS = 1000  # maximum length of a failure's reason, in characters
REASON_BYTES = 4 * MAX_REASON_CHARACTERS + 100
# The modules that filter classes can use. They are imported before the confinement, because afterwards the
# process cannot read files.
PRELOADED_MODULES = (
    *("base64", "bisect", "collections", "csv", "dataclasses", "datetime", "decimal", "enum", "fnmatch"),
    *("fractions", "functools", "hashlib", "hmac", "ipaddress", "itertools", "json", "math", "operator"),
    *("random", "re", "statistics", "string", "struct", "textwrap", "time", "typing", "unicodedata"),
    *("urllib.parse", "uuid", "zlib", "_strptime"),
)
COMPRESSIONS = ("lz4.frame", "zstandard")  # optional packages, installed with the extra `zstd`
CODECS = ("ascii", "latin-1", "utf-16", "gb18030", "big5", "shift_jis", "euc_kr")

Match = Callable[[Any], object]


def main(parent: int) -> None:
    """Confine the process, then answer requests until the input ends."""
    try:
        for name in PRELOADED_MODULES:
            importlib.import_module(name)
        for name in COMPRESSIONS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for name in CODECS:
            codecs.lookup(name)
        confine(parent)
    except Exception as error:
        _answer(False, _reason(error).encode())
        sys.exit(1)
    match: Match | None = None
    while True:
        request = _read(LENGTH.unpack(_read(LENGTH.size))[0])
        try:
            if match is None:
                match, answer = load(**json.loads(request)), b""
            else:
                answer = judge(match, request)
        except BaseException as error:  # report even a SystemExit that a filter class raises
            _answer(False, _reason(error).encode("utf-8", "replace"))
        else:
            _answer(True, answer)


def load(name: str, source: str) -> Match:
    """Run the source code of a filter class, create an object of the class, and return its method `match`.

    Raises whatever exception the source code raises, and TypeError if there is no such class or method.
    """
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"{name}.py", "exec"), module)
    if not isinstance(module.get(name), type):
        raise TypeError(f"the source code of the filter defines no class {name}")
    match = getattr(module[name](), "match", None)
    if not callable(match):
        raise TypeError(f"class {name} has no method match(self, message)")
    found: Match = match
    return found


def judge(match: Match, records: bytes) -> bytes:
    """Return one byte for each record: 1 if its message matches, otherwise 0."""
    verdicts = bytearray()
    for message in iter_records(records):
        if message.sys_flag & COMPRESSED:
            with contextlib.suppress(BodyError):  # a body that cannot be decompressed stays compressed
                message.body = decompress(message.sys_flag, message.body, MAX_BODY)
                message.sys_flag &= ~COMPRESSED
        try:
            verdicts.append(bool(match(message)))
        except Exception as error:
            error.add_note(f"for message {message.msg_id} at offset {message.queue_offset}")
            raise
    return bytes(verdicts)


def _reason(error: BaseException) -> str:
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return shortened(f"{type(error).__name__}: {error}{notes}", MAX_REASON_CHARACTERS)


def _read(size: int) -> bytes:
    """Read exactly `size` bytes. End the process at the end of the input."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _answer(done: bool, answer: bytes) -> None:
    left = memoryview(ANSWER.pack(done, len(answer)) + answer)
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
