"""A collective that passes operations on to another one and counts the bytes: a file, and a line that registers it."""

import os
from collections.abc import Sequence

import torch
from typing_extensions import override

import psengine
from psengine.collectives.base import Collective, Work
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.registry import collective_for, default_group


class CountingCollective(Forwarding):
    """Notes each operation with the bytes of this rank's tensors that ``inner`` was given to send."""

    def __init__(self, inner: Collective) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, int]] = []
        self.progress_calls = 0

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        self.calls.append(("all_reduce", flat.nbytes))
        return super().all_reduce(flat, scale, what=what)

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        self.calls.append(("all_gather", tensor.nbytes))
        return super().all_gather(output, tensor, what=what)

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        self.calls.append(("all_to_all", flat.nbytes))
        return super().all_to_all(output, flat, sizes, senders, what=what)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        if self.rank == source_rank:
            self.calls.append(("broadcast", sum(tensor.nbytes for tensor in tensors)))
        return super().broadcast(tensors, source_rank, what=what)

    @override
    def progress(self) -> None:
        self.progress_calls += 1
        super().progress()


psengine.register_collective(
    "counting", lambda process_group, device: CountingCollective(collective_for(process_group, "auto", device))
)


def note_calls() -> list[tuple[str, int]]:
    """Where nobody names a collective, this rank takes "counting" from now on: (operation, bytes) of each call."""
    os.environ["PSENGINE_COLLECTIVE"] = "counting"
    counting = collective_for(default_group())
    assert isinstance(counting, CountingCollective)
    return counting.calls
