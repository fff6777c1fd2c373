"""`mqadmin` commands for messages: queries, traces, `sendMessage`, `consumeMessage`."""

from __future__ import annotations

import time
from functools import partial

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.body_files import write_body
from cometmq.admin.commands.shell import (
    BODY_FORMAT,
    CLUSTER,
    TOPIC,
    F,
    admin_command,
    announce,
    changes,
    flag,
    in_cluster,
    name_option,
    number,
    opt,
    show,
    show_json,
    switch,
    tell,
    wants_json,
)
from cometmq.admin.messages import ReadRange
from cometmq.admin.values import MessageView, SendView
from cometmq.client.cluster.lookups import ALWAYS, MAX_UNIQUE_HITS
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import TRACE_TOPIC

MAX_KEY_HITS = 64
MILLISECONDS = partial(opt, type=click.IntRange(*ALWAYS))
TIMES = (
    MILLISECONDS("-b", "--beginTimestamp", "begin", default=0, help="Start of the time range, in ms."),
    MILLISECONDS("-e", "--endTimestamp", "end", default=ALWAYS[1], help="End of the time range, in ms."),
)


def consume_directly_options(command: F) -> F:
    """Add `-g/--consumerGroup` and `-d/--clientId`, which make a consumer process a message immediately."""
    group = name_option("-g", "--consumerGroup", "group", help="With -d: the consumer's group.")
    client = opt("-d", "--clientId", metavar="ID", help="Have this consumer process the message.")
    return client(group(command))


@admin_command("queryMsgById")
@opt(
    "-i",
    "--msgId",
    "msg_ids",
    required=True,
    metavar="LIST",
    help="Message ids, separated by ',': offset ids, or unique keys as `cometmq send` shows them.",
)
@name_option(
    "-t",
    "--topic",
    help="Topic in which unique keys are searched. [default: all but retry, dead-letter and system topics]",
)
@consume_directly_options
@switch("-s", "--sendMessage", "resend", help="Send it again.")
@opt(
    "-u",
    "--unitName",
    "unitname",
    metavar="NAME",
    expose_value=False,
    help="Accepted for compatibility; has no effect.",
)
@BODY_FORMAT
@opt(
    "-c", "--cluster", metavar="NAME", expose_value=False, help="Accepted for compatibility; an id suffices."
)
async def query_msg_by_id(
    admin: Admin,
    msg_ids: str,
    topic: str | None,
    group: str | None,
    client_id: str | None,
    resend: bool,
    charset: str | None,
) -> None:
    """Show a message by its id."""
    ids = [word.strip() for word in msg_ids.split(",") if word.strip()]
    messages = [await admin.message_by_id(msg_id, topic) for msg_id in ids]
    if group and client_id:
        await consume_directly(admin, messages, group, client_id)
    elif resend:
        for message in messages:
            result = await admin.send_again(message)
            prepared = f"prepare resend msg. originalMsgId={message.offset_msg_id}"
            tell(SendView.of(result), [prepared, *formats.send_result(result)])
    else:
        await show_messages(admin, messages, offset_id=True, charset=charset)


@admin_command(
    "queryMsgByKey",
    TOPIC,
    opt("-k", "--msgKey", "key", required=True, type=str.strip, metavar="KEY", help="Message key."),
    *TIMES,
    number(
        "-m",
        "--maxNum",
        "limit",
        low=1,
        high=MAX_KEY_HITS,
        default=MAX_KEY_HITS,
        show_default=True,
        help="Maximum number of messages.",
    ),
    CLUSTER,
)
async def query_msg_by_key(
    admin: Admin, topic: str, key: str, begin: int, end: int, limit: int, cluster: str | None
) -> None:
    """List messages by key."""
    found = await admin.messages_by_key(topic, key, limit, begin_ms=begin, end_ms=end)
    messages = await in_cluster(admin, cluster, found)
    tell([MessageView.of(message) for message in messages], formats.key_hits(messages))


@admin_command("queryMsgByUniqueKey")
@opt("-i", "--msgId", required=True, metavar="ID", help="Message id.")
@consume_directly_options
@TOPIC
@flag("-a", "--showAll", help=f"Print all matching messages, at most {MAX_UNIQUE_HITS}.")
@CLUSTER
async def query_msg_by_unique_key(
    admin: Admin,
    msg_id: str,
    group: str | None,
    client_id: str | None,
    topic: str,
    show_all: bool,
    cluster: str | None,
) -> None:
    """Show a message by its unique key."""
    hits = await admin.messages_by_unique_key(topic, msg_id.strip(), MAX_UNIQUE_HITS)
    messages = await in_cluster(admin, cluster, hits)
    if not messages:
        raise click.ClickException(f"no message with id {msg_id} in topic {topic}")
    if group and client_id:
        await consume_directly(admin, messages[:1], group, client_id)
    else:
        await show_messages(admin, messages if show_all else messages[:1], offset_id=False)


@admin_command("resumeCheckHalfMessage")
@opt(
    "-i",
    "--msgId",
    "msg_ids",
    required=True,
    metavar="LIST",
    help="Ids, separated by ',': unique keys as producers have them, or offset ids in "
    "TRANS_CHECK_MAX_TIME_TOPIC.",
)
@changes
async def resume_check_half_message(admin: Admin, msg_ids: str) -> None:
    """Resume the checks of a transaction that reached the maximum number of checks."""
    ids = [word.strip() for word in msg_ids.split(",") if word.strip()]
    announce(*(f"resume the checks of transaction {msg_id}" for msg_id in ids))
    for msg_id in ids:
        message = await admin.resume_check(msg_id)
        view = {"msgId": message.msg_id, "storeHost": message.store_host}
        tell(view, [f"resumed {message.msg_id} at {message.store_host}"])


@admin_command("queryMsgTraceById")
@opt("-i", "--msgId", required=True, metavar="ID", help="Message id.")
@name_option("-t", "--traceTopic", "topic", default=TRACE_TOPIC, show_default=True, help="Trace topic.")
@TIMES[0]
@TIMES[1]
@number(
    "-c",
    "--maxNum",
    "limit",
    low=1,
    high=MAX_KEY_HITS,
    default=MAX_KEY_HITS,
    show_default=True,
    help="Maximum number of trace messages to read.",
)
async def query_msg_trace_by_id(
    admin: Admin, msg_id: str, topic: str, begin: int, end: int, limit: int
) -> None:
    """Show a message's trace."""
    msg_id = msg_id.strip()
    found = await admin.traces(msg_id, topic, limit, begin_ms=begin, end_ms=end)
    if wants_json():
        show_json(found)
    elif found:
        show(formats.message_traces(found))
    else:
        raise click.ClickException(f"no trace of message {msg_id} in topic {topic}")


@admin_command("sendMessage")
@TOPIC
@opt("-p", "--body", required=True, metavar="TEXT", help="Message body, as UTF-8 text.")
@opt("-k", "--key", "keys", metavar="KEYS", help="Message keys, separated by blanks.")
@opt("-c", "--tags", metavar="TAG", help="Message tag.")
@name_option("-b", "--broker", "broker_name", help="Name of the broker to send to; needs -i.")
@number("-i", "--qid", "queue_id", metavar="ID", help="Queue to send to; needs -b.")
@switch("-m", "--msgTraceEnable", "trace", help="Write a trace of the message.")
async def send_message(
    admin: Admin,
    topic: str,
    body: str,
    keys: str | None,
    tags: str | None,
    broker_name: str | None,
    queue_id: int | None,
    trace: bool,
) -> None:
    """Send a message."""
    if (broker_name is None) != (queue_id is None):
        raise click.UsageError("Give -b/--broker and -i/--qid together.")
    message = Message(topic=topic, body=body.encode(), tags=tags, keys=tuple((keys or "").split()))
    result = await admin.send(message, broker_name=broker_name, queue_id=queue_id, traced=trace)
    tell(SendView.of(result), formats.send_result(result))


def past_time(text: str) -> int:
    """Return ms since 1970 from digits, a local `yyyy-MM-dd#HH:mm:ss:SSS` or `now`.

    Future times are refused.
    """
    now = int(time.time() * 1000)
    try:
        moment = now if text == "now" else formats.parse_time(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither milliseconds nor yyyy-MM-dd#HH:mm:ss:SSS") from None
    if moment > now:
        raise click.BadParameter(f"{text!r} is in the future")
    return moment


@admin_command("consumeMessage")
@TOPIC
@name_option("-b", "--brokerName", help="Only this broker.")
@number("-i", "--queueId", metavar="ID", help="Only this queue; needs -b.")
@number("-o", "--offset", metavar="OFFSET", help="Offset of the first message to consume; needs -i.")
@name_option(
    "-g",
    "--consumerGroup",
    "group",
    help="Existing consumer group to pull with; its offsets do not change.",
)
@opt("-s", "--beginTimestamp", "begin", type=past_time, metavar="TIME", help="Start of the time range.")
@opt("-e", "--endTimestamp", "end", type=past_time, metavar="TIME", help="End of the time range (exclusive).")
@number(
    "-c",
    "--MessageNumber",
    "count",
    low=1,
    default=128,
    show_default=True,
    help="Maximum number of messages.",
)
async def consume_message(
    admin: Admin,
    topic: str,
    broker_name: str | None,
    queue_id: int | None,
    offset: int | None,
    group: str | None,
    begin: int | None,
    end: int | None,
    count: int,
) -> None:
    """Read messages of a topic; no offset is stored."""
    if queue_id is not None and broker_name is None:
        raise click.UsageError("Please set the brokerName before queueId!")
    if offset is not None and queue_id is None:
        raise click.UsageError("Please set queueId before offset!")
    if begin is not None and end is not None and begin > end:
        raise click.UsageError(
            "Please make sure that the beginTimestamp is less than or equal to the endTimestamp"
        )
    wanted = ReadRange(
        topic=topic,
        broker_name=broker_name,
        queue_id=queue_id,
        offset=offset,
        begin_ms=begin,
        end_ms=end,
        count=count,
    )
    if group is not None:
        await admin.brokers_of(group)  # Refuse an unknown group, which a pull would create
    async for message in admin.read(wanted, group=group):
        # A list may be long, so each message is printed when it arrives: one JSON object per line.
        if wants_json():
            show_json(MessageView.of(message), indent=None)
        else:
            body = bytes(message.body).decode("utf-8", "replace")
            show([f"MSGID: {message.msg_id} {formats.message_text(message)} BODY: {body}"])


async def consume_directly(admin: Admin, messages: list[MessageExt], group: str, client_id: str) -> None:
    """Have one consumer process the messages, and print the results of its listener."""
    for message in messages:
        result = await admin.consume_directly(group, client_id, message.offset_msg_id)
        tell(result, formats.direct_result(result))


async def show_messages(
    admin: Admin, messages: list[MessageExt], *, offset_id: bool, charset: str | None = None
) -> None:
    """Print for each message its fields, its state in each group, and the file to which its body is written.

    With `charset`, print the body, too. With `--json`, print all messages as JSON instead.
    """
    if wants_json():
        show_json([MessageView.of(message) for message in messages])
        return
    for message in messages:
        show(formats.message_details(message, body_path=write_body(message), offset_id=offset_id))
        if charset is not None:
            show([f"{'Message Body:':<20} {bytes(message.body).decode(charset, 'replace')}"])
        show(formats.message_tracks(await admin.tracks(message)))
        show([""])
