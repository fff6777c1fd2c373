"""What `import cometmq` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cometmq
import cometmq.client


@pytest.mark.parametrize("name", cometmq.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(cometmq, name).__name__ == name
    assert name in dir(cometmq)


def test_everything_the_client_exports_exists() -> None:
    assert [name for name in cometmq.client.__all__ if not hasattr(cometmq.client, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cometmq.nonsense  # type: ignore[attr-defined]


def test_importing_the_package_loads_no_client_yet() -> None:
    code = "import sys, cometmq; print([m for m in ('cometmq.client', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"
