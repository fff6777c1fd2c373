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

# Rooms with servers, clients and a Spark session that start once: they cost more than most tests.
SHARING = ("interop", "pipeline")
SHARED = {"apache_clusters", "java_clients", "admin_shells", "cluster", "broker", "spark", "connected", "s3"}
# What takes long comes first, so that all processes end at about the same time.
LONG_FIRST = (*SHARING, "simulation", "faults", "", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process takes as a whole when `make test` shares the tests between several."""
    here = Path(__file__).parent
    sharing = {item.path for item in items if SHARED.intersection(getattr(item, "fixturenames", ()))}
    for item in items:
        path = item.path.relative_to(here)
        group = path.parent if item.path in sharing and path.parts[0] in SHARING else path
        item.add_marker(pytest.mark.xdist_group(str(group)))

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(here).parts[:-1]
        name = room[0] if room else ""
        return LONG_FIRST.index(name) if name in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=place)


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
