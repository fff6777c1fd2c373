"""Runs one of our commands with sends answered at once, neither read nor stored: ``bare.py mqbroker -c …``.

What such a broker costs is what sockets, event loop and the shortest Python around them cost.
"""

from __future__ import annotations

from tests.interop import attached

from cometmq.broker.send.send import SendProcessor
from cometmq.remoting import Connection, Shortcut

OPAQUE = b'"opaque":'


def _shortcuts(processor: SendProcessor) -> dict[bytes, Shortcut]:
    replies = processor._context.replies  # noqa: SLF001

    def answer(connection: Connection, buffer: memoryview, start: int, end: int, _stop: int) -> bool:
        header = bytes(buffer[start:end])
        at = header.rindex(OPAQUE) + len(OPAQUE)
        replies.answer([((connection, header[at : header.index(b",", at)], 0, False), 0, 0)])
        return True

    return {b'{"code":310,': answer}


if __name__ == "__main__":
    SendProcessor.shortcuts = _shortcuts  # type: ignore[method-assign]
    attached.main()
