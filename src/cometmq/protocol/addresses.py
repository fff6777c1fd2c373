"""Addresses in the forms that brokers register: "host:port", "v4:port", "[v6]:port".

Java also joins an IPv6 address and its port without brackets, so the port begins after the last colon.
"""

from __future__ import annotations

import re

MAX_HOST_LENGTH = 253
"""The maximum length of a host name in characters (RFC 1035)."""
VIP_OFFSET = -2
"""Number to add to a broker's port for its VIP port, where old brokers serve all requests except pulls."""

# A host name consists of labels, separated by dots. A label has at most 63 letters, digits, "-" and "_"
# (which Docker uses). Names with other characters must be given in the xn-- form of IDNA.
_host_name = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?").fullmatch
_ipv6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]{1,64})?").fullmatch
_port = re.compile(r"[0-9]{1,5}").fullmatch


def parse_address(text: str) -> tuple[str, int] | None:
    """Return the host without brackets and the port (1 to 65535), or None for an invalid address."""
    host, _, port = text.strip().rpartition(":")
    if _port(port) is None or not 0 < int(port) < 65_536:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        return (host, int(port)) if len(host) <= MAX_HOST_LENGTH and _ipv6(host) else None
    if len(host) <= MAX_HOST_LENGTH and (_host_name(host) or _ipv6(host)):
        return host, int(port)
    return None


def vip_address(addr: str) -> str:
    """Return the address of a broker's VIP port, or `addr` itself if the broker's port is too low for one."""
    host, colon, port = addr.rpartition(":")
    number = int(port) + VIP_OFFSET
    return f"{host}{colon}{number}" if number > 0 else addr
