"""The OpenAPI document is valid, and describes exactly the routes of the gateway."""

from __future__ import annotations

from typing import Any, cast

from cometmq.grpc.gateway.gateway import Gateway
from cometmq.grpc.gateway.openapi import openapi_document


def test_the_document_is_valid() -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator, validate

    validate(cast(Any, openapi_document()), cls=OpenAPIV31SpecValidator)


def test_it_has_the_routes_with_their_parameters() -> None:
    described = {
        (verb.upper(), path): {
            each["name"] for each in operation.get("parameters", []) if each["in"] == "query"
        }
        for path, operations in openapi_document()["paths"].items()
        for verb, operation in operations.items()
    }
    routes = Gateway(cast(Any, None), {}).routes
    served = {(each.verb.decode(), "/" + "/".join(each.path)): set(each.parameters) for each in routes}
    assert described == served


async def test_it_is_served(web: Any) -> None:
    answer = await web.get("/v1/openapi.json")
    assert answer.json() == openapi_document()
