"""Why a process may not have the rank that it says HELLO for, as its worker reads it. Pure."""

from __future__ import annotations

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.membership import Member
from psengine.protocol.messages import ErrorCode


def rank_taken(job: str, rank: int | None, verdict: str, holder: Member | None) -> ProtocolError:
    """Why ``Membership.greet`` refuses a process."""
    if verdict == "denied":
        return ProtocolError(f"rank {rank} of job {job!r} belongs to another key", ErrorCode.DUPLICATE_RANK)
    if verdict == "replaced":
        return ProtocolError(
            f"rank {rank} of job {job!r} went to a newer process while this one was silent, so that nobody"
            " knows which of its updates count (expected one process for each rank). Let this process end; where"
            " processes are slow and not dead, raise --lease-s.",
            ErrorCode.DUPLICATE_RANK,
        )
    where = f"process {holder.pid} on {holder.host}" if holder is not None else "another process"
    return ProtocolError(
        f"rank {rank} of job {job!r} is held by {where}, which is alive. Every worker needs a rank of its"
        " own: check RANK, or give this run a job of its own (PSENGINE_JOB).",
        ErrorCode.DUPLICATE_RANK,
    )
