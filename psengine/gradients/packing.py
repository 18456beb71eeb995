"""The ``.grad`` of a bucket's parameters on their way into the bucket, and the result on its way back.

One object for each bucket, chosen when buckets are made::

    Packing         gradients are tensors of their own: copied in, and back
    ViewPacking     gradients are views of the bucket (gradient_as_bucket_view): copied once at most
    SparsePacking   the bucket's only gradient is sparse, and is itself what travels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from psengine.errors import ReductionError
from psengine.tensors.bucket import Bucket, Run, resolve_lazy
from psengine.tensors.share import Share


class Packing:
    """Moves the gradients of ``bucket``'s parameters, tensors of their own, into the bucket, and results back."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def pack_one(self, position: int, share: Share) -> None:
        """Pack an eager parameter's gradient, of which this replica contributes ``share``."""
        self._pack(self.bucket.eager_runs[position], share)

    def pack_rest(self, share: Share) -> None:
        """Pack the gradients that are not eager; one that is undefined counts as zero."""
        for run in self.bucket.runs:
            self._pack(run, share)

    def fill_with_zeros(self) -> None:
        """Let the bucket hold what a rank without data contributes."""
        self.bucket.flat.zero_()

    def unpack(self, result: torch.Tensor, skip: Sequence[bool] | None) -> None:
        """Make ``result`` the gradients; create those that are missing.

        Args:
            result: laid out like ``bucket.flat``; that tensor itself, or another.
            skip: positions that stay untouched, because no rank used the parameter; None skips nothing.
        """
        bucket = self.bucket
        if skip is None:
            gradients = [parameter.grad for parameter in bucket.parameters]
            defined = [gradient for gradient in gradients if gradient is not None]
            if len(defined) < len(gradients):
                self.create_missing(None)
                defined = [_defined(parameter.grad) for parameter in bucket.parameters]
            bucket.unpack(defined, result)
            return
        self.create_missing(skip)
        for position, view in enumerate(bucket.views_of(result)):
            if not skip[position]:
                _defined(bucket.parameters[position].grad).detach().copy_(view)

    def create_missing(self, skip: Sequence[bool] | None) -> None:
        """Let undefined gradients be zeros, except at the positions of ``skip``."""
        bucket = self.bucket
        for position, parameter in enumerate(bucket.parameters):
            if parameter.grad is None and not (skip and skip[position]):
                parameter.grad = torch.zeros_like(bucket.views[position], dtype=parameter.dtype)

    def _pack(self, run: Run, share: Share) -> None:
        if self.bucket.may_be_lazy:
            self._resolve_lazy(run)
        self.bucket.pack_run(run, [parameter.grad for parameter in run.parameters], share)

    def _resolve_lazy(self, run: Run) -> None:
        bucket = self.bucket
        for position in bucket.may_be_lazy:
            if run.first <= position < run.last:
                # A result cannot be written to lists of lazy tensors either.
                parameter = bucket.parameters[position]
                resolved = resolve_lazy(parameter.grad)
                if resolved is not parameter.grad:
                    parameter.grad = resolved


class ViewPacking(Packing):
    """Gradients are views of the bucket's flat memory.

    Attributes:
        adopts: whether gradients that something replaced become the bucket's views again (mixed precision's hook makes
            new ones); else they are an error.
    """

    def __init__(self, bucket: Bucket, *, adopts: bool = False) -> None:
        super().__init__(bucket)
        self.adopts = adopts
        self._handed_out = [view.detach() for view in bucket.views]
        # Gradients that exist already were accumulated and not yet stepped.
        for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                with torch.no_grad():
                    view.copy_(parameter.grad)
                parameter.grad = self._gradient_view(position)

    def _gradient_view(self, position: int) -> torch.Tensor:
        """The view to hand out as a gradient: an alias, because assigning to its ``.data`` (as ``Module.to`` does)
        takes it off the flat memory for good; then there is a new one.
        """
        if self._handed_out[position].data_ptr() != self.bucket.addresses[position]:
            self._handed_out[position] = self.bucket.views[position].detach()
        return self._handed_out[position]

    @override
    def _pack(self, run: Run, share: Share) -> None:
        bucket = self.bucket
        self._resolve_lazy(run)
        gradients = [parameter.grad for parameter in run.parameters]
        addresses = bucket.addresses[run.first : run.last]
        is_in_place = [
            gradient is not None and gradient.data_ptr() == address
            for gradient, address in zip(gradients, addresses, strict=True)
        ]
        if any(is_in_place) and not share.is_nothing:
            bucket.pack_each(run, gradients, share)
        else:
            bucket.pack_run(run, gradients, share)
        for position, gradient in enumerate(gradients, run.first):
            is_foreign = gradient is not None and not is_in_place[position - run.first]
            if is_foreign and gradient.dtype == bucket.flat.dtype:  # type: ignore[union-attr]
                bucket.parameters[position].grad = self._gradient_view(position)

    @override
    def unpack(self, result: torch.Tensor, skip: Sequence[bool] | None) -> None:
        """Only a result that is not the bucket's flat memory is copied.

        Raises:
            ReductionError: something replaced a gradient during backward.
        """
        bucket = self.bucket
        if result is not bucket.flat:
            bucket.flat.copy_(result.view(-1))
        for position, parameter in enumerate(bucket.parameters):
            if skip is not None and skip[position]:
                continue
            gradient = parameter.grad
            if gradient is None or self.adopts:
                parameter.grad = self._gradient_view(position)
            elif (
                gradient is not self._handed_out[position]
                and gradient.data_ptr() != bucket.addresses[position]
                and gradient.numel() > 0
            ):
                raise ReductionError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view with"
                    f" gradient_as_bucket_view=True (parameter {bucket.names[position]!r}). Something replaced the"
                    " gradient during backward, for example a second set of gradient hooks on the same parameter."
                )


class SparsePacking(Packing):
    """The gradient of the bucket's only parameter is sparse: it takes the place of flat memory."""

    @override
    def pack_rest(self, share: Share) -> None:
        bucket = self.bucket
        gradient = bucket.parameters[0].grad
        if gradient is None or share.is_nothing:
            self.fill_with_zeros()
            return
        if not gradient.is_sparse:
            raise ReductionError(
                f"Expected variable to have sparse gradient. (parameter {bucket.names[0]!r}: expected torch.sparse_coo,"
                f" got {gradient.layout})"
            )
        if bucket.counts_non_finite:
            bucket.note_non_finite(0, gradient._values())
        # Not in place: the gradients of two embeddings may share their values.
        if share.divisor != 1:
            gradient = gradient / share.divisor
        elif bucket.counts_non_finite:
            gradient = gradient.clone()  # where another rank's is not finite, this rank's own stays as it is
        bucket.flat = gradient

    @override
    def fill_with_zeros(self) -> None:
        self.bucket.flat = self.bucket.sparse_zeros()

    @override
    def unpack(self, result: torch.Tensor, skip: Sequence[bool] | None) -> None:
        if skip is None or not skip[0]:
            self.bucket.parameters[0].grad = result

    @override
    def create_missing(self, skip: Sequence[bool] | None) -> None:
        """A gradient that is undefined stays so."""


def make_packing(bucket: Bucket, *, as_view: bool, adopts: bool) -> Packing:
    """What moves the gradients of ``bucket``; see the classes."""
    if bucket.sparse:
        return SparsePacking(bucket)
    return ViewPacking(bucket, adopts=adopts) if as_view else Packing(bucket)


def _defined(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "gradients that were missing have been created"
    return gradient
