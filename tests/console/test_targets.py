"""Operations of pages whose servers change while the confirmation is open, or of which some fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cometmq.console.base.errors import ConsoleError, PartlyDone
from cometmq.console.pages import access_changes, group, groups, topic, topics
from cometmq.console.widgets.actions import Action, ActionProgress
from cometmq.errors import CometError
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig

VALUES = {"topic.broker": "", "topics.type": "", "access.secret_new": "", "access.admin": "no"}


class FilledForm:
    """A form that is filled in and submitted."""

    def __init__(self, *_given: object) -> None:
        self.text = self.choice = self.number = self.yes_no = self.field

    def field(self, key: str, *_given: object, **_how: object) -> Any:
        field = SimpleNamespace(value=VALUES.get(key, "6"), set_enabled=lambda _on: None)
        field.props = lambda _props: field
        return field

    async def submitted(self) -> bool:
        return True


class ChangingCluster:
    """A view of a cluster with the masters `at`, by broker name."""

    def __init__(self) -> None:
        self.at = {"a": "127.0.0.1:1", "b": "127.0.0.1:2"}
        self.admin = admin = AsyncMock()
        admin.client.namesrv.addrs = ["127.0.0.1:9"]
        admin.clusters_of.return_value = ["C"]
        admin.cluster_info.return_value = SimpleNamespace(cluster_addr_table={"6": []})
        admin.master_addrs = admin.addrs_in = AsyncMock(side_effect=lambda _cluster: list(self.at.values()))
        admin.masters = AsyncMock(
            side_effect=lambda names=None: {each: self.at[each] for each in names or self.at}
        )
        self.cluster = SimpleNamespace(
            topics=lambda: self.rows(TopicConfig()),
            groups=lambda: self.rows(SubscriptionGroupConfig(group_name="x")),
            lags=lambda: SimpleNamespace(latest=SimpleNamespace(value=None)),
        )  # fmt: skip

    def rows(self, config: object) -> Any:
        row = SimpleNamespace(name="x", configs=dict.fromkeys(self.at, config))
        return SimpleNamespace(
            fresh=AsyncMock(return_value=SimpleNamespace(value=SimpleNamespace(rows=[row])))
        )

    def t(self, key: str, **values: object) -> str:
        return f"{key} {values}"


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (access_changes, group, groups, topic, topics):
        monkeypatch.setattr(module, "Form", FilledForm)
    monkeypatch.setattr(ActionProgress, "report", lambda *_given: None)
    return ChangingCluster()


def when_confirmed(view: Any, meanwhile: Callable[[], object]) -> Callable[[Action, object], Awaitable[bool]]:
    """Return a method `run` of Action that executes it after something has happened."""

    async def run(action: Action, _view: object) -> bool:
        meanwhile()
        progress = ActionProgress.__new__(ActionProgress)
        progress._view = view  # noqa: SLF001 - its constructor needs a browser
        await action.work(progress)
        return True

    return run


OPERATIONS = {
    "topic.create": topics.create,
    "topic.change": lambda view: topic.change(view, "x"),
    "topic.delete": lambda view: topic.delete(view, "x"),
    "group.create": groups.create,
    "group.change": lambda view: group.change(view, "x"),
    "group.delete": lambda view: group.delete(view, "x"),
    "acl.put": lambda view: access_changes.ask_account(view, None),
    "acl.delete": lambda view: access_changes.ask_deletion(view, "x"),
    "acl.white": access_changes.ask_white_list,
}


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "leaves"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_is_refused_if_a_broker_joined_or_left_while_its_confirmation_was_open(
    view: Any, monkeypatch: pytest.MonkeyPatch, name: str, joins: bool
) -> None:
    def meanwhile() -> None:
        view.admin.method_calls.clear()
        if joins:
            view.at["c"] = "127.0.0.1:3"
        else:
            del view.at["b"]

    monkeypatch.setattr(Action, "run", when_confirmed(view, meanwhile))
    with pytest.raises(ConsoleError, match=r"common\.targets_changed .*127\.0\.0\.1:1") as refused:
        await OPERATIONS[name](view)
    assert ("127.0.0.1:3" in str(refused.value)) is joins
    lookups = {"clusters_of", "master_addrs", "addrs_in", "masters", "topics"}
    assert {call[0] for call in view.admin.method_calls} <= lookups


@pytest.mark.parametrize("accepting", [["127.0.0.1:1"], []], ids=["one", "none"])
async def test_a_generated_secret_is_shown_if_any_broker_has_accepted_the_account(
    view: Any, monkeypatch: pytest.MonkeyPatch, accepting: list[str]
) -> None:
    async def put(addr: str, account: object) -> None:
        if addr not in accepting:
            raise CometError("it is down")

    view.admin.put_account = put
    executed = when_confirmed(view, lambda: None)

    async def run(action: Action, of: object) -> bool:
        with pytest.raises(PartlyDone, match="it is down"):
            await executed(action, of)
        return False

    monkeypatch.setattr(Action, "run", run)
    monkeypatch.setattr(access_changes, "show_secret", shown := AsyncMock())
    await access_changes.ask_account(view, None)
    assert shown.await_count == len(accepting)
