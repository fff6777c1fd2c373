"""Charts that grow while somebody looks. Names in them are texts: the chart reads no markup, and no name is a
key of what is sent to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from cometmq.console.frame.live import Ring
from cometmq.console.frame.page import View, text_element

GAP_S = 120.0
"""Longer than any question waits: a line that goes on over it would be made up."""
SPAN_MS = 15 * 60_000
"""The least that a line of time shows."""
_GREY = "#888"
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7")
_LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.3)"}}
"""Seen on light and on dark."""
_TEXT = {"color": _GREY, "fontSize": 11}


class Lines:
    """Values of the last hours by time. unit: key of its text, as `/s`. names: keys of their texts; none
    where `show_named` is to say them."""

    def __init__(self, view: View, title: str, unit: str, names: Sequence[str]) -> None:
        self._view = view
        with ui.element("figure").classes("panel").style("margin: 0"):
            text_element("figcaption", view.t(title))
            self._chart = ui.echart(
                {
                    "animation": False,
                    "aria": {"enabled": True},
                    "useUTC": True,
                    "color": list(_COLORS),
                    "grid": {"left": 8, "right": 12, "top": 28, "bottom": 8, "containLabel": True},
                    "legend": {"top": 0, "textStyle": _TEXT, "show": len(names) != 1, "type": "scroll"},
                    "textStyle": _TEXT,
                    # Text of the chart's own drawing: no HTML is made of names.
                    "tooltip": {"trigger": "axis", "renderMode": "richText"},
                    "xAxis": {
                        "type": "time",
                        "minInterval": 60_000,
                        "axisLabel": _TEXT,
                        "splitLine": {"show": False},
                    },
                    "yAxis": {
                        "type": "value",
                        "name": view.t(unit),
                        "min": 0,
                        "axisLabel": _TEXT,
                        "splitLine": _LINE,
                    },
                    "series": [_series(view.t(name)) for name in names],
                },
                renderer="svg",
            ).classes("chart")
        self._chart.props["aria-label"] = view.t(title)
        self._chart.props["role"] = "img"

    def show_named(self, rings: Mapping[str, Ring]) -> None:
        """Draw rings by names that are no texts of ours."""
        self._chart.options["series"] = [_series(_short(name)) for name in rings]
        self.show(*rings.values())

    def show(self, *rings: Ring) -> None:
        """Draw the rings, in the order of the names."""
        for series, ring in zip(self._chart.options["series"], rings, strict=True):
            series["data"] = [
                [round((at_s + zone_s(at_s)) * 1000), None if value is None else round(value, 2)]
                for at_s, value in ring.points(GAP_S)
            ]
            series["showSymbol"] = len(series["data"]) == 1  # no line is drawn to be seen
        times = [at_ms for series in self._chart.options["series"] for at_ms, _ in series["data"]]
        if times:
            self._chart.options["xAxis"] |= {"min": min(*times, max(times) - SPAN_MS), "max": max(times)}
        self._chart.update()


def _series(name: str) -> dict[str, Any]:
    return {"name": name, "type": "line", "showSymbol": False, "data": []}


def _short(name: str) -> str:
    return name if len(name) <= 32 else name[:31] + "…"


def zone_s(at_s: float) -> int:
    """By how much the console's machine is ahead of UTC at a time: a chart has its times, as the page has,
    and not those of the browser's machine."""
    return time.localtime(at_s).tm_gmtoff


def bars(view: View, title: str, values: Sequence[tuple[str, float]]) -> None:
    """The largest of something, by name. It says its values to those who do not see
    it, too."""
    names = [_short(name) for name, _ in values]
    chart = ui.echart(
        {
            "animation": False,
            "aria": {"enabled": True},
            "color": list(_COLORS),
            "grid": {"left": 8, "right": 40, "top": 8, "bottom": 8, "containLabel": True},
            "textStyle": _TEXT,
            "tooltip": {"renderMode": "richText"},
            "xAxis": {"type": "value", "axisLabel": _TEXT, "splitLine": _LINE},
            "yAxis": {"type": "category", "data": names, "inverse": True, "axisLabel": _TEXT},
            "series": [{"type": "bar", "data": [round(value, 2) for _, value in values], "barMaxWidth": 14}],
        },
        renderer="svg",
    ).style(f"width: 100%; height: {40 + 24 * len(values)}px")
    chart.props["aria-label"] = view.t(title)
    chart.props["role"] = "img"


def missing_note(view: View, missing: Mapping[str, object]) -> None:
    """That some brokers did not answer: what is shown is not all."""
    for name, problem in missing.items():
        view.note(view.t("common.missing", name=name, problem=problem), "problem")
