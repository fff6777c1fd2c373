"""Checks of the address that a broker advertises (`brokerIP1`), at its start: before a producer fails."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.errors import ConfigError

log = logs.logger(__name__)

ANSWER_S = 3.0
ALL_INTERFACES = ("0.0.0.0", "::")


def check_usable(host: str, ip: str) -> None:
    """Raise ConfigError if clients cannot connect to `ip`, to which `brokerIP1` (`host`) resolves."""
    found = _parsed(ip)
    for wrong, what in (
        (found.is_unspecified, "an address to listen on (that is bindAddress), none to connect to"),
        (found.is_multicast, "a multicast address"),
        (ip == "255.255.255.255", "the broadcast address"),
    ):
        if wrong:
            raise ConfigError("brokerIP1", host, f"an address that clients can connect to: {ip} is {what}")


def doubts(address: BrokerAddress, *, own: bool, problem: str) -> list[str]:
    """Return warnings about an advertised address that passed `check_usable`.

    `own` tells whether it belongs to this machine, `problem` why a test connection failed ("" if it did not).
    """
    told = f"brokerIP1={address.config.broker_ip1}"
    found = []
    if address.interface in ALL_INTERFACES and _parsed(address.ip).is_loopback:
        found.append(
            f"{told} is this machine's loopback address, but the broker listens on all interfaces: clients "
            "on other machines would connect to themselves"
        )
    if not own:
        found.append(
            f"{told} is no address of this machine: clients reach the broker only if something forwards "
            f"port {address.port} of it to here"
        )
    if problem:
        found.append(f"{told}: clients receive {address.text}, but no server answers there ({problem})")
    return found


def unguarded(address: BrokerAddress, port: int, who: str) -> str:
    """Return a warning that a replication port is less protected than the broker's own port, or "".

    A replication port supports neither access control nor TLS. `who` names the peers that connect to it.
    """
    config = address.config
    guards = {
        "aclEnable": config.acl_enable,
        "tls.server.mode=enforcing": config.tls_server_mode == "enforcing",
    }
    only_here = address.interface == "localhost" or address.interface.startswith(("127.", "::1"))
    if only_here or not any(guards.values()):
        return ""
    there = " and ".join(name for name, given in guards.items() if given)
    return (
        f"port {port}, where {who} connect, ignores {there}: any program that reaches it can read all "
        "messages. Let only brokers reach it (docs/security.md)"
    )


async def look(address: BrokerAddress) -> None:
    """Check the advertised address of a listening broker, and log warnings."""
    own = is_own(address.ip)
    # If the advertised address belongs to this machine and the broker listens on it, skip the test
    # connection: it would not leave the machine, so it would prove nothing.
    certain = own and address.interface in (*ALL_INTERFACES, address.ip)
    problem = "" if certain else await connect_problem(address.ip, address.port)
    for doubt in doubts(address, own=own, problem=problem):
        log.warning("%s", doubt)


async def connect_problem(ip: str, port: int) -> str:
    """Return why a connection to the address fails, or "" if it succeeds."""
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(ip, port)
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        return f"not within {ANSWER_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_own(ip: str) -> bool:
    """Return whether an address belongs to this machine."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def _parsed(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(ip.partition("%")[0])
