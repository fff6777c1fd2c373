"""A broker: its start, its registration and its stop.

The start opens the store, which includes recovery, creates the parts and loads their tables, opens the ports,
starts the delivery of delayed messages, and registers with the name servers. The stop unregisters, answers
parked pulls, completes requests in progress, writes the tables, and closes the store.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Protocol

from cometmq import logs
from cometmq.broker.access.security import security_of
from cometmq.broker.base import advertised
from cometmq.broker.base.address import BrokerAddress, host_port
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.parts import BrokerParts
from cometmq.errors import ClientStateError, CometError, ConfigError, StoreError
from cometmq.remoting import listen, resolve
from cometmq.store import Clock, Disk, MessageStore, ObjectStore, StoreConfig

log = logs.logger(__name__)

# The errors that occur if a configured path cannot be used as a directory. A restart cannot help.
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_DIRECTORY = (errno.EEXIST, errno.ENOTDIR, errno.ENOENT, *NOT_ALLOWED)


class Endpoint(Protocol):
    """A listener for clients of another protocol, which serves them over the parts of the broker."""

    port: int

    async def start(self, parts: BrokerParts, host: str, port: int) -> int: ...

    async def stop(self, drain_s: float) -> None: ...


class Broker:
    """A broker with `start()` and `stop()`. After the start, `port` is the port on which it listens.

    `start` raises ConfigError for an invalid setting, StoreError or OSError for a store that it cannot open.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.config = config
        self.endpoint = endpoint
        self.port = 0
        self._disk = disk if disk is not None else Disk()
        self._clock = clock if clock is not None else Clock()
        self._parts: BrokerParts | None = None
        self._look: asyncio.Task[None] | None = None

    @property
    def addr(self) -> str:
        """The address "host:port" that the broker registers with the name servers."""
        return host_port(self.config.broker_ip1, self.port)

    @property
    def parts(self) -> BrokerParts:
        """The parts of which the running broker consists. Raises ClientStateError if it is not running."""
        if self._parts is None:
            raise ClientStateError("the broker is not running")
        return self._parts

    async def start(self) -> int:
        """Recover the store, listen, and register with the name servers. Return the port."""
        config = self.config
        config.check()
        loop = asyncio.get_running_loop()
        address = BrokerAddress(config, await resolve("brokerIP1", config.broker_ip1))
        advertised.check_usable(config.broker_ip1, address.ip)
        for key, host in (("brokerIP2", config.broker_ip2), ("bindAddress", config.bind_address)):
            if host:
                # Resolve the host only to report an invalid one before the store is opened.
                await resolve(key, host)
        security = await security_of(config)
        # Imported here, because the start of a broker without tiered storage is faster without it.
        objects = None
        if config.store.tiered_store_uri:
            from cometmq.broker.object_store import object_store_of

            objects = await asyncio.to_thread(object_store_of, config)
        try:
            store = await self._open_store(objects)
        except OSError as error:
            raise not_opened(config.store, error) from error
        try:
            parts = self._parts = BrokerParts(config, self._clock, store, address, security)
            await asyncio.to_thread(parts.load)
            if config.listen_port:
                parts.use_port(config.listen_port)
            parts.resume()
            self.port = await listen(parts.server, address.interface, config.listen_port)
            parts.use_port(self.port)
        except BaseException:
            self._parts = None
            await store.stop()
            raise
        store.start(loop)
        self._look = loop.create_task(advertised.look(address))
        try:
            await parts.start()
            if self.endpoint is not None:
                await self.endpoint.start(parts, address.interface, config.grpc_port)
        except BaseException:
            await self.stop()
            raise
        log.info("broker %s listens on %s", self.config.broker_name, self.addr)
        return self.port

    async def _open_store(self, objects: ObjectStore | None) -> MessageStore:
        """Open the store in a thread. After a cancellation, wait for it, and unlock the store's directory."""
        opening = asyncio.create_task(
            asyncio.to_thread(MessageStore.open, self.config.store, self._disk, self._clock, objects)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise

    async def stop(self, drain_s: float = 3.0) -> None:
        """Unregister, answer parked pulls, complete other requests within `drain_s`, and close the store."""
        parts, self._parts = self._parts, None
        if self._look is not None:
            self._look.cancel()
        if parts is not None:
            if self.endpoint is not None:
                await self.endpoint.stop(drain_s)
            await parts.stop(drain_s)
            log.info("broker %s stopped", self.config.broker_name)


def not_opened(config: StoreConfig, error: OSError) -> CometError:
    """Return the error for a store that cannot be opened. For an unusable directory, it names the setting."""
    path = error.filename or config.root
    reason = error.strerror or str(error)
    if error.errno in NO_DIRECTORY:
        # If access to a file is denied, its directory may be usable. So the error does not name the setting
        # of that directory.
        within = "" if error.errno in NOT_ALLOWED else os.path.dirname(path)
        for key, directories in config.directories.items():
            for directory in directories:
                if directory in (path, within) or directory.startswith(path + os.sep):
                    return ConfigError(key, directory, f"a directory to make or write to ({path}: {reason})")
    return StoreError(f"the store cannot be opened: {reason}", path)
