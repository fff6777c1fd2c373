"""What stands between a broker and whoever reaches its port: accounts and TLS, as far as the settings ask."""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple

from cometmq.broker.access.guard import CheckTopic, Guard, guard_of
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import ConfigError
from cometmq.remoting import Connection, ServerTls, client_tls, server_tls


class Security(NamedTuple):
    """client_context: for connections to name servers and the master; None: they are plain."""

    guard: Guard | None = None
    tls: ServerTls | None = None
    client_context: ssl.SSLContext | None = None

    @property
    def check_read(self) -> CheckTopic | None:
        """See Guard.check_read; None: everybody may read."""
        return None if self.guard is None else self.guard.check_read

    @property
    def check_write(self) -> CheckTopic | None:
        """See Guard.check_write; None: everybody may write."""
        return None if self.guard is None else self.guard.check_write

    def may_write(self, connection: Connection, topic: str) -> bool:
        """See Guard.may_write."""
        return self.guard is None or self.guard.may_write(connection, topic)

    def same_account(self, connection: Connection, other: Connection) -> bool:
        """See Guard.same_account."""
        return self.guard is None or self.guard.same_account(connection, other)

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        if self.guard is not None:
            self.guard.closed(connection)

    def start(self) -> None:
        """Begin to look at the files of accounts and certificates."""
        for part in (self.guard, self.tls):
            if part is not None:
                part.start()

    async def stop(self) -> None:
        """Look no more."""
        for part in (self.guard, self.tls):
            if part is not None:
                await part.stop()


OPEN = Security()


async def security_of(config: BrokerConfig) -> Security:
    """What the settings ask for. Raises ConfigError for half of it.

    As with Apache's brokers useTLS is for the connections that a broker makes, and an enforcing one makes
    them so, too.
    """
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
