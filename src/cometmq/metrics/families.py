"""The metric families of one measurement, with a limited number of samples. Uses no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from cometmq.text import printable

MAX_LABEL_CHARACTERS = 255
"""The maximum length of a label's value. Longer values are truncated."""


class Family(msgspec.Struct, eq=False):
    """The samples of one metric: for each, the label values in the order of `labels`, and a number."""

    name: str  # Without the unit, and without the suffix `_total` of a counter
    words: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    unit: str = ""
    samples: list[tuple[tuple[str, ...], float]] = msgspec.field(default_factory=list)


class Families:
    """The metric families of one collection. Samples beyond `most` are dropped, and `cut` is set."""

    def __init__(self, most: int, labels: Iterable[tuple[str, str]] = ()) -> None:
        """Create an empty collection. `labels` are added to the labels of every sample."""
        common = list(labels)
        self._names = tuple(name for name, _ in common)
        self._values = tuple(_label(value) for _, value in common)
        self._left = most
        self.cut = False
        self.table: dict[str, Family] = {}

    def gauge(self, name: str, words: str, value: float, *, unit: str = "", **labels: object) -> None:
        """Add a sample of a value that goes up and down. Only Prometheus expects the unit in the name."""
        self._add(name, words, "gauge", value, labels, unit)

    def counter(self, name: str, words: str, value: float, **labels: object) -> None:
        """Add a sample of a value that only grows. `name` must not end in `_total`."""
        self._add(name, words, "counter", value, labels, "")

    def _add(
        self,
        name: str,
        words: str,
        kind: Literal["gauge", "counter"],
        value: float,
        labels: dict[str, object],
        unit: str,
    ) -> None:
        if self._left <= 0:
            self.cut = True
            return
        self._left -= 1
        family = self.table.get(name)
        if family is None:
            family = self.table[name] = Family(name, words, kind, (*self._names, *labels), unit)
        family.samples.append(((*self._values, *map(_label, labels.values())), float(value)))


class Source(Protocol):
    """The source of the samples. Threads call its methods, which raise TimeoutError if it is too busy."""

    def families(self) -> Families: ...

    def why_not_ready(self) -> str: ...


def _label(value: object) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    return printable(str(value))[:MAX_LABEL_CHARACTERS]
