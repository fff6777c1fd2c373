"""The four account commands with a broker that requires accounts; tools.yml and the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ACL

from cometmq.admin.commands import mqadmin
from cometmq.standalone import Standalone

TOOLS = "accessKey: adminer\nsecretKey: secret-of-adminer\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    home = tmp_path_factory.mktemp("home")
    write(home / "conf" / "plain_acl.yml", ACL)
    settings = {"aclEnable": "true", "rocketmqHome": str(home)}
    with Standalone(home / "data", 0, 0, settings=settings).run_in_thread() as running:
        yield running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a ROCKETMQ_HOME with the tools' account."""
    write(tmp_path / "conf" / "tools.yml", TOOLS)
    monkeypatch.setenv("ROCKETMQ_HOME", str(tmp_path))
    return tmp_path


def run(cluster: Standalone, *arguments: str) -> Result:
    return CliRunner().invoke(mqadmin, [arguments[0], "-n", cluster.namesrv_addr, *arguments[1:]])


def test_accounts_come_change_and_go(cluster: Standalone, home: Path) -> None:
    everywhere = ("-c", "DefaultCluster")
    key = ("-a", "somebody")
    perms = ("-t", "T=PUB,U=SUB", "-g", "G=SUB", "-i", "DENY", "-m", "false")
    perms += ("--rateLimits", "send.messages=5, receive.bytes=70")
    made = run(cluster, "updateAclConfig", *everywhere, *key, "-s", "a-good-secret", *perms)
    assert made.exit_code == 0, made.output
    assert "success." in made.output
    assert "accessKey='somebody', secretKey='******'" in made.output
    assert "a-good-secret" not in made.output
    guard = cluster.broker.parts.security.guard
    assert guard.policy.rates["somebody"] == {"send.messages": "5", "receive.bytes": "70"}
    assert cluster.broker.parts.rates.has_accounts

    white = run(cluster, "updateGlobalWhiteAddr", *everywhere, "-g", "10.0.0.*,10.1.0.{1,2}")
    assert white.exit_code == 0, white.output
    versions = run(cluster, "clusterAclConfigVersion", *everywhere, "--json")
    (row,) = json.loads(versions.output)
    assert (row["broker_name"], row["counter"]) == ("broker-a", 2)
    shown = run(cluster, "clusterAclConfigVersion", *everywhere).output.splitlines()
    assert shown[0].split("  ")[0] == "#Cluster Name"
    assert shown[1].split() == [
        *("DefaultCluster", "broker-a", row["broker_addr"], row["file"], "2"),
        *shown[1].split()[-2:],
    ]

    gone = run(cluster, "deleteAclConfig", "-b", row["broker_addr"], *key)
    assert (gone.exit_code, "account's accesskey is:somebody" in gone.output) == (0, True)
    again = run(cluster, "deleteAclConfig", *everywhere, *key)
    assert again.exit_code == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-s", "short"), "secretKey needs 7"),
        (("-s", "a-good-secret", "-t", "T=READ"), "none of DENY"),
        (("-s", "a-good-secret", "-w", "1.2"), "an address"),
        (("-s", "a-good-secret", "--rateLimits", "all=1"), "rateLimits: 'all=1' is not NAME=NUMBER"),
    ],
)
def test_a_broker_says_what_is_wrong(
    cluster: Standalone, home: Path, options: tuple[str, ...], words: str
) -> None:
    result = run(cluster, "updateAclConfig", "-c", "DefaultCluster", "-a", "somebody", *options)

    assert result.exit_code == 1
    assert words in str(result.exception)


def test_tools_without_an_account_are_refused(cluster: Standalone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCKETMQ_HOME", raising=False)
    result = run(cluster, "clusterAclConfigVersion", "-c", "DefaultCluster")
    assert "No accessKey is configured" in str(result.exception)

    monkeypatch.setenv("COMETMQ_ACCESS_KEY", "adminer")
    monkeypatch.setenv("COMETMQ_SECRET_KEY", "secret-of-adminer")
    assert run(cluster, "clusterAclConfigVersion", "-c", "DefaultCluster").exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [("accessKey: [", "tools.yml line 1"), ("accessKey: adminer", "secret_key = ''")],
)
def test_half_of_the_tools_account_is_refused(cluster: Standalone, home: Path, text: str, words: str) -> None:
    write(home / "conf" / "tools.yml", text)

    assert words in str(run(cluster, "clusterAclConfigVersion", "-c", "DefaultCluster").exception)
