"""JSON tables: Apache's format, Apache's order of file operations, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import StoreCorrupt
from cometmq.store import JsonTable
from cometmq.store.tables.table_checks import render

TOPICS = {
    "dataVersion": {"counter": 2, "timestamp": 1700000000000},
    "topicConfigTable": {
        "TopicTest": {"order": False, "perm": 6, "topicFilterType": "SINGLE_TAG", "note": None}
    },
}


def test_text_is_apaches() -> None:
    assert render(TOPICS) == (
        '{\n\t"dataVersion":{\n\t\t"counter":2,\n\t\t"timestamp":1700000000000\n\t},\n'
        '\t"topicConfigTable":{\n\t\t"TopicTest":{\n\t\t\t"order":false,\n\t\t\t"perm":6,\n'
        '\t\t\t"topicFilterType":"SINGLE_TAG",\n\t\t\t"note":null\n\t\t}\n\t}\n}'
    )
    assert render({"offsetTable": {"%RETRY%g1@g1": {0: 0}, "TopicTest@g1": {0: 250, 1: 251}}}) == (
        '{\n\t"offsetTable":{\n\t\t"%RETRY%g1@g1":{0:0\n\t\t},\n\t\t"TopicTest@g1":{0:250,1:251\n\t\t}\n\t}\n}'
    )
    assert render({"offsetTable": {3: 202, 4: 7}}) == '{\n\t"offsetTable":{3:202,4:7\n\t}\n}'
    assert render({"a": {}, "b": [], "c": ["x", 1.5, True]}) == (
        '{\n\t"a":{},\n\t"b":[],\n\t"c":[\n\t\t"x",\n\t\t1.5,\n\t\ttrue\n\t]\n}'
    )
    assert render({"订单": 'a"b\\c\n'}) == '{\n\t"订单":"a\\"b\\\\c\\n"\n}'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"offsetTable":{3:202,4:7\n\t}\n}', {"offsetTable": {"3": 202, "4": 7}}),
        ('{"offsetTable":{"3":202}}', {"offsetTable": {"3": 202}}),
        ("{a:'b'}", {"a": "b"}),
        ("{}", {}),
    ],
)
def test_both_dialects_are_read(tmp_path: Path, text: str, value: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    assert JsonTable(str(path)).load() == value


def test_what_is_saved_is_loaded_and_the_previous_text_is_the_backup(tmp_path: Path) -> None:
    table = JsonTable(str(tmp_path / "config" / "topics.json"))
    assert table.load() == {}
    table.save({**TOPICS, "dataVersion": None})
    table.save(TOPICS)
    assert table.load() == TOPICS
    assert JsonTable(table.path + ".bak").load() == {**TOPICS, "dataVersion": None}
    assert sorted(path.name for path in (tmp_path / "config").iterdir()) == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 100, b'{"n":', b"[1]", b"\xff\xfe{", b'{"n":2}trailing', None]
)
def test_a_damaged_table_falls_back_to_its_backup(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "t.json"
    table = JsonTable(str(path))
    table.save({"n": 1})
    table.save({"n": 2})
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert table.load() == {"n": 1}
    table.save({"n": 3})  # must not replace the good backup with the damaged file
    assert table.load() == {"n": 3}
    path.unlink()
    assert table.load() == {"n": 1}


def test_a_table_damaged_beyond_its_backup_is_an_error_not_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"n":')
    (tmp_path / "t.json.bak").write_bytes(b"garbage")
    with pytest.raises(StoreCorrupt, match=r"t\.json"):
        JsonTable(str(path)).load()


def test_deep_nesting_is_damage_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(StoreCorrupt):
        JsonTable(str(path)).load()
