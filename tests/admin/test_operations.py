"""Operations: description, order, and the failure of a server."""

from __future__ import annotations

import pytest

from cometmq.admin.operations import Operation, Step
from cometmq.errors import CometError, ConnectError


class Servers:
    """Servers that record requests; servers in `down` refuse them."""

    def __init__(self, *down: str) -> None:
        self.down = down
        self.requests: list[str] = []

    async def send(self, addr: str) -> int:
        self.requests.append(addr)
        if addr in self.down:
            raise ConnectError(addr, "refused")
        return len(self.requests)

    def operation(self) -> Operation:
        steps = [
            Step("delete topic T with its messages", ["a:1", "b:1"], self.send),
            Step("delete the route of topic T", ["n:1"], self.send),
        ]
        return Operation("topic.delete", "T", steps, danger=True)


def test_a_description_names_each_step_and_its_servers() -> None:
    assert Servers().operation().describe() == [
        "delete topic T with its messages at a:1, b:1",
        "delete the route of topic T at n:1",
    ]


async def test_the_requests_are_sent_in_order() -> None:
    done = [(addr, result) async for _, addr, result in Servers().operation().run()]

    assert done == [("a:1", 1), ("b:1", 2), ("n:1", 3)]


async def test_a_failure_ends_an_operation() -> None:
    servers = Servers("a:1")

    with pytest.raises(ConnectError, match="refused"):
        async for _ in servers.operation().run():
            pass

    assert servers.requests == ["a:1"]


async def test_the_other_servers_of_a_step_get_their_requests_but_later_steps_do_not() -> None:
    servers = Servers("a:1")

    results = [result async for _, _, result in servers.operation().run(keep_going=True)]

    assert servers.requests == ["a:1", "b:1"]
    assert [isinstance(each, CometError) for each in results] == [True, False]
