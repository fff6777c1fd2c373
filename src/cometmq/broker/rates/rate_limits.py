"""Limits on the messages and bytes per second of sends to topics, receives of groups, and accounts.

Each limit has a token bucket. The bucket is refilled at the rate, and holds at most the tokens of one second,
which an idle topic or group may use at once. A request may take more tokens than the bucket has. The bucket
is then in debt, and further requests wait until the debt is repaid. So the average rate is exact, and a
message that is larger than a full bucket can pass.

This module computes waits and counts requests. `throttle.py` holds sends. Pulls and pops park themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from cometmq.broker.base.attributes import RATE, RECEIVE, SEND, UNITS, parse_rate
from cometmq.broker.base.config import BrokerConfig
from cometmq.protocol.acl import ACCESS_KEY
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import is_system_group
from cometmq.protocol.frame import Frame

K = TypeVar("K")
V = TypeVar("V")
MAX_LIMITS = 100_000
"""The maximum number of token buckets, and of counters of one kind. A full table drops its older half."""


class Rates(NamedTuple):
    """The maximum numbers of messages and of bytes per second. 0 means no limit."""

    messages: int = 0
    size: int = 0


class Amount(NamedTuple):
    """The number of messages in a request or response, and their total size in bytes."""

    messages: int
    size: int


def rates_of(values: Mapping[str, str] | None, prefix: str, direction: str, default: Rates) -> Rates:
    """Return the limits in `values`, such as a topic's attributes. `default` replaces missing limits."""
    if not values:
        return default
    found = [parse_rate(values.get(f"{prefix}{direction}.{unit}")) for unit in UNITS]
    given = (own if own is not None else other for own, other in zip(found, default, strict=True))
    return Rates(*given)


class TokenBucket:
    """Allows `rate` tokens per second, and holds at most the tokens of one second.

    All times are in ms of a monotonic clock. The level is an integer, in thousandths of a token, so that
    rounding errors do not add up.
    """

    __slots__ = ("_at_ms", "_level", "rate")

    def __init__(self, rate: int, now_ms: int) -> None:
        """Create a full bucket."""
        self.rate = rate
        self._level = rate * 1000
        self._at_ms = now_ms

    def _refill(self, now_ms: int) -> int:
        if now_ms > self._at_ms:
            self._level = min(self._level + (now_ms - self._at_ms) * self.rate, self.rate * 1000)
            self._at_ms = now_ms
        return self._level

    def tokens(self, now_ms: int) -> int:
        """Return the number of tokens in the bucket. It is negative while the bucket is in debt."""
        return self._refill(now_ms) // 1000

    def wait_ms(self, count: int, now_ms: int) -> int:
        """Return the time in ms until the bucket has `count` tokens or, if its size is smaller, is full."""
        level = self._refill(now_ms)
        wanted = min(count, self.rate) * 1000
        return 0 if wanted <= level else -((level - wanted) // self.rate)

    def take(self, count: int, now_ms: int) -> None:
        """Remove `count` tokens, which may be more than the bucket has."""
        self._level = self._refill(now_ms) - count * 1000


class RateLimit:
    """The limits of a topic, group or account (`kind`) in one direction: sends or receives."""

    __slots__ = ("_buckets", "direction", "kind", "name", "rates")

    def __init__(self, kind: str, name: str, direction: str, rates: Rates, now_ms: int) -> None:
        self.kind, self.name, self.direction, self.rates = kind, name, direction, rates
        self._buckets = [(unit, TokenBucket(rate, now_ms)) for unit, rate in enumerate(rates) if rate]

    def wait_ms(self, amount: Amount, now_ms: int) -> int:
        """Return the time in ms until this amount may be taken."""
        longest = 0
        for unit, bucket in self._buckets:
            if (wait_ms := bucket.wait_ms(amount[unit], now_ms)) > longest:
                longest = wait_ms
        return longest

    def take(self, amount: Amount, now_ms: int) -> None:
        for unit, bucket in self._buckets:
            bucket.take(amount[unit], now_ms)

    def left(self, most: Amount, now_ms: int) -> Amount:
        """Return `most`, reduced to the available tokens."""
        left = list(most)
        for unit, bucket in self._buckets:
            left[unit] = min(left[unit], bucket.tokens(now_ms))
        return Amount(*left)

    def exceeded(self, amount: Amount, now_ms: int) -> str:
        """Describe the limit for which a request with this amount must wait longest."""
        unit, bucket = max(self._buckets, key=lambda each: each[1].wait_ms(amount[each[0]], now_ms))
        prefix = "" if self.kind == "account" else RATE
        return (
            f"rate limit of {self.kind} {self.name}: {bucket.rate} {UNITS[unit]} per second "
            f"({prefix}{self.direction}.{UNITS[unit]})"
        )


ONE = Amount(1, 1)
AccountRates = Callable[[], Mapping[str, Mapping[str, str]]]
"""Returns the limits of each account, by access key and name of the limit."""


class RateLimits:
    """All rate limits of a broker, and the numbers of delayed and refused requests."""

    def __init__(
        self,
        config: BrokerConfig,
        groups: Mapping[str, SubscriptionGroupConfig],
        account_rates: AccountRates,
        now_ms: Callable[[], int],
    ) -> None:
        """Create the limits."""
        self._config = config
        self._groups = groups
        self._account_rates = account_rates
        self.now_ms = now_ms
        self.configure()
        self._limits: dict[tuple[str, str, str], RateLimit] = {}
        # The keys of these counters are the topic or group, and the kind of the limit
        self.delayed_sends: dict[tuple[str, str], int] = {}
        self.refused_sends: dict[tuple[str, str], int] = {}
        self.delayed_receives: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._limits)

    def configure(self) -> None:
        """Apply the current settings and accounts. Set `has_accounts` if any account has a limit."""
        config, accounts = self._config, self._account_rates()
        self._group_default = Rates(
            config.max_group_receive_messages_per_second, config.max_group_receive_bytes_per_second
        )
        self._account_defaults = {
            SEND: Rates(
                config.max_account_send_messages_per_second, config.max_account_send_bytes_per_second
            ),
            RECEIVE: Rates(
                config.max_account_receive_messages_per_second, config.max_account_receive_bytes_per_second
            ),
        }
        has_default = any(map(any, self._account_defaults.values()))
        self.has_accounts = (has_default and bool(accounts)) or any(accounts.values())

    def account_of(self, frame: Frame) -> str:
        """Return the access key of a request, or "" if no account has a limit."""
        return (frame.ext or {}).get(ACCESS_KEY, "") if self.has_accounts else ""

    def topic_rates(self, topic: TopicConfig) -> Rates | None:
        """Return the limits on sends to a topic, or None if the topic has none."""
        config = self._config
        default = Rates(config.max_topic_send_messages_per_second, config.max_topic_send_bytes_per_second)
        rates = rates_of(topic.attributes, RATE, SEND, default)
        return rates if any(rates) else None

    def of_send(self, topic: str, rates: Rates | None, account: str) -> Sequence[RateLimit]:
        """Return the limits on sends of an account to a topic with these rates. "" means no account."""
        limits = [] if rates is None else [self._find("topic", topic, SEND, rates)]
        return limits + self._of_account(account, SEND) if account else limits

    def of_receive(self, group: str, account: str) -> Sequence[RateLimit]:
        """Return the limits on receives of a group by an account. "" means no account."""
        known, default = self._groups.get(group), self._group_default
        attributes = None if known is None else known.attributes
        if not (attributes or account or default.messages or default.size) or is_system_group(group):
            return ()
        rates = rates_of(attributes, RATE, RECEIVE, default)
        limits = [self._find("group", group, RECEIVE, rates)] if any(rates) else []
        return limits + self._of_account(account, RECEIVE) if account else limits

    def _of_account(self, account: str, direction: str) -> list[RateLimit]:
        own = self._account_rates().get(account)
        if own is None:
            return []
        rates = rates_of(own, "", direction, self._account_defaults[direction])
        return [self._find("account", account, direction, rates)] if any(rates) else []

    def _find(self, kind: str, name: str, direction: str, rates: Rates) -> RateLimit:
        """Return a limit. A new limit, or a limit whose rates have changed, has full buckets."""
        key = kind, name, direction
        limit = self._limits.get(key)
        if limit is None or limit.rates != rates:
            limit = RateLimit(kind, name, direction, rates, self.now_ms())
            _bounded(self._limits)[key] = limit
        return limit

    def allowance(self, limits: Sequence[RateLimit], most: Amount) -> tuple[Amount, RateLimit | None, int]:
        """Return the amount that may be delivered now, at most `most`.

        If nothing may be delivered, the other values are the limit that forbids it and the wait in ms.
        """
        now_ms = self.now_ms()
        wait_ms, worst = longest_wait(limits, ONE, now_ms)
        if wait_ms:
            return most, worst, wait_ms
        for limit in limits:
            most = limit.left(most, now_ms)
        return most, None, 0

    def take(self, limits: Sequence[RateLimit], amount: Amount) -> None:
        """Take the tokens for an amount from all of these limits."""
        now_ms = self.now_ms()
        for limit in limits:
            limit.take(amount, now_ms)

    def give_back(self, limits: Sequence[RateLimit], amount: Amount) -> None:
        """Return tokens that `take` has removed."""
        self.take(limits, Amount(-amount.messages, -amount.size))


def longest_wait(limits: Sequence[RateLimit], amount: Amount, now_ms: int) -> tuple[int, RateLimit]:
    """Return the time in ms until all limits allow this amount, and the limit that causes the wait."""
    longest, worst = 0, limits[0]
    for limit in limits:
        if (wait_ms := limit.wait_ms(amount, now_ms)) > longest:
            longest, worst = wait_ms, limit
    return longest, worst


def count_one(table: dict[tuple[str, str], int], name: str, limit: RateLimit) -> None:
    """Increment a counter of `RateLimits` for a topic or group that `limit` has delayed or refused."""
    key = name, limit.kind
    if key not in table:
        _bounded(table)
    table[key] = table.get(key, 0) + 1


def _bounded(table: dict[K, V]) -> dict[K, V]:
    """Return a table, after removing its older half if it is full."""
    if len(table) >= MAX_LIMITS:
        for key in list(table)[: len(table) // 2]:
            del table[key]
    return table
