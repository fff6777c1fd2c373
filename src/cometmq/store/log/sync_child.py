"""The process that syncs the commit log for a broker.

It runs as a script that imports almost nothing of Python and nothing of CometMQ, to save memory and start
time. It reads requests from the socket that is its standard input. It ends when that socket is closed,
however the broker ended. A request is one byte. `SYNC`: sync the held descriptors. `HOLD`: another byte
follows with descriptors; hold these instead of the previous ones, and sync them. The answer is 4 bytes: 0, or
the errno of the failed sync.
"""

import os
import signal
import socket
import struct

MAX_DESCRIPTORS = 64
SYNC = b"s"
HOLD = b"h"
ANSWER = struct.Struct("=i")


def serve(broker: socket.socket) -> None:
    """Answer requests until the other end is closed. Raises OSError if it is closed during a sync."""
    channel = broker.fileno()  # this costs half of reading and writing the socket as a file
    held: list[int] = []
    while request := os.read(channel, 1):
        if request == HOLD:
            _, given, _, _ = socket.recv_fds(broker, 1, MAX_DESCRIPTORS)
            for fd in held:
                os.close(fd)
            held = given
        error = 0
        try:
            for fd in held:
                os.fdatasync(fd)
        except OSError as failure:
            error = failure.errno or -1
        os.write(channel, ANSWER.pack(error))


if __name__ == "__main__":
    # The process ends when the broker closes the socket, not by a signal: the signal of a terminal or a
    # service manager to the whole group may arrive before the broker's last sync.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=0))
    except OSError:
        os._exit(1)
    os._exit(0)
