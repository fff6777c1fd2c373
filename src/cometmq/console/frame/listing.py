"""A list in a page: search, sort and paging on the server, the state in the page's address.

Rows are drawn in place as new answers come, so that neither the focus nor a chosen row is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from cometmq.console.frame.live import Feed, Reading
from cometmq.console.frame.page import Age, View, text_element
from cometmq.console.frame.rows import PAGE_SIZES, Column, ListState, query_of, read_state, select
from cometmq.console.frame.shown import RIGHT

T = TypeVar("T")
V = TypeVar("V")

SEARCH_WAIT_MS = 300
KEY = "$key"
"""Of a row, beside its columns, whose names have no such sign."""
_OWN = {"links", "classes", "acts"}
"""What a row in the browser has besides its columns."""
# What stands in these templates is ours alone; the values come as data, which Vue shows as text.
_HEAD = """
<q-tr :props="props">%s<q-th v-for="col in props.cols" :key="col.name" :props="props" scope="col"
 :aria-sort="col.order"><button v-if="col.sorts" type="button" class="sort" :aria-label="col.says"
 @click="$parent.$emit('sort_by', col.name)">{{ col.label }}<span aria-hidden="true">{{ col.mark }}</span>
</button><span v-else>{{ col.label }}</span></q-th></q-tr>
"""
_CHOOSE_ALL = '<q-th auto-width><q-checkbox dense v-model="props.selected" aria-label="%s" /></q-th>'
_CHOOSE = '<q-checkbox dense v-model="props.selected" :aria-label="\'%s \' + props.row.$key" />'
_CELL = """
<q-td :props="props" :data-label="props.col.label"><a v-if="props.row.$links[props.col.name]"
 :href="props.row.$links[props.col.name]">{{ props.value }}</a><span v-else
 :class="[props.col.looks, props.row.$classes[props.col.name]]">
{{ props.value }}</span></q-td>
"""
_ACTIONS = """
<q-td :props="props"><q-btn v-for="act in props.col.acts" :key="act.name" dense no-caps outline size="sm"
 class="q-mr-xs" :label="act.label" :aria-label="act.label + ': ' + props.row.$key"
 @click="$parent.$emit('row_act', {id: props.row.$key, act: act.name})" /></q-td>
"""


@dataclass(frozen=True)
class RowAction(Generic[T]):
    """A button in each row. title: key of its text."""

    name: str
    title: str
    do: Callable[[T], Any]


class Listing(Generic[T]):
    """A list of any length. Made where it is to stand; `update` or `follow` gives it its rows.

    key: what tells rows apart. default: the state without a query. empty: key of the text without any row,
    which says what to do next. name: divides the addresses of several lists of a page. choose: rows can be
    chosen, see `chosen`. classes: column name -> class of a cell, as `bad`.
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
        choose: bool = False,
        actions: Sequence[RowAction[T]] = (),
        classes: Callable[[T], dict[str, str]] | None = None,
    ) -> None:
        if own := _OWN & {column.name for column in columns}:
            raise ValueError(f"a row has {sorted(own)} besides its columns: name them otherwise")
        self._view = view
        self._columns = columns
        self._key = key
        self._default = default if default is not None else ListState()
        self._empty = empty
        self._prefix = f"{name}." if name else ""
        self._actions = actions
        self._classes = classes
        self._items: Sequence[T] | None = None
        self._choose = choose
        self._shown: dict[str, T] = {}
        self.state = read_state(view.query, columns, self._default, self._prefix)
        self._draw()

    # -- rows

    async def follow(self, feed: Feed[V], pick: Callable[[V], Sequence[T] | None]) -> None:
        """Show the rows that `pick` finds in the answers of a feed, with their age. None: they are not
        known."""
        await self._view.first(feed)
        notice = ui.element("div").props("aria-live=polite")
        age = Age(self._view, feed)

        def told(reading: Reading[V]) -> None:
            self._view.notice(notice, reading)
            age.show(reading)
            if reading.value is not None:
                self.update(pick(reading.value))
            elif reading.problem is not None:
                self.update(None)

        self._view.watch(feed, told)

    def update(self, items: Sequence[T] | None) -> None:
        """Other rows; None: they are not known, which is not that there are none."""
        self._items = items
        if items is not None:
            self._show()
            return
        self._shown = {}
        self._count.say("")
        self._foot.set_visibility(False)
        self._table.set_visibility(False)
        self._nothing.set_visibility(True)
        self._nothing.say(self._view.t("list.unavailable"))

    def again(self) -> None:
        """The same rows, where what is shown of them depends on something else, too."""
        self._show()

    @property
    def chosen(self) -> list[T]:
        """The rows that are chosen, on whatever page of the list, and still there."""
        keys = {row[KEY] for row in self._table.selected}
        return [item for item in self._items or () if self._key(item) in keys] if keys else []

    # -- drawing

    def _draw(self) -> None:
        view, choose = self._view, self._choose
        with ui.element("div").classes("list-tools"):
            if any(column.searched for column in self._columns):
                search = ui.input(view.t("list.search"), value=self.state.search)
                search.props(f"dense outlined clearable debounce={SEARCH_WAIT_MS} type=search maxlength=200")
                search.classes("list-search").on_value_change(self._searched)
            self._count = text_element("span", "").classes("note").props("role=status")
            if choose:
                self._chosen = text_element("span", "").classes("note").props("role=status")
                self._none = view.button("list.choose_none", self._choose_none, icon="deselect")
                self._none.set_visibility(False)
        self._table = ui.table(
            rows=[], columns=[], row_key=KEY, selection="multiple" if choose else None, pagination=0
        )
        self._table.classes("list full-width").props("flat bordered dense hide-bottom hide-pagination")
        self._table.add_slot("header", _HEAD % (_CHOOSE_ALL % view.t("list.choose_all") if choose else ""))
        if choose:
            self._table.add_slot("body-selection", _CHOOSE % view.t("list.choose"))
            self._table.on_select(lambda _event: self._count_chosen())
        self._table.add_slot("body-cell", _CELL)
        if self._actions:
            self._table.add_slot("body-cell-acts", _ACTIONS)
            self._table.on("row_act", self._acted)
        self._table.on("sort_by", self._sorted)
        self._nothing = text_element("p", view.t("common.asking")).classes("empty")
        with ui.element("div").classes("list-foot").props("role=navigation") as self._foot:
            self._back = self._turn("chevron_left", "list.previous", -1)
            self._where = text_element("span", "").props("aria-live=polite")
            self._forth = self._turn("chevron_right", "list.next", 1)
            sizes = ui.select(list(PAGE_SIZES), value=self.state.size, label=view.t("list.size"))
            sizes.props("dense outlined options-dense").style("min-width: 110px").on_value_change(self._sized)
        self._show()

    def _turn(self, icon: str, key: str, step: int) -> ui.button:
        button = ui.button(icon=icon, on_click=lambda: self._change(page=self.state.page + step), color=None)
        button.props("flat dense round")
        button.props["aria-label"] = self._view.t(key)
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
        self._count.say(view.t("list.count", n=f"{found.total:,}", all=f"{found.all:,}"))
        self._where.say(view.t("list.page", page=found.page, pages=found.pages))
        self._back.set_enabled(found.page > 1)
        self._forth.set_enabled(found.page < found.pages)
        self._foot.set_visibility(found.total > PAGE_SIZES[0])
        self._table.set_visibility(bool(rows))
        self._nothing.set_visibility(not rows)
        self._nothing.say(view.t("list.nothing_found" if found.all else self._empty))
        if self._choose:
            self._count_chosen()

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
                    "align": "right" if column.kind in RIGHT else "left",
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
            row[column.name] = self._view.shown(column.kind, column.value(item))
        return row

    # -- what somebody does

    def _count_chosen(self) -> None:
        """Those of other pages, and those that a search hides, are acted on, too: it is said how many."""
        count = len(self.chosen)
        self._chosen.say(self._view.t("list.chosen", n=f"{count:,}") if count else "")
        self._none.set_visibility(bool(count))

    def _choose_none(self) -> None:
        self._table.selected = []
        self._count_chosen()

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._show()
        own = {f"{self._prefix}{word}" for word in ("q", "sort", "page", "size")}
        others = {name: value for name, value in self._view.query.items() if name not in own}
        query = query_of(self.state, self._default, self._prefix)
        self._view.query = {**others, **query}
        self._view.note_query()

    def _searched(self, event: ValueChangeEventArguments[Any]) -> None:
        self._change(search=str(event.value or "")[:200], page=1)

    def _sorted(self, event: GenericEventArguments) -> None:
        if any(column.name == event.args for column in self._columns):
            self.state = self.state.sorted_by(event.args)
            self._change()

    def _sized(self, event: ValueChangeEventArguments[Any]) -> None:
        self._change(size=event.value, page=1)

    async def _acted(self, event: GenericEventArguments) -> None:
        item = self._shown.get(event.args.get("id"))
        for action in self._actions:
            if item is not None and action.name == event.args.get("act"):
                await self._view.run(action.do, item)
