"""Our client against Apache's servers: the scenarios of tests/client, word for word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.client.scenarios import SCENARIOS, Scenario
from tests.interop.apache import ApacheCluster
from tests.interop.jars import SERVER_VERSIONS


@pytest.fixture(params=SERVER_VERSIONS)
def apache(request: pytest.FixtureRequest, apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    """Apache's name server and broker, in each of the versions."""
    return apache_clusters(request.param)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, apache: ApacheCluster) -> None:
    await scenario(apache.namesrv)
