"""Accounts and white lists of brokers, changed by requests (docs/security.md, Access)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cometmq.admin.admin import Admin
from cometmq.admin.errors import UnknownNameError
from cometmq.errors import BodyError
from cometmq.protocol.bodies import AclAccounts, DataVersion
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    AclConfigVersionResponseHeader,
    CreateAccessConfigRequestHeader,
    DeleteAccessConfigRequestHeader,
    ExplainAccessRequestHeader,
    ExplainAccessResponseHeader,
    UpdateGlobalWhiteAddrsConfigRequestHeader,
)


class AclVersion(msgspec.Struct, frozen=True):
    """The version of a broker's access file: number of its changes, and last change (ms since 1970)."""

    cluster_name: str
    broker_name: str
    broker_addr: str
    file: str
    counter: int
    timestamp_ms: int


class Accounts:
    """Requests about accounts (50 to 53, and CometMQ's 21006 and 21007), each of which goes to one broker.

    All methods that send a request may raise BrokerError and RemotingError.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def addrs(self, cluster: str) -> list[str]:
        """Return all brokers of a cluster, including slaves. Raises UnknownNameError."""
        info = await self._admin.cluster_info()
        if cluster not in info.cluster_addr_table:
            raise UnknownNameError("cluster", cluster, sorted(info.cluster_addr_table))
        names = sorted(info.cluster_addr_table[cluster])
        brokers = [info.broker_addr_table[name] for name in names if name in info.broker_addr_table]
        return [addr for broker in brokers for _, addr in sorted(broker.broker_addrs.items())]

    async def put(self, addr: str, account: CreateAccessConfigRequestHeader) -> None:
        """Add an account, or change the fields of an account that the header sets."""
        await self._admin.client.brokers.call(addr, RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, account)

    async def delete(self, addr: str, access_key: str) -> None:
        header = DeleteAccessConfigRequestHeader(access_key=access_key)
        await self._admin.client.brokers.call(addr, RequestCode.DELETE_ACL_CONFIG, header)

    async def set_white(self, addr: str, patterns: Sequence[str], file: str = "") -> None:
        """Replace the global white list of an access file; "" is the default file."""
        header = UpdateGlobalWhiteAddrsConfigRequestHeader(
            global_white_addrs=",".join(patterns), acl_file_full_path=file
        )
        await self._admin.client.brokers.call(addr, RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, header)

    async def listed(self, addr: str) -> AclAccounts:
        """Return the accounts of a CometMQ broker, without their secrets, and its global white lists."""
        return AclAccounts.decode(
            (await self._admin.client.brokers.call(addr, RequestCode.LIST_ACCOUNTS)).body
        )

    async def explain(
        self, addr: str, user: str, action: str, resource: str = "", host: str = ""
    ) -> tuple[bool, str]:
        """Return whether an account has a permission at a CometMQ broker, and the rule that decides."""
        header = ExplainAccessRequestHeader(
            user=user, action=action, resource=resource or None, host=host or None
        )
        answer = await self._admin.client.brokers.call(addr, RequestCode.EXPLAIN_ACCESS, header)
        found = answer.header(ExplainAccessResponseHeader)
        return found.allowed, found.reason

    async def versions(self, addr: str) -> list[AclVersion]:
        """Return the versions of a broker's access files."""
        answer = await self._admin.client.brokers.call(addr, RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
        header = answer.header(AclConfigVersionResponseHeader)
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
