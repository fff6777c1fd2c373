"""Changes of a cluster as objects, which describe their steps and execute them.

`mqadmin --dry-run` prints an operation instead of running it, and the console runs it after a confirmation.

    operation = await operations.delete_topic(admin, "orders", ["DefaultCluster"])
    print(operation.describe())  # ['delete topic orders with its messages at 10.0.0.1:10911', ...]
    async for step, addr, result in operation.run():
        print(addr)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.errors import CometError
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody, SubscriptionGroupConfig
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX
from cometmq.protocol.headers import CreateAccessConfigRequestHeader
from cometmq.protocol.timers import RecallHandle


@dataclass(frozen=True)
class Step:
    """One change at one or more servers.

    Attributes:
        deed: What the request does, for example "delete topic orders with its messages".
        addrs: The servers, which receive the request one after the other.
        send: Sends the request to a server and returns its result.
        at_each: Line that mqadmin prints after each server, with "{addr}" for the server. "": none.
        at_end: Line that mqadmin prints after the last server. "": none.
    """

    deed: str
    addrs: Sequence[str]
    send: Callable[[str], Awaitable[Any]]
    at_each: str = ""
    at_end: str = ""


@dataclass(frozen=True)
class Operation:
    """A change of a cluster.

    Attributes:
        name: Name in the console's audit log, for example "topic.delete".
        target: Name of the object that is changed.
        steps: Changes in their order.
        danger: The operation cannot be undone, or interrupts producers or consumers.
    """

    name: str
    target: str
    steps: Sequence[Step]
    danger: bool = False

    def describe(self) -> list[str]:
        """Return a line for each step of the operation, with the change and the servers that receive it."""
        return [f"{step.deed} at {', '.join(step.addrs)}" for step in self.steps]

    async def run(self, *, keep_going: bool = False) -> AsyncIterator[tuple[Step, str, Any]]:
        """Execute the steps, and yield the step, the server and the result of each request.

        If a request fails, its error is raised. With `keep_going` the error is yielded as the result: the
        other servers of the step still receive their requests, but later steps are not executed.
        """
        for step in self.steps:
            failed = False
            for addr in step.addrs:
                try:
                    result = await step.send(addr)
                except CometError as error:
                    if not keep_going:
                        raise
                    result, failed = error, True
                yield step, addr, result
            if failed:
                return


# -- topics


def update_topic(
    admin: Admin, topic: str, settings: Mapping[str, TopicSettings], *, name: str = "topic.change"
) -> Operation:
    """Return an operation that creates or changes a topic at each broker address in `settings`."""

    async def send(addr: str) -> None:
        async for _ in admin.create_topic(settings[addr], broker_addr=addr):
            pass

    step = Step(f"create or change topic {topic}", list(settings), send, "create topic to {addr} success.")
    return Operation(name, topic, [step])


async def delete_topic(admin: Admin, topic: str, clusters: Sequence[str]) -> Operation:
    """Return an operation that deletes a topic and its messages in clusters, and then the topic's route.

    Raises:
        UnknownNameError: A cluster does not exist.
    """
    return Operation("topic.delete", topic, await _topic_deletion(admin, topic, clusters), danger=True)


async def _topic_deletion(admin: Admin, topic: str, clusters: Sequence[str]) -> list[Step]:
    at_brokers = [
        Step(
            f"delete topic {topic} with its messages", await admin.master_addrs(cluster),
            lambda addr: admin.delete_topic_in_brokers(topic, broker_addr=addr),
            at_end=f"delete topic [{topic}] from cluster [{cluster}] success.",
        )
        for cluster in clusters
    ]  # fmt: skip
    return [
        *at_brokers,
        Step(
            f"delete the route of topic {topic}", admin.client.namesrv.addrs,
            partial(admin.delete_topic_in_name_servers, topic),
            at_end=f"delete topic [{topic}] from NameServer success.",
        ),
    ]  # fmt: skip


# -- groups


def update_group(
    admin: Admin, group: str, settings: Mapping[str, SubscriptionGroupConfig], *, name: str = "group.change"
) -> Operation:
    """Return an operation that creates or changes a group at each broker address in `settings`."""

    async def send(addr: str) -> None:
        async for _ in admin.update_group(settings[addr], broker_addr=addr):
            pass

    line = "create subscription group to {addr} success."
    return Operation(name, group, [Step(f"create or change group {group}", list(settings), send, line)])


def set_consume_mode(admin: Admin, mode: SetMessageRequestModeRequestBody, addrs: Sequence[str]) -> Operation:
    """Return an operation that sets how a group consumes a topic from brokers."""
    group = mode.consumer_group
    step = Step(
        f"set the consume mode of group {group} for topic {mode.topic} to {mode.mode}", addrs,
        partial(admin.set_consume_mode, mode=mode), "set consume mode to {addr} success.",
    )  # fmt: skip
    return Operation("group.consumeMode", group, [step])


async def group_topics(admin: Admin, group: str, cluster: str | None = None) -> dict[str, list[str]]:
    """Return the clusters that have the retry topics and the dead-letter topic of a group, by topic.

    With `cluster`, only this cluster is examined.
    """
    retry, known = RETRY_PREFIX + group, set(await admin.topics())
    names = [retry, DLQ_PREFIX + group]
    # The retry topics from which the group pops, unless they are those of other groups with such names
    popped = [each for each in known if each.startswith((retry + "_", retry + "+"))]
    popped = [each for each in popped if each[len(retry) + 1 :] in known]
    if popped:
        others = await admin.group_names()
        names += sorted(each for each in popped if each.removeprefix(RETRY_PREFIX) not in others)
    found = {topic: await admin.clusters_of(topic) for topic in names}
    there = {topic: [each for each in found[topic] if cluster in (None, each)] for topic in found}
    return {topic: clusters for topic, clusters in there.items() if clusters}


async def delete_group(
    admin: Admin,
    group: str,
    addrs: Sequence[str],
    topics: Mapping[str, Sequence[str]],
    *,
    with_offsets: bool,
    cluster: str | None = None,
) -> Operation:
    """Return an operation that deletes a consumer group.

    Args:
        admin: Sends the requests.
        group: The group.
        addrs: Brokers that delete the group's settings.
        topics: Topics to delete with the group, and the clusters of each topic, see `group_topics`.
        with_offsets: Delete the group's offsets, too.
        cluster: Cluster that is named in the lines that mqadmin prints.
    """
    offsets = " with its offsets" if with_offsets else ""
    place = f" in cluster [{cluster}]" if cluster else ""
    steps = [
        Step(
            f"delete group {group}{offsets}", addrs,
            partial(admin.delete_group, group=group, with_offsets=with_offsets),
            f"delete subscription group [{group}] from broker [{{addr}}]{place} success.",
        )
    ]  # fmt: skip
    for topic, clusters in topics.items():
        steps += await _topic_deletion(admin, topic, clusters)
    return Operation("group.delete", group, steps, danger=True)


# -- brokers


def set_broker(admin: Admin, addrs: Sequence[str], key: str, value: str) -> Operation:
    """Return an operation that changes a setting of brokers. Its results are of type SettingsChange."""
    send = partial(admin.update_broker_config, settings={key: value})
    line = "update broker config success, {addr}"
    return Operation("broker.set", ", ".join(addrs), [Step(f"set {key} to {value}", addrs, send, line)])


CLEANUPS: dict[str, tuple[str, Callable[[Admin, str], Awaitable[None]]]] = {
    "broker.clean_queues": (
        "delete queue and index files whose messages are deleted", Admin.clean_expired_consume_queues,
    ),
    "broker.clean_log": ("delete expired segments of the commit log", Admin.delete_expired_commit_log),
    "broker.clean_topics": ("delete queues of topics that are not configured", Admin.clean_unused_topics),
}  # fmt: skip
"""For each operation that deletes files of a broker: its description, and the method that executes it."""


def clean(admin: Admin, name: str, addrs: Sequence[str]) -> Operation:
    """Return an operation that deletes files of brokers. `name` is a key of `CLEANUPS`."""
    deed, method = CLEANUPS[name]
    return Operation(name, ", ".join(addrs), [Step(deed, addrs, partial(method, admin))], danger=True)


async def change_write_perm(admin: Admin, broker_name: str, *, allow: bool) -> Operation:
    """Return an operation that restores or removes the write permission of a broker.

    The results of the operation are of type PermChange.

    Raises:
        UnknownNameError: There is no such broker name.
    """
    await admin.check_broker_name(broker_name)
    verb = "restore" if allow else "remove"
    step = Step(
        f"{verb} the write permission of all topics of {broker_name}", admin.client.namesrv.addrs,
        partial(admin.change_write_perm, broker_name=broker_name, allow=allow),
    )  # fmt: skip
    return Operation("broker.allow" if allow else "broker.wipe", broker_name, [step], danger=not allow)


RAFT_CHANGES = {
    "transfer": "make {member} the leader",
    "addLearner": "replicate the log to {member}, without a vote",
    "promote": "give {member} a vote",
    "remove": "remove {member} from the raft group",
}
"""The description of each change of a raft group, by its name in the request."""


async def change_raft_group(
    admin: Admin, action: str, member: str, broker_name: str | None = None
) -> Operation:
    """Return an operation that changes the leader or the members of a raft group.

    The leader of the group executes the change. `action` is a key of RAFT_CHANGES.

    Raises:
        NoLeaderError: No member of the raft group is the leader.
        UnknownNameError: There is no such broker name.
    """
    send = partial(admin.client.brokers.change_raft_group, action=action, member=member)
    step = Step(RAFT_CHANGES[action].format(member=member), [await admin.raft_leader(broker_name)], send)
    return Operation(f"raft.{action}", member, [step], danger=action == "remove")


# -- messages


async def cancel_timers(admin: Admin, handles: Sequence[str]) -> Operation:
    """Return an operation that cancels the scheduled messages with these recall handles.

    The result of each step is the id of the cancelled message.

    Raises:
        BadHandle: An item of `handles` is not a recall handle.
        UnknownNameError: The broker that a handle names does not exist.
    """
    steps, decoded = [], [RecallHandle.decode(text) for text in handles]
    for handle in decoded:
        masters = await admin.masters([handle.broker_name])
        deed = f"cancel message {handle.unique_key} for topic {handle.topic}"
        steps.append(Step(deed, list(masters.values()), partial(_recall, admin, handle)))
    return Operation("timer.cancel", ", ".join(handle.unique_key for handle in decoded), steps)


async def _recall(admin: Admin, handle: RecallHandle, _addr: str) -> str:
    return await admin.recall(handle.encode())


# -- accounts


def put_account(admin: Admin, addrs: Sequence[str], account: CreateAccessConfigRequestHeader) -> Operation:
    """Return an operation that creates an account, or changes the account fields that the header sets."""
    step = Step(
        f"create or change the account {account.access_key}", addrs,
        partial(admin.put_account, account=account),
        "create or update plain access config to {addr} success.",
    )  # fmt: skip
    return Operation("acl.put", account.access_key, [step])


def delete_account(admin: Admin, addrs: Sequence[str], access_key: str) -> Operation:
    """Return an operation that deletes an account from the access files of brokers."""
    step = Step(
        f"delete the account {access_key}", addrs, partial(admin.delete_account, access_key=access_key),
        "delete plain access config account from {addr} success.",
    )  # fmt: skip
    return Operation("acl.delete", access_key, [step], danger=True)


def set_white_list(
    admin: Admin, target: str, addrs: Sequence[str], patterns: Sequence[str], file: str = ""
) -> Operation:
    """Return an operation that replaces the global white list in an access file of brokers.

    Args:
        admin: Sends the requests.
        target: The cluster, or the address of the broker, as the audit log names it.
        addrs: The addresses of the brokers.
        patterns: Addresses that need no account.
        file: The access file. "": the default file.
    """
    listed = ", ".join(patterns) or "no addresses"
    step = Step(
        f"replace the global white list with {listed}", addrs,
        partial(admin.set_white_list, patterns=patterns, file=file),
        "update global white remote addresses to {addr} success.",
    )  # fmt: skip
    return Operation("acl.white", target, [step])
