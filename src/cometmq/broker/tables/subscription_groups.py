"""Subscription groups: their settings, automatic creation, and the file subscriptionGroup.json. No I/O in
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.versions import Versions
from cometmq.errors import CommandError
from cometmq.protocol.bodies import DataVersion, SubscriptionGroupConfig
from cometmq.protocol.codes import (
    BUILT_IN_GROUPS,
    GROUP_LENGTH_MAX,
    ResponseCode,
    check_group_name,
    is_legal_name,
    is_system_group,
)

log = logs.logger(__name__)

# From so many groups on, none is created automatically; only administrators create more.
MOST_BY_ITSELF = 15_000
# From so many on, not even they do: 30 MB.
MOST_GROUPS = 50_000


@dataclass(eq=False)
class SubscriptionGroups:
    """group -> settings. changed: called after each change."""

    config: BrokerConfig
    versions: Versions
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.table: dict[str, SubscriptionGroupConfig] = {
            name: SubscriptionGroupConfig(group_name=name, consume_broadcast_enable=True)
            for name in BUILT_IN_GROUPS
        }
        self.version = self.versions.first()

    def find(self, group: str | None) -> SubscriptionGroupConfig | None:
        """A group's settings, created if that is allowed; None if the group is unknown, or cannot be one."""
        known = self.table.get(group) if group else None
        if (
            known is None
            and group
            and (self.config.auto_create_subscription_group or is_system_group(group))
            and len(self.table) < MOST_BY_ITSELF
            and is_legal_name(group, GROUP_LENGTH_MAX)
        ):
            known = SubscriptionGroupConfig(group_name=group)
            log.info("subscription group %s created", group)
            self.put(known)
            if len(self.table) == MOST_BY_ITSELF:
                log.warning("there are %d groups: only administrators make more", MOST_BY_ITSELF)
        return known

    def put(self, config: SubscriptionGroupConfig) -> None:
        """Create or replace a group. Raises MessageIllegal for a name that is none, CommandError if there are
        too many already."""
        check_group_name(config.group_name)
        if len(self.table) >= MOST_GROUPS and config.group_name not in self.table:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"group {config.group_name} is not created: there are {MOST_GROUPS}, and no more are kept",
            )
        self.table[config.group_name] = config
        self.touch()

    def disable_consume(self, group: str) -> bool:
        """Let a group's pulls be refused from now on; False if they are already, or it is not known."""
        known = self.table.get(group)
        if known is None or not known.consume_enable:
            return False
        self.put(msgspec.structs.replace(known, consume_enable=False))
        return True

    def delete(self, group: str) -> bool:
        """Forget a group; False if it was not known."""
        if self.table.pop(group, None) is None:
            return False
        self.touch()
        return True

    def load(self, version: DataVersion | None, groups: Mapping[str, SubscriptionGroupConfig]) -> None:
        """Merge the file's entries over the built-in ones: the file wins, up to maxTopicQueueNums. Those with
        illegal names are left out."""
        most = self.config.max_topic_queue_nums
        legal = {name: config for name, config in groups.items() if is_legal_name(name, GROUP_LENGTH_MAX)}
        if len(legal) < len(groups):
            log.warning("groups with illegal names are left out: %s", ", ".join(groups.keys() - legal.keys()))
        for name, config in legal.items():
            if config.retry_queue_nums > most:
                log.warning(
                    "group %s had %d retry queues, more than maxTopicQueueNums=%d: it gets so many",
                    name, config.retry_queue_nums, most,
                )  # fmt: skip
                config.retry_queue_nums = most
        self.table.update(legal)
        if version is not None:
            self.version = version

    def replace(self, version: DataVersion, groups: Mapping[str, SubscriptionGroupConfig]) -> None:
        """Take a master's table, with its version, in the place of this one."""
        self.table.clear()
        self.load(version, groups)
        self.changed()

    def touch(self) -> None:
        """Count the version up."""
        self.version = self.versions.after(self.version)
        self.changed()
