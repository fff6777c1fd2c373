"""Input fields: dialogs that ask for values before an action, and search fields above a result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.validation_element import ValidationElement

from cometmq.console.widgets.actions import dialog, dialog_buttons, result_of
from cometmq.console.widgets.page import View, live_area

Check = Callable[[str], str | None]
"""A check of a field's value. Returns an error text in the user's language, or None for a valid value."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
"""Format of the value of a time field."""
FieldT = TypeVar("FieldT", bound=ValidationElement[Any])


class Fields:
    """Adds input fields to an element. Each field checks its value.

    In all methods, `key` is the key of the label's text.
    """

    def __init__(self, view: View, place: Element) -> None:
        self._view = view
        self._place = place
        self._fields: list[ValidationElement[Any]] = []

    def text(
        self, key: str, value: str = "", *, max_length: int, required: bool = False, lines: bool = False,
        check: Check | None = None,
    ) -> ui.input | ui.textarea:  # fmt: skip
        """Add a text field. `lines` permits several lines."""

        def problem(given: Any) -> str | None:
            text = str(given or "")
            if required and not text.strip():
                return self._view.t("common.needed")
            if len(text) > max_length:
                return self._view.t("common.too_long", most=max_length)
            return check(text) if check is not None and text else None

        with self._place:
            kind = ui.textarea if lines else ui.input
            made = kind(self._view.t(key), value=value, validation=problem)
        return self._added(made, f"maxlength={max_length} autocomplete=off")

    def number(self, key: str, value: int | None, low: int, high: int, *, required: bool = True) -> ui.number:
        """Add a field for a whole number. Its value may be None if `required` is False."""

        # The limits are checked here and not passed to the element. The element would replace an invalid
        # value by the nearest valid value when the user clicks on "Continue", and the error would disappear.
        def problem(given: Any) -> str | None:
            if given is None and not required:
                return None
            if given is None or int(given) != given or not low <= given <= high:
                return self._view.t("common.between", least=low, most=high)
            return None

        with self._place:
            made = ui.number(self._view.t(key), value=value, validation=problem)
        return self._added(made)

    def choice(self, key: str, options: Sequence[str] | Mapping[str, str], value: str | None) -> ui.select:
        """Add a choice between values. If `options` is a mapping, it has the displayed text of each value."""
        given = dict(options) if isinstance(options, Mapping) else list(options)
        with self._place:
            made = ui.select(
                given, label=self._view.t(key), value=value if value in given else None,
                validation=lambda chosen: None if chosen is not None else self._view.t("common.needed"),
            )  # fmt: skip
        return self._added(made, "options-dense")

    def yes_no(self, key: str, value: bool) -> ui.select:
        """Add a choice between "yes" and "no". Its value is one of these two words."""
        options = {"no": self._view.t("common.no"), "yes": self._view.t("common.yes")}
        return self.choice(key, options, "yes" if value else "no")

    def moment(self, key: str, value: str, *, required: bool = True) -> ui.input:
        """Add a field for a local time. `millis` converts its value."""

        def problem(given: Any) -> str | None:
            valid = millis(given) is not None if given else not required
            return None if valid else self._view.t("common.no_time")

        with self._place:
            made = ui.input(self._view.t(key), value=value, validation=problem)
        return self._added(made, "type=datetime-local step=1 stack-label")

    def are_valid(self) -> bool:
        """Check all fields, and show the error of each invalid field. Return whether all are valid."""
        results = [field.validate() for field in self._fields]
        return all(results)

    def _added(self, field: FieldT, props: str = "") -> FieldT:
        field.props(f"outlined dense {props}")
        self._fields.append(field)
        return field


class Form(Fields):
    """A dialog with fields. Await `submitted()` after adding the fields."""

    def __init__(self, view: View, title: str, sentences: Sequence[str] = ()) -> None:
        with dialog(view, [title, *sentences]) as (self._box, place), place:
            super().__init__(view, ui.element("div").classes("dialog-form"))

    async def submitted(self) -> bool:
        """Show the dialog. Return whether the user submitted it with valid values."""

        def submit() -> None:
            if self.are_valid():
                self._box.submit(True)

        with self._place:
            dialog_buttons(self._view, self._box, "common.go_on", submit)
        return bool(await result_of(self._box))


class SearchFields:
    """Search fields whose values are in the page's address, and an element for the result.

    Args:
        view: The page.
        find: Fills the element for the result. It is awaited when the user searches.
        keep_query: Whether a search keeps the query parameters that belong to none of the fields. They hold
            the state of the page's lists.
    """

    def __init__(
        self, view: View, find: Callable[[Element], Awaitable[None]], *, keep_query: bool = False
    ) -> None:
        self._view = view
        self._find = find
        self._keep_query = keep_query
        self._bar = ui.element("div").classes("asking").props("role=search")
        self._fields = Fields(view, self._bar)
        self._by_name: dict[str, ValidationElement[Any]] = {}
        self._place: Element | None = None
        self._busy = False

    def text(self, name: str, key: str, max_length: int) -> ui.input | ui.textarea:
        """Add a text field.

        The page's address contains the field's value as the query parameter `name`. `key` is the key of the
        label's text.
        """
        value = self._view.query.get(name, "")[:max_length]
        field = self._fields.text(key, value, max_length=max_length)
        return self._added(name, field.props("clearable"))

    def moment(self, name: str, key: str) -> ui.input:
        """Add a field for a local time, which may be empty."""
        field = self._fields.moment(key, self._view.query.get(name, ""), required=False)
        return self._added(name, field.props("clearable"))

    def choice(self, name: str, key: str, options: Mapping[str, str]) -> ui.select:
        """Add a choice. `options` has the key of a text for each value; the first value is the default."""
        stored = self._view.query.get(name, "")
        texts = {value: self._view.t(text_key) for value, text_key in options.items()}
        value = stored if stored in texts else next(iter(texts))
        return self._added(name, self._fields.choice(key, texts, value))

    def _added(self, name: str, field: FieldT) -> FieldT:
        if not isinstance(field, ui.select):
            field.on("keydown.enter", self.search)
        self._by_name[name] = field
        return field

    def value(self, name: str) -> str:
        """Return the value of a field without surrounding blanks."""
        return str(self._by_name[name].value or "").strip()

    def time(self, name: str) -> int | None:
        """Return the time in a field as milliseconds since 1970, or None for an empty field."""
        return millis(self.value(name)) if self.value(name) else None

    def add_button(self, key: str, *, icon: str = "search", search_now: bool = False) -> None:
        """Add the search button and the element for the result, below all fields.

        With `search_now`, the first search does not wait for a click.
        """
        with self._bar:
            self._view.button(key, self.search, icon=icon)
        self._place = live_area()
        if search_now:
            # Start the search with a timer, so that the page is sent without waiting for the search.
            ui.timer(0.01, lambda: self._view.run(self.find), once=True)

    async def search(self) -> None:
        """If all fields are valid, put their values into the address of the page, and start the search."""
        if not self._fields.are_valid():
            return
        kept = self._view.query if self._keep_query else {}
        values = {name: self.value(name) for name in self._by_name}
        self._view.set_query({name: value for name, value in {**kept, **values}.items() if value})
        await self._view.run(self.find)

    async def find(self) -> None:
        """Search with the current values of the fields, unless a search is in progress."""
        if self._busy or self._place is None:
            return
        self._busy = True
        try:
            await self._find(self._place)
        finally:
            self._busy = False


def millis(value: Any) -> int | None:
    """Return the time in a field as milliseconds since 1970, or None if it is not a valid time."""
    try:
        return int(datetime.fromisoformat(str(value)).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        return None
