"""The base class of producers, consumers and Admin."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.client.cluster.options import ClientOptions

__all__ = ["Client"]


class Client(LifeCycle):
    """A client that uses a shared client instance, or its own one for `namesrv`."""

    def __init__(
        self,
        name: str,
        namesrv: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        super().__init__(name)
        self._namesrv = namesrv
        self._client_options = client_options
        self._client = client
        self._shared = client is not None
        options = client.options if client is not None else client_options
        self.telemetry = options.telemetry if options is not None else None
        """OpenTelemetry spans, if the client options request them."""

    @property
    def client(self) -> ClientInstance:
        """The client instance with connections, routes and heartbeats.

        Raises ClientStateError before the start.
        """
        if self._client is None:
            raise self._not_running()
        return self._client

    async def _start_client(self) -> ClientInstance:
        if self._client is None:
            self._client = ClientInstance(self._namesrv, self._client_options)
        await self._client.start()
        return self._client

    async def _close_client(self) -> None:
        if self._client is not None and not self._shared:
            await self._client.close()
