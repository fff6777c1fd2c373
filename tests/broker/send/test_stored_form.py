"""The stored form of a client's properties, and the cache of known properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker.send.stored_form import StoredForms, sent_properties, stored_form, stored_forms
from cometmq.errors import CommandError
from cometmq.protocol.properties.values import (
    decode_properties,
    encode_properties,
    has_stray_separator,
    index_keys,
    stored_tags_code,
)

CLUSTER = b"CLUSTER\x01DefaultCluster"


@pytest.mark.parametrize(
    ("sent", "stored", "wait"),
    [
        (b"", CLUSTER, True),
        (b"WAIT\x01true", CLUSTER, True),
        (b"WAIT\x01false", CLUSTER, False),
        (b"\x02WAIT\x01false", CLUSTER, False),
        (b"WAIT\x01false\x02", CLUSTER, False),
        (b"KEYS\x01k\x02WAIT\x01true", b"KEYS\x01k\x02" + CLUSTER, True),
        (b"WAIT\x01true\x02KEYS\x01k", b"KEYS\x01k\x02" + CLUSTER, True),
        (b"KEYS\x01k\x02WAIT\x01FALSE\x02TAGS\x01a\x02", b"KEYS\x01k\x02TAGS\x01a\x02" + CLUSTER, False),
        (b"KEYS\x01k\x02", b"KEYS\x01k\x02" + CLUSTER, True),
        (b"MYWAIT\x01false", b"MYWAIT\x01false\x02" + CLUSTER, True),
        (b"a\x01WAIT\x01", b"a\x01WAIT\x01\x02" + CLUSTER, True),
        (b"CLUSTER\x01Elsewhere\x02KEYS\x01k", b"KEYS\x01k\x02" + CLUSTER, True),
        (b"KEYS\x01k\x02CLUSTER\x01Elsewhere\x02WAIT\x01true", b"KEYS\x01k\x02" + CLUSTER, True),
        (b"CLUSTER\x01Elsewhere", CLUSTER, True),
        (b"POP_CK\x010 1 2\x02KEYS\x01k\x02MYPOP_CK\x01x", b"KEYS\x01k\x02MYPOP_CK\x01x\x02" + CLUSTER, True),
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
    assert not text.endswith(b"\x02")


# There are few pieces, so that examples share all but the unique key and values contain property names.
PIECES = st.one_of(
    st.sampled_from(
        [b"\x01", b"\x02", b"B2", b"X", b"UNIQ_KEY\x01", b"UNIQ_KEY\x01A1", b"\x02UNIQ_KEY\x01C3"]
    ),
    st.sampled_from([b"\x02", b"TAGS\x01", b"WAIT\x01", b"WAIT\x01false", b"CLUSTER\x01", b"DELAY\x01"]),
)
remembering = stored_forms("DefaultCluster")


@given(st.lists(st.lists(PIECES, max_size=8).map(b"".join), min_size=2, max_size=4))
def test_remembered_forms_are_what_would_be_derived(texts):
    for text in texts:
        stored, waits = stored_form(text, CLUSTER)
        if has_stray_separator(stored):
            with pytest.raises(CommandError, match="separator"):
                remembering.find(text)
            continue
        form, unique = remembering.find(text)
        assert form.before + unique + form.behind == stored
        assert not form.only_key or index_keys(stored) == [unique]
        plain = b"DELAY\x01" not in stored and b"TRAN_MSG\x01" not in stored
        assert (form.tags_code, form.waits, form.plain) == (stored_tags_code(stored), waits, plain)


def test_5x_senders_get_what_5x_consumers_trace_by_and_keep_wait():
    forms = StoredForms("C", "North", True)

    def stored(sent, version):
        form, unique = forms.find(sent, version)
        return decode_properties(form.before + unique + form.behind)

    sent = "UNIQ_KEY\x01K\x02WAIT\x01false\x02MSG_REGION\x01South\x02TRACE_ON\x01false"
    theirs = {"UNIQ_KEY": "K", "CLUSTER": "C"}
    assert stored(sent, 407) == {**theirs, "MSG_REGION": "South", "TRACE_ON": "false"}
    theirs["WAIT"] = "false"
    assert not forms.find(sent, 453)[0].waits
    assert stored(sent, 453) == {**theirs, "MSG_REGION": "North", "TRACE_ON": "true"}
    forms.configure("East", False)
    assert stored(sent, 453) == {**theirs, "MSG_REGION": "East", "TRACE_ON": "false"}


def test_no_properties_are_an_empty_string():
    assert sent_properties(None) == sent_properties("") == b""
