"""Cached results for property strings that differ only in the unique key equal those of a full parse."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tests.protocol.properties.strategies import PROPERTIES

from cometmq.protocol.properties.template import (
    MAX_BYTES,
    MAX_TEMPLATES,
    Template,
    TemplateCache,
    code_and_key,
    codes_and_keys,
    template_fields,
)
from cometmq.protocol.properties.values import index_keys, stored_tags_code

NINE_BYTES = st.binary(min_size=9, max_size=9)


def cache() -> TemplateCache[Template]:
    return TemplateCache(lambda stored, unique: Template(*template_fields(stored, unique)))


remembering = cache()


@given(st.lists(PROPERTIES, min_size=2, max_size=4))
def test_a_remembered_template_gives_the_string_again_and_its_facts(texts):
    for text in texts:
        template, unique = remembering.find(text)
        assert template.before + unique + template.behind == text
        assert template.tags_code == stored_tags_code(text)
        assert not template.only_key or index_keys(text) == [unique]


def test_a_unique_key_is_known_to_be_the_only_one_if_no_other_key_stands_beside_it():
    forms = cache()
    for text in (b"UNIQ_KEY\x01A1\x02TAGS\x01t", b"UNIQ_KEY\x01A1\x02KEYS\x01k"):
        forms.find(text)
    alone, unique = forms.find(b"UNIQ_KEY\x01B2\x02TAGS\x01t")
    assert (alone.only_key, unique) == (True, b"B2")
    assert not forms.find(b"UNIQ_KEY\x01B2\x02KEYS\x01k")[0].only_key
    assert len(forms) == 2


def test_long_strings_are_not_remembered():
    forms = cache()
    for number in range(100):
        short = b"UNIQ_KEY\x01A1\x02TAGS\x01%d" % number
        long = short + b"\x02mine\x01" + b"m" * MAX_BYTES
        for text in (short, long, short, long):
            template, unique = forms.find(text)
            assert template.before + unique + template.behind == text
    assert len(forms) == 100


def test_properties_that_always_differ_are_not_remembered_for_long():
    forms = cache()
    for number in range(3 * MAX_TEMPLATES):
        text = b"KEYS\x01k%d\x02UNIQ_KEY\x01%032X\x02TAGS\x01a" % (number, number)
        template, unique = forms.find(text)
        assert template.before + unique + template.behind == text
    assert len(forms) <= 1


@given(PROPERTIES)
@example(b"TAGS\x01a UNIQ_KEY\x01b\x02")
@example(b"TAGS\x01a UNIQ_KEY\x01c\x02")
def test_remembered_codes_and_keys_are_those_of_the_properties(properties):
    for _ in range(2):
        code, key = code_and_key(properties)
        assert code == stored_tags_code(properties)
        assert key is None or index_keys(properties) == [key]


def codes_and_keys_are_those_of_each(properties):
    codes, keys = codes_and_keys(properties)
    assert codes == [stored_tags_code(each) for each in properties]
    assert keys is None or [[key] for key in keys] == [index_keys(each) for each in properties]
    return keys


@given(st.lists(PROPERTIES, min_size=1, max_size=5))
def test_codes_and_keys_of_many_are_those_of_each(properties):
    codes_and_keys_are_those_of_each(properties)


@given(st.lists(NINE_BYTES, min_size=1), PROPERTIES, PROPERTIES)
def test_codes_and_keys_of_one_form_are_those_of_each(keys, before, behind):
    codes_and_keys_are_those_of_each([before + b"\x02UNIQ_KEY\x01" + key + behind for key in keys])


def test_one_form_is_seen_as_such():
    keys = [b"%04d" % number for number in range(40)]
    found = codes_and_keys_are_those_of_each([b"UNIQ_KEY\x01" + key + b"\x02TAGS\x01t" for key in keys])
    assert found == keys
