"""CometMQ in a container, for tests of programs in any language, by Testcontainers.

    with CometMQContainer() as broker, SyncProducer("shop", namesrv=broker.namesrv) as producer:
        ...

Needs the extra `cometmq[testcontainers]` and an image (docs/deploy.md, In containers).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self

from docker.errors import APIError
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from cometmq.protocol.codes import DEFAULT_NAMESRV_PORT
from cometmq.protocol.java_properties import format_properties

IMAGE = "cometmq"
GRPC_PORT = 8081
ACCOUNTS_FILE = "/etc/cometmq/plain_acl.yml"
ADDRESS_FILE = "/run/cometmq/address"
# Which address leads to the container is known only once it runs, if this process runs in a container, too.
WAIT_FOR_ADDRESS = (
    f"until [ -s {ADDRESS_FILE} ]; do sleep 0.1; done; "
    f'exec cometmq-single "$0" "$@" "brokerIP1=$(cat {ADDRESS_FILE})"'
)
READY = r"The broker\[.*\] boot success"
START_ATTEMPTS = 5
"""How often a container is created if other programs take its port meanwhile."""
_PORT_TAKEN = ("address already in use", "port is already allocated")


class CometMQContainer(DockerContainer):
    """A name server and a broker in one container.

    A name server directs clients to the broker by address and port. The broker therefore listens on a port
    that is free on this machine, and the container has the same one: a mapped port with another number would
    be unknown to it. The ports of the name server and of the endpoint for 5.x clients are mapped as usual.

    Args:
        image: Image, built from conf/container/Containerfile.
        settings: Broker settings by RocketMQ's keys. `listenPort` fixes the port on this machine, too.
            `brokerIP1` is needed if the clients run in containers, too (the alias of this one).
        accounts: Accounts as in plain_acl.yml, such as `{"accessKey": "tests", "secretKey": "12345678",
            "admin": True}`. They enable `aclEnable`.
        kwargs: Further arguments of `DockerContainer`, such as `network` and `network_aliases`.
    """

    def __init__(
        self,
        image: str = IMAGE,
        *,
        settings: Mapping[str, str] | None = None,
        accounts: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(image, **kwargs)
        self._settings = dict(settings or {})
        self._broker_port = 0
        if accounts:
            self._settings.setdefault("aclEnable", "true")
            # JSON is YAML, too.
            content = json.dumps({"accounts": [dict(account) for account in accounts]})
            self.with_copy_into_container(content.encode(), ACCOUNTS_FILE)
        self.with_exposed_ports(DEFAULT_NAMESRV_PORT, GRPC_PORT)

    @property
    def namesrv(self) -> str:
        """Address ("host:port") of the name server, for producers and consumers."""
        return f"{self._host}:{self.get_exposed_port(DEFAULT_NAMESRV_PORT)}"

    @property
    def broker_addr(self) -> str:
        """Address ("host:port") of the broker, as the name server tells it to clients."""
        return f"{self._settings['brokerIP1']}:{self._broker_port}"

    @property
    def grpc_addr(self) -> str:
        """Address ("host:port") of the endpoint for RocketMQ 5.x clients and HTTP."""
        return f"{self._host}:{self.get_exposed_port(GRPC_PORT)}"

    @property
    def _host(self) -> str:
        return _as_address(self.get_container_host_ip())

    def start(self) -> Self:
        """Start the container and wait until the broker accepts messages.

        Raises:
            TimeoutError: The broker was not ready within the time-out of Testcontainers.
            RuntimeError: The broker ended before.
            docker.errors.APIError: The container cannot be created or started.
        """
        fixed = int(self._settings.get("listenPort", "0"))
        attempts = 1 if fixed else START_ATTEMPTS
        for attempt in range(1, attempts + 1):
            port = self._broker_port = fixed or _free_port()
            self.ports[str(port)] = port
            settings = format_properties({**self._settings, "listenPort": str(port)}).splitlines()
            self.with_command(["sh", "-c", WAIT_FOR_ADDRESS, *settings])
            try:
                super().start()
                break
            except APIError as error:
                if attempt == attempts or not any(text in str(error) for text in _PORT_TAKEN):
                    raise
                del self.ports[str(port)]
                if self._container is not None:
                    self._container.remove(force=True)
        self._settings.setdefault("brokerIP1", self._host)
        self.copy_into_container(self._settings["brokerIP1"].encode(), ADDRESS_FILE)
        LogMessageWaitStrategy(READY).wait_until_ready(self)
        return self


def _as_address(host: str) -> str:
    """Return 127.0.0.1 for localhost, which may be ::1 first, where no container's port is."""
    return "127.0.0.1" if host == "localhost" else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
