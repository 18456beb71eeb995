"""Who may read from a status port, who may act, and from where it is reached."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from psengine.errors import ConfigurationError
from psengine.protocol import keys


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a port that is bound to ``host``; names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Access:
    """Tokens; "" is none.

    Attributes:
        token: who has it may act, and read.
        read_token: who has it may read.
        is_open: whether everybody who reaches the port may read.
    """

    token: str = ""
    read_token: str = ""
    is_open: bool = True

    def may_read(self, authorization: str | None) -> bool:
        """Whether a request with this header ``Authorization`` gets pages."""
        return self.is_open or _is_bearer(authorization, self.token) or _is_bearer(authorization, self.read_token)

    def may_act(self, authorization: str | None) -> bool:
        """Whether it may change something."""
        return _is_bearer(authorization, self.token)


def read_access(host: str, *, token: Path | None, read_token: Path | None, has_certificate: bool) -> Access:
    """The access to a port on ``host``, of files with tokens.

    Raises:
        ConfigurationError: others reach the port, and it has no token or no TLS; a file is no good.
    """
    if not is_loopback(host) and not (has_certificate and (token or read_token)):
        missing = [
            *([] if has_certificate else ["a certificate (--status-cert, --status-key)"]),
            *([] if token or read_token else ["a token (--status-read-token, or --status-token)"]),
        ]
        raise ConfigurationError(
            f"A status port that other machines reach needs a certificate and a token (expected both for status_bind ="
            f" {host!r}, missing: {' and '.join(missing)}). Fix: give both; or leave it on 127.0.0.1, and reach it by"
            " ssh -L 9100:127.0.0.1:9100 HOST. There is no way without."
        )
    acting = "" if token is None else keys.read_token(token)
    reading = "" if read_token is None else keys.read_token(read_token)
    return Access(token=acting, read_token=reading, is_open=is_loopback(host) and not reading)


def _is_bearer(authorization: str | None, token: str) -> bool:
    scheme, _, given = (authorization or "").partition(" ")
    # As bytes: compare_digest takes ASCII texts only, and headers are Latin-1.
    is_it = hmac.compare_digest(given.strip().encode(), token.encode())
    return bool(token) and scheme.lower() == "bearer" and is_it
