"""What `cometmq.pipeline` offers by name."""

from __future__ import annotations

import pytest

import cometmq.pipeline


@pytest.mark.parametrize("name", cometmq.pipeline.__all__)
def test_every_name_is_the_function_of_that_name(name: str) -> None:
    assert getattr(cometmq.pipeline, name).__name__ == name
    assert name in dir(cometmq.pipeline)


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(AttributeError, match="no attribute 'arhive'"):
        cometmq.pipeline.arhive  # noqa: B018
