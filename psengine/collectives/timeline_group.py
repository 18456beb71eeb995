"""The ranks of a timeline: they send their spans to rank 0, and compare clocks."""

from __future__ import annotations

import functools
import weakref

import torch

from psengine.collectives.base import Collective
from psengine.environment.context import world_place
from psengine.tracing.clocks import ROUNDS, Offset, estimate_offset
from psengine.tracing.timeline import now_ns, recorder, start_from_environment


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
            # Read the tensor before the clock, which so includes a device's time.
            reference.append(int(self._collective.gather(mine, what="clocks of the timeline")[0].item()))
            received.append(now_ns())
        return estimate_offset(sent, received, reference)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's ``payload`` on rank 0, nothing on others; one rank's at a time. All ranks call it."""
        received = [payload]
        for rank in range(1, self.world_size):
            found = self._collective.broadcast_bytes(payload, rank, self._device, what="timeline")
            if self.rank == 0:
                received.append(found)
        self._collective.barrier().wait()  # the source of a broadcast does not wait for its receivers
        return received if self.rank == 0 else []


def attach(collective: Collective, device: torch.device, rank: int | None) -> None:
    """A model was wrapped: timelines are of these ranks from now on; begin one where the environment asks for it.

    Replicas that are only some of the job's ranks do not gather: other replicas have the same ranks in their groups.

    Args:
        collective: the replicas; held weakly.
        device: where it exchanges tensors.
        rank: this worker's at its servers; None for that in the default group.

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
