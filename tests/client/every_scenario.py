"""The list of all client scenarios, for runs against our broker and against Apache's."""

from __future__ import annotations

from tests.client.coming_and_going import members_that_come_and_go_handle_each_message_once
from tests.client.membership_scenarios import MEMBERSHIP_SCENARIOS
from tests.client.namespace_scenarios import NAMESPACE_SCENARIOS
from tests.client.network_scenarios import a_bad_network_loses_and_invents_nothing
from tests.client.orderly_scenarios import ORDERLY_SCENARIOS
from tests.client.reply_scenarios import REPLY_SCENARIOS
from tests.client.retry_scenarios import RETRY_SCENARIOS
from tests.client.scenarios import SCENARIOS, Scenario
from tests.client.sharing_scenarios import SHARING_SCENARIOS
from tests.client.simple_scenarios import SIMPLE_SCENARIOS
from tests.client.stream_scenarios import STREAM_SCENARIOS
from tests.client.timer_scenarios import messages_come_at_their_time_unless_taken_back
from tests.client.transactions import transactions_end_once_as_they_should

EVERY_SCENARIO: list[Scenario] = [
    *SCENARIOS,
    *RETRY_SCENARIOS,
    *ORDERLY_SCENARIOS,
    *MEMBERSHIP_SCENARIOS,
    *STREAM_SCENARIOS,
    members_that_come_and_go_handle_each_message_once,
    *REPLY_SCENARIOS,
    *NAMESPACE_SCENARIOS,
    transactions_end_once_as_they_should,
    messages_come_at_their_time_unless_taken_back,
    a_bad_network_loses_and_invents_nothing,
    *SIMPLE_SCENARIOS,
    *SHARING_SCENARIOS,
]

# Scenarios that a 4.9 broker cannot pass, because it has no delivery times and leases no messages.
SINCE_5: list[Scenario] = [
    messages_come_at_their_time_unless_taken_back,
    *SIMPLE_SCENARIOS,
    *SHARING_SCENARIOS,
]
