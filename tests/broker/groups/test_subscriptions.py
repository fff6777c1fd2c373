"""Subscription expressions: which tags they let through."""

from __future__ import annotations

import pytest

from cometmq.broker.groups import subscriptions
from cometmq.broker.groups.subscriptions import MAX_EXPRESSION_LENGTH, ExpressionError, tag_codes
from cometmq.protocol.properties.values import java_hash


class TestSubscriptions:
    @pytest.mark.parametrize("expression", [None, "", "*"])
    def test_what_lets_everything_through(self, expression):
        assert tag_codes(expression) is None

    def test_tags_are_split_and_trimmed(self):
        assert tag_codes("TagA || TagB||  ||TagC") == set(map(java_hash, ("TagA", "TagB", "TagC")))
        assert tag_codes("  ") == frozenset()
        assert tag_codes(" || ") == frozenset()
        with pytest.raises(ExpressionError):
            tag_codes("||")

    def test_an_expression_is_taken_up_to_a_length_and_long_ones_are_not_hoarded(self):
        longest = "tag||" * (MAX_EXPRESSION_LENGTH // 5)
        assert tag_codes(longest) == {java_hash("tag")}
        with pytest.raises(ExpressionError, match=f"at most {MAX_EXPRESSION_LENGTH}"):
            tag_codes(longest + "tag||")
        for number in range(200):
            tag_codes(f"{number}||{longest[:-10]}")
        assert subscriptions.long_codes.cache_info().currsize <= 64
