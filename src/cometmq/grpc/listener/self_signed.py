"""A certificate that a server makes for itself, for clients that use TLS but accept any certificate.

It encrypts connections, but does not prove the identity of the server: an attacker between client and server
can present a certificate of his own.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from cometmq.errors import CometError

LIFETIME = datetime.timedelta(days=3650)


class SelfSigned(NamedTuple):
    """The TLS of a server without TLS settings: optional, with a certificate that is lost when it stops."""

    context: ssl.SSLContext
    enforcing: bool = False


async def self_signed() -> SelfSigned:
    """Make a key and a certificate. The package that does it takes 0.2 s of CPU time to import.

    Raises CometError without that package, and OSError if no temporary file can be written.
    """
    return await asyncio.to_thread(_make)


def _make() -> SelfSigned:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        raise CometError("the package cryptography is missing: install cometmq[grpc]") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "CometMQ, self-signed")])
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)  # clocks of clients may be slow
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + LIFETIME)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with NamedTemporaryFile(prefix="cometmq-") as file:  # readable by this user alone
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(certificate.public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return SelfSigned(context)
