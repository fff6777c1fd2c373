"""CometMQ in a container, by Testcontainers, for tests of programs in any language.

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
# If this process runs in a container as well, the other container's address is known only after its start.
WAIT_FOR_ADDRESS = (
    f"until [ -s {ADDRESS_FILE} ]; do sleep 0.1; done; "
    f'exec cometmq-single "$0" "$@" "brokerIP1=$(cat {ADDRESS_FILE})"'
)
READY = r"The broker\[.*\] boot success"
START_ATTEMPTS = 5
"""The maximum number of attempts to create the container. An attempt fails if its port is taken meanwhile."""
_PORT_TAKEN = ("address already in use", "port is already allocated")


class CometMQContainer(DockerContainer):
    """A name server and a broker in one container.

    The broker registers its address and port at the name server, which returns them to clients. So the broker
    must have the same port number in the container and on this machine; a free port is chosen. The ports of
    the name server and of the endpoint for 5.x clients are mapped to other numbers.

    Args:
        image: The name of an image that was built from conf/container/Containerfile.
        settings: Broker settings by RocketMQ's keys. `listenPort` sets the port on this machine as well. For
            clients in other containers, set `brokerIP1` to a network alias of this container.
        accounts: Accounts as in plain_acl.yml, such as `{"accessKey": "tests", "secretKey": "12345678",
            "admin": True}`. Accounts turn on `aclEnable`.
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
            # JSON is valid YAML.
            content = json.dumps({"accounts": [dict(account) for account in accounts]})
            self.with_copy_into_container(content.encode(), ACCOUNTS_FILE)
        self.with_exposed_ports(DEFAULT_NAMESRV_PORT, GRPC_PORT)

    @property
    def namesrv(self) -> str:
        """Address ("host:port") of the name server, for producers and consumers."""
        return f"{self._host}:{self.get_exposed_port(DEFAULT_NAMESRV_PORT)}"

    @property
    def broker_addr(self) -> str:
        """Address ("host:port") of the broker, as the name server returns it to clients."""
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
            TimeoutError: The broker was not ready within the timeout of Testcontainers.
            RuntimeError: The broker ended before it was ready.
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
    """Replace localhost by 127.0.0.1. It may resolve to ::1, where no ports of containers are published."""
    return "127.0.0.1" if host == "localhost" else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
