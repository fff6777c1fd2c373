"""Flow control of responses (RFC 9113, section 5.2), and the output of a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from cometmq.grpc.http2 import frames
from cometmq.grpc.http2.errors import ErrorCode, Http2Error


class Stream:
    """One request and its response.

    Attributes:
        opened: The time at which the request's headers were received.
        peer_ended: Whether the request is complete.
        receive_window, send_window: The bytes that either side still accepts; the second may be negative.
        unconsumed: The received bytes that the application has not consumed.
        credit: The consumed bytes that have not been added to the peer's window yet.
        ending: Whether the response's last part was passed to the sender.
        unsent: The number of queued bytes of the response's data.
    """

    __slots__ = (
        *("credit", "ending", "id", "offset", "opened", "peer_ended", "queue"),
        *("receive_window", "send_window", "unconsumed", "unsent"),
    )

    def __init__(self, stream_id: int, opened: float, receive_window: int, send_window: int) -> None:
        self.id = stream_id
        self.opened = opened
        self.peer_ended = False
        self.receive_window = receive_window
        self.unconsumed = 0
        self.credit = 0
        self.ending = False
        self.send_window = send_window
        # Data or an encoded header block; whether it is a header block; whether it ends the stream.
        self.queue: deque[tuple[bytes, bool, bool]] = deque()
        self.offset = 0  # the number of bytes of the queue's first item that have been sent
        self.unsent = 0


class Sender:
    """Divides responses into frames as the peer's windows allow, and collects the output.

    When the connection's window opens, the streams that wait for it send one frame each in turn. `sent_end`
    is called with a stream after its last frame was written.
    """

    __slots__ = ("_initial_window", "_max_frame", "_output", "_sent_end", "_waiting", "_window", "unsent")

    def __init__(self, sent_end: Callable[[Stream], None]) -> None:
        self.unsent = 0  # the bytes of the output and of the data in all queues
        self._sent_end = sent_end
        self._output: list[bytes] = []
        self._initial_window = self._window = frames.DEFAULT_WINDOW
        self._max_frame = frames.MIN_MAX_FRAME
        # Streams with data whose own window is open. If the connection's window is open, there are none.
        self._waiting: dict[Stream, None] = {}

    def new_stream(self, stream_id: int, opened: float, receive_window: int) -> Stream:
        return Stream(stream_id, opened, receive_window, self._initial_window)

    def write(self, frame: bytes) -> None:
        """Add a frame to the output."""
        self._output.append(frame)
        self.unsent += len(frame)

    def take_output(self) -> list[bytes]:
        """Return the output and clear it."""
        output = self._output
        self._output = []
        for part in output:
            self.unsent -= len(part)
        return output

    def send_headers(self, stream: Stream, block: bytes, end: bool) -> None:
        """Send an encoded header block, after the stream's queued data."""
        stream.ending = end
        if stream.queue:
            stream.queue.append((block, True, end))
        else:
            self._write_headers(stream, block, end)

    def send_data(self, stream: Stream, data: bytes, end: bool) -> None:
        """Send data, or queue it until the windows are open."""
        stream.ending = end
        size = len(data)
        stream.queue.append((data, False, end))
        stream.unsent += size
        self.unsent += size
        if len(stream.queue) == 1:
            self._send_queue(stream)

    def send_response(self, stream: Stream, block: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response: headers, data and trailers, of which each header block fits into a frame."""
        size = len(data)
        if stream.queue or size > min(stream.send_window, self._window, self._max_frame):
            self.send_headers(stream, block, False)
            self.send_data(stream, data, False)
            self.send_headers(stream, trailers, True)
            return
        self._window -= size
        self.write(
            frames.frame(frames.HEADERS, frames.END_HEADERS, stream.id, block)
            + frames.frame(frames.DATA, 0, stream.id, data)
            + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, trailers)
        )
        self._sent_end(stream)

    def discard(self, stream: Stream) -> None:
        """Discard the queued data of a stream that has ended."""
        self._waiting.pop(stream, None)
        self.unsent -= stream.unsent
        stream.queue.clear()
        stream.unsent = 0

    def open_window(self, size: int) -> None:
        """Add bytes to the connection's window. Raises Http2Error if it becomes too large."""
        self._window += size
        if self._window > frames.MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window exceeds 2^31-1 bytes")
        while self._waiting and self._window > 0:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            self._send_queue(stream, max_frames=1)

    def open_stream_window(self, stream: Stream, size: int) -> None:
        """Add bytes to a stream's window. Raises Http2Error if it becomes too large."""
        stream.send_window += size
        if stream.send_window > frames.MAX_WINDOW:
            raise Http2Error(
                ErrorCode.FLOW_CONTROL_ERROR, "the stream's window exceeds 2^31-1 bytes", stream.id
            )
        self._send_queue(stream)

    def apply_settings(self, values: dict[int, int], streams: Iterable[Stream]) -> None:
        """Apply the peer's settings. Raises Http2Error if a stream's window becomes too large."""
        self._max_frame = values.get(frames.MAX_FRAME_SIZE, self._max_frame)
        change = values.get(frames.INITIAL_WINDOW_SIZE, self._initial_window) - self._initial_window
        if change == 0:
            return
        self._initial_window += change
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                reason = f"SETTINGS_INITIAL_WINDOW_SIZE raises the window of stream {stream.id} above 2^31-1"
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, reason)
            self._send_queue(stream)

    def _send_queue(self, stream: Stream, max_frames: int = frames.MAX_WINDOW) -> None:
        """Send a stream's queue as far as the windows allow, and at most `max_frames` frames with data."""
        queue = stream.queue
        while queue:
            item, is_headers, end = queue[0]
            if is_headers:
                queue.popleft()
                self._write_headers(stream, item, end)
                continue
            left = len(item) - stream.offset
            size = max(0, min(left, stream.send_window, self._window, self._max_frame))
            if left and (size == 0 or max_frames == 0):
                if stream.send_window > 0:
                    self._waiting[stream] = None
                return
            max_frames -= 1
            self._window -= size
            stream.send_window -= size
            stream.unsent -= size
            self.unsent -= size
            if size < left:
                part = item[stream.offset : stream.offset + size]
                stream.offset += size
                self.write(frames.frame(frames.DATA, 0, stream.id, part))
                continue
            part = item[stream.offset :]
            stream.offset = 0
            queue.popleft()
            self.write(frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream.id, part))
            if end:
                self._sent_end(stream)

    def _write_headers(self, stream: Stream, block: bytes, end: bool) -> None:
        self.write(frames.header_frames(stream.id, block, end, self._max_frame))
        if end:
            self._sent_end(stream)
