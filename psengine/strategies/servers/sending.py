"""When a worker's gradients leave for servers that apply them: an object for each value of ``push=``.

SendInStep       backward ─ step: everything leaves, weights become the parameters'
SendInBackward   backward: a bucket leaves when it is full ─ step: the rest leaves, weights become the parameters'
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from psengine.errors import ReductionError
from psengine.strategies.servers.gradient_pushes import GradientPushes
from psengine.strategies.servers.server_optimizer import ServerOptimizer
from psengine.tensors.bucket import Bucket

if TYPE_CHECKING:
    from psengine.parameter_server.client.worker_session import WorkerSession
    from psengine.strategies.servers.chunked_replica import ChunkedReplica

logger = logging.getLogger(__name__)


class WrittenWeights:
    """Notices writes to parameters whose values the servers keep."""

    def __init__(
        self, session: WorkerSession, chunks: ChunkedReplica, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._session = session
        self._chunks = chunks
        self._parameters = list(parameters.values())
        self.note()

    def note(self) -> None:
        """The parameters are as the servers sent them."""
        self._noted = self._count_writes()

    def are_edited(self) -> bool:
        """Whether something else has written to them since."""
        return self._count_writes() != self._noted

    def _count_writes(self) -> tuple[int, int]:
        """Changes with every write that torch counts, and when a parameter is given other memory."""
        return sum(p._version for p in self._parameters), hash(tuple(p.data_ptr() for p in self._parameters))

    def store_edited(self) -> None:
        """After a write (``load_state_dict``), send worker 0's values to the servers; those of others are lost."""
        if not self.are_edited():
            return
        from psengine.parameter_server.client.operation import wait_all

        if self._session.rank != 0:
            logger.warning(
                "parameters were written on worker %d; the servers' weights count, and overwrite them with this step."
                " Only worker 0's writes (load_state_dict) reach the servers.",
                self._session.rank,
            )
        else:
            logger.warning("parameters were written on worker 0; they become the servers' weights")
            wait_all([self._session.store(spec.key, self._chunks.values(spec)) for spec in self._chunks.specs])
        self.note()


def count_landing(tensors: Iterable[torch.Tensor]) -> None:
    """Count bytes that landed in ``tensors`` as a write: older graphs and other models may depend on the old values."""
    torch.autograd.graph.increment_version(tensors)


class SendInStep:
    """Changes of gradients after backward count."""

    def __init__(self, pushes: GradientPushes, weights: WrittenWeights) -> None:
        self.pushes = pushes
        self.weights = weights

    def begin_backward(self, bound: ServerOptimizer) -> None:
        """The first gradient of a backward is ready."""

    def bucket_is_full(self, bucket: Bucket, bound: ServerOptimizer) -> None:
        """A bucket is full, and packed where gradients leave during backward."""

    def begin_step(self, bound: ServerOptimizer) -> None:
        """Gradients begin to leave."""
        self.weights.store_edited()
        self.pushes.begin_step(bound.optimizer)

    @property
    def has_begun(self) -> bool:
        """Whether gradients have left since the last step."""
        return False

    def remaining(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """The buckets that have not left."""
        return buckets

    def check(self, bound: ServerOptimizer) -> None:
        """Before a step's remainder leaves.

        Raises:
            ReductionError: gradients, hyperparameters or weights changed after gradients had left.
        """

    def forget_sent(self) -> None:
        """Gradients may change from now on."""


class SendInBackward(SendInStep):
    """The exchange overlaps with backward; gradients that left must not change before the step."""

    def __init__(self, pushes: GradientPushes, weights: WrittenWeights) -> None:
        super().__init__(pushes, weights)
        # Indices of the buckets that left since the last step.
        self._left: set[int] = set()
        self._sent: list[_SentGradient] = []

    @override
    def begin_backward(self, bound: ServerOptimizer) -> None:
        if self._left:
            raise ReductionError(
                "a second backward came before optimizer.step(), while the gradients of the first are with the servers"
                " already (push='backward'). Fix: accumulate inside model.no_sync(), or use AsyncServer(push='step'),"
                " which a GradScaler needs: it leaves steps out."
            )
        bound.check_groups()

    @override
    def bucket_is_full(self, bucket: Bucket, bound: ServerOptimizer) -> None:
        if not self._left:
            self.begin_step(bound)
        # Where gradients are views of the bucket, only a copy stays what it was if they are changed.
        flat = bucket.flat.clone() if _shares_memory(bucket) else bucket.flat
        self.pushes.push(bucket, flat)
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
    def check(self, bound: ServerOptimizer) -> None:
        from psengine.protocol.hyperparameters import wire_groups

        if not self._left:
            return
        if not all(gradient.is_unchanged() for gradient in self._sent):
            what = (
                "gradients were changed between backward and optimizer.step(), after they had left for the servers"
                " (push='backward'); GradScaler and clipping do that"
            )
        elif wire_groups(bound.optimizer) != self.pushes.groups:
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
    def forget_sent(self) -> None:
        self._sent, self._left = [], set()


def _shares_memory(bucket: Bucket) -> bool:
    """Whether one of the bucket's gradients is its view."""
    return any(
        parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr() and view.numel() > 0
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )


class _SentGradient:
    """A parameter's gradient as it left; ``sent`` are the values in the parameter's shape, zeros without gradient."""

    def __init__(self, parameter: torch.Tensor, sent: torch.Tensor) -> None:
        self._parameter = parameter
        self._sent = sent
        self._gradient = parameter.grad
        self._version = -1 if parameter.grad is None else parameter.grad._version

    def is_unchanged(self) -> bool:
        """Whether it is the same tensor with the same values. Values are compared because writes through ``.data`` and
        ``torch.amp.GradScaler.unscale_`` do not count up a version.
        """
        gradient, sent = self._gradient, self._sent
        if self._parameter.grad is not gradient:
            return False
        if gradient is None:
            return True
        if gradient._version != self._version:
            return False
        gradient = gradient.to(sent.dtype)
        # NaN differs from itself; the second comparison is for those few.
        return torch.equal(gradient, sent) or torch.allclose(gradient, sent, rtol=0, atol=0, equal_nan=True)
