"""What a timeline asks of its ranks: their spans on rank 0, and what their clocks say."""

from __future__ import annotations

import functools
import weakref

import torch

from psengine.collectives.base import Collective
from psengine.environment.context import world_place
from psengine.tracing.clocks import ROUNDS, Offset, estimate_offset
from psengine.tracing.timeline import now_ns, recorder, start_from_environment

# Of one rank's spans at a time, so that all ranks need only this much memory for them.
PIECE_BYTES = 16 * 1024 * 1024


class TimelineGroup:
    """The ranks of ``collective``, which exchanges tensors on ``device``; see ``timeline.Group``."""

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self.rank = collective.rank
        self.world_size = collective.world_size
        self._collective = collective
        self._device = device

    def measure_offset(self) -> Offset | None:
        """Compare this rank's clock with rank 0's; None where all ranks share a host. All ranks call it."""
        return self.exchange_clocks() if len(set(self._collective.hosts())) > 1 else None

    def exchange_clocks(self) -> Offset:
        """Compare clocks, whether ranks share a host or not."""
        sent, received, reference = [], [], []
        for _ in range(ROUNDS):
            sent.append(now_ns())
            mine = torch.tensor([sent[-1]], dtype=torch.int64, device=self._device)
            # The tensor is read before the clock is, or a device would answer later than it seems.
            reference.append(int(self._collective.gather(mine, what="clocks of the timeline")[0].item()))
            received.append(now_ns())
        return estimate_offset(sent, received, reference)

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's ``payload`` on rank 0, nothing on the others. All ranks call it."""
        mine = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        lengths = self._collective.gather(mine, what="length of the timeline")
        others = [self._broadcast(payload, rank, int(length.item())) for rank, length in enumerate(lengths) if rank > 0]
        return [payload, *others] if self.rank == 0 else []

    def _broadcast(self, payload: bytes, source_rank: int, length: int) -> bytes:
        received = bytearray()
        for start in range(0, length, PIECE_BYTES):
            own = payload[start : start + PIECE_BYTES] if self.rank == source_rank else b""
            piece = self._collective.broadcast_bytes(own, source_rank, self._device, what="timeline")
            if self.rank == 0:
                received += piece
        return bytes(received)


def attach(collective: Collective, device: torch.device, rank: int | None) -> None:
    """A model was wrapped: timelines are of these ranks from now on; begin one where the environment asks for it.

    Ranks are those of the whole job, whose processes write to one folder; replicas that are only some of it are no
    group to gather among, as others have the same ranks in theirs.

    Args:
        collective: the replicas; held weakly.
        device: where it exchanges tensors.
        rank: this worker's where it meets the others elsewhere; None: that in the default group.

    Raises:
        EnvironmentVariableError: see ``timeline.start_from_environment``.
    """
    world_rank, world_size = world_place()
    has_group = rank is None and collective.world_size == world_size
    find_group = functools.partial(_group, weakref.ref(collective), device, has_group)
    is_alone = rank is None and world_size == 1
    recorder.attach(world_rank if rank is None else rank, device.type, find_group, is_alone=is_alone)
    start_from_environment()


def _group(reference: weakref.ref[Collective], device: torch.device, has_group: bool) -> TimelineGroup | None:
    collective = reference()
    return TimelineGroup(collective, device) if has_group and collective is not None else None
