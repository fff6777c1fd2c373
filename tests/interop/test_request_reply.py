"""Requests and replies between our client and Apache's, on our broker and on Apache's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.client.reply_scenarios import replying
from tests.client.scenarios import Ledger, Names, fill, sending
from tests.interop.driver import Driver, JavaError, body_of, message
from tests.interop.space import Cluster, Space

from cometmq import Message

LARGE = b"compressed " * 2000


@pytest.fixture(
    params=[("ours", "4.9.8"), ("ours", "5.5.0"), ("4.9.7", "4.9.8"), ("5.5.0", "5.5.0")],
    ids=lambda each: f"{each[0]}-java-{each[1]}",
)
def space(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    apache_clusters: Callable[[str], Cluster],
    java_clients: Callable[[str], Driver],
) -> Iterator[Space]:
    servers, client = request.param
    one = Space(java_clients(client), cluster if servers == "ours" else apache_clusters(servers))
    yield one
    one.close()


async def test_java_and_we_answer_each_other(space: Space) -> None:
    names, namesrv = Names(space.topic, space.group), space.cluster.namesrv
    await fill(namesrv, space.topic, [b"makes the topic"])
    async with replying(namesrv, names, Ledger()):
        asker = await asyncio.to_thread(space.producer)
        sent = [message(space.topic, body) for body in (b"one", LARGE)]
        replies = await asyncio.to_thread(space.java.send, asker, sent, "request")
        assert [body_of(each) for each in replies] == [b"re: one", b"re: " + LARGE]
        assert "ARRIVE_TIME" in replies[0]["properties"]
        silent = [message(space.topic, b"nobody", tags="silent")]
        with pytest.raises(JavaError) as caught:
            await asyncio.to_thread(space.java.send, asker, silent, "request", within=1_000)
        assert (caught.value.error, caught.value.code) == ("RequestTimeoutException", 10006)
    other = f"{space.topic}-java"
    await fill(namesrv, other, [b"makes the topic"])
    # No request waits for a second reply; the broker and Java's client must tolerate it.
    await asyncio.to_thread(space.replier, topic=other, consumerGroup=f"{space.group}-java", times=2)
    async with sending(namesrv, "p-asker") as producer:
        bodies = [b"ours", LARGE, b"again"]
        asked = (producer.request(Message(other, body), timeout_s=20.0) for body in bodies)
        assert [reply.body for reply in await asyncio.gather(*asked)] == [b"re: " + body for body in bodies]
