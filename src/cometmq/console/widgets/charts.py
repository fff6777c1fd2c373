"""Charts of live values. Names are drawn as text, never as HTML, and are never keys of the chart's data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from cometmq.console.base.feeds import Ring
from cometmq.console.widgets.page import View, text_element

GAP_S = 120.0
"""Seconds without a value after which a chart's line has a gap. The interval of every feed is shorter."""
MIN_SPAN_MS = 15 * 60_000
"""Minimum length of a chart's time axis, in ms."""
MAX_NAME_LENGTH = 32
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7")
_LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.3)"}}  # a gray that is visible in both themes
_TEXT = {"color": "#888", "fontSize": 11}


def _chart(view: View, title: str, options: dict[str, Any]) -> ui.echart:
    """Add a chart with the options that all charts share. `title` is the key of the title's text."""
    common = {"animation": False, "aria": {"enabled": True}, "color": list(_COLORS), "textStyle": _TEXT}
    chart = ui.echart({**common, **options}, renderer="svg")
    chart.props["aria-label"] = view.t(title)
    chart.props["role"] = "img"
    return chart


class Lines:
    """A chart of values over time.

    Args:
        view: The page.
        title: Key of the text of the title.
        unit: Key of the text of the unit.
        names: Keys of the texts that name the lines. Empty for a chart whose lines `show_named` draws.
    """

    def __init__(self, view: View, title: str, unit: str, names: Sequence[str]) -> None:
        options = {
            "useUTC": True,
            "grid": {"left": 8, "right": 12, "top": 28, "bottom": 8, "containLabel": True},
            "legend": {"top": 0, "textStyle": _TEXT, "show": len(names) != 1, "type": "scroll"},
            # The render mode "html" would not escape names.
            "tooltip": {"trigger": "axis", "renderMode": "richText"},
            "xAxis": {
                "type": "time", "minInterval": 60_000, "axisLabel": _TEXT, "splitLine": {"show": False},
            },
            "yAxis": {
                "type": "value", "name": view.t(unit), "min": 0, "axisLabel": _TEXT, "splitLine": _LINE,
            },
            "series": [_series(view.t(name)) for name in names],
        }  # fmt: skip
        with ui.element("figure").classes("panel").style("margin: 0"):
            text_element("figcaption", view.t(title))
            self._chart = _chart(view, title, options).classes("chart")

    def show_named(self, rings: Mapping[str, Ring]) -> None:
        """Draw one line for each history in `rings`, and name the line after the history's key."""
        self._chart.options["series"] = [_series(_shortened(name)) for name in rings]
        self.show(*rings.values())

    def show(self, *rings: Ring) -> None:
        """Draw one line for each history in `rings`, in the order of the names given to the chart."""
        for series, ring in zip(self._chart.options["series"], rings, strict=True):
            series["data"] = [
                [round((at_s + utc_offset_s(at_s)) * 1000), None if value is None else round(value, 2)]
                for at_s, value in ring.points(GAP_S)
            ]
            series["showSymbol"] = len(series["data"]) == 1  # a single point is invisible without a symbol
        times = [at_ms for series in self._chart.options["series"] for at_ms, _ in series["data"]]
        if times:
            self._chart.options["xAxis"] |= {"min": min(*times, max(times) - MIN_SPAN_MS), "max": max(times)}
        self._chart.update()


def _series(name: str) -> dict[str, Any]:
    return {"name": name, "type": "line", "showSymbol": False, "data": []}


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def utc_offset_s(at_s: float) -> int:
    """Return the UTC offset of the console's machine at a time, in seconds.

    Charts need it because they show the machine's local time, as all pages do.
    """
    return time.localtime(at_s).tm_gmtoff


def bars(view: View, title: str, values: Sequence[tuple[str, float]]) -> None:
    """Add a bar chart of values by name. `title` is the key of the title's text."""
    options = {
        "grid": {"left": 8, "right": 40, "top": 8, "bottom": 8, "containLabel": True},
        "tooltip": {"renderMode": "richText"},
        "xAxis": {"type": "value", "axisLabel": _TEXT, "splitLine": _LINE},
        "yAxis": {
            "type": "category", "data": [_shortened(name) for name, _ in values], "inverse": True,
            "axisLabel": _TEXT,
        },
        "series": [{"type": "bar", "data": [round(value, 2) for _, value in values], "barMaxWidth": 14}],
    }  # fmt: skip
    _chart(view, title, options).style(f"width: 100%; height: {40 + 24 * len(values)}px")
