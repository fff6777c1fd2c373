"""The reference site (`make docs`) has each page, command and public name, and builds without warnings."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow("builds about 260 pages")
@pytest.mark.thorough("make docs checks the same")
@pytest.mark.timeout(900)
def test_the_reference_site_is_built_without_a_warning_and_is_complete(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (build.returncode, build.stderr) == (0, "")
    entries = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    # A label such as "dataclass" follows after spaces.
    titles = {re.sub(r"<[^>]*>|¶|\s{2,}.*", "", entry["title"]) for entry in entries}
    public = {
        f"{package}.{name}"
        for package in ("cometmq", "cometmq.pipeline", "cometmq.testing")
        for name in importlib.import_module(package).__all__
    }
    assert public - titles == set()
    assert {"cometmq send", "cometmq pipeline audit", "mqadmin updateTopic", "mqbroker"} - titles == set()
    pages = {page.stem for page in tmp_path.glob("*.html")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - pages == set()
