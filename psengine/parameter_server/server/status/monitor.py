"""HTTP for people and for Prometheus, on this machine only: dashboard, health, status, history, metrics, actions.

Anybody on this machine may read. A page of another site, in a browser on this machine, may not: no answer carries CORS
headers, a request that the browser says came from elsewhere is refused before it costs anything, and so are those under
another host's name, which is what DNS rebinding would come with. Whoever wants to change something needs the token
(``actions.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from psengine.errors import MissingExtraError
from psengine.parameter_server.server.status.actions import Actions
from psengine.parameter_server.server.status.dashboard_page import NOTHING, dashboard
from psengine.parameter_server.server.status.exposition import render_metrics
from psengine.parameter_server.server.status.history import LENGTHS, History

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Connections whose request is read or answered; those that have not asked yet make room for newcomers.
MAX_CONNECTIONS = 64
# Requests that are worked on; beyond, some wait a little, and the others hear that the port is busy. /healthz takes no
# place among them, because whoever asks it may restart a server that does not answer.
MAX_REQUESTS = 8
MAX_WAITING = 24
WAIT_S = 2.0
REQUEST_TIMEOUT_S = 5.0
REQUEST_DEADLINE_S = 10.0
# Actions have their parameters in the address; a body is read only to be polite.
MAX_BODY_BYTES = 4096
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
# Any port: the page may be looked at through a tunnel that ends at another one (ssh -L 8000:127.0.0.1:9100).
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
# What a browser says of a request's origin: the dashboard's own, or nobody's, as of an address that was typed. Programs
# say nothing. https://www.w3.org/TR/fetch-metadata/
_OUR_SITES = {None, "same-origin", "none"}
_PATHS = "there are /, /status.json, /history.json, /metrics and /healthz\n"

Page = tuple[int, str, bytes]
_BUSY: Page = (503, _TEXT, b"too many ask at once; ask again. /healthz is always answered\n")


class _BadRequestError(Exception):
    """The request is not understood; the text is for whoever sent it, and holds nothing that came with it."""


class Monitor:
    """Serves people, Prometheus and the dashboard from its own threads.

    Args:
        port: on 127.0.0.1; 0 takes a free one.
        status: what /status.json shows and /metrics counts; called in request threads.
        is_healthy: /healthz is 200 or 503.
        history: what /history.json shows; started and ended by the caller.
        actions: what POST /actions/NAME does.

    Attributes:
        url: such as ``http://127.0.0.1:9100``.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        port: int,
        status: Callable[[], dict[str, Any]],
        is_healthy: Callable[[], bool],
        history: History,
        actions: Actions,
    ) -> None:
        slots = _Slots(MAX_CONNECTIONS)
        places = _Places(MAX_REQUESTS, MAX_WAITING)

        class Handler(_Handler):
            def place(self) -> contextlib.AbstractContextManager[bool]:
                return contextlib.nullcontext(True) if self.path == "/healthz" else places.take()

            def page(self, path: str, query: dict[str, str]) -> Page:
                if path == "/history.json" and set(query) <= {"resolution", "since"}:
                    return _history_page(history, query)
                if query:
                    return _not_found()
                if path == "/":
                    return 200, _HTML, dashboard()[0]
                if path == "/healthz":
                    return (200, _TEXT, b"ok\n") if is_healthy() else (503, _TEXT, b"a shard does not answer\n")
                if path == "/status.json":
                    return _json_page(200, status())
                if path == "/metrics":
                    return 200, *render_metrics(status())
                return _not_found()

            def refusal(self, name: str, query: dict[str, str]) -> Page | None:
                refused = actions.refusal(name, query, self.headers.get("Authorization"))
                return None if refused is None else _json_page(*refused)

            def act(self, name: str, query: dict[str, str]) -> Page:
                return _json_page(*actions.perform(name, query, self.headers.get("Authorization")))

            def parse_request(self) -> bool:
                is_understood = super().parse_request()
                slots.asked(self.connection)
                return is_understood

        class HTTPServer(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def process_request(self, request: Any, client_address: Any) -> None:
                if not slots.take(request):
                    self.shutdown_request(request)  # nobody is silent, which the places do not let last
                    return
                try:
                    super().process_request(request, client_address)
                except BaseException:
                    slots.release(request)  # there is no thread that would
                    raise

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                # The handler's timeout is per read: one byte at a time would hold the slot for ever.
                clock = threading.Timer(REQUEST_DEADLINE_S, _cut, [request])
                clock.daemon = True
                try:
                    clock.start()
                    super().process_request_thread(request, client_address)
                except RuntimeError:  # no thread for the clock; errors of the request are handled inside
                    self.handle_error(request, client_address)
                    self.shutdown_request(request)
                finally:
                    clock.cancel()
                    slots.release(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                logger.debug("a status request failed", exc_info=True)

        self._server = HTTPServer((HOST, port), Handler)
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


class _Slots:
    """Connections that are served at once. One that asks nothing keeps its place until somebody else wants it.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # Whether it has asked yet; the oldest connection first.
        self._has_asked: dict[socket.socket, bool] = {}

    def take(self, connection: socket.socket) -> bool:
        """A place for this one, if need be that of the one that has kept silent the longest; False: all are at work."""
        with self._lock:
            if len(self._has_asked) >= self._most:
                silent = next((other for other, has_asked in self._has_asked.items() if not has_asked), None)
                if silent is None:
                    return False
                del self._has_asked[silent]
                _cut(silent)  # its thread reads the end and ends, too
            self._has_asked[connection] = False
            return True

    def asked(self, connection: socket.socket) -> None:
        """Its request is complete, or is none."""
        with self._lock:
            if connection in self._has_asked:
                self._has_asked[connection] = True

    def release(self, connection: socket.socket) -> None:
        """It is served, or was cut."""
        with self._lock:
            self._has_asked.pop(connection, None)


class _Places:
    """Where requests are worked on.

    Args:
        most: at once.
        most_waiting: for a place.
    """

    def __init__(self, most: int, most_waiting: int) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._chairs = threading.BoundedSemaphore(most_waiting)

    @contextlib.contextmanager
    def take(self) -> Iterator[bool]:
        """Whether there was a place within ``WAIT_S``, which is kept until the end of the block."""
        is_taken = self._free.acquire(blocking=False)
        if not is_taken and self._chairs.acquire(blocking=False):
            try:
                is_taken = self._free.acquire(timeout=WAIT_S)
            finally:
                self._chairs.release()
        try:
            yield is_taken
        finally:
            if is_taken:
                self._free.release()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "psengine"
    sys_version = ""

    def place(self) -> contextlib.AbstractContextManager[bool]:
        """Whether the request is worked on, for as long as it is."""
        raise NotImplementedError

    def page(self, path: str, query: dict[str, str]) -> Page:
        """Status code, content type and content of what is read."""
        raise NotImplementedError

    def refusal(self, name: str, query: dict[str, str]) -> Page | None:
        """The same of an action that is not to be done; None of one that is."""
        raise NotImplementedError

    def act(self, name: str, query: dict[str, str]) -> Page:
        """The same of what is done."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer(self._read_page)

    def do_HEAD(self) -> None:
        self._answer(self._read_page, with_content=False)

    def do_POST(self) -> None:
        self._answer(self._act_page)

    def _read_page(self) -> Page:
        path, query = self._address()
        if path.startswith("/actions/"):
            return 405, _TEXT, b"actions are POST requests\n"
        return self.page(path, query)

    def _act_page(self) -> Page:
        path, query = self._address()
        if not path.startswith("/actions/"):
            return 405, _TEXT, b"only /actions/NAME takes POST requests\n"
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            return 411, _TEXT, b"Content-Length must say how long the body is; it is not needed at all\n"
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            return 413, _TEXT, f"the body is too long (expected at most {MAX_BODY_BYTES} bytes)\n".encode()
        name = path.removeprefix("/actions/")
        # Only who may act is waited for.
        refused = self.refusal(name, query)
        if refused is not None:
            return refused
        try:
            self.rfile.read(int(length))
        except TimeoutError:
            return 408, _TEXT, f"the body did not come (expected {length} bytes; none is needed)\n".encode()
        return self.act(name, query)

    def _address(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=8)
        except ValueError as error:
            raise _BadRequestError("the address is not understood") from error
        query = dict(pairs)
        if len(query) != len(pairs):
            raise _BadRequestError("a parameter is given twice")
        return parts.path, query

    def _answer(self, make: Callable[[], Page], *, with_content: bool = True) -> None:
        stopped = self._stopped()
        if stopped is not None:
            self._write(stopped, with_content)
            return
        with self.place() as has_place:
            self._write(self._made(make) if has_place else _BUSY, with_content)

    def _made(self, make: Callable[[], Page]) -> Page:
        try:
            return make()
        except MissingExtraError as error:
            return 501, _TEXT, f"{error}\n".encode()
        except _BadRequestError as error:
            return 400, _TEXT, f"{error}\n".encode()
        except Exception:
            logger.exception("no answer to %r", self.path)
            return 500, _TEXT, b"the server's log says why\n"

    def _write(self, page: Page, with_content: bool) -> None:
        code, kind, content = page
        self.close_connection = True
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", dashboard()[1] if kind == _HTML else NOTHING)
        if code == 503:
            self.send_header("Retry-After", "1")
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if code == 405:
            self.send_header("Allow", "GET, HEAD" if self.command == "POST" else "POST")
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def _stopped(self) -> Page | None:
        """What is said to a request that a page of another site makes, or may have made."""
        if not self._is_for_loopback():
            return 421, _TEXT, b"this port answers to 127.0.0.1, localhost and [::1] alone\n"
        # A link from elsewhere may lead to the dashboard: the page itself tells nothing, and nobody can frame it.
        if self.headers.get("Sec-Fetch-Site") not in _OUR_SITES and self.path != "/":
            return 403, _TEXT, b"pages of other sites get nothing here (expected Sec-Fetch-Site: same-origin or none)\n"
        return None

    def _is_for_loopback(self) -> bool:
        """Whether the request was meant for this machine by name: a browser says under which name it came here."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and _LOOPBACK.fullmatch(hosts[0].strip()) is not None

    def log_message(self, format: str, *arguments: Any) -> None:
        # As it is spelled: a request must not move the cursor of a terminal that the log is read in.
        logger.debug("status request: %r", format % arguments)


def _not_found() -> Page:
    return 404, _TEXT, _PATHS.encode()


def _history_page(history: History, query: dict[str, str]) -> Page:
    resolution, since = query.get("resolution", "1"), query.get("since", "0")
    if resolution not in map(str, LENGTHS):
        raise _BadRequestError(f"resolution is seconds between samples (expected {' or '.join(map(str, LENGTHS))})")
    try:
        since_unix_s = float(since)
    except ValueError:
        since_unix_s = math.nan
    if not math.isfinite(since_unix_s):
        raise _BadRequestError("since is seconds since 1970 (expected a number)")
    return 200, _JSON, history.to_text(int(resolution), since_unix_s).encode()


def _json_page(code: int, content: Any) -> Page:
    # Browsers refuse NaN. There is none: heartbeats carry finite numbers, and a loss that is not is called "nan".
    return code, _JSON, json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
