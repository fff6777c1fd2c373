"""Subscription expressions: what a tag expression lets through, on tag hashes alone
(docs/reference/storage.md, Tag filter)."""

from __future__ import annotations

from functools import lru_cache

from cometmq.protocol.properties.values import java_hash

ALL = "*"
SEPARATOR = "||"
TAG = "TAG"
LONGEST_EXPRESSION = 32_767
"""Characters: no message has a longer tag. Hashing takes 40 ns each."""
_LONGEST_REMEMBERED = 256
"""Results for expressions up to this length are cached by the thousand, which takes 30 MB at worst; longer
ones are rare, and a few dozen are cached."""


class ExpressionError(ValueError):
    """The expression cannot be parsed, or is too long; answered with code 23."""


def is_tag_type(expression_type: str | None) -> bool:
    """Whether an expressionType means tags: it says TAG, or nothing (C++ clients)."""
    return not expression_type or expression_type == TAG


def tag_codes(expression: str | None) -> frozenset[int] | None:
    """Tag hashes (signed 32 bit) that pass; None lets everything through. Blank tags only: nothing passes.
    Raises ExpressionError."""
    if not expression or expression == ALL:
        return None
    if len(expression) <= _LONGEST_REMEMBERED:
        return _known_codes(expression)
    if len(expression) > LONGEST_EXPRESSION:
        raise ExpressionError(
            f"the subscription has {len(expression)} characters, at most {LONGEST_EXPRESSION} are read"
        )
    return long_codes(expression)


def _codes(expression: str) -> frozenset[int]:
    # Java's split drops empty pieces at the end: an expression of separators only has none left.
    if not expression.replace(SEPARATOR, ""):
        raise ExpressionError("subString split error")
    return frozenset(java_hash(tag) for tag in map(str.strip, expression.split(SEPARATOR)) if tag)


_known_codes = lru_cache(maxsize=4096)(_codes)
long_codes = lru_cache(maxsize=64)(_codes)
