"""Groups of modules that import each other."""

from __future__ import annotations


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        found, ahead = set[str](), [module]
        while ahead:
            new = imports.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        reached[module] = found
    together = {
        tuple(sorted({module, *(other for other in found if module in reached.get(other, ()))}))
        for module, found in reached.items()
        if module in found
    }
    return sorted(map(list, together))


def among(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imported modules of each module, by the imported names.

    `from a import b` has the name a.b. If that is not a module, it means the module a.
    """
    return {
        module: {name if name in imported else name.rpartition(".")[0] for name in names}
        & imported.keys() - {module}
        for module, names in imported.items()
    }
