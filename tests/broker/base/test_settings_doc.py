"""docs/settings.md says what the code does: every key, its default, whether it counts at once."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from cometmq.broker.base.config import FIELD_OF_KEY, NOT_BY_REQUEST, RANGES, STORE_KEYS, BrokerConfig
from cometmq.broker.base.inert import NOT_BUILT, WITHOUT_USE
from cometmq.namesrv.config import FIELDS, NamesrvConfig
from cometmq.namesrv.config import RANGES as NAMESRV_RANGES
from cometmq.store import MessageStore
from cometmq.store.base.config import RANGES as STORE_RANGES
from cometmq.store.base.config import WIRE_NAMES, StoreConfig

PAGE = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
ROWS = {
    row[1]: row
    for row in re.finditer(r"^\| `([\w.]+)` \|(.*?)\|(.*?)\| (live|start) \|.*\|$", PAGE, re.MULTILINE)
}
INERT = PAGE[PAGE.index("## Without effect") :]
ELSEWHERE = {"brokerName", "brokerIP1", "namesrvAddr"}  # defaults that the machine or the environment gives


def test_every_setting_with_an_effect_has_its_row_and_no_other_has():
    assert ROWS.keys() == STORE_KEYS | FIELD_OF_KEY.keys()


@pytest.mark.parametrize("key", sorted(ROWS.keys() - ELSEWHERE))
def test_a_default(key):
    assert ROWS[key][2].strip("` ") == BrokerConfig().properties()[key]


def test_every_setting_of_the_name_server_has_its_row():
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|([^|]*)\|[^|]*\|$", PAGE, re.MULTILINE)
    shown = NamesrvConfig().to_properties()
    home = str(Path("~").expanduser())
    assert {key: default.replace("~", home) for key, default, _ in rows} == {
        key: shown[key] for key in FIELDS
    }
    ranges = {key: f"{found.low} to {found.high}" for key, found in NAMESRV_RANGES.items()}
    assert {key: text.strip() for key, _, text in rows if text.strip()} == ranges


@pytest.mark.parametrize("key", sorted(ROWS))
def test_a_range(key):
    found = {**RANGES, **STORE_RANGES}.get(key)
    assert ROWS[key][3].strip() == (f"{found.low} to {found.high}" if found else "")


def test_what_requests_may_not_change_is_named():
    text = PAGE[: PAGE.index("## Store")]
    named = re.findall(r"`([\w.*]+)`", text[text.index("Not by request") :])
    for key in NOT_BY_REQUEST:
        assert any(fnmatch.fnmatchcase(key, pattern) for pattern in named), key


def test_every_setting_without_effect_is_named():
    named = re.findall(r"`([\w*]+)(?:=true)?`", INERT)
    for key in (*WITHOUT_USE, *NOT_BUILT):
        assert any(fnmatch.fnmatchcase(key, pattern) for pattern in named), key
    for key in NOT_BUILT:
        assert key in named


def test_what_a_running_store_takes_over_is_what_the_page_calls_live(tmp_path):
    store = MessageStore.open(
        StoreConfig(
            store_path_root_dir=str(tmp_path),
            mapped_file_size_commit_log=1 << 20,
            d_leger_group="g",
            d_leger_self_id="n0",
        )
    )
    # The text ones are paths and words; the last two are read once at the start, whatever is shown later.
    numbers = {
        field: value for field in WIRE_NAMES if not isinstance(value := getattr(store.config, field), str)
    }
    for field in ("message_index_safe", "check_crc_on_recover"):
        del numbers[field]
    other = {field: not value if isinstance(value, bool) else value + 1 for field, value in numbers.items()}
    store.configure(store.config.replace(**other))
    for field, value in other.items():
        assert (getattr(store.config, field) == value) is (ROWS[WIRE_NAMES[field]][4] == "live"), field
    store.close()
