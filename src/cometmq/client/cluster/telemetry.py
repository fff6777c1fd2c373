"""OpenTelemetry spans of sends, of received messages, and of listener calls.

The spans follow OpenTelemetry's conventions for messaging (docs/reference/client.md, Spans). The trace
context of a send is stored in two user properties of its messages, `traceparent` and `tracestate` (W3C). A
message or batch without room for these properties is sent without them. Exceptions of a tracer, sampler or
span processor are logged and have no other effect.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from cometmq import logs
from cometmq.errors import MessageIllegal
from cometmq.message import Message, MessageExt, SendResult
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.properties.values import encode_properties

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

log = logs.logger("cometmq.client")

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Enum)

_HANDLED = {"SUCCESS", "COMMIT"}
_TRACEPARENT = "00-" + 32 * "0" + "-" + 16 * "0" + "-01"
_MAX_LINKS = 128
"""Maximum number of links of a span. It is the default limit of OpenTelemetry's SDK."""

_log_limit = logs.LogLimiter()

Attributes = dict[str, "str | int | list[str]"]


class Telemetry:
    """OpenTelemetry spans for ClientOptions(telemetry=...).

    The spans' attributes contain topic, group, tags, keys, ids, sizes and addresses, but neither bodies nor
    other properties of messages.

    Args:
        tracer_provider: The provider of the tracer. Default: the global provider of the program.

    Raises:
        ImportError: `cometmq[otel]` is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ImportError("Telemetry needs OpenTelemetry: pip install 'cometmq[otel]'") from None
        self._tracer = trace.get_tracer("cometmq", tracer_provider=tracer_provider)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def context_of(self, message: MessageExt) -> Context:
        """Return the trace context of a message's send, which may be the parent of the caller's own spans.

        Args:
            message: A message of a stream or a poll.

        Returns:
            The context, empty if the message contains none.
        """
        from opentelemetry.context import Context

        return self._propagator.extract(message.properties, context=Context())

    async def send(self, group: str, what: object, send: Callable[[Any], Awaitable[R]]) -> R:
        """Call `send` within a span.

        Args:
            group: The producer group.
            what: A message, or the messages of a batch.
            send: The function that sends the messages. It is called with copies of the messages, which also
                contain the trace context.
        """
        many = list(what) if isinstance(what, Iterable) else None
        messages: list[Any] = [what] if many is None else many
        if not messages or not all(isinstance(each, Message) for each in messages):
            # The argument is invalid: `send` raises an error about it.
            return await send(what if many is None else many)

        def begin() -> AbstractContextManager[Span]:
            attributes = _attributes("send", messages[0].topic, messages)
            attributes["messaging.rocketmq.client_group"] = group
            kind = self._trace.SpanKind.PRODUCER
            return self._tracer.start_as_current_span(_name(attributes), kind=kind, attributes=attributes)

        def carry() -> list[Any]:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            return [replace(each, properties={**each.properties, **carrier}) for each in messages]

        with self._span(begin) as span:
            carrying = _call_safely(carry) or messages
            try:
                try:
                    result = await send(carrying[0] if many is None else carrying)
                # The trace context may have made the message too large, so send the message without it.
                except MessageIllegal:
                    result = await send(what if many is None else many)
            except BaseException as error:
                _call_safely(span.set_attribute, "error.type", type(error).__qualname__)
                raise
            if isinstance(result, SendResult):
                _call_safely(
                    span.set_attributes,
                    {
                        "messaging.message.id": result.msg_id,
                        "messaging.destination.partition.id": str(result.queue.queue_id),
                    },
                )
            return result

    def received(self, group: str, messages: Sequence[MessageExt], begun_ns: int) -> None:
        """Record that a stream or a poll begun at `begun_ns` (time.time_ns) returned messages of a topic."""

        def tell() -> None:
            attributes = _attributes("receive", messages[0].topic, messages, group)
            self._tracer.start_span(
                _name(attributes),
                kind=self._trace.SpanKind.CLIENT,
                attributes=attributes,
                links=self._links(messages),
                start_time=begun_ns,
            ).end()

        _call_safely(tell)

    def processing(
        self, listener: Callable[[list[MessageExt], C], Awaitable[S]], group: str
    ) -> Callable[[list[MessageExt], C], Awaitable[S]]:
        """Return a listener that makes each call of `listener` within a span.

        The span is linked to the sends of all its messages. If there is a single message, the span is also a
        child of that message's send span.
        """

        def begin(messages: list[MessageExt]) -> AbstractContextManager[Span]:
            attributes = _attributes("process", messages[0].topic, messages, group)
            return self._tracer.start_as_current_span(
                _name(attributes),
                context=self.context_of(messages[0]) if len(messages) == 1 else None,
                kind=self._trace.SpanKind.CONSUMER,
                attributes=attributes,
                links=self._links(messages),
            )

        async def call(messages: list[MessageExt], context: C) -> S:
            with self._span(functools.partial(begin, messages)) as span:
                try:
                    status = await listener(messages, context)
                except BaseException as error:
                    _call_safely(span.set_attribute, "error.type", type(error).__qualname__)
                    raise
                if status.name not in _HANDLED:
                    _call_safely(self._failed, span, status.name)
                return status

        return call

    @contextmanager
    def _span(self, begin: Callable[[], AbstractContextManager[Span]]) -> Iterator[Span]:
        """Return the span that `begin` opens, or a span without effect if `begin` raises an exception."""

        def enter() -> tuple[AbstractContextManager[Span], Span]:
            manager = begin()
            return manager, manager.__enter__()

        opened = _call_safely(enter)
        if opened is None:
            yield self._trace.INVALID_SPAN
            return
        manager, span = opened
        try:
            yield span
        except BaseException as error:
            _call_safely(manager.__exit__, type(error), error, error.__traceback__)
            raise
        _call_safely(manager.__exit__, None, None, None)

    def _failed(self, span: Span, status: str) -> None:
        span.set_attribute("error.type", status)
        span.set_status(self._trace.StatusCode.ERROR, status)

    def _links(self, messages: Sequence[MessageExt]) -> list[Any]:
        contexts = [
            self._trace.get_current_span(self.context_of(message)).get_span_context()
            for message in messages[:_MAX_LINKS]
        ]
        return [self._trace.Link(context) for context in contexts if context.is_valid]


def context_room() -> int:
    """Return by how many bytes the current span's trace context lengthens a message."""
    if "opentelemetry.trace" not in sys.modules:
        return 0
    from opentelemetry import trace

    state = trace.get_current_span().get_span_context().trace_state.to_header()
    added = {"traceparent": _TRACEPARENT} | ({"tracestate": state} if state else {})
    return len(encode_properties(added)) + 1


def spanned(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Wrap a send method of a producer, so that each call runs in a span if the producer has telemetry."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        producer = cast("Any", args[0])
        telemetry: Telemetry | None = producer.telemetry
        if telemetry is None:
            return method(*args, **kwargs)
        rest: tuple[Any, ...] = args[1:]
        name = next((name for name in ("message", "messages") if name in kwargs), "")
        if not rest and not name:
            # An argument is missing, so the method raises a TypeError.
            return method(*args, **kwargs)

        def send(what: object) -> Coroutine[Any, Any, R]:
            if name:
                return method(producer, *rest, **{**kwargs, name: what})  # type: ignore[arg-type]
            return method(producer, what, *rest[1:], **kwargs)  # type: ignore[arg-type]

        return telemetry.send(producer.group, kwargs[name] if name else rest[0], send)

    return call


def _call_safely(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return the result of a call, or None if it raises: a telemetry error must not affect a message."""
    try:
        return work(*args, **kwargs)
    except Exception as error:
        if _log_limit.allows():
            log.error("telemetry could not be recorded", exc_info=error)
        return None


def _name(attributes: Attributes) -> str:
    return f"{attributes['messaging.operation.name']} {attributes['messaging.destination.name']}"


def _attributes(operation: str, topic: str, messages: Sequence[Any], group: str | None = None) -> Attributes:
    attributes: Attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    first = messages[0]
    if len(messages) > 1:
        attributes["messaging.batch.message_count"] = len(messages)
        return attributes
    attributes["messaging.message.body.size"] = len(first.body)
    if first.tags:
        attributes["messaging.rocketmq.message.tag"] = first.tags
    if first.keys:
        attributes["messaging.rocketmq.message.keys"] = list(first.keys)
    if isinstance(first, MessageExt):
        attributes["messaging.message.id"] = first.msg_id
        attributes["messaging.destination.partition.id"] = str(first.queue_id)
        host = parse_address(first.store_host)
        if host is not None:
            attributes["server.address"], attributes["server.port"] = host
    return attributes
