"""Account files: discovery, merging, reloading after changes, and complete rewriting."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from cometmq.broker.access.accounts import account_of, read_acl
from cometmq.broker.access.addresses import AddressPattern
from cometmq.broker.access.decision import Policy
from cometmq.broker.access.files import AclFiles, conf_directory
from cometmq.errors import ConfigError


def accounts(*keys: str, more: str = "") -> str:
    lines = [f"- {{accessKey: {key}, secretKey: 'secret-of-{key}', admin: true}}" for key in keys]
    return "\n".join(["accounts:", *lines, more])


def reloaded(files: AclFiles) -> Policy | None:
    """Return the policy after two checks for changes."""
    assert files.reload() is None
    return files.reload()


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write(tmp_path / "plain_acl.yml", accounts("account1"))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(".beside")  # a new inode shows the change even if the mtime is equal
    beside.write_text(text)
    beside.chmod(0o600)
    beside.replace(path)


def test_all_files_below_acl_count_too(conf: Path) -> None:
    write(conf / "acl" / "a.yml", accounts("account2"))
    write(conf / "acl" / "deep" / "b.yaml", accounts("account3"))
    write(conf / "acl" / "tools.yml", "accessKey: x")
    write(conf / "acl" / "notes.txt", "none of them")
    write(conf / "acl" / "..data" / "a.yml", accounts("account2"))  # how Kubernetes mounts secrets

    policy = AclFiles(str(conf)).load()

    assert [key for n in range(1, 5) if policy.account(key := f"account{n}")] == [
        "account1",
        "account2",
        "account3",
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "there are none"),
        ({"plain_acl.yml": "accounts: []"}, "there are none"),
        ({"plain_acl.yml": "accounts:\n- accessKey: account1"}, "plain_acl.yml line 2: aclEnable = 'true'"),
        ({"plain_acl.yml": accounts("account1"), "acl/b.yml": accounts("account1")}, "one file that has it"),
        ({f"acl/{n}.yml": accounts(f"account{n}") for n in range(100)}, "at most 64 files"),
    ],
)
def test_half_a_set_of_files_is_refused(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)

    with pytest.raises(ConfigError) as caught:
        AclFiles(str(tmp_path)).load()

    assert words in str(caught.value)


def test_a_white_list_alone_is_enough(tmp_path: Path) -> None:
    write(tmp_path / "plain_acl.yml", "globalWhiteRemoteAddresses: ['*']")

    assert len(AclFiles(str(tmp_path)).load()) == 0


def test_changes_are_taken_up_and_broken_files_are_not(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = AclFiles(str(conf))
    files.load()
    assert files.reload() is None

    write(conf / "plain_acl.yml", accounts("account1", "account2"))
    policy = reloaded(files)
    assert policy is not None
    assert policy.account("account2") is not None

    write(conf / "plain_acl.yml", "accounts: [")
    assert [files.reload(), files.reload(), files.reload()] == [None] * 3
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert "keeps its previous accounts" in caplog.text
    assert "secret-of" not in caplog.text

    (conf / "plain_acl.yml").unlink()
    assert files.reload() is None

    write(conf / "acl" / "b.yml", accounts("account4"))
    policy = reloaded(files)
    assert policy is not None
    assert policy.account("account1") is None


def test_what_a_request_has_read_that_failed_is_still_taken_up(conf: Path) -> None:
    files = AclFiles(str(conf))
    files.load()
    write(conf / "plain_acl.yml", accounts("account2"))
    with pytest.raises(KeyError):
        files.delete("unknown")
    assert files.account("account1") is None
    policy = reloaded(files)
    assert policy is not None
    assert policy.account("account1") is None
    assert files.reload() is None


def test_a_file_that_is_being_written_is_not_taken_up(conf: Path) -> None:
    """The first half of the file is valid and grants an admin without the limits that follow."""
    text = "accounts:\n- accessKey: account1\n  secretKey: secret-1\n  admin: true\n"
    rest = "  topicPerms: [T=SUB]\n"
    (conf / "plain_acl.yml").write_text(text + rest)
    files = AclFiles(str(conf))
    assert files.load().first_admin is None

    (conf / "plain_acl.yml").write_text(text)
    assert files.reload() is None
    with (conf / "plain_acl.yml").open("a") as file:
        file.write(rest)
    assert files.reload() is None
    policy = files.reload()
    assert policy is not None
    assert policy.first_admin is None


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_refused_and_not_waited_for(conf: Path, kind: str) -> None:
    path = conf / "plain_acl.yml"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()

    with pytest.raises(ConfigError, match="this is none"):
        AclFiles(str(conf)).load()


def test_a_file_that_others_may_read_is_said(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    (conf / "plain_acl.yml").chmod(0o644)

    AclFiles(str(conf)).load()

    assert "chmod 600" in caplog.text


def test_accounts_are_written_where_they_are(conf: Path) -> None:
    write(conf / "acl" / "b.yml", accounts("account2", more="globalWhiteRemoteAddresses: [1.2.3.4]"))
    (conf / "acl" / "b.yml").chmod(0o644)
    files = AclFiles(str(conf))
    files.load()

    files.put(account_of({"accessKey": "account2", "secretKey": "another-secret"}))
    policy = files.put(account_of({"accessKey": "account3", "secretKey": "secret-3"}))

    first, second = (read_acl("f", (conf / name).read_bytes()) for name in ("plain_acl.yml", "acl/b.yml"))
    assert [each.access_key for each in first.accounts] == ["account1", "account3"]
    assert [each.secret_key for each in second.accounts] == ["another-secret"]
    assert [pattern.text for pattern in second.white] == ["1.2.3.4"]
    assert policy.account("account3") is not None
    assert os.stat(conf / "acl" / "b.yml").st_mode & 0o777 == 0o600
    assert {path: version.counter for path, version in files.versions.items()} == {
        str(conf / "plain_acl.yml"): 1,
        str(conf / "acl" / "b.yml"): 1,
    }
    assert files.reload() is None  # the broker's own write is not a change
    assert sorted(each.name for each in conf.rglob("*")) == ["acl", "b.yml", "plain_acl.yml"]


def test_accounts_and_white_lists_are_removed_and_replaced(conf: Path) -> None:
    files = AclFiles(str(conf))
    files.load()
    files.put(account_of({"accessKey": "account2", "secretKey": "secret-2"}))

    assert files.delete("account1").account("account1") is None
    policy = files.set_white([AddressPattern("10.0.0.*")], "")
    assert policy.decide(None, list, "10.0.0.1", lambda _account: False).allowed
    with pytest.raises(KeyError):
        files.delete("account1")
    with pytest.raises(KeyError):
        files.set_white([], str(conf / "other.yml"))
    with pytest.raises(ConfigError, match="at least one account"):
        files.delete("account2")
    assert read_acl("f", (conf / "plain_acl.yml").read_bytes()).version.counter == 3  # type: ignore[union-attr]


def test_a_change_by_hand_is_not_lost_by_a_request(conf: Path) -> None:
    files = AclFiles(str(conf))
    files.load()
    write(conf / "plain_acl.yml", accounts("account1", "account2"))

    policy = files.put(account_of({"accessKey": "account3", "secretKey": "secret-3"}))

    assert policy.account("account2") is not None


def test_a_linked_file_is_replaced_behind_its_link(conf: Path) -> None:
    write(conf / "real" / "plain_acl.yml", accounts("account1"))
    (conf / "plain_acl.yml").unlink()
    (conf / "plain_acl.yml").symlink_to("real/plain_acl.yml")
    files = AclFiles(str(conf))
    files.load()

    files.put(account_of({"accessKey": "account2", "secretKey": "secret-2"}))

    assert (conf / "plain_acl.yml").is_symlink()
    assert b"account2" in (conf / "real" / "plain_acl.yml").read_bytes()


def test_accounts_are_in_conf_of_the_home_or_beside_the_settings() -> None:
    assert conf_directory("/opt/rocketmq", "/etc/broker.conf") == "/opt/rocketmq/conf"
    assert conf_directory("", "/etc/cometmq/broker.conf") == "/etc/cometmq"
    with pytest.raises(ConfigError, match="nothing says where accounts are"):
        conf_directory("", "")
