"""A lean load generator: pipelined frames over plain sockets, in a separate process.

``python -m benchmarks.load '{"mode": "send", "port": 10911, ...}'`` prints one JSON object at its end.
Requests look like those of Apache's 4.9 Java client. A fixed number of send frames is built before the clock
starts, so the generator's cost does not depend on the number of queues.
"""

from __future__ import annotations

import dataclasses
import json
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.processes import cpu_seconds, wait_quiet
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.protocol.headers import (
    EndTransactionRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.record.layout import COMMITTED, PREPARED

FRAMES = 10_000  # different requests of a send load
CHUNK = 16  # requests per write
_FILTERED = 4  # sysFlag: the pull contains its subscription
_length_at = struct.Struct(">I").unpack_from
Queue = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Load:
    """The parameters of a load. Sends go to the queues of `topics` in turn; `group` is the consumer's.

    Attributes:
        mode: "send" (until `seconds` have passed or `count` messages were sent), "transaction" (the same with
            half messages, each followed by its commit, which has no response) or "pull" (each queue to its
            end, or until `seconds` have passed).
        size: Bytes per body.
        batch: Messages per request.
        window: Requests in flight on each of `connections`.
        timed: Whether messages have delivery times in 1 to 24 hours.
    """

    mode: str
    port: int
    topics: list[str]
    queues: int  # number of queues per topic
    size: int = 1024
    batch: int = 1
    window: int = 64
    connections: int = 1
    seconds: float = 1e9
    count: int = 1 << 60
    group: str = "scale"
    begin: int = 0  # queue offset of the first pull
    per_pull: int = 32
    timed: bool = False


def spread(load: Load) -> list[Queue]:
    """Return the queues in a fixed order that mixes the topics."""
    queues = [(topic, number) for topic in load.topics for number in range(load.queues)]
    random.Random(7).shuffle(queues)
    return queues


def send_frames(load: Load) -> list[bytes]:
    """Build FRAMES requests of one message or one batch each, for all queues in turn."""
    queues = spread(load)
    delays = random.Random(7)
    born_ms = time.time_ns() // 1_000_000
    body = b"x" * load.size
    made = []
    for number in range(FRAMES if load.batch == 1 else max(len(queues), FRAMES // load.batch)):
        topic, queue_id = queues[number % len(queues)]
        properties = f"UNIQ_KEY\x017F000001{born_ms:08X}18B4AAC2{number:08X}\x02WAIT\x01true\x02TAGS\x01a"
        if load.mode == "transaction":
            properties += "\x02TRAN_MSG\x01true\x02PGROUP\x01scale"
        if load.timed:
            properties += f"\x02TIMER_DELAY_SEC\x01{delays.randrange(3_600, 86_400)}"
        content = body
        if load.batch > 1:
            one = properties.encode()
            content = encode_batch((0, body, one) for _ in range(load.batch))
            properties = "WAIT\x01true"
        header = SendMessageRequestHeaderV2(
            producer_group="scale",
            topic=topic,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=queue_id,
            sys_flag=PREPARED if load.mode == "transaction" else 0,
            born_timestamp=born_ms,
            flag=0,
            properties=properties,
            reconsume_times=0,
            unit_mode=False,
            batch=load.batch > 1,
        )
        code = RequestCode.SEND_BATCH_MESSAGE if load.batch > 1 else RequestCode.SEND_MESSAGE_V2
        made.append(encode_frame(Frame.request(code, header, content, opaque=number, language="JAVA")))
    return made


class Commits:
    """Creates the commits of half messages from the responses to them."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        header = EndTransactionRequestHeader(
            producer_group="scale",
            tran_state_table_offset=77_777_777_777,
            commit_log_offset=88_888_888_888,
            commit_or_rollback=COMMITTED,
            from_transaction_check=False,
            msg_id="KEY",
            transaction_id="KEY",
        )
        request = Frame.request(RequestCode.END_TRANSACTION, header, oneway=True, language="JAVA")
        text = encode_frame(request)[8:].replace(b"88888888888", b"%d").replace(b"77777777777", b"%d")
        self._text = text.replace(b"KEY", b"%b")
        self._keys = [frame.partition(b"UNIQ_KEY\\u0001")[2].partition(b"\\")[0] for frame in frames]

    def of(self, reply: bytes) -> bytes:
        at = reply.index(b'"msgId":"') + 9
        position = decode_offset_id(reply[at : reply.index(b'"', at)].decode()).physical_offset
        key = self._keys[_field(reply, b'"opaque"')]
        text = self._text % (position, key, _field(reply, b'"queueOffset"'), key)
        return struct.pack(">II", 4 + len(text), len(text)) + text


class Peer:
    """A connection and its received bytes that are not parsed yet."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.in_flight = 0
        self._rest = b""

    def replies(self) -> list[bytes]:
        """Return the complete frames that have arrived, without length words; wait for the first bytes."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the broker closed the connection")
        data = self._rest + data if self._rest else data
        at, total, found = 0, len(data), []
        while at + 4 <= total:
            stop = at + 4 + _length_at(data, at)[0]
            if stop > total:
                break
            found.append(data[at + 4 : stop])
            at = stop
        self._rest = data[at:]
        return found


def _checked(reply: bytes) -> bytes:
    """Check that the response is a success and return it."""
    if reply[4:14] != b'{"code":0,':
        raise RuntimeError(f"refused: {reply[4:400]!r}")
    return reply


def send(load: Load) -> dict[str, Any]:
    """Keep `window` requests in flight on each connection; return the acknowledged messages and the time."""
    frames = send_frames(load)
    step = min(CHUNK, load.window)
    chunks = [b"".join(frames[at : at + step]) for at in range(0, len(frames) - step + 1, step)]
    most = load.count // load.batch
    commits = Commits(frames) if load.mode == "transaction" else None
    begun = acknowledged = turn = 0
    peers = [Peer(load.port) for _ in range(load.connections)]
    began = time.perf_counter()
    until = began + load.seconds
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        open_peers = len(peers)
        waiting = list(peers)
        while open_peers:
            more = begun < most and time.perf_counter() < until
            for peer in waiting:
                while more and peer.in_flight + step <= load.window and begun < most:
                    peer.socket.sendall(chunks[turn % len(chunks)])
                    turn += 1
                    begun += step
                    peer.in_flight += step
                if not peer.in_flight:
                    selector.unregister(peer.socket)
                    open_peers -= 1
            waiting = []
            for key, _ in selector.select(1) if open_peers else ():
                replies = [_checked(reply) for reply in key.data.replies()]
                if commits is not None and replies:
                    key.data.socket.sendall(b"".join(map(commits.of, replies)))
                key.data.in_flight -= len(replies)
                acknowledged += len(replies)
                waiting.append(key.data)
    return _result(acknowledged * load.batch, time.perf_counter() - began)


class Cursor:
    """The read position of a queue that is drained."""

    def __init__(self, load: Load, queue: Queue) -> None:
        header = PullMessageRequestHeader(
            consumer_group=load.group,
            topic=queue[0],
            queue_id=queue[1],
            queue_offset=0,
            max_msg_nums=load.per_pull,
            sys_flag=_FILTERED,
            commit_offset=0,
            suspend_timeout_millis=15_000,
            subscription="*",
            sub_version=1,
            expression_type="TAG",
        )
        marked = msgspec.structs.replace(header, queue_offset=77_777_777_777)
        request = Frame.request(RequestCode.PULL_MESSAGE, marked, opaque=77_777_777, language="JAVA")
        text = encode_frame(request)[8:].replace(b"77777777777", b"%d")
        self._text = text.replace(b"77777777", b"%d")
        first = self._text.find(b"%d")
        self._offset_first = b"ueueOffset" in self._text[first - 14 : first]
        self.offset = load.begin

    def request(self, number: int) -> bytes:
        values = (self.offset, number) if self._offset_first else (number, self.offset)
        text = self._text % values
        return struct.pack(">II", 4 + len(text), len(text)) + text


def _field(header: bytes, name: bytes) -> int:
    at = header.index(name) + len(name) + 1
    at += header[at : at + 1] == b'"'
    stop = at
    while header[stop : stop + 1].isdigit():
        stop += 1
    return int(header[at:stop])


def pull(load: Load) -> dict[str, Any]:
    """Pull the queues in turn, with one pull in flight per queue; return the messages and the time.

    Reading ends at the ends that the queues had at the start, so every pull returns messages. An empty pull
    per queue would add half as many pulls for queues of 64 messages.
    """
    cursors = [Cursor(load, queue) for queue in spread(load)]
    idle = list(reversed(range(len(cursors))))
    later: list[int] = []
    got = finished = 0
    peers = [Peer(load.port) for _ in range(load.connections)]
    began = time.perf_counter()
    until = began + load.seconds
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        waiting: Sequence[Peer] = peers
        while finished < len(cursors) and time.perf_counter() < until:
            for peer in waiting:
                requests = []
                while peer.in_flight < load.window:
                    if not idle:
                        later.reverse()
                        idle, later = later, []
                        if not idle:
                            break
                    number = idle.pop()
                    requests.append(cursors[number].request(number))
                    peer.in_flight += 1
                if requests:
                    peer.socket.sendall(b"".join(requests))
            waiting = []
            for key, _ in selector.select(1):
                peer = key.data
                for reply in peer.replies():
                    peer.in_flight -= 1
                    length = _length_at(reply)[0] & 0xFFFFFF
                    header = reply[4 : 4 + length]
                    number = _field(header, b'"opaque"')
                    if header.startswith(b'{"code":0,'):
                        cursor = cursors[number]
                        following = _field(header, b'"nextBeginOffset"')
                        got += following - cursor.offset
                        cursor.offset = following
                        if following < _field(header, b'"maxOffset"'):
                            later.append(number)
                        else:
                            finished += 1
                    else:
                        raise RuntimeError(f"refused: {header!r}")
                waiting.append(peer)
    result = _result(got, time.perf_counter() - began)
    return {**result, "complete": finished == len(cursors)}


def _result(messages: int, seconds: float) -> dict[str, Any]:
    return {
        "messages": messages,
        "seconds": seconds,
        "rate": messages / seconds,
        "generator_cpu_us": time.process_time() * 1e6 / max(messages, 1),
    }


def begin_load(load: Load, *, quiet: bool = False) -> subprocess.Popen[str]:
    """Start the load in a separate process. `quiet` hides its error when it loses its broker."""
    command = [sys.executable, "-m", "benchmarks.load", json.dumps(dataclasses.asdict(load))]
    errors = subprocess.DEVNULL if quiet else None
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def end_load(child: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = child.communicate(timeout=900)
    if child.returncode:
        raise RuntimeError("the load generator failed, see above")
    result: dict[str, Any] = json.loads(text)
    return result


def run_load(load: Load, pid: int) -> dict[str, Any]:
    """Run a load to its end. `cpu_us`: the broker's CPU per message until it is idle."""
    before = cpu_seconds(pid)
    result = end_load(begin_load(load))
    if result.get("complete") is False:
        raise RuntimeError(f"only {result['messages']} messages were pulled")
    result["cpu_us"] = (wait_quiet(pid) - before) * 1e6 / max(1, result["messages"])
    return result


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(pull(load) if load.mode == "pull" else send(load)) + "\n")


if __name__ == "__main__":
    main()
