"""SQL92 filters beyond the recorded ones: limits, errors, and arbitrary texts and messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import SqlError
from cometmq.protocol.sql import MAX_EXPRESSION_LENGTH, SqlFilter, compile_sql
from cometmq.protocol.sql.grammar import DEEPEST, MAX_OPERANDS
from cometmq.protocol.sql.java_values import Long, Mismatch, order, to_bool, to_double, to_int, to_long

T, F, N = True, False, None
WORDS = [
    "a", "b", "s", "t", "=", "<>", ">", ">=", "<", "<=", "(", ")", ",", "NOT", "AND", "OR", "IN", "IS",
    "NULL", "BETWEEN", "TRUE", "FALSE", "CONTAINS", "STARTSWITH", "ENDSWITH", "5", "-5", "1.5", "'x'", "''",
    "3000000000", "'", "0.0", "5.", ".5", "007", "9999999999999999999", "--", "/*", "*/", "#", "-", "+", ";",
    "订", "\n",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=25).map("".join),
)
PROPERTIES = st.dictionaries(
    st.sampled_from("abst"),
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["5", "-5", "1.5", "NaN", "1e999", "0x1p9999", "true", "9" * 5000]),
    ),
)


@pytest.mark.parametrize(
    ("left", "both", "either"),
    [
        ((T, T), T, T), ((T, F), F, T), ((F, T), F, T), ((F, F), F, F),
        ((T, N), N, T), ((N, T), N, T), ((F, N), F, N), ((N, F), F, N), ((N, N), N, N),
    ],
)  # fmt: skip
def test_logic_has_three_values(
    left: tuple[bool | None, bool | None], both: bool | None, either: bool | None
) -> None:
    words = {T: "TRUE", F: "FALSE", N: "NULL"}
    one, other = (words[value] for value in left)

    assert value(f"{one} AND {other}") is both
    assert value(f"{one} OR {other}") is either
    assert value(f"NOT {one}") is (None if left[0] is None else not left[0])


def value(text: str, **properties: str) -> bool | None:
    return compile_sql(text).value(properties.get)


def test_only_true_matches() -> None:
    properties = {"a": "5"}
    outcomes = [
        compile_sql(f"a = 5 AND {word}").matches(properties.get) for word in ("TRUE", "FALSE", "NULL")
    ]

    assert outcomes == [True, False, False]
    assert not compile_sql("a > 1 OR TRUE = a").matches({"a": "x"}.get)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "the expression ends where a property or a literal is wanted"),
        ("a > ", 5, "the expression ends"),
        ("a > > 5", 5, "'>' stands where a property or a literal is wanted"),
        ("(a = 5", 7, "where a closing bracket is wanted"),
        ("a = 5 AND (b = 1 c", 18, "'c' stands where a closing bracket is wanted"),
        ("a IN 'x'", 6, "where an opening bracket is wanted"),
        ("a IN ('x' 'y')", 11, "where a comma or a closing bracket is wanted"),
        ("a IN (5)", 7, "where a text in quotes is wanted"),
        ("a NOT 5", 7, "where BETWEEN or IN is wanted"),
        ("a IS NOT 5", 10, "where NULL is wanted"),
        ("a = 'x", 5, "a text without its closing quote"),
        ("a = #", 5, "'#', which means nothing"),
        ("a = NULL", 5, "write IS NULL"),
        ("a > 'x'", 5, "only numbers and properties can be compared by >"),
        ("a BETWEEN 5 AND 1", 11, "the first number is above the second"),
        ("a = 0.0", 5, "is not a positive double"),
        ("a = 9223372036854775808", 5, "is above 9223372036854775807"),
        ("a = 1 AND 5", 11, "expected a condition"),
        ("TRUE = 5", 8, "can only be compared with TRUE and FALSE"),
        ("5 IN ('5')", 1, "IN needs a property before it"),
        ("x" * (MAX_EXPRESSION_LENGTH + 1), MAX_EXPRESSION_LENGTH + 1, f"at most {MAX_EXPRESSION_LENGTH}"),
    ],
)
def test_an_error_names_the_column_and_the_problem(text: str, column: int, words: str) -> None:
    with pytest.raises(SqlError, match=words.replace("(", r"\(").replace(")", r"\)")) as refused:
        compile_sql(text)

    assert refused.value.column == column


@pytest.mark.parametrize(
    ("fits", "exceeds"),
    [
        ("NOT " * (DEEPEST - 1) + "TRUE", "NOT " * DEEPEST + "TRUE"),
        (" OR ".join(["a = 5"] * (MAX_OPERANDS // 2)), " OR ".join(["a = 5"] * (MAX_OPERANDS // 2 + 1))),
        (f"a IN ({','.join(['5'.join(2 * chr(39))] * (MAX_OPERANDS - 1))})",
         f"a IN ({','.join(['5'.join(2 * chr(39))] * MAX_OPERANDS)})"),
        (" = ".join(["a"] * DEEPEST), " = ".join(["a"] * (DEEPEST + 1))),
        ("a = -1 OR " * 200 + "NOT " * 60 + "a IS NOT NULL", "-" * MAX_EXPRESSION_LENGTH),
    ],
    ids=["depth", "operands", "list", "chain", "signs"],
)  # fmt: skip
def test_an_expression_is_bounded(fits: str, exceeds: str) -> None:
    compile_sql(fits)
    with pytest.raises(SqlError, match=r"more than|nested deeper than"):
        compile_sql(exceeds)


def test_brackets_within_each_other_cost_no_depth() -> None:
    assert value("(" * 4000 + "a = 5" + ")" * 4000, a="5") is True


def test_the_words_of_5x_are_names_without_it() -> None:
    text = "contains = 'x'"
    assert compile_sql(text, string_words=False).matches({"contains": "x"}.get)
    with pytest.raises(SqlError):
        compile_sql(text)
    assert value("a CONTAINS 'b'", a="abc") is True
    assert compile_sql("a CONTAINS 'b'", string_words=False).value({"a": "abc"}.get) is False


@given(TEXTS, st.booleans(), PROPERTIES)
def test_no_text_and_no_message_raises_anything_else(
    text: str, words: bool, properties: dict[str, str]
) -> None:
    try:
        found = compile_sql(text, string_words=words)
    except SqlError as error:
        assert 1 <= error.column <= len(text) + 1  # noqa: PT017 - most texts do not raise
    else:
        assert isinstance(found, SqlFilter)
        assert found.value(properties.get) in (True, False, None)
        assert found.matches(properties.get) is (found.value(properties.get) is True)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("left", "right", "sign"),
    [
        (5, Long(5), 0), (5, 5.0, 0), (Long(5), 6.5, -1), (5, "5", 0), ("5", 5, 0), (5, "+6", -1),
        (NAN, INFINITE, 1), (NAN, NAN, 0), (-0.0, 0.0, -1), (1.5, "NaN", -1), ("Infinity", 1.5, 1),
        (True, 5, -1), (5, True, -1), (True, False, 1), ("true", True, 0), ("x", "x", 0), (True, True, 0),
    ],
)  # fmt: skip
def test_values_of_different_kinds_are_ordered_as_java_does(left: object, right: object, sign: int) -> None:
    assert order(left, right) == sign  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (to_int, "2147483648"), (to_int, "-2147483649"), (to_int, " 5"), (to_int, "1_0"), (to_int, "5.0"),
        (to_int, ""), (to_int, "\U0001d7d1"), (to_int, "9" * 5000), (to_long, "9223372036854775808"),
        (to_double, "x"), (to_double, ""), (to_double, "0x10"), (to_double, "1_0.5"), (to_double, "nan"),
        (to_double, "٣"),
    ],
)  # fmt: skip
def test_a_text_that_java_cannot_read_is_a_mismatch(read: object, text: str) -> None:
    with pytest.raises(Mismatch):
        read(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5.0), (" 5\t", 5.0), ("5d", 5.0), ("5.F", 5.0), (".5e1", 5.0), ("0x1.4p2", 5.0), ("+5", 5.0),
        ("1e999", INFINITE), ("-Infinity", -INFINITE), ("0x1p9999", INFINITE), ("-0x1p9999", -INFINITE),
    ],
)  # fmt: skip
def test_doubles_are_read_as_java_reads_them(text: str, number: float) -> None:
    assert to_double(text) == number


def test_whole_numbers_and_truth_are_read_as_java_reads_them() -> None:
    assert (to_int("-2147483648"), to_int("٣"), to_int("+007")) == (-(2**31), 3, 7)
    assert type(to_long("5")) is Long
    assert [to_bool(text) for text in ("true", "TRUE", "yes", "1", "")] == [True, True, False, False, False]


@pytest.mark.parametrize("text", ["1" * 2_000_000, "0x" + "1" * 2_000_000, "1." + "1" * 2_000_000])
@pytest.mark.parametrize("end", ["", "x", "p1", "e5"])
def test_long_digits_take_the_time_of_their_length(text, end):
    """The time must grow linearly: quadratic growth would take hours."""
    for expression in ("a > 1.5", "a = 1", "a = 3000000000", "a > b"):
        assert compile_sql(expression).value({"a": text + end, "b": "1"}.get) in (T, F, N)


# -- Expressions have the results of RocketMQ's own library, as recorded by tests/golden/record_sql.py


RECORDED = json.loads(gzip.decompress((Path(__file__).parents[2] / "data" / "sql92.json.gz").read_bytes()))
# A message whose evaluation throws an exception in Java does not match, like null.
VALUES = {"T": True, "F": False, "N": None, "X": None}


def values(text: str, string_words: bool) -> list[bool | None] | str:
    try:
        found = compile_sql(text, string_words=string_words)
    except SqlError:
        return "E"
    return [found.value(each.get) for each in RECORDED["sets"]]


@pytest.mark.parametrize("number", range(2), ids=RECORDED["versions"])
def test_every_recorded_expression_has_the_values_that_the_library_gave_it(number: int) -> None:
    wrong = []
    for text, *answers in RECORDED["rows"]:
        wanted = "E" if answers[number] == "E" else [VALUES[letter] for letter in answers[number]]
        got = values(text, string_words=RECORDED["versions"][number] >= "5")
        if got != wanted:
            wrong.append((text, answers[number], got))

    assert len(RECORDED["rows"]) > 2000
    assert wrong == []
