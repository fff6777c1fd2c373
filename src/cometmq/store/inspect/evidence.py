"""Which of two is damaged, where a record and its queue disagree.

A record's CRC covers its body only, so a flip in its topic, queue id, queue offset, transaction type or tags
leaves a valid record that contradicts its unit. Nobody can rebuild what such a record was from the record;
its unit still says it. `Evidence` holds what the units of a store say better than the log, for `rebuild` to
keep to.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.properties.values import java_hash, value_of

_LONGEST_PROPERTIES = 2048  # bytes; every bit of them is tried


class Evidence:
    """What is known from units about single records, by log position.

    `places`: (topic, queue id, queue offset) of records whose own say is damaged; `tags`: tags codes of such
    records, and of delayed messages with other delays than the configuration gives; `superseded`: records
    whose place belongs to a later one, because their topic was deleted and made again.
    """

    __slots__ = ("_superseded", "places", "tags")

    def __init__(self) -> None:
        self.places: dict[int, tuple[str, int, int]] = {}
        self.tags: dict[int, int] = {}
        self._superseded = array("q")

    def supersede(self, positions: array[int]) -> None:
        self._superseded.extend(positions)

    @property
    def superseded(self) -> NDArray[np.int64]:
        """Log positions, ascending."""
        return np.unique(np.array(self._superseded, np.int64))


def tags_flipped_in_record(properties: bytes, code: int, expected: int) -> bool:
    """Whether one flipped bit of the record's properties explains that its unit has the tags code `code`, not
    `expected`, and one flipped bit of the unit does not."""
    if (code ^ expected).bit_count() == 1 or len(properties) > _LONGEST_PROPERTIES:
        return False
    flipped = bytearray(properties)
    for at in range(len(properties)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            tags = value_of(bytes(flipped), b"TAGS")
            if tags and java_hash(tags.decode("utf-8", "replace")) == code:
                return True
            flipped[at] ^= 1 << bit
    return False
