"""The tools for agents, used by the client of the Model Context Protocol's own SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from click.testing import CliRunner
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer
from tests.broker.access.test_files import write

from cometmq import ClientOptions, Message, SimpleConsumer, SyncProducer, TraceOptions
from cometmq.admin import Admin
from cometmq.admin.dead_letters import Selection
from cometmq.cli.mcp import mcp
from cometmq.integrations import mcp as module
from cometmq.integrations.mcp import CHANGING, READING, make_server
from cometmq.testing import LocalBroker, ServerProcess, local_broker

PAGE = Path(__file__).parents[2] / "docs" / "mcp.md"
TOKEN = "a token that is long enough"
WEBSOCKET = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
WEBSOCKET["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
COMMAND = [sys.executable, "-m", "cometmq", "mcp"]


@pytest.fixture
def topic(broker: LocalBroker) -> Iterator[str]:
    """A topic with a message whose key is k1."""
    name = f"agents-{uuid4().hex[:8]}"
    with SyncProducer("agents", namesrv=broker.namesrv) as producer:
        producer.send(Message(name, b"x" * 5000, keys=["k1"]))
    return name


@pytest.fixture
async def admin(broker: LocalBroker) -> AsyncIterator[Admin]:
    async with Admin(broker.namesrv) as started:
        yield started


ACCOUNTS = """
accounts:
- {accessKey: reading, secretKey: secret-of-reading, defaultTopicPerm: SUB, defaultGroupPerm: SUB}
- {accessKey: trusted, secretKey: secret-of-trusted, admin: true}
"""


@contextlib.asynccontextmanager
async def serving(namesrv: str, monkeypatch: pytest.MonkeyPatch, *, http: bool) -> AsyncIterator[Client]:
    """Run `cometmq mcp --allow-changes` with the account of the environment, and connect to it."""
    arguments = [*COMMAND, "-n", namesrv, "--allow-changes"]
    if not http:
        parameters = StdioServerParameters(command=arguments[0], args=arguments[1:], env=dict(os.environ))
        async with Client(parameters) as client:
            yield client
        return
    monkeypatch.setenv("COMETMQ_MCP_TOKEN", TOKEN)
    with ServerProcess([*arguments, "--http", "0"], "^mcp ") as server:
        url = server.wait_ready().split()[1]
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as connections,
            Client(streamable_http_client(url, http_client=connections)) as client,
        ):
            yield client


class Agent:
    """Connects to a server in this process for each call."""

    def __init__(self, server: MCPServer[Any]) -> None:
        self._server = server

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        async with Client(self._server) as client:
            return await client.call_tool(name, arguments)


@pytest.fixture
def client(admin: Admin, broker: LocalBroker) -> Agent:
    """An agent that may change the cluster."""
    return Agent(make_server(admin, broker.namesrv, allow_changes=True))


async def call(client: Agent | Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Agent | Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0])


async def consume(broker: LocalBroker, group: str, topic: str, *, dead: bool = False) -> None:
    async with SimpleConsumer(group, topic, namesrv=broker.namesrv) as consumer:
        while not (found := await consumer.receive(wait_s=5)):
            pass
        await (consumer.dead_letter(found[0]) if dead else consumer.ack(*found))


class TestReading:
    async def test_cluster(self, client: Agent, broker: LocalBroker) -> None:
        (found,) = (await call(client, "cluster"))["brokers"]
        assert found["brokerAddr"] == broker.broker_addr

    async def test_topics_and_groups(self, client: Agent, broker: LocalBroker, topic: str) -> None:
        group = f"g-{topic}"
        await consume(broker, group, topic)
        found = await call(client, "topics", name_contains=topic)
        assert topic in [each["topic"] for each in found["topics"]]
        queues = (await call(client, "topic", topic=topic))["queues"]
        assert sum(each["maxOffset"] for each in queues) == 1
        (summary,) = (await call(client, "groups", name_contains=group))["groups"]
        assert summary["group"] == group
        progress = await call(client, "group", group=group)
        assert progress["lag"] == 0
        assert {each["topic"] for each in progress["queues"]} >= {topic}

    async def test_messages_with_bodies_cut(self, client: Agent, topic: str) -> None:
        (found,) = (await call(client, "messages_by_key", topic=topic, key="k1"))["messages"]
        assert found["body"] == "x" * module.MAX_TEXT_CHARS + "… (5000 characters)"
        assert found["keys"] == ["k1"]
        shown = await call(client, "message", msg_id=found["msgId"], topic=topic)
        assert shown["message"]["offsetMsgId"] == found["offsetMsgId"]
        newest = await call(client, "newest_messages", topic=topic)
        assert [each["msgId"] for each in newest["messages"]] == [found["msgId"]]

    async def test_messages_of_hostile_senders_are_bounded(
        self, client: Agent, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = f"hostile-{uuid4().hex[:8]}"
        with SyncProducer("agents", namesrv=broker.namesrv) as producer:
            for _ in range(3):
                wide = {"n" * 3000: "x"} | {f"p{number}": "v" for number in range(300)}
                keys = ["k1", "k" * 10_000, *(f"key-{number}" for number in range(300))]
                producer.send(Message(topic, b"x", keys=keys, tags="t" * 3000, properties=wide))
        found = (await call(client, "newest_messages", topic=topic))["messages"]
        assert len(found) == 3
        longest = module.MAX_TEXT_CHARS + len("… (10000 characters)")
        assert max(map(len, [*found[0]["keys"], *found[0]["properties"], found[0]["tags"]])) <= longest
        assert found[0]["keys"][-1] == "… (302 items)"
        assert len(found[0]["properties"]) == module.MAX_ITEMS + 1
        monkeypatch.setattr(module, "MAX_CHARS", 25_000)
        shown = await call(client, "messages_by_key", topic=topic, key="k1")
        assert 0 < len(shown["messages"]) < shown["total"] == 3

    async def test_dead_letters(self, client: Agent, broker: LocalBroker, topic: str) -> None:
        group = f"g-{topic}"
        await consume(broker, group, topic, dead=True)
        (letter,) = (await call(client, "dead_letters", group=group))["deadLetters"]
        assert letter["originalTopic"] == topic
        counts = (await call(client, "dead_letters", limit=200))["groups"]
        assert {"group": group, "count": 1}.items() <= next(
            each for each in counts if each["group"] == group
        ).items()

    async def test_traces(self, client: Agent, broker: LocalBroker, topic: str) -> None:
        options = ClientOptions(trace=TraceOptions())
        with SyncProducer("traced", namesrv=broker.namesrv, client_options=options) as producer:
            sent = producer.send(Message(topic, b"x"))
        found = await call(client, "message_trace", msg_id=sent.msg_id)
        assert [each["trace"]["topic"] for each in found["traces"]] == [topic]

    async def test_a_healthy_cluster_has_no_serious_problem(self, client: Agent, topic: str) -> None:
        found = await call(client, "diagnose", topic=topic)
        assert not [each for each in found["findings"] if each["serious"]]

    async def test_the_diagnosis_of_several_name_servers(self, admin: Admin, broker: LocalBroker) -> None:
        namesrvs = f"{broker.namesrv}, {broker.namesrv.replace('127.0.0.1', 'localhost')}"
        found = await call(Agent(make_server(admin, namesrvs)), "diagnose")
        assert not [each for each in found["findings"] if each["serious"]]

    async def test_brokers_are_asked_only_about_what_is_listed(
        self, client: Agent, admin: Admin, topic: str, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await consume(broker, f"g-{topic}", topic)
        asked, route, summary = list[str](), Admin.route, Admin._summary  # noqa: SLF001

        async def noted_route(self: Admin, topic: str) -> Any:
            asked.append(topic)
            return await route(self, topic)

        async def noted_summary(self: Admin, group: str, *arguments: Any) -> Any:
            asked.append(group)
            return await summary(self, group, *arguments)

        monkeypatch.setattr(Admin, "route", noted_route)
        monkeypatch.setattr(Admin, "_summary", noted_summary)
        assert (await call(client, "topics", name_contains=topic))["total"] == 1
        assert (await call(client, "groups", name_contains=topic))["total"] == 1
        assert asked == [topic, f"g-{topic}"]

    async def test_lists_say_how_many_there_are(self, client: Agent, topic: str) -> None:
        found = await call(client, "topics", limit=1)
        assert len(found["topics"]) == 1 < found["total"]


class TestChanging:
    async def test_a_topic(self, client: Agent, admin: Admin) -> None:
        wanted = {"topic": f"made-{uuid4().hex[:8]}", "cluster": "DefaultCluster", "queues": 3}
        planned = await call(client, "create_topic", **wanted)
        assert planned["dryRun"]
        assert wanted["topic"] in planned["steps"][0]
        assert wanted["topic"] not in await admin.topics()
        await call(client, "create_topic", **wanted, dry_run=False)
        assert len(await admin.topic_status(str(wanted["topic"]))) == 3

    async def test_offsets(self, client: Agent, broker: LocalBroker, topic: str) -> None:
        group = f"g-{topic}"
        await consume(broker, group, topic)
        wanted = {"group": group, "topic": topic, "to": "0"}
        assert (await call(client, "reset_offsets", **wanted))["dryRun"]
        assert (await call(client, "group", group=group))["lag"] == 0
        await call(client, "reset_offsets", **wanted, dry_run=False)
        assert (await call(client, "group", group=group))["lag"] == 1

    async def test_dead_letters(self, client: Agent, broker: LocalBroker, topic: str) -> None:
        group = f"g-{topic}"
        await consume(broker, group, topic, dead=True)
        (letter,) = (await call(client, "dead_letters", group=group))["deadLetters"]
        wanted = {"group": group, "ids": [letter["offsetMsgId"]], "to_topic": True}
        (planned,) = (await call(client, "resend_dead_letters", **wanted))["results"]
        assert planned["state"] == "PLANNED"
        await call(client, "resend_dead_letters", **wanted, dry_run=False)
        await consume(broker, group, topic)

    async def test_an_id_of_many_dead_letters(
        self, client: Agent, broker: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The id of a message is a property, so senders may give several messages the same id."""
        group = f"g-{topic}"
        await consume(broker, group, topic, dead=True)
        with SyncProducer("agents", namesrv=broker.namesrv) as producer:
            producer.send(Message(topic, b"x"))
        await consume(broker, group, topic, dead=True)
        monkeypatch.setattr(module, "MAX_ITEMS", 1)
        monkeypatch.setattr(Selection, "takes", lambda *_: True)
        wanted = {"group": group, "ids": ["A"], "to_topic": True, "dry_run": False}
        assert (await call(client, "resend_dead_letters", **wanted))["total"] == 1

    async def test_a_message(self, client: Agent, topic: str) -> None:
        planned = await call(client, "send_message", topic=topic, body="hello")
        assert planned == {"dryRun": True, "brokers": ["broker-a"]}
        sent = await call(client, "send_message", topic=topic, body="hello", keys=["k2"], dry_run=False)
        assert sent["status"] == "SEND_OK"
        assert (await call(client, "messages_by_key", topic=topic, key="k2"))["total"] == 1


class TestRefusals:
    async def test_changes_are_not_offered_unless_allowed(self, admin: Admin, broker: LocalBroker) -> None:
        async with Client(make_server(admin, broker.namesrv)) as client:
            offered = (await client.list_tools()).tools
            assert {each.name for each in offered} == set(READING)
            assert all(each.annotations and each.annotations.read_only_hint for each in offered)
            assert "create_topic" in await refusal(client, "create_topic", topic="x", cluster="y")

    async def test_each_tool_describes_itself(self, admin: Admin, broker: LocalBroker) -> None:
        async with Client(make_server(admin, broker.namesrv, allow_changes=True)) as client:
            offered = (await client.list_tools()).tools
        assert {each.name for each in offered} == {*READING, *CHANGING}
        assert all(each.description for each in offered)
        page = PAGE.read_text("utf-8")
        assert [each.name for each in offered if f"`{each.name}`" not in page] == []

    @pytest.mark.parametrize(
        ("tool", "arguments", "problem"),
        [
            ("topic", {"topic": "nowhere"}, "nowhere"),
            ("group", {"group": "nobody"}, "nobody"),
            ("message", {"msg_id": "no id"}, "no id"),
            ("topics", {"limit": 1000}, "200"),
            ("topics", {"limit": 0}, "1"),
            ("create_topic", {"topic": "a b", "cluster": "DefaultCluster", "dry_run": False}, "a b"),
            ("create_topic", {"topic": "t", "cluster": "None"}, "None"),
            ("reset_offsets", {"group": "g", "topic": "t", "to": "later"}, "later"),
            ("resend_dead_letters", {"group": "g", "ids": []}, "ids"),
            ("create_topic", {"topic": "t", "cluster": "DefaultCluster", "queues": 0}, "queues"),
            ("send_message", {"topic": "../x", "body": "x"}, "topic"),
            ("send_message", {"topic": "not-made", "body": "x", "dry_run": False}, "no route"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_bad_arguments(
        self, client: Agent, tool: str, arguments: dict[str, Any], problem: str
    ) -> None:
        assert problem in await refusal(client, tool, **arguments)

    async def test_a_tool_that_takes_too_long(
        self, client: Agent, admin: Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def wait(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(module, "TOOL_TIMEOUT_S", 0.01)
        monkeypatch.setattr(Admin, "brokers", wait)
        assert "no result within 0.01 s" in await refusal(client, "cluster")


class TestCommand:
    async def test_standard_input_and_output(self, broker: LocalBroker) -> None:
        arguments = [*COMMAND[1:], "-n", broker.namesrv]
        async with Client(StdioServerParameters(command=COMMAND[0], args=arguments)) as client:
            assert (await call(client, "cluster"))["total"] == 1

    @pytest.mark.slow("each case starts a broker and a server process")
    @pytest.mark.parametrize(("account", "may_create"), [("reading", False), ("trusted", True)])
    @pytest.mark.parametrize("http", [False, True], ids=["stdio", "http"])
    async def test_the_rights_of_the_account_decide_about_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, account: str, may_create: bool, http: bool
    ) -> None:
        write(tmp_path / "conf" / "plain_acl.yml", ACCOUNTS)
        settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path)}
        monkeypatch.setenv("COMETMQ_ACCESS_KEY", account)
        monkeypatch.setenv("COMETMQ_SECRET_KEY", f"secret-of-{account}")
        with local_broker(tmp_path / "broker", settings) as server:
            async with serving(server.namesrv, monkeypatch, http=http) as agent:
                offered = {each.name for each in (await agent.list_tools()).tools}
                assert offered == {*READING, *CHANGING}
                wanted = {"topic": "made", "cluster": "DefaultCluster"}
                assert (await call(agent, "create_topic", **wanted))["dryRun"]
                assert (await call(agent, "topics", name_contains="made"))["total"] == 0
                result = await agent.call_tool("create_topic", {**wanted, "dry_run": False})
                assert result.is_error is not may_create, result.content
                assert (await call(agent, "topics", name_contains="made"))["total"] == int(may_create)

    async def test_http_needs_the_token(self, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMETMQ_MCP_TOKEN", TOKEN)
        with ServerProcess([*COMMAND, "-n", broker.namesrv, "--http", "0"], "^mcp ") as server:
            url = server.wait_ready().split()[1]
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                async with httpx2.AsyncClient(headers=headers) as stranger:
                    assert (await stranger.post(url, json={})).status_code == 401
                    assert (await stranger.get(url, headers=WEBSOCKET)).status_code == 401
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
                Client(streamable_http_client(url, http_client=http)) as client,
            ):
                assert (await call(client, "cluster"))["total"] == 1
            assert "INFO" not in server.output  # requests are not logged

    def test_a_new_token_is_printed(self, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMETMQ_MCP_TOKEN", "")
        with ServerProcess([*COMMAND, "-n", broker.namesrv, "--http", "0"], "^token ") as server:
            assert len(server.wait_ready().split()[-1]) >= 16

    @pytest.mark.parametrize(
        ("arguments", "environment", "problem"),
        [
            (["--allow-changes"], {}, "--allow-changes needs an account"),
            (["--http", "0"], {"COMETMQ_MCP_TOKEN": "short"}, "at least 16 ASCII characters"),
        ],
        ids=["account", "token"],
    )
    def test_what_it_refuses(self, arguments: list[str], environment: dict[str, str], problem: str) -> None:
        done = CliRunner(env={"COMETMQ_ACCESS_KEY": None, **environment}).invoke(mcp, arguments)
        assert done.exit_code == 2
        assert problem in done.output
