"""Memory of idle 5.x consumers: each with a telemetry stream, settings and one heartbeat.

Once each has a connection of its own, and once 100 share one, as behind a load balancer.
"""

from __future__ import annotations

import asyncio
import resource

from tests.ports import free_port

from benchmarks.boots import BROKER, MIB, Boots
from benchmarks.processes import memory_bytes
from benchmarks.turns import Options, table
from cometmq.grpc.http2 import frames, hpack
from cometmq.grpc.rpc.calls import frame_message
from cometmq.grpc.rpc.enums import ClientType
from cometmq.grpc.rpc.messages import SERVICE, messages

CLIENTS = 2_000
SHARES = (1, 100)
SETTLED_S = 2.0


def _call(stream: int, method: str, client_id: str, message: object) -> bytes:
    """Return a call with one request. A unary call is complete."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{method}",
        "te": "trailers",
        "content-type": "application/grpc",
        "x-mq-client-id": client_id,
        "x-mq-language": "JAVA",
    }
    block = hpack.encode([(name.encode(), text.encode()) for name, text in headers.items()])
    data = frame_message(message.SerializeToString())  # type: ignore[attr-defined]
    flags = 0 if method == "Telemetry" else frames.END_STREAM
    return frames.header_frames(stream, block, False, frames.MIN_MAX_FRAME) + frames.frame(
        frames.DATA, flags, stream, data
    )


async def _connect(port: int, client_ids: list[str]) -> asyncio.StreamWriter:
    """Connect clients that share a connection, and wait until all of them are members of the group."""
    m = messages()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(frames.PREFACE + frames.settings({}))
    settings = m.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = "G"
    settings.subscription.subscriptions.add().topic.name = "TopicTest"
    heartbeat = m.HeartbeatRequest(client_type=ClientType.PUSH_CONSUMER, group=m.Resource(name="G"))
    for number, client_id in enumerate(client_ids):
        writer.write(_call(4 * number + 1, "Telemetry", client_id, m.TelemetryCommand(settings=settings)))
        writer.write(_call(4 * number + 3, "Heartbeat", client_id, heartbeat))
    ended, splitter = 0, frames.FrameReader(frames.MIN_MAX_FRAME)
    list(splitter.frames(frames.PREFACE))  # The reader is that of a server, which receives the preface first
    while ended < len(client_ids):
        for kind, flags, stream, _ in splitter.frames(await reader.read(1 << 16)):
            ended += kind == frames.HEADERS and bool(flags & frames.END_STREAM) and stream % 4 == 3
    return writer


async def _memory_bytes(pid: int, port: int, share: int) -> int:
    """Return the anonymous memory that the clients take in the broker."""
    before = memory_bytes(pid)["anonymous"]
    ids = [f"client-{number}@{'x' * 24}" for number in range(CLIENTS)]
    writers = [await _connect(port, ids[at : at + share]) for at in range(0, CLIENTS, share)]
    await asyncio.sleep(SETTLED_S)
    taken = memory_bytes(pid)["anonymous"] - before
    for writer in writers:
        writer.close()
    return taken


def run(options: Options) -> str:
    """Return a table: the memory of a broker that idle consumers take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2 * CLIENTS + 1_000), most))
    rows = []
    for share in SHARES:
        boots, port = Boots(options.data), free_port()
        command = boots.command(BROKER)
        with open(command[-1], "a", encoding="utf-8") as settings:
            settings.write(f"grpcPort={port}\n")
        process = boots.start(command)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            taken = asyncio.run(_memory_bytes(process.pid, port, share))
        finally:
            process.kill()
            process.communicate()
        rows.append([f"{share}", f"{taken / MIB:.0f} MiB", f"{taken / CLIENTS / 1024:.1f} KiB"])
    return table(["clients per connection", f"{CLIENTS} clients", "one client"], rows)
