"""Asking for values before something is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.validation_element import ValidationElement

from cometmq.console.frame.actions import close, dialog
from cometmq.console.frame.page import View

Check = Callable[[str], str | None]
"""What is wrong with a value, said in the user's language; None: nothing."""


class Form:
    """A dialog with fields. `await asked()`: whether it was sent, with values that pass their checks."""

    def __init__(self, view: View, title: str, says: Sequence[str] = ()) -> None:
        self._view = view
        self._fields: list[ValidationElement[Any]] = []
        with dialog(view, [title, *says]) as (self._box, place), place:
            self._place = ui.element("div").classes("dialog-form")

    def text(
        self, key: str, value: str = "", *, most: int, needed: bool = False, lines: bool = False,
        check: Check | None = None,
    ) -> ui.input | ui.textarea:  # fmt: skip
        """A text of at most `most` characters. lines: of several lines."""

        def problem(said: Any) -> str | None:
            said = str(said or "")
            if needed and not said.strip():
                return self._view.t("common.needed")
            if len(said) > most:
                return self._view.t("common.too_long", most=most)
            return check(said) if check is not None and said else None

        with self._place:
            kind = ui.textarea if lines else ui.input
            made = kind(self._view.t(key), value=value, validation=problem)
        made.props(f"outlined dense maxlength={most} autocomplete=off")
        self._fields.append(made)
        return made

    def number(self, key: str, value: int | None, least: int, most: int, *, needed: bool = True) -> ui.number:
        """A whole number; None is allowed unless needed."""

        def problem(given: Any) -> str | None:
            if given is None and not needed:
                return None
            if given is None or int(given) != given or not least <= given <= most:
                return self._view.t("common.between", least=least, most=most)
            return None

        with self._place:
            made = ui.number(
                self._view.t(key), value=value, min=least, max=most, precision=0, validation=problem
            )
        made.props("outlined dense")
        self._fields.append(made)
        return made

    def choice(self, key: str, options: Sequence[str] | Mapping[str, str], value: str | None) -> ui.select:
        """One of several: values, or value -> what is shown."""
        given = dict(options) if isinstance(options, Mapping) else list(options)
        with self._place:
            made = ui.select(
                given, label=self._view.t(key), value=value if value in given else None,
                validation=lambda chosen: None if chosen is not None else self._view.t("common.needed"),
            )  # fmt: skip
        made.props("outlined dense options-dense")
        self._fields.append(made)
        return made

    def moment(self, key: str, value: datetime) -> ui.input:
        """A local time, see `millis`."""

        def problem(said: Any) -> str | None:
            return None if millis(said) is not None else self._view.t("common.no_time")

        with self._place:
            made = ui.input(self._view.t(key), value=value.strftime("%Y-%m-%dT%H:%M:%S"), validation=problem)
        made.props("outlined dense type=datetime-local step=1 stack-label")
        self._fields.append(made)
        return made

    async def asked(self) -> bool:
        """Show it until it is sent or given up."""

        def send() -> None:
            wrong = [
                field for field in self._fields if not field.validate()
            ]  # each says what is wrong with it
            if not wrong:
                self._box.submit(True)

        with self._place, ui.row().classes("full-width justify-end"):
            ui.button(self._view.t("common.cancel"), on_click=lambda: self._box.submit(False)).props(
                "flat no-caps"
            )
            ui.button(self._view.t("common.go_on"), on_click=send).props("no-caps")
        sent = bool(await self._box)
        close(self._box)
        return sent


def millis(said: Any) -> int | None:
    """ms since 1970 of what a field for a time holds, None for what is no time."""
    try:
        moment = datetime.fromisoformat(str(said))
        return int(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        return None
