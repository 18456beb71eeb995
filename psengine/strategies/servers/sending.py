"""When the gradients of a worker leave for servers that apply them: an object for each value of ``push=``.

SendInStep       backward ─ step: everything leaves, weights land in the parameters
SendInBackward   backward: a bucket leaves when it is full ─ step: the rest leaves, weights become the parameters'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from psengine.errors import ReductionError
from psengine.strategies.servers.gradient_pushes import GradientPushes
from psengine.strategies.servers.optimizer_binding import OptimizerBinding
from psengine.strategies.servers.written_weights import WrittenWeights, count_landing
from psengine.tensors.bucket import Bucket

if TYPE_CHECKING:
    from psengine.protocol.layout import ChunkSpec
    from psengine.strategies.servers.chunked_replica import ChunkedReplica


class SendInStep:
    """Whatever happens to gradients after backward counts.

    Args:
        pushes: the step's.
        weights: the parameters, as the servers know them.
        chunks: the replica's.
    """

    def __init__(self, pushes: GradientPushes, weights: WrittenWeights, chunks: ChunkedReplica) -> None:
        self.pushes = pushes
        self.weights = weights
        self._chunks = chunks

    def begin_backward(self, binding: OptimizerBinding) -> None:
        """The first gradient of a backward is ready."""

    def bucket_is_full(self, bucket: Bucket, binding: OptimizerBinding) -> None:
        """A bucket is packed, for ``gradient_as_bucket_view`` if for nothing else."""

    def begin_step(self, binding: OptimizerBinding) -> None:
        """Gradients begin to leave."""
        self.weights.store_edited()
        self.pushes.begin_step(binding.optimizer)

    @property
    def has_begun(self) -> bool:
        """Whether gradients have left since the last step."""
        return False

    def remaining(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Those of the buckets that have yet to leave."""
        return buckets

    def check(self, binding: OptimizerBinding) -> None:
        """Before a step's remainder leaves.

        Raises:
            ReductionError: what has left is no longer what it was.
        """

    def landing(self, spec: ChunkSpec) -> Sequence[torch.Tensor]:
        """Where the weights of a chunk land."""
        return self._chunks.parts(spec)

    def take(self, specs: Iterable[ChunkSpec], parameters: Iterable[torch.Tensor]) -> None:
        """The weights of these chunks, which make up ``parameters``, have landed."""
        self._chunks.write_back(specs)
        count_landing(parameters)

    def forget_sent(self) -> None:
        """Gradients may change from now on."""


class SendInBackward(SendInStep):
    """The exchange overlaps with backward; what has left must not change before the step."""

    def __init__(self, pushes: GradientPushes, weights: WrittenWeights, chunks: ChunkedReplica) -> None:
        super().__init__(pushes, weights, chunks)
        # Indices of the buckets that left since the last step.
        self._left: set[int] = set()
        self._sent: list[_SentGradient] = []
        # Weights land beside the parameters, which a backward may still read.
        self._landings: dict[int, torch.Tensor] = {}

    @override
    def begin_backward(self, binding: OptimizerBinding) -> None:
        if self._left:
            raise ReductionError(
                "a second backward came before optimizer.step(), while the gradients of the first are with the servers"
                " already (push='backward'). Fix: accumulate inside model.no_sync(), or use AsyncServer(push='step'),"
                " which a GradScaler needs: it leaves steps out."
            )
        binding.check_groups()

    @override
    def bucket_is_full(self, bucket: Bucket, binding: OptimizerBinding) -> None:
        if not self._left:
            self.begin_step(binding)
        # Where gradients are views of the bucket, only a copy stays what it was if they are changed.
        flat = bucket.flat.clone() if _shares_memory(bucket) else bucket.flat
        self.pushes.push(bucket, flat, self.landing)
        sent = bucket.views if flat is bucket.flat else bucket.views_of(flat)
        self._sent += map(_SentGradient, bucket.parameters, sent)
        self._left.add(bucket.index)

    @property
    @override
    def has_begun(self) -> bool:
        return bool(self._left)

    @override
    def remaining(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return [bucket for bucket in buckets if bucket.index not in self._left]

    @override
    def check(self, binding: OptimizerBinding) -> None:
        from psengine.protocol.hyperparameters import wire_groups

        if not self._left:
            return
        if not all(gradient.is_unchanged() for gradient in self._sent):
            what = (
                "gradients were changed between backward and optimizer.step(), after they had left for the servers"
                " (push='backward'); GradScaler and clipping do that"
            )
        elif wire_groups(binding.optimizer) != self.pushes.groups:
            what = (
                "hyperparameters were changed between backward and optimizer.step(), after gradients had left with the"
                " old ones (push='backward'); a scheduler that is stepped first does that"
            )
        elif self.weights.are_edited():
            what = (
                "parameters were written between backward and optimizer.step(), after gradients had left for the"
                " servers (push='backward'), whose weights overwrite them"
            )
        else:
            return
        raise ReductionError(f"{what}. Fix: use AsyncServer(push='step'), which sends all of it in step().")

    @override
    def landing(self, spec: ChunkSpec) -> Sequence[torch.Tensor]:
        if spec.key not in self._landings:
            self._landings[spec.key] = torch.empty(spec.numel, dtype=spec.dtype)
        return [self._landings[spec.key]]

    @override
    def take(self, specs: Iterable[ChunkSpec], parameters: Iterable[torch.Tensor]) -> None:
        for spec in specs:
            self._chunks.assign(spec, self._landings[spec.key])

    @override
    def forget_sent(self) -> None:
        self._sent, self._left = [], set()


def _shares_memory(bucket: Bucket) -> bool:
    """Whether one of the bucket's gradients is its view."""
    return any(
        parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr() and view.numel() > 0
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )


class _SentGradient:
    """A gradient as it left, to be known again.

    Args:
        parameter: whose gradient.
        sent: the values that the servers get, in the parameter's shape; zeros where it has no gradient.
    """

    def __init__(self, parameter: torch.Tensor, sent: torch.Tensor) -> None:
        self._parameter = parameter
        self._sent = sent
        self._gradient = parameter.grad
        self._version = -1 if parameter.grad is None else parameter.grad._version

    def is_unchanged(self) -> bool:
        """Whether it is the same tensor with the same values. Not every write counts up its version: those through
        ``.data`` do not, nor does ``torch.amp.GradScaler.unscale_``.
        """
        gradient, sent = self._gradient, self._sent
        if self._parameter.grad is not gradient:
            return False
        if gradient is None:
            return True
        if gradient._version != self._version:
            return False
        gradient = gradient.to(sent.dtype)
        # NaN is unlike itself, and rare enough for a second look.
        return torch.equal(gradient, sent) or torch.allclose(gradient, sent, rtol=0, atol=0, equal_nan=True)
