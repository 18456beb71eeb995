"""A status port, asked over HTTP or HTTPS: its token goes to no other server, and in the clear to loopback alone."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError
from psengine.protocol.keys import read_token
from psengine.status_port.access import is_loopback

MAX_PAGE_BYTES = 64 << 20
MAX_REASON_CHARACTERS = 200

# HTTP status, content type, content.
Answer = tuple[int, str, bytes]


class NoHttpError(ValueError):
    """Something else than HTTP is spoken there."""


class NobodyListensError(OSError):
    """The host refused the connection."""


class StatusHttp:
    """Asks one status port.

    Args:
        url: such as ``https://host:9100``.
        timeout_s: deadline of one answer.
        token: is sent with each request; "" sends none.
        ca: file in PEM with the certificates that are trusted, of an authority or the server's own; None: the system's.

    Raises:
        ConfigurationError: the address is malformed or would carry the token in the clear; ``ca`` cannot be read.
    """

    def __init__(self, url: str, timeout_s: float, *, token: str = "", ca: Path | None = None) -> None:
        _check_url(url)
        self.url = url.rstrip("/")
        parts = urlsplit(url)
        if token and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigurationError(
                f"a token is not sent in the clear (expected https://, or a tunnel that ends on this machine; got"
                f" {url}). Fix: start the server with --status-cert and --status-key"
            )
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # The page is on this machine, at the end of a tunnel, or has TLS of its own: no proxy comes between.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_trusting(ca)))
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self, path: str, method: str = "GET") -> Answer:
        """The answer, whatever its status.

        Raises:
            OSError: there is none, or it does not end; the text says why.
            NoHttpError: it is not HTTP.
        """
        # GET has no body; POST has an empty one.
        data = b"" if method == "POST" else None
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=self._headers, method=method)
        try:
            try:
                answer = self._opener.open(request, timeout=self._timeout_s)
            except urllib.error.HTTPError as refusal:
                answer = refusal
            with answer:
                return answer.status, answer.headers.get_content_type(), self._content_of(answer)
        except urllib.error.URLError as error:
            kind = NobodyListensError if isinstance(error.reason, ConnectionRefusedError) else OSError
            raise kind(_said(error.reason)) from None
        except ssl.SSLError as error:
            raise OSError(_said(error)) from None
        except http.client.HTTPException as error:
            said = str(error).strip()[:MAX_REASON_CHARACTERS] or type(error).__name__
            hint = "" if self.url.startswith("https") else "; a port with --status-cert is asked as https://"
            raise NoHttpError(f"no HTTP came back ({said}){hint}") from None

    def _content_of(self, answer: Any) -> bytes:
        deadline_s = time.monotonic() + self._timeout_s
        content = bytearray()
        while part := answer.read1(1 << 16):
            content += part
            if len(content) > MAX_PAGE_BYTES:
                raise OSError(f"its page is too long (expected at most {MAX_PAGE_BYTES} bytes)")
            if time.monotonic() > deadline_s:
                raise OSError(f"its page had not ended after {self._timeout_s:g} s")
        return bytes(content)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like others: urllib would send the token along."""

    @override
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def reading_token(url: str) -> str:
    """The token that reads, of the file that a variable names; "" without one."""
    names = ["PSENGINE_STATUS_READ_TOKEN"]
    # One that acts is shown to no plain port, which needs none to be read.
    names += ["PSENGINE_STATUS_TOKEN"] if url.startswith("https://") else []
    path = next((path for name in names if (path := read_variable(name))), None)
    return "" if path is None else read_token(path)


def trusted_ca() -> Path | None:
    """The certificates that PSENGINE_STATUS_CA names."""
    path = read_variable("PSENGINE_STATUS_CA")
    return Path(path).expanduser() if path else None


def _trusting(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(
            f"the trusted certificates cannot be read (expected a file in PEM, got {ca}: {error.strerror or error})"
        ) from error


def _said(reason: Any) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({reason.verify_message}). Fix: --ca, or PSENGINE_STATUS_CA, names the"
            " server's certificate or its authority's; and the address has a name that is in the certificate"
        )
    if isinstance(reason, ssl.SSLError):
        return f"TLS failed ({reason.reason or reason}); a port without --status-cert is asked as http://"
    return str(reason)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigurationError(f"a status page's address is malformed (expected http://host:port, got {url!r})")
