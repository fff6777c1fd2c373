"""exportMetadata, exportConfigs, exportMetrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.admin.conftest import Shell

from cometmq.client.cluster.broker_api import BrokerApi


@pytest.mark.parametrize(
    ("more", "name", "keys"),
    [
        (("-c", "DefaultCluster"), "metadata", {"topicConfigTable", "subscriptionGroupTable", "exportTime"}),
        (("-c", "DefaultCluster", "-t"), "topic", {"topicConfigTable", "exportTime"}),
        (("-c", "DefaultCluster", "-g"), "subscriptionGroup", {"subscriptionGroupTable", "exportTime"}),
        (("-b", "{addr}", "-t"), "topic", {"topicConfigTable", "dataVersion"}),
        (("-b", "{addr}", "-g"), "subscriptionGroup", {"subscriptionGroupTable"}),
    ],
)
def test_topics_and_groups_are_written(
    mq: Shell, tmp_path: Path, more: tuple[str, ...], name: str, keys: set[str]
) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "exported", "-r", "3", "-w", "3")
    mq.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "exported-group")
    words = [word.format(addr=mq.broker.broker_addr) for word in more]

    said = mq.ok("exportMetadata", *words, "-f", str(tmp_path / "new"))

    path = tmp_path / "new" / f"{name}.json"
    found = json.loads(path.read_text())
    assert said.lines == [f"export {path} success"]
    assert found.keys() == keys
    if "topicConfigTable" in keys:
        assert found["topicConfigTable"]["exported"]["readQueueNums"] == 3
        assert "TBW102" not in found["topicConfigTable"]
    if "subscriptionGroupTable" in keys:
        assert set(found["subscriptionGroupTable"]) == {"exported-group"}


def exported(mq: Shell, command: str, directory: Path) -> Any:
    path = mq.ok(command, "-c", "DefaultCluster", "-f", str(directory), "--json").json["path"]
    return json.loads(Path(path).read_text())


def test_settings_are_written(mq: Shell, tmp_path: Path) -> None:
    found = exported(mq, "exportConfigs", tmp_path)

    assert found["clusterScale"] == {"namesrvSize": 1, "masterBrokerSize": 1, "slaveBrokerSize": 0}
    assert found["brokerConfigs"][mq.broker.broker_name]["brokerRole"] == "ASYNC_MASTER"


def test_load_is_written(mq: Shell, tmp_path: Path) -> None:
    found = exported(mq, "exportMetrics", tmp_path)

    report = found["evaluateReport"][mq.broker.broker_name]
    assert report["runtimeVersion"]["rocketmqVersion"] == "V4_9_7"
    assert report["runtimeQuota"]["topicSize"] >= 1
    assert found["totalData"]["totalTps"].keys() == {
        *("totalNormalInTps", "totalNormalOutTps", "totalTransInTps", "totalScheduleInTps"),
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "Missing option"),
        (("-b", "a:1", "-c", "c"), "not both"),
        (("-b", "a:1"), "-t/--topic or -g/--subscriptionGroup"),
        (("-c", "nowhere"), "no cluster named nowhere"),
    ],
)
def test_what_cannot_be_exported(mq: Shell, more: tuple[str, ...], words: str) -> None:
    failed = mq.run("exportMetadata", *more)

    assert (failed.code, words in failed.err) == (1, True)


def test_a_directory_that_cannot_be_made_is_an_error(mq: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    failed = mq.run("exportConfigs", "-c", "DefaultCluster", "-f", str(tmp_path / "file" / "below"))

    assert failed.code == 1
    assert "below" in failed.err


def test_rates_that_a_young_broker_does_not_report_are_left_out_of_the_sum(
    mq: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def young(_api: BrokerApi, _addr: str) -> dict[str, str]:
        return {"putTps": "", "getTransferedTps": "2.0 2.0 2.0"}

    monkeypatch.setattr(BrokerApi, "runtime_info", young)
    mq.ok("exportMetrics", "-c", "DefaultCluster", "-f", str(tmp_path))

    found = json.loads((tmp_path / "metrics.json").read_text())["totalData"]["totalTps"]
    assert (found["totalNormalInTps"], found["totalNormalOutTps"]) == (None, 2.0)
