"""The access control and the TLS of a broker, created from its settings."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cometmq.broker.access import REFUSALS
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol.codes import ResponseCode, handlers_of
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler, ServerTls, client_tls, server_tls

if TYPE_CHECKING:
    from cometmq.broker.access.guard import Guard

CheckTopic = Callable[[Connection, Frame, str | None], None]
"""A check of the right to a topic that only the request's handler can determine. Raises CommandError."""


class Security(NamedTuple):
    """The access control and TLS of a broker. `client_context` is for its connections to other servers."""

    guard: Guard | None = None
    tls: ServerTls | None = None
    client_context: ssl.SSLContext | None = None

    @property
    def check_read(self) -> CheckTopic | None:
        """The method `Guard.check_read`, or None without access control."""
        return None if self.guard is None else self.guard.check_read

    @property
    def check_write(self) -> CheckTopic | None:
        """The method `Guard.check_write`, or None without access control."""
        return None if self.guard is None else self.guard.check_write

    def account_rates(self) -> Mapping[str, Mapping[str, str]]:
        """Return the rate limits of each account, by its access key. Without access control: none."""
        return {} if self.guard is None else self.guard.policy.rates

    def is_admin(self, connection: Connection, frame: Frame) -> bool:
        """Return whether an admin has sent a request. Without access control, every client is an admin."""
        return self.guard is None or self.guard.is_admin(connection, frame)

    def may_write(self, connection: Connection, topic: str) -> bool:
        """Return whether a client may send to a topic (see `Guard.may_write`)."""
        return self.guard is None or self.guard.may_write(connection, topic)

    def same_account(self, connection: Connection, other: Connection) -> bool:
        """Return whether two clients have the same account (see `Guard.same_account`)."""
        return self.guard is None or self.guard.same_account(connection, other)

    def closed(self, connection: Connection) -> None:
        """Forget the ACL account of a closed connection."""
        if self.guard is not None:
            self.guard.closed(connection)

    def start(self) -> None:
        """Start the periodic checks of the ACL files and certificates for changes."""
        for part in (self.guard, self.tls):
            if part is not None:
                part.start()

    async def stop(self) -> None:
        """Stop the periodic checks of the ACL files and certificates for changes."""
        for part in (self.guard, self.tls):
            if part is not None:
                await part.stop()


OPEN = Security()


async def security_of(config: BrokerConfig) -> Security:
    """Create the access control and the TLS from a broker's settings. Raises ConfigError for invalid ones.

    As in Apache's broker, `useTLS` is for the connections that the broker opens. A broker that enforces TLS
    for its clients also uses TLS for those connections.
    """
    guard = None
    if config.acl_enable:
        # Imported only here, so that a broker without access control starts faster: the module needs YAML.
        from cometmq.broker.access.guard import guard_of

        guard = await guard_of(config)
    path = config.tls_config_file
    tls = await server_tls(config.tls_server_mode, path)
    if tls is not None and tls.enforcing and config.filter_server_nums:
        expected = "0 with tls.server.mode=enforcing: filter servers do not speak TLS"
        raise ConfigError("filterServerNums", str(config.filter_server_nums), expected)
    context = None
    if config.use_tls or (tls is not None and tls.enforcing):
        context = await asyncio.to_thread(client_tls, path or True)
    return Security(guard, tls, context)


def acl_handlers(config: BrokerConfig, address: BrokerAddress, guard: Guard | None) -> dict[int, Handler]:
    """Return the handlers of requests about access control. Without it, they refuse all requests."""
    if guard is None:
        return {int(request): partial(_refuse, code) for request, code in REFUSALS.items()}
    from cometmq.broker.access.requests import AclRequests

    return handlers_of(AclRequests(config, address, guard))


def _refuse(code: ResponseCode, _connection: Connection, _frame: Frame) -> Frame:
    raise CommandError(code, "this broker has no access control (aclEnable=false)")
