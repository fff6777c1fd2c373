"""The state that a broker shares with its routers, publishers and subscribers, and its log format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from faststream._internal.configs import BrokerConfig
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.exceptions import IncorrectState
from faststream.security import BaseSecurity, SASLPlaintext

from cometmq.client import ClientInstance, ClientOptions, MessageStream, Producer, PushOptions
from cometmq.client.group.subscription import Expression
from cometmq.errors import ConfigError
from cometmq.integrations.session import SENDING, Clients

if TYPE_CHECKING:
    from faststream._internal.basic_types import LoggerProto
    from faststream._internal.context import ContextRepo

_GROUP = "faststream"
"""The producer group."""


class Connection(Clients):
    """The clients of a connected broker: a producer, and message streams that share its connections."""

    def __init__(self, client: ClientInstance, cluster: str | None, topic_queues: int) -> None:
        super().__init__(client, cluster, topic_queues)
        self.producer = Producer(_GROUP, client=client, options=SENDING)

    @classmethod
    async def open(
        cls, namesrv: str | None, options: ClientOptions, cluster: str | None, topic_queues: int
    ) -> Connection:
        """Connect, and return the connection. Raises CometError if no name server answers."""
        client = ClientInstance(namesrv, options)
        await client.start()
        opened = cls(client, cluster, topic_queues)
        await opened._start(opened.producer)
        return opened

    async def close(self) -> None:
        await self._stop(self.producer)

    async def join(
        self, group: str, topic: str, expression: Expression, options: PushOptions
    ) -> MessageStream:
        """Return a started stream of a group. Create the topic if it does not exist. Raises CometError."""
        await self.ensure_topic(topic)
        stream = MessageStream(group, {topic: expression}, options=options, client=self._client)
        await stream.start()
        return stream


@dataclass(kw_only=True)
class CometMQBrokerConfig(BrokerConfig):
    """The state that a broker shares with its routers, publishers and subscribers."""

    opened: Connection | None = field(default=None, repr=False)

    @property
    def connection(self) -> Connection:
        """The connection. Raises IncorrectState before connect()."""
        if self.opened is None:
            raise IncorrectState("The broker is not connected: call connect() or start() first.")
        return self.opened


def secured(options: ClientOptions, security: BaseSecurity | None) -> ClientOptions:
    """Return the client options with the account and the TLS context of FastStream's security object.

    Raises ConfigError for a kind of security that RocketMQ does not have.
    """
    if security is None:
        return options
    if isinstance(security, SASLPlaintext):
        options = replace(options, access_key=security.username, secret_key=security.password)
    elif type(security) is not BaseSecurity:
        expected = "SASLPlaintext(access key, secret key), or BaseSecurity for TLS alone"
        raise ConfigError("security", type(security).__name__, expected)
    return replace(options, tls=security.ssl_context or True) if security.use_ssl else options


class _LogFormat(DefaultLoggerStorage):
    """The logger of a broker. Its lines have columns for topic and group, as wide as the longest name."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"topic": 5, "group": 5}

    def register_subscriber(self, params: dict[str, Any]) -> None:
        for name, width in self._widths.items():
            self._widths[name] = max(width, len(params.get(name, "")))

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        found = self._get_logger_ref()
        if found is None:
            columns = "".join(f"%({name})-{width}s | " for name, width in self._widths.items())
            found = get_broker_logger(
                name="cometmq",
                default_context=dict.fromkeys(self._widths, ""),
                message_id_ln=32,
                fmt=f"%(asctime)s %(levelname)-8s - {columns}%(message_id)-32s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(found)
        return found


make_logger = partial(make_logger_state, default_storage_cls=_LogFormat)
