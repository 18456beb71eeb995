"""Shared memory for the operations it covers, another collective for the rest: "auto" and "shared_memory"."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, Work
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.collectives.shared_memory.common_memory import map_common_memory
from psengine.errors import SharedMemoryUnavailableError

logger = logging.getLogger(__name__)


class AutomaticCollective(Collective):
    """Two collectives of the same ranks, and for each operation a choice between them.

    The choice depends on the tensors' device, layout and dtype, which are the same on every rank, and on whether the
    ranks can share memory, which they find out together at the first operation that could use it.

    Args:
        shared: for CPU tensors where ranks share memory.
        otherwise: for everything else.
        required: raise where ranks cannot share memory; False logs that at info level, and uses ``otherwise``.
    """

    def __init__(self, shared: SharedMemoryCollective, otherwise: Collective, *, required: bool) -> None:
        self._shared = shared
        self._otherwise = otherwise
        self._required = required
        self._is_unavailable = False
        self.rank = otherwise.rank
        self.world_size = otherwise.world_size
        self.timeout_s = otherwise.timeout_s

    @property
    @override
    def scales_for_free(self) -> bool:
        return self._shared.is_connected

    @property
    @override
    def shares_memory(self) -> bool:
        return self._shared.is_connected

    @override
    def common_memory(self, size_bytes: int) -> Any:
        self.connect()
        return map_common_memory(self._shared, size_bytes) if self._shared.is_connected else None

    @property
    @override
    def has_ended(self) -> bool:
        return self._shared.has_ended or self._otherwise.has_ended

    @override
    def connect(self) -> None:
        """Raises ``SharedMemoryUnavailableError`` where it is required and the ranks cannot share memory."""
        self._otherwise.connect()
        if self._shared.is_connected or self._is_unavailable:
            return
        try:
            self._shared.connect()
        except SharedMemoryUnavailableError as error:
            if self._required:
                raise
            self._is_unavailable = True
            logger.info("%s; going on over torch.distributed", error)

    def _carrier(self, is_covered: bool) -> Collective:
        """The collective for an operation; ``is_covered``: shared memory covers its tensors."""
        shared = self._shared
        if is_covered and shared.is_connected:
            return shared
        if not is_covered or self._is_unavailable:
            return self._otherwise
        self.connect()
        return self._otherwise if self._is_unavailable else shared

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return (self._otherwise if self._is_unavailable else self._shared).allocate(numel, dtype, device)

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        work = self._shared.begin_at_once(flat, scale, what)
        return work or self._carrier(self._shared.sums(flat)).all_reduce(flat, scale, what=what)

    @override
    def sum(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> None:
        if not self._shared.sum_at_once(flat, scale, what):
            super().sum(flat, scale, what=what)

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        return self._carrier(self._shared.copies(tensor)).all_gather(output, tensor, what=what)

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], *, what: str = "tensor"
    ) -> Work:
        carrier = self._carrier(self._shared.copies(flat))
        return carrier.all_to_all(output, flat, sizes, what=what)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        carrier = self._carrier(all(self._shared.copies(tensor) for tensor in tensors))
        return carrier.broadcast(tensors, source_rank, what=what)

    @override
    def barrier(self, timeout_s: float | None = None) -> Work:
        return (self._shared if self._shared.is_connected else self._otherwise).barrier(timeout_s)

    @override
    def progress(self) -> None:
        if self._shared.is_connected:
            self._shared.progress()
        self._otherwise.progress()

    @override
    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        return self._otherwise.wait_for(future, what)

    @override
    def hosts(self) -> tuple[str, ...]:
        return self._shared.hosts() or self._otherwise.hosts()

    @override
    def diagnose(self, error: BaseException, what: str) -> Exception:
        return self._otherwise.diagnose(error, what)

    @override
    def close(self) -> None:
        self._shared.close()
        self._otherwise.close()
