"""Pages over HTTP, to read alone, for people and for Prometheus.

    accept ──► a thread for each connection, at most MAX_CONNECTIONS ──► the page's function ──► answer

Nothing can be changed here. On loopback every user of this machine may read. Another site's page, in a browser on this
machine, may not: no answer carries CORS headers, and a port on loopback refuses requests under another host's name, as
DNS rebinding sends them.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REQUEST_TIMEOUT_S = 5.0  # of one read or write
MAX_CONNECTIONS = 64
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
# Any port: the page may be looked at through a tunnel that ends at another one (ssh -L 8000:127.0.0.1:9100).
_LOOPBACK_NAME = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}

# Status code, content type and content.
Page: TypeAlias = tuple[int, str, bytes]
Pages: TypeAlias = Mapping[str, Callable[[], Page]]  # by path


class HttpStatus:
    """Serves pages from its own threads, between ``__enter__`` and ``__exit__``.

    Args:
        port: 0 takes a free one.
        pages: by path.
        host: the address to bind.

    Attributes:
        url: such as ``http://127.0.0.1:9100``; with this host's name where the address is every interface's.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, port: int, pages: Pages, *, host: str = LOOPBACK) -> None:
        self._server = _Server(host.strip("[]"), port, pages)
        name, bound = map(str, self._server.server_address[:2])
        name = socket.gethostname() if name in ("0.0.0.0", "::") else name
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="psengine-http", daemon=True
        )

    def drop_copy(self) -> None:
        """In a forked child: close its copy of the socket, which would keep the port taken; the parent serves on."""
        self._server.socket.close()

    def __enter__(self) -> HttpStatus:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self.pages = pages
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.is_local = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        # Without HTTPServer's search for the address's name, which may wait for DNS and which nobody uses.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a status request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "psengine"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        code, kind, content = self._page()
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - http.server's

    def _page(self) -> Page:
        if self.server.is_local and not _LOOPBACK_NAME.fullmatch(self.headers.get("Host", "").strip()):
            return 421, TEXT, b"this port answers to 127.0.0.1, localhost and [::1] alone\n"
        path = self.path.partition("?")[0]
        if path not in self.server.pages:
            return 404, TEXT, f"there are {', '.join(self.server.pages)}\n".encode()
        try:
            return self.server.pages[path]()
        except Exception:
            logger.exception("no answer to %r", self.path)
            return 500, TEXT, b"the log says why\n"

    def log_message(self, format: str, *arguments: Any) -> None:
        # Escaped: a request must not move the cursor of a terminal that the log is read in.
        logger.debug("status request: %r", format % arguments)
