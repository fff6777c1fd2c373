"""The clusters of a console, and the file of the clusters that administrators have added."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cometmq import logs
from cometmq.admin import Admin
from cometmq.client.cluster.options import ClientOptions, namesrv_addresses
from cometmq.console.base.cluster_feeds import ClusterFeeds
from cometmq.console.base.errors import ConsoleError
from cometmq.console.base.feeds import Feeds
from cometmq.errors import CometError
from cometmq.private import replace_private

log = logs.logger(__name__)

STARTED = "default"
"""The name of the cluster that the console was started with."""
MAX_CLUSTERS = 32
MAX_NAME_LENGTH, MAX_NAMESRV_LENGTH = 64, 1024
MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern of the name of a cluster. The characters are limited because a cookie contains the name."""


class ClusterError(ConsoleError):
    """A cluster cannot be shown, added, changed or removed."""


class _File(msgspec.Struct):
    """The content of `clusters.json`.

    Attributes:
        standard: The default cluster, which a browser shows until its user chooses a cluster.
        clusters: The name servers of each added cluster, by the cluster's name.
        signed: The names of those added clusters to which the console signs requests with its account.
    """

    standard: str = STARTED
    clusters: dict[str, Any] = {}
    signed: list[str] = []


class ClusterConnection:
    """The admin client of a cluster, and the feeds that the cluster's pages share.

    Attributes:
        signed: Whether requests are signed with the account from the console's environment.
        on_end: Functions to call when the cluster is removed or its settings are changed.
        ended: Whether the cluster was removed or changed. Pages that are still open must not change anything.
    """

    def __init__(self, name: str, namesrv: str, *, signed: bool) -> None:
        self.name = name
        self.namesrv = namesrv
        self.signed = signed
        self.admin = Admin(namesrv, options=None if signed else ClientOptions(access_key=""))
        self.feeds = Feeds()
        self.cluster = ClusterFeeds(self.admin, self.feeds)
        self.on_end: dict[object, Callable[[], None]] = {}
        self.ended = False

    async def close(self) -> None:
        """Notify the open pages of the cluster, and close its connections."""
        self.ended = True
        for end in list(self.on_end.values()):
            try:
                end()
            except Exception:
                log.exception("a page could not be notified that cluster %s is being closed", self.name)
        await self.admin.stop()


class Clusters:
    """All clusters of a console, by name. One change is made at a time.

    Args:
        path: The file with the added clusters.
        namesrv: The name servers of the cluster that the console was started with, as `host:port;host:port`.
    """

    def __init__(self, path: Path, namesrv: str) -> None:
        self._path = path
        self._changing = asyncio.Lock()
        # Invalid parts of the file (entries, signed flags, the default). They are written back unchanged,
        # until the user repairs them.
        self._refused: dict[str, Any] = {}
        self._signed: list[str] = []
        self._unusable_standard = ""
        self._reasons: dict[str, str] = {}
        self._unreadable = ""
        # The content of the file when the console last read or wrote it. None if there was no file.
        self._content: bytes | None = None
        self.standard = STARTED
        self.connections = {STARTED: ClusterConnection(STARTED, namesrv, signed=True)}

    @property
    def several(self) -> bool:
        """Whether the console shows more than one cluster."""
        return len(self.connections) > 1

    @property
    def problems(self) -> list[str]:
        """The reasons why the file of added clusters, or a part of it, cannot be used.

        Empty if there are none.
        """
        found = [self._unreadable] if self._unreadable else []
        found += [f"{self._path}: {reason}" for reason in self._reasons.values()]
        if self._unusable_standard:
            found.append(f"{self._path}: there is no cluster {self._unusable_standard!r} to be the default")
        return found

    async def start(self) -> None:
        """Read the file of added clusters, and start the clients of all clusters.

        An invalid file and invalid entries are ignored with a warning in the log; the file is not changed.
        """
        read = self._read()
        self._signed = read.signed
        for name, namesrv in read.clusters.items():
            try:
                addrs = _addresses(_legal(_changeable(name)), namesrv)
                self._check_room()
            except ClusterError as error:
                self._refused[name] = namesrv
                self._reasons[name] = f"entry {name!r} of clusters is ignored: {error}"
            else:
                self.connections[name] = ClusterConnection(name, addrs, signed=name in read.signed)
        if read.standard in self.connections:
            self.standard = read.standard
        else:
            self._unusable_standard = read.standard
        if not self._unreadable:
            for problem in self.problems:
                log.warning("%s", problem)
        for each in self.connections.values():
            await each.admin.start()

    def _read(self) -> _File:
        try:
            self._content = self._load()
            return _File() if self._content is None else msgspec.json.decode(self._content, type=_File)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError, ClusterError) as error:
            self._unreadable = f"{self._path} cannot be read: {error}"
            log.warning("%s; the console shows only cluster %s", self._unreadable, STARTED)
            return _File()

    def _load(self) -> bytes | None:
        """Return the content of the file, or None if it does not exist. Raises ClusterError, OSError."""
        if self._path.exists() and not self._path.is_file():
            # The check is needed because, for example, opening a named pipe would block.
            raise ClusterError("not a regular file")
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(content) > MAX_FILE_BYTES:
            raise ClusterError(f"the file has more than {MAX_FILE_BYTES} bytes")
        return content

    def _check_unedited(self) -> None:
        """Raise ClusterError if the file was changed after the console last read or wrote it."""
        try:
            unedited = self._load() == self._content
        except (OSError, ClusterError):
            unedited = False
        if not unedited:
            cure = "Nothing was done. Restart the console, which then uses the file as it is"
            raise ClusterError(f"{self._path} was changed outside this console. {cure}")

    async def stop(self) -> None:
        """Close the connections to all clusters."""
        async with self._changing:
            await asyncio.gather(*(each.close() for each in self.connections.values()))

    def find(self, name: str) -> ClusterConnection | None:
        """Return the cluster with a name, or None for an unknown name. "" stands for the default cluster."""
        return self.connections.get(name or self.standard)

    async def put(
        self, name: str, namesrv: str, *, shown: ClusterConnection | None = None, signed: bool = False
    ) -> None:
        """Add a cluster, or change an existing cluster. Raises ClusterError.

        Args:
            name: The name of the cluster.
            namesrv: The cluster's name servers, as `host:port;host:port`.
            shown: The cluster to change, as the page showed it; None to add a cluster. The change fails if
                another administrator has added, changed or removed the cluster since the page showed it.
            signed: Whether to sign requests to the cluster's brokers with the console's account.
        """
        addrs = _addresses(_legal(_changeable(name)), namesrv)
        async with self._changing:
            if shown is not None:
                self._check_shown(shown)
            elif name in self.connections:
                raise ClusterError(f"cluster {name} already exists")
            else:
                self._check_room()
            made = ClusterConnection(name, addrs, signed=signed)
            try:
                await made.admin.start()
                self._write(self._unusable_standard or self.standard, {**self.connections, name: made})
            except BaseException:
                await made.close()
                raise
            self.connections[name] = made
            self._refused.pop(name, None)
            self._reasons.pop(name, None)
            if name == self._unusable_standard:
                self.standard, self._unusable_standard = name, ""
            if shown is not None:
                await shown.close()

    async def remove(self, shown: ClusterConnection) -> None:
        """Remove a cluster from the console.

        Raises ClusterError if the file of clusters cannot be changed, if the cluster is the one with which
        the console was started, or if another administrator has changed or removed the cluster since the page
        showed it.
        """
        name = _changeable(shown.name)
        async with self._changing:
            self._check_shown(shown)
            standard = STARTED if self.standard == name else self.standard
            connections = {key: each for key, each in self.connections.items() if key != name}
            self._write(self._unusable_standard or standard, connections)
            self.standard = standard
            await self.connections.pop(name).close()

    async def make_standard(self, shown: ClusterConnection) -> None:
        """Make a cluster the default, which a browser shows until its user chooses a cluster.

        Raises ClusterError if the file of clusters cannot be changed, or if another administrator has changed
        or removed the cluster since the page showed it.
        """
        async with self._changing:
            self._check_shown(shown)
            self._write(shown.name, self.connections)
            self.standard, self._unusable_standard = shown.name, ""

    def _check_shown(self, shown: ClusterConnection) -> None:
        """Raise ClusterError if a cluster was changed or removed after a page showed it.

        Each change creates a new ClusterConnection, so `shown` must be the current object of the cluster.
        """
        now = self.connections.get(shown.name)
        if now is None:
            raise ClusterError(f"cluster {shown.name} does not exist")
        if now is not shown:
            signed = "signed" if now.signed else "not signed"
            changed = f"its name servers are {now.namesrv}, requests are {signed}"
            raise ClusterError(f"cluster {shown.name} has been changed meanwhile: {changed}. Reload the page")

    def _check_room(self) -> None:
        if len(self.connections) >= MAX_CLUSTERS:
            raise ClusterError(f"a console shows at most {MAX_CLUSTERS} clusters")

    def _write(self, standard: str, connections: Mapping[str, ClusterConnection]) -> None:
        if self._unreadable:
            raise ClusterError(f"{self._unreadable}. Repair or remove it, and restart the console")
        self._check_unedited()
        added = [each for each in connections.values() if each.name != STARTED]
        used = {each.name for each in added}
        refused = {name: each for name, each in self._refused.items() if name not in used}
        content = _File(
            standard,
            refused | {each.name: each.namesrv for each in added},
            [name for name in self._signed if name in refused] + [each.name for each in added if each.signed],
        )
        data = msgspec.json.format(msgspec.json.encode(content))
        if len(data) > MAX_FILE_BYTES:
            raise ClusterError(f"{self._path} would exceed {MAX_FILE_BYTES} bytes: repair its entries")
        try:
            replace_private(str(self._path), data)
        except OSError as error:
            raise ClusterError(f"{self._path} cannot be written: {error.strerror}") from None
        self._content = data


def _changeable(name: str) -> str:
    if name == STARTED:
        raise ClusterError(f"{STARTED} is the cluster that the console was started with (-n)")
    return name


def _legal(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH or not NAME.fullmatch(name):
        rule = f"at most {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-'"
        raise ClusterError(f"{name!r} is not a valid name: {rule}")
    return name


def _addresses(name: str, namesrv: Any) -> str:
    if not isinstance(namesrv, str) or not namesrv.strip() or len(namesrv) > MAX_NAMESRV_LENGTH:
        raise ClusterError(f"cluster {name}: name servers must be host:port, separated by ';'")
    try:
        return ";".join(namesrv_addresses(namesrv))
    except CometError as error:
        raise ClusterError(f"cluster {name}: {error}") from None
