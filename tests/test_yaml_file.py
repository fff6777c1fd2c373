"""YAML parsed as strings with line numbers; dangerous features are refused with the line of their use."""

from __future__ import annotations

import pytest

from cometmq.errors import YamlError
from cometmq.yaml_file import BYTES_MAX, NODES_MAX, Node, load


def test_values_are_texts_with_the_lines_of_their_keys() -> None:
    root = load(b"a: no\nb:\n  - 1e3\n  - ''\nc:\n  d: |\n    x\n    y\n  e: >\n    x\n    y\n")

    assert isinstance(root.value, dict)
    a, b, c = (root.value[name] for name in "abc")
    assert (a.value, a.line, a.text_line) == ("no", 1, 1)
    assert b == Node([Node("1e3", 3, 3), Node("", 4, 4)], 2)
    assert isinstance(c.value, dict)
    assert c.value["d"] == Node("x\ny\n", 6, 7)
    assert c.value["e"] == Node("x y\n", 9, None)  # folded: its lines differ from the file's


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", 1, "is empty"),
        (b"a: 1\nb: [1\n", 3, "expected ',' or ']'"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8"),
        (b"a: 1\nb: \x01\n", 2, "that YAML does not allow"),
        (b"a: 1\n\nb: 2\na: 3\n", 4, "'a' is here twice, first in line 1"),
        (b"a: &x [1]\nb: *x\n", 1, "anchors and aliases"),
        (b"a: 1\nb: *x\n", 2, "anchors and aliases"),
        (b"a: !!python/object:os.system x\n", 1, "tags"),
        (b"a: !!int 3\n", 1, "tags"),
        (b"a: 1\n---\nb: 2\n", 2, "second document"),
        (b"? [a]\n: 1\n", 1, "a key must be text"),
        (b"\ta: 1\n", 1, "cannot start any token"),
        (b"a: 1\nb: " + b"[" * 100_000, 2, "nested deeper"),
        (b"a: 1\nb: [" + b"1," * NODES_MAX + b"]", 2, "more than"),
        (b"#" * (BYTES_MAX + 1), 1, "at most"),
        (b'a: 1\nb: "\\UFFFFFFFF"\n', 2, "not YAML"),
        (b'a: 1\nb: "\\U00110000"\n', 2, "not YAML"),
        (b'a: 1\nb: "\\ud800"\n', 2, "half a character"),
        (b'a: 1\n"\\udfff": 2\n', 2, "half a character"),
        (b"%YAML 1." + b"9" * 5000 + b"\n--- 1\n", 1, "not YAML"),
        (b"%YAML 2.0\n--- 1\n", 1, "incompatible"),
        (b"a: 1\nb: " + b"{a: " * 50_000, 2, "nested deeper"),
        (b"a: 1\n" + b"? " * 50_000, 2, "nested deeper"),
        (b"- " * 50_000, 1, "nested deeper"),
        (b"a: 1\n" + b"".join(b" " * n + b"a:\n" for n in range(1, 400)), 2, ""),
        (b"a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", 1, "anchors and aliases"),
        (b"<<: *x\n", 1, "anchors and aliases"),
        (b"a: 1\nb: !<tag:yaml.org,2002:python/object/apply:os.system> x\n", 2, "tags"),
    ],
)
def test_what_is_no_plain_file_is_refused_with_its_line(data: bytes, line: int, words: str) -> None:
    with pytest.raises(YamlError) as caught:
        load(data)

    assert words in str(caught.value)
    assert caught.value.line == line
