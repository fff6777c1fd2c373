"""The settings of consumer groups ("subscription groups"), and their file subscriptionGroup.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.versions import Versions
from cometmq.errors import CommandError
from cometmq.message import check_group_name
from cometmq.protocol import codes
from cometmq.protocol.bodies import DataVersion, SubscriptionGroupConfig
from cometmq.protocol.codes import is_legal_name, is_system_group

log = logs.logger(__name__)

# If there are this many groups, only administrators can create further groups.
MAX_AUTO_CREATED_GROUPS = 15_000
# The maximum number of groups, even for administrators. 50,000 groups take 30 MB of memory.
MAX_GROUPS = 50_000


@dataclass(eq=False)
class SubscriptionGroups:
    """The settings of all consumer groups, by name. `changed` is called after each change."""

    config: BrokerConfig
    versions: Versions
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.table: dict[str, SubscriptionGroupConfig] = {
            name: SubscriptionGroupConfig(group_name=name, consume_broadcast_enable=True)
            for name in codes.BUILT_IN_GROUPS
        }
        self.version = self.versions.first()

    def find(self, group: str | None) -> SubscriptionGroupConfig | None:
        """Return a group's settings. Create a missing group if allowed, otherwise return None for it."""
        known = self.table.get(group) if group else None
        if (
            known is None
            and group
            and (self.config.auto_create_subscription_group or is_system_group(group))
            and len(self.table) < MAX_AUTO_CREATED_GROUPS
            and is_legal_name(group, codes.MAX_GROUP_LENGTH)
        ):
            known = SubscriptionGroupConfig(group_name=group)
            log.info("subscription group %s created", group)
            self.put(known)
            if len(self.table) == MAX_AUTO_CREATED_GROUPS:
                log.warning(
                    "%d groups exist: only administrators can create more groups", MAX_AUTO_CREATED_GROUPS
                )
        return known

    def put(self, config: SubscriptionGroupConfig) -> None:
        """Create or replace a group. Raises MessageIllegal for its name, CommandError for too many."""
        check_group_name(config.group_name)
        if len(self.table) >= MAX_GROUPS and config.group_name not in self.table:
            raise CommandError.failed(
                f"group {config.group_name} is not created: the limit of {MAX_GROUPS} groups is reached"
            )
        self.table[config.group_name] = config
        self.touch()

    def disable_consume(self, group: str) -> bool:
        """Disable consumption by a group. Return False if the group is unknown or already disabled."""
        known = self.table.get(group)
        if known is None or not known.consume_enable:
            return False
        self.put(msgspec.structs.replace(known, consume_enable=False))
        return True

    def delete(self, group: str) -> bool:
        """Remove a group. Return False if the group is unknown."""
        if self.table.pop(group, None) is None:
            return False
        self.touch()
        return True

    def load(self, version: DataVersion | None, groups: Mapping[str, SubscriptionGroupConfig]) -> None:
        """Add the groups of a file or of a master. They replace built-in groups of the same names.

        Groups with invalid names are omitted. A number of retry queues above maxTopicQueueNums is lowered to
        that limit.
        """
        most = self.config.max_topic_queue_nums
        legal = {
            name: config for name, config in groups.items() if is_legal_name(name, codes.MAX_GROUP_LENGTH)
        }
        if len(legal) < len(groups):
            log.warning("groups with invalid names are ignored: %s", ", ".join(groups.keys() - legal.keys()))
        for name, config in legal.items():
            if config.retry_queue_nums > most:
                log.warning(
                    "group %s had %d retry queues, more than maxTopicQueueNums=%d, and now has this "
                    "maximum",
                    name, config.retry_queue_nums, most,
                )  # fmt: skip
                config.retry_queue_nums = most
        self.table.update(legal)
        if version is not None:
            self.version = version

    def replace(self, version: DataVersion, groups: Mapping[str, SubscriptionGroupConfig]) -> None:
        """Replace all groups, and the version of the table, with the groups and the version of a master."""
        self.table.clear()
        self.load(version, groups)
        self.changed()

    def touch(self) -> None:
        """Create a new version of the table after a change, and call `changed`."""
        self.version = self.versions.after(self.version)
        self.changed()
