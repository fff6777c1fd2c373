"""Parameters of the store, by RocketMQ's names.

Field names are the Python spelling of RocketMQ's keys; `WIRE_NAMES` maps one to the other. Defaults are
those of 4.9.7 (storage fact sheet 11.1). Intervals are milliseconds, sizes bytes, ratios percent, as in
RocketMQ's files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from cometmq.errors import ConfigError

CONSUME_QUEUE_UNIT = 20
SYNC_FLUSH = "SYNC_FLUSH"
ASYNC_FLUSH = "ASYNC_FLUSH"
ASYNC_MASTER, SYNC_MASTER, SLAVE = "ASYNC_MASTER", "SYNC_MASTER", "SLAVE"


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """What `MessageStore.open` needs to know. Constructed whole; change with `dataclasses.replace`."""

    store_path_root_dir: str = "~/store"
    store_path_commit_log: str = ""
    read_only_commit_log_store_paths: str = ""
    mapped_file_size_commit_log: int = 1 << 30
    mapped_file_size_consume_queue: int = 300_000 * CONSUME_QUEUE_UNIT
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    message_index_enable: bool = True
    message_index_safe: bool = False
    flush_disk_type: str = ASYNC_FLUSH
    flush_interval_commit_log: int = 500
    flush_commit_log_timed: bool = True
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    flush_interval_consume_queue: int = 1000
    flush_consume_queue_thorough_interval: int = 60_000
    sync_flush_timeout: int = 5000
    max_message_size: int = 4 << 20
    check_crc_on_recover: bool = True
    check_crc_on_read: bool = False
    clean_resource_interval: int = 10_000
    delete_commit_log_files_interval: int = 100
    delete_consume_queue_files_interval: int = 100
    delete_file_batch_max: int = 10
    delete_when: str = "04"
    file_reserved_time: int = 72
    disk_max_used_space_ratio: int = 75
    disk_space_warning_level_ratio: int = 90
    disk_space_clean_forcibly_ratio: int = 85
    clean_file_forcibly_enable: bool = True
    max_transfer_bytes_on_message_in_memory: int = 256 << 10
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_disk: int = 64 << 10
    max_transfer_count_on_message_in_disk: int = 8
    access_message_in_memory_max_ratio: int = 40
    max_filter_message_size: int = 16_000
    max_msgs_num_batch: int = 64
    default_query_max_num: int = 32
    broker_role: str = ASYNC_MASTER
    offset_check_in_slave: bool = False
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                expected = f"a number of at least {low}" if high == _ANY else f"a number, {low} to {high}"
                raise ConfigError(WIRE_NAMES[name], str(value), expected)
        if self.flush_disk_type not in (SYNC_FLUSH, ASYNC_FLUSH):
            raise ConfigError("flushDiskType", self.flush_disk_type, "SYNC_FLUSH or ASYNC_FLUSH")
        if self.broker_role not in (ASYNC_MASTER, SYNC_MASTER, SLAVE):
            raise ConfigError("brokerRole", self.broker_role, "ASYNC_MASTER, SYNC_MASTER or SLAVE")
        if not all(hour.strip().isdigit() for hour in self.delete_when.split(";")):
            expected = "hours of the day with ; between, as 04 or 02;14 (an hour that no day has: never)"
            raise ConfigError("deleteWhen", self.delete_when, expected)
        if self.store_path_commit_log and not set(self.commit_log_dirs) - set(self.read_only_commit_log_dirs):
            expected = "at least one directory that readOnlyCommitLogStorePaths does not name"
            raise ConfigError("storePathCommitLog", self.store_path_commit_log, expected)

    @property
    def root(self) -> str:
        """Store directory, `~` expanded."""
        return os.path.expanduser(self.store_path_root_dir)

    @property
    def commit_log_dirs(self) -> tuple[str, ...]:
        """Where segments of the log lie, those that are only read included."""
        own = _paths(self.store_path_commit_log) or (os.path.join(self.root, "commitlog"),)
        return tuple(dict.fromkeys(own + self.read_only_commit_log_dirs))

    @property
    def read_only_commit_log_dirs(self) -> tuple[str, ...]:
        return _paths(self.read_only_commit_log_store_paths)

    @property
    def consume_queue_file_size(self) -> int:
        """Configured length rounded up to whole units, as Apache does."""
        size = self.mapped_file_size_consume_queue
        return -(-size // CONSUME_QUEUE_UNIT) * CONSUME_QUEUE_UNIT

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type == SYNC_FLUSH

    @property
    def delay_levels_ms(self) -> dict[int, int]:
        """Delay by level, from 1 on. Raises ConfigError for what is not a list of numbers with s, m, h or
        d."""
        units = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
        levels = {}
        for level, text in enumerate(self.message_delay_level.split(), 1):
            if text[-1] not in units or not text[:-1].isdigit():
                raise ConfigError("messageDelayLevel", self.message_delay_level, "delays such as 1s 5m 2h")
            levels[level] = int(text[:-1]) * units[text[-1]]
        return levels

    def replace(self, **changes: object) -> StoreConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> StoreConfig:
        """Read RocketMQ's keys from a properties table; keys of other rooms are left alone.

        Raises ConfigError(key, value, expected) for a value that is not what the key takes.
        """
        values: dict[str, object] = {}
        for field in fields(cls):
            key = WIRE_NAMES[field.name]
            text = properties.get(key)
            if text is not None:
                values[field.name] = _parse(key, text.strip(), field.default)
        return cls(**values)  # type: ignore[arg-type]

    def to_properties(self) -> dict[str, str]:
        """Every parameter by RocketMQ's key, values as RocketMQ prints them."""
        table: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            table[WIRE_NAMES[field.name]] = str(value).lower() if isinstance(value, bool) else str(value)
        return table


def _paths(text: str) -> tuple[str, ...]:
    """A list of directories, `,` between them as in Apache's broker."""
    return tuple(os.path.expanduser(path.strip()) for path in text.split(",") if path.strip())


_ANY = 1 << 63
# What a value must keep to for the store to work at all; limits that Apache applies while using a value
# (diskMaxUsedSpaceRatio between 10 and 95, say) are applied where it is used.
_RANGES: dict[str, tuple[int, int]] = {
    "mapped_file_size_commit_log": (1, _ANY),
    "mapped_file_size_consume_queue": (1, _ANY),
    "max_hash_slot_num": (1, 1 << 31),
    "max_index_num": (2, 1 << 31),
    "flush_interval_commit_log": (1, _ANY),
    "flush_commit_log_least_pages": (0, _ANY),
    "flush_commit_log_thorough_interval": (0, _ANY),
    "flush_interval_consume_queue": (1, _ANY),
    "flush_consume_queue_thorough_interval": (0, _ANY),
    "sync_flush_timeout": (1, _ANY),
    "max_message_size": (10, 1 << 30),
    "clean_resource_interval": (1, _ANY),
    "delete_commit_log_files_interval": (0, _ANY),
    "delete_consume_queue_files_interval": (0, _ANY),
    "delete_file_batch_max": (1, _ANY),
    "file_reserved_time": (0, _ANY),
    "disk_max_used_space_ratio": (0, 100),
    "disk_space_warning_level_ratio": (0, 100),
    "disk_space_clean_forcibly_ratio": (0, 100),
    "max_transfer_bytes_on_message_in_memory": (1, _ANY),
    "max_transfer_count_on_message_in_memory": (1, _ANY),
    "max_transfer_bytes_on_message_in_disk": (1, _ANY),
    "max_transfer_count_on_message_in_disk": (1, _ANY),
    "access_message_in_memory_max_ratio": (0, 100),
    "max_filter_message_size": (1, _ANY),
    "max_msgs_num_batch": (1, _ANY),
    "default_query_max_num": (1, _ANY),
}


def _parse(key: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        # Java's Boolean.parseBoolean: anything but "true" is false; a typing error deserves better.
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(key, text, "true or false")
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise ConfigError(key, text, "a whole number") from None
    return text


def _wire_name(name: str) -> str:
    special = {"check_crc_on_recover": "checkCRCOnRecover", "check_crc_on_read": "checkCRCOnRead"}
    if name in special:
        return special[name]
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


WIRE_NAMES: dict[str, str] = {field.name: _wire_name(field.name) for field in fields(StoreConfig)}

SMALL_FILES = {
    "mapped_file_size_commit_log": 64 << 20,
    "mapped_file_size_consume_queue": 3000 * CONSUME_QUEUE_UNIT,
    "max_hash_slot_num": 50_000,
    "max_index_num": 200_000,
}
"""Segment sizes of `standalone` and tests (design.md); always written to the store's broker.conf too."""
