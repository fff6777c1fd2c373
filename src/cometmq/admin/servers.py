"""Settings, files, permissions and accounts of brokers and name servers (docs/security.md, Access)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import BrokerSettings, PermChange, SettingsChange, Stats, StatsSpan, broker_places
from cometmq.client.cluster.lookups import Client
from cometmq.client.cluster.workers import for_each
from cometmq.errors import BodyError, BrokerError, CometError
from cometmq.protocol import headers
from cometmq.protocol.bodies import AclAccounts, ClusterInfo, DataVersion
from cometmq.protocol.bodies.admin import BrokerStatsData, BrokerStatsItem
from cometmq.protocol.codes import MASTER_ID, RequestCode
from cometmq.protocol.headers.admin import UpdateBrokerConfigResponseHeader, ViewBrokerStatsDataRequestHeader
from cometmq.protocol.java_properties import format_properties, parse_properties

T = TypeVar("T")

MAX_CONCURRENT_BROKERS = 16  # Maximum number of brokers to which requests are sent concurrently
FILES_TIMEOUT_S = 60.0  # Timeout of a request to delete files: a broker responds when they are deleted
STATS_NOT_EXIST = "not exist"


async def ask_each(
    addrs: Mapping[str, str],
    ask: Callable[[str, str], Awaitable[T]],
    missing: dict[str, CometError] | None,
    *,
    need_answer: bool = True,
) -> dict[str, T]:
    """Call `ask(name, addr)` for each broker in `addrs`, and return the results by broker name.

    Args:
        missing: Receives the errors of the calls that failed, by broker name. None: the first is raised.
        need_answer: Raise the first error if no broker answers.
    """
    answers: dict[str, T] = {}
    failures: dict[str, CometError] = {}

    async def one(name: str) -> None:
        try:
            answers[name] = await ask(name, addrs[name])
        except CometError as error:
            failures[name] = error

    await for_each(addrs, one, MAX_CONCURRENT_BROKERS)
    failures = dict(sorted(failures.items()))
    if failures and (missing is None or (need_answer and not answers)):
        raise next(iter(failures.values()))
    if missing is not None:
        missing |= failures
    return dict(sorted(answers.items()))


class AclVersion(msgspec.Struct, frozen=True):
    """The version of a broker's access file: the number of changes and the time of the last change (ms)."""

    cluster_name: str
    broker_name: str
    broker_addr: str
    file: str
    counter: int
    timestamp_ms: int


class ServerAdmin(Client):
    """Operations on brokers and name servers."""

    async def cluster_info(self) -> ClusterInfo:
        """Return all clusters, brokers and addresses that are registered at a name server."""
        return await self.client.namesrv.cluster_info()

    async def cluster_addrs(
        self, cluster: str | None = None, *, slaves: bool = False
    ) -> dict[str, list[str]]:
        """Return the addresses of the masters and, if requested, of their slaves.

        Args:
            slaves: Include the addresses of the slaves.

        Returns:
            The addresses of the slaves by the address of their master ([] without `slaves`).
        """
        info = await self.cluster_info()
        if cluster is not None:
            check_cluster(cluster, info)
        names = {
            name
            for each, members in info.cluster_addr_table.items()
            if cluster in (None, each)
            for name in members
        }
        found: dict[str, list[str]] = {}
        for name in sorted(names & info.broker_addr_table.keys()):
            addrs = dict(sorted(info.broker_addr_table[name].broker_addrs.items()))
            if (master := addrs.pop(MASTER_ID, None)) is not None:
                found[master] = list(addrs.values()) if slaves else []
        return found

    async def master_addrs(self, cluster: str) -> list[str]:
        """Return the addresses of a cluster's masters."""
        return list(await self.cluster_addrs(cluster))

    async def masters(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return the addresses of masters by broker name.

        Args:
            names: Only these brokers. None: all masters, sorted by broker name.

        Raises:
            UnknownNameError: There is no master with one of these names.
        """
        table = (await self.cluster_info()).broker_addr_table
        known = {
            name: data.broker_addrs[MASTER_ID]
            for name, data in sorted(table.items())
            if MASTER_ID in data.broker_addrs
        }
        for name in names if names is not None else ():
            if name not in known:
                raise UnknownNameError("master of broker", name, sorted(known))
        return known if names is None else {name: known[name] for name in names}

    async def target_addrs(self, broker_addr: str | None, cluster: str | None) -> list[str]:
        """Return `broker_addr`, or if it is None the addresses of the cluster's masters."""
        return [broker_addr] if broker_addr else await self.master_addrs(cluster or "")

    async def names_in(self, cluster: str) -> set[str]:
        """Return the broker names of a cluster."""
        info = await self.cluster_info()
        check_cluster(cluster, info)
        return set(info.cluster_addr_table[cluster])

    # -- brokers

    async def broker_config(self, broker_addr: str) -> BrokerSettings:
        """Return all settings of a broker as text, and which of them have no effect."""
        answer = await self.client.brokers.call(broker_addr, RequestCode.GET_BROKER_CONFIG)
        settings = BrokerSettings(parse_properties(bytes(answer.body).decode("utf-8", "replace")))
        settings.without_effect = frozenset(((answer.ext or {}).get("withoutEffect") or "").split())
        return settings

    async def update_broker_config(self, broker_addr: str, settings: Mapping[str, str]) -> SettingsChange:
        """Change settings of a running broker, which also writes them to its settings file if it has one.

        Returns:
            Which changes take effect later or not at all. Apache's brokers do not report this.

        Raises:
            BrokerError: A value is not valid (no setting was changed; the error names the key and the
                expected values), or the settings file cannot be written (the settings were changed).
        """
        body = format_properties(dict(settings)).encode()
        answer = await self.client.brokers.call(broker_addr, RequestCode.UPDATE_BROKER_CONFIG, body=body)
        response = answer.header(UpdateBrokerConfigResponseHeader)
        return SettingsChange(
            broker_addr=broker_addr,
            at_next_start=(response.at_next_start or "").split(),
            unknown=(response.unknown or "").split(),
            without_effect=(response.without_effect or "").split(),
            not_written=bool(response.not_written),
        )

    async def clean_expired_consume_queues(self, broker_addr: str) -> None:
        """Delete those consume-queue and index files of a broker whose messages have all been deleted."""
        await self._files(broker_addr, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)

    async def clean_unused_topics(self, broker_addr: str) -> None:
        """Delete a broker's queues of topics that are no longer configured."""
        await self._files(broker_addr, RequestCode.CLEAN_UNUSED_TOPIC)

    async def delete_expired_commit_log(self, broker_addr: str) -> None:
        """Delete the expired segments of a broker's commit log now instead of at its configured hour."""
        await self._files(broker_addr, RequestCode.DELETE_EXPIRED_COMMITLOG)

    async def _files(self, broker_addr: str, code: RequestCode) -> None:
        timeout_s = max(self.client.brokers.timeout_s, FILES_TIMEOUT_S)
        await self.client.brokers.call(broker_addr, code, timeout_s=timeout_s)

    async def broker_stats(self, broker_addr: str, name: str, key: str) -> Stats | None:
        """Return a statistic of a broker (docs/reference/remoting.md, Statistics and connections).

        Args:
            name: Name of the statistic, for example TOPIC_PUT_NUMS or GROUP_GET_NUMS.
            key: Subject of the statistic: a topic, or topic@group.

        Returns:
            The counts of the last minute, hour and day. None: the broker has no such statistic.
        """
        header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
        try:
            data = await self.client.brokers.fetch(
                broker_addr, RequestCode.VIEW_BROKER_STATS_DATA, BrokerStatsData, header
            )
        except BrokerError as error:
            if STATS_NOT_EXIST in (error.remark or ""):
                return None
            raise
        return Stats(minute=_span(data.stats_minute), hour=_span(data.stats_hour), day=_span(data.stats_day))

    # -- name servers

    async def namesrv_configs(self) -> dict[str, dict[str, str]]:
        """Return all settings of every name server, by the address of the name server."""
        return {addr: await self.namesrv_config(addr) for addr in self.client.namesrv.addrs}

    async def namesrv_config(self, addr: str) -> dict[str, str]:
        """Return all settings of one name server as text."""
        answer = await self.client.namesrv.call(addr, RequestCode.GET_NAMESRV_CONFIG)
        return parse_properties(bytes(answer.body).decode("utf-8", "replace"))

    async def known_by(self, addr: str) -> ClusterInfo:
        """Return all clusters, brokers and addresses that are registered at one name server."""
        return await self.client.namesrv.fetch(addr, RequestCode.GET_BROKER_CLUSTER_INFO, ClusterInfo)

    async def update_namesrv_config(self, settings: Mapping[str, str]) -> list[str]:
        """Change settings of all name servers, which also write them to their settings files.

        Returns:
            The addresses of the name servers.

        Raises:
            BrokerError: A name server refuses. The name servers after it are unchanged.
        """
        body = format_properties(dict(settings)).encode()
        for addr in self.client.namesrv.addrs:
            await self.client.namesrv.call(addr, RequestCode.UPDATE_NAMESRV_CONFIG, body=body)
        return list(self.client.namesrv.addrs)

    async def kv_config(self, namespace: str, key: str) -> str | None:
        """Return a key's value from the first name server that has one, None if no name server has one."""
        return await self.client.namesrv.kv_config(namespace, key)

    async def put_kv_config(self, namespace: str, key: str, value: str) -> None:
        """Set a value of the key-value configuration at all name servers."""
        for addr in self.client.namesrv.addrs:
            await self.client.namesrv.put_kv_config(addr, namespace, key, value)

    async def delete_kv_config(self, namespace: str, key: str) -> None:
        """Remove a value of the key-value configuration from all name servers.

        A missing value is no error.
        """
        for addr in self.client.namesrv.addrs:
            await self.client.namesrv.delete_kv_config(addr, namespace, key)

    async def wipe_write_perm(self, broker_name: str) -> list[PermChange]:
        """Remove the write permission of a broker's topics at all name servers.

        Producers then stop sending to the broker. The change lasts until the broker registers a change of its
        topics, or until `add_write_perm`.

        Returns:
            The number of changed topics, or the error, of each name server.
        """
        return await self._change_write_perms(broker_name, allow=False)

    async def add_write_perm(self, broker_name: str) -> list[PermChange]:
        """Restore the write permission of a broker's topics at all name servers, see `wipe_write_perm`."""
        return await self._change_write_perms(broker_name, allow=True)

    async def _change_write_perms(self, broker_name: str, *, allow: bool) -> list[PermChange]:
        await self.check_broker_name(broker_name)
        addrs = self.client.namesrv.addrs
        return [await self.change_write_perm(addr, broker_name, allow=allow) for addr in addrs]

    async def check_broker_name(self, broker_name: str) -> None:
        """Raise UnknownNameError if there is no such broker name."""
        known = (await self.cluster_info()).broker_addr_table
        if broker_name not in known:
            raise UnknownNameError("broker", broker_name, sorted(known))

    async def change_write_perm(self, namesrv: str, broker_name: str, *, allow: bool) -> PermChange:
        """Restore or remove the write permission of a broker's topics at one name server.

        Args:
            allow: Restore the permission. False: remove it.

        Returns:
            The number of changed topics, or the error of the name server.
        """
        header = headers.BrokerNameRequestHeader(broker_name=broker_name)
        code = RequestCode.ADD_WRITE_PERM_OF_BROKER if allow else RequestCode.WIPE_WRITE_PERM_OF_BROKER
        topics, problem = 0, ""
        try:
            answer = await self.client.namesrv.call(namesrv, code, header)
            if allow:
                topics = answer.header(headers.AddWritePermOfBrokerResponseHeader).add_topic_count
            else:
                topics = answer.header(headers.WipeWritePermOfBrokerResponseHeader).wipe_topic_count
        except CometError as error:
            problem = str(error)
        return PermChange(namesrv=namesrv, broker_name=broker_name, topics=topics, problem=problem)

    # -- accounts and white lists (requests 50 to 53, and CometMQ's own 21006 and 21007)

    async def addrs_in(self, cluster: str) -> list[str]:
        """Return the addresses of all brokers of a cluster, including slaves."""
        info = await self.cluster_info()
        check_cluster(cluster, info)
        return [place.broker_addr for place in broker_places(info, cluster)]

    async def put_account(self, addr: str, account: headers.CreateAccessConfigRequestHeader) -> None:
        """Add an account to a broker, or change an existing account.

        Args:
            account: The account. Values of an existing account remain where a field is None.
        """
        await self.client.brokers.call(addr, RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, account)

    async def delete_account(self, addr: str, access_key: str) -> None:
        """Delete an account from the access files of a broker."""
        header = headers.DeleteAccessConfigRequestHeader(access_key=access_key)
        await self.client.brokers.call(addr, RequestCode.DELETE_ACL_CONFIG, header)

    async def set_white_list(self, addr: str, patterns: Sequence[str], file: str = "") -> None:
        """Replace the global white list of an access file of a broker.

        Args:
            patterns: Addresses that need no account, for example "10.0.0.*".
            file: The access file. "": the default file.
        """
        header = headers.UpdateGlobalWhiteAddrsConfigRequestHeader(
            global_white_addrs=",".join(patterns), acl_file_full_path=file
        )
        await self.client.brokers.call(addr, RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, header)

    async def accounts(self, addr: str) -> AclAccounts:
        """Return the accounts of a CometMQ broker, without their secrets, and its global white lists."""
        return await self.client.brokers.fetch(addr, RequestCode.LIST_ACCOUNTS, AclAccounts)

    async def explain_access(
        self, addr: str, user: str, action: str, resource: str = "", host: str = ""
    ) -> tuple[bool, str]:
        """Return whether an account has a permission at a CometMQ broker, and the rule that decides this.

        Args:
            action: "pub", "sub" or "admin".
            resource: "topic:NAME", "group:NAME", or NAME, which is a topic. "": none, for "admin".
            host: Address of the client, which is compared with the white lists. "": unknown.
        """
        header = headers.ExplainAccessRequestHeader(
            user=user, action=action, resource=resource or None, host=host or None
        )
        answer = await self.client.brokers.call(addr, RequestCode.EXPLAIN_ACCESS, header)
        found = answer.header(headers.ExplainAccessResponseHeader)
        return found.allowed, found.reason

    async def acl_versions(self, addr: str) -> list[AclVersion]:
        """Return the versions of a broker's access files."""
        answer = await self.client.brokers.call(addr, RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
        header = answer.header(headers.AclConfigVersionResponseHeader)
        try:
            files = msgspec.json.decode(header.all_acl_file_version or "{}", type=dict[str, DataVersion])
        except msgspec.DecodeError as error:
            raise BodyError("allAclFileVersion", str(error)) from None
        return [
            AclVersion(
                cluster_name=header.cluster_name,
                broker_name=header.broker_name,
                broker_addr=header.broker_addr,
                file=file,
                counter=version.counter,
                timestamp_ms=version.timestamp,
            )
            for file, version in sorted(files.items())
        ]


def check_cluster(cluster: str, info: ClusterInfo) -> None:
    """Raise UnknownNameError if the cluster does not exist."""
    if cluster not in info.cluster_addr_table:
        raise UnknownNameError("cluster", cluster, sorted(info.cluster_addr_table))


def _span(item: BrokerStatsItem) -> StatsSpan:
    return StatsSpan(sum=item.sum, tps=item.tps)
