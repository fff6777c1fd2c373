"""The connections between raft members: for each other member, one for sending and one for receiving.

A message that cannot be sent at once is dropped, because the node repeats messages that are still needed. So
a member that is unreachable or slow takes at most MAX_UNSENT_BYTES of memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from cometmq import logs
from cometmq.broker.base.stats import Rate
from cometmq.broker.replication import raft_wire
from cometmq.errors import CometError, ProtocolError
from cometmq.protocol.addresses import parse_address
from cometmq.raft import AnyMessage
from cometmq.remoting import dial, host_of_peer, stop_accepting
from cometmq.text import shortened

log = logs.logger(__name__)

RETRY_S = 0.3
UNREACHABLE_WARNING_INTERVAL_S = 60.0
"""Minimum interval between two "unreachable" warnings. Reset once a connection has lasted this long."""
CONNECT_S = 2.0
MAX_UNSENT_BYTES = 32 << 20
"""The maximum number of bytes in the write buffer of a connection. Further messages are dropped."""
MAX_INCOMPLETE_BYTES = 4 * raft_wire.MAX_FRAME_BYTES
"""The maximum for all connections together. It is enough, because only one leader sends entries at a time."""
MAX_CONNECTIONS = 64
"""Much more than there are members, because broken connections may remain open for a while."""
HANDSHAKE_TIMEOUT_S = 5.0
"""The time, in seconds, within which a new connection must send its handshake."""
USER_TIMEOUT_MS = 3_000
"""A connection ends if sent data is not acknowledged for this time.

Without it, a connection would wait for TCP's retransmissions, whose intervals grow, after the network works.
"""

_SHOWN = 200  # If an error text lists members, the maximum number of characters of the list
Receive = Callable[[AnyMessage], None]
"""A function that handles a received message. Raises CometError if no correct member would send it."""


class _Incoming(asyncio.Protocol):
    """A connection that another member has opened, for receiving."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.frames = raft_wire.Frames(peers.group, peers.me)
        self.sender = ""
        self.transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)
        if self._peers.stopped or not self._peers.has_room():
            transport.abort()
            return
        _ends_when_silent(transport)
        self._patience = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, transport.abort)
        self._peers.incoming[self] = None

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.frames.feed(data):
                self._know()
                self._peers.receive(message)
            self._know()
            self._peers.check_unread(self)
        except CometError as error:
            assert self.transport is not None
            known = self.frames.handshake
            name = known.sender if known is not None else self.transport.get_extra_info("peername")
            if self._peers.refused.allows():
                log.warning("closing the connection of raft member %s: %s", name, error)
            self.transport.abort()
        self._peers.heard()

    def _know(self) -> None:
        """Register the connection once its handshake has arrived, before its messages are handled."""
        handshake = self.frames.handshake
        if not self.sender and handshake is not None:
            self._peers.register(self, handshake)
            self.sender = handshake.sender
            if self._patience is not None:
                self._patience.cancel()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._peers.incoming.pop(self, None)


@dataclass(eq=False)
class _Link(asyncio.Protocol):
    """The connection to another member, for sending. It is reopened whenever it breaks."""

    addr: str
    hello: Callable[[], bytes]
    transport: asyncio.Transport | None = None
    sent: Rate = field(default_factory=Rate)
    _broken: asyncio.Event = field(default_factory=asyncio.Event)
    _log_limit: logs.LogLimiter = field(
        default_factory=lambda: logs.LogLimiter(1, UNREACHABLE_WARNING_INTERVAL_S)
    )

    async def run(self) -> None:
        """Keep the connection open until this task is cancelled."""
        address = parse_address(self.addr)
        assert address is not None  # `Peers.use` is called only with valid addresses
        loop = asyncio.get_running_loop()
        while True:
            self._broken.clear()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await dial(lambda: self, *address)
            except OSError as error:  # OSError includes TimeoutError
                if self._log_limit.allows():
                    log.warning("raft member %s unreachable: %s", self.addr, str(error) or "no answer")
            else:
                begun = loop.time()
                await self._broken.wait()
                if loop.time() - begun >= UNREACHABLE_WARNING_INTERVAL_S:
                    self._log_limit.reset()
                elif loop.time() - begun < RETRY_S and self._log_limit.allows():
                    log.warning(
                        "raft member %s closed the connection immediately; its log shows the reason",
                        self.addr,
                    )
            await asyncio.sleep(RETRY_S)

    def send(self, data: bytes) -> None:
        if self.transport is None:
            return
        waiting = self.transport.get_write_buffer_size()
        if not waiting or waiting + len(data) <= MAX_UNSENT_BYTES:
            self.sent.add(asyncio.get_running_loop().time(), len(data))
            self.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast is needed, because uvloop's transport does not derive from asyncio's.
        self.transport = transport = cast("asyncio.Transport", transport)
        _ends_when_silent(transport)
        transport.write(self.hello())

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None
        self._broken.set()


def _ends_when_silent(transport: asyncio.Transport) -> None:
    sock: socket.socket = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", USER_TIMEOUT_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2)):
        option = getattr(socket, name, None)  # None if the platform lacks this TCP option
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Peers:
    """All connections of a raft member to the other members. Must be used only in the event loop's thread."""

    def __init__(
        self,
        group: str,
        me: str,
        addr: str,
        *,
        receive: Receive,
        heard: Callable[[], None],
        met: Callable[[], None],
        begins: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """Start without connections. They are opened after `use` and `listen` are called.

        Args:
            addr: The address at which other members reach this member.
            receive: Called with each message of a member.
            heard: Called whenever bytes have arrived from a member, after `receive` was called with all
                messages that they complete.
            met: Called after each handshake of a member.
            begins: Returns the value for `Handshake.begins`.
        """
        self.group = group
        self.me = me
        self.refused = logs.LogLimiter(20, 60.0, log)
        self.receive = receive
        self.heard = heard
        self._met = met
        self.learned: dict[str, raft_wire.Handshake] = {}
        """The last handshake of each member, by name."""
        self.incoming: dict[_Incoming, None] = {}
        """The accepted connections, in the order of their age, oldest first."""
        self.stopped = False
        self._broker_addr = ""
        self._hello = lambda: raft_wire.handshake(group, me, addr, self._broker_addr, begins())
        self._begins = begins
        # A member whose `dLegerPeers` differ from this member's, and a description of the difference.
        self._differs: tuple[str, str] = ("", "")
        self._links: dict[str, tuple[_Link, asyncio.Task[None]]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, broker_addr: str) -> None:
        """Accept connections from members. Raises OSError.

        `broker_addr` is the address of this member's broker, for clients.
        """
        self._broker_addr = broker_addr
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Incoming(self), host or None, port)

    @property
    def port(self) -> int:
        """The port on which this member listens for other members."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def register(self, connection: _Incoming, handshake: raft_wire.Handshake) -> None:
        """Register a connection from a member, and close an older connection from the same member.

        Raises ProtocolError if another member has the same name, or if this member and the sender would both
        create the group, but with different members.
        """
        sender = handshake.sender
        self._compare(handshake)
        before = self.learned.get(sender)
        for other in list(self.incoming):
            if other is not connection and other.sender == sender and other.transport is not None:
                if before is not None and before.addr != handshake.addr:
                    raise ProtocolError(
                        f"two members have the name {sender}, at {before.addr} and at {handshake.addr}: "
                        "give each member its own dLegerSelfId"
                    )
                other.transport.abort()
        # If too many handshakes are stored, drop those of unknown members without a connection.
        if before is None and len(self.learned) >= MAX_CONNECTIONS:
            there = {each.sender for each in self.incoming} | self._links.keys()
            self.learned = {name: each for name, each in self.learned.items() if name in there}
        if before is not None or sender in self._links or len(self.learned) < MAX_CONNECTIONS:
            self.learned[sender] = handshake
            self._met()
        if sender not in self._links and self.refused.allows():
            log.warning(
                "raft member %s connected from %s, but is neither in this group nor in dLegerPeers; "
                "add it with `cometmq raft add %s`",
                sender, handshake.addr, sender,
            )  # fmt: skip

    def _compare(self, handshake: raft_wire.Handshake) -> None:
        """Raise ProtocolError if the sender and this member would begin groups of different members.

        The majorities of such groups might not overlap, so there could be two leaders.
        """
        own, other, sender = self._begins(), handshake.begins, handshake.sender
        if own and other and own != other:
            there, here = (shortened(";".join(each), _SHOWN) for each in (other, own))
            words = f"dLegerPeers must be equal where a group begins: at {sender} {there}, here {here}"
            self._differs = sender, words
            raise ProtocolError(words)
        if sender == self._differs[0]:
            self._differs = "", ""

    @property
    def problem(self) -> str:
        """Why the members cannot create their group, as far as this member knows, or ""."""
        return self._differs[1] if self._begins() else ""

    def has_room(self) -> bool:
        """Return whether another connection may be accepted. At the limit, close one of an unknown sender.

        This is the oldest one without a handshake or, if there is none, the oldest one of an unknown member.
        """
        if len(self.incoming) < MAX_CONNECTIONS:
            return True
        strangers = [each for each in self.incoming if each.sender not in self._links]
        oldest = next((each for each in strangers if not each.sender), next(iter(strangers), None))
        if oldest is None or oldest.transport is None:
            return False
        if self.refused.allows():
            log.warning("closed the oldest of %d raft connections to accept a new one", len(self.incoming))
        del self.incoming[oldest]
        oldest.transport.abort()
        return True

    def check_unread(self, connection: _Incoming) -> None:
        """Raise ProtocolError if too many bytes of incomplete frames are waiting on all connections together.

        The sum is computed only if `connection` itself holds more than its share of the limit.
        """
        if connection.frames.unread > MAX_INCOMPLETE_BYTES // MAX_CONNECTIONS:
            unread = sum(each.frames.unread for each in self.incoming)
            if unread > MAX_INCOMPLETE_BYTES:
                raise ProtocolError(f"{unread} bytes of incomplete frames are already waiting")

    def use(self, addresses: Mapping[str, str]) -> None:
        """Set the other members to connect to. `addresses` has the address "host:port" of each, by name."""
        for member in [each for each, (link, _) in self._links.items() if addresses.get(each) != link.addr]:
            link, task = self._links.pop(member)
            task.cancel()
            link.close()
        for member, addr in addresses.items():
            if member not in self._links:
                link = _Link(addr, self._hello)
                self._links[member] = link, asyncio.get_running_loop().create_task(link.run())

    def send(self, messages: Sequence[AnyMessage]) -> None:
        """Send messages to other members, in as few frames as possible. Any message may be lost."""
        to: dict[str, list[AnyMessage]] = {}
        for message in messages:
            to.setdefault(message.to, []).append(message)
        for member, its in to.items():
            if member in self._links:
                for part in raft_wire.parts(its):
                    self._links[member][0].send(raft_wire.frame(part))

    def has(self, host: str) -> bool:
        """Return whether a member of the group is connected from this host."""
        members = (each.transport for each in self.incoming if each.sender in self._links)
        return any(each is not None and host_of_peer(each) == host for each in members)

    def bytes_a_second(self, member: str) -> int:
        """Return the number of bytes sent to a member in the previous second."""
        known = self._links.get(member)
        return 0 if known is None else known[0].sent.bytes_a_second(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        self.stopped = True
        self.use({})
        if self._server is not None:
            stop_accepting(self._server)
        for connection in list(self.incoming):
            if connection.transport is not None:
                connection.transport.abort()
