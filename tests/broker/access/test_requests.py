"""CometMQ's own account requests: required rights, and no secret in a response."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.broker.access.test_guard import guarded

from cometmq.protocol.bodies import AclAccounts
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import ExplainAccessRequestHeader, ExplainAccessResponseHeader


async def test_accounts_are_listed_to_admins_alone_and_without_secrets(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, peer, program, admin):
        for stranger in (peer, program):
            assert (await stranger.call(RequestCode.LIST_ACCOUNTS)).code != 0
        answer = await admin.call(RequestCode.LIST_ACCOUNTS)
        listed = AclAccounts.decode(answer.body)
        assert [account.access_key for account in listed.accounts] == ["adminer", "program"]
        assert listed.accounts[1].topic_perms == ["Orders=PUB|SUB", "In=SUB"]
        assert listed.accounts[1].default_topic_perm == "DENY"
        assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("user", "action", "resource", "allowed", "reason"),
    [
        ("program", "pub", "Orders", True, "topicPerms: Orders=PUB|SUB"),
        ("program", "pub", "topic:In", False, "No default permission for topic:In (topicPerms: In=SUB)"),
        ("program", "sub", "group:G", True, "groupPerms: G=SUB"),
        ("program", "admin", None, False, "Need admin permission, but accessKey=program is not"),
        ("adminer", "admin", None, True, "admin: true"),
        ("nobody", "pub", "Orders", False, "No acl config for nobody"),
    ],
)
async def test_the_rule_that_decides_is_told(
    tmp_path: Path, user: str, action: str, resource: str | None, allowed: bool, reason: str
) -> None:
    async with guarded(tmp_path) as (_, _peer, program, admin):
        header = ExplainAccessRequestHeader(user=user, action=action, resource=resource)
        answer = (await admin.call(RequestCode.EXPLAIN_ACCESS, header)).header(ExplainAccessResponseHeader)
        assert (answer.allowed, answer.reason) == (allowed, reason)
        assert (await program.call(RequestCode.EXPLAIN_ACCESS, header)).code != 0


async def test_what_is_no_action_or_resource_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, _peer, _program, admin):
        for action, resource in (("eat", "T"), ("pub", ""), ("admin", "T"), ("pub", "queue:T")):
            header = ExplainAccessRequestHeader(user="program", action=action, resource=resource or None)
            assert (await admin.call(RequestCode.EXPLAIN_ACCESS, header)).code == 1
