"""The access check of a broker with `aclEnable` before it handles a request (docs/security.md, Access).

Without `aclEnable` there is no guard, and requests go to their handlers directly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

from cometmq import logs
from cometmq.broker.access.accounts import Account, Perm
from cometmq.broker.access.decision import Policy, Verdict
from cometmq.broker.access.files import AclFiles, conf_directory
from cometmq.broker.access.rights import Right, Rights, needed, topic_right
from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import CommandError, ConfigError
from cometmq.periodic import Periodic
from cometmq.protocol.acl import ACCESS_KEY, Credentials, is_signed, sign
from cometmq.protocol.codes import NAMESRV_REQUESTS, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler

log = logs.logger(__name__)

FILE_CHECK_INTERVAL_S = 1.0
"""The interval, in seconds, between two checks of the ACL files for changes."""
REFUSED = "org.apache.rocketmq.acl.common.AclException: "
"""The first words of the remark with which Apache's 4.9 broker denies access. Clients look for them."""


class Guard:
    """Allows or refuses requests by the current policy. Must be created in a running event loop."""

    def __init__(self, files: AclFiles, policy: Policy) -> None:
        self.files = files
        self.policy = policy
        self.on_policy: Callable[[], None] = lambda: None
        """Called after another policy was put into force."""
        self.lock = asyncio.Lock()
        """A lock that a task must hold while a thread reads or writes the ACL files."""
        self.refused = 0
        self._log_limit = logs.LogLimiter()
        self._accounts: dict[Connection, str | None] = {}
        """The access key in the last heartbeat on each connection."""
        loop = asyncio.get_running_loop()
        self._looks = Periodic(loop, FILE_CHECK_INTERVAL_S, self.reload, name="check of the account files")

    def start(self) -> None:
        """Start the periodic check of the ACL files for changes."""
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def reload(self) -> None:
        """Put a new policy into force if the ACL files have changed."""
        async with self.lock:
            policy = await asyncio.to_thread(self.files.reload)
            if policy is not None:
                self.use(policy)

    def use(self, policy: Policy) -> None:
        """Put a policy into force."""
        self.policy = policy
        self.on_policy()

    # -- requests to this broker

    def guarded(self, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
        """Return handlers that check the sender's rights and then call the original handlers."""
        return {code: self._before(handler) for code, handler in handlers.items()}

    def _before(self, handler: Handler) -> Handler:
        def checked(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
            self.check(connection, frame)
            return handler(connection, frame)

        return checked

    def check(self, connection: Connection, frame: Frame) -> None:
        """Raise CommandError if the policy does not allow the request."""
        ext = frame.ext or {}

        def signed(account: Account) -> bool:
            return is_signed(account.secret_key, ext, frame.body)

        def rights() -> Rights | None:
            return needed(frame)

        access_key = ext.get(ACCESS_KEY)
        self._answer(connection, frame, self.policy.decide(access_key, rights, host_of(connection), signed))
        if frame.code == RequestCode.HEART_BEAT:
            self._accounts[connection] = access_key

    def _answer(self, connection: Connection, frame: Frame, verdict: Verdict) -> None:
        if verdict.allowed:
            return
        self.note_refusal(f"request {frame.code}", connection.peer, verdict)
        if compat.is_5x(frame.version):
            raise CommandError(ResponseCode.NO_PERMISSION, verdict.reason)
        raise CommandError.failed(REFUSED + verdict.reason)

    def note_refusal(self, what: str, peer: str, verdict: Verdict) -> None:
        """Count and log a refused request."""
        self.refused += 1
        if self._log_limit.allows():
            log.warning("%s from %s refused: %s", what, peer, verdict.reason)

    def check_read(self, connection: Connection, frame: Frame, topic: str | None) -> None:
        """Check the right to read a topic's message. If it is uncertain (None), only admins have it."""
        self._check_topic(connection, frame, None if topic is None else topic_right(Perm.SUB, topic))

    def is_admin(self, connection: Connection, frame: Frame) -> bool:
        """Return whether the account of an allowed request may administer the broker."""
        return self._decide((frame.ext or {}).get(ACCESS_KEY), connection, None).allowed

    def check_write(self, connection: Connection, frame: Frame, topic: str | None) -> None:
        """Check the right to commit or roll back a transaction of `topic`. Raises CommandError."""
        self._check_topic(connection, frame, None if topic is None else topic_right(Perm.PUB, topic))

    def _check_topic(self, connection: Connection, frame: Frame, right: Right | None) -> None:
        access_key = (frame.ext or {}).get(ACCESS_KEY)
        self._answer(connection, frame, self._decide(access_key, connection, right))

    def _decide(self, access_key: str | None, connection: Connection, right: Right | None) -> Verdict:
        rights = None if right is None else [right]
        return self.policy.decide(access_key, lambda: rights, host_of(connection), lambda _: True)

    # -- connected clients

    def may_write(self, connection: Connection, topic: str) -> bool:
        """Return whether the account of a client's last heartbeat may send to a topic."""
        return self._decide(self._accounts.get(connection), connection, topic_right(Perm.PUB, topic)).allowed

    def same_account(self, connection: Connection, other: Connection) -> bool:
        """Return whether the last heartbeats of two clients have the same access key."""
        return self._accounts.get(connection) == self._accounts.get(other)

    def closed(self, connection: Connection) -> None:
        """Forget the ACL account of a closed connection."""
        self._accounts.pop(connection, None)

    # -- requests of this broker

    def sign(self, frame: Frame) -> None:
        """Sign a request to the master as the first admin account. The master must have the same account.

        Requests to name servers are not signed: a name server does not check signatures, and could misuse the
        signatures that it receives.
        """
        admin = self.policy.first_admin
        if admin is not None and frame.code not in NAMESRV_REQUESTS:
            sign(frame, Credentials(admin.access_key, admin.secret_key))


def host_of(connection: Connection) -> str:
    """Return the address of a peer without its port."""
    return connection.peer.rpartition(":")[0]


async def guard_of(config: BrokerConfig) -> Guard:
    """Read the ACL files, and create the guard. Raises ConfigError for an invalid file or setting."""
    if config.filter_server_nums:
        expected = "0 with aclEnable: filter servers would send messages to any client"
        raise ConfigError("filterServerNums", str(config.filter_server_nums), expected)
    home = config.rocketmq_home or os.environ.get("ROCKETMQ_HOME", "")
    files = AclFiles(conf_directory(home, config.broker_config_path))
    try:
        policy = await asyncio.to_thread(files.load)
    except OSError as error:
        expected = f"files of accounts that can be read ({error})"
        raise ConfigError("aclEnable", "true", expected) from None
    if policy.first_admin is None:
        log.warning("no account in %s is an admin, so nobody can administer this broker", files.conf)
    return Guard(files, policy)
