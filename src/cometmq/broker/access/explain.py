"""Explanations of permissions for people: `cometmq acl explain`, and request 21007."""

from __future__ import annotations

from cometmq.broker.access.accounts import Perm
from cometmq.broker.access.decision import Policy, Verdict
from cometmq.broker.access.rights import Rights, group_right, topic_right
from cometmq.errors import ConfigError

ACTIONS = ("pub", "sub", "admin")


def explained(policy: Policy, user: str, action: str, resource: str, host: str = "") -> Verdict:
    """Return the decision about an action, with the rule that decides.

    Args:
        policy: The accounts and white lists.
        user: The access key.
        action: One of ACTIONS.
        resource: `topic:NAME`, `group:NAME`, or NAME for a topic; "" with admin.
        host: The client's address, for white lists.

    Raises:
        ConfigError: The action or resource is invalid.
    """
    if action not in ACTIONS:
        raise ConfigError("ACTION", action, ", ".join(ACTIONS))
    kind, _, name = resource.rpartition(":")
    if kind not in ("", "topic", "group") or bool(name) == (action == "admin"):
        raise ConfigError("RESOURCE", resource, "topic:NAME or group:NAME, and none with admin")
    rights: Rights | None = None
    if action != "admin":
        perm = Perm.PUB if action == "pub" else Perm.SUB
        rights = [group_right(name) if kind == "group" else topic_right(perm, name)]
    return policy.decide(user, lambda: rights, host, lambda _account: True)
