"""The contributions to one step of a chunk, added in the order of ranks. Pure.

    rank 0   here ─┐            The gradients of the lowest ranks are added as soon as nobody can come between them;
    rank 1   here ─┴ added      the rest when the step is closed. Contributions are kept until then: one that does
    rank 2   awaited            not count after all is taken out again, and the sum that it is part of is made anew.
    rank 3   here, kept

They are added in float32 at least. The bits of the sum do not depend on the order of arrival. Where workers weigh their
gradients (by the sizes of their batches), the average is sum(u g) / sum(u), in the same order and type, u being weights
scaled by a power of two; equal weights give the very bits of no weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from psengine.errors import ProtocolError
from psengine.kernels import ops
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.exchange import Contribution
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode

# Of these nothing is added: the lowest rank's counts.
LOWEST = (ChunkKind.BUFFER, ChunkKind.ACCOUNT)


class ContributionSet:
    """See the module's text."""

    def __init__(self, spec: ChunkSpec) -> None:
        self._spec = spec
        self._dtype = torch.float32 if spec.dtype in (torch.float16, torch.bfloat16) else spec.dtype
        self.by_rank: dict[int, Contribution] = {}
        self._added: list[Contribution] = []  # ascending by rank
        # Their sum, nobody else's memory; None until there are two: the first is not copied for itself.
        self._total: torch.Tensor | None = None

    def add(self, contribution: Contribution, live: Sequence[int]) -> None:
        """One more, which was checked, of a rank that is not here yet; ``live``: the ranks awaited, ascending."""
        self.by_rank[contribution.rank] = contribution
        if self._spec.kind in LOWEST or len(self.by_rank) == len(live):
            return  # nothing is added, or the rest at once, into the result
        for rank in live:
            if self._added and rank <= self._added[-1].rank:
                continue
            one = self.by_rank.get(rank)
            if one is None:
                return
            if one.values is None:
                continue
            if self._added and one.weight != self._added[0].weight:
                return  # those that weigh differently are scaled at the end
            self._add(one)

    def remove(self, rank: int) -> None:
        """The contribution of this worker does not count after all."""
        del self.by_rank[rank]
        if any(one.rank == rank for one in self._added):
            self._added, self._total = [], None

    @property
    def size_bytes(self) -> int:
        """Memory of the contributions and of what is added already."""
        return len(self.given) * self._spec.size_bytes + (0 if self._total is None else self._total.nbytes)

    @property
    def given(self) -> list[Contribution]:
        """Those that bring values, in the order of ranks."""
        return [one for _, one in sorted(self.by_rank.items()) if one.values is not None]

    def combine(self, memory: Callable[[], Place]) -> Place | None:
        """The average of gradients, the lowest rank's buffer, or the sum of usage maps; None where there is none.

        To be called once, at the end. A single contribution comes back as its own memory, unless it is borrowed.

        Args:
            memory: makes the place of the result, uninitialised, like the chunk's values.
        """
        given = self.given
        if not given:
            return None
        first = given[0]
        if self._spec.kind in LOWEST or len(given) == 1:
            assert first.values is not None
            return _copied(first.values, memory()) if first.is_borrowed else Place(first.values)
        weights = [one.weight for one in given if one.weight is not None]
        if len(set(weights)) > 1:
            values = [one.values for one in given if one.values is not None]
            return _copied(self._combine_weighted(values, weights), memory())
        if given[: len(self._added)] != self._added:  # a worker that was not awaited stands between them
            self._added, self._total = [], None
        result, count = memory(), len(given)
        for one in given[len(self._added) :]:
            self._add(one, result.values if one is given[-1] else None)
        total = self._total
        assert total is not None
        if self._spec.kind is not ChunkKind.USAGE:
            if total.is_floating_point() and not count & (count - 1):
                total *= 1.0 / count  # exactly the quotient, in less time
            else:
                total /= count
        return result if total is result.values else _copied(total, result)

    def _add(self, contribution: Contribution, into: torch.Tensor | None = None) -> None:
        """Add the next one; the sum is ``into`` from then on, where that has the type in which they are added."""
        values, first = contribution.values, self._added[0].values if self._added else None
        assert values is not None
        self._added.append(contribution)
        if first is None:
            return
        if first.dtype is self._dtype and (self._total is None or into is not None):
            self._total = torch.add(first if self._total is None else self._total, values, out=into)
            return
        if self._total is None:
            self._total = first.to(self._dtype)
        if self._total.is_floating_point():
            ops.accumulate_(self._total, values)  # 16-bit values are widened in the same pass
        else:
            self._total += values

    def _combine_weighted(self, tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        # Weights of up to 1e12 would overflow what gradients are added in. By a power of two they are scaled exactly.
        _, exponent = math.frexp(max(weights))
        scaled = [math.ldexp(weight, -exponent) for weight in weights]
        total = torch.zeros(self._spec.numel, dtype=self._dtype)
        for values, weight in zip(tensors, scaled, strict=True):
            if total.is_floating_point():
                ops.accumulate_(total, values, weight)
            else:
                total.add_(values, alpha=weight)
        return total.div_(sum(scaled))


def check_weight(spec: ChunkSpec, contribution: Contribution, others: Iterable[Contribution]) -> None:
    """Raise ProtocolError for a weight that ``others`` lack, or for a gradient without one where they have weights."""
    if contribution.weight is None and contribution.values is None:
        return  # it abstains, from either kind
    # Those that are here agree: the first one that does not abstain tells.
    other = next((one for one in others if one.values is not None or one.weight is not None), contribution)
    if (other.weight is None) != (contribution.weight is None):
        weighs, not_ = (contribution, other) if other.weight is None else (other, contribution)
        raise ProtocolError(
            f"{spec.describe()}: in step {contribution.step} worker {weighs.rank} weighs its gradient and worker"
            f" {not_.rank} does not (expected a weight of every worker, or of none). Set model.batch_weight on all"
            " workers in every step, or on none.",
            ErrorCode.BAD_VALUE,
        )


def _copied(values: torch.Tensor, place: Place) -> Place:
    place.values.copy_(values)
    return place
