"""The settings of a group at its brokers that matter to a member that leases messages."""

from __future__ import annotations

from typing import NamedTuple

from cometmq import logs
from cometmq.client.group.group import Group
from cometmq.errors import CometError
from cometmq.protocol.bodies import (
    RETRY_MAX_TIMES,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SubscriptionGroupConfig,
)
from cometmq.protocol.bodies.retry_policy import DEFAULT, RetryPolicy, policy_of
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import GetSubscriptionGroupConfigRequestHeader

log = logs.logger("cometmq.client.consumer")


class Retries(NamedTuple):
    """When and how often a failed message is delivered again.

    Attributes:
        max_times: The maximum number of retries. After that many, a message that fails is a dead letter.
        policy: The delays before the retries.
    """

    max_times: int = RETRY_MAX_TIMES
    policy: RetryPolicy = DEFAULT


async def read_retries(group: Group, topic: str, known: Retries) -> Retries:
    """Return the settings of a group about retries, from a broker of the topic.

    Return `known` if the broker does not report it: the member may have no right to read it.
    """
    instance = group.instance
    header = GetSubscriptionGroupConfigRequestHeader(group=group.name)
    code = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG
    for addr in instance.routes.readers_of(topic)[:1]:
        try:
            config = await instance.brokers.fetch(addr, code, SubscriptionGroupConfig, header)
        except CometError as error:
            log.debug("the retry policy of group %s cannot be read: %s", group.name, error)
        else:
            return Retries(config.retry_max_times, policy_of(config))
    return known


async def is_popped(group: Group, topic: str, known: bool) -> bool:
    """Return whether the operator has set a group's consume mode for a topic to POP.

    Return `known` if the broker does not report the mode.
    """
    instance = group.instance
    # To a member that broadcasts, a broker reports all queues, even if it does not know the member yet.
    body = QueryAssignmentRequestBody(
        topic=instance.namespace.wrap(topic),
        consumer_group=instance.namespace.wrap(group.name),
        client_id=instance.client_id,
        strategy_name="AVG",
        message_model="BROADCASTING",
    ).encode()
    for addr in instance.routes.readers_of(topic)[:1]:
        try:
            answer = await instance.brokers.call(addr, RequestCode.QUERY_ASSIGNMENT, body=body, topic=topic)
            found = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
        except CometError as error:
            log.debug("the consume mode of group %s for %s cannot be read: %s", group.name, topic, error)
        else:
            return found[0].mode == "POP" if found else known
    return known
