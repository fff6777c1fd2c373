"""What is measured at one moment: families of samples, bounded in number. No I/O and no clock in here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cometmq.text import printable

LABEL_CHARACTERS = 255
"""Of a label's value; longer ones are cut."""


@dataclass(eq=False, slots=True)
class Family:
    """Samples of one name. name: without the `_total` of a counter, and without the unit. samples: values of
    the labels, in their order, and the number."""

    name: str
    words: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    unit: str = ""
    samples: list[tuple[tuple[str, ...], float]] = field(default_factory=list)


class Families:
    """The families of one look at a server, in order. most: samples of all of them; those beyond are left
    out, and `cut` says so."""

    def __init__(self, most: int, labels: Iterable[tuple[str, str]] = ()) -> None:
        """labels: those that all samples have, with their values."""
        common = list(labels)
        self._names = tuple(name for name, _ in common)
        self._values = tuple(_label(value) for _, value in common)
        self._left = most
        self.cut = False
        self.table: dict[str, Family] = {}

    @property
    def full(self) -> bool:
        """Whether there is no room for another sample."""
        return self._left <= 0

    def gauge(self, name: str, words: str, value: float, *, unit: str = "", **labels: object) -> None:
        """One more sample of what goes up and down. unit: Prometheus has it at the end of the name, and
        OpenTelemetry beside it."""
        self._add(name, words, "gauge", value, labels, unit)

    def counter(self, name: str, words: str, value: float, **labels: object) -> None:
        """One more sample of what only grows; name: without `_total`."""
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


def _label(value: object) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    return printable(str(value))[:LABEL_CHARACTERS]
