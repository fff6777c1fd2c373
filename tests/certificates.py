"""Certificates for tests of TLS, created for each test that requests them."""

from __future__ import annotations

from pathlib import Path

import trustme


class Certificates:
    """An authority, a server's and a client's certificate, and RocketMQ's settings file for them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.server = self.issue("server", "127.0.0.1", "localhost")
        self.client = self.issue("client", "client.example")
        self.file = self.settings()

    def issue(self, name: str, *identities: str) -> Path:
        """Create a certificate and its key in one file."""
        path = self.directory / f"{name}.pem"
        self.authority.issue_cert(*identities).private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def settings(self, name: str = "tls.properties", **more: str) -> Path:
        """Write the settings file. Names in `more` have `_` for `.`; an empty value removes the key."""
        pairs = {
            "tls.server.certPath": str(self.server),
            "tls.client.trustCertPath": str(self.ca),
            **{key.replace("_", "."): value for key, value in more.items()},
        }
        path = self.directory / name
        path.write_text("".join(f"{key}={value}\n" for key, value in pairs.items() if value))
        return path
