"""Settings and runtime statistics of a broker, read over the network."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from tests.kit.brokers import create, records
from tests.kit.waiting import until

from cometmq.protocol.bodies import KVTable, TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import GetRouteInfoRequestHeader
from cometmq.protocol.java_properties import parse_properties


class TestSettings:
    async def test_all_settings_are_shown_under_rocketmqs_names(self, cluster, peer):
        answer = await peer.call(RequestCode.GET_BROKER_CONFIG)
        shown = parse_properties(bytes(answer.body).decode())
        assert set(json.loads(answer.ext["version"])) == {"counter", "timestamp"}
        assert shown["brokerName"] == "broker-a"
        assert shown["brokerIP1"] == "127.0.0.1"
        assert shown["autoCreateTopicEnable"] == "true"
        assert shown["mappedFileSizeCommitLog"] == str(64 * 1024 * 1024)
        assert shown["sendMessageThreadPoolNums"] == "4"

    async def test_known_keys_are_set_at_once_and_unknown_ones_ignored(self, cluster, peer):
        body = b"autoCreateTopicEnable=false\nnoSuchKey=1\nmaxMessageSize=100\n"
        assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)).code == 0
        assert (await peer.send("New")).code == 17
        await create(peer)
        assert (await peer.send(body=b"x" * 101)).code == 13
        shown = parse_properties(bytes((await peer.call(RequestCode.GET_BROKER_CONFIG)).body).decode())
        assert (shown["autoCreateTopicEnable"], shown["maxMessageSize"]) == ("false", "100")
        assert "noSuchKey" not in shown
        written = parse_properties(Path(cluster.broker.config.broker_config_path).read_text())
        assert written["maxMessageSize"] == "100"

    async def test_what_sends_are_told_of_traces_and_5x_messages_say(self, peer):
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b'traceOn=false\nregionId=100% "north"\n')
        ext = (await peer.send()).ext
        assert (ext["TRACE_ON"], ext["MSG_REGION"]) == ("false", '100% "north"')
        await peer.send(version=453)
        told = records(await peer.pull())[-1].properties
        assert (told["TRACE_ON"], told["MSG_REGION"]) == ("false", '100% "north"')

    async def test_a_changed_permission_reaches_the_routes(self, cluster, peer):
        await create(peer)
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4\n")
        namesrv = cluster.peer(cluster.namesrv_addr)
        async with asyncio.timeout(60):
            while True:
                answer = await namesrv.call(105, GetRouteInfoRequestHeader(topic="Orders"))
                if TopicRouteData.decode(answer.body).queue_datas[0].perm == 4:
                    break
                await asyncio.sleep(0.01)

    async def test_the_runtime_table(self, cluster, peer):
        await peer.send(properties={"DELAY": "18"})
        await peer.send()
        await peer.pull()
        answer = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = KVTable.decode(answer.body).table
        assert (table["brokerVersionDesc"], table["brokerVersion"]) == ("V4_9_7", "407")
        assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("2", "1")
        assert table["scheduleMessageOffset_18"] == "0,1"
        assert int(table["commitLogMaxOffset"]) > 0
        for name in (
            "putTps",
            "getTotalTps",
            "getFoundTps",
            "getMissTps",
            "getTransferedTps",
            "getTransferredTps",
        ):
            assert len([float(word) for word in table[name].split(" ")]) == 3
        assert {"runtime", "bootTimestamp", "commitLogDiskRatio", "consumeQueueDiskRatio"} <= set(table)

    async def test_the_oldest_message_and_the_sizes_are_told(self, cluster, peer):
        async def told():
            return KVTable.decode((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table

        assert (await told())["earliestMessageTimeStamp"] == "-1"
        before = time.time_ns() // 1_000_000
        await peer.send(body=b"x" * 1000)
        table = await told()
        assert before <= int(table["earliestMessageTimeStamp"]) <= time.time_ns() // 1_000_000
        assert 1000 < float(table["putMessageAverageSize"]) < 1500
        await peer.send()
        again = await told()
        assert again["earliestMessageTimeStamp"] == table["earliestMessageTimeStamp"]
        assert int(again["putMessageSizeTotal"]) > int(table["putMessageSizeTotal"])

    async def test_rocketmq_exporter_can_read_the_table(self, peer):
        """rocketmq-exporter discards the whole table if one of these values is missing or not a number."""
        table = KVTable.decode((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table
        pools = [f"{pool}ThreadPoolQueue{part}" for pool in ("send", "pull", "query")
                 for part in ("Size", "Capacity", "HeadWaitTimeMills")]  # fmt: skip
        days = [f"msg{way}Total{day}" for way in ("Put", "Get")
                for day in ("TodayNow", "TodayMorning", "YesterdayMorning")]  # fmt: skip
        for name in (
            *pools, *days, "bootTimestamp", "brokerVersion", "commitLogMaxOffset", "commitLogMinOffset",
            "dispatchBehindBytes", "dispatchMaxBuffer", "earliestMessageTimeStamp", "getMessageEntireTimeMax",
            "pageCacheLockTimeMills", "putMessageEntireTimeMax", "putMessageSizeTotal",
            "putMessageTimesTotal", "remainTransientStoreBufferNumbs", "startAcceptSendRequestTimeStamp",
        ):  # fmt: skip
            int(table[name])
        for name in ("commitLogDiskRatio", "consumeQueueDiskRatio", "putMessageAverageSize"):
            float(table[name])
        float(table["remainHowManyDataToFlush"].split()[0])
        assert re.fullmatch(r"Total : [\d.]+ \w+, Free : [\d.]+ \w+\.", table["commitLogDirCapacity"])

    async def test_the_runtime_table_tells_of_timers_as_5x_does(self, cluster, peer):
        async def told():
            table = KVTable.decode((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table
            return {name: value for name, value in table.items() if name.startswith("timer")}

        nothing = {"timerReadBehind": "0", "timerOffsetBehind": "0", "timerCongestNum": "0"}
        assert await told() == nothing
        for _ in range(2):
            await peer.send(properties={"TIMER_DELAY_SEC": "600"})
        await until(lambda: cluster.broker.parts.timers.pending.followed == 2)
        assert await told() == nothing | {"timerCongestNum": "2"}
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"timerWheelEnable=false\n")
        assert await told() == {}

    @pytest.mark.parametrize("code", [306, 316, 329])
    async def test_clean_up_requests_succeed_and_keep_what_is_configured(self, peer, code):
        await peer.send()
        assert (await peer.call(code)).code == 0
        assert len(records(await peer.pull())) == 1
