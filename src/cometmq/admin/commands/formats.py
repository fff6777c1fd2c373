"""Output of `mqadmin`, with the columns of Apache's tools, so that scripts for these tools keep working.

The functions only convert values to lines of text. The column widths are those of the 4.9 tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

import msgspec

from cometmq.admin import values
from cometmq.admin.offsets import OffsetWay, QueueReset
from cometmq.client.group.allocate import java_text
from cometmq.message import MessageExt, MessageQueue, SendResult
from cometmq.protocol import bodies
from cometmq.protocol.bodies.admin import HaRuntimeInfo, PurgedQueue, QueryConsumeQueueBody
from cometmq.protocol.codes import version_name
from cometmq.protocol.traces import Pub, SubAfter
from cometmq.settings import show_value
from cometmq.text import local_time

MS_PER_HOUR = 3_600_000
INT64_MAX = 2**63 - 1


def parse_time(text: str) -> int:
    """Return ms since 1970 from digits or a local `yyyy-MM-dd#HH:mm:ss:SSS`. Raises ValueError."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        if (given := int(text)) > INT64_MAX:
            raise ValueError("times have at most 64 bits")
        return given
    moment = datetime.strptime(text, "%Y-%m-%d#%H:%M:%S:%f")
    # Python's %f pads on the right: "5" means 500 ms to Python but 5 ms to Java.
    millis = int(text.rpartition(":")[2])
    return int(moment.replace(microsecond=0).timestamp()) * 1000 + millis


def topic_status(queues: Iterable[values.QueueStatus]) -> Iterator[str]:
    form = "%-32s  %-4s  %-20s  %-20s    %s"
    yield form % ("#Broker Name", "#QID", "#Min Offset", "#Max Offset", "#Last Updated")
    for queue in queues:
        last = local_time(max(queue.last_update_timestamp, 0), ",")
        yield form % (queue.broker_name[:32], queue.queue_id, queue.min_offset, queue.max_offset, last)


def purged(queues: Iterable[tuple[str, PurgedQueue]]) -> Iterator[str]:
    """Return a table of the queues from which messages were purged, or would be purged by a dry run.

    Each item of `queues` is the name of a broker and one of its queues.
    """
    form = "%-32s  %-4s  %-20s  %-20s  %-20s  %s"
    yield form % ("#Broker Name", "#QID", "#Min Offset", "#Purged To", "#Max Offset", "#Messages")
    for name, queue in queues:
        yield form % (
            *(name[:32], queue.queue_id, queue.min_offset, queue.purged_to, queue.max_offset),
            queue.count,
        )


def topic_uses(uses: Iterable[values.TopicUse]) -> Iterator[str]:
    titles, form = "%-20s  %-48s  %-48s", "%-20s  %-64s  %-64s"
    yield titles % ("#Cluster Name", "#Topic", "#Consumer Group")
    for use in uses:
        for group in use.consumer_groups or [""]:
            yield form % (use.cluster_name[:20], use.topic[:64], group[:64])


def topic_route_table(route: bodies.TopicRouteData) -> Iterator[str]:
    form = "%-45s %-32s %-50s %-10s %-11s %-5s"
    yield form % ("#ClusterName", "#BrokerName", "#BrokerAddrs", "#ReadQueue", "#WriteQueue", "#Perm")
    queues = {data.broker_name: data for data in route.queue_datas}
    brokers = reads = writes = 0
    for broker in sorted(route.broker_datas, key=lambda broker: broker.broker_name):
        if (data := queues.get(broker.broker_name)) is None:
            continue
        addrs = "{" + ", ".join(f"{id_}={addr}" for id_, addr in sorted(broker.broker_addrs.items())) + "}"
        read, write = data.read_queue_nums, data.write_queue_nums
        yield form % (broker.cluster, broker.broker_name, addrs, read, write, data.perm)
        brokers, reads, writes = brokers + 1, reads + read, writes + write
    yield "-" * 158
    yield form % ("Total:", brokers, "", reads, writes, "")


def cluster_list(brokers: Iterable[values.BrokerStatus], now_ms: int) -> Iterator[str]:
    """Return the rows of `clusterList`: Apache's columns, then the role and the replication lag in bytes."""
    form = "%-16s  %-22s  %-4s  %-22s %-16s %19s %19s %10s %5s %6s  %-12s %10s"
    yield form % (
        *("#Cluster Name", "#Broker Name", "#BID", "#Addr", "#Version", "#InTPS(LOAD)", "#OutTPS(LOAD)"),
        *("#PCWait(ms)", "#Hour", "#SPACE", "#Role", "#Behind"),
    )
    for broker in brokers:
        info = broker.runtime
        earliest = broker.count("earliestMessageTimeStamp")
        hours = (now_ms - earliest) / MS_PER_HOUR if earliest > 0 else None
        in_load = load(broker.first_number("putTps"), info, "send")
        # Apache's 4.9 brokers misspell this key of the runtime table with one `r`; later versions use two.
        out_key = "getTransferredTps" if "getTransferredTps" in info else "getTransferedTps"
        out_load = load(broker.first_number(out_key), info, "pull")
        yield form % (
            *(broker.cluster_name, broker.broker_name, broker.broker_id, broker.broker_addr),
            *(info.get("brokerVersionDesc", ""), in_load, out_load, info.get("pageCacheLockTimeMills", "")),
            *(fixed(hours, 2), fixed(broker.first_number("commitLogDiskRatio"), 4)),
            *(broker.role or "-", "-" if broker.lag is None else broker.lag),
        )


def fixed(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimal places, or `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def load(tps: float | None, info: Mapping[str, str], side: str) -> str:
    """Return a rate with the length of the broker's request queue and the longest wait in it.

    The form is `123.45(0,0ms)`. The result is `-` if the rate is None.
    """
    if tps is None:
        return "-"
    size = info.get(f"{side}ThreadPoolQueueSize", "")
    wait = info.get(f"{side}ThreadPoolQueueHeadWaitTimeMills", "")
    return f"{tps:9.2f}({size},{wait}ms)"


def cluster_totals(brokers: Iterable[values.BrokerStatus]) -> Iterator[str]:
    form = "%-16s  %-32s %14s %14s %14s %14s"
    titles = ("#InTotalYest", "#OutTotalYest", "#InTotalToday", "#OutTotalToday")
    yield form % ("#Cluster Name", "#Broker Name", *titles)
    for broker in brokers:
        sums = [
            broker.count(f"msg{verb}Total{end}") - broker.count(f"msg{verb}Total{start}")
            for start, end in (("YesterdayMorning", "TodayMorning"), ("TodayMorning", "TodayNow"))
            for verb in ("Put", "Get")
        ]
        yield form % (broker.cluster_name, broker.broker_name, *(sums if broker.runtime else ["-"] * 4))


def broker_status(runtime: Mapping[str, str | None], addr: str = "") -> Iterator[str]:
    """Return sorted `key : value` lines, prefixed by the address if several brokers are shown."""
    for key, value in sorted(runtime.items()):
        yield f"{addr:<24} {key:<32}: {known(value)}" if addr else f"{key:<32}: {known(value)}"


def ha_status(addr: str, status: HaRuntimeInfo) -> Iterator[str]:
    """Return the lines of `haStatus` for a master or a slave.

    They are those of RocketMQ 5.5, but with spaces instead of tabs.
    """
    slaves, own = status.ha_connection_info, status.ha_client_runtime_info
    facts: list[tuple[str, object]] = [
        ("#MasterAddr", own.master_addr or "null"),
        ("#CommitLogMaxOffset", own.max_offset),
        ("#TransferSpeed(KB/s)", f"{own.transferred_byte_in_second / 1024:.2f}"),
        ("#LastReadTime", local_time(own.last_read_timestamp, ",")),
        ("#LastWriteTime", local_time(own.last_write_timestamp, ",")),
        ("#MasterFlushOffset", own.master_flush_offset),
    ]
    if status.master:
        facts = [
            ("#MasterAddr", addr),
            ("#MasterCommitLogMaxOffset", status.master_commit_log_max_offset),
            ("#SlaveNum", len(slaves)),
            ("#InSyncSlaveNum", status.in_sync_slave_nums),
        ]
    yield ""
    for name, value in facts:
        yield f"{name:<26} {value}".rstrip()
    if status.problem:
        yield f"{'#Problem':<26} {status.problem}"
    if status.master:
        form = "%-32s  %-16s %16s %20s %16s %18s"
        titles = ("#TransferSpeed(KB/s)", "#Status", "#TransferFromWhere")
        yield form % ("#SlaveAddr", "#SlaveAckOffset", "#Diff", *titles)
        for slave in slaves:
            speed = f"{slave.transferred_byte_in_second / 1024:.2f}"
            near = "OK" if slave.in_sync else "Fall Behind"
            more = (speed, near, slave.transfer_from_where)
            yield form % (slave.addr, slave.slave_ack_offset, slave.diff, *more)


def group_progress(
    progress: values.GroupProgress, *, show_client_ip: bool, total: int | None
) -> Iterator[str]:
    place, client_form, rest = "%-64s  %-32s  %-4s  %-20s  %-20s  ", "%-20s ", "%-20s  %s"
    pops = progress.leased_total is not None
    yield (
        place % ("#Topic", "#Broker Name", "#QID", "#Broker Offset", "#Consumer Offset")
        + (client_form % "#Client IP" if show_client_ip else "")
        + rest % ("#Diff", client_form % "#Inflight" + "#LastTime" if pops else "#LastTime")
    )
    for queue in progress.queues:
        offsets = queue.broker_offset, queue.consumer_offset
        last = local_time(max(queue.last_timestamp, 0)) or "N/A"
        yield (
            place % (queue.topic[:64], queue.broker_name[:32], queue.queue_id, *offsets)
            + (client_form % (queue.client_ip or "N/A") if show_client_ip else "")
            + rest % (queue.diff, client_form % known(queue.leased) + last if pops else last)
        )
    yield ""
    yield f"Consume TPS: {fixed(progress.consume_tps, 2)}"
    yield f"Diff Total: {known(total)}"
    if pops:
        yield f"Inflight Total: {progress.leased_total}"


def consumer_status(found: values.GroupSubscriptions) -> Iterator[str]:
    """Return a line for each member, then the differences of subscriptions and settings between members.

    Without differences, lines about the queues that have no holder or several holders follow.
    """
    row = "%-10s %-40s %-20s %s"
    yield row % ("#Index", "#ClientId", "#Version", "#Subscription")
    for number, member in enumerate(found.members, 1):
        says = "; ".join(f"{topic} {expression}" for topic, expression in member.subscriptions.items())
        yield row % (number, member.client_id, member.version, member.problem or says)
    yield ""
    form = "%-48s  %-32s  %s"
    if found.differences:
        yield "WARN: Different subscription in the same group of consumer!!!"
        yield form % ("#Topic", "#Expression", "#Client IDs")
    elif not found.setting_differences:
        yield "Same subscription in the same group of consumer"
    for topic, said in found.differences.items():
        for expression, clients in said.items():
            yield form % (topic, expression or "(not subscribed)", ", ".join(clients))
    if found.setting_differences:
        yield "WARN: Different settings in the same group of consumer!!!"
        yield form % ("#Setting", "#Value", "#Client IDs")
    for name, said in found.setting_differences.items():
        for value, clients in said.items():
            yield form % (name, value, ", ".join(each or "(retryMaxTimes of the group)" for each in clients))
    if found.unbalanced is not None and not (found.differences or found.setting_differences):
        yield ""
        yield f"Rebalance {'Failed' if found.unbalanced else 'OK'}"
        for queue, clients in found.unbalanced.items():
            yield f"{queue} {', '.join(clients) or '(nobody)'}"
    for member in found.members:
        for name, idle_ms in member.blocked.items():
            yield f"{member.client_id} {name} can't consume for a while, maybe blocked, {idle_ms}ms"


def known(value: object) -> object:
    """Return the value of a column, or `-` for None."""
    return "-" if value is None else value


def group_summaries(groups: Iterable[values.GroupSummary]) -> Iterator[str]:
    form = "%-64s  %-6s  %-24s %-5s  %-14s  %-7s  %s"
    yield form % ("#Group", "#Count", "#Version", "#Type", "#Model", "#TPS", "#Diff Total")
    for group in groups:
        yield form % (
            *(group.group[:64], known(group.count), known(group.version) or "OFFLINE", group.consume_type),
            *(group.message_model, known(group.consume_tps), known(group.diff_total)),
        )


def key_hits(messages: Iterable[MessageExt]) -> Iterator[str]:
    form = "%-50s %4s %40s"
    yield form % ("#Message ID", "#QID", "#Offset")
    for message in messages:
        yield form % (message.msg_id, message.queue_id, message.queue_offset)


def message_details(message: MessageExt, *, body_path: str, offset_id: bool) -> Iterator[str]:
    """Return a line `Name: value` for each field of a message, as `queryMsgById` prints them.

    Without `offset_id`, the offset id is omitted, as in the output of `queryMsgByUniqueKey`.
    """
    facts: list[tuple[str, object]] = [("OffsetID:", message.offset_msg_id)] if offset_id else []
    facts += [
        ("Topic:", message.topic),
        ("Tags:", f"[{message.tags if message.tags is not None else 'null'}]"),
        ("Keys:", f"[{' '.join(message.keys) if message.keys else 'null'}]"),
        ("Queue ID:", message.queue_id),
        ("Queue Offset:", message.queue_offset),
        ("CommitLog Offset:", message.physical_offset),
        ("Reconsume Times:", message.reconsume_times),
        ("Born Timestamp:", local_time(message.born_timestamp_ms, ",")),
        ("Store Timestamp:", local_time(message.store_timestamp_ms, ",")),
        ("Born Host:", message.born_host),
        ("Store Host:", message.store_host),
        ("System Flag:", message.sys_flag),
        ("Properties:", "{" + ", ".join(f"{key}={value}" for key, value in message.properties.items()) + "}"),
        ("Message Body Path:", body_path),
    ]
    for name, value in facts:
        yield f"{name:<20} {value}"


def message_tracks(tracks: list[values.MessageTrack]) -> Iterator[str]:
    yield ""
    if not tracks:
        yield "WARN: No Consumer"
    for track in tracks:
        yield (
            f"MessageTrack [consumerGroup={track.consumer_group}, trackType={track.track_type}, "
            f"exceptionDesc={track.exception_desc or 'null'}]"
        )


def direct_result(result: bodies.ConsumeMessageDirectlyResult) -> Iterator[str]:
    """Return the listener's result in one line, with Java's words for true, false and null."""
    order, auto_commit = str(result.order).lower(), str(result.auto_commit).lower()
    yield (
        f"ConsumeMessageDirectlyResult [order={order}, autoCommit={auto_commit}, "
        f"consumeResult={result.consume_result or 'null'}, remark={result.remark or 'null'}, "
        f"spentTimeMills={result.spent_time_mills}]"
    )


def send_result(result: SendResult) -> Iterator[str]:
    form = "%-32s  %-4s  %-20s    %s"
    yield form % ("#Broker Name", "#QID", "#Send Result", "#MsgId")
    yield form % (result.queue.broker_name, result.queue.queue_id, result.status.name, result.msg_id)


def message_traces(views: Iterable[values.TraceView]) -> Iterator[str]:
    """Return the trace of a message as lines.

    The first tables show one send each. One table for each consumer group follows, with a row for each time
    that a listener of the group processed the message.
    """
    form = "%-10s %-20s %-20s %-20s %-10s %-10s"
    titles = ("#CostTimes", "#Status")
    by_group: dict[str, list[str]] = {}
    for view in views:
        trace = view.trace
        if not isinstance(trace, Pub | SubAfter):
            continue
        group, when = trace.group or "", local_time(trace.timestamp_ms or 0)
        kind = "Pub" if isinstance(trace, Pub) else "Sub"
        how = (f"{trace.cost_ms}ms", "success" if trace.success else "failed")
        row = form % (kind, group, view.client_host, when, *how)
        if isinstance(trace, Pub):
            yield form % ("#Type", "#ProducerGroup", "#ClientHost", "#SendTime", *titles)
            yield row
            yield ""
        else:
            by_group.setdefault(group, []).append(row)
    for rows in by_group.values():
        yield form % ("#Type", "#ConsumerGroup", "#ClientHost", "#ConsumerTime", *titles)
        yield from rows
        yield ""


# -- groups and clients


def client_version(client: bodies.ClientConnection) -> str:
    """Return the version of a client and, if it uses gRPC, its type."""
    version = version_name(client.version)
    return f"{version} gRPC {client.grpc_type}" if client.grpc_type else version


def consumer_connection(found: bodies.ConsumerConnection) -> Iterator[str]:
    form = "%-36s %-22s %-10s %s"
    yield form % ("#ClientId", "#ClientAddr", "#Language", "#Version")
    for each in found.connection_set:
        yield form % (each.client_id, each.client_addr, each.language, client_version(each))
    yield ""
    yield "Below is subscription:"
    yield f"{'#Topic':<20} #SubExpression"
    for subscription in found.subscription_table.values():
        yield f"{subscription.topic:<20} {subscription.sub_string}"
    yield ""
    yield f"ConsumeType: {found.consume_type}"
    yield f"MessageModel: {found.message_model}"
    yield f"ConsumeFromWhere: {found.consume_from_where}"


def producer_connection(clients: Iterable[bodies.ClientConnection]) -> Iterator[str]:
    for number, each in enumerate(clients, 1):
        version = client_version(each)
        yield f"{number:04d}  {each.client_id:<32} {each.client_addr:<22} {each.language:<8} {version}"


def producers(found: Mapping[str, Iterable[bodies.ProducerInfo]]) -> Iterator[str]:
    for group, clients in found.items():
        for each in clients:
            yield (
                f"producer group ({group}) instance : clientId={each.client_id},remoteIP={each.remote_ip}, "
                f"language={each.language}, version={each.version}, "
                f"lastUpdateTimestamp={each.last_update_timestamp}"
                + (f", grpcType={each.grpc_type}" if each.grpc_type else "")
            )


def java_word(value: object) -> str:
    """Return a value as Java prints it."""
    return "null" if value is None else show_value(value)


def group_facts(config: bodies.SubscriptionGroupConfig) -> dict[str, str]:
    """Return the settings of a group by RocketMQ's names.

    Settings of 5.x are included if the group has them.
    """
    names = {field.name: field.encode_name for field in msgspec.structs.fields(config)}
    return {
        names[name]: show_value(value)
        for name, value in msgspec.structs.asdict(config).items()
        if value is not None
    }


def group_config_line(config: bodies.SubscriptionGroupConfig) -> str:
    facts = ", ".join(f"{name}={value}" for name, value in group_facts(config).items())
    return f"SubscriptionGroupConfig [{facts}]"


def group_configs(found: Iterable[values.GroupConfig]) -> Iterator[str]:
    for each in found:
        bar = "=" * 29
        yield f"{bar}{each.cluster_name}:{each.broker_name}{bar}"
        for name, value in group_facts(each.config).items():
            yield f"{name:<40}=  {value}"


def broker_consume_stats(rows: Iterable[values.GroupQueueProgress], total: int) -> Iterator[str]:
    form = "%-64s  %-64s  %-32s  %-4s  %-20s  %-20s  %-20s  %s"
    titles = ("#Broker Name", "#QID", "#Broker Offset", "#Consumer Offset", "#Diff", "#LastTime")
    yield form % ("#Topic", "#Group", *titles)
    for row in rows:
        queue = row.queue
        yield form % (
            *(queue.topic[:64], row.group, queue.broker_name[:32], queue.queue_id, queue.broker_offset),
            *(queue.consumer_offset, queue.diff, local_time(queue.last_timestamp)),
        )
    yield ""
    yield f"Diff Total: {total}"


def undone(found: values.Undone) -> Iterator[str]:
    """Return the lines that Apache's monitoring tool prints about a group's backlog and failures."""
    where = f"consumerGroup={found.consumer_group}, topic={found.topic}"
    yield (
        f"UndoneMsgs [{where}, undoneMsgsTotal={found.undone_msgs_total}, "
        f"undoneMsgsSingleMQ={found.undone_msgs_single_mq}, "
        f"undoneMsgsDelayTimeMills={found.undone_msgs_delay_time_mills}]"
    )
    if found.failed_msgs_total_recently:
        yield f"FailedMsgs [{where}, failedMsgsTotalRecently={found.failed_msgs_total_recently}]"


def resets(done: list[QueueReset]) -> Iterator[str]:
    """Return a table of resets with Apache's columns, which depend on whether the group was online."""
    if done and all(each.way is OffsetWay.MEMBERS for each in done):
        form = "%-40s  %-40s  %-40s"
        yield form % ("#brokerName", "#queueId", "#offset")
        for each in done:
            yield form % (each.broker_name[:32], each.queue_id, each.rollback_offset)
        return
    form = "%-20s  %-20s  %-20s  %-20s  %-20s  %-20s"
    offsets = ("#brokerOffset", "#consumerOffset", "#timestampOffset", "#rollbackOffset")
    yield form % ("#brokerName", "#queueId", *offsets)
    for each in done:
        yield form % (
            *(each.broker_name[:32], each.queue_id, each.broker_offset, each.consumer_offset),
            *(each.target, each.rollback_offset),
        )


def running_info(info: bodies.ConsumerRunningInfo) -> Iterator[str]:
    yield "#Consumer Properties#"
    for name, value in info.properties.items():
        yield f"{name:<40}: {value}"
    yield from ("", "", "#Consumer Subscription#")
    for number, each in enumerate(info.subscription_set, 1):
        classes = show_value(each.class_filter_mode)
        place = f"{number:03d} Topic: {each.topic:<40} ClassFilter: {classes:<8}"
        yield f"{place} SubExpression: {each.sub_string}"
    queues = sorted(info.mq_table.items())
    place = "%-64s  %-32s  %-4s  "
    yield from ("", "", "#Consumer Offset#")
    yield place % ("#Topic", "#Broker Name", "#QID") + f"{'#Consumer Offset':<20}"
    for queue, held in queues:
        where = f"{queue.topic:<32}  {queue.broker_name:<32}  {queue.queue_id:<4}  "
        yield where + f"{held.commit_offset:<20}"
    yield from ("", "", "#Consumer MQ Detail#")
    yield place % ("#Topic", "#Broker Name", "#QID") + f"{'#ProcessQueueInfo':<20}"
    for queue, held in queues:
        names = {field.name: field.encode_name for field in msgspec.structs.fields(held)}
        facts = ", ".join(
            f"{names[key]}={java_word(value)}" for key, value in msgspec.structs.asdict(held).items()
        )
        yield place % (queue.topic, queue.broker_name, queue.queue_id) + f"ProcessQueueInfo [{facts}]"
    yield from ("", "", "#Consumer RT&TPS#")
    titles, form = "%-64s  %14s %14s %14s %14s %18s %25s", "%-32s  %14.2f %14.2f %14.2f %14.2f %18.2f %25d"
    yield titles % (
        *("#Topic", "#Pull RT", "#Pull TPS", "#Consume RT", "#ConsumeOK TPS", "#ConsumeFailed TPS"),
        "#ConsumeFailedMsgsInHour",
    )
    for topic, status in info.status_table.items():
        yield form % (
            *(topic, status.pull_rt, status.pull_tps, status.consume_rt, status.consume_ok_tps),
            *(status.consume_failed_tps, status.consume_failed_msgs),
        )
    if info.jstack is not None:
        yield from ("", "", "#Consumer jstack#", *info.jstack.splitlines())


# -- servers


def settings(title: str, pairs: Mapping[str, str]) -> Iterator[str]:
    yield f"============{title}============"
    unused = pairs.without_effect if isinstance(pairs, values.BrokerSettings) else ()
    for key, value in sorted(pairs.items()):
        yield f"{key:<50}=  {value}{'  (no effect here)' if key in unused else ''}"


def perm_changes(verb: str, changes: Iterable[values.PermChange]) -> Iterator[str]:
    for each in changes:
        outcome = "Failed" if each.problem else f"OK, {each.topics}"
        yield f"{verb} write perm of broker[{each.broker_name}] in name server[{each.namesrv}] {outcome}"


def topic_stats(rows: Iterable[values.TopicStats], *, title: bool) -> Iterator[str]:
    form = "%-64s  %-64s %12s %11s %11s %14s %14s"
    if title:
        names = ("#Accumulation", "#InTPS", "#OutTPS", "#InMsg24Hour", "#OutMsg24Hour")
        yield form % ("#Topic", "#Consumer Group", *names)
    for row in rows:
        came = known(row.in_msg_24_hours)
        out: tuple[object, ...] = (fixed(row.out_tps, 2), came, known(row.out_msg_24_hours))
        if not row.consumer_group:
            out = ("", came, "NO_CONSUMER")
        where = row.topic[:64], row.consumer_group[:64]
        yield form % (*where, known(row.accumulation), fixed(row.in_tps, 2), *out)


def consume_queue(found: QueryConsumeQueueBody, index: int) -> Iterator[str]:
    bar = "=" * 38
    if found.subscription_data is not None:
        data = msgspec.json.format(msgspec.json.encode(found.subscription_data), indent=2).decode()
        yield from ("Subscription data: ", *data.splitlines(), bar)
    if found.filter_data is not None:
        yield from ("Filter data: ", found.filter_data, bar)
    yield from ("Queue data: ", f"max: {found.max_queue_index}, min: {found.min_queue_index}", bar)
    for number, each in enumerate(found.queue_data, index):
        yield f"idx: {number}"
        yield (
            f"ConsumeQueueData{{physicOffset={each.physic_offset}, physicSize={each.physic_size}, "
            f"tagsCode={each.tags_code}, extendDataJson='{java_word(each.extend_data_json)}', "
            f"bitMap='{java_word(each.bit_map)}', eval={show_value(each.eval)}, msg='{java_word(each.msg)}'}}"
        )
        yield bar


# -- messages


CLUSTER_RT_TITLES = "%-24s  %-24s  %-4s  %-8s  %-8s"
CLUSTER_RT = "%-24s  %-24s  %-8s  %-16s  %-16s"


def message_text(message: MessageExt) -> str:
    """Return all fields of a message in one line, as Java prints a message."""
    properties = ", ".join(f"{key}={value}" for key, value in sorted(message.properties.items()))
    body = ", ".join(str(byte - 256 if byte > 127 else byte) for byte in bytes(message.body))
    return (
        f"MessageExt [brokerName={message.broker_name}, queueId={message.queue_id}, "
        f"storeSize={message.store_size}, queueOffset={message.queue_offset}, sysFlag={message.sys_flag}, "
        f"bornTimestamp={message.born_timestamp_ms}, bornHost=/{message.born_host}, "
        f"storeTimestamp={message.store_timestamp_ms}, storeHost=/{message.store_host}, "
        f"msgId={message.offset_msg_id}, commitLogOffset={message.physical_offset}, "
        f"bodyCRC={message.body_crc}, reconsumeTimes={message.reconsume_times}, "
        f"preparedTransactionOffset={message.prepared_transaction_offset}, "
        f"toString()=Message{{topic='{message.topic}', flag={message.flag}, "
        f"properties={{{properties}}}, body=[{body}], transactionId='null'}}]"
    )


def send_time(row: values.SendTime, *, title: bool) -> Iterator[str]:
    form = "%-32s  %-4s  %-20s    %s"
    if title:
        yield form % ("#Broker Name", "#QID", "#Send Result", "#RT")
    yield form % (row.broker_name, row.queue_id, show_value(row.sent), round(row.millis))


def send_status(row: values.SendTime, topic: str) -> str:
    queue = java_text(MessageQueue(topic, row.broker_name, row.queue_id))
    return (
        f"rt={round(row.millis)}ms, SendResult=SendResult [sendStatus={row.result}, msgId={row.msg_id}, "
        f"offsetMsgId={row.offset_msg_id}, messageQueue={queue}, queueOffset={row.queue_offset}]"
    )
