"""Settings, tables and permissions of name servers."""

from __future__ import annotations

import pytest
from tests.admin.conftest import Shell


def test_the_life_of_a_value(mq: Shell) -> None:
    key = ("-s", "PLACES", "-k", "where")
    set_to = mq.ok("updateKvConfig", *key, "-v", "here")
    assert set_to.lines == ["create or update kv config to namespace success."]

    would = mq.ok("deleteKvConfig", *key, "--dry-run")
    assert would.lines[0] == "would delete key where of namespace PLACES, whose value is here"

    assert mq.ok("deleteKvConfig", *key, "--json").json["value"] == "here"
    assert mq.ok("deleteKvConfig", *key, "--json").json["value"] is None


def test_write_permission_is_taken_and_given_again(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "wiped", "-r", "1", "-w", "1")
    name = ("-b", mq.broker.broker_name)

    def perm() -> int:
        return int(mq.ok("topicRoute", "-t", "wiped").json["queueDatas"][0]["perm"])

    assert mq.ok("wipeWritePerm", *name, "--dry-run").lines[0].startswith("would remove the write permission")
    assert perm() == 6
    wiped = mq.ok("wipeWritePerm", *name)
    assert perm() == 4
    added = mq.ok("addWritePerm", *name)
    assert perm() == 6

    start = f"write perm of broker[{mq.broker.broker_name}] in name server[{mq.broker.namesrv}] OK, "
    assert wiped.lines[0].startswith(f"wipe {start}")
    assert added.lines[0].startswith(f"add {start}")
    unknown = mq.run("wipeWritePerm", "-b", mq.broker.broker_name + "x")
    assert (unknown.code, f"did you mean {mq.broker.broker_name}?" in unknown.err) == (1, True)


def test_settings_are_shown_and_changed(mq: Shell) -> None:
    shown = mq.ok("getNamesrvConfig").lines
    assert shown[0] == f"============{mq.broker.namesrv}============"
    assert f"{'orderMessageEnable':<50}=  false" in shown

    changed = mq.ok("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "true")
    assert changed.lines == [
        f"update name server config success![{mq.broker.namesrv}]",
        "orderMessageEnable : true",
    ]
    assert mq.ok("getNamesrvConfig", "--json").json[mq.broker.namesrv]["orderMessageEnable"] == "true"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kvConfigPath", "/tmp/x", "black list"),
        ("orderMessageEnable", "maybe", "true or false"),
        ("scanNotActiveBrokerInterval", "9" * 400, "scanNotActiveBrokerInterval"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(mq: Shell, key: str, value: str, words: str) -> None:
    failed = mq.run("updateNamesrvConfig", "-k", key, "-v", value)

    assert failed.code == 1
    assert words in failed.err
