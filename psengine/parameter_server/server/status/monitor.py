"""HTTP for people and for Prometheus, on this machine only: dashboard, health, status, history, metrics, actions.

Any user of this machine may read. A page of another site, in a browser on this machine, may not: no answer carries CORS
headers; requests that the browser marks as another site's are refused, and so are requests under another host's name,
which DNS rebinding would send. Changes need the token (``actions.py``).

Limits keep /healthz answered: 64 connections, of which one that has not asked yet makes room for a newcomer; 8 requests
at work, beyond which the port says that it is busy. /healthz needs no place among the 8.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from psengine.environment.extras import missing_extra
from psengine.errors import MissingExtraError
from psengine.parameter_server.server.status.actions import Actions
from psengine.parameter_server.server.status.dashboard_page import NOTHING, dashboard
from psengine.parameter_server.server.status.history import LENGTHS, History
from psengine.parameter_server.status_model import ServerStatus, to_json

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0  # of one read, and of an answer
MAX_CONNECTIONS = 64
MAX_REQUESTS = 8
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
# Any port: the page may be looked at through a tunnel that ends at another one (ssh -L 8000:127.0.0.1:9100).
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
# What a browser says of a request's origin: the dashboard's own, or "none" of an address that was typed. Programs say
# nothing. https://www.w3.org/TR/fetch-metadata/
_OUR_SITES = {None, "same-origin", "none"}

# Status code, content type and content.
Page = tuple[int, str, bytes]


class _RefusedError(Exception):
    """A request is refused; the text has no part of the request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.page: Page = (code, _TEXT, f"{text}\n".encode())


class Pages:
    """The pages and the actions.

    Args:
        status: for /status.json and /metrics; called in request threads.
        is_healthy: for /healthz, 200 or 503.
        history: for /history.json; started and ended by the caller.
        actions: for POST /actions/NAME.
    """

    def __init__(
        self, status: Callable[[], ServerStatus], is_healthy: Callable[[], bool], history: History, actions: Actions
    ) -> None:
        self.actions = actions
        self._history = history
        self._pages: dict[str, Callable[[], Page]] = {
            "/": lambda: (200, _HTML, dashboard()[0]),
            "/healthz": lambda: (200, _TEXT, b"ok\n") if is_healthy() else (503, _TEXT, b"a shard does not answer\n"),
            "/status.json": lambda: _json_page(200, to_json(status())),
            "/metrics": lambda: _metrics_page(status()),
        }

    def read(self, path: str, query: dict[str, str]) -> Page:
        """The page at ``path``.

        Raises:
            _RefusedError: there is none, or the query is not understood.
        """
        if path == "/history.json" and set(query) <= {"resolution", "since"}:
            return self._read_history(**query)
        if query or path not in self._pages:
            raise _RefusedError(404, f"there are {', '.join(self._pages)} and /history.json")
        return self._pages[path]()

    def _read_history(self, resolution: str = "1", since: str = "0") -> Page:
        if resolution not in map(str, LENGTHS):
            expected = " or ".join(map(str, LENGTHS))
            raise _RefusedError(400, f"resolution is seconds between samples (expected {expected})")
        try:
            since_unix_s = float(since)
        except ValueError:
            since_unix_s = math.nan
        if not math.isfinite(since_unix_s):
            raise _RefusedError(400, "since is seconds since 1970 (expected a number)")
        return 200, _JSON, self._history.to_text(int(resolution), since_unix_s).encode()


class Monitor:
    """Serves ``Pages`` from its own threads.

    Args:
        port: on 127.0.0.1; 0 takes a free one.
        pages: what is served.

    Attributes:
        url: such as ``http://127.0.0.1:9100``.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, pages: Pages) -> None:
        self._server = _Server(port, pages)
        self.url = f"http://{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="psengine-monitor", daemon=True
        )

    def __enter__(self) -> Monitor:
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

    def __init__(self, port: int, pages: Pages) -> None:
        self.pages = pages
        self.places = threading.BoundedSemaphore(MAX_REQUESTS)
        self._lock = threading.Lock()
        # By open connection whether its request is complete; the oldest connection first.
        self._has_asked: dict[socket.socket, bool] = {}
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._has_asked) >= MAX_CONNECTIONS:
                silent = next((other for other, has_asked in self._has_asked.items() if not has_asked), None)
                if silent is not None:
                    del self._has_asked[silent]
                    with contextlib.suppress(OSError):
                        silent.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and ends
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
        if path.startswith("/actions/"):
            raise _RefusedError(405, "actions are POST requests")
        return self.server.pages.read(path, query)

    def _act(self) -> Page:
        path, query = self._address()
        if not path.startswith("/actions/"):
            raise _RefusedError(405, "only /actions/NAME takes POST requests")
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,4}", length):
            raise _RefusedError(413, "the body is too long (expected none, or up to 9999 bytes by its Content-Length)")
        actions, name = self.server.pages.actions, path.removeprefix("/actions/")
        # Before the body is read: a body without the token is not waited for.
        refused = actions.refusal(name, query, self.headers.get("Authorization"))
        if refused is not None:
            return _json_page(*refused)
        self.rfile.read(int(length))
        return _json_page(*actions.perform(name, query))

    def _address(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
        except ValueError as error:
            raise _RefusedError(400, "the address is not understood") from error
        query = dict(pairs)
        if len(query) != len(pairs):
            raise _RefusedError(400, "a parameter is given twice")
        return parts.path, query

    def _answer(self, make: Callable[[], Page]) -> None:
        needs_place = self.path != "/healthz"
        if needs_place and not self.server.places.acquire(blocking=False):
            self._write((503, _TEXT, b"too many ask at once; ask again. /healthz is always answered\n"))
            return
        try:
            # Within the place, so that clients that do not read answers bind little memory.
            self._write(self._made(make))
        finally:
            if needs_place:
                self.server.places.release()

    def _made(self, make: Callable[[], Page]) -> Page:
        try:
            self._check_origin()
            return make()
        except MissingExtraError as error:
            return 501, _TEXT, f"{error}\n".encode()
        except _RefusedError as refusal:
            return refusal.page
        except Exception:
            logger.exception("no answer to %r", self.path)
            return 500, _TEXT, b"the server's log says why\n"

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
            "Content-Security-Policy": dashboard()[1] if kind == _HTML else NOTHING,
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
        """Raise _RefusedError for a request that a page of another site makes, or may have made."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0].strip()):
            raise _RefusedError(421, "this port answers to 127.0.0.1, localhost and [::1] alone")
        # A link of another site may lead to the dashboard: the page itself holds no data, and cannot be framed.
        if self.headers.get("Sec-Fetch-Site") not in _OUR_SITES and self.path != "/":
            raise _RefusedError(403, "pages of other sites get nothing (expected Sec-Fetch-Site: same-origin or none)")

    def log_message(self, format: str, *arguments: Any) -> None:
        # Escaped: a request must not move the cursor of a terminal that the log is read in.
        logger.debug("status request: %r", format % arguments)


def _metrics_page(status: ServerStatus) -> Page:
    try:
        from psengine.parameter_server.server.status.exposition import render_metrics
    except ImportError as error:
        raise missing_extra("metrics", error) from error
    return 200, *render_metrics(status)


def _json_page(code: int, content: Any) -> Page:
    """JSON without NaN, which browsers refuse: a loss that is not finite is called "nan"."""
    return code, _JSON, json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
