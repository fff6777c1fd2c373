"""The window of the deduplication: retention of the keys in the log, and the scan at the start."""

from __future__ import annotations

import pytest
from tests.broker.send.test_dedup import MINUTE_MS, WINDOW, ShiftedClock, attributes, place, send
from tests.kit.brokers import refused, running

from cometmq.protocol.codes import RequestCode


@pytest.mark.parametrize(
    ("store", "key", "field"),
    [
        ({}, "fileReservedTime", "file_reserved_time"),
        ({"tieredStoreUri": "file://"}, "tieredLocalReservedTime", "tiered_local_reserved_time"),
    ],
)
async def test_the_log_stays_on_the_disk_as_long_as_the_windows(started, tmp_path, caplog, store, key, field):
    cluster, peer = await started(**{name: f"{uri}{tmp_path}/objects" for name, uri in store.items()})
    config, dedup = cluster.broker.parts.config, cluster.broker.parts.dedup
    await attributes(peer, f"+dedup.window.ms={90 * MINUTE_MS}")
    for hours, code in (("2", 0), ("1", 1)):
        answer = await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, f"{key}={hours}".encode())
        assert answer.code == code
    problem = "at least the dedup.window.ms=5400000 of topic Orders"
    refused(answer, 1, problem)
    assert config.store.local_reserved_time == 2
    config.store = config.store.replace(**{field: 1})  # like a settings file
    dedup.load()
    assert problem in caplog.text


async def test_a_segment_that_begins_while_the_clock_is_set_back_does_not_hide_the_earlier_ones(tmp_path):
    clock = ShiftedClock()
    small = {"mappedFileSizeCommitLog": str(64 << 10)}
    async with running(tmp_path, clock=clock, **small) as (broker, peer):
        await attributes(peer, WINDOW)
        await send(peer, "early", body=bytes(60_000))
        segments = broker.parts.store.log.segments
        for shift_ms, count in ((0, 2), (-60 * MINUTE_MS, 4), (0, 5)):
            clock.shift_ms = shift_ms
            while len(segments) < count:
                await send(peer, f"{count}-{len(segments)}", body=bytes(40_000))
        first = place(await send(peer, "early"))
    async with running(tmp_path, clock=clock, **small) as (_, peer):
        assert place(await send(peer, "early")) == first
