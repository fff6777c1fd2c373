"""Tests that are slow by nature run only in `make test-long`, which sets COMETMQ_LONG; others skip them."""

from __future__ import annotations

import os

import pytest

LONG = bool(os.environ.get("COMETMQ_LONG"))


def long_form(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that runs only in the long form."""
    return pytest.mark.skipif(not LONG, reason=f"{why}: `make test-long` runs it")
