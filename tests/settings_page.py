"""docs/settings.md and the commented files conf/broker.conf and conf/namesrv.conf, from the typed settings.

The page describes the effect of each setting. `python -m tests.settings_page` updates defaults, ranges and
*live* or *start*, adds rows for new settings, whose descriptions must be filled in, and writes the files.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from cometmq.broker.base.config import AT_NEXT_START, NOT_BY_REQUEST, RANGES, BrokerConfig
from cometmq.namesrv.config import RANGES as NAMESRV_RANGES
from cometmq.namesrv.config import NamesrvConfig
from cometmq.settings import Range
from cometmq.store.base.config import RANGES as STORE_RANGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
BROKER_CONF = ROOT / "src" / "cometmq" / "conf" / "broker.conf"
NAMESRV_CONF = ROOT / "src" / "cometmq" / "conf" / "namesrv.conf"
OF_A_BROKER = re.compile(r"^\| `([\w.]+)` \|(.*?)\|(.*?)\| (live|start) \|(.*)\|$", re.MULTILINE)
OF_A_NAME_SERVER = re.compile(r"^\| `([\w.]+)` \|(.*?)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
ELSEWHERE = {"brokerName", "brokerIP1", "namesrvAddr"}
"""Settings whose defaults depend on the machine or the environment; the page describes them in words."""


def _range(ranges: Mapping[str, Range], key: str) -> str:
    found = ranges.get(key)
    return f" {found.low} to {found.high} " if found else " "


def _default(key: str, text: str, in_words: str) -> str:
    if key in ELSEWHERE:
        return in_words
    return f" `{text}` " if text else " "


def broker_row(row: re.Match[str]) -> str:
    """Return the correct form of a row in the broker's tables."""
    key, words, _, _, effect = row.groups()
    when = "start" if key in NOT_BY_REQUEST | AT_NEXT_START else "live"
    text = BrokerConfig().properties().get(key, "")
    limits = _range({**RANGES, **STORE_RANGES}, key)
    return f"| `{key}` |{_default(key, text, words)}|{limits}| {when} |{effect}|"


def namesrv_row(row: re.Match[str]) -> str:
    """Return the correct form of a row in the name server's table."""
    key, _, _, effect = row.groups()
    text = NamesrvConfig().to_properties().get(key, "").replace(str(Path.home()), "~")
    return f"| `{key}` |{_default(key, text, '')}|{_range(NAMESRV_RANGES, key)}|{effect}|"


def _parts(page: str) -> tuple[str, str, str]:
    """Return the page up to the name server's table, that table, and the rest."""
    first, second = page.index("## Name server"), page.index("## Without effect")
    return page[:first], page[first:second], page[second:]


def written(page: str) -> str:
    """Return the page with the current defaults and ranges."""
    broker, namesrv, rest = _parts(page)
    return OF_A_BROKER.sub(broker_row, broker) + OF_A_NAME_SERVER.sub(namesrv_row, namesrv) + rest


def conf_files(page: str) -> dict[Path, str]:
    """Return the commented settings files with the page's descriptions."""
    broker, namesrv, _ = _parts(page)
    shown = BrokerConfig().properties()
    of_broker = [(row[1], shown.get(row[1], ""), row[5]) for row in OF_A_BROKER.finditer(broker)]
    of_namesrv = [
        (row[1], row[2].strip("` "), row[4])
        for row in OF_A_NAME_SERVER.finditer(namesrv)
        if row[1] in NamesrvConfig().to_properties()
    ]
    return {
        BROKER_CONF: _conf("mqbroker -c broker.conf", of_broker),
        NAMESRV_CONF: _conf("mqnamesrv -c namesrv.conf", of_namesrv),
    }


def _conf(command: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"# Every setting with its default, commented out; {command}. docs/settings.md has the ranges."]
    for key, default, effect in rows:
        words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", effect).replace("`", "").replace("\\|", "|").strip()
        lines += ["", *textwrap.wrap(words, 108, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{key}={'' if key in ELSEWHERE else default}")
    return "\n".join(lines) + "\n"


def _with_new(page: str, keys: set[str], heading: str, row: Callable[[str], str]) -> str:
    """Add rows for settings without one, at the end of the table under a heading."""
    for key in sorted(keys - set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))):
        end = page.index("\n\n", page.index("|---", page.index(heading)))
        page = f"{page[:end]}\n{row(key)}{page[end:]}"
    return page


def main() -> None:
    """Write the page and the files."""
    from cometmq.broker.base.config import FIELD_OF_KEY, STORE_KEYS
    from cometmq.namesrv.config import FIELDS

    page = PAGE.read_text()
    page = _with_new(page, set(STORE_KEYS), "## Store", "| `{}` | | | start | |".format)
    page = _with_new(page, set(FIELD_OF_KEY), "## Broker", "| `{}` | | | start | |".format)
    broker, namesrv, rest = _parts(page)
    page = broker + _with_new(namesrv, set(FIELDS), "## Name server", "| `{}` | | | |".format) + rest
    PAGE.write_text(written(page))
    for path, text in conf_files(written(page)).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
