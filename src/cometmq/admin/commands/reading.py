"""`mqadmin` commands that print messages of a topic: `printMsg`, `printMsgByQueue`, `queryMsgByOffset`."""

from __future__ import annotations

from collections import Counter

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.messages import show_messages
from cometmq.admin.commands.shell import (
    BODY_FORMAT,
    TOPIC,
    admin_command,
    name_option,
    number,
    opt,
    show,
    show_json,
    switch,
    time_ms,
    wants_json,
)
from cometmq.admin.messages import ReadRange
from cometmq.admin.values import MessageView

QUEUE_ID = number("-i", "--queueId", required=True, help="Queue id.")
CHARSET = opt(
    "-c",
    "--charsetName",
    "charset",
    default="UTF-8",
    show_default=True,
    metavar="NAME",
    help="Of the bodies.",
)
EXPRESSION = opt(
    "-s",
    "--subExpression",
    "expression",
    default="*",
    show_default=True,
    metavar="TAGS",
    help="Subscription expression, for example TagA || TagB.",
)
TIMES = (
    opt("-b", "--beginTimestamp", "begin", type=time_ms, metavar="TIME", help="Start of the time range."),
    opt(
        "-e", "--endTimestamp", "end", type=time_ms, metavar="TIME", help="End of the time range (exclusive)."
    ),
)


def text_of(body: bytes, charset: str) -> str:
    """Return a body as text. Invalid bytes are replaced, as in Java. Raises click.BadParameter."""
    try:
        return body.decode(charset, "replace")
    except LookupError:
        raise click.BadParameter(f"unknown charset {charset!r}", param_hint="-c/--charsetName") from None


@admin_command(
    "printMsg",
    TOPIC,
    CHARSET,
    EXPRESSION,
    *TIMES,
    switch("-d", "--printBody", default=True, show_default=True, help="Print bodies."),
)
async def print_msg(
    admin: Admin,
    topic: str,
    charset: str,
    expression: str,
    begin: int | None,
    end: int | None,
    print_body: bool,
) -> None:
    """Print the messages of a topic."""
    text_of(b"-", charset)  # Report an unknown charset even if all message bodies are empty
    whole = ReadRange(topic=topic, begin_ms=begin, end_ms=end, count=None, expression=expression)
    async for queue, first, behind in admin.queue_bounds(whole):
        if not wants_json():
            show([f"minOffset={first}, maxOffset={behind}, {formats.queue_text(queue)}"])
        wanted = ReadRange(
            topic=topic,
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
            begin_ms=begin,
            end_ms=end,
            count=None,
            expression=expression,
        )
        async for message in admin.read(wanted):
            if wants_json():
                show_json(MessageView.of(message), indent=None)
            else:
                body = text_of(bytes(message.body), charset) if print_body else "NOT PRINT BODY"
                show([f"MSGID: {message.msg_id} {formats.message_text(message)} BODY: {body}"])
        if not wants_json():
            show(["-" * 56])


@admin_command(
    "printMsgByQueue",
    TOPIC,
    name_option("-a", "--brokerName", required=True, help="Name of the broker."),
    QUEUE_ID,
    CHARSET,
    EXPRESSION,
    *TIMES,
    switch("-p", "--printMsg", "print_message", help="Print the messages."),
    switch("-d", "--printBody", help="Print the bodies, too."),
    switch("-f", "--calculate", help="Count messages by tag."),
)
async def print_msg_by_queue(
    admin: Admin,
    topic: str,
    broker_name: str,
    queue_id: int,
    charset: str,
    expression: str,
    begin: int | None,
    end: int | None,
    print_message: bool,
    print_body: bool,
    calculate: bool,
) -> None:
    """Print the messages of a queue (-p true), or their number by tag (-f true)."""
    text_of(b"-", charset)  # Report an unknown charset even if all message bodies are empty
    wanted = ReadRange(
        topic=topic,
        broker_name=broker_name,
        queue_id=queue_id,
        begin_ms=begin,
        end_ms=end,
        count=None,
        expression=expression,
    )
    tags: Counter[str] = Counter()
    async for message in admin.read(wanted):
        if message.tags and message.tags.strip():
            tags[message.tags] += 1
        if print_message and wants_json():
            show_json(MessageView.of(message), indent=None)
        elif print_message:
            body = text_of(bytes(message.body), charset) if print_body else "NOT PRINT BODY"
            show([f"MSGID: {message.msg_id} {formats.message_text(message)} BODY: {body}"])
    if calculate and wants_json():
        show_json({"tags": dict(tags.most_common())}, indent=None)
    elif calculate:
        show(f"Tag: {tag:<30} Count: {count}" for tag, count in tags.most_common())


@admin_command(
    "queryMsgByOffset",
    TOPIC,
    name_option("-b", "--brokerName", required=True, help="Name of the broker."),
    QUEUE_ID,
    number("-o", "--offset", high=2**63 - 1, required=True, help="Offset in the queue."),
    BODY_FORMAT,
)
async def query_msg_by_offset(
    admin: Admin, topic: str, broker_name: str, queue_id: int, offset: int, charset: str | None
) -> None:
    """Show a message by its queue offset."""
    message = await admin.message_at(topic, broker_name, queue_id, offset)
    await show_messages(admin, [message], offset_id=True, charset=charset)
