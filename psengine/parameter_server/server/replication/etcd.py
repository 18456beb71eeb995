"""An elector over etcd: its version 3 API as JSON over HTTP, which etcd's gateway speaks.

Two keys below ``psengine/NAME/``: ``leadership`` is the record, ``lease`` is bound to a lease of etcd's, which ends
some time after the leader has. Every change is one transaction that compares both.

Each request is sent once, to one of etcd's servers. Where that does not answer as it should, nothing is known of the
request, and the next one goes to the next server.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import urllib3

from psengine.parameter_server.server.replication.election import ElectorError, Leadership, decode_leadership

# Each request: connecting, and waiting for the answer. A leader goes on meanwhile.
TIMEOUT_S = 2.0


class EtcdElector:
    """See ``Elector``; used by one thread.

    Args:
        places: HOST:PORT of the servers of one etcd, or of what stands before them.
        name: of the server and its follower, in etcd.
        lease_s: how long the lease stands after it was renewed last; etcd counts whole seconds, and from 2 on.
        ca: certificates that theirs must be signed by; None: connections are plain.
        login: a user's name and password; None: etcd asks for none.
    """

    def __init__(
        self,
        places: Sequence[str],
        name: str,
        lease_s: float,
        *,
        ca: Path | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        self._places, self._scheme, self._login = list(places), "http" if ca is None else "https", login
        self._token = ""
        self._cluster = ""
        self._record, self._lease = (_encoded(f"psengine/{name}/{key}".encode()) for key in ("leadership", "lease"))
        self._ttl_s = max(1, math.ceil(lease_s))
        self._lease_id: str | None = None
        self._http = urllib3.PoolManager(timeout=TIMEOUT_S, retries=False, ca_certs=None if ca is None else str(ca))

    @property
    def _where(self) -> str:
        return f"etcd at {self._places[0]}"

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
        self._http.clear()

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        where = self._where
        try:
            if self._login is not None and not self._token:
                name, password = self._login
                self._token = self._post("auth/authenticate", {"name": name, "password": password}).get("token", "")
            return self._post(path, body)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            self._token = ""  # it may have run out
            self._places = [*self._places[1:], self._places[0]]
            raise ElectorError(
                f"{where} does not answer as it should (expected that within {TIMEOUT_S:g} s, got {error}): nobody"
                " takes over, or is added or dropped as a follower. Fix: start etcd, or mend the way to it, --etcd-ca"
                " or --etcd-login"
            ) from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url, headers = f"{self._scheme}://{self._places[0]}/v3/{path}", {"Authorization": self._token}
        answer = self._http.request("POST", url, body=json.dumps(body), headers=headers if self._token else None)
        found = json.loads(answer.data)
        if answer.status != 200 or not isinstance(found, dict):
            raise ValueError(f"{answer.status}: {answer.data[:200]!r}")
        cluster = found.get("result", found).get("header", {}).get("cluster_id", "")
        if cluster != (self._cluster or cluster):
            raise ValueError(f"another etcd: cluster {cluster}, not {self._cluster}")  # it has a record of its own
        self._cluster = cluster
        return found


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()
