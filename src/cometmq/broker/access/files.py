"""The ACL files, which hold accounts and white lists. They are read at the start and after each change.

As for Apache's broker, the ACL files are in the directory `conf` of `rocketmqHome` (or of ROCKETMQ_HOME). If
neither is set, the ACL files are in the directory of the broker's settings file. The ACL files are
`plain_acl.yml`, and all files below `acl/` whose names end in .yml or .yaml.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from cometmq import logs, yaml_file
from cometmq.broker.access.accounts import MAX_FILE_BYTES, Account, AclFile, read_acl, to_plain
from cometmq.broker.access.addresses import AddressPattern
from cometmq.broker.access.decision import Policy
from cometmq.errors import ConfigError
from cometmq.private import replace_private
from cometmq.protocol.bodies import DataVersion

log = logs.logger(__name__)

DEFAULT_FILE = "plain_acl.yml"
DIRECTORY = "acl"
MAX_FILES = 64
MAX_DEPTH = 8
WITHOUT = {"tools.yml", "tools.yaml"}
READABLE_BY_OTHERS = 0o077

Stamp = tuple[int, int, int]
"""Modification time in ns, length and inode of a file. Each write changes at least one of the three."""


class _Read(NamedTuple):
    stamp: Stamp
    content: AclFile


class AclFiles:
    """Reads and writes the ACL files. All methods block, and only one thread at a time may call them.

    They raise ConfigError for an invalid file, and OSError for a file that cannot be read.
    """

    def __init__(self, conf: str) -> None:
        self.conf = os.path.abspath(conf)
        self.default = os.path.join(self.conf, DEFAULT_FILE)
        self._read: dict[str, _Read] = {}
        # The states (see `Stamp`) of the files from which the policy in force was read, by path
        self._in_force: dict[str, Stamp] = {}
        self._refused: dict[str, Stamp | None] = {}
        self._seen: dict[str, Stamp | None] = {}

    def load(self) -> Policy:
        """Read all ACL files. Return their policy, which the caller must put into force."""
        policy = self._look()
        self._in_force = self._stamps()
        return policy

    def _stamps(self) -> dict[str, Stamp]:
        return {path: each.stamp for path, each in self._read.items()}

    def _look(self) -> Policy:
        """Read the files that have changed since they were last read. Return the policy of all files."""
        read: dict[str, _Read] = {}
        for path in self._paths():
            before = self._read.get(path)
            stamp = _stamp(path)
            if before is None or before.stamp != stamp:
                before = self._read_one(path)
            read[path] = before
        policy = _joined({path: each.content for path, each in read.items()})
        if not len(policy) and not any(each.content.white for each in read.values()):
            places = f"{self.default} or below {os.path.join(self.conf, DIRECTORY)}"
            raise ConfigError("aclEnable", "true", f"accounts in {places}: there are none")
        self._read = read
        return policy

    def reload(self) -> Policy | None:
        """Return the new policy if a file has changed, and None otherwise.

        A change is applied only if two successive checks find the files in the same state: while a file is
        being written, its first half may be valid, but with other permissions. If a file is invalid, the
        previous policy stays in force; the error is logged once per change.
        """
        stamps: dict[str, Stamp | None] = {}
        try:
            stamps = {path: _stamp(path) for path in self._paths()}
            if stamps in (self._in_force, self._refused):
                return None
            if stamps != self._seen:
                self._seen = stamps
                return None
            policy = self.load()
        except (ConfigError, OSError) as error:
            self._refused = stamps
            log.error("access control keeps its previous accounts, because its files are invalid: %s", error)
            return None
        self._refused = {}
        log.info("access control: %d accounts read from %d files", len(policy), len(self._read))
        return policy

    @property
    def versions(self) -> dict[str, DataVersion]:
        """The data version of each ACL file, by path. It counts the changes that requests have made."""
        none = DataVersion()
        return {path: each.content.version or none for path, each in self._read.items()}

    @property
    def contents(self) -> dict[str, AclFile]:
        """The content of each ACL file, by path."""
        return {path: each.content for path, each in self._read.items()}

    # -- changes by requests

    def put(self, account: Account) -> Policy:
        """Replace an account in the file that contains it. A new account is added to the default file."""
        path = self._home_of(account.access_key) or self.default
        content = self._content(path)
        others = [each for each in content.accounts if each.access_key != account.access_key]
        return self._write(path, AclFile(content.white, [*others, account], content.version))

    def delete(self, access_key: str) -> Policy:
        """Remove an account from its file. Raises KeyError for an unknown account."""
        path = self._home_of(access_key)
        if path is None:
            raise KeyError(access_key)
        content = self._content(path)
        kept = [each for each in content.accounts if each.access_key != access_key]
        return self._write(path, AclFile(content.white, kept, content.version))

    def set_white(self, patterns: list[AddressPattern], path: str) -> Policy:
        """Replace the global white list of an ACL file ("": the default one). Raises KeyError for others."""
        path = os.path.abspath(path) if path else self.default
        if path not in self._read and path != self.default:
            raise KeyError(path)
        content = self._content(path)
        return self._write(path, AclFile(patterns, content.accounts, content.version))

    def account(self, access_key: str) -> Account | None:
        """Return the current account with this access key, read from the files, or None."""
        path = self._home_of(access_key)
        found = [] if path is None else self._read[path].content.accounts
        return next((each for each in found if each.access_key == access_key), None)

    def _home_of(self, access_key: str) -> str | None:
        self._look()  # Read changed files first, because users may have edited them
        for path, each in self._read.items():
            if any(account.access_key == access_key for account in each.content.accounts):
                return path
        return None

    def _content(self, path: str) -> AclFile:
        self._look()
        return self._read[path].content if path in self._read else AclFile()

    def _write(self, path: str, content: AclFile) -> Policy:
        """Check the policy that would result from a new file content. If it is valid, write the file."""
        contents = {other: each.content for other, each in self._read.items()}
        policy = _joined({**contents, path: content})
        if not len(policy):
            raise ConfigError("accounts", "", "at least one account that is left")
        counter = content.version.counter + 1 if content.version is not None else 1
        version = DataVersion(timestamp=int(time.time() * 1000), counter=counter)
        content = AclFile(content.white, content.accounts, version)
        data = yaml_file.dump(_plain(content))
        read_acl(path, data)  # Check that the text to be written can be parsed
        replace_private(os.path.realpath(path), data)
        self._read[path] = _Read(_stamp(path), content)
        self._in_force = self._stamps()
        return policy

    def _read_one(self, path: str) -> _Read:
        # Get the file's state before reading it, so that the next check detects a write during the read.
        stamp = _stamp(path)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError("aclEnable", "true", "a file: this is none, and is not read", path)
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
        if mode & READABLE_BY_OTHERS:
            log.warning(
                "%s contains secrets and is readable by other users (mode %o): run chmod 600",
                path,
                mode & 0o777,
            )
        return _Read(stamp, read_acl(path, data))

    def _paths(self) -> list[str]:
        paths = [self.default] if os.path.exists(self.default) else []
        for path in _below(os.path.join(self.conf, DIRECTORY), MAX_DEPTH):
            paths.append(path)
            if len(paths) > MAX_FILES:
                raise ConfigError("aclEnable", "true", f"at most {MAX_FILES} files below {self.conf}")
        return paths


def _below(directory: str, depth: int) -> Iterator[str]:
    """Yield the paths of the ACL files below a directory, sorted by name within each directory.

    Names that begin with a dot are skipped, because Kubernetes keeps older versions of mounted secrets there.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in WITHOUT:
            continue
        if entry.is_dir():
            if depth:
                yield from _below(entry.path, depth - 1)
        elif entry.name.endswith((".yml", ".yaml")):
            yield entry.path


def _joined(contents: dict[str, AclFile]) -> Policy:
    """Combine ACL files into one policy. Raises ConfigError if an account is in two files."""
    homes: dict[str, str] = {}
    for path, content in contents.items():
        for account in content.accounts:
            first = homes.setdefault(account.access_key, path)
            if first != path:
                key = f"account {account.access_key}"
                raise ConfigError(key, path, f"one file that has it; {first} has it too")
    return Policy(
        (pattern for content in contents.values() for pattern in content.white),
        (account for content in contents.values() for account in content.accounts),
    )


def _plain(content: AclFile) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if content.white:
        plain["globalWhiteRemoteAddresses"] = [pattern.text for pattern in content.white]
    plain["accounts"] = [to_plain(account) for account in content.accounts]
    if content.version is not None:
        version = content.version
        plain["dataVersion"] = [{"counter": version.counter, "timestamp": version.timestamp}]
    return plain


def _stamp(path: str) -> Stamp:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def conf_directory(rocketmq_home: str, broker_config_path: str) -> str:
    """Return the directory of the ACL files. Raises ConfigError if no setting determines it."""
    if rocketmq_home:
        return os.path.join(rocketmq_home, "conf")
    if broker_config_path:
        return os.path.dirname(os.path.abspath(broker_config_path))
    expected = f"rocketmqHome, or a settings file beside {DEFAULT_FILE}: nothing says where accounts are"
    raise ConfigError("aclEnable", "true", expected)
