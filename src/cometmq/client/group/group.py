"""The data that the parts of a consumer share: name, client instance, subscriptions and offsets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.group.filter_servers import Pulls
from cometmq.client.group.offset_files import FileOffsets, local_path
from cometmq.client.group.offsets import (
    OffsetStore,
    OwnOffsets,
    RemoteOffsets,
    default_start_time_ms,
    start_offset,
)
from cometmq.client.group.options import ConsumeFromWhere, MemberOptions, MessageModel, PushOptions
from cometmq.client.group.statistics import Statistics
from cometmq.client.group.subscription import Subscription
from cometmq.message import MessageExt, MessageQueue, PullResult
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.properties.values import RETRY_TOPIC

_MAX_COMPILED_EXPRESSIONS = 1_000


def instance_options(options: MemberOptions, given: ClientOptions | None) -> ClientOptions:
    """Return the options for the client instance of a consumer. `given` are the user's client options.

    With BROADCASTING, the instance name is DEFAULT unless it is set: the path of the local offsets file
    contains the client id, which must therefore be the same after a restart.
    """
    given = given if given is not None else ClientOptions()
    if options.message_model is MessageModel.BROADCASTING and given.instance_name is None:
        return replace(given, instance_name="DEFAULT")
    return given


@dataclass(slots=True)
class Group:
    """The data that the parts of one consumer share."""

    name: str
    instance: ClientInstance
    options: MemberOptions
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    offsets: OffsetStore = field(init=False)
    pulls: Pulls = field(init=False)
    stats: Statistics = field(default_factory=Statistics)
    _compiled: set[tuple[str, str, str]] = field(default_factory=set)
    """The SQL92 filters that brokers have compiled: broker address, topic and expression."""
    _start_time_ms: int = field(init=False)
    _file: FileOffsets | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        options = self.options
        storage = options.offset_storage
        if storage is None and not self.clustering:
            space = self.instance.namespace
            path = local_path(options.offset_dir, self.instance.client_id, space.wrap(self.name))
            storage = FileOffsets(path, space)
        if isinstance(storage, FileOffsets):
            self._file = storage
        backend: OwnOffsets | RemoteOffsets = RemoteOffsets(self.instance, self.name, options.start_strictly)
        if storage is not None:
            backend = OwnOffsets(storage)
        self.offsets = OffsetStore(backend.read, backend.write)
        self.pulls = Pulls(self.instance, self.name)
        time_ms = options.consume_timestamp_ms
        self._start_time_ms = default_start_time_ms() if time_ms is None else time_ms

    @property
    def clustering(self) -> bool:
        return self.options.message_model is MessageModel.CLUSTERING

    @property
    def stored_by_brokers(self) -> bool:
        """Whether brokers store the group's offsets."""
        return self.clustering and self.options.offset_storage is None

    def close(self) -> None:
        """Release the file of local offsets."""
        if self._file is not None:
            self._file.close()

    async def check_expression(self, subscription: Subscription) -> None:
        """Compile an SQL92 expression at each broker of its topic. Raises BrokerError with the remark."""
        route = self.instance.routes.get(subscription.topic)
        for queue in route.one_of_each_broker() if route is not None else ():
            await self.check_expression_at(queue, subscription)

    async def check_expression_at(self, queue: MessageQueue, subscription: Subscription) -> None:
        """Compile an expression at the broker that serves the reads of a queue."""
        if subscription.expression_type != "TAG":
            await self.instance.reads.run(
                queue, lambda target: self.compile_expression(target.addr, subscription)
            )

    async def compile_expression(self, addr: str, subscription: Subscription) -> None:
        """Compile each SQL92 expression at a broker once. Raises BrokerError with the broker's remark.

        If Apache's broker cannot compile the expression of a pull, it returns every message.
        """
        asked = addr, subscription.topic, subscription.expression
        if subscription.expression_type == "TAG" or asked in self._compiled:
            return
        instance = self.instance
        await instance.brokers.check_client_config(addr, instance.client_id, self.name, subscription.data())
        if len(self._compiled) >= _MAX_COMPILED_EXPRESSIONS:
            self._compiled.clear()
        self._compiled.add(asked)

    async def start_offset(self, queue: MessageQueue, stored: int | None) -> int:
        """Return the start offset of a queue, whose stored offset is `stored`, if there is one."""
        where = self.options.consume_from_where
        offset = await start_offset(self.instance, queue, stored, where, self._start_time_ms)
        if stored is None and self.options.start_strictly:
            if where is ConsumeFromWhere.TIMESTAMP:
                offset = await self._not_older(queue, offset)
            # Store the offset even if no message is consumed. Otherwise the next member to own the queue
            # would determine a start offset again. By then the queue may have grown, and LAST_OFFSET would
            # skip the messages that were added in the meantime.
            self.offsets.update(queue, offset)
        return offset

    async def _not_older(self, queue: MessageQueue, offset: int) -> int:
        """Return `offset`, or the next offset if the message at `offset` is older than the start time.

        A broker of 4.9 answers a search by time with the nearest message, which may be older.
        """
        request = pull_request(self.name, queue, offset, 1)

        async def pull(target: ReadTarget) -> PullResult:
            return await self.instance.brokers.pull(target.addr, queue, request)

        found = (await self.instance.reads.run(queue, pull)).messages
        older = bool(found) and found[0].store_timestamp_ms < self._start_time_ms
        return offset + older


@dataclass(slots=True)
class ConsumerGroup(Group):
    """The data that the parts of a push consumer share: those of a Group, and the group's retry topic."""

    options: PushOptions

    @property
    def retry_topic(self) -> str:
        return RETRY_PREFIX + self.name

    def restore_topic(self, message: MessageExt) -> None:
        """Replace the retry topic of a message with its original topic."""
        if message.topic == self.retry_topic:
            message.topic = self.instance.namespace.unwrap(message.properties.get(RETRY_TOPIC, message.topic))
