"""Which parameters a backward used: on this rank as it happens, on any rank once the ranks have agreed.

A parameter that some rank used is averaged everywhere; one that no rank used keeps its gradient, None included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from psengine.collectives.base import Work
from psengine.gradients.error_texts import NONE_UNUSED_MESSAGE
from psengine.strategies.base import Strategy

logger = logging.getLogger(__name__)


class ParameterUsage:
    """The used-map of one replica, and the search for parameters that will get no gradient.

    Args:
        nodes: per parameter its gradient accumulation node.
        device: where the map is summed over ranks.
        strategy: sums it.

    Attributes:
        used: by parameter, 1 where this rank used it since the last agreement; after an agreement, where any rank did.
        unused: indices of parameters that the last search, or a static graph's first backward, found without gradient.
        never_changed: whether every search found the same ones.
        summed: by parameter, how many ranks used it in the last backward that agreed on it: int32.
    """

    def __init__(self, nodes: Sequence[Any], device: torch.device, strategy: Strategy) -> None:
        self.used = bytearray(len(nodes))
        self.unused: list[int] = []
        self.never_changed = True
        self._index_of_node = {node: index for index, node in enumerate(nodes)}
        self._device = device
        self._strategy = strategy
        self.summed = torch.zeros(len(nodes), dtype=torch.int32, device=device)
        self._work: Work | None = None
        self._unused_everywhere: set[int] = set()
        self._searches = 0
        self._has_warned = False

    def search(self, outputs: Iterable[torch.Tensor]) -> None:
        """Find the parameters that the graph behind ``outputs`` does not reach."""
        previously_unused = self.unused
        with torch.autograd.profiler.record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            self.unused = self._unreached(outputs)
        if self._searches > 0 and self.unused != previously_unused:
            self.never_changed = False
        self._searches += 1
        if not self.unused and not self._has_warned:
            self._has_warned = True
            logger.warning(NONE_UNUSED_MESSAGE)

    def _unreached(self, outputs: Iterable[torch.Tensor]) -> list[int]:
        stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(stack)
        missing = set(self._index_of_node)
        while stack and missing:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    missing.discard(node)
                    stack.append(node)
        return sorted(self._index_of_node[node] for node in missing)

    def agree_before_backward(self, *, has_data: bool) -> None:
        """Settle now which parameters no rank uses, counting what was used inside no_sync; blocks.

        A rank without data uses none.
        """
        used = torch.full((len(self.used),), int(has_data), dtype=torch.int32)
        used[[index for index in self.unused if not self.used[index]]] = 0
        used = used.to(self._device)
        self._strategy.reduce_usage(used).wait()
        self._unused_everywhere = {index for index, count in enumerate(used.tolist()) if count == 0}

    def is_unused_everywhere(self, indices: Sequence[int]) -> bool:
        """Whether the ranks agreed before backward that none uses any of these parameters."""
        return self._unused_everywhere.issuperset(indices)

    def reduce(self) -> None:
        """Begin summing this rank's map over ranks."""
        self.summed = torch.frombuffer(bytearray(self.used), dtype=torch.uint8).to(torch.int32).to(self._device)
        self._work = self._strategy.reduce_usage(self.summed)

    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        """For each of these parameters whether no rank used it; None where some rank used each of them."""
        if all(self.used[index] for index in indices):
            return None  # without waiting for the other ranks
        self._take_sum()
        unused = [not self.used[index] for index in indices]
        return unused if any(unused) else None

    def _take_sum(self) -> None:
        """Where a sum is under way: wait for it; ``used`` is what any rank used from now on."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.used = bytearray(self.summed.ne(0).to(torch.uint8).tolist())

    def settle(self, *, forget: bool) -> None:
        """The end of a backward; ``forget`` starts a new map, otherwise this one holds for good (a static graph's)."""
        self._take_sum()  # ranks must not sum two maps at once
        self._unused_everywhere = set()
        if forget:
            self.used = bytearray(len(self.used))

    def shadow(self) -> None:
        """Take part in other ranks' agreement as one that used nothing; blocks."""
        self._strategy.reduce_usage(torch.zeros_like(self.summed)).wait()
