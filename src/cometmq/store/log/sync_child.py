"""The process that syncs the commit log for a broker, run as a script: it imports next to nothing of Python
and nothing of ours, for its memory and its start.

It reads requests from the socket that is its standard input and ends with it, however the broker went. A
request is one byte. `SYNC`: sync what you hold. `HOLD`: another byte follows, which descriptors come along
with; hold these instead of the ones before, and sync them. The answer is 4 bytes: 0, or the errno of the
sync that failed.
"""

import os
import signal
import socket
import struct

MOST_DESCRIPTORS = 64
SYNC = b"s"
HOLD = b"h"
ANSWER = struct.Struct("=i")


def serve(broker: socket.socket) -> None:
    """Answer requests until the other end is closed. Raises OSError when it is closed amid a sync."""
    channel = broker.fileno()  # read and written as a file, which costs half
    held: list[int] = []
    while request := os.read(channel, 1):
        if request == HOLD:
            _, given, _, _ = socket.recv_fds(broker, 1, MOST_DESCRIPTORS)
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
    # The end of a broker is said by its socket: what a terminal or a service manager tells the whole
    # group may come before the broker's last sync.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=0))
    except OSError:
        os._exit(1)
    os._exit(0)
