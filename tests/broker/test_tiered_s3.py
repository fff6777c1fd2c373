"""Tiered storage on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.test_tiered_storage import MESSAGES, all_of, check_operations, offloaded, restored, tiered
from tests.kit.waiting import until
from tests.pipeline.s3_server import BUCKET, S3, s3_server

from cometmq.broker.base.config import BrokerConfig

pytestmark = pytest.mark.slow("starts an S3 server")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


def test_operations(s3: S3) -> None:
    check_operations(
        BrokerConfig.from_properties({"tieredStoreUri": f"s3://{BUCKET}/operations", "brokerName": "é b"})
    )
    assert len(s3.paths("operations/=C3=A9=20b-0")) == 2


async def test_everything_is_consumed_from_s3_also_after_a_restart_or_a_restore(
    tmp_path: Path, s3: S3
) -> None:
    uri = f"s3://{BUCKET}/messages"
    async with offloaded(tmp_path, tieredStoreUri=uri) as (broker, peer):
        segments = broker.parts.store.log.min_position // 65536
        await until(lambda: len(s3.paths("messages", ".json")) == segments)
        assert await all_of(peer) == list(range(MESSAGES))
    async with tiered(tmp_path, tieredStoreUri=uri) as (_, peer):
        assert await all_of(peer) == list(range(MESSAGES))
    report = restored(tmp_path, uri)
    assert report.segments == segments
    async with tiered(tmp_path, tieredStoreUri=uri) as (_, peer):
        assert await all_of(peer, report.messages) == list(range(report.messages))
        assert report.messages > MESSAGES // 2
