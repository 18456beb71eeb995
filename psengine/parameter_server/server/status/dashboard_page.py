"""The dashboard: one page without outside assets, and the policy that lets a browser run its code and no other."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

NOTHING = "default-src 'none'; frame-ancestors 'none'"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def dashboard() -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy: names of hosts and jobs could not become code even by mistake."""
    text = resources.files(__package__).joinpath("dashboard.html").read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = [
        NOTHING,
        *(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items()),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ]
    return text.encode(), "; ".join(policy)
