"""Whether the members of a group subscribe the same.

A broker keeps one subscription for all of them, so those who want something else lose messages without a word
(docs/reference/storage.md, Subscriptions of a group).
"""

from __future__ import annotations

import asyncio

from cometmq import logs
from cometmq.client.group.group import Group
from cometmq.errors import CometError
from cometmq.protocol.bodies import ConsumerConnection
from cometmq.protocol.subscriptions import Wants, differences, told, wants_of

__all__ = ["Agreement", "disagreements"]

log = logs.logger("cometmq.client.consumer")

_PATIENCE_S = 3.0
_MOST_TOLD = 10
"""Topics of which each is told: a member may subscribe thousands, and others every time."""
_ANOTHER = "another member"


class Agreement:
    """What the others of a group subscribe.

    It is looked at before each heartbeat: a broker that does not tell the members apart has then what another
    one said last.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.problems: tuple[str, ...] = ()
        self._differed: tuple[Wants, set[str]] = frozenset(), set()
        """What we wanted and who the others were when `problems` were found."""

    async def look(self) -> None:
        """Compare; what is new goes into the log."""
        group = self._group
        instance = group.instance
        own = wants_of([each.data() for each in group.subscriptions.values()])
        addr = next((a for topic in group.subscriptions for a in instance.routes.readers_of(topic)), None)
        if addr is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await instance.brokers.consumer_connection(addr, group.name)
        except (CometError, TimeoutError):
            return  # nobody is there, or nobody knows
        differing = disagreements(instance.client_id, own, found)
        problems = tuple(differing[:_MOST_TOLD])
        if len(differing) > _MOST_TOLD:
            problems += (f"members differ in {len(differing)} topics in all",)
        others = {each.client_id for each in found.connection_set} - {instance.client_id}
        wanted, were = self._differed
        if not problems and not _told_apart(found) and wanted == own and were <= others:
            return  # such a broker keeps the newest subscription, and may have taken ours meanwhile
        for problem in set(problems).difference(self.problems):
            log.warning("group %s: %s", group.name, problem)
        self.problems, self._differed = problems, (own, others)


def _told_apart(found: ConsumerConnection) -> bool:
    """Whether the broker says what each member subscribes; Apache's know only what heartbeats said last."""
    return any(each.subscriptions is not None for each in found.connection_set)


def disagreements(client_id: str, own: Wants, found: ConsumerConnection) -> list[str]:
    """In what a member and the others differ, each a sentence."""
    members = {
        each.client_id: frozenset((each.subscriptions or {}).items())
        for each in found.connection_set
        if each.subscriptions is not None
    }
    if not _told_apart(found) and {each.client_id for each in found.connection_set} - {client_id}:
        members[_ANOTHER] = wants_of(found.subscription_table.values())
    members[client_id] = own
    return [
        f"members subscribe {topic} differently, and messages may be lost: {told(said)}"
        for topic, said in differences(members).items()
    ]
