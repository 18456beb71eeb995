"""What a server's status port serves: dashboard, health, status, metrics."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources

import msgspec

from psengine.parameter_server.server.status.prometheus import render_metrics
from psengine.parameter_server.status_model import ServerStatus
from psengine.status_port.http_status import HTML, JSON, TEXT, Pages

# One script, in this order: the server's data, charts, the rest of the page.
SCRIPTS = ("dashboard_data.js", "dashboard_charts.js", "dashboard.js")


def server_pages(status: Callable[[], ServerStatus], is_healthy: Callable[[], bool]) -> Pages:
    """The pages by path.

    Args:
        status: for /status.json and /metrics; called in request threads.
        is_healthy: for /healthz, 200 or 503.
    """
    return {
        "/": lambda: (200, HTML, dashboard()),
        "/status.json": lambda: (200, JSON, msgspec.json.encode(status())),
        "/metrics": lambda: (200, *render_metrics(status())),
        "/healthz": lambda: (200, TEXT, b"ok\n") if is_healthy() else (503, TEXT, b"a shard does not answer\n"),
    }


@cache
def dashboard() -> bytes:
    """The dashboard, without outside assets; its policy lets a browser run its own code and no other.

    So names of hosts and jobs could not become code even by mistake.
    """
    style, script = f"\n{_text('dashboard.css')}", "\n" + "\n".join(map(_text, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    page = _text("dashboard.html").replace("POLICY", policy)
    page = page.replace("<style></style>", f"<style>{style}</style>")
    return page.replace("<script></script>", f"<script>{script}</script>").encode()


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
