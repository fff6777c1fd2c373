"""The client scenarios against our own broker; tests/interop runs them against Apache's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.scenarios import SCENARIOS, Scenario

from cometmq.testing import LocalBroker, local_broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with local_broker(directory) as running:
        yield running


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, broker: LocalBroker) -> None:
    await scenario(broker.namesrv)
