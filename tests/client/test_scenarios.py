"""The client scenarios against our own broker; tests/interop runs them against Apache's."""

from __future__ import annotations

import pytest
from tests.client.every_scenario import EVERY_SCENARIO
from tests.client.scenarios import Scenario

from cometmq.testing import LocalBroker


@pytest.mark.slow("some wait for delays, retries and members")
@pytest.mark.representative
@pytest.mark.parametrize("scenario", EVERY_SCENARIO, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, local: LocalBroker) -> None:
    await scenario(local.namesrv)
