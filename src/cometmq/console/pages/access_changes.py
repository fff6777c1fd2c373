"""Accounts and white lists of brokers changed: asked for, and done at every broker of a cluster."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

from cometmq.admin.acl import Accounts
from cometmq.client.cluster.options import environment_credentials
from cometmq.console.frame.actions import Action, PartlyDone, Progress, act
from cometmq.console.frame.forms import Form
from cometmq.console.frame.page import View
from cometmq.console.frame.secret import show_secret
from cometmq.errors import CometError
from cometmq.protocol.acl import MAX_KEY_LENGTH, MIN_KEY_LENGTH
from cometmq.protocol.bodies import AclAccount
from cometmq.protocol.headers import CreateAccessConfigRequestHeader

PERMS = ("DENY", "PUB", "SUB", "PUB|SUB")
LIST_MAX = 60_000
PATTERN_MAX = 1000
_SECRET_BYTES = 24


async def ask_account(view: View, present: AclAccount | None) -> None:
    """Ask for an account, or for what is to be different of one, and write it. A secret that is made here is
    shown once."""
    clusters = sorted((await view.admin.cluster_info()).cluster_addr_table)
    before = present or AclAccount(default_topic_perm="DENY", default_group_perm="DENY")
    title = view.t("access.add") if present is None else view.t("access.change_of", name=before.access_key)
    form = Form(view, title, [view.t("access.form_says")])
    name = form.text(
        "access.account", before.access_key, most=MAX_KEY_LENGTH, needed=True,
        check=lambda said: _key_problem(view, said),
    )  # fmt: skip
    name.set_enabled(present is None)
    secret = form.text(
        "access.secret_new" if present is None else "access.secret_kept", most=MAX_KEY_LENGTH,
        check=lambda said: _key_problem(view, said),
    )  # fmt: skip
    secret.props("type=password autocomplete=new-password")
    cluster = form.choice("access.cluster", clusters, clusters[0] if clusters else None)
    yes_no = {"no": view.t("common.no"), "yes": view.t("common.yes")}
    admin = form.choice("access.admin", yes_no, "yes" if before.admin else "no")
    topic = form.choice("access.default_topic", PERMS, before.default_topic_perm)
    group = form.choice("access.default_group", PERMS, before.default_group_perm)
    topics = form.text("access.topics_list", "\n".join(before.topic_perms), most=LIST_MAX, lines=True)
    groups = form.text("access.groups_list", "\n".join(before.group_perms), most=LIST_MAX, lines=True)
    white = form.text("access.white", before.white_remote_address, most=PATTERN_MAX)
    if not await form.asked():
        return
    key, given = str(name.value).strip(), str(secret.value or "")
    made = secrets.token_urlsafe(_SECRET_BYTES) if present is None and not given else ""
    header = CreateAccessConfigRequestHeader(
        access_key=key,
        secret_key=given or made or None,
        white_remote_address=str(white.value or "").strip(),
        admin=admin.value == "yes",
        default_topic_perm=str(topic.value),
        default_group_perm=str(group.value),
        topic_perms=_joined(topics.value),
        group_perms=_joined(groups.value),
    )
    done = await _everywhere(
        view, "acl.put", key, str(cluster.value),
        [view.t("access.will_put", name=key, cluster=str(cluster.value))],
        lambda addr: Accounts(view.admin).put(addr, header),
        details={
            "admin": str(header.admin),
            "topics": header.topic_perms or "",
            "groups": header.group_perms or "",
            "default": f"{header.default_topic_perm} {header.default_group_perm}",
            "white": header.white_remote_address or "", "secret": "new" if header.secret_key else "kept",
        },
    )  # fmt: skip
    if done and made:
        await show_secret(view, view.t("access.secret_of", name=key), made)


async def ask_deletion(view: View, key: str) -> None:
    """Delete an account."""
    clusters = sorted((await view.admin.cluster_info()).cluster_addr_table)
    form = Form(view, view.t("access.delete_of", name=key))
    cluster = form.choice("access.cluster", clusters, clusters[0] if clusters else None)
    if not await form.asked():
        return
    says = [view.t("access.will_delete", name=key, cluster=str(cluster.value))]
    own = environment_credentials()
    if own is not None and own.access_key == key:
        says.append(view.t("access.own"))
    await _everywhere(
        view, "acl.delete", key, str(cluster.value), says,
        lambda addr: Accounts(view.admin).delete(addr, key), danger=True,
    )  # fmt: skip


async def ask_white(view: View) -> None:
    """Replace the global white list of the default file."""
    clusters = sorted((await view.admin.cluster_info()).cluster_addr_table)
    form = Form(view, view.t("access.set_white"), [view.t("access.white_says")])
    cluster = form.choice("access.cluster", clusters, clusters[0] if clusters else None)
    patterns = form.text("access.patterns", most=LIST_MAX, lines=True)
    if not await form.asked():
        return
    wanted = _joined(patterns.value).split(",")
    name = str(cluster.value)
    await _everywhere(
        view, "acl.white", name, name,
        [view.t("access.will_white", cluster=name, patterns=", ".join(wanted) or view.t("common.nothing"))],
        lambda addr: Accounts(view.admin).set_white(addr, wanted),
        details={"patterns": ",".join(wanted)}, danger=True,
    )  # fmt: skip


async def _everywhere(
    view: View,
    name: str,
    target: str,
    cluster: str,
    says: Sequence[str],
    change: Callable[[str], Awaitable[None]],
    *,
    details: Mapping[str, str] | None = None,
    danger: bool = False,
) -> bool:
    """Do it at each broker of a cluster, slaves too; those that refuse are told at the end."""

    async def work(progress: Progress) -> None:
        addrs, problems = await Accounts(view.admin).addrs(cluster), []
        for number, addr in enumerate(addrs):
            progress.say(view.t("access.at_broker", addr=addr), number / len(addrs))
            try:
                await change(addr)
            except CometError as error:
                problems.append(str(error))
        if problems:
            raise PartlyDone("; ".join(problems))

    return await act(
        view,
        Action(
            name=name, target=target, says=says, work=work, danger=danger, refresh=["access"],
            details={"cluster": cluster, **(details or {})},
        ),
    )  # fmt: skip


def _key_problem(view: View, said: str) -> str | None:
    """What is wrong with an account's name or secret."""
    good = len(said) >= MIN_KEY_LENGTH and said.isprintable() and " " not in said
    return None if good else view.t("access.bad_key", least=MIN_KEY_LENGTH)


def _joined(said: object) -> str:
    """Lines, or a list with commas, as a list with commas."""
    return ",".join(item.strip() for item in str(said or "").replace("\n", ",").split(",") if item.strip())
