"""Fields above what a page finds. Their values stand in the page's address, so that a link finds the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.validation_element import ValidationElement

from cometmq.console.frame.forms import millis
from cometmq.console.frame.page import View


class Asking:
    """Made where it is to stand. find: awaited with the place for what is found, when somebody asks, and when
    the page is opened with values in its address."""

    def __init__(self, view: View, find: Callable[[Element], Awaitable[None]]) -> None:
        self._view = view
        self._find = find
        self._fields: dict[str, ValidationElement[Any]] = {}
        self._bar = ui.element("div").classes("asking").props("role=search")
        self._place: Element | None = None
        self._busy = False

    def text(self, name: str, key: str, most: int) -> ui.input:
        """A text of at most `most` characters. name: in the address; key: of its label."""

        def problem(said: Any) -> str | None:
            return self._view.t("common.too_long", most=most) if len(str(said or "")) > most else None

        with self._bar:
            made = ui.input(
                self._view.t(key), value=self._view.query.get(name, "")[:most], validation=problem
            )
        made.props(f"outlined dense clearable maxlength={most} autocomplete=off")
        made.on("keydown.enter", self.ask)
        self._fields[name] = made
        return made

    def moment(self, name: str, key: str) -> ui.input:
        """A local time, or nothing."""

        def problem(said: Any) -> str | None:
            return self._view.t("common.no_time") if said and millis(said) is None else None

        with self._bar:
            made = ui.input(self._view.t(key), value=self._view.query.get(name, ""), validation=problem)
        made.props("outlined dense clearable type=datetime-local step=1 stack-label")
        made.on("keydown.enter", self.ask)
        self._fields[name] = made
        return made

    def choice(self, name: str, key: str, options: Mapping[str, str]) -> ui.select:
        """One of several, the first if the address says nothing. options: value -> what is shown."""
        asked = self._view.query.get(name, "")
        value = asked if asked in options else next(iter(options))
        with self._bar:
            made = ui.select(dict(options), label=self._view.t(key), value=value)
        made.props("outlined dense options-dense")
        self._fields[name] = made
        return made

    def value(self, name: str) -> str:
        """What stands in a field now, without blanks around it."""
        return str(self._fields[name].value or "").strip()

    def time(self, name: str) -> int | None:
        """The time in a field in ms, None where there is none."""
        return millis(self.value(name)) if self.value(name) else None

    def begin(self, key: str, *, at_once: bool) -> None:
        """Put in the button with this text and the place, once all fields are there. at_once: find without
        being asked."""
        with self._bar:
            self._view.button(key, self.ask, icon="search")
        self._place = ui.element("div").props("aria-live=polite")
        if at_once:
            # Behind the page, which is there at once.
            ui.timer(0.01, lambda: self._view.run(self.find), once=True)

    async def ask(self) -> None:
        """Somebody asks: note the values in the address, and find."""
        good = [field.validate() for field in self._fields.values()]  # each says what is wrong with it
        if not all(good):
            return
        self._view.query = {name: self.value(name) for name in self._fields if self.value(name)}
        self._view.note_query()
        await self._view.run(self.find)

    async def find(self) -> None:
        """Find again with the values as they are; once at a time."""
        if self._busy or self._place is None:
            return
        self._busy = True
        try:
            await self._find(self._place)
        finally:
            self._busy = False
