"""`cometmq acl explain` prints the rule that decides; `--access-key` and related options reach the client."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ACL

from cometmq.cli.conf import acl
from cometmq.cli.options import namesrv_option
from cometmq.client import ClientOptions


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write(tmp_path / "conf" / "plain_acl.yml", ACL + "globalWhiteRemoteAddresses: [10.0.0.*]\n")
    return tmp_path / "conf"


def explain(conf: Path, *arguments: str) -> Result:
    return CliRunner().invoke(acl, ["explain", "--conf", str(conf), *arguments])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("program", "pub", "Orders"), 0, "allowed: topicPerms: Orders=PUB|SUB"),
        (
            ("program", "PUB", "topic:In"),
            1,
            "denied: No default permission for topic:In (topicPerms: In=SUB)",
        ),
        (("program", "sub", "group:G"), 0, "allowed: groupPerms: G=SUB"),
        (("program", "sub", "%RETRY%Other"), 1, "group:Other (no defaultGroupPerm"),
        (("program", "admin"), 1, "denied: Need admin permission"),
        (("adminer", "admin"), 0, "allowed: admin: true"),
        (("nobody", "sub", "T"), 1, "denied: No acl config for nobody"),
        (("nobody", "sub", "T", "--from", "10.0.0.7"), 0, "globalWhiteRemoteAddresses: 10.0.0.*"),
    ],
)
def test_the_rule_is_named(conf: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = explain(conf, *arguments)

    assert words in result.output
    assert result.exit_code == code


def test_json_has_the_same(conf: Path) -> None:
    assert json.loads(explain(conf, "program", "pub", "Orders", "--json").output) == {
        "user": "program",
        "action": "pub",
        "resource": "Orders",
        "conf": str(conf),
        "allowed": True,
        "reason": "topicPerms: Orders=PUB|SUB",
    }


@pytest.mark.parametrize("words", ["u pub", "u admin T", "u pub x:T", "u eat T"])
def test_what_cannot_be_asked_is_refused(conf: Path, words: str) -> None:
    assert explain(conf, *words.split()).exit_code == 2


def test_the_files_of_a_brokers_settings_count(conf: Path) -> None:
    (conf / "broker.conf").write_text("brokerName=b\n")
    result = CliRunner().invoke(acl, ["explain", "-c", str(conf / "broker.conf"), "adminer", "admin"])

    assert result.output == "allowed: admin: true\n"


def test_options_reach_the_client_for_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMETMQ_ACCESS_KEY", "COMETMQ_SECRET_KEY", "COMETMQ_TLS"):
        monkeypatch.delenv(name, raising=False)
    seen = []

    @click.command()
    @namesrv_option
    def command(namesrv: str) -> None:
        seen.append((namesrv, ClientOptions().credentials, ClientOptions().tls_context))

    access = ["--access-key", "somebody", "--secret-key", "a-secret", "--tls", "true"]
    assert CliRunner().invoke(command, ["-n", "n:1", *access]).exit_code == 0
    ((namesrv, credentials, context),) = seen
    assert (namesrv, context is not None) == ("n:1", True)
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key) == ("somebody", "a-secret")
    assert not any(name in os.environ for name in ("COMETMQ_ACCESS_KEY", "COMETMQ_SECRET_KEY", "COMETMQ_TLS"))
