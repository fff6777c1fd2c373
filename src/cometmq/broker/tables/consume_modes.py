"""How groups consume topics: by pulls or by pops. Their file is messageRequestMode.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cometmq import logs
from cometmq.errors import BodyError
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody

log = logs.logger(__name__)

MAX_MODES = 50_000
"""The maximum number of pairs of topic and group with a mode."""

ConsumeMode = SetMessageRequestModeRequestBody


class ConsumeModeTable:
    """The consume modes by topic and group."""

    def __init__(self) -> None:
        self.modes: dict[tuple[str, str], ConsumeMode] = {}

    def put(self, mode: ConsumeMode) -> bool:
        """Set a mode. Return False if it would be a new entry beyond the limit MAX_MODES."""
        key = mode.topic, mode.consumer_group
        if len(self.modes) >= MAX_MODES and key not in self.modes:
            return False
        self.modes[key] = mode
        return True

    def replace(self, modes: Iterable[ConsumeMode]) -> bool:
        """Replace all modes with those of a master. Return whether that has changed any."""
        before, self.modes = self.modes, {}
        for mode in modes:
            self.put(mode)
        return self.modes != before

    def to_table(self) -> dict[str, Any]:
        """Return the content of the file, which is also the response to GET_ALL_MESSAGE_REQUEST_MODE."""
        table: dict[str, dict[str, Any]] = {}
        for (topic, group), mode in self.modes.items():
            table.setdefault(topic, {})[group] = msgspec.to_builtins(mode)
        return {"messageRequestModeMap": table}

    def load(self, table: Mapping[str, Any]) -> None:
        """Add the modes of a file. Invalid ones are ignored."""
        for topic, groups in (table.get("messageRequestModeMap") or {}).items():
            for group, plain in groups.items():
                try:
                    self.modes[topic, group] = ConsumeMode.from_plain(plain)
                except BodyError as error:
                    log.warning("the mode of group %s for topic %s is ignored: %s", group, topic, error)
