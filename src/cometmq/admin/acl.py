"""Accounts and white lists of brokers, changed by requests (docs/security.md, Access)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cometmq.admin.servers import ServerAdmin, check_cluster
from cometmq.admin.values import broker_places
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
    """The version of a broker's access file: the number of changes and the time of the last change (ms)."""

    cluster_name: str
    broker_name: str
    broker_addr: str
    file: str
    counter: int
    timestamp_ms: int


class AccessAdmin(ServerAdmin):
    """Operations on accounts and white lists (requests 50 to 53, and CometMQ's own 21006 and 21007)."""

    async def addrs_in(self, cluster: str) -> list[str]:
        """Return the addresses of all brokers of a cluster, including slaves.

        Raises:
            UnknownNameError: The cluster does not exist.
        """
        info = await self.cluster_info()
        check_cluster(cluster, info)
        return [place.broker_addr for place in broker_places(info, cluster)]

    async def put_account(self, addr: str, account: CreateAccessConfigRequestHeader) -> None:
        """Add an account to a broker, or change an existing account.

        Args:
            addr: Address of the broker.
            account: The account. Values of an existing account remain where a field is None.
        """
        await self.client.brokers.call(addr, RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, account)

    async def delete_account(self, addr: str, access_key: str) -> None:
        """Delete an account from the access files of a broker.

        Args:
            addr: Address of the broker.
            access_key: Name of the account.
        """
        header = DeleteAccessConfigRequestHeader(access_key=access_key)
        await self.client.brokers.call(addr, RequestCode.DELETE_ACL_CONFIG, header)

    async def set_white_list(self, addr: str, patterns: Sequence[str], file: str = "") -> None:
        """Replace the global white list of an access file of a broker.

        Args:
            addr: Address of the broker.
            patterns: Addresses that need no account, for example "10.0.0.*".
            file: The access file. "": the default file.
        """
        header = UpdateGlobalWhiteAddrsConfigRequestHeader(
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
            addr: Address of the broker.
            user: Name of the account.
            action: "pub", "sub" or "admin".
            resource: "topic:NAME", "group:NAME", or NAME, which is a topic. "": none, for "admin".
            host: Address of the client, which is compared with the white lists. "": unknown.
        """
        header = ExplainAccessRequestHeader(
            user=user, action=action, resource=resource or None, host=host or None
        )
        answer = await self.client.brokers.call(addr, RequestCode.EXPLAIN_ACCESS, header)
        found = answer.header(ExplainAccessResponseHeader)
        return found.allowed, found.reason

    async def acl_versions(self, addr: str) -> list[AclVersion]:
        """Return the versions of a broker's access files."""
        answer = await self.client.brokers.call(addr, RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
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
