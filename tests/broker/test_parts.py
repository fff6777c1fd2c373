"""The services of a broker and the ports they use."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from tests.kit.brokers import Peer, records
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.protocol.codes import RequestCode
from cometmq.standalone import Standalone
from cometmq.store import Disk, MessageStore, StoreConfig
from cometmq.store.base.guards import lock_held

SERVED = [
    "ACK_MESSAGE", "BATCH_ACK_MESSAGE", "CHANGE_MESSAGE_INVISIBLETIME", "NOTIFICATION", "PEEK_MESSAGE",
    "POLLING_INFO", "POP_MESSAGE", "POP_ROLLBACK", "GET_ALL_MESSAGE_REQUEST_MODE", "QUERY_ASSIGNMENT",
    "SET_MESSAGE_REQUEST_MODE", "WITHDRAW_POP",
    "ADD_BROKER", "CHECK_CLIENT_CONFIG", "CLEAN_EXPIRED_CONSUMEQUEUE", "CLEAN_UNUSED_TOPIC",
    "CLONE_GROUP_OFFSET",
    "CONSUMER_SEND_MSG_BACK", "CONSUME_MESSAGE_DIRECTLY", "DELETE_ACL_CONFIG", "DELETE_EXPIRED_COMMITLOG",
    "GET_BROKER_CLUSTER_ACL_INFO", "UPDATE_AND_CREATE_ACL_CONFIG", "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG",
    "DELETE_SUBSCRIPTIONGROUP", "DELETE_TOPIC_IN_BROKER", "END_TRANSACTION",
    "EXCHANGE_BROKER_HA_INFO", "GET_ALL_CONSUMER_OFFSET", "GET_ALL_DELAY_OFFSET",
    "GET_ALL_PRODUCER_INFO", "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", "GET_ALL_TOPIC_CONFIG",
    "GET_BROKER_LITE_INFO", "GET_LITE_CLIENT_INFO", "GET_LITE_GROUP_INFO", "GET_LITE_STATE",
    "GET_LITE_TOPIC_INFO", "GET_PARENT_TOPIC_INFO", "LIST_LITE_TOPICS", "TRIGGER_LITE_DISPATCH",
    "GET_BROKER_CONFIG", "GET_BROKER_HA_STATUS", "GET_BROKER_CONSUME_STATS", "GET_BROKER_RUNTIME_INFO",
    "GET_CONSUMER_CONNECTION_LIST", "GET_CONSUMER_LIST_BY_GROUP", "GET_CONSUMER_RUNNING_INFO",
    "GET_CONSUME_STATS", "GET_EARLIEST_MSG_STORETIME", "GET_MAX_OFFSET", "GET_MIN_OFFSET",
    "GET_PRODUCER_CONNECTION_LIST", "GET_SUBSCRIPTIONGROUP_CONFIG", "GET_SYSTEM_TOPIC_LIST_FROM_BROKER",
    "GET_TIMER_CHECK_POINT", "GET_TIMER_METRICS", "GET_TOPIC_CONFIG", "GET_TOPIC_STATS_INFO",
    "HEART_BEAT", "INVOKE_BROKER_TO_GET_CONSUMER_STATUS",
    "INVOKE_BROKER_TO_RESET_OFFSET", "LIST_ACCOUNTS", "EXPLAIN_ACCESS",
    "UPDATE_AND_CREATE_TOPIC_LIST", "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST",
    "LIST_TIMERS", "LITE_PULL_MESSAGE", "LITE_SUBSCRIPTION_CTL", "LOCK_BATCH_MQ", "POP_LITE_MESSAGE",
    "PULL_MESSAGE",
    "PURGE_TOPIC", "QUERY_CONSUMER_OFFSET", "QUERY_CONSUME_QUEUE", "QUERY_CONSUME_TIME_SPAN",
    "QUERY_CORRECTION_OFFSET", "QUERY_MESSAGE",
    "QUERY_SUBSCRIPTION_BY_CONSUMER", "QUERY_TOPICS_BY_CONSUMER", "QUERY_TOPIC_CONSUME_BY_WHO",
    "RECALL_MESSAGE", "REGISTER_FILTER_SERVER", "REMOVE_BROKER", "RESET_MASTER_FLUSH_OFFSET",
    "RESUME_CHECK_HALF_MESSAGE",
    "SEARCH_OFFSET_BY_TIMESTAMP", "SEND_BATCH_MESSAGE", "SEND_MESSAGE", "SEND_MESSAGE_V2",
    "SEND_REPLY_MESSAGE", "SEND_REPLY_MESSAGE_V2",
    "UNLOCK_BATCH_MQ", "UNREGISTER_CLIENT", "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP",
    "UPDATE_AND_CREATE_TOPIC", "UPDATE_BROKER_CONFIG", "UPDATE_CONSUMER_OFFSET",
    "VIEW_BROKER_STATS_DATA", "VIEW_MESSAGE_BY_ID",
]  # fmt: skip


async def test_these_requests_are_served_and_no_others(peer):
    answers = {code.name: await peer.call(code) for code in RequestCode}
    assert sorted(name for name, answer in answers.items() if answer.code != 3) == sorted(SERVED)


async def test_unknown_codes_are_answered_as_apache_does(peer):
    answer = await peer.call(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


class TestFastPort:
    async def test_it_serves_everything_but_pulls(self, tmp_path):
        port = free_port()
        async with Standalone(tmp_path, 0, port):
            vip = Peer(f"127.0.0.1:{port - 2}")
            assert (await vip.send()).code == 0
            assert (await vip.heartbeat()).code == 0
            refused = await vip.pull()
            assert (refused.code, refused.remark) == (3, " request type 11 not supported")
            main = Peer(f"127.0.0.1:{port}")
            assert len(records(await main.pull())) == 1
            await vip.close()
            await main.close()

    async def test_a_taken_fast_port_is_a_warning_and_no_more(self, tmp_path, caplog):
        port = free_port()
        with socket.create_server(("127.0.0.1", port - 2)):
            async with Standalone(tmp_path, 0, port):
                main = Peer(f"127.0.0.1:{port}")
                assert (await main.send()).code == 0
                await main.close()
        assert f"port {port - 2}" in caplog.text


# -- A broker's start and stop


class SlowDisk(Disk):
    """A disk on which directory listings wait."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.go_on = threading.Event(), threading.Event()

    def listdir(self, path: str) -> list[str]:
        self.opening.set()
        assert self.go_on.wait(20)
        return super().listdir(path)


async def test_a_cancelled_start_leaves_the_store_unlocked(tmp_path: Path) -> None:
    """The thread that opens the store cannot be cancelled, so the store is closed once it has been opened."""
    disk = SlowDisk()
    config = BrokerConfig(store=StoreConfig(store_path_root_dir=str(tmp_path)), listen_port=0)
    start = asyncio.create_task(Broker(config, disk=disk).start())
    assert await asyncio.to_thread(disk.opening.wait, 20)
    start.cancel()
    await asyncio.sleep(0)
    disk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    await until(lambda: not lock_held(disk, str(tmp_path)))
    MessageStore.open(config.store).close()
