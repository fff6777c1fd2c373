"""A blocking connection to a name server or broker, with any number of requests in flight.

Spark's Python workers are single-threaded and synchronous, so an event loop would only add cost between the
socket and the decoder. The package `protocol` encodes and decodes the bytes. After any error, the connection
is closed and unusable.
"""

from __future__ import annotations

import functools
import itertools
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.client.cluster.options import ClientOptions, environment_credentials, environment_tls
from cometmq.errors import ConnectError, FrameError, RequestTimeout, SendFailed
from cometmq.protocol.acl import Credentials, sign
from cometmq.protocol.codes import MAX_FRAME_LENGTH
from cometmq.protocol.frame import Frame, decode_frame, encode_frame

CONNECT_TIMEOUT_S = 3.0
_READ_SIZE = 4 << 20  # bytes per read, enough for several responses of the maximum size


@dataclass(frozen=True, slots=True)
class Access:
    """The account that signs requests, and the TLS settings.

    `tls` is a file of TLS settings, True for the default settings, or False for connections without TLS. The
    driver sends this object to the workers. Its repr never shows a secret.
    """

    credentials: Credentials | None = None
    tls: str | bool = False

    @staticmethod
    def of_environment() -> Access:
        """Return the settings of the environment (COMETMQ_ACCESS_KEY ...). Raises ConfigError."""
        return Access(environment_credentials(), environment_tls())

    def client_options(self) -> ClientOptions:
        """Return the settings as options of a client, which then ignores its environment."""
        keys = self.credentials
        return ClientOptions(
            access_key=keys.access_key if keys else "",
            secret_key=keys.secret_key if keys else "",
            security_token=keys.security_token if keys else "",
            tls=self.tls,
        )


PLAIN = Access()


@functools.lru_cache(maxsize=8)
def _context(access: Access) -> ssl.SSLContext | None:
    return access.client_options().tls_context


class Wire:
    """A connection to "host:port". Raises ConnectError, SendFailed, RequestTimeout and FrameError."""

    def __init__(self, address: str, timeout_s: float, access: Access = PLAIN) -> None:
        self.address = address
        self._credentials = access.credentials
        self.timeout_s = timeout_s
        self._opaque = itertools.count(1)
        self._buffer = bytearray(_READ_SIZE)
        self._begin = self._end = 0
        self._codes: dict[int, int] = {}  # request codes of the requests in flight, by opaque number
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            if access.tls:
                self._socket = _secured(self._socket, access, host)
        except (OSError, ValueError) as error:
            raise ConnectError(address, str(error)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frames: Sequence[Frame]) -> list[int]:
        """Send requests in one write. Return their opaque numbers, which the responses have, too."""
        numbers = []
        parts = []
        for frame in frames:
            if self._credentials is not None:
                sign(frame, self._credentials)
            frame.opaque = next(self._opaque)
            self._codes[frame.opaque] = frame.code
            numbers.append(frame.opaque)
            parts.append(encode_frame(frame))
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.sendall(b"".join(parts))
        except OSError as error:
            self.close()
            raise SendFailed(self.address, str(error)) from error
        return numbers

    def receive(self) -> Frame:
        """Return the next response to any request. Its body is valid until the next `receive`."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            frame = self._answer(self._payload(deadline))
            if frame is not None:
                return frame

    def receive_some(self) -> list[Frame]:
        """Return all complete responses, at least one. Bodies are valid until the next call."""
        frames = [self.receive()]
        while self._whole_frame():
            frame = self._answer(self._payload(0.0))
            if frame is not None:
                frames.append(frame)
        return frames

    def _answer(self, payload: memoryview) -> Frame | None:
        """Return the response, or None for a request by the server, such as a notice of consumer changes."""
        try:
            frame = decode_frame(payload)
        except FrameError:
            self.close()
            raise
        return frame if frame.is_response and self._codes.pop(frame.opaque, None) is not None else None

    def _whole_frame(self) -> bool:
        held = self._end - self._begin
        return held >= 4 and held - 4 >= int.from_bytes(self._buffer[self._begin : self._begin + 4], "big")

    def call_many(self, frames: Sequence[Frame]) -> list[Frame]:
        """Send requests together, with no other in flight, and return their responses in order."""
        answers: dict[int, Frame] = {}
        numbers = self.send(frames)
        while len(answers) < len(numbers):
            frame = self.receive()
            frame.body = bytes(frame.body)
            answers[frame.opaque] = frame
        return [answers[number] for number in numbers]

    def _payload(self, deadline: float) -> memoryview:
        """Return the next frame without the length field at its start."""
        self._fill(4, deadline)
        size = int.from_bytes(self._buffer[self._begin : self._begin + 4], "big")
        if not 4 <= size <= MAX_FRAME_LENGTH:
            self.close()
            raise FrameError(f"{self.address} sent a frame of {size} bytes")
        self._fill(4 + size, deadline)
        start = self._begin + 4
        self._begin = start + size
        return memoryview(self._buffer)[start : self._begin]

    def _fill(self, count: int, deadline: float) -> None:
        """Read until the buffer holds at least `count` bytes."""
        if self._end - self._begin >= count:
            return
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + count > len(self._buffer):
            kept = self._buffer[self._begin : self._end]
            if count > len(self._buffer):
                self._buffer = bytearray(2 * count)
            self._buffer[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        view = memoryview(self._buffer)
        while self._end - self._begin < count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._timed_out()
            self._socket.settimeout(remaining)
            try:
                received = self._socket.recv_into(view[self._end :])
            except TimeoutError as error:
                raise self._timed_out() from error
            except OSError as error:
                self.close()
                raise SendFailed(self.address, str(error)) from error
            if not received:
                self.close()
                raise SendFailed(self.address, "the server closed the connection")
            self._end += received

    def usable(self) -> bool:
        """Return whether an idle connection is still open and has no unread data."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
            return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False

    def _timed_out(self) -> RequestTimeout:
        self.close()
        return RequestTimeout(self.address, next(iter(self._codes.values()), 0), self.timeout_s)

    def close(self) -> None:
        self._socket.close()


def _secured(plain: socket.socket, access: Access, host: str) -> ssl.SSLSocket:
    context = _context(access)
    assert context is not None
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except OSError:
        plain.close()
        raise


class IdleWires(dict[tuple[str, float], Wire]):
    """Connections without requests in flight, by (address, timeout)."""

    def __init__(self, access: Access = PLAIN) -> None:
        super().__init__()
        self._access = access

    def connect(self, address: str, timeout_s: float) -> Wire:
        """Take an idle connection that is still open, or open one. Raises ConnectError if that fails."""
        wire = self.pop((address, timeout_s), None)
        if wire is not None:
            if wire.usable():
                return wire
            wire.close()
        return Wire(address, timeout_s, self._access)

    def keep(self, wire: Wire) -> None:
        self[wire.address, wire.timeout_s] = wire

    def close(self) -> None:
        for wire in self.values():
            wire.close()
        self.clear()
