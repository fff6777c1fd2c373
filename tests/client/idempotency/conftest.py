"""Fixtures: the database servers of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.databases import postgres_server, redis_server


@pytest.fixture(scope="package")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture(scope="package")
def postgres() -> Iterator[str]:
    """Start PostgreSQL and yield a connection string for psycopg."""
    with postgres_server() as text:
        yield text
