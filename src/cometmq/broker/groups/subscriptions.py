"""Tag subscriptions: the tag hashes that match an expression (docs/reference/storage.md, Tag filter)."""

from __future__ import annotations

from functools import lru_cache

from cometmq.protocol.properties.values import java_hash

ALL = "*"
SEPARATOR = "||"
TAG = "TAG"
MAX_EXPRESSION_LENGTH = 32_767
"""The maximum length of an expression. It bounds the time of hashing, 40 ns per character."""
_MAX_CACHED_LENGTH = 256
"""The maximum length of expressions that are cached by the thousand, which takes at most 30 MB.

Longer expressions are rare; a few dozen are cached.
"""


class ExpressionError(ValueError):
    """The expression is invalid or too long; the response has code 23."""


def is_tag_type(expression_type: str | None) -> bool:
    """Return whether an expressionType means tags: TAG, or an empty one (C++ clients)."""
    return not expression_type or expression_type == TAG


def tag_codes(expression: str | None) -> frozenset[int] | None:
    """Return the matching tag hashes (signed 32 bits), or None if all messages match.

    If all tags are blank, no message matches. Raises ExpressionError.
    """
    if not expression or expression == ALL:
        return None
    if len(expression) <= _MAX_CACHED_LENGTH:
        return _known_codes(expression)
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ExpressionError(
            f"the subscription has {len(expression)} characters, at most {MAX_EXPRESSION_LENGTH} are allowed"
        )
    return long_codes(expression)


def _codes(expression: str) -> frozenset[int]:
    # Java's split drops empty pieces at the end: an expression of separators only has no pieces.
    if not expression.replace(SEPARATOR, ""):
        raise ExpressionError("subString split error")
    return frozenset(java_hash(tag) for tag in map(str.strip, expression.split(SEPARATOR)) if tag)


_known_codes = lru_cache(maxsize=4096)(_codes)
long_codes = lru_cache(maxsize=64)(_codes)
