"""The check of each request of a broker with aclEnable, in front of the handlers (docs/security.md, Access).

Without aclEnable there is no guard, and handlers are called as they are.
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
from cometmq.remoting import Connection, Handler, LogBudget

log = logs.logger(__name__)

LOOK_S = 1.0
"""How often the files are looked at."""
REFUSED = "org.apache.rocketmq.acl.common.AclException: "
"""What Apache's 4.9 says in front of a refusal; clients know it by that."""


CheckTopic = Callable[[Connection, Frame, str], None]
"""Raises CommandError unless the account of a request, let in already, may do something with a topic that
only its handler knows."""


class Guard:
    """Lets requests in or refuses them. Made inside the running loop."""

    def __init__(self, files: AclFiles, policy: Policy) -> None:
        self.files = files
        self.policy = policy
        self.lock = asyncio.Lock()
        """Held while a thread works with the files."""
        self.refused = 0
        self._budget = LogBudget()
        self._accounts: dict[Connection, str | None] = {}
        """Connections of clients, and the account that has signed the last heartbeat on each."""
        loop = asyncio.get_running_loop()
        self._looks = Periodic(loop, LOOK_S, self.look, name="look at the files of accounts")

    def start(self) -> None:
        """Begin to look whether the files have changed."""
        self._looks.start()

    async def stop(self) -> None:
        await self._looks.stop()

    async def look(self) -> None:
        """Take up the files if they have changed."""
        async with self.lock:
            policy = await asyncio.to_thread(self.files.reload)
            if policy is not None:
                self.policy = policy

    # -- requests to this broker

    def guarded(self, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
        """The handlers, each behind the check."""
        return {code: self._before(handler) for code, handler in handlers.items()}

    def _before(self, handler: Handler) -> Handler:
        def checked(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
            self.check(connection, frame)
            return handler(connection, frame)

        return checked

    def check(self, connection: Connection, frame: Frame) -> None:
        """Raises CommandError for a request that is not let in."""
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
        self.refused += 1
        if self._budget.allows():
            log.warning("request %d of %s is refused: %s", frame.code, connection.peer, verdict.reason)
        if compat.is_5x(frame.version):
            raise CommandError(ResponseCode.NO_PERMISSION, verdict.reason)
        raise CommandError(ResponseCode.SYSTEM_ERROR, REFUSED + verdict.reason)

    def check_read(self, connection: Connection, frame: Frame, topic: str) -> None:
        """For requests that name a message by its place: see CheckTopic."""
        self._check_topic(connection, frame, topic_right(Perm.SUB, topic))

    def check_write(self, connection: Connection, frame: Frame, topic: str) -> None:
        """For requests that end the transaction of a message: see CheckTopic."""
        self._check_topic(connection, frame, topic_right(Perm.PUB, topic))

    def _check_topic(self, connection: Connection, frame: Frame, right: Right) -> None:
        access_key = (frame.ext or {}).get(ACCESS_KEY)
        self._answer(connection, frame, self._decide(access_key, connection, right))

    def _decide(self, access_key: str | None, connection: Connection, right: Right) -> Verdict:
        return self.policy.decide(access_key, lambda: [right], host_of(connection), lambda _: True)

    # -- connected clients

    def may_write(self, connection: Connection, topic: str) -> bool:
        """Whether a client may send to a topic, by the account of its heartbeats."""
        return self._decide(self._accounts.get(connection), connection, topic_right(Perm.PUB, topic)).allowed

    def same_account(self, connection: Connection, other: Connection) -> bool:
        """Whether the heartbeats of two clients are of one account."""
        return self._accounts.get(connection) == self._accounts.get(other)

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self._accounts.pop(connection, None)

    # -- requests of this broker

    def sign(self, frame: Frame) -> None:
        """Sign a request to a master, which has the same accounts, as the first admin. Name servers ask for
        no signature, and could use it elsewhere."""
        admin = self.policy.first_admin
        if admin is not None and frame.code not in NAMESRV_REQUESTS:
            sign(frame, Credentials(admin.access_key, admin.secret_key))


def host_of(connection: Connection) -> str:
    """The address of a peer, without its port."""
    return connection.peer.rpartition(":")[0]


async def guard_of(config: BrokerConfig) -> Guard | None:
    """The guard that the settings ask for. Raises ConfigError."""
    if not config.acl_enable:
        return None
    if config.filter_server_nums:
        expected = "0 with aclEnable: filter servers would give messages to whoever asks"
        raise ConfigError("filterServerNums", str(config.filter_server_nums), expected)
    home = config.rocketmq_home or os.environ.get("ROCKETMQ_HOME", "")
    files = AclFiles(conf_directory(home, config.broker_config_path))
    try:
        policy = await asyncio.to_thread(files.load)
    except OSError as error:
        expected = f"files of accounts that can be read ({error})"
        raise ConfigError("aclEnable", "true", expected) from None
    if policy.first_admin is None:
        log.warning("no account below %s is an admin: nobody can administer this broker", files.conf)
    return Guard(files, policy)
