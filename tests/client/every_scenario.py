"""All that our client must do, against our broker and against Apache's."""

from __future__ import annotations

from tests.client.namespace_scenarios import NAMESPACE_SCENARIOS
from tests.client.orderly_scenarios import ORDERLY_SCENARIOS
from tests.client.reply_scenarios import REPLY_SCENARIOS
from tests.client.retry_scenarios import RETRY_SCENARIOS
from tests.client.scenarios import SCENARIOS, Scenario
from tests.client.timer_scenarios import messages_come_at_their_time_unless_taken_back
from tests.client.transactions import transactions_end_once_as_they_should

EVERY_SCENARIO: list[Scenario] = [
    *SCENARIOS,
    *RETRY_SCENARIOS,
    *ORDERLY_SCENARIOS,
    *REPLY_SCENARIOS,
    *NAMESPACE_SCENARIOS,
    transactions_end_once_as_they_should,
    messages_come_at_their_time_unless_taken_back,
]

# Not with a broker 4.9: it has no delivery times.
SINCE_5: list[Scenario] = [messages_come_at_their_time_unless_taken_back]
