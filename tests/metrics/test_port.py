"""The Prometheus port: its responses, access and limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cometmq.errors import ConfigError
from cometmq.metrics import Families, MetricsExporter, MetricsSettings, exporter, port


def ask(number: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{number}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


async def collect_some(families: Families) -> None:
    families.gauge("room_temperature", "Degrees.", 21.5, room='a "b"\n')
    families.gauge("oven_age", "Since it was bought.", 5, unit="seconds")
    families.counter("doors_opened", "Times.", 3)


@asynccontextmanager
async def running(
    collect: Callable[[Families], Awaitable[None]] = collect_some,
    why: Callable[[], str] = str,
    **settings: str | int,
) -> AsyncIterator[MetricsExporter]:
    given = {"metrics_exporter_type": "PROM", "metrics_prom_exporter_port": 0, **settings}
    one = MetricsExporter(MetricsSettings(**given), "127.0.0.1", collect, why)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def got(one: MetricsExporter, path: str, method: str = "GET") -> tuple[int, str]:
    assert one.port is not None
    return await asyncio.to_thread(ask, one.port, path, method)


async def test_a_look_has_the_numbers_with_their_labels_and_the_process() -> None:
    async with running(metrics_label="site:lab, row:7") as one:
        status, text = await got(one, "/metrics")
    assert status == 200
    assert 'room_temperature{room="a \\"b\\"\\\\n",row="7",site="lab"} 21.5' in text
    assert 'doors_opened_total{row="7",site="lab"} 3.0' in text
    assert "# TYPE doors_opened_total counter" in text
    assert 'oven_age_seconds{row="7",site="lab"} 5.0' in text, "Prometheus has units in names"
    assert "process_resident_memory_bytes" in text


async def test_health_is_the_loop_and_readiness_the_work() -> None:
    problems = [""]
    async with running(why=lambda: problems[0]) as one:
        assert await got(one, "/healthz") == (200, "ok\n")
        assert await got(one, "/readyz") == (200, "ok\n")
        problems[0] = "the disk is full"
        assert await got(one, "/healthz") == (200, "the disk is full\n")
        assert await got(one, "/readyz") == (503, "the disk is full\n")
        assert (await got(one, "/etc/passwd"))[0] == 404
        assert (await got(one, "/metrics", "POST"))[0] == 405


async def test_a_loop_that_has_no_time_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "COLLECT_TIMEOUT_S", 0.05)
    forever = asyncio.Event()

    async def stuck(_families: Families) -> None:
        await forever.wait()

    async with running(stuck) as one:
        assert await got(one, "/metrics") == (503, "the server's loop does not answer\n")


async def test_samples_beyond_the_limit_are_left_out_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def many(families: Families) -> None:
        for number in range(10):
            families.gauge("drawers", "Those.", number, drawer=number)

    async with running(many, metrics_otel_cardinality_limit=4) as one:
        for _ in range(2):
            _, text = await got(one, "/metrics")
            assert text.count("drawers{") == 4
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the metrics are incomplete: they have more than 4 samples (metricsOtelCardinalityLimit)"
    ]


async def test_however_many_look_the_loop_is_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "KEEP_S", 1_000.0)
    looks = 0

    async def counted(families: Families) -> None:
        nonlocal looks
        looks += 1
        families.gauge("looks", "Those.", looks)

    async with running(counted) as one:
        asked = [got(one, path) for path in ("/metrics", "/metrics?name[]=x", "/metrics?1") for _ in range(2)]
        for status, text in await asyncio.gather(*asked):
            assert status == 200
            assert "looks 1.0" in text
        assert looks == 1


async def test_an_answer_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "KEEP_S", 0.0)
    monkeypatch.setattr(port, "REUSE_FACTOR", 0)
    numbers = iter(range(100))

    async def counted(families: Families) -> None:
        families.gauge("looks", "Those.", next(numbers))

    async with running(counted) as one:
        assert [f"looks {n}.0" in (await got(one, "/metrics"))[1] for n in range(3)] == [True] * 3


async def test_a_loop_without_time_is_not_waited_for_by_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "COLLECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(port, "KEEP_S", 1_000.0)
    forever, looks = asyncio.Event(), []

    async def stuck(_families: Families) -> None:
        looks.append(1)
        await forever.wait()

    async with running(stuck) as one:
        answers = await asyncio.gather(*(got(one, "/metrics") for _ in range(6)))
        assert {status for status, _ in answers} == {503}
        assert len(looks) == 1


async def test_who_is_slow_without_being_silent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "INACTIVITY_TIMEOUT_S", 0.2)
    async with running() as one:
        assert one.port is not None
        slow = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(port.MAX_CONNECTIONS)]
        stop = asyncio.Event()

        async def trickle() -> None:
            while not stop.is_set():
                for each in slow:
                    with contextlib.suppress(OSError):
                        each.send(b"G")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        try:
            async with asyncio.timeout(60):
                while True:
                    try:
                        status, _ = await got(one, "/healthz")
                    except OSError:
                        continue
                    assert status == 200
                    break
        finally:
            stop.set()
            await trickling
            for each in slow:
                each.close()


async def test_a_port_that_is_taken_is_said_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metricsPromExporterPort.*{number}.*on \(Address already"):
            async with running(metrics_prom_exporter_port=number):
                pass


async def test_silent_peers_make_room_for_those_who_ask() -> None:
    async with running() as one:
        assert one.port is not None
        silent = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(port.MAX_CONNECTIONS)]
        assert await got(one, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(silent[0].recv, 1) == b"", "the oldest goes"
        for each in silent[1:]:
            each.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert (await asyncio.to_thread(each.recv, 15)).startswith(b"HTTP/1.0 200")
        for each in silent:
            each.close()


async def test_those_who_have_asked_are_not_cut_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, all_asked = asyncio.Event(), threading.Semaphore(0)
    environ = port.WSGIRequestHandler.get_environ

    def noted(handler: port.WSGIRequestHandler) -> dict[str, Any]:
        all_asked.release()
        return environ(handler)

    async def later(families: Families) -> None:
        families.gauge("looks", "Those.", 1)
        await goes_on.wait()

    monkeypatch.setattr(port.WSGIRequestHandler, "get_environ", noted)
    async with running(later) as one:
        assert one.port is not None
        looks = [socket.create_connection(("127.0.0.1", one.port), 20) for _ in range(port.MAX_CONNECTIONS)]
        for each in looks:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert await asyncio.to_thread(all_asked.acquire, timeout=20)
        with pytest.raises((ConnectionError, urllib.error.URLError)):
            await got(one, "/healthz")
        goes_on.set()
        for each in looks:
            assert (await asyncio.to_thread(each.recv, 15)).startswith(b"HTTP/1.0 200")
            each.close()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"metrics_exporter_type": "LOG"}, "metricsExporterType"),
        ({"metrics_exporter_type": "OTLP_GRPC"}, "metricsGrpcExporterTarget"),
        ({"metrics_label": "no colon"}, "metricsLabel"),
        ({"metrics_label": "two words:x"}, "metricsLabel"),
        ({"metrics_prom_exporter_host": "a b"}, "metricsPromExporterHost"),
        ({"metrics_grpc_exporter_header": "token"}, "metricsGrpcExporterHeader"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as refused:
        MetricsSettings(**settings).check_metrics()
    assert "token" not in str(refused.value)
