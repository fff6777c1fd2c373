"""Name servers and brokers that say what a test wants, over real sockets."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cometmq.protocol.batch import iter_batch
from cometmq.protocol.bodies import BrokerData, ClusterInfo, QueueData, TopicList, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame, decode_frame, encode_frame
from cometmq.protocol.headers import GetRouteInfoRequestHeader, SendMessageRequestHeaderV2


@contextmanager
def serving(answer: Callable[[Frame], Frame]) -> Iterator[str]:
    """A server on a free port; its address. In the end its connections are closed too."""
    connections: list[socket.socket] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            connections.append(self.connection)
            while size := self.rfile.read(4):
                frame = decode_frame(self.rfile.read(int.from_bytes(size, "big")))
                self.wfile.write(encode_frame(answer(frame)))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Broker:
    """Keeps the bodies it is sent by queue, or answers with `refusal`."""

    def __init__(self, refusal: int = 0) -> None:
        self.refusal, self.asked = refusal, 0
        self.queues: dict[int, list[bytes]] = {}

    def answer(self, request: Frame) -> Frame:
        self.asked += 1
        if self.refusal:
            return request.response(self.refusal, "as the test says")
        queue = self.queues.setdefault(request.header(SendMessageRequestHeaderV2).queue_id, [])
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            queue += [bytes(item.body) for item in iter_batch(bytes(request.body))]
        else:
            queue.append(bytes(request.body))
        return request.response()

    @property
    def bodies(self) -> list[bytes]:
        return [body for queue in self.queues.values() for body in queue]


class NameServer:
    """Knows brokers by name, and on all of them the same topics."""

    def __init__(self, *topics: str, queues: int = 4) -> None:
        self.topics = topics
        self.brokers: dict[str, str] = {}
        self.write_only: set[str] = set()
        self.queues, self.looks = queues, 0

    def answer(self, request: Frame) -> Frame:
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return request.response(body=TopicList(topic_list=list(self.topics)).encode())
        datas = {
            name: BrokerData(cluster="c", broker_name=name, broker_addrs={0: address})
            for name, address in self.brokers.items()
        }
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return request.response(body=ClusterInfo(broker_addr_table=datas).encode())
        self.looks += 1
        if request.header(GetRouteInfoRequestHeader).topic not in self.topics:
            return request.response(ResponseCode.TOPIC_NOT_EXIST)
        route = TopicRouteData(
            queue_datas=[
                QueueData(
                    broker_name=name,
                    read_queue_nums=4,
                    write_queue_nums=self.queues,
                    perm=2 if name in self.write_only else 6,
                )
                for name in self.brokers
            ],
            broker_datas=list(datas.values()),
        )
        return request.response(body=route.encode())
