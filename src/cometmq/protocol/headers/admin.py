"""Headers for the administration of topics and subscription groups.

See docs/reference/remoting.md, Topics and groups, Runtime table.
"""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header


class CreateTopicRequestHeader(Header, gc=False):
    """The header of request 17 (UPDATE_AND_CREATE_TOPIC). `topic_filter_type` is SINGLE_TAG or MULTI_TAG."""

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
    """The header of request 21001 (CometMQ's own), which hides the messages of a topic.

    A purge may be restricted to a queue and to messages stored before a time (ms). Without `execute`, the
    response reports what a purge would hide.
    """

    topic: str
    queue_id: I32 | None = None
    before: I64 | None = None
    execute: bool | None = None


class ListTimersRequestHeader(Header, gc=False):
    """The header of request 21002 (CometMQ's own), which lists messages that wait for their delivery time.

    The messages of all topics, or of `topic`, are ordered by delivery time (ms), then by log position. A page
    begins after `after_ms` and `after_position`. With `key`, a unique key or another key, the response is a
    single page with the messages that have this key.
    """

    max_msg_nums: I32 | None = None
    after_ms: I64 | None = None
    after_position: I64 | None = None
    topic: str | None = None
    key: str | None = None


class ListTimersResponseHeader(Header, gc=False):
    """The header of the response to request 21002, whose body holds the records of the messages.

    Attributes:
        after_ms, after_position: The position after which the next page begins.
        more: For a listing by key, whether the search ended before it had read all older messages.
        deliver_at: The delivery time of each message in ms, separated by commas.
        waiting: The number of all waiting messages and recalls.
    """

    after_ms: I64
    after_position: I64
    more: bool
    waiting: I64
    deliver_at: str


class DeleteTopicRequestHeader(Header, gc=False):
    """The header of requests 215 and 216, which delete a topic; 216 may name the cluster of the brokers."""

    topic: str
    cluster_name: str | None = None


class DeleteSubscriptionGroupRequestHeader(Header, gc=False):
    """The header of request 207. The flag that also deletes offsets has other names in 4.9 and in 5.x."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None


class GetSubscriptionGroupConfigRequestHeader(Header, gc=False):
    """The header of request 352, which returns a group's configuration."""

    group: str


class ExchangeHaInfoResponseHeader(Header, gc=False):
    """The header of the response to request 906 (EXCHANGE_BROKER_HA_INFO)."""

    master_ha_address: str | None = None
    master_flush_offset: I64 | None = None
    master_address: str | None = None


class ResetMasterFlushOffsetHeader(Header, gc=False):
    """The header of request 908 (RESET_MASTER_FLUSH_OFFSET)."""

    master_flush_offset: I64


class AddBrokerHeader(Header, gc=False):
    """The header of request 902 to a broker container of 5.x. `config_path` is a file on its machine."""

    config_path: str


class RemoveBrokerHeader(Header, gc=False):
    """The header of request 903, which removes a broker from a broker container of 5.x."""

    broker_cluster_name: str
    broker_name: str
    broker_id: I64


class ChangeRaftGroupHeader(Header, gc=False):
    """The header of request 21004 (CometMQ's own): transfer, addLearner, promote or remove a member (n0)."""

    action: str
    member: str


class CreateAccessConfigRequestHeader(Header, gc=False):
    """The header of request 50 (UPDATE_AND_CREATE_ACL_CONFIG), which creates or changes an account.

    Permissions are written as in `plain_acl.yml`; the items of a list are separated by commas. Absent fields
    leave the account's values unchanged.
    """

    access_key: str
    secret_key: str | None = None
    white_remote_address: str | None = None
    admin: bool | None = None
    default_topic_perm: str | None = None
    default_group_perm: str | None = None
    topic_perms: str | None = None
    group_perms: str | None = None
    rate_limits: str | None = None  # This field exists only in CometMQ


class DeleteAccessConfigRequestHeader(Header, gc=False):
    """The header of request 51 (DELETE_ACL_CONFIG)."""

    access_key: str


class UpdateGlobalWhiteAddrsConfigRequestHeader(Header, gc=False):
    """The header of request 53, which replaces the global white list of an access file, or the default one.

    `global_white_addrs` holds address patterns, separated by commas.
    """

    global_white_addrs: str
    acl_file_full_path: str | None = None


class AclConfigVersionResponseHeader(Header, gc=False):
    """The header of request 52's response: the versions, in JSON, of the default and all access files."""

    version: str
    broker_name: str
    broker_addr: str
    cluster_name: str
    all_acl_file_version: str | None = None


class ExplainAccessRequestHeader(Header, gc=False):
    """The header of request 21007 (CometMQ's own): whether an account has a permission, and by which rule.

    Attributes:
        action: pub, sub or admin.
        resource: `topic:NAME`, `group:NAME`, or NAME for a topic. It is empty if the action is admin.
        host: The client's address, which is compared with the white lists.
    """

    user: str
    action: str
    resource: str | None = None
    host: str | None = None


class ExplainAccessResponseHeader(Header, gc=False):
    """The header of the response to request 21007 (EXPLAIN_ACCESS)."""

    allowed: bool
    reason: str


class GetBrokerConfigResponseHeader(Header, gc=False):
    """The header of request 26's response. `without_effect`: the keys that the broker does not use."""

    version: str
    without_effect: str | None = None


class UpdateBrokerConfigResponseHeader(Header, gc=False):
    """The header of the response to request 25, with CometMQ's own fields.

    They list keys, separated by blanks: those that take effect when the broker starts again, that it does not
    know, and that it does not use. `not_written`: without a settings file, the change ends with the broker.
    """

    at_next_start: str | None = None
    unknown: str | None = None
    not_written: bool | None = None
    without_effect: str | None = None


class ViewBrokerStatsDataRequestHeader(Header, gc=False):
    """The header of request 315 (VIEW_BROKER_STATS_DATA)."""

    stats_name: str
    stats_key: str


class GetLiteTopicInfoHeader(Header, gc=False):
    """The header of request 200076 (GET_LITE_TOPIC_INFO)."""

    parent_topic: str
    lite_topic: str


class GetLiteClientInfoHeader(Header, gc=False):
    """The header of request 200077 (GET_LITE_CLIENT_INFO). At most `max_count` lite topics are wanted."""

    parent_topic: str
    group: str
    client_id: str
    max_count: I32 | None = None


class GetLiteGroupInfoHeader(Header, gc=False):
    """The header of request 200078: a group's progress in `lite_topic`, or without it its `top_k` lags."""

    group: str
    lite_topic: str | None = None
    top_k: I32 | None = None


class TriggerLiteDispatchHeader(Header, gc=False):
    """The header of request 200079 (TRIGGER_LITE_DISPATCH), for one client of a group or for all."""

    group: str
    client_id: str | None = None


class ListLiteTopicsHeader(Header, gc=False):
    """The header of request 21010 (CometMQ's own): the first lite topics whose names begin with `prefix`."""

    parent_topic: str
    prefix: str | None = None
    max_count: I32 | None = None


class GetLiteStateHeader(Header, gc=False):
    """The header of request 21009 (CometMQ's own), with which a slave copies offsets and subscriptions.

    They are those of lite topics, whose queues the slave derives from its log.

    The response has the consumer offsets changed after the change `since`, and the subscriptions if they have
    changed after the change `subscriptions`. It has everything if `epoch` is not that of the last response:
    then the master was started again, and its numbers of changes have another meaning.
    """

    epoch: str
    since: I64
    subscriptions: I64


class CopySettingsHeader(Header, gc=False):
    """The header of request 21005 (CometMQ's own): a raft leader lets followers copy topics and groups."""

    leader: str
    term: I64
