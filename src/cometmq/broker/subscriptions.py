"""Subscription expressions: what a tag expression lets through, on tag hashes alone (storage.md 6.5)."""

from __future__ import annotations

from functools import lru_cache

from cometmq.protocol.properties import java_hash

ALL = "*"
SEPARATOR = "||"
TAG = "TAG"
# Characters of an expression: a thousand tags of 30.
LONGEST_EXPRESSION = 32_768
# Those that are at most so long are remembered by the thousand, which takes 30 MB at worst; longer ones, of
# which there are few, by the dozen.
SHORT_EXPRESSION = 256


class ExpressionError(ValueError):
    """The expression cannot be parsed, or is too long; answered with code 23."""


def is_tag_type(expression_type: str | None) -> bool:
    """Whether an expressionType means tags: it says TAG, or nothing (C++ clients)."""
    return not expression_type or expression_type == TAG


def split_tags(expression: str | None) -> list[str]:
    """The tags of an expression; empty for one that lets everything through. Raises ExpressionError for `||`
    alone.
    """
    if not expression or expression == ALL:
        return []
    # Java's split drops empty pieces at the end: an expression of separators only has none left.
    if not expression.replace(SEPARATOR, ""):
        raise ExpressionError("subString split error")
    return [tag for tag in (piece.strip() for piece in expression.split(SEPARATOR)) if tag]


def tag_codes(expression: str | None) -> frozenset[int] | None:
    """Tag hashes (signed 32 bit) that pass; None lets everything through. Blank tags only: nothing passes.
    Raises ExpressionError."""
    if not expression or expression == ALL:
        return None
    return _of_short(expression) if len(expression) <= SHORT_EXPRESSION else _of_long(expression)


def _codes(expression: str) -> frozenset[int]:
    if len(expression) > LONGEST_EXPRESSION:
        raise ExpressionError(f"{len(expression)} characters, at most {LONGEST_EXPRESSION} are taken")
    return frozenset(java_hash(tag) for tag in split_tags(expression))


_of_short = lru_cache(maxsize=4096)(_codes)
_of_long = lru_cache(maxsize=64)(_codes)
