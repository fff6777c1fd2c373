"""A list in a page. Search, order and pages are computed on the server; the address holds the list's state.

Rows are updated in place when new values arrive, so that focus and selection are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from cometmq.console.base.feeds import Feed, Reading
from cometmq.console.widgets.formats import RIGHT_ALIGNED
from cometmq.console.widgets.page import Age, View, live_area, text_element
from cometmq.console.widgets.rows import (
    MAX_SEARCH_LENGTH,
    PAGE_SIZES,
    Column,
    ListState,
    query_of,
    read_state,
    select,
)

T = TypeVar("T")
V = TypeVar("V")

SEARCH_DELAY_MS = 300
KEY = "$key"
"""Name of the field that holds a row's key. No column can have this name."""
_RESERVED_NAMES = {"links", "classes", "acts"}
# These templates contain no values. Vue inserts each value as text, so a value cannot add HTML to the page.
_HEAD = """
<q-tr :props="props">%s<q-th v-for="col in props.cols" :key="col.name" :props="props" scope="col"
 :aria-sort="col.order"><button v-if="col.sorts" type="button" class="sort" :aria-label="col.says"
 @click="$parent.$emit('sort_by', col.name)">{{ col.label }}<span aria-hidden="true">{{ col.mark }}</span>
</button><span v-else>{{ col.label }}</span></q-th></q-tr>
"""
_SELECT_ALL = '<q-th auto-width><q-checkbox dense v-model="props.selected" aria-label="%s" /></q-th>'
_SELECT = '<q-checkbox dense v-model="props.selected" :aria-label="\'%s \' + props.row.$key" />'
_CELL = """
<q-td :props="props" :data-label="props.col.label"><a v-if="props.row.$links[props.col.name]"
 :href="props.row.$links[props.col.name]">{{ props.value }}</a><span v-else
 :class="[props.col.looks, props.row.$classes[props.col.name],
 {'is-short': String(props.value).length < 25}]">
{{ props.value }}</span></q-td>
"""
_ACTIONS = """
<q-td :props="props"><q-btn v-for="act in props.col.acts" :key="act.name" dense no-caps outline size="sm"
 class="q-mr-xs" :label="act.label" :aria-label="act.label + ': ' + props.row.$key"
 @click="$parent.$emit('row_act', {id: props.row.$key, act: act.name})" /></q-td>
"""


@dataclass(frozen=True)
class RowAction(Generic[T]):
    """A button in each row. `title` is the key of its text."""

    name: str
    title: str
    run: Callable[[T], Any]


class Listing(Generic[T]):
    """A list of any length, which appears where it is created. `update` or `follow` sets its rows.

    Args:
        view: The page.
        columns: Columns of the list.
        key: Returns a text that identifies a row.
        default: State of the list if the address has no query.
        empty: Key of the text for a list without rows.
        name: Prefix of the list's fields in the address; different for each list of a page.
        selectable: Whether the user can select rows; `selected` returns them.
        actions: Buttons in each row.
        classes: Returns the CSS classes of a row's cells by column, for example `bad`.
    """

    def __init__(
        self,
        view: View,
        columns: Sequence[Column[T]],
        key: Callable[[T], str],
        *,
        default: ListState | None = None,
        empty: str = "list.empty",
        name: str = "",
        selectable: bool = False,
        actions: Sequence[RowAction[T]] = (),
        classes: Callable[[T], dict[str, str]] | None = None,
    ) -> None:
        if reserved := _RESERVED_NAMES & {column.name for column in columns}:
            raise ValueError(f"columns may not have the names {sorted(reserved)}")
        self._view = view
        self._columns = columns
        self._key = key
        self._default = default if default is not None else ListState()
        self._empty = empty
        self._prefix = f"{name}." if name else ""
        self._actions = actions
        self._classes = classes
        self._items: Sequence[T] | None = None
        self._selectable = selectable
        self._shown: dict[str, T] = {}
        self.refresh: Callable[[], None] = lambda: None
        self.state = read_state(view.query, columns, self._default, self._prefix)
        self._notes = live_area()
        self._draw()

    # -- rows

    async def follow(
        self,
        feed: Feed[V],
        pick: Callable[[V], Sequence[T] | None],
        *,
        notes: Callable[[V], object] | None = None,
    ) -> None:
        """Show the rows in the values of a feed, with the age of the value.

        Args:
            feed: The feed. The list's method `refresh` draws the feed's latest value again.
            pick: Returns the rows in a value; None if they are unknown.
            notes: Draws notes about a value above the list.
        """
        await self._view.first_reading(feed)
        notice = live_area()
        age = Age(self._view, feed)

        def show(reading: Reading[V]) -> None:
            self._view.show_state(notice, reading)
            age.show(reading)
            if reading.value is not None:
                if notes is not None:
                    self._notes.clear()
                    with self._notes:
                        notes(reading.value)
                self.update(pick(reading.value))
            elif reading.problem is not None:
                self.update(None)

        self._view.watch(feed, show)
        self.refresh = lambda: show(feed.latest)

    def update(self, items: Sequence[T] | None) -> None:
        """Set the rows. None means that the rows are unknown, which the list shows."""
        self._items = items
        if items is not None:
            self._show()
            return
        self._shown = {}
        self._count.set_text("")
        self._foot.set_visibility(False)
        self._table.set_visibility(False)
        self._placeholder.set_visibility(True)
        self._placeholder.set_text(self._view.t("list.unavailable"))

    @property
    def selected(self) -> list[T]:
        """The selected rows that still exist, on all pages of the list."""
        keys = {row[KEY] for row in self._table.selected}
        return [item for item in self._items or () if self._key(item) in keys] if keys else []

    # -- drawing

    def _draw(self) -> None:
        view, selectable = self._view, self._selectable
        with ui.element("div").classes("list-tools"):
            if any(column.searched for column in self._columns):
                search = ui.input(view.t("list.search"), value=self.state.search)
                search.props(f"dense outlined clearable debounce={SEARCH_DELAY_MS} type=search")
                search.props(f"maxlength={MAX_SEARCH_LENGTH}")
                search.classes("list-search").on_value_change(self._search_changed)
            self._count = text_element("span", "").classes("note").props("role=status")
            if selectable:
                self._selected_count = text_element("span", "").classes("note").props("role=status")
                self._clear_button = view.button("list.choose_none", self._clear_selection, icon="deselect")
                self._clear_button.set_visibility(False)
        self._table = ui.table(
            rows=[], columns=[], row_key=KEY, selection="multiple" if selectable else None, pagination=0
        )
        self._table.classes("list full-width").props("flat bordered dense hide-bottom hide-pagination")
        select_all = _SELECT_ALL % view.t("list.choose_all") if selectable else ""
        self._table.add_slot("header", _HEAD % select_all)
        if selectable:
            self._table.add_slot("body-selection", _SELECT % view.t("list.choose"))
            self._table.on_select(lambda _event: self._count_selected())
        self._table.add_slot("body-cell", _CELL)
        if self._actions:
            self._table.add_slot("body-cell-acts", _ACTIONS)
            self._table.on("row_act", self._action_clicked)
        self._table.on("sort_by", self._heading_clicked)
        self._placeholder = text_element("p", view.t("common.asking")).classes("empty")
        with ui.element("div").classes("list-foot").props("role=navigation") as self._foot:
            self._previous = self._page_button("chevron_left", "list.previous", -1)
            self._page_number = text_element("span", "").props("aria-live=polite")
            self._next = self._page_button("chevron_right", "list.next", 1)
            sizes = ui.select(list(PAGE_SIZES), value=self.state.size, label=view.t("list.size"))
            sizes.props("dense outlined options-dense").style("min-width: 110px")
            sizes.on_value_change(lambda event: self._change(size=event.value, page=1))

    def _page_button(self, icon: str, key: str, step: int) -> ui.button:
        button = ui.button(icon=icon, on_click=lambda: self._change(page=self.state.page + step), color=None)
        button.props("flat dense round").props["aria-label"] = self._view.t(key)
        return button

    def _show(self) -> None:
        view = self._view
        if self._items is None:
            return
        found = select(self._items, self._columns, self.state)
        self.state = replace(self.state, page=found.page)
        self._shown = {self._key(item): item for item in found.rows}
        rows = [self._row(key, item) for key, item in self._shown.items()]
        columns = self._heads()
        if rows != self._table.rows or columns != self._table.columns:
            self._table.columns = columns
            self._table.rows = rows
        self._count.set_text(view.t("list.count", n=f"{found.total:,}", all=f"{found.all:,}"))
        self._page_number.set_text(view.t("list.page", page=found.page, pages=found.pages))
        self._previous.set_enabled(found.page > 1)
        self._next.set_enabled(found.page < found.pages)
        self._foot.set_visibility(found.total > PAGE_SIZES[0])
        self._table.set_visibility(bool(rows))
        self._placeholder.set_visibility(not rows)
        self._placeholder.set_text(view.t("list.nothing_found" if found.all else self._empty))
        if self._selectable:
            self._count_selected()

    def _heads(self) -> list[dict[str, Any]]:
        heads: list[dict[str, Any]] = []
        for column in self._columns:
            label, sorted_now = self._view.t(column.title), column.name == self.state.sort
            order = ("descending" if self.state.descending else "ascending") if sorted_now else "none"
            heads.append(
                {
                    "name": column.name,
                    "field": column.name,
                    "label": label,
                    "align": "right" if column.kind in RIGHT_ALIGNED else "left",
                    "sorts": True,
                    "looks": f"is-{column.kind}",
                    "order": order,
                    "mark": {"ascending": " ▲", "descending": " ▼", "none": ""}[order],
                    "says": self._view.t("list.sort", column=label),
                }
            )
        if self._actions:
            acts = [{"name": each.name, "label": self._view.t(each.title)} for each in self._actions]
            label = self._view.t("list.actions")
            heads.append({"name": "acts", "field": KEY, "label": label, "align": "left", "acts": acts})
        return heads

    def _row(self, key: str, item: T) -> dict[str, Any]:
        row: dict[str, Any] = {
            KEY: key,
            "$links": {each.name: each.link(item) for each in self._columns if each.link is not None},
            "$classes": self._classes(item) if self._classes is not None else {},
        }
        for column in self._columns:
            row[column.name] = self._view.format(column.kind, column.value(item))
        return row

    # -- user input

    def _count_selected(self) -> None:
        """Show the number of selected rows, because an action also affects selected rows on other pages."""
        count = len(self.selected)
        self._selected_count.set_text(self._view.t("list.chosen", n=f"{count:,}") if count else "")
        self._clear_button.set_visibility(bool(count))

    def _clear_selection(self) -> None:
        self._table.selected = []
        self._count_selected()

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._show()
        own = {f"{self._prefix}{field}" for field in ("q", "sort", "page", "size")}
        others = {name: value for name, value in self._view.query.items() if name not in own}
        self._view.set_query({**others, **query_of(self.state, self._default, self._prefix)})

    def _search_changed(self, event: ValueChangeEventArguments[Any]) -> None:
        self._change(search=str(event.value or "")[:MAX_SEARCH_LENGTH], page=1)

    def _heading_clicked(self, event: GenericEventArguments) -> None:
        if any(column.name == event.args for column in self._columns):
            self.state = self.state.sorted_by(event.args)
            self._change()

    async def _action_clicked(self, event: GenericEventArguments) -> None:
        item = self._shown.get(event.args.get("id"))
        for action in self._actions:
            if item is not None and action.name == event.args.get("act"):
                await self._view.run(action.run, item)


def kind_choice(
    view: View, label: str, kinds: Mapping[str, str], on_change: Callable[[], None]
) -> Callable[[], str]:
    """Add a choice above a list. The chosen value is stored in the page's address.

    Return a function that returns the chosen value.

    Args:
        view: The page.
        label: Key of the label's text.
        kinds: The values that can be chosen, each with the key of its text. The first value is the default.
        on_change: Called after a change.
    """

    def value() -> str:
        stored = view.query.get("kind", "")
        return stored if stored in kinds else next(iter(kinds))

    def changed() -> None:
        view.set_query({**view.query, "kind": str(choice.value)})
        on_change()

    options = {name: view.t(key) for name, key in kinds.items()}
    choice = ui.select(options, label=view.t(label), value=value(), on_change=changed)
    choice.props("dense outlined options-dense").style("width: 220px; margin-bottom: 8px")
    return value
