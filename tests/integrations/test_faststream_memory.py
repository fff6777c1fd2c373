"""FastStream with CometMQ as its broker, without a server: TestCometMQBroker, documents, metrics, spans."""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import Any

import pytest
from faststream import AckPolicy, FastStream, Response
from faststream.exceptions import FeatureNotSupportedException, IncorrectState, SubscriberNotFound
from faststream.message import AckStatus, StreamMessage
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256
from faststream.specification import AsyncAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from cometmq import ClientOptions, PushOptions, sql92
from cometmq.errors import ConfigError, MessageIllegal
from cometmq.integrations.faststream import (
    CometMQBroker,
    CometMQMessage,
    CometMQPublisher,
    CometMQResponse,
    CometMQRoute,
    CometMQRouter,
    TestCometMQBroker,
)
from cometmq.integrations.faststream.annotations import CometMQBroker as InjectedBroker
from cometmq.integrations.faststream.config import secured
from cometmq.integrations.faststream.opentelemetry import CometMQTelemetryMiddleware
from cometmq.integrations.faststream.prometheus import CometMQPrometheusMiddleware
from cometmq.message import MessageExt


class TestDelivery:
    async def test_a_handler_receives_and_its_publisher_sends(self) -> None:
        broker = CometMQBroker()
        publisher = broker.publisher("out", headers={"by": "publisher"}, tag="t", keys=["k"])

        @broker.subscriber("in")
        @publisher
        async def double(number: int) -> int:
            return number * 2

        @broker.subscriber("out", group="reader")
        async def read(number: int, message: CometMQMessage, own: InjectedBroker) -> None:
            assert own is broker
            assert (message.headers["by"], message.correlation_id) == ("publisher", "c1")
            assert (message.raw_message.tags, message.raw_message.keys) == ("t", ("k",))

        async with TestCometMQBroker(broker):
            await broker.publish(21, "in", correlation_id="c1")
            double.mock.assert_called_once_with(21)
            publisher.mock.assert_called_once_with(42)
            read.mock.assert_called_once_with(42)

    async def test_options_of_a_response_come_before_those_of_the_publisher(self) -> None:
        broker = CometMQBroker()

        @broker.subscriber("in")
        @broker.publisher("out", headers={"by": "publisher", "kept": "1"}, tag="publisher", keys=["k"])
        async def answer(body: str) -> Response:
            return CometMQResponse(body, headers={"by": "response"}, tag="response")

        @broker.subscriber("out")
        async def read(body: str, message: CometMQMessage) -> None:
            assert (message.headers["by"], message.headers["kept"]) == ("response", "1")
            assert (message.raw_message.tags, message.raw_message.keys) == ("response", ("k",))

        async with TestCometMQBroker(broker):
            await broker.publish("x", "in")
            read.mock.assert_called_once_with("x")

    async def test_a_publisher_is_called_directly(self) -> None:
        broker = CometMQBroker()
        publisher = broker.publisher("in", headers={"by": "publisher", "h": "1"}, keys=["k"])

        @broker.subscriber("in")
        async def handle(body: str, message: CometMQMessage) -> None:
            assert (message.headers["by"], message.headers["h"]) == ("publisher", "2")
            assert (message.raw_message.keys, message.reply_to) == (("k",), "replies")

        async with TestCometMQBroker(broker):
            await publisher.publish("a", headers={"h": "2"}, reply_to="replies")
            handle.mock.assert_called_once_with("a")

    @pytest.mark.parametrize(
        ("expression", "received"),
        [("*", ["a", "b"]), ("A || C", ["a"]), (sql92("n > 5"), ["b"]), (sql92("TAGS = 'A'"), ["a"])],
        ids=str,
    )
    async def test_expressions_filter(self, expression: Any, received: list[str]) -> None:
        broker, found = CometMQBroker(), []

        @broker.subscriber("in", expression=expression)
        async def handle(body: str) -> None:
            found.append(body)

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in", tag="A", headers={"n": 5})
            await broker.publish("b", "in", tag="B", headers={"n": 6})
            await broker.publish("c", "elsewhere", tag="A")
        assert found == received

    async def test_a_request_returns_the_result_of_the_handler(self) -> None:
        broker = CometMQBroker()

        @broker.subscriber("in", expression="upper")
        async def upper(body: str) -> Response:
            return Response(body.upper(), headers={"h": "1"})

        publisher = broker.publisher("in", tag="upper")
        async with TestCometMQBroker(broker):
            for asking in (broker.request("a", "in", tag="upper"), publisher.request("a")):
                reply = await asking
                assert (await reply.decode(), reply.headers["h"]) == ("A", "1")
            with pytest.raises(SubscriberNotFound, match="topic in"):
                await broker.request("a", "in", tag="lower")

    async def test_a_subscriber_without_handlers_can_start(self) -> None:
        broker = CometMQBroker()
        async with TestCometMQBroker(broker):
            late = broker.subscriber("in")
            await late.start()
            assert await late.get_one(timeout=0.01) is None
            await late.stop()
            with pytest.raises(IncorrectState, match="not started"):
                await late.get_one()

    async def test_a_filter_chooses_among_the_handlers_of_a_subscriber(self) -> None:
        broker = CometMQBroker()
        subscriber = broker.subscriber("in")

        @subscriber(filter=lambda message: message.raw_message.tags == "A")
        async def tagged(body: str) -> None: ...

        @subscriber
        async def other(body: str) -> None: ...

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in", tag="A")
            await broker.publish("b", "in")
            tagged.mock.assert_called_once_with("a")
            other.mock.assert_called_once_with("b")

    async def test_parsers_and_decoders_may_be_replaced_or_extended(self) -> None:
        async def parse(message: MessageExt, original: Any) -> Any:
            parsed = await original(message)
            parsed.headers["parsed"] = "1"
            return parsed

        async def decode(message: Any) -> str:
            return message.body.decode() + " decoded"

        broker = CometMQBroker(parser=parse)

        @broker.subscriber("in", decoder=decode)
        async def handle(body: str, message: CometMQMessage) -> str:
            assert message.headers["parsed"] == "1"
            return body

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in")
            handle.mock.assert_called_once_with("a decoded")
            reply = await broker.request("b", "in")
            assert (await reply.decode(), reply.headers["parsed"]) == ("b decoded", "1")

    async def test_a_parser_may_return_a_message_of_its_own(self) -> None:
        broker = CometMQBroker()

        async def parse(message: MessageExt) -> Any:
            return StreamMessage(message, message.body, reply_to="replies", correlation_id="c1")

        @broker.subscriber("in", parser=parse)
        async def double(body: str) -> str:
            return body * 2

        @broker.subscriber("replies")
        async def read(body: str, message: CometMQMessage) -> None:
            assert message.correlation_id == "c1"

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in")
            read.mock.assert_called_once_with("aa")

    def test_log_lines_show_no_control_characters_of_a_message(self) -> None:
        subscriber = CometMQBroker().subscriber("in")
        message: Any = StreamMessage(MessageExt("in", b""), b"", message_id="a\nb\x1b[2J")
        context = subscriber.get_log_context(message)
        assert "".join(context.values()).isprintable()
        assert (context["topic"], context["group"]) == ("in", "in")


class TestRouters:
    async def test_the_prefix_and_the_policy_of_a_router_apply(self) -> None:
        inner = CometMQRouter("inner_", ack_policy=AckPolicy.REJECT_ON_ERROR)

        @inner.subscriber("in")
        @inner.publisher("out")
        async def handle(body: str) -> str:
            return body * 2

        broker = CometMQBroker(ack_policy=AckPolicy.ACK, routers=[CometMQRouter("outer_", routers=[inner])])
        (subscriber,) = broker.subscribers
        (publisher,) = broker.publishers
        assert (subscriber.topic, subscriber.group) == ("outer_inner_in", "outer_inner_in")
        assert publisher.topic == "outer_inner_out"
        assert subscriber.ack_policy is AckPolicy.REJECT_ON_ERROR
        async with TestCometMQBroker(broker):
            await broker.publish("a", "outer_inner_in")
            handle.mock.assert_called_once_with("a")
            publisher.mock.assert_called_once_with("aa")

    async def test_routes_register_later(self) -> None:
        async def handle(body: str) -> str:
            return body * 2

        route = CometMQRoute(
            handle, "in", group="g", expression="A", publishers=[CometMQPublisher("out", tag="B")]
        )
        broker = CometMQBroker()
        broker.include_router(CometMQRouter(handlers=[route]), prefix="late_")
        (subscriber,), (publisher,) = broker.subscribers, broker.publishers
        assert (subscriber.topic, subscriber.group, subscriber.expression) == ("late_in", "g", "A")
        assert publisher.options == {"tag": "B"}
        async with TestCometMQBroker(broker):
            await broker.publish("a", "late_in", tag="A")
            publisher.mock.assert_called_once_with("aa")

    def test_a_router_of_another_kind_is_refused(self) -> None:
        with pytest.raises(TypeError, match="must be a CometMQRouter, not FastStream"):
            CometMQBroker().include_router(FastStream())  # type: ignore[arg-type]


class TestPolicies:
    @pytest.mark.parametrize(
        ("policy", "status"),
        [
            (AckPolicy.ACK, AckStatus.ACKED),
            (AckPolicy.ACK_FIRST, AckStatus.ACKED),
            (AckPolicy.REJECT_ON_ERROR, AckStatus.REJECTED),
            (AckPolicy.NACK_ON_ERROR, AckStatus.NACKED),
            (None, AckStatus.NACKED),
            (AckPolicy.MANUAL, None),
        ],
    )
    async def test_a_failed_message_is_settled_by_the_policy(
        self, policy: AckPolicy | None, status: AckStatus | None
    ) -> None:
        broker, seen = CometMQBroker(**({} if policy is None else {"ack_policy": policy})), []

        @broker.subscriber("in")
        async def fail(message: CometMQMessage) -> None:
            seen.append(message)
            raise ValueError("as asked")

        async with TestCometMQBroker(broker):
            with pytest.raises(ValueError, match="as asked"):
                await broker.publish("a", "in")
        assert [message.committed for message in seen] == [status]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "kind", "problem"),
        [
            ({"colour": "red"}, TypeError, "unknown option 'colour', not one of tag, keys"),
            ({"tag": "a||b"}, MessageIllegal, "tag"),
            ({"keys": "one two"}, MessageIllegal, "keys are a list"),
            ({"delay_s": -1}, ConfigError, "delay_s"),
            ({"delay_s": float("nan")}, ConfigError, "delay_s"),
            ({"delay_s": 1, "priority": 1}, MessageIllegal, "no delay"),
            ({"headers": {"KEYS": "x"}}, MessageIllegal, "KEYS"),
        ],
    )
    async def test_an_option_of_a_message(
        self, options: dict[str, Any], kind: type[Exception], problem: str
    ) -> None:
        broker = CometMQBroker()
        async with TestCometMQBroker(broker):
            with pytest.raises(kind, match=problem):
                await broker.publish("a", "in", **options)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"max_workers": 0}, "max_workers"),
            ({"expression": "||"}, "would match nothing"),
            ({"expression": sql92(" ")}, "as text"),
        ],
    )
    def test_an_argument_of_a_subscriber(self, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            CometMQBroker().subscriber("in", **options)

    def test_an_illegal_topic(self) -> None:
        with pytest.raises(MessageIllegal, match="topic name"):
            CometMQBroker().subscriber("a/b")

    def test_an_option_of_a_publisher(self) -> None:
        with pytest.raises(TypeError, match="colour"):
            CometMQBroker().publisher("out", colour="red")  # type: ignore[call-arg]

    async def test_a_broker_that_is_not_connected(self) -> None:
        broker = CometMQBroker("127.0.0.1:1")
        assert not await broker.ping()
        with pytest.raises(IncorrectState, match="connect"):
            await broker.publish("a", "in")

    async def test_batches(self) -> None:
        broker = CometMQBroker()
        with pytest.raises(FeatureNotSupportedException):
            await broker.publish_batch("a", "b", queue="in")

    def test_security_adds_an_account_and_a_tls_context(self) -> None:
        context, options = ssl.create_default_context(), ClientOptions(namespace="n", tls=False)
        assert secured(options, None) is options
        assert secured(options, BaseSecurity(use_ssl=True)) == replace(options, tls=True)
        signing = secured(options, SASLPlaintext("key", "secret", context))
        assert signing == replace(options, access_key="key", secret_key="secret", tls=context)

    def test_a_kind_of_security(self) -> None:
        with pytest.raises(ConfigError, match=r"SASLScram256.*SASLPlaintext\(access key"):
            CometMQBroker(security=SASLScram256("user", "password"))


class TestDocument:
    def test_the_document_has_channels_messages_and_the_server(self) -> None:
        account = SASLPlaintext("key", "secret", use_ssl=True)
        broker = CometMQBroker("one:9876;two:9876", security=account)

        @broker.subscriber("in", title="orders", description="what comes")
        @broker.publisher("out", description="what goes")
        async def handle(number: int) -> str:
            return str(number)

        document = AsyncAPI(broker).to_specification().to_jsonable()
        servers = document["servers"]
        assert {server["host"] for server in servers.values()} == {"one:9876", "two:9876"}
        assert {server["protocol"] for server in servers.values()} == {"rocketmq-secure"}
        assert document["components"]["securitySchemes"] == {"user-password": {"type": "userPassword"}}
        channels = {channel["address"]: channel["description"] for channel in document["channels"].values()}
        assert channels == {"in": "what comes", "out": "what goes"}
        assert {operation["action"] for operation in document["operations"].values()} == {"send", "receive"}
        types = {schema.get("type") for schema in document["components"]["schemas"].values()}
        assert types == {"integer", "string"}
        assert "secret" not in str(document)

    @pytest.mark.parametrize(
        ("security", "protocol"), [(None, "rocketmq"), (BaseSecurity(use_ssl=True), "rocketmq-secure")]
    )
    def test_the_protocol_tells_whether_connections_use_tls(self, security: Any, protocol: str) -> None:
        assert CometMQBroker(security=security).specification.protocol == protocol

    def test_what_is_not_to_be_shown_is_not_shown(self) -> None:
        broker = CometMQBroker()
        broker.subscriber("in", include_in_schema=False)
        broker.publisher("out", include_in_schema=False)
        assert not AsyncAPI(broker).to_specification().to_jsonable()["channels"]


class TestMiddlewares:
    async def test_prometheus_counts_messages_by_topic(self) -> None:
        registry = CollectorRegistry()
        broker = CometMQBroker(middlewares=[CometMQPrometheusMiddleware(registry=registry, app_name="shop")])

        @broker.subscriber("in")
        @broker.publisher("out")
        async def handle(body: str) -> str:
            return body

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in")

        def value(name: str, **labels: str) -> float | None:
            labels = {"app_name": "shop", "broker": "rocketmq"} | labels
            return registry.get_sample_value(name, labels)

        assert value("faststream_received_messages_total", handler="in") == 1
        assert value("faststream_received_processed_messages_total", handler="in", status="acked") == 1
        for topic in ("in", "out"):
            assert value("faststream_published_messages_total", destination=topic, status="success") == 1

    async def test_spans_of_a_message_belong_together(self) -> None:
        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        broker = CometMQBroker(middlewares=[CometMQTelemetryMiddleware(tracer_provider=provider)])

        @broker.subscriber("in")
        async def handle(body: str) -> None: ...

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in", tag="A", keys=["k"], correlation_id="c1")
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert {"in create", "in publish", "in process"} <= spans.keys()
        assert len({span.context.trace_id for span in spans.values()}) == 1
        attributes = spans["in process"].attributes
        assert attributes["messaging.system"] == "rocketmq"
        assert attributes["messaging.message.conversation_id"] == "c1"
        assert attributes["messaging.rocketmq.message.tag"] == "A"
        assert attributes["messaging.rocketmq.message.keys"] == ("k",)

    async def test_a_middleware_of_ones_own_surrounds_both_ways(self) -> None:
        from faststream import BaseMiddleware

        steps: list[str] = []

        class Noting(BaseMiddleware):
            async def consume_scope(self, call_next: Any, msg: Any) -> Any:
                steps.append("consume")
                return await call_next(msg)

            async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
                steps.append(f"publish {cmd.destination}")
                return await call_next(cmd)

        broker = CometMQBroker(middlewares=[Noting])

        @broker.subscriber("in", options=PushOptions(orderly=True))
        @broker.publisher("out")
        async def handle(body: str) -> str:
            return body

        async with TestCometMQBroker(broker):
            await broker.publish("a", "in")
        assert steps == ["publish in", "consume", "publish out", "consume"]
