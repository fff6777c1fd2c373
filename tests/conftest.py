"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Examples share the machine with other processes: a slow one is no failure. For a long run by hand:
# `--hypothesis-profile=thorough`.
settings.register_profile(
    "cometmq", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("cometmq"), max_examples=5000)
settings.load_profile("cometmq")

# Rooms whose tests share servers, clients or a Spark session, which cost more than most tests.
SHARING = ("interop", "pipeline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process takes as a whole when `make test` shares the tests between two."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        group = path.parent if path.parts[0] in SHARING else path
        item.add_marker(pytest.mark.xdist_group(str(group)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile-frames", type=int, default=200_000, help="frames of tests/faults/test_hostile_requests.py"
    )


@pytest.fixture
def browser_page() -> Iterator[Page]:
    """An empty page in a real browser."""
    from tests.browser import running_browser

    with running_browser() as browser:
        yield browser.new_page()
