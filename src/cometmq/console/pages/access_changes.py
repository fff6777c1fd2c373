"""Changes that the console makes to the accounts and white lists of every broker of a cluster."""

from __future__ import annotations

import secrets

from cometmq.admin import operations
from cometmq.admin.operations import Operation
from cometmq.client.cluster.options import environment_credentials
from cometmq.console.pages.targets import cluster_choice
from cometmq.console.widgets.actions import run_operation, show_secret
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.page import View
from cometmq.protocol.acl import MAX_KEY_LENGTH, MIN_KEY_LENGTH
from cometmq.protocol.bodies import AclAccount
from cometmq.protocol.headers import CreateAccessConfigRequestHeader

FEED = "access"
PERMS = ("DENY", "PUB", "SUB", "PUB|SUB")
MAX_LIST_LENGTH = 60_000
MAX_PATTERN_LENGTH = 1000
_SECRET_BYTES = 24


async def ask_account(view: View, present: AclAccount | None) -> None:
    """Ask the user for the values of an account, and write the account. A generated secret is shown once.

    `present` is the account to change, or None for a new account.
    """
    before = present or AclAccount(default_topic_perm="DENY", default_group_perm="DENY")
    title = view.t("access.add") if present is None else view.t("access.change_of", name=before.access_key)
    form = Form(view, title, [view.t("access.form_says")])

    def check(text: str) -> str | None:
        valid = len(text) >= MIN_KEY_LENGTH and text.isprintable() and " " not in text
        return None if valid else view.t("access.bad_key", least=MIN_KEY_LENGTH)

    name = form.text(
        "access.account", before.access_key, max_length=MAX_KEY_LENGTH, required=True, check=check
    )
    name.set_enabled(present is None)
    secret = form.text(
        "access.secret_new" if present is None else "access.secret_kept", max_length=MAX_KEY_LENGTH,
        check=check,
    )  # fmt: skip
    secret.props("type=password autocomplete=new-password")
    cluster = await cluster_choice(view, form)
    admin = form.yes_no("access.admin", before.admin)
    topic = form.choice("access.default_topic", PERMS, before.default_topic_perm)
    group = form.choice("access.default_group", PERMS, before.default_group_perm)
    topics, groups = (
        form.text(key, "\n".join(perms), max_length=MAX_LIST_LENGTH, lines=True)
        for key, perms in (
            ("access.topics_list", before.topic_perms), ("access.groups_list", before.group_perms),
        )
    )  # fmt: skip
    white = form.text("access.white", before.white_remote_address, max_length=MAX_PATTERN_LENGTH)
    if not await form.submitted():
        return
    key, given = str(name.value).strip(), str(secret.value or "")
    generated = secrets.token_urlsafe(_SECRET_BYTES) if present is None and not given else ""
    header = CreateAccessConfigRequestHeader(
        access_key=key,
        secret_key=given or generated or None,
        white_remote_address=str(white.value or "").strip(),
        admin=admin.value == "yes",
        default_topic_perm=str(topic.value),
        default_group_perm=str(group.value),
        topic_perms=_joined(topics.value),
        group_perms=_joined(groups.value),
    )

    async def operation() -> Operation:
        return operations.put_account(view.admin, await view.admin.addrs_in(str(cluster.value)), header)

    accepted: list[str] = []
    await run_operation(
        view, operation,
        [view.t("access.will_put", name=key, cluster=str(cluster.value))],
        {
            "cluster": str(cluster.value),
            "admin": str(header.admin),
            "topics": header.topic_perms or "",
            "groups": header.group_perms or "",
            "default": f"{header.default_topic_perm} {header.default_group_perm}",
            "white": header.white_remote_address or "", "secret": "new" if header.secret_key else "kept",
        },
        accepted=accepted, refresh=[FEED],
    )  # fmt: skip
    # Show the secret even if some brokers failed: the others have stored it, and it cannot be shown later.
    if accepted and generated:
        await show_secret(view, view.t("access.secret_of", name=key), generated)


async def ask_deletion(view: View, key: str) -> None:
    """Ask the user for a cluster, and delete an account at the cluster's brokers."""
    form = Form(view, view.t("access.delete_of", name=key))
    cluster = await cluster_choice(view, form)
    if not await form.submitted():
        return
    effects = [view.t("access.will_delete", name=key, cluster=str(cluster.value))]
    own = environment_credentials()
    if own is not None and own.access_key == key:
        effects.append(view.t("access.own"))

    async def operation() -> Operation:
        return operations.delete_account(view.admin, await view.admin.addrs_in(str(cluster.value)), key)

    details = {"cluster": str(cluster.value)}
    await run_operation(view, operation, effects, details, refresh=[FEED])


async def ask_white_list(view: View) -> None:
    """Ask the user for a new global white list, and write it to the brokers' default ACL file."""
    form = Form(view, view.t("access.set_white"), [view.t("access.white_says")])
    cluster = await cluster_choice(view, form)
    patterns = form.text("access.patterns", max_length=MAX_LIST_LENGTH, lines=True)
    if not await form.submitted():
        return
    addresses = _joined(patterns.value).split(",")
    name, shown = str(cluster.value), ", ".join(addresses) or view.t("common.nothing")

    async def operation() -> Operation:
        return operations.set_white_list(view.admin, name, await view.admin.addrs_in(name), addresses)

    await run_operation(
        view, operation,
        [view.t("access.will_white", cluster=name, patterns=shown)],
        {"cluster": name, "patterns": ",".join(addresses)}, danger=True, refresh=[FEED],
    )  # fmt: skip


def _joined(text: object) -> str:
    """Replace the line ends of a text by commas, and remove empty items and spaces around items."""
    items = str(text or "").replace("\n", ",").split(",")
    return ",".join(item.strip() for item in items if item.strip())
