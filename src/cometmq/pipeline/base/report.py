"""A report of a job: one self-contained HTML file with facts, tables and plots.

Plots are SVG images drawn by matplotlib and embedded in the file as data. A page has no script, and its
content security policy forbids browsers to load anything, so names taken from messages can do no harm. The
file also stays small: plotly's plots could be zoomed, but each file would hold 4.5 MB of JavaScript.
"""

from __future__ import annotations

import base64
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS_MAX = 500  # maximum rows of a table
BARS_MAX = 40
LINES_MAX = 12
POINTS_MAX = 2000  # maximum number of points in a plotted line
_NAME = 40  # maximum characters of a name in a plot
_CELL = 200  # maximum characters of a text in a table
_TIMES_MS = (10**12, 253_402_300_800_000)  # values in ms that are times (2001 to 9999), not durations
_RC: Any = {"svg.fonttype": "none", "text.parse_math": False, "text.usetex": False, "font.size": 9.0}
_STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}"
    "h1{font-size:1.5em}h2{font-size:1.1em;margin:1.6em 0 .4em}table{border-collapse:collapse}"
    "th,td{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
    "td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}.note{color:#666}"
    ".wide{overflow-x:auto}"
)
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="note">{made}</p>
{parts}
</body>
</html>
"""

Value = str | int | float | bool | datetime | None


class Report:
    """A page whose parts appear as they are added. It tells that parts beyond a limit are omitted."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._facts: list[tuple[str, Value]] = []
        self._parts: list[str] = []

    def fact(self, name: str, value: Value) -> None:
        """Add a line to the table of facts at the top of the report."""
        self._facts.append((name, value))

    def summary(self, summary: msgspec.Struct) -> None:
        """Add the fields of a job's summary: single values as facts, lists of structs as tables."""
        if (complete := getattr(summary, "complete", None)) is not None:
            self.fact("complete", complete)
        for name in summary.__struct_fields__:
            value, words = getattr(summary, name), name.replace("_", " ")
            if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
                columns = value[0].__struct_fields__
                rows = ([_timed(column, getattr(row, column)) for column in columns] for row in value)
                self.table(words.capitalize(), [column.replace("_", " ") for column in columns], rows)
            elif isinstance(value, list):
                self.fact(words, ", ".join(map(str, value)) or "none")
            elif isinstance(value, dict):
                self.fact(words, ", ".join(f"{key}: {item}" for key, item in value.items()) or "none")
            elif name != "complete":
                self.fact(words, _timed(name, value))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        """Add a table of the first `ROWS_MAX` rows. Columns of numbers are right-aligned."""
        given = iter(rows)
        shown = [list(row) for row in islice(given, ROWS_MAX)]
        note = f"only the first {ROWS_MAX:,} rows" if next(given, None) is not None else ""
        self._add(title, _table(columns, shown) if shown else '<p class="note">none</p>', note)

    def bars(self, title: str, values: Mapping[str, float], unit: str = "") -> None:
        """Add a plot with one bar for each name, in the given order, with at most `BARS_MAX` bars."""
        shown = list(islice(values.items(), BARS_MAX))
        note = f"only {BARS_MAX} of {len(values):,}" if len(values) > BARS_MAX else ""
        if not shown:
            return self._add(title, '<p class="note">none</p>')

        def draw(axes: Axes) -> None:
            places = range(len(shown))
            axes.barh(places, [value for _, value in shown])
            axes.set_yticks(places, [printable(name, _NAME) for name, _ in shown])
            axes.invert_yaxis()
            axes.set_xlabel(printable(unit, _NAME))
            axes.margins(y=0.02)

        return self._add(title, _image(title, draw, 0.6 + 0.25 * len(shown)), note)

    def lines(
        self,
        title: str,
        lines: Mapping[str, Sequence[tuple[float, float]]],
        unit: str = "",
        *,
        times: bool = False,
    ) -> None:
        """Add a plot with a line of (x, y) points for each name.

        The x values are seconds since a start that the caller chooses. With `times`, they are seconds since
        1970 and are shown as times in UTC. A plot has at most `LINES_MAX` lines with at most `POINTS_MAX`
        points each; from longer lines, points are selected evenly.
        """
        shown = [(name, _thinned(points)) for name, points in islice(lines.items(), LINES_MAX) if points]
        note = f"only {LINES_MAX} of {len(lines):,}" if len(lines) > LINES_MAX else ""
        if not shown:
            return self._add(title, '<p class="note">none</p>')

        def draw(axes: Axes) -> None:
            drawn = []
            for _, points in shown:
                xs: list[Any] = [datetime.fromtimestamp(x, UTC) if times else x for x, _ in points]
                marker = "." if len(xs) < 50 else ""
                drawn += axes.plot(xs, [y for _, y in points], linewidth=1.2, marker=marker)
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.set_ylabel(printable(unit, _NAME))
            axes.set_xlabel("UTC" if times else "s")
            axes.grid(alpha=0.3)
            if len(shown) > 1:
                axes.legend(drawn, [printable(name, _NAME) for name, _ in shown], fontsize="small")

        return self._add(title, _image(title, draw, 3.0), note)

    def html(self) -> str:
        facts = _table(["", ""], [[name, value] for name, value in self._facts], head=False)
        return _PAGE.format(
            title=_text(self.title),
            policy=_POLICY,
            style=_STYLE,
            made=f"made by CometMQ, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            parts="\n".join([facts, *self._parts]),
        )

    def write(self, path: str) -> None:
        """Write the page to a file, completely or not at all. Raises OSError."""
        descriptor, made = tempfile.mkstemp(prefix=".report-", dir=os.path.dirname(path) or ".")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(self.html())
            os.chmod(made, 0o644)
            os.replace(made, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise

    def _add(self, title: str, part: str, note: str = "") -> None:
        said = f'\n<p class="note">{_text(note)}</p>' if note else ""
        self._parts.append(f"<h2>{_text(title)}</h2>\n{part}{said}")


def _timed(name: str, value: Value) -> Value:
    """Return a value as a datetime if its field's name and its size tell that it is a time in ms."""
    if name.endswith("_ms") and isinstance(value, int | float) and _TIMES_MS[0] < value < _TIMES_MS[1]:
        return datetime.fromtimestamp(value / 1000, UTC)
    return value


def _text(value: Value) -> str:
    """Return the value as text: numbers with thousands separators, names without unprintable characters."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return escape(printable(value, _CELL))


def _table(columns: Sequence[str], rows: Sequence[Sequence[Value]], head: bool = True) -> str:
    number = [isinstance(value, int | float) for value in rows[0]] if rows else []
    kinds = [' class="n"' if is_number and head else "" for is_number in number] or [""] * len(columns)

    def line(tag: str, cells: Sequence[Value]) -> str:
        marked = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{_text(cell)}</{tag}>' for kind, cell in marked)}</tr>"

    lines = [line("th", columns)] if head else []
    lines += [line("td", row) for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = -(-len(points) // POINTS_MAX)
    return points[::step] if step > 1 else points


def _image(title: str, draw: Callable[[Axes], None], height: float) -> str:
    """Return an SVG image of 9 inches by `height` as a data URI."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_RC), warnings.catch_warnings():
        # Names may contain glyphs that matplotlib's font lacks. The warning about them is irrelevant,
        # because matplotlib only measures the text and the browser draws it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(9, height), layout="constrained")
        draw(figure.add_subplot())
        made = io.BytesIO()
        figure.savefig(made, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(made.getvalue()).decode("ascii")
    return f'<img alt="{_text(title)}" src="data:image/svg+xml;base64,{data}">'
