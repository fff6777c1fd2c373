"""A web service that sends orders and consumes them, with FastAPI: clients live as long as the application.

Start a cluster first (`cometmq standalone`), then:
NAMESRV_ADDR=127.0.0.1:9876 uvicorn --app-dir examples fastapi_orders:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request

from cometmq import (
    ClientInstance,
    CometError,
    ConsumeFromWhere,
    Message,
    MessageExt,
    Producer,
    PushConsumer,
    PushOptions,
)

FROM_FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start what every request shares; at the end running handlers finish and their offsets are stored."""
    shipped: dict[str, str] = {}

    async def ship(messages: list[MessageExt]) -> None:
        for message in messages:
            shipped[message.keys[0]] = message.body.decode()

    # Without an address NAMESRV_ADDR is used. Producer and consumer share their connections.
    async with (
        ClientInstance() as client,
        Producer("shop", client=client) as producer,
        PushConsumer("shipping", ship, "Orders", client=client, options=FROM_FIRST) as consumer,
    ):
        app.state.producer, app.state.consumer, app.state.shipped = producer, consumer, shipped
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=202)
async def order(number: str, request: Request) -> dict[str, str]:
    """Accepted once the broker has it; 503 if that cannot be said."""
    try:
        result = await app.state.producer.send(Message("Orders", await request.body(), keys=(number,)))
    except CometError as error:
        raise HTTPException(503, "the order was not taken, try again") from error
    return {"msg_id": result.msg_id}


@app.get("/shipped/{number}")
async def shipped(number: str) -> dict[str, str]:
    """What was shipped for an order."""
    found = app.state.shipped.get(number)
    if found is None:
        raise HTTPException(404, "not shipped yet")
    return {"shipped": found}


@app.get("/health")
async def health() -> dict[str, bool]:
    """For a load balancer."""
    return {"consuming": app.state.consumer.health().ok}
