"""The settings of the store, with RocketMQ's names.

Field names are the Python spelling of RocketMQ's keys; `WIRE_NAMES` maps one to the other. Defaults are those
of 4.9.7 (docs/reference/storage.md, Store settings). Intervals are in milliseconds, sizes in bytes and ratios
in percent, as in RocketMQ's files. The annotation of a number is its permitted range.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from cometmq.errors import ConfigError
from cometmq.protocol.record.framing import ENTRIES, PLAIN, Framing
from cometmq.settings import (
    FIXED,
    INT_MAX,
    START,
    Range,
    annotations_of,
    camel,
    check_ranges,
    keys_with,
    read_value,
    show_value,
)

CONSUME_QUEUE_UNIT = 20
SYNC_FLUSH = "SYNC_FLUSH"
ASYNC_FLUSH = "ASYNC_FLUSH"
ASYNC_MASTER, SYNC_MASTER, SLAVE = "ASYNC_MASTER", "SYNC_MASTER", "SLAVE"


# Upper limit of the settings for the size of a message body and for the bytes that one pull returns. A frame
# of the protocol has at most 16 MiB. This limit leaves 64 KiB for the headers of the frame, and 64 KiB for
# the fields of a record other than the body.
_MAX_BODY_BYTES = (16 << 20) - (128 << 10)
_MS = Range(0, INT_MAX, "milliseconds")
_PERIOD = Range(1, INT_MAX, "milliseconds")
_COUNT = Range(1, 1 << 16)
_PERCENT = Range(0, 100, "percent")
_TRANSFER = Range(1, _MAX_BODY_BYTES, "bytes")


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a store. Immutable; `replace` returns a changed copy.

    Apache's broker limits some values only where it uses them (diskMaxUsedSpaceRatio to 10 to 95, for
    example). Such limits are applied where the value is used here, too. The ranges of maxHashSlotNum and
    maxIndexNum follow from 2 GiB, the largest file that Java can map.
    """

    store_path_root_dir: Annotated[str, FIXED] = "~/store"
    store_path_commit_log: Annotated[str, FIXED] = ""
    read_only_commit_log_store_paths: Annotated[str, FIXED] = ""
    store_path_consume_queue: Annotated[str, FIXED] = ""
    store_path_index: Annotated[str, FIXED] = ""
    store_checkpoint: Annotated[str, FIXED] = ""
    abort_file: Annotated[str, FIXED] = ""
    mapped_file_size_commit_log: Annotated[int, Range(1024, INT_MAX, "bytes"), FIXED] = 1 << 30
    mapped_file_size_consume_queue: Annotated[int, Range(1, INT_MAX, "bytes"), FIXED] = (
        300_000 * CONSUME_QUEUE_UNIT
    )
    max_hash_slot_num: Annotated[int, Range(1, 500_000_000), FIXED] = 5_000_000
    max_index_num: Annotated[int, Range(2, 100_000_000), FIXED] = 20_000_000
    message_index_enable: bool = True
    message_index_safe: Annotated[bool, START] = False
    flush_disk_type: str = ASYNC_FLUSH
    flush_interval_commit_log: Annotated[int, _PERIOD] = 500
    flush_commit_log_timed: bool = True
    flush_commit_log_least_pages: Annotated[int, Range(0, INT_MAX)] = 4
    flush_commit_log_thorough_interval: Annotated[int, _MS] = 10_000
    flush_interval_consume_queue: Annotated[int, _PERIOD] = 1000
    flush_consume_queue_thorough_interval: Annotated[int, _MS] = 60_000
    sync_flush_timeout: Annotated[int, _PERIOD] = 5000
    max_message_size: Annotated[int, Range(10, _MAX_BODY_BYTES, "bytes")] = 4 << 20
    check_crc_on_recover: Annotated[bool, START] = True
    check_crc_on_read: bool = False
    clean_resource_interval: Annotated[int, Range(10, INT_MAX, "milliseconds")] = 10_000
    delete_commit_log_files_interval: Annotated[int, _MS] = 100
    delete_consume_queue_files_interval: Annotated[int, _MS] = 100
    delete_file_batch_max: Annotated[int, _COUNT] = 10
    delete_when: str = "04"
    file_reserved_time: Annotated[int, Range(0, INT_MAX, "hours")] = 72
    disk_max_used_space_ratio: Annotated[int, _PERCENT] = 75
    disk_space_warning_level_ratio: Annotated[int, _PERCENT] = 90
    disk_space_clean_forcibly_ratio: Annotated[int, _PERCENT] = 85
    clean_file_forcibly_enable: bool = True
    tiered_store_uri: Annotated[str, FIXED] = ""  # CometMQ only, like the next two: tiered storage
    tiered_local_reserved_time: Annotated[int, Range(0, INT_MAX, "hours")] = 24
    tiered_reserved_time: Annotated[int, Range(1, INT_MAX, "hours")] = 720
    max_transfer_bytes_on_message_in_memory: Annotated[int, _TRANSFER] = 256 << 10
    max_transfer_count_on_message_in_memory: Annotated[int, _COUNT] = 32
    max_transfer_bytes_on_message_in_disk: Annotated[int, _TRANSFER] = 64 << 10
    max_transfer_count_on_message_in_disk: Annotated[int, _COUNT] = 8
    access_message_in_memory_max_ratio: Annotated[int, _PERCENT] = 40
    max_filter_message_size: Annotated[int, Range(1, 16 << 20, "bytes")] = 16_000
    max_msgs_num_batch: Annotated[int, _COUNT] = 64
    default_query_max_num: Annotated[int, _COUNT] = 32
    broker_role: Annotated[str, FIXED] = ASYNC_MASTER
    offset_check_in_slave: bool = False
    enable_d_leger_commit_log: Annotated[bool, FIXED] = False
    d_leger_group: Annotated[str, FIXED] = ""
    d_leger_peers: Annotated[str, FIXED] = ""
    d_leger_self_id: Annotated[str, FIXED] = ""
    preferred_leader_id: Annotated[str, FIXED] = ""
    enable_batch_push: bool = False
    store_path_d_ledger_commit_log: Annotated[str, FIXED] = ""
    message_delay_level: Annotated[str, START] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    def __post_init__(self) -> None:
        check_ranges(RANGES, lambda key: int(getattr(self, FIELD_OF_KEY[key])))
        if not self.store_path_root_dir:
            raise ConfigError("storePathRootDir", "", "a directory")
        if self.flush_disk_type not in (SYNC_FLUSH, ASYNC_FLUSH):
            raise ConfigError("flushDiskType", self.flush_disk_type, "SYNC_FLUSH or ASYNC_FLUSH")
        if self.broker_role not in (ASYNC_MASTER, SYNC_MASTER, SLAVE):
            raise ConfigError("brokerRole", self.broker_role, "ASYNC_MASTER, SYNC_MASTER or SLAVE")
        if self.tiered_store_uri and not _OBJECT_STORE(self.tiered_store_uri):
            expected = (
                "s3://, gs://, az:// or file:/// with a bucket and a path; keys go into the environment"
            )
            raise ConfigError("tieredStoreUri", self.tiered_store_uri, expected)
        if not all(_HOUR(hour) for hour in self.delete_when.split(";")):
            expected = "hours of the day with ; between, as 04 or 02;14 (an hour that no day has: never)"
            raise ConfigError("deleteWhen", self.delete_when, expected)
        if self.enable_d_leger_commit_log:
            if not _RAFT_ID(self.d_leger_self_id):
                raise ConfigError("dLegerSelfId", self.d_leger_self_id, "a letter and a number, as n0")
            if not self.d_leger_group:
                raise ConfigError("dLegerGroup", "", "a name: that of the broker")
        elif self.store_path_commit_log and not set(self.commit_log_dirs) - set(
            self.read_only_commit_log_dirs
        ):
            expected = "at least one directory that readOnlyCommitLogStorePaths does not name"
            raise ConfigError("storePathCommitLog", self.store_path_commit_log, expected)

    @property
    def root(self) -> str:
        """The store directory, with `~` expanded."""
        return os.path.expanduser(self.store_path_root_dir)

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The directories and files that each setting names. The store directory itself is not included."""
        return {
            "storePathCommitLog": _paths(self.store_path_commit_log),
            "storePathDLedgerCommitLog": _paths(self.store_path_d_ledger_commit_log),
            "readOnlyCommitLogStorePaths": self.read_only_commit_log_dirs,
            **{key: (self.location(key),) for key in LOCATIONS if self.moves(key)},
        }

    @property
    def directories(self) -> dict[str, tuple[str, ...]]:
        """The directories that each setting names. Settings that name no directory are left out."""
        paths, files = self.paths, (CHECKPOINT, ABORT)
        return {
            **{key: paths[key] for key in paths if key not in files},
            "storePathRootDir": (self.root,),
            **{key: (self.parent_of(key),) for key in files if key in paths},
        }

    @property
    def commit_log_dirs(self) -> tuple[str, ...]:
        """The directories that hold segments of the log, including the read-only ones."""
        if self.enable_d_leger_commit_log:
            own = _paths(self.store_path_d_ledger_commit_log)
            return own or (os.path.join(self.raft_log_dir, "data"),)
        own = _paths(self.store_path_commit_log) or (os.path.join(self.root, "commitlog"),)
        return tuple(dict.fromkeys(own + self.read_only_commit_log_dirs))

    def location(self, key: str) -> str:
        """Return the path of a directory or file of the store; `key` is its setting in `LOCATIONS`."""
        own = os.path.expanduser(getattr(self, FIELD_OF_KEY[key]).strip()).rstrip("/")
        return own or os.path.join(self.root, LOCATIONS[key])

    def parent_of(self, key: str) -> str:
        return os.path.dirname(self.location(key)) or "."

    def moves(self, key: str) -> bool:
        """Return whether a setting of `LOCATIONS` is set, so that it moves a directory or file."""
        return bool(getattr(self, FIELD_OF_KEY[key]).strip())

    def at_root(self, *keys: str) -> StoreConfig:
        """Return a copy with the usual paths for the settings `keys`, by default all of `LOCATIONS`."""
        return self.replace(**{FIELD_OF_KEY[key]: "" for key in keys or LOCATIONS})

    @property
    def longest_reserved_time(self) -> int:
        """For how many hours messages can be read, here or from the object store."""
        remote = self.tiered_reserved_time if self.tiered_store_uri else 0
        return max(self.file_reserved_time, remote)

    @property
    def local_reserved_time(self) -> int:
        """For how many hours the log on the disk has a message, unless the disk is full."""
        hours = self.file_reserved_time
        return min(hours, self.tiered_local_reserved_time) if self.tiered_store_uri else hours

    @property
    def raft_log_dir(self) -> str:
        """The directory of a raft member's own files."""
        return os.path.join(self.root, f"dledger-{self.d_leger_self_id}")

    @property
    def has_peers(self) -> bool:
        """Whether the store belongs to a raft group of several members."""
        return self.enable_d_leger_commit_log and ";" in self.d_leger_peers.strip("; ")

    @property
    def framing(self) -> Framing:
        """The framing of records in the log: plain, or as entries of a raft log."""
        return ENTRIES if self.enable_d_leger_commit_log else PLAIN

    @property
    def read_only_commit_log_dirs(self) -> tuple[str, ...]:
        return _paths(self.read_only_commit_log_store_paths)

    @property
    def consume_queue_file_size(self) -> int:
        """The configured length of a queue file in bytes, rounded up to whole units as in Apache's broker."""
        size = self.mapped_file_size_consume_queue
        return -(-size // CONSUME_QUEUE_UNIT) * CONSUME_QUEUE_UNIT

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type == SYNC_FLUSH

    @property
    def delay_levels_ms(self) -> dict[int, int]:
        """The delay of each level in ms, from level 1. Raises ConfigError for an invalid setting."""
        delays = [_DELAY(text) for text in self.message_delay_level.split()]
        if not 0 < len(delays) <= _MAX_DELAY_LEVELS or not all(delays):
            expected = f"delays such as 1s 5m 2h, at most {_MAX_DELAY_LEVELS}"
            raise ConfigError("messageDelayLevel", self.message_delay_level, expected)
        return {level: int(found[1]) * _UNITS_MS[found[2]] for level, found in enumerate(delays, 1) if found}

    def with_fixed_of(self, other: StoreConfig) -> StoreConfig:
        """Return a copy with the FIXED settings of another configuration."""
        fields = (FIELD_OF_KEY[key] for key in keys_with(FIXED, StoreConfig))
        return self.replace(**{field: getattr(other, field) for field in fields})

    def replace(self, **changes: object) -> StoreConfig:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> StoreConfig:
        """Return the store's settings among `properties`. Raises ConfigError for a value of a wrong type."""
        values: dict[str, object] = {}
        for field, default in zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True):
            key = WIRE_NAMES[field]
            text = properties.get(key)
            if text is not None:
                values[field] = read_value(key, text, type(default))
        return cls(**values)  # type: ignore[arg-type]

    def to_properties(self) -> dict[str, str]:
        """Return every setting by RocketMQ's key, with values as RocketMQ prints them."""
        return {key: show_value(getattr(self, field)) for key, field in FIELD_OF_KEY.items()}


def _paths(text: str) -> tuple[str, ...]:
    """Split a list of directories at each `,`, as Apache's broker does."""
    return tuple(os.path.expanduser(path.strip()) for path in text.split(",") if path.strip())


_RAFT_ID = re.compile(r"[A-Za-z][0-9]{1,9}").fullmatch
_OBJECT_STORE = re.compile(r"(?:(?:s3|gs|az)://[^/@?#\s]+|file://)(?:/[^/@?#\s]+)*/?").fullmatch
_HOUR = re.compile(r" *[0-9]{1,2} *").fullmatch
# A delay: 8 digits suffice, because 99,999,999 days are 270,000 years.
_DELAY = re.compile(r"([0-9]{1,8})([smhd])").fullmatch
_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_MAX_DELAY_LEVELS = 256  # Maximum number of delay levels; each level costs a queue and an offset

RANGES = annotations_of(StoreConfig, Range)
"""The permitted range of each numeric setting, by key."""

WIRE_NAMES: dict[str, str] = {field: camel(field) for field in StoreConfig.__struct_fields__}
FIELD_OF_KEY: dict[str, str] = {key: field for field, key in WIRE_NAMES.items()}

CONSUME_QUEUES, INDEX, CHECKPOINT, ABORT = LOCATION_KEYS = (
    "storePathConsumeQueue", "storePathIndex", "storeCheckpoint", "abortFile",
)  # fmt: skip
LOCATIONS = dict(zip(LOCATION_KEYS, ("consumequeue", "index", "checkpoint", "abort"), strict=True))
"""The settings that can move a directory or file of the store, each with its usual name below the root.

Apache's brokers of 4.x and 5.x ignore these settings (docs/reference/storage.md, Store directory).
"""

SMALL_FILES = {
    "mapped_file_size_commit_log": 64 << 20,
    "mapped_file_size_consume_queue": 3000 * CONSUME_QUEUE_UNIT,
    "max_hash_slot_num": 50_000,
    "max_index_num": 200_000,
}
"""Settings that make store files smaller than Apache's defaults, for `cometmq.standalone` and tests.

They are always written to the store's broker.conf.
"""
