"""TLS for servers and clients, with RocketMQ's settings file (docs/reference/remoting.md, TLS).

A server loads its certificates again when their files change. The settings are checked when the server
starts; incomplete settings raise ConfigError.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.periodic import Periodic
from cometmq.settings import BOOLEANS, read_properties_file, warn_unknown

log = logs.logger(__name__)

DISABLED, PERMISSIVE, ENFORCING = MODES = ("disabled", "permissive", "enforcing")
FILE_CHECK_INTERVAL_S = 5.0
"""The interval in seconds at which a server checks its TLS settings and certificate files for changes."""

_CLIENT_AUTH = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}
_PATHS = ("keyPath", "certPath", "trustCertPath")
KEYS = (
    *("tls.server.mode", "tls.enable", "tls.test.mode.enable", "tls.server.need.client.auth"),
    *("tls.server.authClient", "tls.client.authServer"),
    *(f"tls.{side}.{name}" for side in ("server", "client") for name in (*_PATHS, "keyPassword")),
)


class TlsFile:
    """The content of a settings file. The constructor reads files, so it blocks. Raises ConfigError."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._pairs: Mapping[str, str] = read_properties_file(path)
        except OSError as error:
            expected = f"a file of settings that can be read ({error.strerror or error})"
            raise ConfigError("tls.config.file", path, expected) from None
        for key in self._pairs.keys() - set(KEYS):
            warn_unknown(key, KEYS)
        self._wanted = self.flag("tls.enable", True)

    def text(self, key: str) -> str:
        return self._pairs.get(key, "").strip()

    def flag(self, key: str, default: bool) -> bool:
        text = self.text(key).lower()
        if text and text not in BOOLEANS:
            raise self._wrong(key, "true or false")
        return BOOLEANS[text] if text else default

    def stamps(self) -> list[tuple[int, int, int] | None]:
        """Return modification time, size and inode of the settings file and its files; None if missing."""
        paths = [self.path, *(self.text(key) for key in KEYS if key.endswith("Path"))]
        return [_stamp(path) for path in paths if path]

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if not self.text("tls.server.certPath"):
            raise self._wrong("tls.server.certPath", "the file of a certificate: none is generated")
        self._own_certificate(context, "server")
        # Clients of the gRPC endpoint require ALPN. Clients of other ports do not offer it.
        context.set_alpn_protocols(["h2", "http/1.1"])
        auth = self.text("tls.server.need.client.auth").lower() or "none"
        if auth not in _CLIENT_AUTH:
            raise self._wrong("tls.server.need.client.auth", "none, optional or require")
        if auth != "none":
            if not self.text("tls.server.trustCertPath"):
                raise self._wrong(
                    "tls.server.trustCertPath", "the certificates that sign the certificates of clients"
                )
            self._trust(context, "tls.server.trustCertPath")
        context.verify_mode = _CLIENT_AUTH[auth]
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client.

        Unlike the context of RocketMQ's clients, this context verifies servers unless the settings file
        disables the verification. It also verifies the servers' host names, unless trustCertPath names the
        trusted certificates.
        """
        if not self._wanted:
            raise self._wrong("tls.enable", "true, because a client is to use TLS with this file")
        context = ssl.create_default_context()
        if self.text("tls.client.trustCertPath"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # Routes contain addresses instead of host names, so the certificates in trustCertPath need not
            # name hosts.
            context.check_hostname = False
            self._trust(context, "tls.client.trustCertPath")
        if self.flag("tls.test.mode.enable", False) or not self.flag("tls.client.authServer", True):
            log.warning("certificates of servers are not verified, because %s disables it", self.path)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.text("tls.client.certPath"):
            self._own_certificate(context, "client")
        return context

    def _own_certificate(self, context: ssl.SSLContext, side: str) -> None:
        key = f"tls.{side}.certPath"
        password = self.text(f"tls.{side}.keyPassword")

        # Without a password function, OpenSSL would prompt for the password at the terminal.
        def ask() -> str:
            return password

        try:
            context.load_cert_chain(self.text(key), self.text(f"tls.{side}.keyPath") or None, ask)
        except (OSError, ValueError) as error:
            raise self._wrong(key, f"a certificate and its private key as PEM ({_reason(error)})") from None

    def _trust(self, context: ssl.SSLContext, key: str) -> None:
        try:
            context.load_verify_locations(self.text(key))
        except (OSError, ValueError) as error:
            raise self._wrong(key, f"a PEM file with certificates ({_reason(error)})") from None

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(key, self.text(key), expected, self.path)


def client_tls(tls: ssl.SSLContext | str | os.PathLike[str] | bool | None) -> ssl.SSLContext | None:
    """Return the context for a client's `tls` argument. Raises ConfigError.

    It is a context, the path of a settings file, True for the system's certificates, or None or False.
    """
    if tls is None or tls is False:
        return None
    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context() if tls is True else TlsFile(os.fspath(tls)).client_context()


class ServerTls:
    """The TLS of a server: its mode, and the context for new connections. Create it inside the loop."""

    def __init__(self, mode: str, file: TlsFile) -> None:
        """Load the certificates. The constructor reads files, so it blocks. Raises ConfigError."""
        self.enforcing = mode == ENFORCING
        self._file = file
        self._stamps = file.stamps()
        self.context = file.server_context()
        self._looks: Periodic | None = None
        if not self.enforcing and self.context.verify_mode is ssl.CERT_REQUIRED:
            log.warning(
                "tls.server.need.client.auth=require has no effect for clients without TLS, which "
                "tls.server.mode=permissive accepts. Set tls.server.mode=enforcing (%s)",
                file.path,
            )

    def start(self) -> None:
        """Start to check periodically whether the settings file or the certificate files have changed."""
        self._looks = Periodic(
            asyncio.get_running_loop(),
            FILE_CHECK_INTERVAL_S,
            self.check_files,
            name="check certificate files",
        )
        self._looks.start()

    async def stop(self) -> None:
        if self._looks is not None:
            await self._looks.stop()

    async def check_files(self) -> None:
        """Load the certificates again if a file has changed. Open connections keep the old certificates."""
        await asyncio.to_thread(self._reload)

    def _reload(self) -> None:
        stamps = self._file.stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            file = TlsFile(self._file.path)
            # The stamps are read before the certificates, so the next check detects a change in between.
            self._file, self._stamps = file, file.stamps()
            self.context = file.server_context()
        except ConfigError as error:
            log.error("TLS keeps its previous certificates: %s", error)
            return
        log.info("TLS uses new certificates, as configured in %s", file.path)


async def server_tls(mode: str, path: str) -> ServerTls | None:
    """Return the server's TLS for the settings `tls.server.mode` and `tls.config.file`.

    The settings file may contain the mode, too. If no mode is set, the mode is permissive. The result is None
    if no settings file is set, or if the mode is disabled. Raises ConfigError.
    """
    if not path:
        if mode not in ("", DISABLED):
            raise ConfigError("tls.server.mode", mode, "tls.config.file, too, which names the certificate")
        return None

    def load() -> ServerTls | None:
        file = TlsFile(path)
        found = (mode or file.text("tls.server.mode") or PERMISSIVE).lower()
        if found not in MODES:
            raise ConfigError("tls.server.mode", found, "disabled, permissive or enforcing")
        return None if found == DISABLED else ServerTls(found, file)

    return await asyncio.to_thread(load)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
