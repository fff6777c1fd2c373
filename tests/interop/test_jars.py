"""Fetching the jars that these tests need: a failure is reported, and a success is cached."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.interop import jars


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMETMQ_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_java_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(jars.ToolMissingError, match=r"javac is needed .* JDK 17"):
        jars.java_tool("javac")


def test_java_home_wins_over_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "bin" / "java"
    mine.parent.mkdir()
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.java_tool("java") == str(mine)


def test_what_no_registry_has_is_named(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.xml"
    empty = tmp_path / "registry"
    settings.write_text(
        f'<ivysettings><settings defaultResolver="here"/><resolvers><filesystem name="here">'
        f'<artifact pattern="{empty}/[artifact]-[revision].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    monkeypatch.setenv("COMETMQ_IVY_SETTINGS", str(settings))
    monkeypatch.setattr(jars, "FETCH_ATTEMPTS", 1)
    with pytest.raises(
        jars.FetchError, match=r"org.apache.rocketmq:rocketmq-client:4.9.8 could not be fetched"
    ):
        jars.client_jars("4.9.8")
    assert not list(own_cache.glob("classpath-*"))  # a failure is not cached
    assert list(own_cache.glob("ivy-*.failed"))


def test_a_failure_counts_for_those_that_waited_and_for_some_minutes(tmp_path: Path) -> None:
    tried = []

    def fetch(works: bool = False) -> None:
        with jars.fetching(tmp_path, "x"):
            tried.append(works)
            if not works:
                raise subprocess.TimeoutExpired("ivy", 600)

    with pytest.raises(subprocess.TimeoutExpired):
        fetch()
    with pytest.raises(jars.FetchError, match=r"ivy.*timed out(?s:.*)delete .*x\.failed"):
        fetch(works=True)
    assert tried == [False]
    long_ago = time.time() - jars.FAILURE_KEPT_S
    os.utime(tmp_path / "x.failed", (long_ago, long_ago))
    fetch(works=True)
    fetch(works=True)
    assert tried == [False, True, True]


def test_what_was_fetched_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jars.client_jars("4.9.8")
    assert any(each.name == "rocketmq-client-4.9.8.jar" for each in first)

    def refuse(*_: object) -> list[Path]:
        raise AssertionError("fetched twice")

    monkeypatch.setattr(jars, "_fetch", refuse)
    assert jars.client_jars("4.9.8") == first


def test_proxies_of_the_environment_reach_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost,.inside.example")
    options = jars.proxy_options()
    assert "-Dhttps.proxyHost=proxy.example" in options
    assert "-Dhttps.proxyPort=3128" in options
    assert "-Dhttp.nonProxyHosts=localhost|*.inside.example" in options
