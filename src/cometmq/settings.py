"""The parsing and validation of settings, which the store, the broker and the name server share.

An invalid setting raises a ConfigError that names the key. If the value came from a file, the error also
names the file and the line.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from cometmq import logs
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.java_properties import PropertiesError, line_of, parse_properties, set_values

log = logs.logger(__name__)

INT_MAX = (1 << 31) - 1
"""Maximum value that RocketMQ's servers accept for most numeric settings."""
LONG_MAX = (1 << 63) - 1
"""Maximum value of a setting that is a time or a log position: the maximum of a Java long."""
TEXT_MAX = 4096
"""Maximum length of a value in characters: enough for a path or hundreds of name servers."""
BODY_MAX = 64 << 10
"""Maximum bytes of a request that changes settings. All settings of a broker together take 8 KiB."""

NAMESRV_ENV = ("COMETMQ_NAMESRV", "NAMESRV_ADDR")
"""The environment variables that name the name servers; the first one that is set counts."""
PACKAGED_CONF = os.path.join(os.path.dirname(os.path.realpath(__file__)), "conf")
"""Directory of the configuration files in CometMQ's Python package."""
_BOM = b"\xef\xbb\xbf"

BOOLEANS = {"true": True, "false": False}
# RocketMQ's keys for those settings whose key is not the name of the Python field in camel case.
_SPECIAL_NAMES = {
    "tls_config_file": "tls.config.file",
    "tls_server_mode": "tls.server.mode",
    "use_tls": "useTLS",
    "broker_ip1": "brokerIP1",
    "broker_ip2": "brokerIP2",
    "check_crc_on_recover": "checkCRCOnRecover",
    "check_crc_on_read": "checkCRCOnRead",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
_NUMBER = re.compile(r"-?[0-9]{1,400}").fullmatch  # `int()` would also accept `1_000` and non-ASCII digits


class Range(NamedTuple):
    """Permitted values of a number, both ends included."""

    low: int
    high: int
    what: str = "a number"


class Change(Enum):
    """When a setting can be changed. Without this annotation: at any time, by a request."""

    AT_NEXT_START = 1
    NEVER_BY_REQUEST = 2


START, FIXED = Change.AT_NEXT_START, Change.NEVER_BY_REQUEST
A = TypeVar("A")


def environment_namesrv() -> tuple[str, str]:
    """Return the environment variable that names the name servers, and its value, "" if there is none."""
    for name in NAMESRV_ENV:
        if value := os.environ.get(name):
            return name, value
    return NAMESRV_ENV[-1], ""


@cache
def hints_of(settings: type) -> dict[str, Any]:
    """Return the type hints of a class with their annotations. Evaluating them takes milliseconds."""
    return get_type_hints(settings, include_extras=True)


def annotations_of(settings: type, kind: type[A]) -> dict[str, A]:
    """Return the annotation of the type `kind` for each setting that has one, by key.

    The fields of `settings` are annotated like `port: Annotated[int, Range(0, 65_535), FIXED]`.
    """
    hints = hints_of(settings).items()
    return {camel(name): each for name, hint in hints for each in get_args(hint) if isinstance(each, kind)}


def keys_with(change: Change, *settings: type) -> frozenset[str]:
    """Return the keys of the settings that are annotated with `change`, which is `START` or `FIXED`."""
    found = (pair for each in settings for pair in annotations_of(each, Change).items())
    return frozenset(key for key, each in found if each is change)


SECRETS = ("metricsGrpcExporterHeader",)
"""Keys whose values are never sent over the network."""


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with `***` in place of values that may contain a password or token."""
    return {key: "***" if text and key in SECRETS else text for key, text in properties.items()}


def camel(field: str) -> str:
    """Return RocketMQ's key for the setting in a Python field."""
    head, *rest = field.split("_")
    return _SPECIAL_NAMES.get(field) or head + "".join(word.capitalize() for word in rest)


def read_value(key: str, text: str, kind: type) -> Any:
    """Convert a setting's text to a bool, int or str. Raises ConfigError if it is not of this type."""
    text = text.strip()
    if kind is bool:
        # Java treats every text but "true" as false. Here, a text that is neither true nor false is an error.
        if text.lower() not in BOOLEANS:
            raise ConfigError(key, text, "true or false")
        return BOOLEANS[text.lower()]
    if kind is int:
        if not _NUMBER(text):
            raise ConfigError(key, text, "a whole number")
        return int(text)
    if len(text) > TEXT_MAX or _CONTROL(text):
        raise ConfigError(key, text, f"at most {TEXT_MAX} characters, none of them a control character")
    return text


def show_value(value: object) -> str:
    """Return a value as text in Java's notation."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_ranges(ranges: Mapping[str, Range], value_of: Callable[[str], int]) -> None:
    """Raise ConfigError for the first setting, in order of keys, whose number is out of range."""
    for key, (low, high, what) in ranges.items():
        value = value_of(key)
        if not low <= value <= high:
            raise ConfigError(key, str(value), f"{what}, {low} to {high}")


def check_levels(text: str) -> None:
    """Raise ConfigError if `logLevel` is invalid."""
    try:
        logs.levels_of(text)
    except logs.BadLevels as problem:
        raise ConfigError(
            "logLevel", text, f"a level, or logger=LEVEL, several with , between ({problem})"
        ) from None


def check_host(key: str, host: str) -> None:
    """Raise ConfigError for a text that is neither an address nor a host name. The name is not resolved."""
    if host.startswith("[") or parse_address(f"[{host}]:1" if ":" in host else f"{host}:1") is None:
        raise ConfigError(key, host, "an IP address or a host's name")


def check_addresses(key: str, text: str) -> list[str]:
    """Return the `host:port` entries, separated by `;` or `,`. Raises ConfigError with the first bad one."""
    addresses = [word.strip() for word in text.replace(",", ";").split(";") if word.strip()]
    for address in addresses or [text]:
        if parse_address(address) is None:
            raise ConfigError(key, address, "host:port, several separated by ';'")
    return addresses


class Inert:
    """Settings of Apache's servers that have no effect here, with their defaults by key.

    They must not be reported as unknown, because CometMQ and Apache's servers may use the same files. A log
    line lists those set `without_use` for a single event loop and plain files. Those `not_built` are warned
    of, one by one.
    """

    def __init__(self, without_use: Mapping[str, str], not_built: Mapping[str, str]) -> None:
        self._not_built = not_built
        self.defaults = {**without_use, **not_built}

    def check(self, properties: Mapping[str, str]) -> None:
        """Validate the settings of a server. Log the names of those that are set but have no effect.

        Raises ConfigError if a value is invalid for Apache's server, too.
        """
        unused = []
        for key, text in properties.items():
            default = self.defaults.get(key)
            if default is None:
                continue
            kind = bool if default in BOOLEANS else int if default.isdecimal() else str
            value = read_value(key, text, kind)
            if kind is int and not 0 <= value <= LONG_MAX:
                raise ConfigError(key, text, f"a number, 0 to {LONG_MAX}")
            shown = show_value(value)
            if key in self._not_built and shown != default:
                log.warning("setting %s=%s has no effect, because its feature is not supported", key, shown)
            elif shown != default:
                unused.append(f"{key}={shown}")
        if unused:
            log.info("settings accepted without effect: %s", ", ".join(unused))


def requested_settings(body: bytes | bytearray | memoryview) -> dict[str, str]:
    """Return the settings in the body of a request that changes settings. Raises CommandError."""
    if len(body) > BODY_MAX:
        raise CommandError.failed(f"{len(body)} bytes of settings are more than {BODY_MAX}")
    try:
        return parse_properties(bytes(body).decode())
    except (UnicodeDecodeError, PropertiesError) as error:
        raise CommandError.failed(f"string2Properties error: {error}") from error


def warn_unknown(key: str, known: Iterable[str]) -> None:
    """Log a warning about an unknown key. The warning suggests the most similar known key, if any."""
    from difflib import get_close_matches  # Rarely needed: only for unknown keys

    near = get_close_matches(key, known, n=1, cutoff=0.7)
    log.warning("unknown setting %s%s", key, f" (did you mean {near[0]}?)" if near else "")


# -- files


def read_properties_file(path: str) -> dict[str, str]:
    """Read a properties file. Raises ConfigError for invalid text, OSError for an unreadable file."""
    return properties_of(_content(path), path)


def properties_of(data: bytes, path: str) -> dict[str, str]:
    """Parse the content of a properties file. Raises ConfigError for invalid text."""
    try:
        return parse_properties(_decoded(data))
    except PropertiesError as error:
        raise ConfigError(f"{path} line {error.line}", error.problem, "properties text, key=value") from None


@contextmanager
def settings_of(path: str | None, others: Container[str] = (), data: bytes | None = None) -> Iterator[None]:
    """Add the file and the line to a ConfigError raised in the `with` block, if the file contains its key.

    `others` are keys whose values come from another source. `data` is the content of the file, by default it
    is read.
    """
    try:
        yield
    except ConfigError as error:
        if not path or error.where or error.key in others:
            raise
        line = line_of(error.key, _decoded(_content(path) if data is None else data))
        if line is None:
            raise
        raise ConfigError(error.key, error.value, error.expected, f"{path} line {line}") from None


def with_values(data: bytes, values: Mapping[str, str]) -> bytes:
    """Return the content of a properties file with some values replaced and everything else unchanged."""
    mark, utf8 = (_BOM if data.startswith(_BOM) else b""), True
    text = _decoded(data)
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError:
        utf8 = False
    return mark + set_values(text, values).encode("utf-8" if utf8 else "latin-1")


def settings_to_write(path: str, values: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the path and the new content of a settings file in which some values change. It need not exist.

    Symbolic links in the path are resolved. Raises OSError if the file cannot be read, or belongs to the
    installed package: then an update would undo the change, and other servers would read it.
    """
    path = os.path.realpath(path)
    if path.startswith(PACKAGED_CONF + os.sep):
        reason = "a file of the installed package; start the server with a copy (cometmq conf copy NAME DIR)"
        raise OSError(errno.EROFS, reason, path)
    try:
        data = _content(path)
    except FileNotFoundError:
        data = b""
    return path, with_values(data, values)


class SettingsFile:
    """Writes changed settings of a running server to its file. `write` replaces a file, in a thread."""

    def __init__(self, write: Callable[[str, bytes], None]) -> None:
        self._write = write
        self._lock = asyncio.Lock()
        self._unwritten: set[str] = set()

    async def save(self, path: str, keys: Iterable[str], settings: Callable[[], dict[str, str]]) -> None:
        """Write the current values of `keys`, and of those keys that could not be written before.

        `settings` returns the current settings. Raises OSError.
        """
        self._unwritten.update(keys)
        # One task at a time writes, and it writes the current values. So old values never replace newer ones.
        async with self._lock:
            now = settings()
            values = {key: now[key] for key in now if key in self._unwritten}
            self._unwritten.clear()
            try:
                await asyncio.to_thread(lambda: self._write(*settings_to_write(path, values)))
            except OSError:
                self._unwritten.update(values)
                raise


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _decoded(data: bytes) -> str:
    """Decode UTF-8 or, if that fails, Latin-1, Java's default encoding of properties files."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
