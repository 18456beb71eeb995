"""An elector over etcd: its version 3 API as JSON over HTTP, which etcd's gateway speaks.

Two keys below ``psengine/NAME/``: ``leadership`` is the record, ``lease`` is bound to a lease of etcd's, which ends
some time after the leader has. Every change is one transaction that compares both.
"""

from __future__ import annotations

import base64
import json
import math
from contextlib import suppress
from typing import Any

import urllib3

from psengine.parameter_server.server.replication.election import ElectorError, Leadership, decode_leadership

# Each request: connecting, and waiting for the answer. A leader goes on meanwhile.
TIMEOUT_S = 2.0


class EtcdElector:
    """See ``Elector``; used by one thread.

    Args:
        place: HOST:PORT of an etcd server, or of what stands before several.
        name: of the server and its follower, in etcd.
        lease_s: how long the lease stands after it was renewed last; etcd counts whole seconds, and from 2 on.
    """

    def __init__(self, place: str, name: str, lease_s: float) -> None:
        self._where = f"etcd at {place}"
        self._record, self._lease = (_encoded(f"psengine/{name}/{key}".encode()) for key in ("leadership", "lease"))
        self._ttl_s = max(1, math.ceil(lease_s))
        self._lease_id: str | None = None
        self._http = urllib3.connection_from_url(f"http://{place}", timeout=TIMEOUT_S, retries=False)

    def read(self) -> tuple[Leadership | None, bool]:
        """Both keys, as they were at one time."""
        ranges = [{"request_range": {"key": key}} for key in (self._record, self._lease)]
        record, lease = (
            one["response_range"].get("kvs", []) for one in self._ask("kv/txn", success=ranges)["responses"]
        )
        text = base64.b64decode(record[0]["value"]) if record else b""
        return decode_leadership(text, f"{self._where}, its leadership key,") if record else None, bool(lease)

    def replace(self, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        """A transaction; the lease is granted before, and ends by itself where it is not used."""
        is_old: dict[str, Any] = {"key": self._record, "target": "VERSION", "version": "0"}
        if old is not None:
            is_old = {"key": self._record, "target": "VALUE", "value": _encoded(old.encode())}
        compare, changes = [is_old], [{"request_put": {"key": self._record, "value": _encoded(new.encode())}}]
        if takes_over:
            if not self.renew():
                self._lease_id = self._ask("lease/grant", TTL=str(self._ttl_s))["ID"]
            compare.append({"key": self._lease, "target": "VERSION", "version": "0"})
            changes.append({"request_put": {"key": self._lease, "value": "", "lease": self._lease_id or ""}})
        return bool(self._ask("kv/txn", compare=compare, success=changes).get("succeeded", False))

    def renew(self) -> bool:
        """Whether etcd still has the lease; if so, for as long again."""
        if self._lease_id is None:
            return False
        answer = self._ask("lease/keepalive", ID=self._lease_id)
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def ask_to_end(self, leadership: Leadership) -> None:
        """Nobody could; its lease ends."""

    def close(self) -> None:
        """Give the lease back."""
        if self._lease_id is not None:
            with suppress(ElectorError):
                self._ask("lease/revoke", ID=self._lease_id)
        self._http.close()

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        try:
            answer = self._http.request("POST", f"/v3/{path}", body=json.dumps(body))
            found = json.loads(answer.data)
            if answer.status == 200 and isinstance(found, dict):
                return found
            raise ValueError(f"{answer.status}: {answer.data[:200]!r}")
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            got = "" if isinstance(error, urllib3.exceptions.HTTPError) else f", got {error}"
            raise ElectorError(
                f"{self._where} does not answer (expected it within {TIMEOUT_S:g} s{got}): nobody takes over, or is"
                " added or dropped as a follower. Fix: start etcd, or mend the way to it"
            ) from error


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()
