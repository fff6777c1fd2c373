"""Helm, from its package on PyPI where there is one for the platform, otherwise the machine's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.interop.jars import ToolMissingError


def helm() -> Path:
    """Return the program."""
    found = shutil.which("helm", path=Path(sys.executable).parent) or shutil.which("helm")
    if found is None:
        raise ToolMissingError("helm 3.17 or newer is needed: it checks conf/helm")
    return Path(found)
