"""Messages that consumers send back, and retries that clients send themselves."""

from __future__ import annotations

import pytest
from tests.kit.brokers import create, queue, records, store_raw, take

from cometmq.protocol.bodies import ConsumerConnection, LockBatchBody
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    ConsumerGroupRequestHeader,
    ConsumerSendMsgBackRequestHeader,
)
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.record.one import properties_of


@pytest.fixture
async def peer(fast):
    return fast.peer()


class TestSendBack:
    async def send_back(self, peer, stored, level=0, version=407, **more):
        """Send back a message, which is given itself or by its log position."""
        offset = stored if isinstance(stored, int) else decode_offset_id(stored.ext["msgId"]).physical_offset
        header = ConsumerSendMsgBackRequestHeader(offset=offset, group="G", delay_level=level, **more)
        return await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header, version=version)

    async def test_it_comes_again_in_the_retry_topic(self, peer):
        sent = await peer.send(body=b"again", properties={"TAGS": "A", "UNIQ_KEY": "U1", "KEYS": "k"}, flag=3)
        answer = await self.send_back(peer, sent)
        assert (answer.code, answer.remark, answer.ext) == (0, None, None)
        (message,) = await take(peer, "%RETRY%G", 1)
        assert (message.body, message.flag, message.reconsume_times, message.msg_id) == (b"again", 3, 1, "U1")
        wanted = {
            "RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": sent.ext["msgId"], "DELAY": "3", "WAIT": "false",
            "REAL_TOPIC": "%RETRY%G", "REAL_QID": "0", "TAGS": "A", "UNIQ_KEY": "U1", "KEYS": "k",
            "CLUSTER": "DefaultCluster",
        }  # fmt: skip
        assert message.properties == wanted

    async def test_the_second_time_keeps_the_origin_and_waits_a_level_longer(self, peer):
        sent = await peer.send(body=b"again")
        await self.send_back(peer, sent)
        (first,) = await take(peer, "%RETRY%G", 1)
        assert (await self.send_back(peer, first.physical_offset)).code == 0
        _, second = await take(peer, "%RETRY%G", 2)
        assert (second.reconsume_times, second.properties["DELAY"]) == (2, "4")
        assert second.properties["RETRY_TOPIC"] == "Orders"
        assert second.properties["ORIGIN_MESSAGE_ID"] == sent.ext["msgId"]

    @pytest.mark.parametrize(("level", "more"), [(-1, {}), (0, {"max_reconsume_times": 0})])
    async def test_over_the_limit_it_is_dead_at_once(self, fast, peer, level, more):
        sent = await peer.send(body=b"poison")
        assert (await self.send_back(peer, sent, level=level, **more)).code == 0
        (message,) = await take(peer, "%DLQ%G", 1)
        assert message.body == b"poison"
        assert (message.properties["RETRY_TOPIC"], message.properties["DELAY"]) == ("Orders", "0")
        topic = fast.broker.parts.tables.topics.table["%DLQ%G"]
        assert (topic.write_queue_nums, topic.perm) == (1, 6)

    async def test_the_groups_own_limit_counts_for_old_clients(self, peer):
        await peer.set_group(b'{"groupName":"G","retryMaxTimes":0}')
        sent = await peer.send(body=b"x")
        await self.send_back(peer, sent, version=100, max_reconsume_times=16)
        assert [m.body for m in await take(peer, "%DLQ%G", 1)] == [b"x"]

    @pytest.mark.parametrize(("level", "topic"), [(3, "%RETRY%G"), (-1, "%DLQ%G")])
    async def test_properties_that_cannot_be_written_again_come_back_as_they_are(
        self, fast, peer, level, topic
    ):
        await peer.send()
        stored = store_raw(fast, "Orders", b"TAGS\x01A\x02a\x01b\x01c\x02\xff\x01\xfe\x02junk")
        assert (await self.send_back(peer, stored.physical_offset, level)).code == 0
        (message,) = await take(peer, topic, 1)
        assert message.properties["a"] == "b\x01c"
        raw = properties_of(fast.broker.parts.store.lookups.record_at(message.physical_offset))
        assert raw.startswith(b"TAGS\x01A\x02a\x01b\x01c\x02\xff\x01\xfe\x02junk\x02")
        assert len(records(await peer.pull(topic, expression="A"))) == 1

    async def test_there_is_no_dead_letter_topic_before_the_first_dead_letter(self, fast, peer):
        await peer.heartbeat()
        sent = await peer.send()
        await self.send_back(peer, sent)
        topics = fast.broker.parts.tables.topics.table
        assert ("%RETRY%G" in topics, "%DLQ%G" in topics) == (True, False)

    async def test_the_number_of_tries_stops_at_31_bits(self, peer):
        sent = await peer.send(reconsume_times=2**31 - 1)
        assert (await self.send_back(peer, sent)).code == 0
        (message,) = await take(peer, "%DLQ%G", 1)
        assert message.reconsume_times == 2**31 - 1

    async def test_members_with_different_limits_are_shown_with_them(self, fast, peer, caplog):
        other = fast.peer()
        for client, limit in ((peer, 3), (other, 20)):
            await client.heartbeat(f"allows-{limit}")
            sent = await client.send()
            assert (await self.send_back(client, sent, max_reconsume_times=limit)).code == 0
        header = ConsumerGroupRequestHeader(consumer_group="G")
        answer = await peer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
        members = ConsumerConnection.decode(answer.body).connection_set
        limits = {member.client_id: member.max_reconsume_times for member in members}
        assert limits == {"allows-3": 3, "allows-20": 20}
        assert (
            sum(
                "the value of the client that sends a message back applies" in line
                for line in caplog.messages
            )
            == 1
        )

    @pytest.mark.parametrize(("limits", "topic"), [((3, 1), "%DLQ%G"), ((1, 3), "%RETRY%G")])
    async def test_the_limit_of_the_member_that_fails_last_decides(self, peer, limits, topic):
        sent = await peer.send(body=b"x")
        await self.send_back(peer, sent, max_reconsume_times=limits[0])
        (first,) = await take(peer, "%RETRY%G", 1)
        await self.send_back(peer, first.physical_offset, max_reconsume_times=limits[1])
        count = 2 if topic == "%RETRY%G" else 1
        assert [m.body for m in await take(peer, topic, count)] == [b"x"] * count

    async def test_a_group_without_retry_queues_loses_it_silently(self, fast, peer):
        await peer.set_group(b'{"groupName":"G","retryQueueNums":0}')
        sent = await peer.send()
        assert (await self.send_back(peer, sent)).code == 0
        assert "%RETRY%G" not in fast.broker.parts.tables.topics.table

    async def test_refusals(self, started):
        _, peer = await started(autoCreateSubscriptionGroup="false")
        sent = await peer.send()
        assert (await self.send_back(peer, sent)).code == 26
        await peer.set_group(b'{"groupName":"G"}')
        answer = await self.send_back(peer, 3)
        assert (answer.code, answer.remark) == (1, "look message by offset failed, 3")
        await create(peer, "%RETRY%G", perm=4)
        assert (await self.send_back(peer, sent)).code == 16
        await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4\n")
        assert (await self.send_back(peer, sent)).code == 16


class TestClientsOwnRetries:
    @pytest.mark.parametrize(
        ("times", "most", "topic"), [(1, 16, "%RETRY%G"), (2, 2, "%DLQ%G")], ids=["within", "over the limit"]
    )
    async def test_a_send_to_the_retry_topic_waits_and_arrives(self, peer, times, most, topic):
        await peer.heartbeat()
        properties = {"RETRY_TOPIC": "Orders", "DELAY": "3"}
        answer = await peer.send(
            "%RETRY%G", b"again", properties=properties, reconsume_times=times, max_reconsume_times=most
        )
        assert answer.code == 0
        (message,) = await take(peer, topic, 1)
        assert message.body == b"again"
        assert message.reconsume_times == 1 or topic == "%DLQ%G"

    async def test_an_ordered_group_of_5x_clients_gives_up_at_once(self, fast, peer):
        await peer.heartbeat(version=513)
        body = LockBatchBody(consumer_group="G", client_id="c1", mq_set=[queue(0)]).encode()
        await peer.call(RequestCode.LOCK_BATCH_MQ, None, body, version=513)
        sent = {"RETRY_TOPIC": "Orders", "DELAY": "3"}
        answer = await peer.send("%RETRY%G", b"x", properties=sent, reconsume_times=1, version=513)
        assert answer.code == 0
        (message,) = await take(peer, "%DLQ%G", 1)
        assert (message.properties["DELAY"], message.properties["RETRY_TOPIC"]) == ("-1", "Orders")

    async def test_an_unknown_group_is_refused(self, start_cluster):
        cluster = await start_cluster(autoCreateSubscriptionGroup="false")
        answer = await cluster.peer().send("%RETRY%Nobody")
        assert (answer.code, answer.remark) == (26, "subscription group not exist, Nobody")
