"""A table of the keys of a topic's newest messages, by which sends to the topic are deduplicated."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from cometmq.protocol.properties.values import NAME_END, VALUE_END

# Longer keys are replaced by a digest, to bound their memory. No stored key has the length of a digest.
_MAX_KEY_BYTES = 63
_DIGEST_BYTES = 64

Stored = OrderedDict[bytes, tuple[int, int]]
"""The log position and the store time (ms) of messages by key, in the order of the log."""


@dataclass(eq=False, slots=True)
class KeyTable:
    """The keys of a topic's messages of the last `window_ms` milliseconds, from the property `name`.

    Attributes:
        older: The keys of earlier messages than those in `keys`, which a scan of the log has found.
        duplicates: The number of messages that were not stored, because the table has their keys.
        forgotten: The number of keys that were removed within the window, because the table was full.
    """

    topic: str
    name: bytes
    window_ms: int
    keys: Stored = field(default_factory=OrderedDict)
    older: Stored = field(default_factory=OrderedDict)
    duplicates: int = 0
    forgotten: int = 0

    def __len__(self) -> int:
        return len(self.keys) + len(self.older)

    def key_of(self, properties: bytes) -> bytes:
        """Return the key of a message, or b"" if it has none.

        If the property occurs twice, its first value is used: RocketMQ 4.9 appends the properties of a batch,
        including the unique key of the batch, to those of its messages.
        """
        marker = self.name + NAME_END
        at = properties.find(marker)
        while at > 0 and properties[at - 1] != VALUE_END[0]:
            at = properties.find(marker, at + 1)
        if at < 0:
            return b""
        end = properties.find(VALUE_END, at)
        key = properties[at + len(marker) : end if end >= 0 else None]
        return key if len(key) <= _MAX_KEY_BYTES else blake2b(key, digest_size=_DIGEST_BYTES).digest()

    def find(self, key: bytes, now_ms: int) -> int | None:
        """Return the log position of the message with a key, or None if the window has no such message.

        A message whose store time is after `now_ms`, because the clock was set back, is within the window.
        """
        known = self.keys.get(key) or self.older.get(key)
        return known[0] if known is not None and now_ms - known[1] <= self.window_ms else None

    def put(self, key: bytes, position: int, store_ms: int, now_ms: int, most: int) -> None:
        """Add the key of the newest message. Forget the oldest key if the table has more than `most`."""
        self.older.pop(key, None)
        self.keys.pop(key, None)
        self.keys[key] = position, store_ms
        for _ in range(2):  # more than one, so that the table shrinks if the window or the rate shrinks
            first = self.older or self.keys  # a scan in a thread may replace `older` at any time
            oldest = next(iter(first.values()), None)
            if oldest is None or now_ms - oldest[1] <= self.window_ms:
                break
            first.popitem(last=False)
        self.limit(most, now_ms)

    def limit(self, most: int, now_ms: int) -> None:
        """Forget the oldest keys until there are at most `most`."""
        while len(self) > most:
            _, (_, store_ms) = (self.older or self.keys).popitem(last=False)
            self.forgotten += now_ms - store_ms <= self.window_ms
