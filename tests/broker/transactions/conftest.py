"""Helpers for half messages, transaction ends and checks of a running broker."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from tests.kit.brokers import Cluster, Peer, records

from cometmq.message import MessageExt
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.record.one import decode_record

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
HALF, OP, GIVEN_UP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"
MANUAL = {"transactionCheckInterval": "100000000", "transactionTimeOut": "0"}
"""Settings with which checks run only on request and no half message is too young."""


class Place(NamedTuple):
    """The position of a half message, as returned to its sender or contained in a check."""

    offset: int
    position: int


async def prepare(peer: Peer, body: bytes = b"half", key: str = "", group: str = "PG", **more: Any) -> Place:
    properties = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": key or body.decode()}
    properties |= more.pop("properties", {})
    answer = await peer.send(body=body, properties=properties, sys_flag=4, **more)
    assert answer.code == 0, answer.remark
    assert answer.ext is not None
    return Place(int(answer.ext["queueOffset"]), decode_offset_id(answer.ext["msgId"]).physical_offset)


async def end(
    peer: Peer,
    place: Place,
    how: int = COMMIT,
    *,
    group: str = "PG",
    check: bool = False,
    version: int = 407,
    key: str | None = None,
) -> Frame:
    """End a transaction and return the response."""
    header = EndTransactionRequestHeader(
        producer_group=group,
        tran_state_table_offset=place.offset,
        commit_log_offset=place.position,
        commit_or_rollback=how,
        from_transaction_check=check,
        msg_id=key,
    )
    return await peer.call(RequestCode.END_TRANSACTION, header, version=version)


async def check_round(cluster: Cluster) -> None:
    """Run one round of checks."""
    await asyncio.sleep(0.002)  # nothing else is stored in the millisecond of the round
    await cluster.broker.parts.transactions.checks.round()


async def asked(peer: Peer) -> tuple[MessageExt, Place, CheckTransactionStateRequestHeader]:
    """Return the next transaction check that the broker sends."""
    frame = await peer.notice(RequestCode.CHECK_TRANSACTION_STATE)
    assert frame.is_oneway
    header = frame.header(CheckTransactionStateRequestHeader)
    message = decode_record(frame.body, check_crc=True)
    return message, Place(header.tran_state_table_offset, header.commit_log_offset), header


async def stored(peer: Peer, topic: str, queue_id: int = 0) -> list[MessageExt]:
    """Return all messages of a queue."""
    found: list[MessageExt] = []
    while True:
        answer = await peer.pull(topic, queue_id, len(found))
        if answer.code != 0:
            return found
        found += records(answer)


async def bodies(peer: Peer, topic: str = "Orders", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in await stored(peer, topic, queue_id)]
