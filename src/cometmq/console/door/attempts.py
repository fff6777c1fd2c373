"""How often a login may fail: a bounded table of addresses and accounts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address

KEYS_MAX = 10_000
_IPV6_NETWORK_BITS = 64  # what one user of IPv6 has to himself


class Attempts:
    """Each key has `burst` failures at once, and another one each `refill_s` seconds.

    Of more keys than `keys_max` the one that failed longest ago is forgotten.
    """

    def __init__(
        self,
        burst: int,
        refill_s: float,
        *,
        keys_max: int = KEYS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._keys_max = keys_max
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()  # when all failures are forgiven

    def __len__(self) -> int:
        return len(self._free_at)

    def wait_s(self, key: str) -> float:
        """How long a key has to wait, 0 if it may try."""
        left = self._free_at.get(key, 0.0) - self._clock()
        return max(0.0, left - (self._burst - 1) * self._refill_s)

    def failed(self, key: str) -> None:
        """Count a failure."""
        now = self._clock()
        self._free_at[key] = max(self._free_at.pop(key, now), now) + self._refill_s
        while len(self._free_at) > self._keys_max:
            self._free_at.popitem(last=False)

    def passed(self, key: str) -> None:
        """Forget the failures of a key."""
        self._free_at.pop(key, None)


def address_key(address: str) -> str:
    """The part of an address that its user cannot choose."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(int(found) >> (128 - _IPV6_NETWORK_BITS))
