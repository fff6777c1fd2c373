"""Fixtures: the jobs' commands as `cometmq` runs them, in this process and with the tests' Spark session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from cometmq.cli import main
from cometmq.standalone import Standalone

RunJob = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_job(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunJob:
    """Run `cometmq pipeline JOB …`. The Spark session stays open, because the command did not create it."""

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["cometmq", "pipeline", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert spark.range(1).count() == 1
        return subprocess.CompletedProcess(words, ended.value.code, out, err)

    return start


@pytest.fixture
def namesrv(broker: Standalone, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment so that commands find the cluster."""
    monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv_addr)
    return broker.namesrv_addr
