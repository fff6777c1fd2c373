"""The administration API: the operations of `mqadmin` as one asyncio object.

    async with Admin("127.0.0.1:9876") as admin:
        print(await admin.topics())

The API works with CometMQ and with Apache RocketMQ. Every failure is a typed error that names the server and
the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from cometmq.admin.errors import NoLeaderError, UnknownNameError
from cometmq.admin.message_admin import MessageAdmin
from cometmq.admin.offsets import OffsetAdmin
from cometmq.admin.servers import MAX_CONCURRENT_BROKERS, check_cluster
from cometmq.admin.stats import StatsAdmin
from cometmq.admin.topic_admin import LiteTopicAdmin, TopicSettings
from cometmq.admin.values import BrokerStatus, GroupSummary, broker_places, with_lags
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.workers import for_each
from cometmq.client.producer.producer import Producer
from cometmq.errors import BrokerError, CometError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import QueryCorrectionOffsetBody
from cometmq.protocol.bodies.admin import HaRuntimeInfo, RaftStatus
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import QueryCorrectionOffsetRequestHeader
from cometmq.protocol.headers.admin import RemoveBrokerHeader

__all__ = ["Admin", "TopicSettings"]

ADMIN_TIMEOUT_S = 5.0


class Admin(StatsAdmin, MessageAdmin, OffsetAdmin, LiteTopicAdmin):
    """Administration operations on the clusters that are registered at a set of name servers.

    An `Admin` is an asynchronous context manager. Times are milliseconds since the Unix epoch. Durations
    whose name ends in `_s` are seconds. Offsets count the messages of a queue from 0.

    Parameters that mean the same in all operations, which describe them only if they differ:

    - `addr`, `broker_addr`: address of a broker, "host:port". Where it is optional: only this broker.
    - `cluster`: name of a cluster. Together with `broker_addr`: all masters of the cluster, if `broker_addr`
      is None. Where it is optional: only this cluster, else all of them.
    - `missing`: receives the error of each broker that fails, by broker name. None: the first is raised.

    Errors that many operations raise, and list only if they have another reason:

    - RemotingError: a server is unreachable or does not answer in time.
    - BrokerError: a server refuses the request.
    - NoRouteError: no name server has the topic.
    - UnknownNameError: the cluster, the broker or the consumer group does not exist.
    - the first error of a broker: a broker fails and `missing` is None, or all brokers of a topic fail.
    """

    def __init__(
        self,
        namesrv: str | Sequence[str] | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
        options: ClientOptions | None = None,
    ) -> None:
        """Store the connection parameters. `start()` or `async with` opens the connections.

        Args:
            namesrv: Addresses of the name servers, as a list or as "host:port;host:port". None: the
                environment variable COMETMQ_NAMESRV or NAMESRV_ADDR, or else 127.0.0.1:9876.
            timeout_s: Timeout of each request, in seconds.
            options: TLS and the account that signs the requests (`access_key`, `secret_key`). Other options
                have no effect.
        """
        instance = str(time.time_ns() // 1_000_000)
        self._access = options if options is not None else ClientOptions()
        options = replace(self._access, api_timeout_s=timeout_s, instance_name=instance, namespace="")
        super().__init__("admin", namesrv, None, options)
        self._producer: Producer | None = None

    async def _begin(self) -> None:
        await self._start_client()

    async def _end(self, *, drain: bool) -> None:
        del drain
        try:
            if self._producer is not None:
                await self._producer.stop()
        finally:
            await self._close_client()

    # -- brokers

    async def runtime(self, broker_addr: str) -> dict[str, str]:
        """Return the runtime table of a broker, which holds statistics and states as text, by name."""
        return await self.client.brokers.runtime_info(broker_addr)

    async def brokers(self, cluster: str | None = None) -> list[BrokerStatus]:
        """Return every broker with its runtime table, role and replication lag.

        Returns:
            One value per broker process. `problem` holds the error of a broker that did not answer.
        """
        info = await self.cluster_info()
        if cluster is not None:
            check_cluster(cluster, info)

        async def status(place: BrokerStatus) -> BrokerStatus:
            try:
                known = place.with_runtime(await self.runtime(place.broker_addr))
                return msgspec.structs.replace(known, received_ms=int(time.time() * 1000))
            except CometError as error:
                return msgspec.structs.replace(place, problem=str(error))

        found = await for_each(broker_places(info, cluster), status, MAX_CONCURRENT_BROKERS)
        return with_lags(found)

    async def ha_status(self, broker_addr: str) -> HaRuntimeInfo:
        """Return the replication state of a broker.

        Args:
            broker_addr: A master, a slave or a member of a raft group.

        Returns:
            For a master: its slaves and their positions. For a member of a raft group: the other members
                and their positions. For a slave: its master.
        """
        return await self.client.brokers.ha_status(broker_addr)

    async def reset_master_flush_offset(self, broker_addr: str, offset: int) -> None:
        """Send a slave the position up to which its master has flushed its log (RocketMQ 5.x).

        Args:
            offset: Position in the master's commit log, in bytes.
        """
        await self.client.brokers.reset_master_flush_offset(broker_addr, offset)

    async def add_broker(self, container_addr: str, config_path: str) -> None:
        """Start a broker in a broker container of Apache RocketMQ 5.x.

        Args:
            config_path: Settings file of the broker, on the container's machine.
        """
        await self.client.brokers.add_broker(container_addr, config_path)

    async def remove_broker(self, container_addr: str, cluster: str, name: str, broker_id: int) -> None:
        """Stop a broker of a broker container of Apache RocketMQ 5.x.

        Args:
            broker_id: Id of the broker; 0 is a master.
        """
        header = RemoveBrokerHeader(broker_cluster_name=cluster, broker_name=name, broker_id=broker_id)
        await self.client.brokers.remove_broker(container_addr, header)

    # -- consumer groups

    async def correction_offsets(
        self, topic: str, compare_group: str, left_out: Iterable[str] = ()
    ) -> dict[MessageQueue, int]:
        """Return the lowest offset that any consumer group has in each queue of a topic.

        Apache's brokers delete the offsets of the excluded groups.

        Args:
            compare_group: Group whose offset is compared with the lowest offset.

        Returns:
            Offset by queue: the lowest of all groups that are not excluded, or 2**63 - 1 where the offset of
                `compare_group` is lower.
        """
        header = QueryCorrectionOffsetRequestHeader(
            topic=topic, compare_group=compare_group, filter_groups=",".join(left_out) or None
        )
        found: dict[MessageQueue, int] = {}
        for name, addr in broker_addrs(await self.client.namesrv.route(topic)).items():
            answer = await self.client.brokers.fetch(
                addr, RequestCode.QUERY_CORRECTION_OFFSET, QueryCorrectionOffsetBody, header, topic=topic
            )
            for queue_id, offset in answer.correction_offsets.items():
                found[MessageQueue(topic, name, queue_id)] = offset
        return found

    async def groups(
        self, containing: str = "", *, missing: dict[str, CometError] | None = None
    ) -> list[GroupSummary]:
        """Return a summary of each consumer group, the largest lag first.

        Args:
            containing: Only groups whose names contain this text.
            missing: Receives the error of each broker that fails, by broker name. If such a broker may have
                messages for a group, the group's rate and lag are None. None: the first error is raised.
        """
        failures = {} if missing is None else missing
        places = await self.group_places(missing=missing)
        wanted = {name: brokers for name, brokers in places.items() if containing in name}
        found = [await self._summary(name, brokers, failures) for name, brokers in wanted.items()]
        return sorted(found, key=lambda row: (-(row.diff_total or 0), row.group))

    # -- raft groups

    async def raft_group(self, broker_name: str | None = None) -> dict[str, RaftStatus | str]:
        """Return the raft state that each member of a raft group reports.

        Args:
            broker_name: Name of the group. None: the only broker name of the cluster.

        Returns:
            The status of each member by its address, or the text of the error if the member does not answer.
        """
        found: dict[str, RaftStatus | str] = {}
        for addr in await self._raft_addrs(broker_name):
            try:
                found[addr] = await self.client.brokers.raft_status(addr)
            except CometError as error:
                unknown = (
                    isinstance(error, BrokerError) and error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                )
                found[addr] = "the broker is no member of a raft group" if unknown else str(error)
        return found

    async def change_raft_group(self, action: str, member: str, broker_name: str | None = None) -> None:
        """Change the leader or the members of a raft group.

        Args:
            action: "transfer" (make the member the leader), "addLearner" (replicate the log to a member
                without a vote), "promote" (give a learner a vote) or "remove".
            member: Id of the member, as the broker setting `dLegerPeers` lists it, for example "n1".
            broker_name: Name of the group. None: the only broker name of the cluster.

        Raises:
            CommandError: The leader refuses; the error holds the reason.
            NoLeaderError: No member is the leader.
        """
        await self.client.brokers.change_raft_group(await self.raft_leader(broker_name), action, member)

    async def raft_leader(self, broker_name: str | None = None) -> str:
        """Return the address of the leader of a raft group.

        Args:
            broker_name: Name of the group. None: the only broker name of the cluster.

        Raises:
            NoLeaderError: No member is the leader.
        """
        for addr, status in (await self.raft_group(broker_name)).items():
            if isinstance(status, RaftStatus) and status.role == "leader":
                return addr
        raise NoLeaderError(broker_name or "")

    async def _raft_addrs(self, broker_name: str | None) -> list[str]:
        table = (await self.cluster_info()).broker_addr_table
        if broker_name is None and len(table) == 1:
            broker_name = next(iter(table))
        if broker_name not in table:
            raise UnknownNameError("broker", broker_name or "", sorted(table))
        return [addr for _, addr in sorted(table[broker_name].broker_addrs.items())]
