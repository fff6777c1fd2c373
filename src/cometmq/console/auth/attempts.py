"""A limit for failed logins, by address and by account, in a table of limited size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address

MAX_KEYS = 10_000
_IPV6_NETWORK_BITS = 64  # number of bits that identify the network of one IPv6 user


class Attempts:
    """A limiter that permits `burst` failures per key, and one more failure every `refill_s` seconds.

    When there are more than `max_keys` keys, the key whose last failure is the oldest is removed.
    """

    def __init__(
        self,
        burst: int,
        refill_s: float,
        *,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._max_keys = max_keys
        self._clock = clock
        # For each key, the time at which all its failures will have expired.
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._free_at)

    def wait_s(self, key: str) -> float:
        """Return for how many seconds a login with this key is refused; 0 if it is permitted now."""
        left = self._free_at.get(key, 0.0) - self._clock()
        return max(0.0, left - (self._burst - 1) * self._refill_s)

    def failed(self, key: str) -> None:
        """Count a failed login for the key."""
        now = self._clock()
        self._free_at[key] = max(self._free_at.pop(key, now), now) + self._refill_s
        while len(self._free_at) > self._max_keys:
            self._free_at.popitem(last=False)

    def passed(self, key: str) -> None:
        """Remove one failure of the key, after a successful login.

        The other failures remain. Otherwise users could try passwords of other accounts without limit by
        logging in to their own account in between, and an attacker could try again after each login of the
        account's owner.
        """
        left = self._free_at.pop(key, 0.0) - self._refill_s
        if left > self._clock():
            self._free_at[key] = left


def address_key(address: str) -> str:
    """Return the part of an address that a client cannot choose: for IPv6, the network part."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:  # If the console listens on `::`, this is an IPv4 client.
        return str(found.ipv4_mapped)
    return str(int(found) >> (128 - _IPV6_NETWORK_BITS))
