"""Members of a group that subscribe different things, or consume in different ways: said in the log once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from cometmq import logs
from cometmq.broker.groups.clients import ConsumerGroup
from cometmq.protocol.subscriptions import differences, setting_differences, told
from cometmq.remoting import LogBudget

log = logs.logger(__name__)

MOST_KEPT = 1_000  # differences that were said; the oldest is forgotten, and may be said again
AGAIN = 10  # groups that are looked at again in one round: each may be large


@dataclass(eq=False)
class Disagreements:
    """Remembers what was said, as digests of (group, in what they differ, the different values), and up to
    as many groups whose differences the log had no room for."""

    _said: dict[bytes, None] = field(default_factory=dict)
    _owed: dict[str, None] = field(default_factory=dict)
    _budget: LogBudget = field(default_factory=LogBudget)

    def look(self, group: str, members: ConsumerGroup) -> None:
        """A member has said something new: log in what the members differ, unless that was said before."""
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
                if len(self._owed) < MOST_KEPT:
                    self._owed[group] = None
                return
            self._said[key] = None
            if len(self._said) > MOST_KEPT:
                del self._said[next(iter(self._said))]
            log.warning("members of group %s differ in %s: %s", group, in_what, told(said))

    def look_again(self, groups: Mapping[str, ConsumerGroup]) -> None:
        """Some time has passed: say what the log had no room for, if it is still so."""
        for group in list(islice(self._owed, AGAIN)):
            del self._owed[group]
            if group in groups:
                self.look(group, groups[group])


def _digest(group: str, in_what: str, values: Iterable[str]) -> bytes:
    """The same for the same values in any order: an expression can be long, and is not kept."""
    said = repr((group, in_what, sorted(values)))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
