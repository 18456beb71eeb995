"""What a collective is: operations that all ranks of one group call in the same order.

Every operation begins without waiting for other ranks and returns a ``Work``; ``Work.wait()`` returns when the result
is there. W is the world size, n the numel of the tensor that is named first::

    all_reduce(flat)                 flat[n] on each rank  ->  the sum of the W flats, on each rank
    all_gather(output, tensor)       tensor[n / W]         ->  output[n]: the W tensors in rank order, on each rank
    broadcast(tensors, source_rank)  the source's tensors  ->  the same, on each rank
    all_to_all(output, flat, sizes, senders)  flat, in parts  ->  output[S, n]: part r of each sender's flat, on rank r
    sum_contributions(memory, owners)  [1 + K, n]          ->  row 0: the sum of all ranks' K rows, on each rank
    barrier()                        nothing               ->  every rank has called it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from psengine.collectives.contributions import cut
from psengine.collectives.liveness import Liveness

# Whether to stop waiting; None: never.
Interruption = Callable[[], bool] | None


class Work(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self, is_interrupted: Interruption = None) -> bool:
        """Return True when the result may be read (on CUDA: by work queued on the current stream).

        Args:
            is_interrupted: asked now and then, where the transport can leave a wait; once it returns True, False is
                returned, and the operation is under way.

        Raises:
            CollectiveError: the operation failed or passed the collective's deadline.
            PeerLostError: the same, and ranks that died or do not answer could be named.
        """


class CompletedWork(Work):
    """The result was there before anybody asked."""

    def wait(self, is_interrupted: Interruption = None) -> bool:
        """Return at once."""
        return True


class DeferredWork(Work):
    """Work that is done by the wait: ``finish`` is called, once the operation ``after`` is over where there is one."""

    def __init__(self, finish: Callable[[], object], after: Work | None = None) -> None:
        self._finish = finish
        self._after = after or CompletedWork()

    def wait(self, is_interrupted: Interruption = None) -> bool:
        """Call it, unless the wait before was interrupted."""
        is_over = self._after.wait(is_interrupted)
        if is_over:
            self._finish()
        return is_over


class Intermediate(Work):
    """What an exchange yields for ``work`` where it begins another operation afterwards, which other buckets should not
    wait for: the driver goes on with it before anything is waited for to the end.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, is_interrupted: Interruption = None) -> bool:
        """Wait for ``work``."""
        return self._work.wait(is_interrupted)


class Collective(ABC):
    """One group of ranks that call the same operations in the same order.

    A transport implements the five operations; everything else has a default. ``Forwarding`` wraps another collective.

    Every operation is called by all ranks, with tensors of equal numel and dtype; operations complete in call order.
    Tensors must not be touched between the call and the end of ``Work.wait()``. Those that are written (``flat``,
    ``output``) are contiguous. Every wait has a deadline of ``timeout_s``, and its error names the ranks that are
    missing.

    Attributes:
        rank: this process in the group, 0 <= rank < world_size.
        world_size: number of ranks.
        timeout_s: seconds after which a wait is an error.
        liveness: where its ranks are, apart from its operations; None where nobody knows.
    """

    rank: int
    world_size: int
    timeout_s: float
    liveness: Liveness | None = None

    @property
    def scales_for_free(self) -> bool:
        """Whether ``all_reduce`` multiplies by ``scale`` without another pass over memory; else callers scale while
        they pack. Final once ``connect`` was called; never asks the other ranks.
        """
        return False

    def common_memory(self, size_bytes: int) -> Any:
        """Return a writable buffer of ``size_bytes`` zeros that is one memory for all ranks; all ranks call it.

        None, on every rank, where they share no memory.

        Raises:
            SharedMemoryUnavailableError: they do, and some rank got none.
        """
        return None

    @property
    def has_ended(self) -> bool:
        """Whether no operation can succeed any more: after ``close``, or after a failure that ended the whole group."""
        return False

    def connect(self) -> None:  # noqa: B027 - most transports are connected when they are made
        """Meet the other ranks, once; all ranks call it at the same place. Operations connect by themselves; call it to
        have ``scales_for_free`` final before the first one.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised flat tensor of ``numel`` elements in memory this collective reduces best."""
        return torch.empty(numel, dtype=dtype, device=device)

    @abstractmethod
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        """Begin ``flat = scale * sum of every rank's flat``. Mutates ``flat``.

        Args:
            flat: dense contiguous tensor, or a sparse COO one where the transport covers it.
            scale: factor applied once to the sum (transports may apply it to the addends); the same on every rank.
                Integers are summed only.
            what: name used in error messages, such as "gradient bucket 3".
        """

    def sum(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> None:
        """``all_reduce``, and wait for it; sooner than both where nothing is computed in between. Mutates ``flat``."""
        self.all_reduce(flat, scale, what=what).wait()

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        """Begin to fill ``output`` with every rank's ``tensor``, in rank order. Mutates ``output``.

        Args:
            output: dense contiguous tensor with ``world_size`` times as many elements of the same dtype.
            tensor: dense, of the same numel on every rank; may be this rank's part of ``output``.
            what: as for ``all_reduce``.
        """

    @abstractmethod
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        """Begin to fill row s of ``output`` with this rank's part of sender s's ``flat``. Mutates ``output``.

        Args:
            output: dense contiguous tensor of shape (number of senders, ``sizes[rank]``).
            flat: dense contiguous, 1-D, of the same numel and dtype on every sender; not read on other ranks.
            sizes: by rank, how many elements its part has; the same on every rank. Part 0 comes first.
            senders: ascending, the same on every rank.
            what: as for ``all_reduce``.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        """Begin to overwrite ``tensors``, dense and strided at will, on every rank by those of ``source_rank``."""

    @abstractmethod
    def barrier(self) -> Work:
        """Begin to wait until every rank has called it."""

    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        """Sum contributions, of which ranks have different numbers, with the bits that gloo's ``all_reduce`` gives if
        each is a rank's. The first ``next`` begins it without blocking; yields what it waits for.

        Default: every rank sums a slice of all contributions, and the sums are gathered. Slices that came take as much
        memory as this rank's contributions.

        Args:
            memory: from ``allocate``, of shape (1 + K, n) for the K contributions of this rank. Row 0 gets the sum; row
                1 + k is contribution k, which stays as it is.
            owners: by contribution, its rank and its k there; the same on every rank.
            what: as for ``all_reduce``.
        """
        pieces = cut(self, memory, owners, what)
        trades = [piece.trade() for piece in pieces]
        gathers = []
        for piece, works in zip(pieces, trades, strict=True):
            for work in works:
                yield Intermediate(work)
            gathers.append(piece.gather_sums())
        for piece, gather in zip(pieces, gathers, strict=True):
            yield gather
            piece.finish()

    def progress(self) -> None:  # noqa: B027 - most transports have somebody who works for them
        """Advance operations under way without waiting; cheap enough for every large gradient."""

    def gather(self, tensor: torch.Tensor, *, what: str = "tensor") -> list[torch.Tensor]:
        """Return every rank's ``tensor`` (same shape and dtype everywhere), in rank order; blocks."""
        tensor = tensor.detach()
        output = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self.all_gather(output, tensor, what=what).wait()
        return list(output.unbind())

    def gather_bytes(self, payload: bytes, device: torch.device, *, what: str = "bytes") -> list[bytes]:
        """Return every rank's ``payload``, of any length, in rank order; blocks.

        Args:
            payload: this rank's bytes.
            device: where the group exchanges tensors.
            what: as for ``all_reduce``.
        """
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [int(found.item()) for found in self.gather(length, what=f"length of {what}")]
        padded = _tensor_of(payload.ljust(max(1, *lengths), b"\0"), device)
        gathered = self.gather(padded, what=what)
        return [_bytes_of(found)[:length] for found, length in zip(gathered, lengths, strict=True)]

    def broadcast_bytes(self, payload: bytes, source_rank: int, device: torch.device, *, what: str = "bytes") -> bytes:
        """Return ``source_rank``'s ``payload``, of any length; other ranks' are ignored. Blocks."""
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        self.broadcast([length], source_rank, what=f"length of {what}").wait()
        size_bytes = int(length.item())
        sent = payload if self.rank == source_rank else bytes(size_bytes)
        content = _tensor_of(sent.ljust(1, b"\0"), device)
        self.broadcast([content], source_rank, what=what).wait()
        return _bytes_of(content)[:size_bytes]

    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        """Return the value of another exchange's future, such as a communication hook's.

        Raises:
            PeerLostError: ranks died meanwhile.
            CollectiveError: the deadline passed.
            Exception: the future's own error, where no rank is missing.
        """
        return future.wait()

    def abandon(self) -> None:
        """Leave a group that this collective alone uses, at once, from any thread. Operations under way are dropped,
        and fail on ranks that wait for this one; their tensors may be read as they are. Safe to call twice.
        """
        self.close()

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Release what the collective holds; its tensors must no longer be used. Safe to call twice."""


def _tensor_of(payload: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
