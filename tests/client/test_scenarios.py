"""The client scenarios against our own broker; tests/interop runs them against Apache's."""

from __future__ import annotations

import pytest
from tests.client.every_scenario import EVERY_SCENARIO
from tests.client.scenarios import Scenario

from cometmq.testing import LocalBroker

LONG = {
    "a_changed_lease_ends_at_its_new_time",
    "a_long_call_keeps_its_message",
    "acknowledged_messages_come_once_and_others_again",
}
"""Scenarios that wait for more than 10 s."""


@pytest.mark.slow("some wait for delays, retries and members")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            each, id=each.__name__, marks=() if each.__name__ in LONG else pytest.mark.representative
        )
        for each in EVERY_SCENARIO
    ],
)
async def test_scenario(scenario: Scenario, local: LocalBroker) -> None:
    await scenario(local.namesrv)
