"""The process that syncs the commit log for a broker, run as a script: it imports next to nothing of Python
and nothing of ours, for its memory and its start.

It reads requests from the socket that is its standard input and ends with it, however the broker went. A
request is the first positions of the segments to sync, 8 bytes each. Descriptors of those that it does not
hold yet come along, in the same order; those that it holds and that are not named any more are closed. The
answer is 4 bytes: 0, or the errno of the sync that failed.
"""

import os
import signal
import socket
import struct

MOST_SEGMENTS = 64
"""In one request."""

REQUEST = struct.Struct("=q")
ANSWER = struct.Struct("=i")


def serve(broker: socket.socket) -> None:
    """Answer requests until the other end is closed. Raises OSError when it is closed amid a sync."""
    held: dict[int, int] = {}  # first position of a segment -> descriptor
    while True:
        request, descriptors, _, _ = socket.recv_fds(broker, MOST_SEGMENTS * REQUEST.size, MOST_SEGMENTS)
        if not request:
            return
        wanted = [base for (base,) in REQUEST.iter_unpack(request)]
        held.update(zip((base for base in wanted if base not in held), descriptors, strict=True))
        for base in held.keys() - wanted:
            os.close(held.pop(base))
        broker.send(ANSWER.pack(sync([held[base] for base in wanted])))


def sync(descriptors: list[int]) -> int:
    """Sync one after the other; 0, or the errno of the first that fails."""
    try:
        for fd in descriptors:
            os.fdatasync(fd)
    except OSError as failure:
        return failure.errno or -1
    return 0


if __name__ == "__main__":
    # The end of a broker is said by its socket: what a terminal or a service manager tells the whole
    # group may come before the broker's last sync.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=0))
    except OSError:
        os._exit(1)
    os._exit(0)
