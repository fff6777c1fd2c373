"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
