"""The client scenarios against our own broker; tests/interop runs them against Apache's."""

from __future__ import annotations

import pytest
from tests.client.orderly_scenarios import ORDERLY_SCENARIOS
from tests.client.scenarios import SCENARIOS, Scenario
from tests.client.transactions import transactions_end_once_as_they_should

from cometmq.testing import LocalBroker

ALL = [*SCENARIOS, *ORDERLY_SCENARIOS, transactions_end_once_as_they_should]


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, local: LocalBroker) -> None:
    await scenario(local.namesrv)
