"""The subscriptions of 5.x clients to lite topics: the RPC SyncLiteSubscription, and the broker's notices."""

from __future__ import annotations

from typing import Any

from cometmq.errors import SendFailed
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import Code, LiteSubscriptionAction
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.clients import Client, Clients
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.receives import check_names
from cometmq.protocol.bodies import LiteSubscription, LiteSubscriptionCtlRequestBody, OffsetOption
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import NotifyUnsubscribeLiteRequestHeader
from cometmq.protocol.lite import is_lite_topic

MAX_LITE_TOPICS = 100_000
"""The maximum number of lite topics in one request, which is that of all subscriptions of a broker."""
END_S = 3.0


async def sync_lite_subscription(clients: Clients, call: Call, request: Any) -> Any:
    """Change the lite topics to which a client is subscribed."""
    client = clients.find(call)
    check_names(request.group.name, request.topic.name)
    lite_topics = list(request.lite_topic_set)
    if len(lite_topics) > MAX_LITE_TOPICS:
        problem = f"lite_topic_set: {len(lite_topics)} lite topics, at most {MAX_LITE_TOPICS}"
        raise ServiceError(Code.BAD_REQUEST, problem)
    try:
        action = LiteSubscriptionAction(request.action)
    except ValueError:
        raise ServiceError(Code.BAD_REQUEST, f"action: {request.action} is unknown") from None
    if (
        action is LiteSubscriptionAction.PARTIAL_ADD
        and client.language == "PYTHON"
        and all(len(each) == 1 for each in lite_topics)
    ):
        # Apache's Python client 5.1.2 sends each character of a lite topic's name as a name of its own.
        lite_topics = ["".join(lite_topics)]
    if action in (LiteSubscriptionAction.PARTIAL_ADD, LiteSubscriptionAction.COMPLETE_ADD):
        for name in lite_topics:
            if not is_lite_topic(name):
                problem = f"lite_topic_set: {name[:80]!r} is not a valid name"
                raise ServiceError(Code.ILLEGAL_LITE_TOPIC, problem)
    change = LiteSubscription(
        action=action.name,
        client_id=client.client_id,
        group=request.group.name,
        topic=request.topic.name,
        lite_topic_set=lite_topics,
        offset_option=_offset_option(request),
        version=request.version,
    )
    await client.send(_frame(client, change))
    return messages().SyncLiteSubscriptionResponse(status=status(Code.OK))


def _offset_option(request: Any) -> OffsetOption | None:
    """Return where new subscriptions start, or None for the stored offsets."""
    if request.action != LiteSubscriptionAction.PARTIAL_ADD or not request.HasField("offset_option"):
        return None
    option = request.offset_option
    kind = option.WhichOneof("offset_type")
    return None if kind is None else OffsetOption(kind.upper(), int(getattr(option, kind)))


def _frame(client: Client, change: LiteSubscription) -> Frame:
    body = LiteSubscriptionCtlRequestBody(subscription_set=[change])
    return client.frame(RequestCode.LITE_SUBSCRIPTION_CTL, None, body.encode())


def end_subscriptions(client: Client) -> None:
    """Remove the subscriptions of a client that has reported its end."""
    subscription = messages().Settings.FromString(client.settings).subscription
    change = LiteSubscription(
        action="COMPLETE_REMOVE",
        client_id=client.client_id,
        group=subscription.group.name,
        topic="".join(each.topic.name for each in subscription.subscriptions[:1]),
    )
    try:
        outcome = client.request(_frame(client, change), END_S)
    except SendFailed:
        return  # The broker is stopping; the subscriptions expire
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())


def notify_unsubscribe(client: Client, _connection: object, frame: Frame) -> None:
    """Notify a client that another client of its exclusive group has taken over a lite topic."""
    command = messages().TelemetryCommand()
    lite_topic = frame.header(NotifyUnsubscribeLiteRequestHeader).lite_topic
    command.notify_unsubscribe_lite_command.lite_topic = lite_topic
    client.command(command)
