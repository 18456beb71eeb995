"""Which servers do not even take a connection? Asked before workers start, who would try in silence."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CONNECT_S = 2.0
# Over several servers the first few tell enough.
_MAX_ADDRESSES = 16


def silent_servers(addresses: Sequence[str], *, deadline_s: float = CONNECT_S) -> list[str]:
    """Those of ``addresses`` whose port nobody serves: refused, unknown, or silent for ``deadline_s``.

    Only tcp:// ones are tried, all at once. A server behind a proxy may be taken for one that is there.
    """
    tried = [address for address in addresses if address.startswith("tcp://")][:_MAX_ADDRESSES]
    if not tried:
        return []
    with ThreadPoolExecutor(len(tried)) as pool:
        answers = list(pool.map(lambda address: _answers(address, deadline_s), tried))
    return [address for address, does_answer in zip(tried, answers, strict=True) if not does_answer]


def _answers(address: str, deadline_s: float) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s).close()
    except OSError:
        return False
    return True
