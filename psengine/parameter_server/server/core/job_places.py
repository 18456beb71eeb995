"""Who may begin another job at a server that has a bounded number of them. Pure.

A job is begun by the first HELLO that names it, and that costs its sender nothing. So nobody may begin more than a
share, and a job without values makes room for one of somebody who has begun fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.job import Job
from psengine.protocol.messages import ErrorCode

MAX_JOBS = 256
# Of one key, user or address; the others' workers always find a place.
MAX_JOBS_OF_ONE = 192


def check_place(jobs: Collection[Job], peer: str, name: str) -> None:
    """Raise ProtocolError where another job of ``peer`` finds no place."""
    if not is_full(jobs, peer):
        return
    most = f"at most {MAX_JOBS}" if len(jobs) >= MAX_JOBS else f"at most {MAX_JOBS_OF_ONE} begun from {peer}"
    raise ProtocolError(
        f"this server has its most jobs already (expected {most}, got one more, {name!r}). Fix: end one that is no"
        " longer needed, by POST /actions/forget?job=NAME at the server's status port (--status-port, --status-token);"
        " or use another server.",
        ErrorCode.MEMORY,
    )


def is_full(jobs: Collection[Job], peer: str) -> bool:
    """Whether another job of ``peer`` finds no free place. "" is nobody in particular, who may have them all."""
    return len(jobs) >= MAX_JOBS or (peer != "" and _count(jobs, peer) >= MAX_JOBS_OF_ONE)


def find_replaceable(jobs: Collection[Job], peer: str, silent_since_s: float) -> Job | None:
    """A job that makes room for another one of ``peer``: it has no values, and

    - it is that of who has begun most of those, and more than ``peer``, the oldest first; or
    - it is ``peer``'s own, and none of its workers has said anything since ``silent_since_s``.
    """
    unsealed = [job for job in jobs if not job.is_sealed]
    begun = Counter(job.begun_by for job in unsealed)
    if _count(jobs, peer) < MAX_JOBS_OF_ONE:
        for greedy, count in begun.most_common(1):
            if count > begun[peer] + 1 and greedy != peer:
                return next(job for job in unsealed if job.begun_by == greedy)
    own = (job for job in unsealed if job.begun_by == peer)
    return next((job for job in own if job.membership.heard_s < silent_since_s), None)


def _count(jobs: Collection[Job], peer: str) -> int:
    return sum(job.begun_by == peer for job in jobs)
