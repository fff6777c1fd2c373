"""`mqadmin` commands for messages: queries, traces, sends, and the messages of a topic."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from functools import partial
from typing import Any

import click
import msgspec

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats, shell
from cometmq.admin.messages import ReadRange
from cometmq.admin.values import MessageView, SendView
from cometmq.client.cluster.lookups import ALWAYS, MAX_UNIQUE_HITS
from cometmq.client.group.allocate import java_text
from cometmq.command_options import F, flag, name_option, number, opt, switch
from cometmq.errors import NoRouteError
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import TRACE_TOPIC

MAX_KEY_HITS = 64
MILLISECONDS = partial(opt, type=click.IntRange(*ALWAYS))
TIMES = (
    MILLISECONDS("-b --beginTimestamp begin", default=0, help="Start of the time range, in ms."),
    MILLISECONDS("-e --endTimestamp end", default=ALWAYS[1], help="End of the time range, in ms."),
)


def consume_directly_options(command: F) -> F:
    """Add `-g/--consumerGroup` and `-d/--clientId`, which make a consumer process a message immediately."""
    group = name_option("-g --consumerGroup group", help="With -d: the consumer's group.")
    client = opt("-d --clientId", metavar="ID", help="Have this consumer process the message.")
    return client(group(command))


@shell.admin_command("queryMsgById")
@opt(
    "-i --msgId msg_ids",
    required=True,
    metavar="LIST",
    help="Message ids, separated by ',': offset ids, or unique keys as `cometmq send` shows them.",
)
@name_option(
    "-t --topic",
    help="Topic in which unique keys are searched. [default: all but retry, dead-letter and system topics]",
)
@consume_directly_options
@switch("-s --sendMessage resend", help="Send it again.")
@opt(
    "-u --unitName unitname",
    metavar="NAME",
    expose_value=False,
    help="Accepted for compatibility; has no effect.",
)
@shell.BODY_FORMAT
@opt("-c --cluster", metavar="NAME", expose_value=False, help="Accepted for compatibility; an id suffices.")
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
            shell.tell(SendView.of(result), [prepared, *formats.send_result(result)])
    else:
        await show_messages(admin, messages, offset_id=True, charset=charset)


@shell.admin_command(
    "queryMsgByKey",
    shell.TOPIC,
    opt("-k --msgKey key", required=True, type=str.strip, metavar="KEY", help="Message key."),
    *TIMES,
    number(
        "-m --maxNum limit",
        low=1,
        high=MAX_KEY_HITS,
        default=MAX_KEY_HITS,
        show_default=True,
        help="Maximum number of messages.",
    ),
    shell.CLUSTER,
)
async def query_msg_by_key(
    admin: Admin, topic: str, key: str, begin: int, end: int, limit: int, cluster: str | None
) -> None:
    """List messages by key."""
    found = await admin.messages_by_key(topic, key, limit, begin_ms=begin, end_ms=end)
    messages = await shell.in_cluster(admin, cluster, found)
    shell.tell([MessageView.of(message) for message in messages], formats.key_hits(messages))


@shell.admin_command("queryMsgByUniqueKey")
@opt("-i --msgId", required=True, metavar="ID", help="Message id.")
@consume_directly_options
@shell.TOPIC
@flag("-a --showAll", help=f"Print all matching messages, at most {MAX_UNIQUE_HITS}.")
@shell.CLUSTER
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
    messages = await shell.in_cluster(admin, cluster, hits)
    if not messages:
        raise click.ClickException(f"no message with id {msg_id} in topic {topic}")
    if group and client_id:
        await consume_directly(admin, messages[:1], group, client_id)
    else:
        await show_messages(admin, messages if show_all else messages[:1], offset_id=False)


@shell.admin_command("resumeCheckHalfMessage")
@opt(
    "-i --msgId msg_ids",
    required=True,
    metavar="LIST",
    help="Ids, separated by ',': unique keys as producers have them, or offset ids in "
    "TRANS_CHECK_MAX_TIME_TOPIC.",
)
@shell.changes
async def resume_check_half_message(admin: Admin, msg_ids: str) -> None:
    """Resume the checks of a transaction that reached the maximum number of checks."""
    ids = [word.strip() for word in msg_ids.split(",") if word.strip()]
    shell.announce(*(f"resume the checks of transaction {msg_id}" for msg_id in ids))
    for msg_id in ids:
        message = await admin.resume_check(msg_id)
        view = {"msgId": message.msg_id, "storeHost": message.store_host}
        shell.tell(view, [f"resumed {message.msg_id} at {message.store_host}"])


@shell.admin_command("queryMsgTraceById")
@opt("-i --msgId", required=True, metavar="ID", help="Message id.")
@name_option("-t --traceTopic topic", default=TRACE_TOPIC, show_default=True, help="Trace topic.")
@TIMES[0]
@TIMES[1]
@number(
    "-c --maxNum limit",
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
    try:
        found = await admin.traces(msg_id, topic, limit, begin_ms=begin, end_ms=end)
    except NoRouteError as error:
        error.hint = (
            "Clients write traces if they enable them, to a topic of brokers with traceTopicEnable=true"
        )
        raise
    if shell.wants_json():
        shell.show_json(found)
    elif found:
        shell.show(formats.message_traces(found))
    else:
        raise click.ClickException(f"no trace of message {msg_id} in topic {topic}")


@shell.admin_command("sendMessage")
@shell.TOPIC
@opt("-p --body", required=True, metavar="TEXT", help="Message body, as UTF-8 text.")
@opt("-k --key keys", metavar="KEYS", help="Message keys, separated by blanks.")
@opt("-c --tags", metavar="TAG", help="Message tag.")
@name_option("-b --broker broker_name", help="Name of the broker to send to; needs -i.")
@number("-i --qid queue_id", metavar="ID", help="Queue to send to; needs -b.")
@switch("-m --msgTraceEnable trace", help="Write a trace of the message.")
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
    shell.tell(SendView.of(result), formats.send_result(result))


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


@shell.admin_command("consumeMessage")
@shell.TOPIC
@name_option("-b --brokerName", help="Only this broker.")
@number("-i --queueId", metavar="ID", help="Only this queue; needs -b.")
@number("-o --offset", metavar="OFFSET", help="Offset of the first message to consume; needs -i.")
@name_option(
    "-g --consumerGroup group", help="Existing consumer group to pull with; its offsets do not change."
)
@opt("-s --beginTimestamp begin_ms", type=past_time, metavar="TIME", help="Start of the time range.")
@opt("-e --endTimestamp end_ms", type=past_time, metavar="TIME", help="End of the time range (exclusive).")
@number("-c --MessageNumber count", low=1, default=128, show_default=True, help="Maximum number of messages.")
async def consume_message(
    admin: Admin,
    broker_name: str | None,
    queue_id: int | None,
    offset: int | None,
    group: str | None,
    begin_ms: int | None,
    end_ms: int | None,
    **more: Any,
) -> None:
    """Read messages of a topic; no offset is stored."""
    if queue_id is not None and broker_name is None:
        raise click.UsageError("Please set the brokerName before queueId!")
    if offset is not None and queue_id is None:
        raise click.UsageError("Please set queueId before offset!")
    if begin_ms is not None and end_ms is not None and begin_ms > end_ms:
        raise click.UsageError(
            "Please make sure that the beginTimestamp is less than or equal to the endTimestamp"
        )
    wanted = ReadRange(
        broker_name=broker_name, queue_id=queue_id, offset=offset, begin_ms=begin_ms, end_ms=end_ms, **more
    )
    if group is not None:
        await admin.brokers_of(group)  # Refuse an unknown group, which a pull would create
    async for message in admin.read(wanted, group=group):
        show_line(message, bytes(message.body).decode("utf-8", "replace"))


async def consume_directly(admin: Admin, messages: list[MessageExt], group: str, client_id: str) -> None:
    """Have one consumer process the messages, and print the results of its listener."""
    for message in messages:
        result = await admin.consume_directly(group, client_id, message.offset_msg_id)
        shell.tell(result, formats.direct_result(result))


async def show_messages(
    admin: Admin, messages: list[MessageExt], *, offset_id: bool, charset: str | None = None
) -> None:
    """Print for each message its fields, its state in each group, and the file to which its body is written.

    With `charset`, print the body, too. With `--json`, print all messages as JSON instead.
    """
    if shell.wants_json():
        shell.show_json([MessageView.of(message) for message in messages])
        return
    for message in messages:
        shell.show(formats.message_details(message, body_path=write_body(message), offset_id=offset_id))
        if charset is not None:
            shell.show([f"{'Message Body:':<20} {bytes(message.body).decode(charset, 'replace')}"])
        shell.show(formats.message_tracks(await admin.tracks(message)))
        shell.show([""])


QUEUE_ID = number("-i --queueId", required=True, help="Queue id.")
CHARSET = opt(
    "-c --charsetName charset", default="UTF-8", show_default=True, metavar="NAME", help="Of the bodies."
)
EXPRESSION = opt(
    "-s --subExpression expression",
    default="*",
    show_default=True,
    metavar="TAGS",
    help="Subscription expression, for example TagA || TagB.",
)
SPAN = (
    opt("-b --beginTimestamp begin_ms", type=shell.time_ms, metavar="TIME", help="Start of the time range."),
    opt(
        "-e --endTimestamp end_ms",
        type=shell.time_ms,
        metavar="TIME",
        help="End of the time range (exclusive).",
    ),
)


NO_BODY = "NOT PRINT BODY"


def show_line(message: MessageExt, body: str) -> None:
    """Print a message when it arrives, in one line, also with `--json`, because a list may be long."""
    if shell.wants_json():
        shell.show_json(MessageView.of(message), indent=None)
    else:
        shell.show([f"MSGID: {message.msg_id} {formats.message_text(message)} BODY: {body}"])


def text_of(body: bytes, charset: str) -> str:
    """Return a body as text. Invalid bytes are replaced, as in Java. Raises click.BadParameter."""
    try:
        return body.decode(charset, "replace")
    except LookupError:
        raise click.BadParameter(f"unknown charset {charset!r}", param_hint="-c/--charsetName") from None


@shell.admin_command(
    "printMsg",
    shell.TOPIC,
    CHARSET,
    EXPRESSION,
    *SPAN,
    switch("-d --printBody", default=True, show_default=True, help="Print bodies."),
)
async def print_msg(admin: Admin, charset: str, print_body: bool, **span: Any) -> None:
    """Print the messages of a topic."""
    text_of(b"-", charset)  # Report an unknown charset even if all message bodies are empty
    whole = ReadRange(count=None, **span)
    async for queue, first, behind in admin.queue_bounds(whole):
        shell.show_if_text(f"minOffset={first}, maxOffset={behind}, {java_text(queue)}")
        wanted = msgspec.structs.replace(whole, broker_name=queue.broker_name, queue_id=queue.queue_id)
        async for message in admin.read(wanted):
            show_line(message, text_of(bytes(message.body), charset) if print_body else NO_BODY)
        shell.show_if_text("-" * 56)


@shell.admin_command(
    "printMsgByQueue",
    shell.TOPIC,
    name_option("-a --brokerName", required=True, help="Name of the broker."),
    QUEUE_ID,
    CHARSET,
    EXPRESSION,
    *SPAN,
    switch("-p --printMsg print_message", help="Print the messages."),
    switch("-d --printBody", help="Print the bodies, too."),
    switch("-f --calculate", help="Count messages by tag."),
)
async def print_msg_by_queue(
    admin: Admin, charset: str, print_message: bool, print_body: bool, calculate: bool, **wanted: Any
) -> None:
    """Print the messages of a queue (-p true), or their number by tag (-f true)."""
    text_of(b"-", charset)  # Report an unknown charset even if all message bodies are empty
    tags: Counter[str] = Counter()
    async for message in admin.read(ReadRange(count=None, **wanted)):
        if message.tags and message.tags.strip():
            tags[message.tags] += 1
        if print_message:
            show_line(message, text_of(bytes(message.body), charset) if print_body else NO_BODY)
    if calculate and shell.wants_json():
        shell.show_json({"tags": dict(tags.most_common())}, indent=None)
    elif calculate:
        shell.show(f"Tag: {tag:<30} Count: {count}" for tag, count in tags.most_common())


@shell.admin_command(
    "queryMsgByOffset",
    shell.TOPIC,
    name_option("-b --brokerName", required=True, help="Name of the broker."),
    QUEUE_ID,
    number("-o --offset", high=2**63 - 1, required=True, help="Offset in the queue."),
    shell.BODY_FORMAT,
)
async def query_msg_by_offset(
    admin: Admin, topic: str, broker_name: str, queue_id: int, offset: int, charset: str | None
) -> None:
    """Show a message by its queue offset."""
    message = await admin.message_at(topic, broker_name, queue_id, offset)
    await show_messages(admin, [message], offset_id=True, charset=charset)


_FILE_NAME = re.compile(r"[0-9A-Za-z]{1,64}")
"""Pattern of message ids that are safe as file names.

Ids are checked because a producer may set any text as the unique key.
"""


def write_body(message: MessageExt) -> str:
    """Write the body to a file named by the message's id that only this user can read; return its path.

    The file is in `cometmq/msgbodys` under XDG_CACHE_HOME (~/.cache), or in a new temporary directory if that
    directory is not usable. An existing file or link of that name is replaced; links are not followed.
    """
    name = message.msg_id if _FILE_NAME.fullmatch(message.msg_id) else message.offset_msg_id
    path = bodies_path()
    try:
        directory = open_own(path)
    except OSError:
        path = tempfile.mkdtemp(prefix="cometmq-msgbodys-")
        directory = open_own(path)
    try:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(message.body)
    finally:
        os.close(directory)
    return os.path.join(path, name)


def bodies_path() -> str:
    """Return the path of the user's directory for files with message bodies."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "cometmq", "msgbodys")


def open_own(path: str) -> int:
    """Return a descriptor of a directory that only this user can access. A missing directory is created.

    Raises OSError.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        os.fchmod(directory, 0o700)
    except BaseException:
        os.close(directory)
        raise
    return directory
