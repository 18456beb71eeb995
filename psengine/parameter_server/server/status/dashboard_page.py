"""The dashboard: one page without outside assets, and the policy that lets a browser run its code and no other."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from psengine.status_port.port import NOTHING_POLICY

# One script, in this order: the server's data, charts, the rest of the page.
SCRIPTS = ("dashboard_data.js", "dashboard_charts.js", "dashboard.js")


@cache
def dashboard() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: names of hosts and jobs could not become code even by mistake."""
    style = f"\n{_text('dashboard.css')}"
    script = "\n" + "\n".join(map(_text, SCRIPTS))
    page = _text("dashboard.html")
    page = page.replace("<style></style>", f"<style>{style}</style>")
    page = page.replace("<script></script>", f"<script>{script}</script>")
    policy = [
        NOTHING_POLICY,
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ]
    return page.encode(), "; ".join(policy)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
