"""The client scenarios against our own broker; tests/interop runs them against Apache's."""

from __future__ import annotations

import pytest
from tests.client.orderly_scenarios import ORDERLY_SCENARIOS
from tests.client.scenarios import SCENARIOS, Scenario

from cometmq.testing import LocalBroker


@pytest.mark.parametrize("scenario", [*SCENARIOS, *ORDERLY_SCENARIOS], ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, local: LocalBroker) -> None:
    await scenario(local.namesrv)
