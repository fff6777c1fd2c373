"""`cometmq cluster`: a cluster in one of RocketMQ's modes on this machine, a background process per server.

The cluster is for experiments with failover: servers are killed and started again. Each mode is a directory
below `conf/`. Its settings files can also be adapted for a cluster on several machines. A local cluster is
stored in one directory, which contains `cluster.json`, with process ids and addresses, and a subdirectory for
each server, with its broker.conf, store and output.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cometmq import logs
from cometmq.cli.app import CometGroup
from cometmq.cli.options import HELP, PORT, json_line
from cometmq.cli.running import running
from cometmq.command_options import opt, stacked, watch_interval_s, watch_option
from cometmq.errors import CometError
from cometmq.private import make_private_directory, open_private
from cometmq.protocol.codes import MASTER_ID
from cometmq.protocol.java_properties import format_properties
from cometmq.settings import read_properties_file
from cometmq.standalone import CONF, HOST, PORT_STEP, small_files
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.admin.values import BrokerStatus

log = logs.logger(__name__)

MODES = Path(__file__).parent.parent / "conf"
STATE = "cluster.json"
NAMESRV = "namesrv"
OUTPUT = "output.log"
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.05
# A broker's ports, relative to its main port: the VIP channel, the main port, and the port for slaves.
_NEIGHBOURS = (-2, 0, 1)
_RAFT_PORT = 40911


class LocalClusterError(CometError):
    """A cluster on this machine does not exist or already exists, or one of its servers did not start."""


class Member(msgspec.Struct):
    """A server of the cluster. `pid` is the id of its last process, 0 before the first start."""

    name: str
    addr: str
    pid: int = 0

    @property
    def kind(self) -> str:
        """The kind under which the process is registered (see cli/running.py)."""
        return NAMESRV if self.name == NAMESRV else "broker"

    @property
    def alive(self) -> bool:
        """Whether the server is running. Another process that has reused its process id does not count."""
        return self.pid in running(self.kind)


class State(msgspec.Struct):
    """Contents of `cluster.json`: the mode of the cluster, and its servers, the name server first."""

    mode: str
    members: list[Member]


def modes() -> list[str]:
    """Return the names of all modes."""
    return sorted({path.parent.name for path in MODES.glob("*/broker-*")})


def mode_files(mode: str) -> dict[str, Path]:
    """Return the settings file of each broker of a mode, by broker name. Raises LocalClusterError."""
    if mode not in modes():
        raise LocalClusterError(f"unknown mode {mode!r}: {', '.join(modes())}")
    return {path.stem: path for path in sorted((MODES / mode).iterdir())}


@dataclass(eq=False)
class LocalCluster:
    """A local cluster, with its files in `directory`. The methods block.

    `up` creates the cluster with the servers of `mode` if it does not exist, and starts it.
    """

    mode: str
    directory: Path
    state: State = field(init=False)

    def __post_init__(self) -> None:
        files = mode_files(self.mode)
        try:
            data = self._state_path.read_bytes()
        except FileNotFoundError:
            self.state = State(self.mode, [])
            return
        try:
            self.state = msgspec.json.decode(data, type=State)
        except msgspec.DecodeError as error:
            raise LocalClusterError(f"{self._state_path} cannot be read: {error}") from None
        known = [NAMESRV, *files]
        if self.state.mode != self.mode or [member.name for member in self.state.members] != known:
            raise LocalClusterError(f"{self._state_path} does not describe a cluster of mode {self.mode}")

    @property
    def _state_path(self) -> Path:
        return self.directory / STATE

    @property
    def namesrv_addr(self) -> str:
        return self.state.members[0].addr

    def up(self, namesrv_port: int, broker_port: int) -> list[Member]:
        """Start all members that are not running, and return them.

        A port of 0 selects free ports. An existing cluster keeps its ports. Raises LocalClusterError,
        OSError.
        """
        if not self.state.members:
            self._make(namesrv_port, broker_port)
        started = [member for member in self.state.members if not member.alive]
        for member in started:
            self._start(member)
        return started

    def heal(self) -> list[Member]:
        """Start the members that were killed, and return them. Raises LocalClusterError."""
        self._check_made()
        return self.up(0, 0)

    def kill(self, name: str) -> Member:
        """Kill a member as `kill -9` does. Raises LocalClusterError."""
        member = self.member(name)
        if not member.alive:
            raise LocalClusterError(f"{name} does not run")
        os.kill(member.pid, signal.SIGKILL)
        _wait_for_end([member], STOP_TIMEOUT_S)
        return member

    def down(self) -> list[Member]:
        """Stop all members in order, the name server last, and return those that were running.

        Raises LocalClusterError.
        """
        self._check_made()
        namesrv, *brokers = self.state.members
        stopped: list[Member] = []
        for group in (brokers, [namesrv]):
            alive = [member for member in group if member.alive]
            for member in alive:
                os.kill(member.pid, signal.SIGTERM)
            _wait_for_end(alive, STOP_TIMEOUT_S)
            stopped += alive
        return stopped

    def member(self, name: str) -> Member:
        """Return a server of the cluster by its name. Raises LocalClusterError for an unknown name."""
        self._check_made()
        for member in self.state.members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.state.members)
        raise LocalClusterError(f"the cluster has no member {name!r}; its members: {names}")

    def _check_made(self) -> None:
        if not self.state.members:
            raise LocalClusterError(f"there is no cluster of mode {self.mode} in {self.directory}")

    # -- creation

    def _make(self, namesrv_port: int, broker_port: int) -> None:
        files = mode_files(self.mode)
        make_private_directory(str(self.directory))
        if not namesrv_port:
            namesrv_port = next(_free_ports(1, (0,)))
        ports = [broker_port + PORT_STEP * number for number in range(len(files))]
        if not broker_port:
            ports = list(_free_ports(len(files), _NEIGHBOURS))
        peers = self._peers(list(files), bool(broker_port))
        members = [Member(NAMESRV, f"{HOST}:{namesrv_port}")]
        make_private_directory(str(self.directory / NAMESRV))
        self._write_conf(NAMESRV, self._namesrv_settings(namesrv_port))
        for (name, path), port in zip(files.items(), ports, strict=True):
            root = self.directory / name
            make_private_directory(str(root))
            settings = {
                **small_files(),
                **read_properties_file(str(path)),
                "brokerIP1": HOST,
                "bindAddress": HOST,
                "listenPort": str(port),
                "namesrvAddr": members[0].addr,
                "storePathRootDir": str(root / "store"),
            }
            if peers and "dLegerPeers" in settings:
                settings["dLegerPeers"] = peers
            self._write_conf(name, settings)
            members.append(Member(name, f"{HOST}:{port}"))
        self.state = State(self.mode, members)
        self._save()

    def _namesrv_settings(self, port: int) -> dict[str, str]:
        root = self.directory / NAMESRV
        return {"listenPort": str(port), "bindAddress": HOST, "kvConfigPath": str(root / "kvConfig.json")}

    @staticmethod
    def _peers(names: list[str], usual: bool) -> str:
        """Return the members of a raft group with their ports."""
        ports = [_RAFT_PORT + number for number in range(len(names))]
        if not usual:
            ports = list(_free_ports(len(names), (0,)))
        return ";".join(f"n{number}-{HOST}:{port}" for number, port in enumerate(ports))

    def _write_conf(self, name: str, settings: Mapping[str, str]) -> None:
        (self.directory / name / CONF).write_text(format_properties(settings), "utf-8")

    def _save(self) -> None:
        path = str(self._state_path)
        with open_private(path + ".tmp", in_place_of=path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.state)))
        os.replace(path + ".tmp", path)

    # -- processes

    def _start(self, member: Member) -> None:
        root = self.directory / member.name
        command = [sys.executable, "-m", "cometmq", member.kind, "-c", str(root / CONF)]
        with open(root / OUTPUT, "ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C at the terminal must not stop the server
            )
        member.pid = process.pid
        self._save()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not member.alive:  # the server creates its run file once it accepts connections
            if process.poll() is not None or time.monotonic() > deadline:
                raise LocalClusterError(f"{member.name} did not start: see {root / OUTPUT}")
            time.sleep(_POLL_INTERVAL_S)


def _wait_for_end(members: list[Member], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [member for member in members if member.alive]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{member.name} ({member.pid})" for member in left)
            raise LocalClusterError(f"members that are still running after {timeout_s:g} s: {names}")
        time.sleep(_POLL_INTERVAL_S)


def _free_ports(count: int, neighbours: tuple[int, ...]) -> Iterator[int]:
    """Yield `count` free ports.

    The neighbours of each port are free, too, and belong to no other yielded port.
    """
    taken: set[int] = set()
    while count:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        wanted = {port + neighbour for neighbour in neighbours}
        if not wanted & taken and max(wanted) < 65_536 and all(map(_is_free, wanted)):
            taken |= wanted
            count -= 1
            yield port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


DEFAULT_DATA = Path("~/.cometmq/clusters")


@click.group(cls=CometGroup, context_settings=HELP)
def cluster() -> None:
    """Run a cluster of several processes on this machine, and stop and restart its servers.

    MODE is one of: 1m-noslave, 2m-noslave, 3m-noslave, 4m-noslave (only masters), 2m-2s-async, 2m-2s-sync
    (two masters with a slave each), raft-3 (one broker with three members that elect a leader).
    """


_of_mode = stacked(
    click.argument("mode", type=click.Choice(modes())),
    opt(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_DATA,
        help="Directory of the clusters, with a subdirectory for each mode.",
    ),
)


@cluster.command()
@_of_mode
@opt("--namesrv-port", type=PORT, default=9876, help="Port of the name server; 0 is any free port.")
@opt(
    "--broker-port",
    type=PORT,
    default=10911,
    help="Port of the first broker; the next brokers have ports 10, 20, … higher. 0 is any free port. "
    "An existing cluster keeps its ports.",
)
def up(mode: str, data: Path, namesrv_port: int, broker_port: int) -> None:
    """Start the cluster, or those of its servers that do not run."""
    found = _open(mode, data)
    started = found.up(namesrv_port, broker_port)
    _print(found.state.members)
    click.echo(f"{counted(len(started), 'server')} started. Name server: -n {found.namesrv_addr}", err=True)


@cluster.command()
@_of_mode
@watch_option
@opt("--json as_json", is_flag=True, help="Print each server as a line of JSON.")
def status(mode: str, data: Path, as_json: bool) -> None:
    """Show each server with its process, its role, the end of its log, and the lag of slaves in bytes."""
    from cometmq.admin.commands.shell import show_error
    from cometmq.admin.commands.watching import repeated

    async def show() -> None:
        found = _open(mode, data)
        _print(found.state.members, await _brokers(found), as_json)

    asyncio.run(repeated(show, watch_interval_s(), show_error, as_json=as_json))


@cluster.command()
@_of_mode
@click.argument("member", required=False)
def kill(mode: str, data: Path, member: str | None) -> None:
    """Kill MEMBER as `kill -9` does. Default: the first running master; in mode raft-3, the leader."""
    found = _open(mode, data)
    killed = found.kill(member or _first_master(found))
    click.echo(f"killed {killed.name} (process {killed.pid}). `cometmq cluster heal {mode}` starts it again")


@cluster.command()
@_of_mode
def heal(mode: str, data: Path) -> None:
    """Start the servers that do not run."""
    healed = _open(mode, data).heal()
    _print(healed)
    click.echo(f"{counted(len(healed), 'server')} started", err=True)


@cluster.command()
@_of_mode
def down(mode: str, data: Path) -> None:
    """Stop all servers. Their stores remain."""
    stopped = _open(mode, data).down()
    click.echo(f"{counted(len(stopped), 'server')} stopped", err=True)


def _open(mode: str, data: Path) -> LocalCluster:
    return LocalCluster(mode, data.expanduser().absolute() / mode)


async def _brokers(found: LocalCluster) -> dict[str, BrokerStatus]:
    """Return the state of each broker by address; {} if no name server answers."""
    from cometmq.admin import Admin
    from cometmq.errors import CometError

    if not found.state.members:
        return {}
    try:
        async with Admin(found.namesrv_addr) as admin:
            return {status.broker_addr: status for status in await admin.brokers()}
    except CometError:
        return {}


def _first_master(found: LocalCluster) -> str:
    brokers = asyncio.run(_brokers(found))
    for member in found.state.members:
        status = brokers.get(member.addr)
        if status is not None and status.broker_id == MASTER_ID and member.alive:
            return member.name
    raise LocalClusterError("no master is running; name the member to kill")


def _print(
    members: list[Member], brokers: dict[str, BrokerStatus] | None = None, as_json: bool = False
) -> None:
    brokers = brokers or {}
    for member in members:
        facts: dict[str, object] = {
            "member": member.name, "addr": member.addr, "pid": member.pid if member.alive else None,
        }  # fmt: skip
        status = brokers.get(member.addr) if member.alive else None
        if status is not None and status.runtime:
            end = status.count("commitLogMaxOffset")
            facts |= {"broker": status.broker_name, "brokerId": status.broker_id, "logEnd": end}
            if status.lag is not None:
                facts["behind"] = status.lag
        click.echo(json_line(facts) if as_json else _line(facts))


def _line(facts: dict[str, object]) -> str:
    state = f"pid {facts['pid']}" if facts["pid"] else "does not run"
    line = f"{facts['member']:<12}  {facts['addr']:<21}  {state:<14}"
    if "brokerId" in facts:
        role = "master" if facts["brokerId"] == MASTER_ID else f"slave, id {facts['brokerId']}"
        line += f"  {facts['broker']} ({role})  log to {facts['logEnd']}"
    if "behind" in facts:
        line += f", lag {facts['behind']} bytes"
    return printable(line.rstrip(), None)
