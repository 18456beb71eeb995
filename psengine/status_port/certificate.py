"""TLS of a status port: its certificate and key, tried on each other before anybody connects."""

from __future__ import annotations

import ssl
from pathlib import Path

from psengine.errors import ConfigurationError
from psengine.protocol.keys import check_private_file

_MADE_BY = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -keyout status.key -out status.crt"
    " -subj /CN=HOST -addext subjectAltName=DNS:HOST"
)


def load_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """The server's side of TLS, with files in PEM.

    Args:
        certificate: the certificate, and after it those of its issuers up to one that clients know.
        key: its private key, without a password, in a file of mode 0600.

    Raises:
        ConfigurationError: a file is missing or malformed, others can read the key, the key is another certificate's,
            or the certificate is not valid today.
    """
    check_private_file(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        # The certificate itself is trusted here: whether it is in its time, and fits its key, is what is tried.
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(certificate)
        _shake_hands(context, client)
    except ssl.SSLCertVerificationError as error:
        raise _unusable(certificate, key, error.verify_message) from error
    except (OSError, ValueError) as error:  # ssl.SSLError is one
        raise _unusable(certificate, key, str(error)) from error
    return context


def _shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    """One handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_side.wrap_bio(to_client, to_server),
        server_side.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        waiting = []
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(end)
        ends = waiting
    assert not ends, "four flights complete every handshake of TLS 1.2 and 1.3"


def _refuse_password() -> str:
    raise ValueError("the key has a password, for which a server can ask nobody")


def _unusable(certificate: Path, key: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The status port's certificate cannot be used (expected one that is valid today in {certificate}, and its own"
        f" private key in {key}, both PEM; got: {why}). Fix: renew it, or make one: {_MADE_BY}"
    )
