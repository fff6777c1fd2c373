"""The public names and their parameters do not change, because users' programs depend on them.

After a deliberate change, which CHANGELOG.md must mention, `python -m tests.test_public_api` rewrites
tests/data/public_api.txt.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("cometmq", "cometmq.pipeline", "cometmq.testing")
STORED = Path(__file__).parent / "data/public_api.txt"
MARKS = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def parameters(function: object) -> str:
    """Return the parameters of a callable without types; "=" marks those that have a default."""
    texts = []
    keyword_only = False
    for each in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            texts.append("*")
        texts.append(MARKS.get(each.kind, "") + each.name + ("" if each.default is each.empty else "="))
    return f"({', '.join(texts)})"


def public_names() -> Iterator[str]:
    """Yield a line for each public name, and for each public method and property of its class."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{package}.{name}{parameters(value) if inspect.isfunction(value) else ''}"
            if not inspect.isclass(value):
                continue
            for attribute in sorted(dir(value)):
                owner = next((each for each in value.__mro__ if attribute in vars(each)), object)
                if not owner.__module__.startswith("cometmq"):
                    continue
                member = inspect.getattr_static(value, attribute)
                if isinstance(member, staticmethod | classmethod):
                    member = member.__func__
                if attribute == "__init__" or not attribute.startswith("_"):
                    text = parameters(member) if inspect.isfunction(member) else ""
                    yield f"{package}.{name}.{attribute}{text}"


def test_no_public_name_or_parameter_has_gone_or_changed() -> None:
    assert list(public_names()) == STORED.read_text().splitlines()


if __name__ == "__main__":
    STORED.write_text("".join(f"{line}\n" for line in public_names()))
