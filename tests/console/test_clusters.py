"""The list of clusters of a console, and the file that keeps it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cometmq.console.clusters import MAX_CLUSTERS, STARTED, ClusterError, Clusters


async def test_the_file_keeps_clusters_and_is_its_users_own(tmp_path: Path) -> None:
    path = tmp_path / "data" / "clusters.json"
    clusters = Clusters(path, "127.0.0.1:1")
    await clusters.start()
    await clusters.put("b", " 127.0.0.1:2,127.0.0.1:3 ")
    clusters.make_standard("b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ended: list[str] = []
    clusters.find("b").on_end["page"] = lambda: ended.append("b")
    await clusters.put("b", "127.0.0.1:4")
    assert ended == ["b"]
    await clusters.stop()

    again = Clusters(path, "127.0.0.1:9")
    await again.start()
    assert [(each.name, each.namesrv) for each in again.connections.values()] == [
        (STARTED, "127.0.0.1:9"),
        ("b", "127.0.0.1:4"),
    ]
    assert again.find("gone").name == "b"
    await again.remove("b")
    assert again.find("b").name == STARTED
    await again.stop()


@pytest.mark.parametrize(
    ("name", "namesrv"),
    [
        (STARTED, "127.0.0.1:1"), ("", "127.0.0.1:1"), ("a;b", "127.0.0.1:1"), ("a" * 65, "127.0.0.1:1"),
        ("a", ""), ("a", "127.0.0.1"), ("a", "x:1;" * 300),
    ],
)  # fmt: skip
async def test_what_is_no_cluster_is_refused_and_changes_nothing(
    tmp_path: Path, name: str, namesrv: str
) -> None:
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    with pytest.raises(ClusterError):
        await clusters.put(name, namesrv)
    assert list(clusters.connections) == [STARTED]
    assert not (tmp_path / "clusters.json").exists()


async def test_a_console_shows_a_bounded_number_of_clusters(tmp_path: Path) -> None:
    clusters = Clusters(tmp_path / "clusters.json", "127.0.0.1:1")
    for number in range(MAX_CLUSTERS - 1):
        clusters.connections[f"c{number}"] = clusters.find(STARTED)
    with pytest.raises(ClusterError, match="at most 32"):
        await clusters.put("more", "127.0.0.1:1")


async def test_a_damaged_file_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "clusters.json"
    path.write_text("{")
    with pytest.raises(ClusterError, match=r"clusters\.json cannot be read"):
        await Clusters(path, "127.0.0.1:1").start()
