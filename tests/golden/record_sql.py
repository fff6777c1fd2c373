"""Record tests/data/sql92.json.gz: the results of RocketMQ's own filter library for many SQL92 expressions.

``python -m tests.golden.record_sql``. The file contains sets of properties and a row for each expression: its
text and the outcomes of each version, a letter for each set (see java/filter/SqlTable.java).
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.interop.jars import SERVER_VERSIONS, java_tool, server_jars
from tests.interop.processes import HERE, compiled

TARGET = Path(__file__).parent.parent / "data" / "sql92.json.gz"
RANDOM_EXPRESSIONS = 2_500

SETS: list[dict[str, str]] = [
    {},
    {"a": "5", "b": "10", "s": "x", "t": "true"},
    {"a": "-5", "b": "5", "s": "it's", "t": "TRUE"},
    {"a": "1.5", "b": "1.50", "s": "abc", "t": "false"},
    {"a": "x", "b": "x", "s": "", "t": "yes"},
    {"a": "3000000000", "b": "3e9", "s": "5"},
    {"a": "9223372036854775807", "b": "9223372036854775808", "s": "'"},
    {"a": " 5", "b": "5 ", "s": " x "},
    {"a": "+5", "b": "005", "s": "X"},
    {"a": "NaN", "b": "Infinity", "s": "NaN"},
    {"a": "-0.0", "b": "0.0", "s": "0"},
    {"a": "0x1p3", "b": "8", "s": "8d"},
    {"a": "5f", "b": "1e400", "s": "1_000"},
    {"a": "٣", "b": "3", "s": "\U0001d7d1"},
    {"a": "2147483647", "b": "2147483648", "s": "订单 🚀"},
    {"a": "1e-400", "b": "-1e400", "s": ".5", "t": "tRuE"},
]

BY_HAND = (
    r"""
a = 5|a=5|a <> 5|a > 4|a >= 5|a < 6|a <= 5|5 = a|5 <> a|4 < a|a = '5'|a = 5.0|a = 5L|a = 5l|a = -5|a = - 5
a = +5|-5 = a|a > 1.4|a > 1|a > 3000000000|a < 3000000000|a = 3000000000|a > 0x1|a = 007|a = 0|a = 0L
a > 0|a < 1e-300|a > 1.7e308|a = 9223372036854775807|a = 9223372036854775808|a = -9223372036854775808
a = -9223372036854775807|a = 99999999999999999999|a = 5.|a = .5|a = 5e0|a = 5.e0|a = 5E+0|a = 5e|a = 1.5e0
a > 1e400|a > 0.0|a > 0e0|a > 1e-400|a = 4.9e-324|a = 00.5|a = b|a <> b|a < b|a > b|a >= b|a <= b|a = a
a < a|s = s|m = m|m <> m|m = 'x'|m <> 'x'|'x' = m|'x' <> m|m > 1|1 > m|m = 1|m IS NULL|m IS NOT NULL
a IS NULL|a IS NOT NULL|NOT m IS NULL|(m = 1) IS NULL|(a = 5) IS NOT NULL|5 IS NULL|NULL IS NULL
TRUE IS NULL|'x' IS NOT NULL|a IS NULL IS NULL|a IS|a IS NOT|a IS 5|a IS NOT 5|a NOT NULL|NULL|TRUE|FALSE
NOT TRUE|NOT NULL|TRUE AND NULL|FALSE AND NULL|NULL AND FALSE|TRUE OR NULL|NULL OR TRUE|NULL OR FALSE
NULL AND NULL|NULL OR NULL|NOT (NULL)|a|m|NOT a|NOT m|t|NOT t|a OR t|a AND m|NOT NOT a|NOT NOT m
NOT (a = 5)|NOT a = 5|NOT a = TRUE|NOT a = FALSE|NOT m = TRUE|NOT a = 'x'|NOT a > 5|NOT a IN ('5')
NOT (a IN ('5'))|a = NOT b|a = NOT m|'true' = NOT t|t = NOT a|t = TRUE|t = FALSE|t <> TRUE|TRUE = t
FALSE = t|TRUE = TRUE|TRUE = FALSE|TRUE = 5|5 = TRUE|'true' = TRUE|TRUE = 'true'|t = true|(a = 5) = TRUE
TRUE = (a = 5)|(a = 5) = (b = 10)|(a = 5) = b|b = (a = 5)|(a = 5) > 1|(a = 5) = 1|1 = (a = 5)
(a = 5) = NULL|a = NULL|NULL = a|a <> NULL|(NULL) = a|+NULL = a|-NULL = a|a = -NULL|a > NULL|a > TRUE
a > 'x'|'x' > a|a > '5'|a > (b)|a > (5)|5 = 5|5 = 5.0|5 = '5'|'5' = 5|'5' = 5.0|'x' = 5|'x' = 'x'
'x' = 'y'|5 > 4|4 > 5|5 > 4.5|4.5 > 4|3000000000 > 5|5 > 3000000000|9007199254740993 = 9007199254740992.0
9007199254740993 > 9007199254740992.0|5 > '4'|1.5 = '1.5'|'1.5' = 1|3000000000 = '3000000000'|-a = 5
5 = -a|5 <> -a|-a > 1|-a IS NULL|-5 < a|--5 = a|-(-5) = a|-3000000000 < a|-1.5 < a|- - a = 5|+a = 5
++a = 5|+-5 = a|-+5 = a|-'x' = a|a > -'x'|-TRUE = a|-(a = 5)|-(a = 5) = 1|-5|5|'x'|-a|+a|(a)|((a = 5))
+(a = 5)|+m|a BETWEEN 1 AND 6|a BETWEEN 5 AND 5|a BETWEEN 6 AND 1|a NOT BETWEEN 1 AND 6
a NOT BETWEEN 6 AND 1|m BETWEEN 1 AND 2|m NOT BETWEEN 1 AND 2|5 BETWEEN a AND b|a BETWEEN b AND 6
a BETWEEN 1 AND b|a BETWEEN -1 AND -2|a BETWEEN '1' AND '6'|a BETWEEN TRUE AND FALSE|a BETWEEN NULL AND 6
a BETWEEN 1 AND 0.5|a BETWEEN 1 AND 1.0|a BETWEEN 1 AND 3000000000|a BETWEEN 1|a BETWEEN 1 OR 2
a BETWEEN 1 AND|a BETWEEN 1 AND 6 AND b = 10|a BETWEEN 1 AND 6 BETWEEN 1 AND 2|'x' BETWEEN 1 AND 2
(a = 5) BETWEEN 1 AND 2|TRUE BETWEEN 1 AND 2|-a BETWEEN 1 AND 2|a BETWEEN (1) AND (6)
a BETWEEN (6) AND (1)|a BETWEEN +6 AND 1|a BETWEEN 5 AND '7'|a BETWEEN '7' AND 5|a BETWEEN 2 AND 1.5
a BETWEEN 3000000000 AND 5|a BETWEEN 1e0 AND 3000000000|s IN ('x')|s IN ('x', 'abc')|s NOT IN ('x')
m IN ('x')|m NOT IN ('x')|s IN ()|s IN|s IN 'x'|s IN (5)|s IN ('x',)|s IN ('x'|s IN ('x' 'y')|'x' IN ('x')
5 IN ('5')|(s) IN ('x')|+s IN ('x')|-s IN ('x')|(s = 'x') IN ('x')|s IN ('x') IN ('x')
s IN ('a','b','c','d','e','x')|s NOT IN ('a','b','c','d','e','x')|s IN ('it''s')|s IN (NULL)|s IN (TRUE)
s IN (x)|NOT s IN ('x')|s = 'it''s'|s = ''''|s = ''|s = 'x' 'y'|s = 'x''y|s = 'x|s = "x"|s = x|s = '订单 🚀'
s <> ''|s > 'a'|s = 'a''''b'|s CONTAINS 'b'|s NOT CONTAINS 'b'|s STARTSWITH 'a'|s NOT STARTSWITH 'a'
s ENDSWITH 'c'|s NOT ENDSWITH 'c'|s CONTAINS ''|s NOT CONTAINS ''|m CONTAINS 'b'|m NOT CONTAINS 'b'
5 CONTAINS '5'|(a = 5) CONTAINS 'x'|s CONTAINS 5|s CONTAINS t|s contains 'b'|'abc' CONTAINS 'b'
'abc' NOT CONTAINS 'z'|NOT s CONTAINS 'b'|NOT (s CONTAINS 'b')|s CONTAINS 'b' AND a = 5
a = 5 AND s CONTAINS 'b'|s CONTAINS 'b' = TRUE|contains = 5|contains IS NULL|StartsWith IS NULL|s CONTAINS
s NOT CONTAINS|s CONTAINS ('b')|-5 CONTAINS 'b'|a = 5 garbage|a = 5)|a = 5 (|a = 5 #|a = 5 garbage #
a = 5 'x|a = 5 , b|a = 5 IS NULL|a = 5 NOT|a = 5 NOT x|a = 5 BETWEEN|a AND|a AND garbage (|a OR|OR a|AND
(a = 5|(a = 5 x)|()|(|)||  |a = 5 AND b = 10 c = 6|a = 5;|a == 5|a != 5|a <=> 5|a => 5|a =< 5|a < > 5
a ! = 5|a + 1 = 6|a * 2|a / 2|a % 2|a - 1 = 4|s LIKE 'a%'|s LIKE|s NOT LIKE 'a%'|a.b = 5|a-b = 5
a$b IS NULL|_a IS NULL|$ IS NULL|A = 5|a1 IS NULL|1a = 5|5a = 5|5L = a|5LL = a|5l5 = a|5.5.5 = a|5..5 = a
5e1e1 = a|5.L = a|é = 5|a é|a = 5 é|a and b|a AnD b|a=5 or b=5|not a = 5|a Is nUlL|a is not null
a In ('5')|a between 1 and 6|ANDa = 5|a ANDb = 5|nota = 5|IN = 5|a = 5 AND b = 10 OR s = 'x'
a = 5 OR b = 10 AND s = 'x'|(a = 5 OR b = 10) AND s = 'x'|a = 5 AND NOT (b = 10)|a = b = TRUE|a = b = t
a > 1 > 2|a > 1 = TRUE|a = 5 > 1|a <> b <> TRUE|a = 5 <> FALSE|1 < 2 = TRUE|a > 1 IS NULL|m > 1 IS NULL
a = 5 = 5|TRUE = t OR a = 5|a = 5 OR TRUE = t|a = 5 AND TRUE = t|TRUE = t AND a = 5|FALSE AND TRUE = t
NULL AND TRUE = t|TRUE OR TRUE = t|a > 1 OR s = 'x'|s = 'x' OR a > 1|NOT (a > 1)|a > 1.0 AND a < 2.0
a = 1.5|a = 15e-1|b = 1.5|b > a AND a > 1.0|s > 1.0|s > 1|s = 1|a /* c */ = 5|a = /* * ** / */ 5
a = 5 /* open|a /* open = 5|a /**/ = 5|a /***/ = 5|a = 5 -- c|--a = 5|a -- c = 5|-- c|/* c */|a = 5 /
a / b
""".strip()
    .replace("\n", "|")
    .split("|")
)
WITH_LINES = [
    "a -- comment\n = 5", "a = -- comment\r\n 5", "-- comment\na = 5", "a = 5 -- comment\n AND b = 10",
    "a\t=\f5", "a\n=\r5", "a\v= 5", "a\xa0= 5", "a = 5\v", "a = 5\0", "s = 'two\nlines'", "a = 5 -- c\nx",
    "a --\n= 5",
    "/* c\n */ a = 5", "a = 5 /* c */ /* c */", "a /* c **/ = 5", "a /* c ***/ = 5 */", "--\n--\na = 5",
]  # fmt: skip

NUMBERS = [
    "a", "b", "s", "t", "m", "a", "b", "5", "-5", "1", "10", "1.5", "3000000000", "5e0", "1.0", "0",
    "-1.5", "+5", "-a",
]  # fmt: skip
OPERANDS = [
    *NUMBERS,
    "a",
    "b",
    "s",
    "t",
    "m",
    "'5'",
    "'x'",
    "'abc'",
    "''",
    "TRUE",
    "FALSE",
    "NULL",
    "contains",
]
JUNK = [
    "x", ")", "(", ",", "5", "'x'", "NOT", "AND", "OR", "IN", "IS", "NULL", "BETWEEN", "=", "<>", "#", "-",
    "+", "--", "/*", "CONTAINS", "'", ".",
]  # fmt: skip


def random_expression(source: random.Random, depth: int) -> str:
    """Return an expression that usually compiles."""
    if not depth or source.random() < 0.45:
        return random_test(source, depth)
    one, kind = random_expression(source, depth - 1), source.random()
    if kind < 0.2:
        return f"NOT ({one})" if source.random() < 0.8 else f"NOT {one}"
    if kind < 0.3:
        return f"({one})"
    return f"{one} {source.choice(['AND', 'OR'])} {random_expression(source, depth - 1)}"


def random_test(source: random.Random, depth: int) -> str:
    """Return a comparison or another predicate."""

    def operand(words: Sequence[str] = OPERANDS) -> str:
        if depth and source.random() < 0.08:
            return f"({random_expression(source, depth - 1)})"
        return source.choice(words)

    negated = source.choice(["", "", "NOT "])
    search = source.choice(["CONTAINS", "STARTSWITH", "ENDSWITH"])
    listed = ", ".join(source.choice(["'5'", "'x'", "'abc'", "'it''s'"]) for _ in range(source.randint(1, 6)))
    return source.choice(
        [
            f"{operand()} {source.choice(['=', '<>'])} {operand()}",
            f"{operand()} {source.choice(['=', '<>'])} {operand()}",
            f"{operand(NUMBERS)} {source.choice(['>', '>=', '<', '<='])} {operand(NUMBERS)}",
            f"{operand(NUMBERS)} {source.choice(['>', '>=', '<', '<='])} {operand(NUMBERS)}",
            f"{operand()} IS {negated}NULL",
            f"{operand(NUMBERS)} {negated}BETWEEN {operand(NUMBERS)} AND {operand(NUMBERS)}",
            f"{source.choice('abstm')} {negated}IN ({listed})",
            f"{operand()} {negated}{search} {source.choice(['5', 'x', 'b', 'a', 'c', '', 'it'])!r}",
            operand(),
        ]
    )


def damaged(source: random.Random, text: str) -> str:
    """Return the expression with a word removed, doubled, inserted or changed."""
    words = text.split(" ")
    at = source.randrange(len(words))
    kind = source.randrange(4)
    if kind == 0:
        del words[at]
    elif kind == 1:
        words.insert(at, words[at])
    elif kind == 2:
        words.insert(at, source.choice(JUNK))
    else:
        words[at] = source.choice(JUNK)
    return " ".join(words)


def expressions() -> list[str]:
    source = random.Random(92)
    found = dict.fromkeys([*BY_HAND, *WITH_LINES])
    while len(found) < len(BY_HAND) + len(WITH_LINES) + RANDOM_EXPRESSIONS:
        text = random_expression(source, 3)
        found[damaged(source, text) if source.random() < 0.35 else text] = None
    return list(found)


def outcomes(version: str, texts: list[str]) -> list[str]:
    """Return the results of the library of one version."""
    jars = server_jars(version)
    classes = compiled("filter", sorted((HERE / "java" / "filter").glob("*.java")), jars)
    lines = [_line("P", *(part for pair in each.items() for part in pair)) for each in SETS]
    lines += [_line("E", text) for text in texts]
    path = os.pathsep.join(map(str, [classes, *jars]))
    done = subprocess.run(
        [java_tool("java"), "-cp", path, "SqlTable"], input="\n".join(lines) + "\n", text=True, check=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    answers = done.stdout.splitlines()
    assert len(answers) == len(texts), done.stderr[-2000:]
    return answers


def _line(word: str, *texts: str) -> str:
    return "\t".join([word, *(base64.b64encode(text.encode()).decode() for text in texts)])


def main() -> None:
    texts = expressions()
    rows = list(zip(texts, *(outcomes(version, texts) for version in SERVER_VERSIONS), strict=True))
    text = json.dumps({"versions": SERVER_VERSIONS, "sets": SETS, "rows": rows}, ensure_ascii=False, indent=0)
    TARGET.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    compiling = sum(old != "E" for _, old, _ in rows)
    differing = sum(old != new for _, old, new in rows)
    sys.stderr.write(
        f"{TARGET}: {TARGET.stat().st_size} bytes, {len(rows)} expressions, {compiling} compile in "
        f"{SERVER_VERSIONS[0]}, {differing} differ between the versions\n"
    )


if __name__ == "__main__":
    main()
