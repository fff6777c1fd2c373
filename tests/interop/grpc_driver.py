"""A process with Apache's Python client of 5.x, which takes commands like the Java driver (java/grpc).

Commands are JSON objects, one on each line of standard input. Responses and deliveries are lines of standard
output. The process ends with its standard input.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rocketmq
from rocketmq.grpc_protocol import FilterType

Json = dict[str, Any]
WORKERS = 64
REQUEST_TIMEOUT_S = 30
RESOLUTIONS = {
    "COMMIT": rocketmq.TransactionResolution.COMMIT,
    "ROLLBACK": rocketmq.TransactionResolution.ROLLBACK,
}
_output = threading.Lock()


def emit(line: Json) -> None:
    with _output:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def written(message: rocketmq.Message) -> Json:
    return {
        "topic": message.topic,
        "body": base64.b64encode(message.body).decode(),
        "id": message.message_id,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "group": message.message_group,
        "lite": message.lite_topic,
        "attempt": message.delivery_attempt,
    }


def read(given: Json) -> rocketmq.Message:
    message = rocketmq.Message()
    message.topic = given["topic"]
    message.body = base64.b64decode(given["body"])
    if "tag" in given:
        message.tag = given["tag"]
    if "key" in given:
        message.keys = given["key"]
    for name, value in given.get("properties", {}).items():
        message.add_property(name, value)
    if "group" in given:
        message.message_group = given["group"]
    if "deliver_at_ms" in given:
        message.delivery_timestamp = given["deliver_at_ms"] // 1000
    if "lite" in given:
        message.lite_topic = given["lite"]
    if "priority" in given:
        message.priority = given["priority"]
    return message


def configuration(args: Json) -> rocketmq.ClientConfiguration:
    credentials = rocketmq.Credentials(args.get("key", ""), args.get("secret", ""))
    return rocketmq.ClientConfiguration(args["endpoint"], credentials, request_timeout=REQUEST_TIMEOUT_S)


def subscription(args: Json) -> rocketmq.FilterExpression:
    kind = FilterType.SQL if args.get("sql") else FilterType.TAG
    return rocketmq.FilterExpression(args.get("expression", "*"), kind)


class Checker(rocketmq.TransactionChecker):
    """Ends orphaned transactions as the command that started the producer demands."""

    def __init__(self, resolution: str) -> None:
        self._resolution = RESOLUTIONS[resolution]

    def check(self, message: rocketmq.Message) -> Any:
        return self._resolution


class Listener(rocketmq.MessageListener):
    """Reports each message, and fails the first delivery of those with a body of `failing`."""

    def __init__(self, consumer: str, failing: list[str]) -> None:
        self._consumer = consumer
        self._left = {base64.b64decode(each) for each in failing}

    def consume(self, message: rocketmq.Message) -> Any:
        fails = message.body in self._left
        self._left.discard(message.body)
        emit({"event": "push", "consumer": self._consumer, "messages": [written(message)], "failed": fails})
        return rocketmq.ConsumeResult.FAILURE if fails else rocketmq.ConsumeResult.SUCCESS


class Commands:
    """One method for each command; its arguments are those of the command's line."""

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._received: dict[int, rocketmq.Message] = {}

    def ping(self, _args: Json) -> str:
        return "pong"

    def producer_start(self, args: Json) -> None:
        checker = Checker(args["checked"]) if "checked" in args else None
        producer = rocketmq.Producer(
            configuration(args), tuple(args["topics"]), checker=checker, tls_enable=args["tls"]
        )
        self._start(args, producer)

    def simple_start(self, args: Json) -> None:
        consumer = rocketmq.SimpleConsumer(
            configuration(args),
            args["group"],
            {args["topic"]: subscription(args)},
            args["await_s"],
            tls_enable=args["tls"],
        )
        self._start(args, consumer)

    def push_start(self, args: Json) -> None:
        listener = Listener(args["name"], args.get("failing", []))
        consumer = rocketmq.PushConsumer(
            configuration(args),
            args["group"],
            listener,
            {args["topic"]: subscription(args)},
            tls_enable=args["tls"],
        )
        self._start(args, consumer)

    def lite_push_start(self, args: Json) -> None:
        listener = Listener(args["name"], args.get("failing", []))
        self._start(
            args, rocketmq.LitePushConsumer(configuration(args), args["group"], args["topic"], listener)
        )

    def lite_simple_start(self, args: Json) -> None:
        consumer = rocketmq.LiteSimpleConsumer(
            args["topic"], configuration(args), args["group"], args["await_s"]
        )
        self._start(args, consumer)

    def subscribe_lite(self, args: Json) -> None:
        self._clients[args["name"]].subscribe_lite(args["lite"])

    def unsubscribe_lite(self, args: Json) -> None:
        self._clients[args["name"]].unsubscribe_lite(args["lite"])

    def _start(self, args: Json, client: Any) -> None:
        client.startup()
        self._clients[args["name"]] = client

    def stop(self, args: Json) -> None:
        self._clients.pop(args["name"]).shutdown()

    def send(self, args: Json) -> Json:
        receipt = self._clients[args["name"]].send(read(args["message"]))
        return {"id": receipt.message_id, "recall": receipt.recall_handle}

    def transaction(self, args: Json) -> None:
        producer = self._clients[args["name"]]
        transaction = producer.begin_transaction()
        producer.send(read(args["message"]), transaction)
        if args["end"] == "COMMIT":
            transaction.commit()
        elif args["end"] == "ROLLBACK":
            transaction.rollback()

    def recall(self, args: Json) -> str:
        found: str = self._clients[args["name"]].recall_message(args["topic"], args["handle"])
        return found

    def receive(self, args: Json) -> list[Json]:
        found = self._clients[args["name"]].receive(args["count"], args["invisible_s"])
        out = []
        for message in found:
            number = len(self._received)
            self._received[number] = message
            out.append({**written(message), "number": number})
        return out

    def ack(self, args: Json) -> None:
        self._clients[args["name"]].ack(self._received[args["number"]])

    def change(self, args: Json) -> None:
        message = self._received[args["number"]]
        self._clients[args["name"]].change_invisible_duration(message, args["invisible_s"])


def answer(commands: Commands, args: Json) -> None:
    try:
        emit({"id": args["id"], "ok": True, "result": getattr(commands, args["op"])(args)})
    except Exception as error:
        problem = {"error": type(error).__name__, "message": str(error), "code": -1}
        emit({"id": args["id"], "ok": False, **problem})


def main() -> None:
    commands = Commands()
    with ThreadPoolExecutor(WORKERS) as workers:
        for line in sys.stdin:
            workers.submit(answer, commands, json.loads(line))
    sys.stdout.flush()
    os._exit(0)  # the clients that still run need not stop


if __name__ == "__main__":
    main()
