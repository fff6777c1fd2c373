"""The routes of the HTTP gateway (docs/http.md).

Each route calls the handler of an RPC, so requests have its rules, limits, rights, traces and metrics. A web
page in the browser of a user who can reach the port must not send or consume messages. So a GET changes
nothing, and requests with the header Origin, which browsers add, are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from cometmq.grpc.gateway import requests
from cometmq.grpc.gateway.events import decode_json
from cometmq.grpc.gateway.exchange import (
    HttpCall,
    HttpError,
    Response,
    json_response,
    of_status,
    problem,
    status_of,
)
from cometmq.grpc.gateway.openapi import openapi_document
from cometmq.grpc.gateway.received import Render, renderer
from cometmq.grpc.gateway.requests import Ack, Extend, Handle, Nack, Recall, read_handle, read_handles
from cometmq.grpc.rpc.calls import Kind, Method
from cometmq.grpc.rpc.enums import Code, FilterType
from cometmq.grpc.rpc.messages import SERVICE, messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.clients import Clients
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.receives import (
    MAX_BATCH,
    MAX_INVISIBLE_MS,
    MAX_POLL_MS,
    MIN_INVISIBLE_MS,
)
from cometmq.grpc.service.renewals import RENEWED_MS
from cometmq.protocol.codes import MAX_FRAME_LENGTH

Result = Awaitable[Any] | Any


class Route(NamedTuple):
    """A route. Parts of its path in braces are parameters, which the handler receives as `names`.

    The arguments of `handler` are the call, the names, the query and the body.
    """

    verb: bytes
    path: tuple[str, ...]
    parameters: frozenset[str]
    handler: Callable[[HttpCall, list[str], dict[str, str], bytes], Result]

    def names(self, parts: Sequence[str]) -> list[str] | None:
        """Return the names in a path, or None if the path does not match the route."""
        if len(parts) != len(self.path):
            return None
        if any(wanted != part for wanted, part in zip(self.path, parts, strict=True) if wanted[:1] != "{"):
            return None
        return [part for wanted, part in zip(self.path, parts, strict=True) if wanted[:1] == "{"]


class Gateway:
    """Handles HTTP requests. `methods` contains the RPCs by their gRPC path."""

    def __init__(self, clients: Clients, methods: Mapping[bytes, Method]) -> None:
        self._clients = clients
        self._methods = methods
        topic, group = "v1/topics/{topic}", "v1/topics/{topic}/groups/{group}"
        of_receive = ("max", "wait", "invisible", "tags", "sql")
        self.routes = [
            _route(b"GET", "healthz", self._health),
            _route(b"GET", "v1/openapi.json", self._openapi),
            _route(b"POST", f"{topic}/messages", self._send),
            _route(b"POST", f"{topic}/batch", self._send_batch),
            _route(b"POST", f"{topic}/recall", self._recall),
            _route(b"POST", f"{group}/messages", self._receive, *of_receive),
            _route(b"POST", f"{group}/ack", self._ack),
            _route(b"POST", f"{group}/nack", self._nack),
            _route(b"POST", f"{group}/extend", self._extend),
        ]

    def method(self) -> Method:
        """Return the method that handles all requests that are not gRPC."""

        def status_response(code: int, text: str) -> Any:
            return messages().HeartbeatResponse(status=status(Code(code), text))

        return Method("Http", Kind.UNARY, bytes, status_response, self.handle, MAX_FRAME_LENGTH, HttpCall)

    def handle(self, call: HttpCall, body: bytes) -> Result:
        """Handle a request whose body has arrived."""
        try:
            return self._route(call, body)
        except HttpError as error:
            call.outcome = error.code
            response = problem(error.status, error.code.name, error.problem)
            call.answer(response._replace(headers=response.headers + error.headers))
            return None

    def _route(self, call: HttpCall, body: bytes) -> Result:
        target = requests.read_target(call.metadata[b":path"])
        verb = call.metadata[b":method"]
        allowed = []
        for route in self.routes:
            names = route.names(target.parts)
            if names is None:
                continue
            if verb != route.verb and (verb, route.verb) != (b"HEAD", b"GET"):
                allowed.append(route.verb)
                continue
            unknown = target.query.keys() - route.parameters
            if unknown:
                raise ServiceError(Code.BAD_REQUEST, f"{min(unknown)[:80]}: unknown parameter")
            if route.verb == b"POST":
                if b"origin" in call.metadata:
                    raise ServiceError(Code.FORBIDDEN, "origin: requests from web pages are refused")
                requests.check_headers(call.headers)
                self._clients.find(call)  # checks the account before the body is parsed
            return route.handler(call, names, target.query, body)
        if allowed:
            verbs = b", ".join(allowed)
            problem = f"method: the path allows {verbs.decode()} only"
            raise HttpError(Code.NOT_FOUND, problem, 405, ((b"allow", verbs),))
        raise ServiceError(Code.NOT_FOUND, "path: no such path, see /v1/openapi.json")

    def _call(self, call: HttpCall, name: str, request: Any, render: Render | None = None) -> Result:
        """Call the handler of an RPC, to which metrics attribute the request. `render` makes the response."""
        if render is not None:
            call.render = render
        call.method = self._methods[f"/{SERVICE}/{name}".encode()]
        return call.method.handler(call, request)

    # -- documents

    def _health(self, call: HttpCall, *_: Any) -> None:
        call.outcome = Code.OK
        call.answer(json_response({"status": "up"}))

    def _openapi(self, call: HttpCall, *_: Any) -> None:
        call.outcome = Code.OK
        call.answer(self._document)

    @cached_property
    def _document(self) -> Response:
        return json_response(openapi_document())

    # -- sends

    def _send(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        sent = requests.outgoing(names[0], call.headers, body)
        return self._store(call, sent, single=len(sent) == 1)

    def _send_batch(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        return self._store(call, requests.outgoing_batch(names[0], body), single=False)

    def _store(self, call: HttpCall, sent: list[Any], single: bool) -> Result:
        places: list[Any] = []  # The queues of the stored messages, in the order of the stored entries
        call.on_stored = places.append

        def render(parts: Sequence[Any]) -> Response:
            (response,) = parts
            queues = iter(places)
            results = [_sent(entry, queues) for entry in response.entries]
            if single and response.status.code == Code.OK:
                return json_response(results[0])
            if response.status.code in (Code.OK, Code.MULTIPLE_RESULTS):
                return json_response({"results": results}, status_of(response.status.code))
            return of_status(response.status, **({"results": results} if results else {}))

        return self._call(call, "SendMessage", messages().SendMessageRequest(messages=sent), render)

    def _recall(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        given: Recall = decode_json(body, Recall)
        m = messages()
        request = m.RecallMessageRequest(recall_handle=given.recall_handle)
        request.topic.name = names[0]

        def render(parts: Sequence[Any]) -> Response:
            (response,) = parts
            refused = response.status
            if refused.code == Code.INTERNAL_SERVER_ERROR and refused.message.startswith("recall "):
                return problem(409, "ILLEGAL_OPERATION", refused.message, "recall_handle")
            if refused.code != Code.OK:
                return of_status(refused)
            return json_response({"message_id": response.message_id})

        return self._call(call, "RecallMessage", request, render)

    # -- receives

    def _receive(self, call: HttpCall, names: list[str], query: dict[str, str], _body: bytes) -> Result:
        render, is_single = renderer(call.text(b"accept"))
        m = messages()
        request = m.ReceiveMessageRequest(group=m.Resource(name=names[1]))
        request.message_queue.topic.name = names[0]
        most = 1 if is_single else MAX_BATCH
        request.batch_size = int(requests.number("max", query.get("max"), 1, 1, most))
        wait_s = requests.number("wait", query.get("wait"), 0, 0, MAX_POLL_MS / 1000)
        request.long_polling_timeout.FromMilliseconds(int(wait_s * 1000))
        low, high = MIN_INVISIBLE_MS / 1000, MAX_INVISIBLE_MS / 1000
        invisible_s = requests.number("invisible", query.get("invisible"), RENEWED_MS / 1000, low, high)
        request.invisible_duration.FromMilliseconds(int(invisible_s * 1000))
        expression = request.filter_expression
        if "sql" in query:
            if "tags" in query:
                raise ServiceError(Code.BAD_REQUEST, "sql: the request has both tags and sql")
            expression.type, expression.expression = FilterType.SQL, query["sql"]
        else:
            expression.type, expression.expression = FilterType.TAG, query.get("tags", "*")
        return self._call(call, "ReceiveMessage", request, render)

    # -- leases

    def _ack(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        handles = read_handles(body, Ack).handles
        m = messages()
        request = m.AckMessageRequest(group=m.Resource(name=names[1]), topic=m.Resource(name=names[0]))
        for handle in map(read_handle, handles):
            request.entries.add(
                message_id=handle.message_id,
                receipt_handle=handle.receipt,
                lite_topic=handle.lite_topic or None,
            )

        def render(parts: Sequence[Any]) -> Response:
            (response,) = parts
            return _about_handles(handles, [each.status for each in response.entries], response.status)

        return self._call(call, "AckMessage", request, render)

    def _nack(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        given = read_handles(body, Nack)
        return self._change(call, names, given.handles, given.delay)

    def _extend(self, call: HttpCall, names: list[str], _query: object, body: bytes) -> Result:
        given = read_handles(body, Extend)
        return self._change(call, names, given.handles, given.invisible)

    async def _change(self, call: HttpCall, names: list[str], handles: list[str], seconds: float) -> None:
        """Set the remaining time of leases, and respond with the results."""
        decoded = [read_handle(each) for each in handles]
        changes = [self._changed(call, names, each, int(seconds * 1000)) for each in decoded]
        statuses = await asyncio.gather(*changes)
        same = len({each.code for each in statuses}) == 1
        overall = statuses[0] if same else status(Code.MULTIPLE_RESULTS)
        call.outcome = overall.code
        call.answer(_about_handles(handles, statuses, overall))

    async def _changed(self, call: HttpCall, names: list[str], handle: Handle, invisible_ms: int) -> Any:
        """Set the remaining time of a lease, and return the status."""
        m = messages()
        request = m.ChangeInvisibleDurationRequest(
            group=m.Resource(name=names[1]),
            topic=m.Resource(name=names[0]),
            receipt_handle=handle.receipt,
            message_id=handle.message_id,
            lite_topic=handle.lite_topic or None,
        )
        request.invisible_duration.FromMilliseconds(invisible_ms)
        try:
            return (await self._call(call, "ChangeInvisibleDuration", request)).status
        except ServiceError as error:
            return status(error.code, error.problem)


def _route(verb: bytes, path: str, handler: Callable[..., Result], *parameters: str) -> Route:
    return Route(verb, tuple(path.split("/")), frozenset(parameters), handler)


def _sent(entry: Any, places: Any) -> dict[str, Any]:
    """Return the result of one message of a send. `places` yields the queues of stored messages."""
    result: dict[str, Any] = {}
    if entry.message_id:  # The message was stored, but possibly not as durably as configured
        place = next(places)
        result |= {"message_id": entry.message_id, "queue": place.queue_id, "offset": entry.offset}
        if entry.recall_handle:
            result["recall_handle"] = entry.recall_handle
    if entry.status.code != Code.OK:
        result |= {"code": Code(entry.status.code).name, "detail": entry.status.message}
    return result


def _about_handles(handles: list[str], statuses: Sequence[Any], overall: Any) -> Response:
    """Return the results of a request about leases, as a problem if all handles have the same error."""
    results = [
        {"handle": handle, "code": Code(each.code).name}
        | ({} if each.code == Code.OK else {"detail": each.message})
        for handle, each in zip(handles, statuses, strict=False)
    ]
    if overall.code in (Code.OK, Code.MULTIPLE_RESULTS):
        return json_response({"results": results}, status_of(overall.code))
    return of_status(overall, **({"results": results} if results else {}))
