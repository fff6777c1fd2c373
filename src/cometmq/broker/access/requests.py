"""Handlers of the requests that change and show ACL files (docs/reference/remoting.md, ACL).

Requests 50 to 53 change accounts and white lists, and return versions. CometMQ's own requests 21006 and 21007
list accounts and explain decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from cometmq import logs
from cometmq.broker.access import REFUSALS
from cometmq.broker.access.accounts import Account, AclFile, account_of, rate_list, to_plain
from cometmq.broker.access.addresses import split_patterns
from cometmq.broker.access.decision import Policy, explained
from cometmq.broker.access.guard import Guard
from cometmq.broker.base.address import BrokerAddress, host_port
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol import headers
from cometmq.protocol.bodies import AclAccount, AclAccounts, DataVersion
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection
from cometmq.settings import BODY_MAX

log = logs.logger(__name__)


@dataclass(eq=False)
class AclRequests:
    """Handles requests about access control."""

    config: BrokerConfig
    address: BrokerAddress
    guard: Guard

    @handles(RequestCode.UPDATE_AND_CREATE_ACL_CONFIG)
    async def update_and_create_acl_config(self, connection: Connection, frame: Frame) -> Frame:
        """Add an account, or change an existing one."""
        header, files = frame.header(headers.CreateAccessConfigRequestHeader), self.guard.files

        def change() -> Policy:
            return files.put(changed(files.account(header.access_key), header))

        return await self._change(connection, frame, change, f"account {header.access_key!r} is written")

    @handles(RequestCode.DELETE_ACL_CONFIG)
    async def delete_acl_config(self, connection: Connection, frame: Frame) -> Frame:
        """Remove an account."""
        access_key = frame.header(headers.DeleteAccessConfigRequestHeader).access_key
        change = partial(self.guard.files.delete, access_key)
        return await self._change(connection, frame, change, f"account {access_key!r} is deleted")

    @handles(RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG)
    async def update_global_white_addrs_config(self, connection: Connection, frame: Frame) -> Frame:
        """Replace the global white list of an ACL file."""
        header = frame.header(headers.UpdateGlobalWhiteAddrsConfigRequestHeader)

        def change() -> Policy:
            patterns = split_patterns(header.global_white_addrs)
            return self.guard.files.set_white(patterns, header.acl_file_full_path or "")

        what = f"the global white list is {header.global_white_addrs!r}"
        return await self._change(connection, frame, change, what)

    @handles(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
    def get_broker_cluster_acl_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the data version of each ACL file. A data version counts the changes to its file."""
        _check_size(frame)
        files, versions = self.guard.files, self.guard.files.versions
        header = headers.AclConfigVersionResponseHeader(
            version=versions.get(files.default, DataVersion()).encode().decode(),
            all_acl_file_version=msgspec.json.encode(
                {path: msgspec.Raw(each.encode()) for path, each in versions.items()}
            ).decode(),
            broker_name=self.config.broker_name,
            broker_addr=host_port(self.config.broker_ip1, self.address.port),
            cluster_name=self.config.broker_cluster_name,
        )
        return frame.response(header=header)

    @handles(RequestCode.LIST_ACCOUNTS)
    async def list_accounts(self, _connection: Connection, frame: Frame) -> Frame:
        """Return all accounts without secret keys, and the global white lists (CometMQ's own request)."""
        _check_size(frame)
        async with self.guard.lock:
            body = await asyncio.to_thread(_listing, self.guard.files.contents)
        return frame.response(body=body)

    @handles(RequestCode.EXPLAIN_ACCESS)
    def explain_access(self, _connection: Connection, frame: Frame) -> Frame:
        """Return whether the current policy allows an account's action, and why (CometMQ's own request)."""
        _check_size(frame)
        header, policy = frame.header(headers.ExplainAccessRequestHeader), self.guard.policy
        try:
            verdict = explained(policy, header.user, header.action, header.resource or "", header.host or "")
        except ConfigError as error:
            raise CommandError.failed(str(error)) from None
        return frame.response(
            header=headers.ExplainAccessResponseHeader(allowed=verdict.allowed, reason=verdict.reason)
        )

    async def _change(
        self, connection: Connection, frame: Frame, change: Callable[[], Policy], what: str
    ) -> Frame:
        code, guard = _check_size(frame), self.guard
        async with guard.lock:
            try:
                guard.use(await asyncio.to_thread(change))
            except KeyError as error:
                raise CommandError(
                    code, f"{error.args[0]!r} is neither an account nor an access file"
                ) from None
            except (ConfigError, OSError) as error:
                raise CommandError(code, str(error)) from None
        log.info("access control: %s, requested by %s", what, connection.peer)
        return frame.response()


def _check_size(frame: Frame) -> ResponseCode:
    """Return the code with which a request is refused. Raises CommandError if its fields are too long."""
    code, size = REFUSALS[RequestCode(frame.code)], sum(map(len, (frame.ext or {}).values()))
    if size > BODY_MAX:
        raise CommandError(code, f"the settings have {size} characters, at most {BODY_MAX} are allowed")
    return code


def changed(before: Account | None, header: headers.CreateAccessConfigRequestHeader) -> Account:
    """Return the account after a request, which keeps what the request does not name. Raises ConfigError."""
    given = {
        "accessKey": header.access_key,
        "secretKey": header.secret_key or None,
        "whiteRemoteAddress": header.white_remote_address,
        "admin": header.admin,
        "defaultTopicPerm": header.default_topic_perm or None,
        "defaultGroupPerm": header.default_group_perm or None,
        "topicPerms": _listed(header.topic_perms),
        "groupPerms": _listed(header.group_perms),
        "rateLimits": _listed(header.rate_limits),
    }
    plain = {} if before is None else to_plain(before)
    return account_of({**plain, **{name: value for name, value in given.items() if value is not None}})


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [item.strip() for item in text.split(",") if item.strip()]


def _listing(contents: Mapping[str, AclFile]) -> bytes:
    accounts = [
        AclAccount(
            access_key=account.access_key,
            white_remote_address=plain["whiteRemoteAddress"],
            admin=account.admin,
            default_topic_perm=plain["defaultTopicPerm"],
            default_group_perm=plain["defaultGroupPerm"],
            topic_perms=plain["topicPerms"],
            group_perms=plain["groupPerms"],
            rate_limits=rate_list(account),
            file=path,
        )
        for path, content in contents.items()
        for account in content.accounts
        for plain in [to_plain(account)]
    ]
    white = {path: [each.text for each in content.white] for path, content in contents.items()}
    return AclAccounts(accounts=accounts, global_white_remote_addresses=white).encode()
