"""Ranks of one host agree on shared memory, and join it."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import torch

from psengine.collectives.base import Collective
from psengine.collectives.shared_memory.files import make_file, make_token, open_file, share_file, succeed_together
from psengine.errors import SharedMemoryUnavailableError
from psengine.kernels import native

# csrc/shared_memory/ring.h, Order
RING, BY_RANK = 0, 1
# csrc/shared_memory/group.h, kMaxWorldSize
MAX_WORLD_SIZE = 64
# A staging slot: pieces that stay in a core's second-level cache while ranks pass them on. Where ranks share cores each
# step costs a change of process instead, so there are fewer and larger ones.
SLOT_BYTES = 512 * 1024
SLOT_BYTES_WHERE_CORES_ARE_SHARED = 1024 * 1024
# csrc/shared_memory/layout.h, kSmallBytes
SLOT_BYTES_PER_RANK = 16 * 1024


class Place(NamedTuple):
    """Where a rank runs, in numbers.

    Attributes:
        cores: that it may use.
        process_id: in its process namespace.
        proof, token: see ``meet_hosts``.
    """

    cores: int
    process_id: int
    proof: int
    token: int


def meet_hosts(meeting: Collective) -> tuple[list[Place], tuple[tuple[int, ...], ...]]:
    """Find out, by trying, which ranks share memory; two exchanges. Return the place of each rank, and the ranks of
    each host, ascending, the host of rank 0 first: those that can open each other's memory.

    Each rank makes an anonymous file with a token in it, and opens those of the others as it would open their buckets.
    Neither a host's name nor its boot id counts: containers of one machine may have those in common and share nothing,
    or share a process table and a user's rights and have other names.
    """
    token = make_token()
    cores, proof = 0, -1  # which no rank can open
    if native.has_shared_memory():
        cores = len(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):
            proof = make_file("proof", 0, token)
    try:
        own = torch.tensor(Place(cores, os.getpid(), proof, token))
        places = [Place(*row.tolist()) for row in meeting.gather(own, what="who shares this host")]
        sees = torch.tensor([_can_open(place) for place in places])
        seen = [row.tolist() for row in meeting.gather(sees, what="who sees whose memory")]
    finally:
        if proof >= 0:
            os.close(proof)
    return places, _hosts(places, seen)


def _can_open(place: Place) -> bool:
    try:
        os.close(open_file(place.process_id, place.proof, place.token))
    except OSError:
        return False
    return True


def _hosts(places: list[Place], sees: list[list[bool]]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host. ``sees``: by rank, whether it can open the memory of each other rank."""
    hosts: list[list[int]] = []
    for rank in range(len(places)):
        for host in hosts:
            is_of_host = all(sees[rank][other] and sees[other][rank] for other in host)
            is_thread = places[rank].process_id in [places[other].process_id for other in host]
            if is_of_host and not is_thread and len(host) < MAX_WORLD_SIZE:
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(map(tuple, hosts))


def join_host_group(meeting: Collective, order: int) -> Any:
    """Join this rank to its group's shared memory and return the native handle; all ranks succeed, or all raise.

    Five exchanges over ``meeting``: each rank's host, who sees whom, the control block's place, has everybody joined,
    does everybody see everybody. ``order``: in which values are added, RING or BY_RANK.

    Raises:
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """
    places, hosts = meet_hosts(meeting)
    if len(hosts) > 1:
        raise SharedMemoryUnavailableError(
            f"collective 'shared_memory' cannot connect these ranks: rank {hosts[1][0]} and rank 0 cannot open each"
            f" other's memory (expected at most {MAX_WORLD_SIZE} processes of one user, host and process namespace,"
            " each with the native extension and /proc). Fix: collective='auto', or backend 'gloo'."
        )
    has_core_for_each = places[0].cores >= meeting.world_size
    slot_bytes = SLOT_BYTES if has_core_for_each else SLOT_BYTES_WHERE_CORES_ARE_SHARED
    slot_bytes = max(slot_bytes, meeting.world_size * SLOT_BYTES_PER_RANK)

    def join(descriptor: int, token: int) -> Any:
        try:
            return native.extension.shared_memory_join(
                descriptor, slot_bytes, meeting.rank, meeting.world_size, token, order
            )
        finally:
            os.close(descriptor)

    size_bytes = native.extension.shared_memory_control_bytes(meeting.world_size, slot_bytes)
    group = share_file(meeting, size_bytes, join)
    succeed_together(meeting, lambda: native.extension.shared_memory_watch_peers(group))
    return group
