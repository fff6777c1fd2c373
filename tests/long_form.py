"""What is slow by nature runs in `make test-long`, which sets COMETMQ_LONG; the other commands skip it."""

from __future__ import annotations

import os

import pytest

LONG = bool(os.environ.get("COMETMQ_LONG"))


def long_form(why: str) -> pytest.MarkDecorator:
    """The mark of a test that runs in the long form only."""
    return pytest.mark.skipif(not LONG, reason=f"{why}: `make test-long` runs it")
