"""What a server's status port serves: dashboard, health, status, history, metrics."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources

from psengine.parameter_server.server.status.history import LENGTHS, History
from psengine.parameter_server.server.status.prometheus import render_metrics
from psengine.parameter_server.status_model import ServerStatus, to_json
from psengine.status_port.http_status import HTML, JSON, TEXT, Page, Pages, json_page

# One script, in this order: the server's data, charts, the rest of the page.
SCRIPTS = ("dashboard_data.js", "dashboard_charts.js", "dashboard.js")


def server_pages(status: Callable[[], ServerStatus], is_healthy: Callable[[], bool], history: History) -> Pages:
    """The pages by path.

    Args:
        status: for /status.json and /metrics; called in request threads.
        is_healthy: for /healthz, 200 or 503.
        history: for /history.json; started and ended by the caller.
    """
    return {
        "/": lambda query: (200, HTML, dashboard()),
        "/status.json": lambda query: json_page(to_json(status())),
        "/history.json": lambda query: _history_page(history, query),
        "/metrics": lambda query: (200, *render_metrics(status())),
        "/healthz": lambda query: (200, TEXT, b"ok\n") if is_healthy() else (503, TEXT, b"a shard does not answer\n"),
    }


def _history_page(history: History, query: Mapping[str, str]) -> Page:
    resolution, since_unix_s = query.get("resolution", "1"), float(query.get("since", "0"))
    if resolution not in map(str, LENGTHS) or not math.isfinite(since_unix_s):
        expected = " or ".join(map(str, LENGTHS))
        raise ValueError(f"expected resolution={expected}, seconds between samples, and since=SECONDS since 1970")
    return 200, JSON, history.to_text(int(resolution), since_unix_s).encode()


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
