"""Headers of the administration of topics and subscription groups
(docs/reference/remoting.md, Topics and groups, Runtime table)."""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header


class CreateTopicRequestHeader(Header, gc=False):
    """Code 17. topic_filter_type: SINGLE_TAG or MULTI_TAG."""

    topic: str
    read_queue_nums: I32
    write_queue_nums: I32
    perm: I32
    default_topic: str | None = None
    topic_filter_type: str | None = None
    topic_sys_flag: I32 | None = None
    order: bool | None = None
    attributes: str | None = None
    force: bool | None = None


class PurgeTopicRequestHeader(Header, gc=False):
    """Code 21001, ours: hide the messages of a topic, of one queue with queue_id, of those stored before a
    time (ms) with before. Without execute the answer only tells what would go."""

    topic: str
    queue_id: I32 | None = None
    before: I64 | None = None
    execute: bool | None = None


class ListTimersRequestHeader(Header, gc=False):
    """Code 21002, ours: messages that wait for their time or at a delay level, behind a place in the order of
    delivery times (ms) and log positions; of all topics or one. With a key those that have it, unique or not,
    in one page."""

    max_msg_nums: I32 | None = None
    after_ms: I64 | None = None
    after_position: I64 | None = None
    topic: str | None = None
    key: str | None = None


class ListTimersResponseHeader(Header, gc=False):
    """Answer to 21002; the body holds the records. The next page begins behind `after`; with a key there is
    none, and `more` says that older messages were not looked at. deliver_at: when each will come (ms), with
    commas. waiting: how many wait in all, recalls among them."""

    after_ms: I64
    after_position: I64
    more: bool
    waiting: I64
    deliver_at: str


class DeleteTopicRequestHeader(Header, gc=False):
    """Codes 215 and 216; with a cluster's name only that cluster's brokers forget it (216)."""

    topic: str
    cluster_name: str | None = None


class DeleteSubscriptionGroupRequestHeader(Header, gc=False):
    """Code 207. 4.9 says removeOffset, 5.x cleanOffset."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None


class ExchangeHaInfoResponseHeader(Header, gc=False):
    """Answer to 906."""

    master_ha_address: str | None = None
    master_flush_offset: I64 | None = None
    master_address: str | None = None


class ResetMasterFlushOffsetHeader(Header, gc=False):
    """Code 908."""

    master_flush_offset: I64


class AddBrokerHeader(Header, gc=False):
    """Code 902, to a broker container of 5.x (docs/reference/remoting.md, Replication and containers).
    config_path: of a file on the container's machine."""

    config_path: str


class RemoveBrokerHeader(Header, gc=False):
    """Code 903, to a broker container of 5.x. broker_id: of a DLedger member the number in its name."""

    broker_cluster_name: str
    broker_name: str
    broker_id: I64


class ChangeRaftGroupHeader(Header, gc=False):
    """Code 21004, ours. action: transfer, addLearner, promote or remove; member: as in dLegerPeers, n0."""

    action: str
    member: str


class CreateAccessConfigRequestHeader(Header, gc=False):
    """Code 50. Permissions as in plain_acl.yml, lists with commas; what is absent stays as it is."""

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool | None = None
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None


class DeleteAccessConfigRequestHeader(Header, gc=False):
    """Code 51."""

    access_key: str


class UpdateGlobalWhiteAddrsConfigRequestHeader(Header, gc=False):
    """Code 53. Patterns with commas; of the default file unless another is named."""

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclConfigVersionResponseHeader(Header, gc=False):
    """Answer to 52. Versions in JSON: of the default file, and of all files by path."""

    version: str
    broker_name: str
    broker_addr: str
    cluster_name: str
    all_acl_file_version: str | None = None


class ExplainAccessRequestHeader(Header, gc=False):
    """Code 21007, ours: whether an account may do something, and by which rule. action: pub, sub or admin;
    resource: `topic:NAME`, `group:NAME`, or NAME, a topic; none with admin. host: the client's address, for
    white lists."""

    user: str
    action: str
    resource: str | None = None
    host: str | None = None


class ExplainAccessResponseHeader(Header, gc=False):
    """Answer to 21007."""

    allowed: bool
    reason: str


class UpdateBrokerConfigResponseHeader(Header, gc=False):
    """Answer to 25; the fields are ours. Keys with blanks between: those that count from the next start on,
    and those that nobody knows, which were ignored. not_written: the broker has no file of settings, and
    forgets them at its next start."""

    at_next_start: str | None = None
    unknown: str | None = None
    not_written: bool | None = None


class ViewBrokerStatsDataRequestHeader(Header, gc=False):
    """Code 315."""

    stats_name: str
    stats_key: str


class CopySettingsHeader(Header, gc=False):
    """Code 21005, ours: a raft leader has its followers copy topics and groups. leader: a member; term: the
    one in which it leads."""

    leader: str
    term: I64
