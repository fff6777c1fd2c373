"""RocketMQ's properties files and name-server lists, as given on the command line."""

from __future__ import annotations

from pathlib import Path

from cometmq.errors import ConfigError
from cometmq.protocol.java_properties import PropertiesError, parse_properties


def read_properties_file(path: str) -> dict[str, str]:
    """Read a properties file. Raises ConfigError for broken text, OSError for a file that cannot be read.

    UTF-8, and Latin-1 where that fails: Java's older readers know nothing else.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    try:
        return parse_properties(text)
    except PropertiesError as error:
        raise ConfigError(f"{path} line {error.line}", error.problem, "properties text, key=value") from None


def check_namesrv_list(text: str) -> str:
    """A `;`-separated list of host:port, trimmed. Raises ConfigError naming the first bad entry."""
    addresses = [word.strip() for word in text.split(";") if word.strip()]
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError("namesrvAddr", address, "host:port, several separated by ';'")
    if not addresses:
        raise ConfigError("namesrvAddr", text, "host:port, several separated by ';'")
    return ";".join(addresses)
