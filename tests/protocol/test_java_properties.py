"""Properties files, parsed and written like java.util.Properties."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.java_properties import PropertiesError, format_properties, parse_properties, set_values

CASES = [
    ("a=1", {"a": "1"}),
    ("a = 1", {"a": "1"}),
    ("a:1", {"a": "1"}),
    ("a 1", {"a": "1"}),
    ("a", {"a": ""}),
    ("a=", {"a": ""}),
    ("a==b", {"a": "=b"}),
    ("  a\t=\t1 2  ", {"a": "1 2  "}),
    ("# comment\n! other\n\n a=1", {"a": "1"}),
    ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
    ("a=1\na=2", {"a": "2"}),
    ("namesrvAddr=10.0.0.1:9876;10.0.0.2:9876", {"namesrvAddr": "10.0.0.1:9876;10.0.0.2:9876"}),
    ("a=one,\\\n    two", {"a": "one,two"}),
    ("a=one\\\\\nb=2", {"a": "one\\", "b": "2"}),
    ("a=one\\\n# no comment", {"a": "one# no comment"}),
    ("k\\\n  a=1", {"ka": "1"}),
    ("\\\n#a=1", {"#a": "1"}),
    ("\\\n\na=1", {"a": "1"}),
    ("a\\ b=c", {"a b": "c"}),
    ("a\\=b=c", {"a=b": "c"}),
    ("a=\\u00e9\\t\\q", {"a": "é\tq"}),
    ("a=\\uD83D\\uDE00", {"a": "😀"}),
    ("a=é", {"a": "é"}),
    ("a=C\\:\\\\data", {"a": "C:\\data"}),
    ("a=end\\", {"a": "end"}),
    ("", {}),
]


@pytest.mark.parametrize(("text", "pairs"), CASES)
def test_text_is_read_as_java_reads_it(text: str, pairs: dict[str, str]) -> None:
    assert parse_properties(text) == pairs


@pytest.mark.parametrize("value", ["\\u12", "\\u12g4", "\\u", "\\u 123", "\\u+123"])
def test_a_broken_unicode_escape_names_its_line(value: str) -> None:
    with pytest.raises(PropertiesError) as raised:
        parse_properties(f"# first\nok=1\nbad={value}")

    assert raised.value.line == 3
    assert pickle.loads(pickle.dumps(raised.value)).line == 3


@given(st.dictionaries(st.text(), st.text()))
def test_what_is_written_is_read_back(pairs: dict[str, str]) -> None:
    text = format_properties(pairs)

    assert text.isascii()
    assert parse_properties(text) == pairs


@given(st.text())
def test_any_text_is_read_or_refused_by_the_typed_error(text: str) -> None:
    try:
        pairs = parse_properties(text)
    except PropertiesError:
        return

    assert parse_properties(format_properties(pairs)) == pairs


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("# why\na = 1\n\nb=2\n", "# why\na = 9\n\nb=2\nnew=8\n"),
        ("a=1\r\n! end\r\n", "a=9\r\n! end\r\nnew=8\r\n"),
        ("a=1", "a=9\nnew=8\n"),
        ("a=1\nb=x\na=2", "a=1\nb=x\na=9\nnew=8\n"),
        ("a=1,\\\n   2\nb=3\n", "a=9\nb=3\nnew=8\n"),
        ("  a : 1\rb=2\r", "  a : 9\rb=2\rnew=8\r"),
        ("\\u0061=1\n#a=2\n", "\\u0061=9\n#a=2\nnew=8\n"),
        ("a\nb=\\u00zz\n", "a=9\nb=\\u00zz\nnew=8\n"),
        ("b=2\\", "b=2\\\n\na=9\nnew=8\n"),
        ("b=2\\\n", "b=2\\\n\na=9\nnew=8\n"),
        ("b=2\na=1\\", "b=2\na=9\nnew=8\n"),
        ("# c\\\na=1\n", "# c\\\na=9\nnew=8\n"),
        ("a\\\nb=1\n", "a\\\nb=1\na=9\nnew=8\n"),
        (" n\\\n e\\\nw : 1\n", " new : 8\na=9\n"),
        ("", "a=9\nnew=8\n"),
    ],
)
def test_values_are_set_and_the_rest_stays(text: str, after: str) -> None:
    assert set_values(text, {"a": "9", "new": "8"}) == after


@given(
    st.text("ab=: \\#!\n\r\tu0", max_size=40),
    st.text("ab#", max_size=2) | st.text(max_size=8),
    st.text(max_size=8),
)
def test_values_set_in_any_text_are_read_back(text: str, key: str, value: str) -> None:
    try:
        before = parse_properties(text)
    except PropertiesError:
        return
    value = "".join(each for each in value if not "\ud800" <= each <= "\udfff")
    assert parse_properties(set_values(text, {key: value})) == {**before, key: value}
