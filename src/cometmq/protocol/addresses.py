"""Addresses as brokers register them and clients dial them: "host:port", "v4:port", "[v6]:port".

Java joins an IPv6 address and its port without brackets too, so the last colon decides.
"""

from __future__ import annotations

import re

HOST_MAX = 253
"""Characters of a host name (RFC 1035)."""
VIP_OFFSET = -2
"""From a broker's port to its VIP channel, where brokers of old serve all but pulls."""

# Labels of at most 63 letters, digits, - and _ (which Docker's names have): what IDNA encoders take without
# a word. Non-ASCII names have to come in their xn-- form.
_host_name = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?").fullmatch
_ipv6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]{1,64})?").fullmatch
_port = re.compile(r"[0-9]{1,5}").fullmatch


def parse_address(text: str) -> tuple[str, int] | None:
    """(host without brackets, port 1 to 65535), or None where the text is no address that can be dialled."""
    host, _, port = text.strip().rpartition(":")
    if _port(port) is None or not 0 < int(port) < 65_536:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        return (host, int(port)) if len(host) <= HOST_MAX and _ipv6(host) else None
    if len(host) <= HOST_MAX and (_host_name(host) or _ipv6(host)):
        return host, int(port)
    return None


def vip_address(addr: str) -> str:
    """The VIP channel of the broker with this address; the address itself where there can be none."""
    host, colon, port = addr.rpartition(":")
    number = int(port) + VIP_OFFSET
    return f"{host}{colon}{number}" if number > 0 else addr
