"""Every function, class, method and constant in the source is used in the source.

The check compares names, not definitions, so it may miss unused code, but never reports used code. Code that
only tests use counts as unused; fields of classes are not checked.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.test_architecture import PACKAGE, name_of, nodes_of, parse, sources
from tests.test_architecture import teardown_module as teardown_module

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# The names in __all__ of these packages are for users, with all their methods.
FOR_USERS = (
    "__init__.py",
    "admin/__init__.py",
    "client/__init__.py",
    "integrations/faststream/__init__.py",
    "testing/__init__.py",
)
# Not checked: the numbers of the protocol, which are complete, and the package for users' tests.
LEFT_OUT = ("protocol/codes.py", "grpc/rpc/enums.py", "testing/")
# Used from outside: entry points, the name of a Spark format, functions for notebooks (docs/pipeline.md), and
# a clock that tests control.
FROM_OUTSIDE = {
    "CometMQBroker",  # of Taskiq
    *("CometMQPrometheusMiddleware", "CometMQTelemetryMiddleware"),  # of FastStream
    *("DefaultSource", "ManualClock", "archived", "completeness", "deduplicated", "group_positions"),
    "wait_stopped",  # a method of all clients
    *("mqadmin", "mqbroker", "mqnamesrv", "mqshutdown"),
}
# Tests need this encoder of a single record; the store encodes many at a time.
FOR_TESTS = {"encode_record"}
# Packages whose base classes call no method of a subclass by name.
PLAIN_BASES = {"abc", "dataclasses", "enum", "msgspec", "typing"}


def definitions(tree: ast.Module) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield (class or "", name, statement) of a module's top-level definitions and methods.

    Methods of classes with a foreign base and decorated functions are left out, as other code may call them.
    """
    foreign = foreign_names(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield "", node.name, node
            if not foreign & {ast.unparse(base).partition("[")[0].split(".")[0] for base in node.bases}:
                yield from ((node.name, each.name, each) for each in node.body if is_plain_function(each))
        elif is_plain_function(node):
            yield "", node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (("", target.id, node) for target in targets if isinstance(target, ast.Name))


def is_plain_function(node: ast.stmt) -> bool:
    return isinstance(node, FUNCTIONS) and not node.decorator_list


def foreign_names(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from packages other than cometmq."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "cometmq":
            found |= {alias.asname or alias.name for alias in node.names if node.module not in PLAIN_BASES}
    return found - PLAIN_BASES


def uses(tree: ast.AST) -> Counter[str]:
    """Count the uses of each name: reads, attribute accesses, and equal strings outside of __all__."""
    found: Counter[str] = Counter()
    nodes = list(ast.walk(tree))
    listed = {id(text) for node in nodes if is_all(node) for text in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.alias) and node.asname:
            found[node.name] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in listed:
            found[node.value] += 1
    return found


def is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"


def for_users() -> set[str]:
    lists = (node.value for name in FOR_USERS for node in parse(PACKAGE / name).body if is_all(node))
    return {name for names in lists for name in ast.literal_eval(names)}


def taken(tree: ast.Module) -> set[str]:
    """Return the names that a module uses from others: imported, or accessed as an attribute of an import."""
    imports = [node for node in nodes_of(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    asked = (node for node in nodes_of(tree) if isinstance(node, ast.Attribute))
    return {alias.name for node in imports for alias in node.names} | {
        node.attr for node in asked if ast.unparse(node.value).split(".")[0] in known
    }


def unused(modules: dict[str, ast.Module], kept: set[str]) -> list[str]:
    by_module = {path: uses(tree) for path, tree in modules.items()}
    everywhere = Counter[str]()
    for found_uses in by_module.values():
        everywhere.update(found_uses)
    shared = {name for tree in modules.values() for name in taken(tree)}
    found = []
    for path, tree in modules.items():
        for owner, name, node in definitions(tree):
            used = everywhere if owner or name in shared else by_module[path]
            if used[name] <= uses(node)[name] and not name.startswith("__") and not kept & {owner, name}:
                found.append(f"{path}:{node.lineno} {owner and owner + '.'}{name}")
    return found


@pytest.mark.representative
@pytest.mark.slow("reads the whole source")
def test_nothing_is_there_for_nobody() -> None:
    modules = {name_of(path): parse(path) for path in sources()}
    found = unused(modules, for_users() | FROM_OUTSIDE | FOR_TESTS)
    found = [place for place in found if not place.startswith(LEFT_OUT)]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(): f()", ["m.py:1 f"]),
        ("def f(): pass\nf()", []),
        ("LIMIT = 3\ndef f(): return 'f'", ["m.py:1 LIMIT", "m.py:2 f"]),
        ("class A:\n    x: int\n    def m(self): pass\nA()", ["m.py:3 A.m"]),
        ("class A:\n    @property\n    def m(self): pass\nA()", []),
        ("import asyncio\nclass A(asyncio.Protocol):\n    def m(self): pass\nA()", []),
        ("__all__ = ['f']\ndef f(): pass", ["m.py:2 f"]),
        ("def f(): pass\ngetattr(x, 'f')", []),
        ("log = 1\nself.log", []),
    ],
)
def test_what_counts_as_unused(source: str, found: list[str]) -> None:
    assert unused({"m.py": ast.parse(source)}, set()) == found


def test_what_is_left_out_exists() -> None:
    nodes = (node for path in sources() for node in nodes_of(parse(path)))

    assert FROM_OUTSIDE - {getattr(node, "name", "") for node in nodes} == set()
    assert all((PACKAGE / name).exists() for name in (*FOR_USERS, *LEFT_OUT))
