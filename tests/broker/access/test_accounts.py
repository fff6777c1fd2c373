"""plain_acl.yml: Apache's own file is parsed, and a truncated file is refused."""

from __future__ import annotations

import pytest

from cometmq.broker.access.accounts import Account, Perm, account_of, read_acl, to_plain
from cometmq.errors import ConfigError
from cometmq.yaml_file import dump

# The file of Apache's distribution, including its blanks and the null value.
EXAMPLE = b"""
globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.*

accounts:
  - accessKey: RocketMQ
    secretKey: 12345678
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - topicA=DENY
      - topicB=PUB|SUB
      - topicC = SUB
    groupPerms:
      # the group should convert to retry topic
      - groupA=DENY
    rateLimits: [send.messages=100, receive.bytes = 0]

  - accessKey: rocketmq2
    secretKey: 12345678
    whiteRemoteAddress: 192.168.1.*
    admin: true
dataVersion:
  - counter: 3
    timestamp: 1700000000000
"""


def test_apaches_example_is_understood() -> None:
    found = read_acl("plain_acl.yml", EXAMPLE)

    one, two = found.accounts
    assert [pattern.text for pattern in found.white] == ["10.10.103.*", "192.168.0.*"]
    assert (one.access_key, one.secret_key, one.white, one.admin) == ("RocketMQ", "12345678", None, False)
    assert one.default_topic.perm == Perm.DENY
    assert one.default_group.perm == Perm.SUB
    assert {name: rule.perm for name, rule in one.topics.items()} == {
        "topicA": Perm.DENY, "topicB": Perm.PUB | Perm.SUB, "topicC": Perm.SUB,
    }  # fmt: skip
    assert one.rates == {"send.messages": "100", "receive.bytes": "0"}
    assert "rateLimits" not in to_plain(two)
    assert two.admin
    assert two.white is not None
    assert two.white.matches("192.168.1.7")
    assert found.version is not None
    assert found.version.counter == 3


def test_an_account_written_back_is_the_same() -> None:
    accounts = read_acl("plain_acl.yml", EXAMPLE).accounts
    again = read_acl("x.yml", dump({"accounts": [to_plain(account) for account in accounts]})).accounts

    assert [to_plain(account) for account in again] == [to_plain(account) for account in accounts]


def account(more: str) -> bytes:
    return f"accounts:\n- accessKey: somebody\n  secretKey: 12345678\n{more}".encode()


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"", 1, "empty"),
        (
            account("  rateLimits: [send.all=1]"),
            4,
            "rateLimits: 'send.all=1' is not NAME=NUMBER with one of send.m",
        ),
        (account("  rateLimits: [send.bytes=1, send.bytes=2]"), 4, "at most once"),
        (account("  rateLimits: [send.bytes=1.5]"), 4, "a whole number per second up to 1000000000000"),
        (b"- 1", 1, "must be a mapping"),
        (b"account: []", 1, "did you mean accounts"),
        (b"accounts: x", 1, "expected a list"),
        (b"accounts:\n- accessKey: somebody", 2, "no secretKey"),
        (b"accounts:\n- secretKey: 12345678", 2, "no accessKey"),
        (b"accounts:\n- accessKey: somebody\n  secretKey: 123456", 3, "secretKey needs 7"),
        (b"accounts:\n- accessKey: some\n  secretKey: 12345678", 2, "accessKey needs 7"),
        (b"accounts:\n- accessKey: some body\n  secretKey: 12345678", 2, "blanks"),
        (b"accounts:\n- accessKey: somebody\n  secretKey:", 3, "secretKey needs 7"),
        (account("  admin: yes"), 4, "true or false"),
        (account("  defaultTopicPerm: PUBSUB"), 4, "none of DENY"),
        (account("  topicPerm: [a=PUB]"), 4, "did you mean topicPerms"),
        (account("  topicPerms: [a]"), 4, "NAME=PERMISSION"),
        (account("  topicPerms: [a=READ]"), 4, "none of DENY"),
        (account("  topicPerms: [a=PUB, a=SUB]"), 4, "twice"),
        (account("  whiteRemoteAddress: 10.1.2"), 4, "expected an address"),
        (account("- accessKey: somebody\n  secretKey: 12345678"), 4, "twice"),
        (account("dataVersion: [{counter: x}]"), 4, "a number"),
        (b"globalWhiteRemoteAddresses: [1.2.3]", 1, "expected an address"),
        (b"accounts: &a [*a]", 1, "anchors"),
        (b"accounts: !!python/object/apply:os.system [id]", 1, "tags"),
        (b"accounts:" + b" [" * 1000, 1, "nested deeper"),
        (b"accounts: [" + b"x," * 60_000 + b"]", 1, "more than 50000"),
        (b"#" * ((1 << 20) + 1), 1, "at most 1048576"),
    ],
)
def test_half_a_file_is_refused_with_its_line(data: bytes, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_acl("plain_acl.yml", data)

    assert words in str(caught.value)
    assert caught.value.where == f"plain_acl.yml line {line}"
    assert "12345678" not in str(caught.value)
    assert "123456" not in str(caught.value)


def test_an_account_made_from_values_is_checked_like_one_in_a_file() -> None:
    plain = {"accessKey": "somebody", "secretKey": "12345678", "admin": True, "topicPerms": ["T=PUB"]}

    assert account_of(plain).topics["T"].perm == Perm.PUB
    with pytest.raises(ConfigError, match="none of DENY"):
        account_of({**plain, "topicPerms": ["T=X"]})


def test_an_account_does_not_show_its_secret() -> None:
    assert repr(Account(access_key="somebody", secret_key="12345678")) == "Account('somebody')"


@pytest.mark.parametrize(
    "line",
    [
        "- {accessKey: account1, secretKey:the-secret}",
        "- {accessKey: account1, secretKey=the-secret: x}",
        "- {accessKey: account1, secretKey:the-secret, secretKey:the-secret}",
        "- {accessKey: account1, secretKey: 'the-secret",
        "- {accessKey: account1, secretKey: [the-secret]}",
        "- {accessKey: account1, secretKey: &a the-secret, admin: *a}",
    ],
)
def test_no_complaint_shows_a_secret(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_acl("plain_acl.yml", f"accounts:\n{line}\n".encode())
    assert "the-secret" not in str(refused.value)


def test_files_that_would_take_a_machine_down_are_refused_early() -> None:
    bomb = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"b%d: &b%d [*a,*a]\n" % (n, n) for n in range(99))
    for data, words in (
        (bomb, "anchors"),
        (b"accounts: " + b"[" * 50_000, "deep|YAML"),
        (b"accounts:\n" + b"- x\n" * 60_000, "more than 50000"),
        (b"#" * (1 << 20) + b"#", "bytes"),
        (b"accounts: []\naccounts: []\n", "twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_acl("plain_acl.yml", data)
