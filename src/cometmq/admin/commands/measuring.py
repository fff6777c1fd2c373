"""`mqadmin` commands that measure response times: `checkMsgSendRT`, `sendMsgStatus`, `clusterRT`."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats, shell
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import SendTime
from cometmq.command_options import FiniteRange, name_option, number, opt, switch
from cometmq.text import local_time

COUNT = partial(number, low=1, high=1_000_000, show_default=True)
SIZE = partial(number, high=4 << 20, default=128, show_default=True, help="Size of each body, in bytes.")


FACTS = ("clusterName", "brokerName", "rt", "successCount", "failCount")


@shell.admin_command(
    "checkMsgSendRT",
    shell.TOPIC,
    COUNT("-a --amount", default=100, help="Messages to send."),
    SIZE("-s --size"),
)
async def check_msg_send_rt(admin: Admin, topic: str, amount: int, size: int) -> None:
    """Send messages to a topic and show response times. The messages are not deleted afterwards."""
    rows: list[SendTime] = []
    async for row in admin.send_times(topic, amount, size):
        if not shell.wants_json():
            shell.show(formats.send_time(row, title=not rows))
        rows.append(row)
    average = mean_without_first(rows)
    shell.tell({"sends": rows, "averageMillis": average}, [f"Avg RT: {formats.fixed(average, 2)}"])
    fail_if_none_was_sent(rows)


def mean_without_first(rows: list[SendTime]) -> float | None:
    """Return the mean time in ms of the successful sends, or None if there is none.

    The first send is not counted, because it also connects.
    """
    sent = [row.millis for row in rows[1:] if row.sent]
    return sum(sent) / len(sent) if sent else None


def fail_if_none_was_sent(rows: list[SendTime]) -> None:
    """Exit with code 1 if every send has failed."""
    if not any(row.sent for row in rows):
        why = f": {rows[0].result}" if rows else ""
        raise click.ClickException(f"no message was sent{why}")


@shell.admin_command(
    "sendMsgStatus",
    name_option("-b --brokerName", required=True, help="Broker to send to (the topic has its name)."),
    SIZE("-s --messageSize size"),
    COUNT("-c --count", default=50, help="Messages to send."),
)
async def send_msg_status(admin: Admin, broker_name: str, size: int, count: int) -> None:
    """Send messages to the topic that has the name of a broker, and show response times."""
    rows: list[SendTime] = []
    async for row in admin.send_times(broker_name, count + 1, size):
        rows.append(row)
        if len(rows) > 1 and not shell.wants_json():  # The first send also connects, so its time is not shown
            shell.show([formats.send_status(row, broker_name)])
    if shell.wants_json():
        shell.show_json(rows[1:])
    fail_if_none_was_sent(rows)


@shell.admin_command(
    "clusterRT",
    COUNT("-a --amount", default=100, help="Messages per broker and round."),
    SIZE("-s --size"),
    name_option("-c --cluster", help="Only this cluster."),
    switch("-p --printLog as_log", help="Print the results as lines of a log."),
    opt(
        "-m --machineRoom room",
        default="noname",
        metavar="NAME",
        help="With -p: name of this machine's data centre in the lines.",
    ),
    opt(
        "-i --interval",
        type=FiniteRange(min=0.1),
        default=10,
        show_default=True,
        help="Seconds between two rounds.",
    ),
    shell.ROUNDS,
)
async def cluster_rt(
    admin: Admin,
    amount: int,
    size: int,
    cluster: str | None,
    as_log: bool,
    room: str,
    interval: float,
    rounds: int | None,
) -> None:
    """Send messages to every broker periodically, and show response times."""
    if not as_log:
        titles = ("#Cluster Name", "#Broker Name", "#RT", "#successCount", "#failCount")
        shell.show_if_text(formats.CLUSTER_RT_TITLES % titles)
    done = 0
    while True:
        table = (await admin.cluster_info()).cluster_addr_table
        if cluster is not None and cluster not in table:
            raise UnknownNameError("cluster", cluster, sorted(table))
        for name in [cluster] if cluster else sorted(table):
            for broker in sorted(table[name]):
                rows = [row async for row in admin.send_times(broker, amount, size)]
                mean = mean_without_first(rows)
                good = sum(row.sent for row in rows)
                facts = name, broker, mean, good, len(rows) - good
                line = formats.CLUSTER_RT % (name, broker, formats.fixed(mean, 2), good, len(rows) - good)
                if as_log:
                    now = local_time(int(time.time() * 1000))
                    line = f"{now}|{room}|{name}|{broker}|{formats.fixed(mean, 0)}"
                shell.tell(dict(zip(FACTS, facts, strict=True)), [line], indent=None)
        done += 1
        if rounds is not None and done >= rounds:
            return
        await asyncio.sleep(interval)
