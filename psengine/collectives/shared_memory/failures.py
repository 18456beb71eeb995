"""The error to raise after a failed wait in shared memory."""

from __future__ import annotations

from psengine.errors import CollectiveError, PeerLostError

# csrc/shared_memory/group.h, WaitStatus
LOST, TIMED_OUT, MISMATCHED, CLOSED, UNDER_WAY = 1, 2, 3, 4, 6


def error_of(
    what: str,
    rank: int,
    host: str,
    timeout_s: float,
    states: list[tuple[int, int, int, bool, bool]],
    failure: tuple[int, int, str],
) -> CollectiveError:
    """Return the error, which names the operation and the ranks that failed.

    Args:
        what: the operation.
        rank: this rank.
        host: the name of this host.
        timeout_s: the deadline of the wait.
        states: by rank: process id, rounds entered, rounds finished, has it left, does its process run.
        failure: status, the ranks as bits, and what differs between ranks for ``MISMATCHED``.
    """
    status, rank_bits, detail = failure
    world_size = len(states)
    failed = f"{what} failed on rank {rank} of {world_size}"
    if status == MISMATCHED:
        return CollectiveError(
            f"{failed}: ranks must call the same operations in the same order ({detail or 'another rank differs'})."
            " Look for a branch that only some ranks take."
        )
    ranks = tuple(other for other in range(world_size) if rank_bits >> other & 1)
    if rank in ranks:
        return CollectiveError(
            f"{failed}: the group has ended, because another rank stopped waiting for this one (its timeout passed,"
            " or it left with operations under way). Look at the first error in the output of the other ranks."
        )
    if not ranks:
        return CollectiveError(f"{failed}: no result within {timeout_s:g} s, though every rank arrived")
    fates = {LOST: "has exited", TIMED_OUT: f"did not arrive within {timeout_s:g} s", CLOSED: "has left the group"}
    lost = ", ".join(
        f"rank {other} (process {process_id} on {host}, which {fates[status if is_running else LOST]})"
        for other, (process_id, *_, is_running) in enumerate(states)
        if other in ranks
    )
    return PeerLostError(
        f"Lost {lost}. {failed}.\nLook at the first error in the output of the ranks named above; restart the job"
        " from its last checkpoint.",
        ranks,
    )
