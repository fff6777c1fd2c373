"""The clusters that a console shows, and the file that keeps those which administrators have added."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from cometmq.admin import Admin
from cometmq.client.cluster.options import namesrv_addresses
from cometmq.console.cluster import Cluster
from cometmq.console.frame.live import Live
from cometmq.errors import CometError
from cometmq.private import make_private_directory, open_private

STARTED = "default"
"""The name of the cluster that the console was started with."""
MAX_CLUSTERS = 32
MAX_NAME, MAX_NAMESRV = 64, 1024
"""Characters of a name, and of a list of name servers."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names stand in a cookie."""


class ClusterError(CometError):
    """A cluster cannot be added, changed, or removed."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class _File(msgspec.Struct):
    """The content of `clusters.json`. standard: the cluster of a browser that has chosen none; clusters: name
    -> name servers, without the cluster of the start."""

    standard: str = STARTED
    clusters: dict[str, str] = {}


class ClusterConnection:
    """A cluster as pages ask it: its admin client and its feeds. on_end: called when it is removed, or when
    its address has changed."""

    def __init__(self, name: str, namesrv: str) -> None:
        self.name = name
        self.namesrv = namesrv
        self.admin = Admin(namesrv)
        self.live = Live()
        self.cluster = Cluster(self.admin, self.live)
        self.on_end: dict[object, Callable[[], None]] = {}

    async def close(self) -> None:
        """Notify the pages of the cluster, and close its connections."""
        for end in list(self.on_end.values()):
            end()
        await self.admin.stop()


class Clusters:
    """All clusters of a console, by name.

    Args:
        path: The file that keeps the added ones.
        namesrv: The name servers of the cluster that the console was started with, as `host:port;host:port`.
    """

    def __init__(self, path: Path, namesrv: str) -> None:
        self._path = path
        self.standard = STARTED
        self.connections = {STARTED: ClusterConnection(STARTED, namesrv)}

    @property
    def several(self) -> bool:
        """Whether there is a cluster beside that of the start."""
        return len(self.connections) > 1

    async def start(self) -> None:
        """Read the file, and start the clients of all clusters. Raises ClusterError if it is damaged."""
        try:
            read = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            read = _File()
        except (OSError, msgspec.DecodeError) as error:
            raise ClusterError(f"{self._path} cannot be read: {error}") from None
        for name, namesrv in read.clusters.items():
            self.connections[name] = ClusterConnection(name, _addresses(_legal(name), namesrv))
        if read.standard in self.connections:
            self.standard = read.standard
        for each in self.connections.values():
            await each.admin.start()

    async def stop(self) -> None:
        """Close the connections to all clusters."""
        for each in self.connections.values():
            await each.close()

    def find(self, name: str) -> ClusterConnection:
        """Return the cluster of a name, or the standard one if there is none of that name."""
        return self.connections.get(name) or self.connections[self.standard]

    async def put(self, name: str, namesrv: str) -> None:
        """Add a cluster, or give it other name servers. Raises ClusterError."""
        addrs = _addresses(_legal(_changeable(name)), namesrv)
        before = self.connections.get(name)
        if before is None and len(self.connections) >= MAX_CLUSTERS:
            raise ClusterError(f"a console shows at most {MAX_CLUSTERS} clusters")
        self._write(self.standard, {**self._added(), name: addrs})
        made = self.connections[name] = ClusterConnection(name, addrs)
        await made.admin.start()
        if before is not None:
            await before.close()

    async def remove(self, name: str) -> None:
        """Show a cluster no longer. Raises ClusterError."""
        if _changeable(name) not in self.connections:
            raise ClusterError(f"there is no cluster {name}")
        standard = STARTED if self.standard == name else self.standard
        self._write(standard, {key: addrs for key, addrs in self._added().items() if key != name})
        self.standard = standard
        await self.connections.pop(name).close()

    def make_standard(self, name: str) -> None:
        """Have browsers that have chosen no cluster show this one. Raises ClusterError."""
        if name not in self.connections:
            raise ClusterError(f"there is no cluster {name}")
        self._write(name, self._added())
        self.standard = name

    def _added(self) -> dict[str, str]:
        return {name: each.namesrv for name, each in self.connections.items() if name != STARTED}

    def _write(self, standard: str, clusters: dict[str, str]) -> None:
        path, fresh = str(self._path), f"{self._path}.new"
        content = msgspec.json.format(msgspec.json.encode(_File(standard, clusters)))
        try:
            make_private_directory(str(self._path.parent))
            with open_private(fresh) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except OSError as error:
            raise ClusterError(f"{path} cannot be written: {error.strerror}") from None


def _changeable(name: str) -> str:
    if name == STARTED:
        raise ClusterError(f"{STARTED} is the cluster that the console was started with (-n)")
    return name


def _legal(name: str) -> str:
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise ClusterError(f"{name!r} is no name: up to {MAX_NAME} letters, digits, '.', '_' and '-'")
    return name


def _addresses(name: str, namesrv: str) -> str:
    if not namesrv.strip() or len(namesrv) > MAX_NAMESRV:
        raise ClusterError(f"cluster {name}: name servers are host:port, several divided by ';'")
    try:
        return ";".join(namesrv_addresses(namesrv))
    except CometError as error:
        raise ClusterError(f"cluster {name}: {error}") from None
