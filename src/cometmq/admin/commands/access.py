"""`mqadmin` commands for accounts and white lists."""

from __future__ import annotations

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import shell
from cometmq.admin.servers import AclVersion
from cometmq.command_options import name_option, opt, switch, watch_option
from cometmq.protocol.headers import CreateAccessConfigRequestHeader
from cometmq.text import local_time

HIDDEN = "******"
KEY = name_option("-a --accessKey", required=True, help="The account.")


async def _addrs(admin: Admin, at: shell.Target) -> list[str]:
    """Return the address of the broker, or those of all brokers of the cluster, including slaves."""
    return [at.broker_addr] if at.broker_addr else await admin.addrs_in(at.cluster or "")


@shell.admin_command("updateAclConfig")
@shell.target_options
@KEY
@opt("-s --secretKey", required=True, metavar="SECRET", help="Secret of the account, at least 7 characters.")
@opt(
    "-w --whiteRemoteAddress white",
    metavar="PATTERN",
    help="Addresses whose requests need no signature and no permission.",
)
@opt(
    "-i --defaultTopicPerm topic_perm",
    metavar="PERM",
    help="Permission for other topics: DENY, PUB, SUB or PUB|SUB.",
)
@opt(
    "-u --defaultGroupPerm group_perm",
    metavar="PERM",
    help="Permission for other groups: DENY, PUB, SUB or PUB|SUB.",
)
@opt("-t --topicPerms topics", metavar="LIST", help="Permissions by topic: topicA=DENY,topicD=SUB.")
@opt("-g --groupPerms groups", metavar="LIST", help="Permissions by group: groupA=DENY,groupD=SUB.")
@opt("--rateLimits rates", metavar="LIST", help="Limits per second: send.messages=100,receive.bytes=1048576.")
@switch("-m --admin is_admin", help="Permission for administration requests.", default=None)
@shell.changes
async def update_acl_config(
    admin: Admin,
    at: shell.Target,
    access_key: str,
    secret_key: str,
    white: str | None,
    topic_perm: str | None,
    group_perm: str | None,
    topics: str | None,
    groups: str | None,
    rates: str | None,
    is_admin: bool | None,
) -> None:
    """Create or update an ACL account at brokers."""
    header = CreateAccessConfigRequestHeader(
        access_key=access_key.strip(),
        secret_key=secret_key.strip(),
        white_remote_address=white,
        admin=is_admin,
        default_topic_perm=topic_perm,
        default_group_perm=group_perm,
        topic_perms=topics,
        group_perms=groups,
        rate_limits=rates,
    )
    addrs = await _addrs(admin, at)
    await shell.execute(operations.put_account(admin, addrs, header))
    listed = ", ".join([] if topics is None else topics.split(","))
    shell.tell(
        {"accessKey": header.access_key, "brokerAddrs": addrs},
        [
            f"PlainAccessConfig{{accessKey='{header.access_key}', secretKey='{HIDDEN}', "
            f"whiteRemoteAddress='{white or ''}', admin={str(bool(is_admin)).lower()}, "
            f"defaultTopicPerm='{topic_perm or ''}', defaultGroupPerm='{group_perm or ''}', "
            f"topicPerms=[{listed}], groupPerms=[{', '.join([] if groups is None else groups.split(','))}]}}"
        ],
    )


@shell.admin_command("deleteAclConfig")
@shell.target_options
@KEY
@shell.changes
async def delete_acl_config(admin: Admin, at: shell.Target, access_key: str) -> None:
    """Delete an ACL account at brokers."""
    key, addrs = access_key.strip(), await _addrs(admin, at)
    await shell.execute(operations.delete_account(admin, addrs, key))
    shell.tell({"accessKey": key, "brokerAddrs": addrs}, [f"account's accesskey is:{key}"])


@shell.admin_command("updateGlobalWhiteAddr")
@shell.target_options
@opt(
    "-g --globalWhiteRemoteAddresses patterns",
    required=True,
    metavar="LIST",
    help="Addresses whose requests need no signature, such as 10.10.103.*,192.168.0.*.",
)
@opt("-p --aclFileFullPath file", default="", metavar="FILE", help="Access file at the broker.")
@shell.changes
async def update_global_white_addr(admin: Admin, at: shell.Target, patterns: str, file: str) -> None:
    """Set the addresses that need no ACL account."""
    addrs = await _addrs(admin, at)
    target = at.broker_addr or at.cluster or ""
    await shell.execute(operations.set_white_list(admin, target, addrs, [patterns.strip()], file))
    shell.tell({"brokerAddrs": addrs, "globalWhiteRemoteAddresses": patterns.strip()}, [])


@shell.admin_command("clusterAclConfigVersion", watch_option)
@shell.target_options
async def cluster_acl_config_version(admin: Admin, at: shell.Target) -> None:
    """List the brokers' ACL files with version and time of the last change."""
    addrs = await at.addrs(admin)
    found = [version for addr in addrs for version in await admin.acl_versions(addr)]
    columns = ("#Cluster Name", "#Broker Name", "#Broker Addr", "#AclFilePath", "#AclConfigVersionNum")
    titles = [] if at.broker_addr else [_line(*columns, "#AclLastUpdateTime")]
    shell.tell(found, [*titles, *map(_row, found), f"get {at.kind}'s plain access config version success."])


def _row(version: AclVersion) -> str:
    when = local_time(version.timestamp_ms)
    counter = str(version.counter)
    return _line(version.cluster_name, version.broker_name, version.broker_addr, version.file, counter, when)


def _line(cluster: str, name: str, addr: str, file: str, counter: str, when: str) -> str:
    return f"{cluster:<16}  {name:<22}  {addr:<22}  {file:<20}  {counter:<22}  {when:<22}".rstrip()
