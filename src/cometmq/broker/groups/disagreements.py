"""Members of a group that subscribe different things: said in the log once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from cometmq import logs
from cometmq.broker.groups.clients import ConsumerGroup
from cometmq.protocol.subscriptions import differences, told
from cometmq.remoting import LogBudget

log = logs.logger(__name__)

MOST_KEPT = 1_000  # differences that were said; the oldest is forgotten, and may be said again


@dataclass(eq=False)
class Disagreements:
    """Remembers what was said: digests of (group, topic, the different expressions)."""

    _said: dict[bytes, None] = field(default_factory=dict)
    _budget: LogBudget = field(default_factory=LogBudget)

    def look(self, group: str, members: ConsumerGroup) -> None:
        """A member has said something new: log in what the members differ, unless that was said before."""
        for topic, said in differences(members.wants()).items():
            key = _digest(group, topic, said)
            if key not in self._said and self._budget.allows():
                self._said[key] = None
                if len(self._said) > MOST_KEPT:
                    del self._said[next(iter(self._said))]
                log.warning(
                    "members of group %s differ in what they subscribe of topic %s, so messages can be "
                    "missed: %s", group, topic, told(said),
                )  # fmt: skip


def _digest(group: str, topic: str, expressions: Iterable[str]) -> bytes:
    """The same for the same expressions in any order: an expression can be long, and is not kept."""
    said = repr((group, topic, sorted(expressions)))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
