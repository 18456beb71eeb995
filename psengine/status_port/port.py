"""HTTP in threads: a request's origin and token are checked, then its page is made. No handshake blocks another.

    accept ──► a thread for each connection: TLS handshake ─► request ─► origin? ─► token? ─► a place of 8 ─► page
               └──────────────── REQUEST_TIMEOUT_S ─────────┘

On loopback any user of this machine may read. A page of another site, in a browser on this machine, may not: no answer
carries CORS headers; requests that the browser marks as another site's are refused, and so are requests under another
host's name, which DNS rebinding would send. Where reading needs a token the name may be any: the other site's page does
not have the token. Changes always need one.

Limits keep /healthz answered: 64 connections, of which one that has not asked yet makes room for a newcomer; 8 requests
at work, beyond which the port says that it is busy. /healthz needs no place among the 8. Where reading needs a token,
requests without it have 8 places of their own, so that strangers keep nobody else away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from psengine.status_port.access import Access

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0  # of a handshake, of one read, and of an answer
MAX_CONNECTIONS = 64
MAX_REQUESTS = 8
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
NOTHING_POLICY = "default-src 'none'; frame-ancestors 'none'"
# Any port: the page may be looked at through a tunnel that ends at another one (ssh -L 8000:127.0.0.1:9100).
_LOOPBACK_NAME = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
# What a browser says of a request's origin: the page's own, or "none" of an address that was typed. Programs say
# nothing. https://www.w3.org/TR/fetch-metadata/
_OUR_SITES = {None, "same-origin", "none"}
_NEEDS_TOKEN = "this port answers to those who have its token (expected the header Authorization: Bearer TOKEN)"

# Status code, content type and content.
Page = tuple[int, str, bytes]


class RefusedError(Exception):
    """A request is refused; the text has no part of the request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.page: Page = (code, TEXT, f"{text}\n".encode())


class Pages:
    """What a port serves.

    Attributes:
        html_policy: the Content-Security-Policy of its HTML.
    """

    html_policy = NOTHING_POLICY

    def __init__(self, pages: dict[str, Callable[[], Page]]) -> None:
        self._pages = pages

    def read(self, path: str, query: dict[str, str]) -> Page:
        """The page at ``path``.

        Raises:
            RefusedError: there is none, or the query is not understood.
        """
        if query or path not in self._pages:
            raise RefusedError(404, f"there are {', '.join(self._pages)}")
        return self._pages[path]()

    def is_public(self, path: str) -> bool:
        """Whether a page is the same for all, so that it needs no token."""
        return False

    def refusal(self, name: str, query: dict[str, str], *, may_act: bool) -> Page | None:
        """The answer to an action that must not be performed; None for one that may."""
        raise RefusedError(405, "there are no actions here")

    def perform(self, name: str, query: dict[str, str]) -> Page:
        """Perform an action for which there is no ``refusal``."""
        raise RefusedError(405, "there are no actions here")


class StatusPort:
    """Serves ``Pages`` from its own threads.

    Args:
        port: 0 takes a free one.
        pages: what is served.
        host: the address to bind.
        access: who may read and act.
        tls: the server's side of TLS; None: plain HTTP, for loopback.

    Attributes:
        url: such as ``http://127.0.0.1:9100``; with this host's name where the address is every interface's.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(
        self,
        port: int,
        pages: Pages,
        *,
        host: str = LOOPBACK,
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server = _Server(host.strip("[]"), port, pages, access or Access(), tls)
        name, bound = map(str, self._server.server_address[:2])
        name = socket.gethostname() if name in ("0.0.0.0", "::") else name
        self.url = f"{'https' if tls else 'http'}://{f'[{name}]' if ':' in name else name}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="psengine-status-port", daemon=True
        )

    def drop_copy(self) -> None:
        """In a forked child: close its copy of the socket, which would keep the port taken; the parent serves on."""
        self._server.socket.close()

    def __enter__(self) -> StatusPort:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, pages: Pages, access: Access, tls: ssl.SSLContext | None) -> None:
        self.pages = pages
        self.access = access
        # By whether a request may read.
        self.places = {may_read: threading.BoundedSemaphore(MAX_REQUESTS) for may_read in (True, False)}
        self._tls = tls
        self._lock = threading.Lock()
        # By open connection whether its request is complete; the oldest connection first.
        self._has_asked: dict[socket.socket, bool] = {}
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Without HTTPServer's search for the address's name, which may wait for DNS and which nobody uses.
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self._tls is not None:
            # Shaken hands in the connection's own thread.
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._has_asked) >= MAX_CONNECTIONS:
                silent = next((other for other, has_asked in self._has_asked.items() if not has_asked), None)
                if silent is not None:
                    del self._has_asked[silent]
                    with contextlib.suppress(OSError):
                        # Its thread reads the end, and ends. Not SSLSocket's, which would go on in the clear.
                        socket.socket.shutdown(silent, socket.SHUT_RDWR)
            has_slot = len(self._has_asked) < MAX_CONNECTIONS
            if has_slot:
                self._has_asked[request] = False
        if has_slot:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def asked(self, connection: socket.socket) -> None:
        """The request of a connection is complete, or is no request."""
        with self._lock:
            if connection in self._has_asked:
                self._has_asked[connection] = True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._has_asked.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a status request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "psengine"
    sys_version = ""
    server: _Server

    def setup(self) -> None:
        super().setup()  # sets the timeout, which bounds the whole handshake
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def parse_request(self) -> bool:
        is_understood = super().parse_request()
        self.server.asked(self.connection)
        return is_understood

    def do_GET(self) -> None:
        self._answer(self._read)

    def do_HEAD(self) -> None:
        self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(self._act)

    def _read(self) -> Page:
        path, query = self._address()
        pages = self.server.pages
        if not pages.is_public(path) and not self.server.access.may_read(self.headers.get("Authorization")):
            raise RefusedError(401, _NEEDS_TOKEN)
        if path.startswith("/actions/"):
            raise RefusedError(405, "actions are POST requests")
        return pages.read(path, query)

    def _act(self) -> Page:
        path, query = self._address()
        authorization = self.headers.get("Authorization")
        access = self.server.access
        # Of whoever may not read, not even whether there is such an action.
        if not access.may_read(authorization):
            raise RefusedError(401, _NEEDS_TOKEN)
        if not path.startswith("/actions/"):
            raise RefusedError(405, "only /actions/NAME takes POST requests")
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,4}", length):
            raise RefusedError(413, "the body is too long (expected none, or up to 9999 bytes by its Content-Length)")
        pages, name = self.server.pages, path.removeprefix("/actions/")
        # Before the body is read: a body without the token is not waited for.
        refused = pages.refusal(name, query, may_act=access.may_act(authorization))
        if refused is not None:
            return refused
        self.rfile.read(int(length))
        return pages.perform(name, query)

    def _address(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
        except ValueError as error:
            raise RefusedError(400, "the address is not understood") from error
        query = dict(pairs)
        if len(query) != len(pairs):
            raise RefusedError(400, "a parameter is given twice")
        return parts.path, query

    def _answer(self, make: Callable[[], Page]) -> None:
        needs_place = self.path != "/healthz"
        places = self.server.places[self.server.access.may_read(self.headers.get("Authorization"))]
        if needs_place and not places.acquire(blocking=False):
            self._write((503, TEXT, b"too many ask at once; ask again. /healthz is always answered\n"))
            return
        try:
            # Within the place, so that clients that do not read answers bind little memory.
            self._write(self._made(make))
        finally:
            if needs_place:
                places.release()

    def _made(self, make: Callable[[], Page]) -> Page:
        try:
            self._check_origin()
            return make()
        except RefusedError as refusal:
            return refusal.page
        except Exception:
            logger.exception("no answer to %r", self.path)
            return 500, TEXT, b"the log says why\n"

    def _write(self, page: Page) -> None:
        code, kind, content = page
        self.close_connection = True
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": self.server.pages.html_policy if kind == HTML else NOTHING_POLICY,
            **{503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(code, {}),
        }
        if code == 405:
            headers["Allow"] = "GET, HEAD" if self.command == "POST" else "POST"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _check_origin(self) -> None:
        """Raise RefusedError for a request that a page of another site makes, or may have made."""
        hosts = self.headers.get_all("Host") or []
        is_ours = not self.server.access.is_open or _LOOPBACK_NAME.fullmatch(hosts[0].strip() if hosts else "")
        if len(hosts) != 1 or not is_ours:
            raise RefusedError(421, "this port answers to 127.0.0.1, localhost and [::1] alone")
        # A link of another site may lead to the page, which itself holds no data, and cannot be framed.
        if self.headers.get("Sec-Fetch-Site") not in _OUR_SITES and self.path != "/":
            raise RefusedError(403, "pages of other sites get nothing (expected Sec-Fetch-Site: same-origin or none)")

    def log_message(self, format: str, *arguments: Any) -> None:
        # Escaped: a request must not move the cursor of a terminal that the log is read in.
        logger.debug("status request: %r", format % arguments)


def json_page(code: int, content: Any) -> Page:
    """JSON without NaN, which browsers refuse: a loss that is not finite is called "nan"."""
    return code, JSON, json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
