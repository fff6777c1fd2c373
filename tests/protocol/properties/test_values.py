"""Property strings: edits by slicing give what a dictionary would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import CommandError
from cometmq.protocol.properties import keys
from cometmq.protocol.properties.edits import (
    FORMS_LIMIT,
    LONGEST_FORM,
    LONGEST_TAG,
    StoredForms,
    append,
    drop,
    put,
    stored_form,
    tag_of,
    value_of,
)
from cometmq.protocol.properties.keys import index_keys, stored_tags_code
from cometmq.protocol.properties.text import (
    decode_properties,
    encode_properties,
    has_stray_separator,
    tags_code,
)

CLUSTER = "CLUSTER\x01DefaultCluster"


@pytest.mark.parametrize(
    ("sent", "stored", "wait"),
    [
        (None, CLUSTER, True),
        ("", CLUSTER, True),
        ("WAIT\x01true", CLUSTER, True),
        ("WAIT\x01false", CLUSTER, False),
        ("WAIT\x01false\x02", CLUSTER, False),
        ("KEYS\x01k\x02WAIT\x01true", f"KEYS\x01k\x02{CLUSTER}", True),
        ("WAIT\x01true\x02KEYS\x01k", f"KEYS\x01k\x02{CLUSTER}", True),
        ("KEYS\x01k\x02WAIT\x01FALSE\x02TAGS\x01a\x02", f"KEYS\x01k\x02TAGS\x01a\x02{CLUSTER}", False),
        ("KEYS\x01k\x02", f"KEYS\x01k\x02{CLUSTER}", True),
        ("MYWAIT\x01false", f"MYWAIT\x01false\x02{CLUSTER}", True),
        ("a\x01WAIT\x01", f"a\x01WAIT\x01\x02{CLUSTER}", True),
        ("CLUSTER\x01Elsewhere\x02KEYS\x01k", f"KEYS\x01k\x02{CLUSTER}", True),
        ("KEYS\x01k\x02CLUSTER\x01Elsewhere\x02WAIT\x01true", f"KEYS\x01k\x02{CLUSTER}", True),
        ("CLUSTER\x01Elsewhere", CLUSTER, True),
    ],
)
def test_what_is_stored_of_a_clients_properties(sent, stored, wait):
    assert stored_form(sent, CLUSTER) == (stored, wait)


NAMES = st.sampled_from(
    ["KEYS", "TAGS", "WAIT", "WAIT2", "XWAIT", "DELAY", "UNIQ_KEY", "CLUSTER", "a", "WAI"]
)
VALUES = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=5
)
MAPS = st.dictionaries(NAMES, VALUES, max_size=6)


@given(MAPS, st.booleans())
def test_storing_is_dropping_wait_and_adding_the_cluster(properties, last_separator):
    text, wait = stored_form(encode_properties(properties, last_separator), CLUSTER)
    expected = {name: value for name, value in properties.items() if name not in ("WAIT", "CLUSTER")}
    assert decode_properties(text) == {**expected, "CLUSTER": "DefaultCluster"}
    assert wait is (properties.get("WAIT", "true").lower() != "false")
    assert not text.endswith("\x02")


@given(MAPS, NAMES, VALUES, st.booleans())
def test_put_drop_and_value_of_agree_with_a_dictionary(properties, name, value, last_separator):
    text = encode_properties(properties, last_separator)
    assert value_of(text, name) == properties.get(name)
    without = {key: kept for key, kept in properties.items() if key != name}
    assert decode_properties(drop(text, name)) == without
    changed = put(text, name, value)
    assert value_of(changed, name) == value
    assert decode_properties(changed) == {**without, name: value}


def test_of_duplicates_the_last_counts():
    assert value_of("TAGS\x01a\x02TAGS\x01b", "TAGS") == "b"
    assert value_of("TAGS\x01a\x02KEYS\x01TAGS", "TAGS") == "a"
    assert value_of("TAGS\x01a\x02TAGS\x01b\x02TAGS\x01", "TAGS") == "b"
    assert drop("TAGS\x01a\x02KEYS\x01k\x02TAGS\x01b", "TAGS") == "KEYS\x01k"
    assert append("", "a\x01b") == "a\x01b"


def expected_form(properties):
    text, wait = stored_form(properties, CLUSTER)
    tag = tag_of(text)
    plain = "DELAY\x01" not in text and "TRAN_MSG\x01" not in text
    return text.encode(), 0 if tag is None else tags_code(tag), wait, plain


# Few pieces, so that examples share all but the unique key and names turn up inside of values.
PIECES = st.one_of(
    st.sampled_from(["\x01", "\x02", "B2", "X", "UNIQ_KEY\x01", "UNIQ_KEY\x01A1", "\x02UNIQ_KEY\x01C3"]),
    st.sampled_from(["\x02", "TAGS\x01", "WAIT\x01", "WAIT\x01false", "CLUSTER\x01", "DELAY\x01"]),
)
remembering = StoredForms(CLUSTER)


@given(st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=2, max_size=4))
def test_remembered_forms_are_what_would_be_derived(texts):
    for text in texts:
        expected = expected_form(text)
        if has_stray_separator(expected[0]):
            with pytest.raises(CommandError, match="separator"):
                remembering.of(text)
            continue
        *form, key = remembering.of(text)
        assert key is None or index_keys(form[0]) == [key]
        assert tuple(form) == expected


@given(st.lists(PIECES, max_size=8).map("".join))
def test_values_of_odd_strings_are_those_of_the_map(text):
    for name in ("UNIQ_KEY", "TAGS", "WAIT"):
        assert value_of(text, name) == decode_properties(text).get(name)


def test_a_unique_key_is_handed_to_the_index_only_if_no_other_key_stands_beside_it():
    forms = StoredForms(CLUSTER)
    for text in ("UNIQ_KEY\x01A1\x02TAGS\x01t", "UNIQ_KEY\x01A1\x02KEYS\x01k"):
        forms.of(text)
    assert forms.of("UNIQ_KEY\x01B2\x02TAGS\x01t")[4] == b"B2"
    assert forms.of("UNIQ_KEY\x01B2\x02KEYS\x01k")[4] is None


def test_long_strings_are_not_remembered():
    forms = StoredForms(CLUSTER)
    for number in range(100):
        tag = f"{number}" + "t" * LONGEST_TAG
        short = f"UNIQ_KEY\x01A1\x02TAGS\x01{tag}"
        long = f"{short}\x02mine\x01{'m' * LONGEST_FORM}"
        for text in (short, long, short, long):
            assert forms.of(text)[:4] == expected_form(text)
            stored_tags_code(text.encode())
    assert (len(forms._forms), len(forms._tag_codes)) == (100, 0)
    assert max(map(len, keys._tag_codes), default=0) <= LONGEST_TAG


def test_properties_that_always_differ_are_not_remembered_for_long():
    forms = StoredForms(CLUSTER)
    for number in range(3 * FORMS_LIMIT):
        text = f"KEYS\x01k{number}\x02UNIQ_KEY\x01{number:032X}\x02TAGS\x01a"
        assert forms.of(text)[:4] == expected_form(text)
    assert len(forms._forms) <= 1
