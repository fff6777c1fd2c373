"""The process that syncs the commit log for a broker.

It runs as a script that imports almost nothing of Python and nothing of CometMQ, to save memory and start
time. It reads requests from the socket that is its standard input. It exits when that socket is closed, even
if the broker was killed. A request is one byte. `SYNC`: sync the held descriptors. `HOLD`: another byte with
new descriptors follows; hold these instead of the previous ones, and sync them. The response is 4 bytes: 0,
or the errno of the failed sync.
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
    """Respond to requests until the broker closes its end of the socket.

    Raises OSError if the broker closes the socket during a sync.
    """
    channel = broker.fileno()  # A read through the descriptor costs half as much as through the socket object
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
    # A signal from a terminal or service manager may also reach this process, although the broker still needs
    # it for its last sync. So signals are ignored. This process ends when the broker closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=0))
    except OSError:
        os._exit(1)
    os._exit(0)
