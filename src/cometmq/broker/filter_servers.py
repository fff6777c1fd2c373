"""The filter servers of a broker: processes that the broker starts if `filterServerNums` is positive.

For security, no setting becomes part of the command that starts the filter servers, and no request can change
their number, which the broker reads only at its start. A filter server can register only with the token that
the broker has passed to it (docs/reference/remoting.md, Filter servers).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress, host_port
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.times import awake_ms
from cometmq.broker.register import Registrar
from cometmq.errors import CommandError
from cometmq.periodic import Periodic
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import RegisterFilterServerRequestHeader, RegisterFilterServerResponseHeader
from cometmq.remoting import Connection
from cometmq.store import Clock

log = logs.logger(__name__)

EXPIRED_MS = 30_000  # Three times the interval at which a filter server registers, in ms
SCAN_S = 5.0
START_S = 5.0
STOP_S = 5.0
COMMAND = (sys.executable, "-P", "-m", "cometmq.filtersrv.process")


@dataclass(eq=False)
class FilterServers:
    """Starts filter servers and accepts their registrations. Must be created in a running event loop."""

    config: BrokerConfig
    clock: Clock
    address: BrokerAddress
    registrar: Registrar

    def __post_init__(self) -> None:
        self._count = self.config.filter_server_nums
        self._token = secrets.token_hex(32)
        # The address and the time of the last registration (ms) of each filter server, by its connection
        self._known: dict[Connection, tuple[str, int]] = {}
        self._complete = asyncio.Event()  # Set once the required number of filter servers has registered
        self.processes: list[subprocess.Popen[bytes]] = []
        self._timer = Periodic(
            asyncio.get_running_loop(), SCAN_S, self.look_round, name="check of the filter servers"
        )

    async def start(self) -> None:
        """Start the filter servers, and wait up to START_S for them. One that ends later is replaced."""
        if self._count:
            self._start_missing()
            self._timer.start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), START_S)
            await self.registrar.registered()

    async def stop(self) -> None:
        """End all filter servers."""
        self._timer.cancel()
        processes, self.processes = self.processes, []
        for process in processes:
            _close(process)
        await asyncio.gather(*(asyncio.to_thread(_wait, process) for process in processes))

    @handles(RequestCode.REGISTER_FILTER_SERVER)
    def register_filter_server(self, connection: Connection, frame: Frame) -> Frame:
        """Register a filter server's address for consumers. Filter servers register every 10 s."""
        header = frame.header(RegisterFilterServerRequestHeader)
        if not hmac.compare_digest((header.token or "").encode("utf-8", "replace"), self._token.encode()):
            raise CommandError(
                ResponseCode.NO_PERMISSION,
                "only filter servers that this broker has started (filterServerNums) may register",
            )
        if parse_address(header.filter_server_addr) is None:
            raise CommandError.failed("filterServerAddr must be host:port")
        self._known[connection] = header.filter_server_addr, awake_ms(self.clock)
        self._register_addresses()
        if len(self._known) >= self._count:
            self._complete.set()
        name, number = self.config.broker_name, self.config.broker_id
        return frame.response(header=RegisterFilterServerResponseHeader(broker_name=name, broker_id=number))

    def closed(self, connection: Connection) -> None:
        """Remove the filter server's address if a closed connection was that of a filter server."""
        if self._known.pop(connection, None) is not None:
            self._register_addresses()

    def look_round(self) -> None:
        """Close connections of filter servers that no longer register. Replace processes that have ended."""
        now_ms = awake_ms(self.clock)
        silent = [key for key, (_, seen_ms) in self._known.items() if now_ms - seen_ms > EXPIRED_MS]
        for connection in silent:
            connection.close()
        self._start_missing()

    def _register_addresses(self) -> None:
        """Register the broker with the name servers again if the filter servers' addresses have changed."""
        addresses = sorted({address for address, _ in self._known.values()})
        if addresses != list(self.registrar.filter_servers):
            self.registrar.filter_servers = addresses
            self.registrar.register()

    def _start_missing(self) -> None:
        for process in [each for each in self.processes if each.poll() is not None]:
            log.warning("filter server %d exited with code %d", process.pid, process.returncode)
            # The filter server itself has logged why it cannot run.
            if process.returncode == os.EX_UNAVAILABLE and self._count:
                log.error("filter servers cannot run on this machine and are not started again")
                self._count = 0
                self._complete.set()  # `start` must not wait for filter servers that are never started
            self.processes.remove(process)
            _close(process)
        try:
            while len(self.processes) < self._count:
                self._start_one()
        except OSError as error:
            log.error("a filter server cannot be started: %s", error)

    def _start_one(self) -> None:
        settings = {
            "broker": host_port(self.config.bind_address or "127.0.0.1", self.address.port),
            "host": self.config.broker_ip1,
            "interface": self.address.interface,
            "token": self._token,
        }
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close the input of a filter server, which makes it stop."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # The filter server may have ended already
        process.stdin.close()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        log.warning("filter server %d did not stop within %g s and was killed", process.pid, STOP_S)
        process.kill()
        process.wait()
