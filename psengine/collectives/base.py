"""What the engine asks of a collective: sum a flat tensor over ranks, copy one from a rank, wait for everybody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from psengine.errors import CollectiveError


class Work(ABC):
    """An operation under way.

    Attributes:
        square_sum: after ``wait``, the sum of squares of an all-reduce's result, the same bits on every rank; None
            where nobody asked (``Collective.collects_square_sums``) or the transport does not see it.
    """

    square_sum: float | None = None

    @abstractmethod
    def wait(self) -> None:
        """Return when the result may be read (on CUDA: by work queued on the current stream).

        Raises:
            CollectiveError: the operation failed or passed the collective's deadline.
            PeerLostError: the same, and ranks that died or do not answer could be named.
        """


class CompletedWork(Work):
    """The result was there before anybody asked."""

    def wait(self) -> None:
        """Return at once."""


class Collective(ABC):
    """One group of ranks that call the same operations in the same order.

    Every operation is called by all ranks with tensors of equal numel and dtype; operations complete in call order.
    Every wait has a deadline of ``timeout_s`` and its error names the ranks that are missing.

    Attributes:
        rank: this process in the group, 0 <= rank < world_size.
        world_size: number of ranks.
        timeout_s: seconds after which a wait is an error.
        scales_for_free: True where ``all_reduce`` multiplies by ``scale`` without another pass over memory, so that
            callers should leave the scaling to it; False where they should scale while packing.
        collects_square_sums: set to let works yield ``square_sum`` where that costs no further pass.
    """

    rank: int
    world_size: int
    timeout_s: float
    scales_for_free: bool = False
    collects_square_sums: bool = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised flat tensor of ``numel`` elements in memory this collective reduces best."""
        return torch.empty(numel, dtype=dtype, device=device)

    @abstractmethod
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        """Begin ``flat = scale * sum of every rank's flat``; never blocks. Mutates ``flat``, which must stay untouched
        until the work is waited for.

        Args:
            flat: dense contiguous tensor, or a sparse COO one where the transport covers it.
            scale: factor applied once to the sum (transports may apply it to the addends); the same on every rank.
            what: name used in error messages, such as "gradient bucket 3".
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> None:
        """Overwrite ``tensors`` on every rank by those of ``source_rank``; returns when they may be read."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, *, what: str = "tensor") -> list[torch.Tensor]:
        """Return every rank's ``tensor`` (same shape and dtype everywhere), in rank order; blocks."""

    @abstractmethod
    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it; ``timeout_s`` overrides the collective's own deadline."""

    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        """Return the value of somebody else's exchange (a communication hook's) once it is there.

        Raises:
            PeerLostError: ranks died meanwhile.
            CollectiveError: the deadline passed.
            Exception: what the future failed with, where nobody is missing.
        """
        return future.wait()

    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, by name; () where that is not known. Any rank may ask, at any time."""
        return ()

    def diagnose(self, error: BaseException, what: str) -> Exception:
        """Return the exception to raise for ``error``, which ``what`` failed with: who is missing, and what to do."""
        return CollectiveError(f"{what} failed on rank {self.rank}: {error}")

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Release what the collective holds; its tensors must no longer be used. Safe to call twice."""
