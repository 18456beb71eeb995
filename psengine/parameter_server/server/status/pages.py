"""What a server's status port serves: dashboard, health, status, history, metrics, actions."""

from __future__ import annotations

import math
from collections.abc import Callable

from typing_extensions import override

from psengine.parameter_server.server.status.actions import Actions
from psengine.parameter_server.server.status.dashboard_page import dashboard
from psengine.parameter_server.server.status.history import LENGTHS, History
from psengine.parameter_server.status_model import ServerStatus, to_json
from psengine.status_port.port import HTML, JSON, TEXT, Page, Pages, RefusedError, json_page


class ServerPages(Pages):
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
        self._actions = actions
        self._history = history
        super().__init__(
            {
                "/": lambda: (200, HTML, dashboard()[0]),
                "/healthz": lambda: (200, TEXT, b"ok\n") if is_healthy() else (503, TEXT, b"a shard does not answer\n"),
                "/status.json": lambda: json_page(200, to_json(status())),
                "/metrics": lambda: _metrics_page(status()),
                "/history.json": self._read_history,
            }
        )

    @property
    def html_policy(self) -> str:  # type: ignore[override]
        """The dashboard's."""
        return dashboard()[1]

    @override
    def is_public(self, path: str) -> bool:
        """The dashboard knows nothing itself; it asks for the token that its requests need."""
        return path == "/"

    @override
    def read(self, path: str, query: dict[str, str]) -> Page:
        if path == "/history.json" and set(query) <= {"resolution", "since"}:
            return self._read_history(**query)
        return super().read(path, query)

    @override
    def refusal(self, name: str, query: dict[str, str], *, may_act: bool) -> Page | None:
        refused = self._actions.refusal(name, query, may_act=may_act)
        return None if refused is None else json_page(*refused)

    @override
    def perform(self, name: str, query: dict[str, str]) -> Page:
        return json_page(*self._actions.perform(name, query))

    def _read_history(self, resolution: str = "1", since: str = "0") -> Page:
        if resolution not in map(str, LENGTHS):
            expected = " or ".join(map(str, LENGTHS))
            raise RefusedError(400, f"resolution is seconds between samples (expected {expected})")
        try:
            since_unix_s = float(since)
        except ValueError:
            since_unix_s = math.nan
        if not math.isfinite(since_unix_s):
            raise RefusedError(400, "since is seconds since 1970 (expected a number)")
        return 200, JSON, self._history.to_text(int(resolution), since_unix_s).encode()


def _metrics_page(status: ServerStatus) -> Page:
    from psengine.parameter_server.server.status.exposition import render_metrics

    return 200, *render_metrics(status)
