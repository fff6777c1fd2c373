"""docs/settings.md matches the code: every key, its default, and whether a change applies immediately."""

from __future__ import annotations

import fnmatch
import re

import pytest
from tests import settings_page

from cometmq.broker.base.config import (
    FIELD_OF_KEY,
    NOT_BUILT,
    NOT_BY_REQUEST,
    STORE_KEYS,
    WITHOUT_USE,
    BrokerConfig,
)
from cometmq.namesrv.config import FIELDS, NamesrvConfig
from cometmq.protocol.java_properties import parse_properties
from cometmq.store import MessageStore
from cometmq.store.base.config import WIRE_NAMES, StoreConfig

PAGE = settings_page.PAGE.read_text()
ROWS = {row[1]: row for row in settings_page.OF_A_BROKER.finditer(PAGE)}
INERT = PAGE[PAGE.index("## Without effect") :]
SPEAK_FOR_THEMSELVES = {"brokerName", "brokerClusterName"}


def test_every_setting_with_an_effect_has_its_row_and_no_other_has():
    assert ROWS.keys() == STORE_KEYS | FIELD_OF_KEY.keys()


def test_page_and_files_are_those_that_the_configuration_makes():
    assert settings_page.written(PAGE) == PAGE, "python -m tests.settings_page"
    for path, text in settings_page.conf_files(PAGE).items():
        assert path.read_text() == text, "python -m tests.settings_page"


def test_every_setting_has_words():
    assert [key for key, row in ROWS.items() if not row[5].strip() and key not in SPEAK_FOR_THEMSELVES] == []


@pytest.mark.parametrize(
    ("path", "read"),
    [
        (settings_page.BROKER_CONF, BrokerConfig.from_properties),
        (settings_page.NAMESRV_CONF, NamesrvConfig.from_properties),
    ],
)
def test_a_commented_file_can_be_used_as_it_is(path, read, caplog):
    lines = [line[1:] for line in path.read_text().splitlines() if re.match(r"#[\w.]+=.", line)]
    read(parse_properties("\n".join(lines)))
    assert caplog.messages == []


def test_every_setting_of_the_name_server_has_its_row():
    table = PAGE[PAGE.index("## Name server") : PAGE.index("## Without effect")]
    assert {row[1] for row in settings_page.OF_A_NAME_SERVER.finditer(table)} == FIELDS.keys()


def test_what_requests_may_not_change_is_named():
    text = PAGE[: PAGE.index("## Store")]
    named = re.findall(r"`([\w.*]+)`", text[text.index("Requests cannot change") :])
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
    # String settings are paths and names. The last two are read only at the start, whatever is shown later.
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
