"""The 5.x clients of the endpoint, and their links to the broker of this process.

A client is identified by its client id and its account; one that a white list allows is another one. Behind
a load balancer, its calls arrive on several connections, which other clients may share. A client ends when it
reports its end, when the last connection of its calls closes, or when it has been silent for EXPIRED_S and
has no telemetry stream.

To the broker, each client is a remoting client of version 5: it has a connection in memory, its *link*, which
has the client's own address. Its requests therefore pass the same checks as those of remoting clients, its
groups are registered on the link, and requests of the broker, such as transaction checks, arrive on it. The
link closes when the client ends, and the broker then forgets the client. Sends, receives and acknowledgements
pass the link as frames that are not encoded (`Client.ask`).
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cometmq.broker.access.accounts import Account
from cometmq.broker.access.guard import Guard
from cometmq.broker.access.rights import Right, Rights
from cometmq.broker.groups.clients import MAX_CLIENT_ID_LENGTH
from cometmq.errors import RemotingError, SendFailed
from cometmq.grpc.http2.connection import Allowance
from cometmq.grpc.listener.connection import GrpcConnection
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import Code, FilterType
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.outcomes import checked
from cometmq.protocol.acl import MAX_KEY_LENGTH, Credentials, sign
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.codes import LANGUAGES, VERSION_5_0_0, RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import Header, WithdrawPopRequestHeader
from cometmq.remoting import Connection, Dispatcher, Handler, Limits, RemotingServer, Tick, Waiter

MAX_CLIENTS_PER_CONNECTION = 1_000
"""As many clients may share a connection of a load balancer as it may have open streams."""
MAX_CLIENTS = 20_000
EXPIRED_S = 120.0
"""The broker, too, forgets a client that has sent no heartbeat for this time."""
MAX_TELEMETRY_BYTES = 64 * 1024
"""Commands to a client are dropped, and replies to its settings wait, while this many bytes are unsent."""
REPLY_RETRY_S = 1.0
SETTINGS_AT_ONCE, SETTINGS_PER_S = 100, 1
"""How often a client may send settings. Clients do so at their start, and every 30 s or 5 minutes."""
ALGORITHM = "MQv2-HMAC-SHA1 "
BASIC = "basic "
"""The scheme by which clients of the HTTP gateway authenticate."""
_VERSION = re.compile(r"5\.([0-9])\.([0-9])(?![0-9])", re.ASCII)
LANGUAGE_NAMES = {"DOTNET": "DOTNET", "GOLANG": "GO"}
"""Language names of 5.x clients that differ from those of remoting; unknown ones become OTHER."""

Key = tuple[str, str, bool]
"""What identifies a client: see `Client.key`."""


@dataclass(eq=False, slots=True)
class Client:
    """A 5.x client.

    Attributes:
        key: The id, the access key, and whether a white list allows its calls. They identify the client: the
            broker checks the requests on its link against the white lists, too.
        version: The remoting protocol's number of the client's version.
        settings: The settings that heartbeats repeat, as an encoded `Settings` message.
        is_lite: Whether the client has sent the settings of a consumer of lite topics.
        transactions: The topics to which the client has sent transactional messages.
        telemetry: The call on which commands to the client are sent, None while there is none.
        streams: All open telemetry calls. There are several after a client has lost one without the server's
            notice.
        connections: The open connections on which calls of the client have arrived.
        seen: The time of the event loop at which the last call arrived.
        polls: The numbers, on the link, of the pops under way.
        changes: Limits how often the client may send settings.
        leased: For each receipt handle whose lease the server renews: see `renewals.py`.
    """

    _clients: Clients
    key: Key
    language: str
    version: int
    peer: tuple[str, int]
    changes: Allowance
    credentials: Credentials | None = None
    settings: bytes = b""
    is_lite: bool = False
    transactions: set[str] = field(default_factory=set)
    telemetry: Call | None = None
    streams: set[Call] = field(default_factory=set)
    connections: set[GrpcConnection] = field(default_factory=set)
    seen: float = 0.0
    leased: dict[str, Any] = field(default_factory=dict)
    polls: set[int] = field(default_factory=set)
    ended: bool = False
    _link: Connection | None = None
    _reply: Any = None  # The reply to the newest settings, until the stream has room for it

    @property
    def client_id(self) -> str:
        return self.key[0]

    def request(self, frame: Frame, timeout_s: float) -> asyncio.Future[Frame]:
        """Return the future of the broker's response. Raises SendFailed if the client has ended."""
        if self.ended:
            raise SendFailed(self.peer[0], frame.code)
        return self._open_link().request(frame, timeout_s)

    def ask(self, frame: Frame, waiter: Waiter, timeout_s: float | None = None) -> None:
        """Let the broker handle a request now. The waiter receives the response, or SendFailed."""
        timeout_s = self._clients.call_timeout_s if timeout_s is None else timeout_s
        try:
            if self.ended:
                raise SendFailed(self.peer[0], frame.code)
            self._open_link().ask(frame, timeout_s, waiter)
        except SendFailed as error:
            waiter.set_exception(error)

    def asked(self, frame: Frame, timeout_s: float | None = None) -> asyncio.Future[Frame]:
        """Let the broker handle a request now, and return the future of its response (see `ask`)."""
        outcome: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.ask(frame, outcome, timeout_s)
        return outcome

    def _open_link(self) -> Connection:
        link = self._link
        if link is None or link.closed:
            link = self._link = self._clients.open_link(self)
        return link

    def oneway(self, frame: Frame) -> None:
        """Send a request to the broker whose outcome does not matter."""
        self._open_link().oneway(frame)

    async def send(self, frame: Frame, timeout_s: float | None = None) -> Frame:
        """Send a request to the broker and return its response. Raises ServiceError if it fails."""
        try:
            timeout_s = self._clients.call_timeout_s if timeout_s is None else timeout_s
            return checked(await self.request(frame, timeout_s))
        except RemotingError as error:
            return checked(error)

    def frame(
        self, code: int, header: Header | None = None, body: bytes = b"", *, ext: dict[str, str] | None = None
    ) -> Frame:
        """Return a request of this client to the broker."""
        return Frame.request(code, header, body, ext=ext, language=self.language, version=self.version)

    def command(self, command: Any) -> bool:
        """Send a command on the client's telemetry stream. Return False if there is none, or it is full."""
        call = self.telemetry
        if call is None or call.ended or call.unsent > MAX_TELEMETRY_BYTES:
            return False
        call.send(command.SerializeToString())
        return True

    def reply(self, command: Any) -> None:
        """Send the reply to the client's settings, or the newest one once the stream is no longer full."""
        waits, self._reply = self._reply is not None, command
        if not waits:
            self._send_reply()

    def _send_reply(self) -> None:
        if self._reply is None or self.telemetry is None or self.telemetry.ended or self.command(self._reply):
            self._reply = None
        else:
            asyncio.get_running_loop().call_later(REPLY_RETRY_S, self._send_reply)

    def subscriptions(self) -> list[SubscriptionData]:
        """Return the subscriptions in the client's settings."""
        return [
            SubscriptionData(
                topic=each.topic.name,
                sub_string=each.expression.expression or "*",
                expression_type="SQL92" if each.expression.type == FilterType.SQL else "TAG",
            )
            for each in messages().Settings.FromString(self.settings).subscription.subscriptions
        ]

    def withdraw(self, poll: int) -> None:
        """Let the broker answer a parked pop, because its call or the client has ended."""
        if self._link is not None and not self._link.closed:
            header = WithdrawPopRequestHeader(request=poll)
            self._link.oneway(self.frame(RequestCode.WITHDRAW_POP, header))

    def poll_ended(self, poll: int) -> None:
        """Record that the broker has answered a pop, or cannot do so any more."""
        self.polls.discard(poll)
        if self.ended and not self.polls and self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Close the link, after the requests that were written to it and the pops under way.

        The response to a pop may contain leased messages, which must be given back.
        """
        self.ended = True
        if self._link is not None:
            for poll in self.polls:
                self.withdraw(poll)
            self._link.flush()
            if not self.polls:
                self._link.close()


@dataclass(eq=False)
class Clients:
    """Finds the client of a call, and checks its signature.

    Attributes:
        server: The broker's server, to which links connect.
        guard: The broker's access check, or None.
        call_timeout_s: The time, in seconds, within which the broker must respond to a request.
        handlers: Returns the handlers of requests that the broker sends to a client.
        end: Called with a client that has been forgotten to make room for another one.
    """

    server: RemotingServer
    tick: Tick
    guard: Guard | None
    call_timeout_s: float
    handlers: Callable[[Client], Mapping[int, Handler]]
    limits: Limits
    end: Callable[[Client], None]
    now: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    _known: dict[Key, Client] = field(default_factory=dict)
    _by_host: dict[str, dict[Client, None]] = field(default_factory=dict)

    @property
    def connected(self) -> Collection[Client]:
        """The clients that have not ended."""
        return self._known.values()

    def find(self, call: Call, rights: Sequence[Right] = ()) -> Client:
        """Return the client of a call.

        Calls that lead to a request on the link need no `rights` here, because the broker checks the request.
        Raises ServiceError if the client has no id, no valid signature or not the rights.
        """
        connection: GrpcConnection = call.connection  # type: ignore[assignment]
        client_id = call.text(b"x-mq-client-id")
        credentials, is_signed = None, False
        if self.guard is not None:
            host = _host_and_port(connection.peer)[0]
            credentials, is_signed = self._authenticate(self.guard, call, host, rights)
        key = client_id, "" if credentials is None else credentials.access_key, is_signed
        client = self._known.get(key)
        if client is None or connection not in client.connections:
            client = self._admit(connection, call, key)
        client.credentials = credentials
        client.seen = self.now()
        return client

    def _admit(self, connection: GrpcConnection, call: Call, key: Key) -> Client:
        """Return the client with a key, which is new or has made its first call on a connection."""
        client_id = key[0]
        if not client_id:
            raise ServiceError(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
        if len(client_id) > MAX_CLIENT_ID_LENGTH:
            problem = f"x-mq-client-id has {len(client_id)} characters, at most {MAX_CLIENT_ID_LENGTH}"
            raise ServiceError(Code.BAD_REQUEST, problem)
        if connection.state is None:
            connection.state = set()
        here: set[Client] = connection.state
        if len(here) >= MAX_CLIENTS_PER_CONNECTION:
            problem = f"x-mq-client-id: the connection has {MAX_CLIENTS_PER_CONNECTION} clients already"
            raise ServiceError(Code.TOO_MANY_REQUESTS, problem)
        client = self._known.get(key)
        if client is None:
            peer = _host_and_port(connection.peer)
            if len(self._known) >= MAX_CLIENTS and not self._make_room(peer[0]):
                problem = f"x-mq-client-id: the broker has {MAX_CLIENTS} clients already"
                raise ServiceError(Code.TOO_MANY_REQUESTS, problem)
            language, version = call.text(b"x-mq-language"), version_number(call.text(b"x-mq-client-version"))
            if language not in LANGUAGES:
                language = LANGUAGE_NAMES.get(language, "OTHER")
            changes = Allowance(SETTINGS_AT_ONCE, SETTINGS_PER_S, self.now())
            client = Client(self, key, language, version, peer, changes)
            self._known[key] = client
            self._by_host.setdefault(peer[0], {})[client] = None
        here.add(client)
        client.connections.add(connection)
        return client

    def _make_room(self, host: str) -> bool:
        """End the newest client of the host with the most clients, so that others can connect.

        Return False if the client that is to be admitted is of that host, or its host has as many.
        """
        most = max(self._by_host.values(), key=len)
        if len(most) <= len(self._by_host.get(host, ())) + 1:
            return False
        newest = next(reversed(most))
        self.forget(newest)
        self.end(newest)
        return True

    def _authenticate(
        self, guard: Guard, call: Call, host: str, rights: Sequence[Right]
    ) -> tuple[Credentials | None, bool]:
        """Check the signature and the rights of a call, unless a white list names the client's address.

        Return the credentials with which the link signs requests, and whether the signature was checked.
        """
        authorization = call.text(b"authorization")
        access_key, given = _basic(authorization) or _signature(authorization)
        moment = call.metadata.get(b"x-mq-date-time", b"")

        checked: list[Account] = []

        def is_signed(account: Account) -> bool:
            checked.append(account)
            if authorization[: len(BASIC)].lower() == BASIC:
                return hmac.compare_digest(account.secret_key.encode(), given.encode())
            wanted = hmac.digest(account.secret_key.encode(), moment, "sha1").hex()
            return hmac.compare_digest(wanted.encode(), given.lower().encode())

        code = Code.UNAUTHORIZED

        def needed() -> Rights:
            nonlocal code
            code = Code.FORBIDDEN
            return list(rights)

        verdict = guard.policy.decide(access_key, needed, host, is_signed)
        if not verdict.allowed:
            guard.note_refusal(call.method.name, call.connection.peer, verdict)
            raise ServiceError(code, verdict.reason)
        account = guard.policy.account(access_key)
        credentials = None if account is None else Credentials(access_key, account.secret_key)
        return credentials, bool(checked)

    def open_link(self, client: Client) -> Connection:
        """Connect a client to the broker."""

        def outgoing(frame: Frame) -> None:
            if client.credentials is not None and not frame.is_response:
                sign(frame, client.credentials)

        dispatcher = Dispatcher(self.handlers(client))
        link = Connection(dispatcher.__call__, self.tick, self.limits, outgoing=outgoing, dialed=True)
        self.server.connect_in_memory(link, client.peer)
        return link

    def remove(self, connection: GrpcConnection) -> list[Client]:
        """Forget the clients whose last connection has closed, and return them with open links."""
        here: set[Client] = connection.state or set()
        connection.state = None
        for client in here:
            client.connections.discard(connection)
        gone = [client for client in here if not client.connections]
        for client in gone:
            self.forget(client)
        return gone

    def forget(self, client: Client) -> None:
        """Forget a client that has ended."""
        if self._known.pop(client.key, None) is not None:
            of_host = self._by_host[client.peer[0]]
            del of_host[client]
            if not of_host:
                del self._by_host[client.peer[0]]
        for connection in client.connections:
            connection.state.discard(client)
        client.connections.clear()

    def silent(self, now: float) -> list[Client]:
        """Return the clients without a telemetry stream that have been silent for EXPIRED_S."""
        return [
            client for client in self._known.values()
            if client.telemetry is None and now - client.seen > EXPIRED_S
        ]  # fmt: skip


def version_number(text: str) -> int:
    """Return the number of a version such as "5.1.2", or that of 5.0.0 for versions of other lines."""
    found = _VERSION.match(text)
    return VERSION_5_0_0 if found is None else VERSION_5_0_0 + 20 * int(found[1]) + 2 * int(found[2])


def _host_and_port(peer: str) -> tuple[str, int]:
    """Return the parts of an address "host:port" or "[v6]:port"."""
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)


def _basic(text: str) -> tuple[str, str] | None:
    """Return the access key and the secret key of HTTP's Basic authentication, None for another one."""
    if text[: len(BASIC)].lower() != BASIC:
        return None
    try:
        access_key, _, secret_key = (
            base64.b64decode(text[len(BASIC) :], validate=True).decode().partition(":")
        )
    except ValueError:
        return "", ""
    return access_key[:MAX_KEY_LENGTH], secret_key


def _signature(text: str) -> tuple[str, str]:
    """Return the access key and the signature in an `authorization` header; both are "" without one.

    The header is `MQv2-HMAC-SHA1 Credential=KEY/region/service, SignedHeaders=x-mq-date-time, Signature=HEX`.
    """
    if not text.startswith(ALGORITHM):
        return "", ""
    parts = dict(part.strip().partition("=")[::2] for part in text[len(ALGORITHM) :].split(","))
    return parts.get("Credential", "").partition("/")[0][:MAX_KEY_LENGTH], parts.get("Signature", "")
