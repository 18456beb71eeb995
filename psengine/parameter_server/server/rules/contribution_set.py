"""The contributions to one exchange of a chunk, and what they come to: added in the order of ranks. Pure.

They are added in float32 at least. The bits of the sum do not depend on the order of arrival. Where workers weigh their
gradients (by the sizes of their batches), the average is sum(u g) / sum(u), in the same order and type, u being weights
scaled by a power of two; equal weights give the very bits of no weights.
"""

from __future__ import annotations

import math

import torch

from psengine.errors import ProtocolError
from psengine.kernels import ops
from psengine.parameter_server.server.rules.exchange import Contribution
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode


class ContributionSet:
    """See the module's text.

    Attributes:
        by_rank: the contributions.
    """

    def __init__(self, spec: ChunkSpec) -> None:
        self._spec = spec
        self.by_rank: dict[int, Contribution] = {}

    def add(self, contribution: Contribution) -> None:
        """One more, which was checked."""
        self.by_rank[contribution.rank] = contribution

    def remove(self, rank: int) -> None:
        """The contribution of this worker does not count after all."""
        del self.by_rank[rank]

    @property
    def given(self) -> list[Contribution]:
        """Those that bring values, in the order of ranks."""
        return [one for _, one in sorted(self.by_rank.items()) if one.values is not None]

    def check_weight(self, contribution: Contribution) -> None:
        """Raise ProtocolError for a weight that makes no sense here, or where one is missing."""
        weight, spec = contribution.weight, self._spec
        if weight is not None and spec.kind is not ChunkKind.PARAMETER:
            raise ProtocolError(
                f"{spec.describe()} is a {spec.kind.value}, of which there is no weighted average (expected"
                f" no weight, got {weight:g})",
                ErrorCode.BAD_VALUE,
            )
        if weight is not None and (weight == 0) != (contribution.values is None):
            raise ProtocolError(
                f"{spec.describe()}: weight 0 goes with no gradient, and every other with one (got weight"
                f" {weight:g} and {'no' if contribution.values is None else 'a'} gradient)",
                ErrorCode.BAD_VALUE,
            )
        if weight is None and contribution.values is None:
            return  # abstains from either kind
        for other, known in self.by_rank.items():
            if known.values is None and known.weight is None:
                continue
            if (known.weight is None) != (weight is None):
                rank = contribution.rank
                weighs, not_ = (rank, other) if known.weight is None else (other, rank)
                raise ProtocolError(
                    f"{spec.describe()}: in exchange {contribution.sequence} worker {weighs} weighs its gradient and"
                    f" worker {not_} does not (expected a weight of every worker, or of none). Set model.batch_weight"
                    " on all workers in every step, or on none.",
                    ErrorCode.BAD_VALUE,
                )
            return  # the others are like this one

    def combine(self) -> torch.Tensor | None:
        """The average of gradients, the lowest rank's buffer, or the sum of usage maps; None where there is none."""
        given = self.given
        tensors = [one.values for one in given if one.values is not None]
        if not tensors:
            return None
        if self._spec.kind is ChunkKind.BUFFER:
            return tensors[0].clone()
        weights = [one.weight for one in given if one.weight is not None]
        if len(set(weights)) > 1:
            return self._combine_weighted(tensors, weights)
        total = tensors[0].to(_accumulation_dtype(self._spec.dtype), copy=True)
        for values in tensors[1:]:
            if total.is_floating_point():
                ops.accumulate_(total, values)  # 16-bit values are widened in the same pass
            else:
                total += values
        if self._spec.kind is not ChunkKind.USAGE and len(tensors) > 1:
            total /= len(tensors)
        return total.to(self._spec.dtype)

    def _combine_weighted(self, tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        # Weights of up to 1e12 would overflow what gradients are added in. By a power of two they are scaled exactly.
        _, exponent = math.frexp(max(weights))
        shares = [math.ldexp(weight, -exponent) for weight in weights]
        total = torch.zeros(self._spec.numel, dtype=_accumulation_dtype(self._spec.dtype))
        for values, share in zip(tensors, shares, strict=True):
            if total.is_floating_point():
                ops.accumulate_(total, values, share)
            else:
                total.add_(values, alpha=share)
        total /= sum(shares)
        return total.to(self._spec.dtype)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
