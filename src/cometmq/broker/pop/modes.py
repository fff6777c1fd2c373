"""How groups consume topics (PULL or POP), and the assignment of queues to members by the broker.

A 5.x push consumer with `clientRebalance=false` asks a broker of its topic which queues it has, and whether
it pulls or pops them (request 400). Administrators set the mode with `mqadmin setConsumeMode` (request 401).
The modes are stored in messageRequestMode.json, in the format of Apache's broker. Slaves and the members of a
raft group copy them together with the groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.names import check_group, check_topic
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.tables.consume_modes import MAX_MODES
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.message import MessageQueue
from cometmq.protocol import bodies
from cometmq.protocol.codes import RETRY_PREFIX, Perm, RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection

PULL, POP = "PULL", "POP"
BROADCASTING = "BROADCASTING"
ALL_QUEUES = -1


@dataclass(eq=False)
class ConsumeModes:
    """Handles the requests about consume modes and assignments.

    `route` returns the route of a topic from a name server, or None.
    """

    config: BrokerConfig
    tables: DurableTables
    consumers: ConsumerTable
    route: Callable[[str], Awaitable[bodies.TopicRouteData | None]]

    @handles(RequestCode.SET_MESSAGE_REQUEST_MODE)
    async def set_message_request_mode(self, _connection: Connection, frame: Frame) -> Frame:
        """Set how a group consumes a topic."""
        since = self.tables.check_changeable()
        body = bodies.SetMessageRequestModeRequestBody.decode(frame.body)
        topic, group = check_topic(body.topic, frame.version), check_group(body.consumer_group, frame.version)
        if topic.startswith(RETRY_PREFIX):
            raise CommandError(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        self.tables.topics.existing(topic)
        if self.tables.groups.find(group) is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group {group} does not exist"
            )
        if body.mode not in (PULL, POP):
            raise CommandError(
                ResponseCode.INVALID_PARAMETER, f"mode is {body.mode[:20]!r}, not {PULL} or {POP}"
            )
        if not self.tables.modes.put(body):
            raise CommandError.failed(f"the limit of {MAX_MODES} modes is reached")
        self.tables.modes_changed()
        try:
            await self.tables.groups_kept(since)
        except OSError as error:
            problem = f"the mode is set, but cannot be written: {error.strerror or error}"
            raise CommandError.failed(problem) from error
        return frame.response()

    @handles(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    def get_all_message_request_mode(self, _connection: Connection, frame: Frame) -> Frame:
        """Return all modes, for a slave of 5.x."""
        return frame.response(body=msgspec.json.encode(self.tables.modes.to_table()))

    @handles(RequestCode.QUERY_ASSIGNMENT)
    async def query_assignment(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the queues of a member, and whether it pulls or pops them."""
        body = bodies.QueryAssignmentRequestBody.decode(frame.body)
        topic, group = check_topic(body.topic, frame.version), check_group(body.consumer_group, frame.version)
        mode = self.tables.modes.modes.get((topic, group)) or bodies.SetMessageRequestModeRequestBody(
            topic, group
        )
        queues = await self._queues(topic)
        assigned: Sequence[MessageQueue] | None = queues
        if queues is not None and body.message_model != BROADCASTING:
            known = self.consumers.groups.get(group)
            assigned = None if known is None else allocate(body, mode, queues, sorted(known.client_ids()))
        found = bodies.QueryAssignmentResponseBody()
        if assigned is not None:
            found.message_queue_assignments = [
                bodies.MessageQueueAssignment(queue, mode.mode) for queue in dict.fromkeys(assigned)
            ]
        return frame.response(body=found.encode())

    async def _queues(self, topic: str) -> list[MessageQueue] | None:
        """Return the readable queues of a topic on all brokers, or None for an unknown topic."""
        route = await self.route(topic)
        if route is not None:
            masters = {broker.broker_name for broker in route.broker_datas}
            return sorted(
                MessageQueue(topic, queues.broker_name, queue_id)
                for queues in route.queue_datas
                if queues.perm & Perm.READ and queues.broker_name in masters
                for queue_id in range(queues.read_queue_nums)
            )
        known = self.tables.topics.get(topic)
        if known is None:
            return None
        return [MessageQueue(topic, self.config.broker_name, each) for each in range(known.read_queue_nums)]


def allocate(
    body: bodies.QueryAssignmentRequestBody,
    mode: bodies.SetMessageRequestModeRequestBody,
    queues: Sequence[MessageQueue],
    members: Sequence[str],
) -> list[MessageQueue] | None:
    """Return the queues of a member, or None for an unknown strategy. `queues` and `members` are sorted.

    A member that pops shares its queues with `pop_share_queue_num` others.
    """
    if body.strategy_name not in ("AVG", "AVG_BY_CIRCLE"):
        return None
    share = mode.pop_share_queue_num
    if mode.mode == POP and not 0 < share < len(members) - 1:
        return [MessageQueue(queue.topic, queue.broker_name, ALL_QUEUES) for queue in queues]
    if body.client_id not in members:
        return []
    place = members.index(body.client_id)
    if mode.mode == PULL:
        return _part(body.strategy_name, queues, place, len(members))
    if len(members) > len(queues):
        return [queues[place % len(queues)]] if queues else []
    return [
        queue
        for step in range(share + 1)
        for queue in _part(body.strategy_name, queues, (place + step) % len(members), len(members))
    ]


def _part(strategy: str, queues: Sequence[MessageQueue], place: int, members: int) -> list[MessageQueue]:
    """Return the queues of the member with this index, as Apache's clients compute them."""
    if strategy == "AVG_BY_CIRCLE":
        return list(queues[place::members])
    size, longer = divmod(len(queues), members)
    start = place * size + min(place, longer)
    return list(queues[start : start + size + (place < longer)])
