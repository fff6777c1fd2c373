"""Log lines about members of a group with different subscriptions or consume settings, each written once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cometmq import logs
from cometmq.broker.groups.clients import ConsumerGroup
from cometmq.protocol.subscriptions import describe_differences, differences, setting_differences
from cometmq.remoting import LogBudget

log = logs.logger(__name__)

MAX_KEPT = 1_000  # differences already logged; the oldest is dropped and may be logged again
MAX_REPEATED_CHECKS = 10  # groups compared again at a time: each may be large


@dataclass(eq=False)
class Disagreements:
    """The logged differences, as digests of group, topic or setting, and values.

    It also keeps as many groups whose differences the log's rate limit held back.
    """

    _said: dict[bytes, None] = field(default_factory=dict)
    _owed: dict[str, None] = field(default_factory=dict)
    _budget: LogBudget = field(default_factory=LogBudget)

    def log_differences(self, group: str, members: ConsumerGroup) -> None:
        """Log differences between the members that were not logged before, after a member has changed."""
        found = {
            f"what they subscribe of topic {topic}, so messages can be missed": said
            for topic, said in differences(members.wants()).items()
        }
        found |= {f"their {name}": said for name, said in setting_differences(members.settings()).items()}
        for in_what, said in found.items():
            key = _digest(group, in_what, said)
            if key in self._said:
                continue
            if not self._budget.allows():
                if len(self._owed) < MAX_KEPT:
                    self._owed[group] = None
                return
            self._said[key] = None
            if len(self._said) > MAX_KEPT:
                del self._said[next(iter(self._said))]
            log.warning("members of group %s differ in %s: %s", group, in_what, describe_differences(said))

    def log_pending(self, groups: Mapping[str, ConsumerGroup]) -> None:
        """Log differences that the rate limit held back, if they still exist."""
        for group in list(islice(self._owed, MAX_REPEATED_CHECKS)):
            del self._owed[group]
            if group in groups:
                self.log_differences(group, groups[group])


def _digest(group: str, in_what: str, values: Iterable[str]) -> bytes:
    """Return a digest that does not depend on the order. Expressions can be long and are not stored."""
    said = repr((group, in_what, sorted(values)))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
