"""The connections between raft members: one to each, for what we say, and one from each, for what it says.

What cannot be sent at once is dropped: a node says it again when it is still true. So a member that is away
or slow costs at most MOST_WAITING bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from cometmq import logs
from cometmq.broker.replication import raft_wire
from cometmq.broker.replication.rates import Rate
from cometmq.broker.replication.sparing import Sparing
from cometmq.errors import CometError, ProtocolError
from cometmq.protocol.addresses import parse_address
from cometmq.raft import AnyMessage
from cometmq.remoting import dial, stop_accepting
from cometmq.text import shortened

log = logs.logger(__name__)

RETRY_S = 0.3
SILENCE_S = 60.0
"""That a member cannot be reached is said again after so long, or once it was reached for so long."""
CONNECT_S = 2.0
MOST_WAITING = 32 << 20
"""Bytes in the buffer of one connection, above which nothing more is put there."""
MOST_UNREAD = 4 * raft_wire.LONGEST_FRAME
"""Bytes of frames that have not come whole, of all connections together: one leader sends at a time."""
MOST_CONNECTIONS = 64
"""From members: each has one, and a broken one may not be noticed for a while."""
GREETING_S = 5.0
"""Who has connected says who it is within this time."""
SILENT_MS = 3_000
"""A connection ends when the other machine's kernel has not taken what was sent for so long: after a network
is mended nobody waits for TCP's growing pauses."""

_SHOWN = 200  # characters of a list of members
Receive = Callable[[AnyMessage], None]
"""Takes a message. Raises CometError for what no member would say."""


class _Incoming(asyncio.Protocol):
    """A connection from a member."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.frames = raft_wire.Frames(peers.group, peers.me)
        self.sender = ""
        self.transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        if self._peers.stopped or not self._peers.has_room():
            transport.abort()
            return
        _ends_when_silent(transport)
        self._patience = asyncio.get_running_loop().call_later(GREETING_S, transport.abort)
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
            known = self.frames.greeting
            name = known.sender if known is not None else self.transport.get_extra_info("peername")
            self._peers.refused.say("the connection of raft member %s is closed: %s", name, error)
            self.transport.abort()
        self._peers.heard()

    def _know(self) -> None:
        """Take note of who speaks, before anything else that it says."""
        greeting = self.frames.greeting
        if not self.sender and greeting is not None:
            self._peers.greeted(self, greeting)
            self.sender = greeting.sender
            self._be_patient()

    def connection_lost(self, _error: Exception | None) -> None:
        self._be_patient()
        self._peers.incoming.pop(self, None)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


@dataclass(eq=False)
class _Link(asyncio.Protocol):
    """The connection to one member, made again whenever it breaks."""

    addr: str
    hello: Callable[[], bytes]
    transport: asyncio.Transport | None = None
    sent: Rate = field(default_factory=Rate)
    _broken: asyncio.Event = field(default_factory=asyncio.Event)
    _said_at: float | None = None

    async def run(self) -> None:
        """Keep it up until cancelled."""
        address = parse_address(self.addr)
        assert address is not None  # the settings were checked
        loop = asyncio.get_running_loop()
        while True:
            self._broken.clear()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await dial(lambda: self, *address)
            except OSError as error:  # TimeoutError is one
                if self._may_say():
                    log.warning("raft member %s cannot be reached: %s", self.addr, error or "no answer")
            else:
                begun = loop.time()
                await self._broken.wait()
                if loop.time() - begun >= SILENCE_S:
                    self._said_at = None
                elif loop.time() - begun < RETRY_S and self._may_say():
                    log.warning(
                        "raft member %s has ended the connection at once: its log says why", self.addr
                    )
            await asyncio.sleep(RETRY_S)

    def _may_say(self) -> bool:
        now = asyncio.get_running_loop().time()
        may = self._said_at is None or now - self._said_at >= SILENCE_S
        if may:
            self._said_at = now
        return may

    def send(self, data: bytes) -> None:
        if self.transport is None:
            return
        waiting = self.transport.get_write_buffer_size()
        if not waiting or waiting + len(data) <= MOST_WAITING:
            self.sent.add(asyncio.get_running_loop().time(), len(data))
            self.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        _ends_when_silent(transport)
        transport.write(self.hello())

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None
        self._broken.set()


def _ends_when_silent(transport: asyncio.Transport) -> None:
    sock: socket.socket = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", SILENT_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2)):
        option = getattr(socket, name, None)  # not everywhere
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Peers:
    """All connections of a member. Methods belong to the loop's thread."""

    def __init__(
        self,
        group: str,
        me: str,
        addr: str,
        broker_addr: str,
        *,
        receive: Receive,
        heard: Callable[[], None],
        met: Callable[[], None],
        begins: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """addr: where the others reach this member, broker_addr: and its broker. receive: what a member said;
        heard: called when all messages of some bytes were received; met: when one has said who it is. begins:
        see Greeting."""
        self.group = group
        self.me = me
        self.refused = Sparing(log)
        self.receive = receive
        self.heard = heard
        self._met = met
        self.learned: dict[str, raft_wire.Greeting] = {}
        """What members have said of themselves."""
        self.incoming: dict[_Incoming, None] = {}
        """Oldest first."""
        self.stopped = False
        self._hello = lambda: raft_wire.greeting(group, me, addr, broker_addr, begins())
        self._begins = begins
        self._differs: tuple[str, str] = ("", "")  # who has other dLegerPeers, and the words for it
        self._links: dict[str, tuple[_Link, asyncio.Task[None]]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> None:
        """Accept members. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Incoming(self), host or None, port)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def greeted(self, connection: _Incoming, greeting: raft_wire.Greeting) -> None:
        """A member has connected; what it had before is broken. Raises ProtocolError if another one has its
        name, or if both may begin a group, and not the same."""
        sender = greeting.sender
        self._compare(greeting)
        before = self.learned.get(sender)
        for other in list(self.incoming):
            if other is not connection and other.sender == sender and other.transport is not None:
                if before is not None and before.addr != greeting.addr:
                    raise ProtocolError(
                        f"two members call themselves {sender}, at {before.addr} and at {greeting.addr}: "
                        "each has a dLegerSelfId of its own"
                    )
                other.transport.abort()
        if before is None and len(self.learned) >= MOST_CONNECTIONS:  # strangers who are gone are forgotten
            there = {each.sender for each in self.incoming} | self._links.keys()
            self.learned = {name: each for name, each in self.learned.items() if name in there}
        if before is not None or sender in self._links or len(self.learned) < MOST_CONNECTIONS:
            self.learned[sender] = greeting
            self._met()
        if sender not in self._links:
            self.refused.say(
                "raft member %s at %s has connected, and is none of this group, nor of dLegerPeers here: "
                "`cometmq raft add %s` takes it in",
                sender, greeting.addr, sender,
            )  # fmt: skip

    def _compare(self, greeting: raft_wire.Greeting) -> None:
        """Two that begin with other members each would be two groups, whose majorities need not meet."""
        own, other, sender = self._begins(), greeting.begins, greeting.sender
        if own and other and own != other:
            there, here = (shortened(";".join(each), _SHOWN) for each in (other, own))
            words = f"dLegerPeers must be equal where a group begins: at {sender} {there}, here {here}"
            self._differs = sender, words
            raise ProtocolError(words)
        if sender == self._differs[0]:
            self._differs = "", ""

    @property
    def problem(self) -> str:
        """What keeps the group from beginning, "" if that is not known."""
        return self._differs[1] if self._begins() else ""

    def has_room(self) -> bool:
        """Whether another connection may come. It takes the place of the oldest that has not said who it is,
        then of the oldest that is no member's: whoever holds all places keeps nobody out."""
        if len(self.incoming) < MOST_CONNECTIONS:
            return True
        strangers = [each for each in self.incoming if each.sender not in self._links]
        oldest = next((each for each in strangers if not each.sender), next(iter(strangers), None))
        if oldest is None or oldest.transport is None:
            return False
        self.refused.say("the oldest of %d connections makes room for another", len(self.incoming))
        del self.incoming[oldest]
        oldest.transport.abort()
        return True

    def check_unread(self, connection: _Incoming) -> None:
        """Raise ProtocolError when a connection's frame is one too many that has not come whole."""
        if connection.frames.unread > MOST_UNREAD // MOST_CONNECTIONS:
            unread = sum(each.frames.unread for each in self.incoming)
            if unread > MOST_UNREAD:
                raise ProtocolError(f"{unread} bytes of frames that are not whole wait already")

    def use(self, addresses: Mapping[str, str]) -> None:
        """These are the other members, id -> "host:port", from now on."""
        for member in [each for each, (link, _) in self._links.items() if addresses.get(each) != link.addr]:
            link, task = self._links.pop(member)
            task.cancel()
            link.close()
        for member, addr in addresses.items():
            if member not in self._links:
                link = _Link(addr, self._hello)
                self._links[member] = link, asyncio.get_running_loop().create_task(link.run())

    def send(self, messages: Sequence[AnyMessage]) -> None:
        """Send the messages of a tick, as few frames as may be to each member. Any of them may be lost."""
        to: dict[str, list[AnyMessage]] = {}
        for message in messages:
            to.setdefault(message.to, []).append(message)
        for member, its in to.items():
            if member in self._links:
                for part in raft_wire.parts(its):
                    self._links[member][0].send(raft_wire.frame(part))

    def bytes_a_second(self, member: str) -> int:
        """What was sent to a member in the second before this one."""
        known = self._links.get(member)
        return 0 if known is None else known[0].sent.bytes_a_second(asyncio.get_running_loop().time())

    async def stop(self) -> None:
        """Close everything, also what was accepted just now."""
        self.stopped = True
        self.use({})
        if self._server is not None:
            stop_accepting(self._server)
        for connection in list(self.incoming):
            if connection.transport is not None:
                connection.transport.abort()
