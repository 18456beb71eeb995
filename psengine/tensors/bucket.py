"""Buckets: which gradients travel together, and the flat memory they travel in.

``plan_buckets`` is pure layout. A ``Bucket`` owns the flat tensor, the views of it that belong to each parameter, and
the two copies of a step: ``pack`` (gradients into the flat tensor, divided on the way) and ``unpack`` (the way back).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ReductionError
from psengine.kernels import ops

Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]

# From this size on a gradient is packed the moment it is ready, while the cache still holds it. Smaller ones wait for
# their bucket and go in one call, because a call costs more than their bytes (benchmarks/step_overhead).
EAGER_PACK_BYTES = 64 * 1024


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    size_limits_bytes: Sequence[int],
    is_sparse: Sequence[bool],
    order: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets by native DDP's rule, so that sums associate alike and results agree bitwise.

    Walks the parameters in ``order`` (default: as given), keeps one open bucket per (dtype, device) and closes it as
    soon as it reaches its limit; the first bucket of each kind takes the first limit, the second the second, the last
    limit repeats. A parameter with sparse gradients gets a bucket of its own.

    Args:
        parameters: tensors whose numel, dtype and device count.
        size_limits_bytes: caps in bytes, at least one.
        is_sparse: whether a parameter's gradient is sparse, by index.
        order: indices in the order their gradients become ready. Without it buckets are sorted by their lowest index.

    Returns:
        The buckets, each as the indices of its parameters in packing order; every index stands in exactly one.
    """
    open_indices: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    limit_index: dict[tuple[torch.dtype, torch.device], int] = {}
    plans: list[tuple[int, ...]] = []
    for index in range(len(parameters)) if order is None else order:
        parameter = parameters[index]
        if is_sparse[index]:
            plans.append((index,))
            continue
        kind = (parameter.dtype, parameter.device)
        open_indices.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if open_bytes[kind] >= size_limits_bytes[limit_index.setdefault(kind, 0)]:
            plans.append(tuple(open_indices.pop(kind)))
            open_bytes[kind] = 0
            limit_index[kind] = min(limit_index[kind] + 1, len(size_limits_bytes) - 1)
    plans.extend(tuple(indices) for indices in open_indices.values())
    if order is None:
        plans.sort(key=min)
    return plans


def is_non_overlapping_and_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory span exactly once in some order (contiguous, channels_last, permuted)."""
    return ops.is_dense(tensor.shape, tensor.stride())


def view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``flat`` from ``offset`` in the layout autograd gives this parameter's gradient.

    Dense parameters get their own strides, others row-major ones: the gradient layout contract of
    torch/csrc/autograd/functions/accumulate_grad.h, which makes copies between the two run along memory.
    """
    if is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Parameters that stand next to each other and are packed in one call.

    Attributes:
        first, last: positions in the bucket; ``last`` is the first that no longer belongs.
        flat: their part of the bucket's flat tensor.
        layout: where in it each gradient belongs; see ``ops.layout_of``.
    """

    first: int
    last: int
    flat: torch.Tensor
    layout: torch.Tensor


class Bucket:
    """Parameters whose gradients are exchanged in one operation.

    Args:
        index: place in the order of reduction, 0 first; the same bucket on every rank.
        parameter_indices: which of ``parameters``, in packing order.
        parameters: all of the model's reducible parameters.
        names: their names, for errors.
        sparse: whether the only parameter's gradient is a sparse COO tensor; then there is no flat memory.
        allocate: makes the flat tensor; see ``Collective.allocate``.
        flat_dtype: what gradients are exchanged in; None: their own dtype.
        counts_non_finite: whether packing counts values that are not finite (``non_finite_counts``).

    Attributes:
        flat: the packed gradients: 1-D dense, or the sparse gradient itself (None until packed).
        views: per parameter its part of ``flat``, shaped and strided like its gradient; see ``gradient_view``.
        pending: how many gradients of this backward are not yet ready.
    """

    def __init__(
        self,
        index: int,
        parameter_indices: tuple[int, ...],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        sparse: bool,
        allocate: Allocator,
        flat_dtype: torch.dtype | None = None,
        counts_non_finite: bool = False,
    ) -> None:
        self.index = index
        self.parameter_indices = parameter_indices
        self.parameters = [parameters[i] for i in parameter_indices]
        self.names = [names[i] for i in parameter_indices]
        self.sparse = sparse
        self.dtype = self.parameters[0].dtype
        self.flat_dtype = self.dtype if flat_dtype is None else flat_dtype
        self.device = self.parameters[0].device
        self.numel = sum(p.numel() for p in self.parameters)
        self.size_bytes = self.numel * self.parameters[0].element_size()
        self.pending = len(self.parameters)
        self.offsets: list[int] = []
        self.views: list[torch.Tensor] = []
        # Where the views are in memory (nowhere: -1), and what ``gradient_view`` returned last.
        self._addresses: list[int] = []
        self._gradient_views: list[torch.Tensor] = []
        # Whose gradients autograd may leave lazily conjugated or negated: others it copies, which resolves them.
        self._may_be_lazy = [i for i, p in enumerate(self.parameters) if p.is_complex() or p.numel() == 1]
        self._flat: torch.Tensor | None = None
        self._runs: list[Run] = []
        # By position, for eager parameters: their own run.
        self._eager_runs: dict[int, Run] = {}
        # What packing found, as it came: the position of the first parameter, and a count for each from there on.
        self._counts_non_finite = counts_non_finite
        self._non_finite: list[tuple[int, torch.Tensor]] = []
        # Where results land when not in ``flat``, and its views: strategies use the same memory every step.
        self._result: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self.is_eager = [False] * len(self.parameters)
        if not sparse:
            self._lay_out(allocate(self.numel, self.flat_dtype, self.device))

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.parameters)} parameters, {self.size_bytes} bytes, {self.dtype})"

    @property
    def flat(self) -> torch.Tensor:
        """The packed gradients; for a sparse bucket only after packing."""
        assert self._flat is not None, "a sparse bucket is read before it was packed"
        return self._flat

    @flat.setter
    def flat(self, value: torch.Tensor) -> None:
        self._flat = value

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What timelines say of it."""
        return {"bucket": self.index, "bytes": self.size_bytes, "parameters": self.names[:4]}

    def facts_of(self, position: int) -> dict[str, Any]:
        """What timelines say of one of its parameters."""
        parameter = self.parameters[position]
        size_bytes = parameter.numel() * parameter.element_size()
        return {"bucket": self.index, "bytes": size_bytes, "parameters": [self.names[position]]}

    def describe(self) -> str:
        """What error messages call this bucket."""
        names = self.names if len(self.names) <= 4 else [*self.names[:2], f"{len(self.names) - 3} more", self.names[-1]]
        return f"gradient bucket {self.index} ({', '.join(names)})"

    def _lay_out(self, flat: torch.Tensor) -> None:
        self._flat = flat
        offset = 0
        for parameter in self.parameters:
            self.offsets.append(offset)
            offset += parameter.numel()
        self.views = self.views_of(flat)
        self._addresses = [view.data_ptr() if view.numel() > 0 else -1 for view in self.views]
        self._gradient_views = [view.detach() for view in self.views]
        self._layout = ops.layout_of(self.parameters)
        self._is_native = ops.covers(flat, self.dtype)
        self.is_eager = [p.numel() * p.element_size() >= EAGER_PACK_BYTES for p in self.parameters]
        first = 0
        while first < len(self.parameters):
            last = first + 1
            while not self.is_eager[first] and last < len(self.parameters) and not self.is_eager[last]:
                last += 1
            run = self._make_run(first, last)
            if self.is_eager[first]:
                self._eager_runs[first] = run
            else:
                self._runs.append(run)
            first = last

    def _make_run(self, first: int, last: int) -> Run:
        end = self.offsets[last] if last < len(self.parameters) else self.numel
        return Run(
            first=first,
            last=last,
            flat=self.flat[self.offsets[first] : end],
            layout=ops.layout_of(self.parameters[first:last]),
        )

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per parameter its part of another flat tensor with this bucket's layout."""
        return [
            view_like(flat, offset, parameter) for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def gradient_view(self, position: int) -> torch.Tensor:
        """The view to hand out as a gradient: an alias, because assigning to its ``.data`` (as ``Module.to`` does)
        takes it off the flat memory for good; then there is a new one.
        """
        if self._gradient_views[position].data_ptr() != self._addresses[position]:
            self._gradient_views[position] = self.views[position].detach()
        return self._gradient_views[position]

    def pack(self, divisor: float, *, as_view: bool) -> None:
        """Pack every gradient; see ``pack_one``."""
        for position in self._eager_runs:
            self.pack_one(position, divisor, as_view=as_view)
        self.pack_rest(divisor, as_view=as_view)

    def pack_rest(self, divisor: float, *, as_view: bool) -> None:
        """Pack what ``is_eager`` leaves: runs of small gradients, each in one call."""
        for run in self._runs:
            self._pack_run(run, divisor, as_view=as_view)

    def pack_one(self, position: int, divisor: float, *, as_view: bool) -> None:
        """Copy an eager parameter's gradient, divided by ``divisor``, into its view; an undefined one counts as zero.

        Args:
            position: the parameter's place in this bucket.
            divisor: how many ranks the sum of the gradients is averaged over; 1 copies unchanged, infinity packs zeros
                whatever the gradient is.
            as_view: afterwards let ``parameter.grad`` be the view itself.

        Division follows native DDP to the bit: the copy multiplies by 1/divisor, in place it divides.
        """
        self._pack_run(self._eager_runs[position], divisor, as_view=as_view)

    def _pack_run(self, run: Run, divisor: float, *, as_view: bool) -> None:
        if divisor == math.inf:
            self._pack_zeros(run, as_view=as_view)
            return
        parameters = self.parameters[run.first : run.last]
        if self._may_be_lazy:
            self._resolve_lazy(run)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_plain = len(gradients) == len(parameters)
        if is_plain and as_view:
            addresses = self._addresses[run.first : run.last]
            is_plain = not any(g.data_ptr() == address for g, address in zip(gradients, addresses, strict=True))
        if not is_plain or not self._copy_run(run, gradients, divisor):
            for position in range(run.first, run.last):
                self._pack_with_care(position, divisor, as_view=as_view)
        elif as_view:
            dtype = self.flat_dtype
            for position, gradient in enumerate(gradients, run.first):
                if gradient.dtype == dtype:
                    self.parameters[position].grad = self.gradient_view(position)

    def _resolve_lazy(self, run: Run) -> None:
        """Carry out conjugations and negations that are only noted on gradients: lists of such cannot be written to."""
        for position in self._may_be_lazy:
            gradient = self.parameters[position].grad if run.first <= position < run.last else None
            if gradient is not None and (gradient.is_conj() or gradient.is_neg()):
                self.parameters[position].grad = gradient.resolve_conj().resolve_neg()

    def _pack_zeros(self, run: Run, *, as_view: bool) -> None:
        """Of a replica that has no say: its gradients may be NaN, which no factor makes zero."""
        run.flat.zero_()
        if as_view:
            for position in range(run.first, run.last):
                gradient = self.parameters[position].grad
                if gradient is not None and gradient.dtype == self.flat_dtype:
                    self.parameters[position].grad = self.gradient_view(position)

    def _copy_run(self, run: Run, gradients: list[torch.Tensor], divisor: float) -> bool:
        """Copy a run's gradients in one call; False where one of them needs care: sparse, or in the flat memory."""
        if any(gradient.is_sparse for gradient in gradients):
            return False
        try:
            if self._counts_non_finite:
                counts, _ = ops.pack_stats_(run.flat, gradients, 1.0 / divisor, run.layout)
                self._non_finite.append((run.first, counts))
            elif self._is_native:
                ops.pack_(run.flat, gradients, 1.0 / divisor, run.layout)
            else:
                torch._foreach_copy_(self.views[run.first : run.last], gradients)
                if divisor != 1:
                    run.flat.mul_(1.0 / divisor)
        except RuntimeError as error:
            if "must not share memory" not in str(error):
                raise
            return False
        return True

    def _pack_with_care(self, position: int, divisor: float, *, as_view: bool) -> None:
        """Pack one gradient that may be undefined, or the view already."""
        gradient = self.parameters[position].grad
        view = self.views[position]
        if gradient is None:
            view.zero_()
            return
        if not gradient.is_sparse and gradient.data_ptr() == self._addresses[position]:
            if divisor != 1:
                view.div_(divisor)
            self._count_view(position)
            return
        self._check_gradient(position, gradient)
        if divisor == 1 or gradient.dtype != view.dtype:
            view.copy_(gradient)
            if divisor != 1:
                view.mul_(1.0 / divisor)
        else:
            torch.mul(gradient.detach(), 1.0 / divisor, out=view)
        self._count_view(position)
        if as_view and gradient.dtype == view.dtype:
            self.parameters[position].grad = self.gradient_view(position)

    def _count_view(self, position: int) -> None:
        """Count what is not finite by a read of its own, which a run of plain gradients does without."""
        if self._counts_non_finite:
            self._non_finite.append((position, self.views[position].isfinite().logical_not_().sum().view(1)))

    def convert_to(self, payload: torch.Tensor) -> None:
        """Write ``flat`` to ``payload``, of another dtype; what overflows in it counts as not finite."""
        if self._counts_non_finite:
            parts = self.flat.split([parameter.numel() for parameter in self.parameters])
            self._non_finite.append((0, ops.pack_stats_(payload, parts)[0]))
        else:
            ops.pack_(payload, [self.flat])

    def take_non_finite_counts(self) -> list[tuple[int, torch.Tensor]]:
        """What the last packing found, as pairs: a position, and int64 counts for the parameters from there on."""
        found, self._non_finite = self._non_finite, []
        return found

    def pack_sparse(self, divisor: float) -> None:
        """Take the parameter's sparse gradient, divided, as the payload; an undefined one counts as zero."""
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None or divisor == math.inf:
            self.fill_with_zeros()
            return
        if not gradient.is_sparse:
            raise ReductionError(
                f"Expected variable to have sparse gradient. (parameter {self.names[0]!r}: expected torch.sparse_coo,"
                f" got {gradient.layout})"
            )
        if self._counts_non_finite:
            self._non_finite.append((0, gradient._values().isfinite().logical_not_().sum().view(1)))
        # Not in place: the gradients of two embeddings may share their values.
        if divisor != 1:
            gradient = gradient / divisor
        elif self._counts_non_finite:
            gradient = gradient.clone()  # it is to stay what it is where another rank's is not finite
        self._flat = gradient

    def fill_with_zeros(self) -> None:
        """Let the payload be what a rank without data contributes."""
        if self.sparse:
            # One sparse dimension, rows, like the gradients of embeddings: gloo sizes its messages by that number.
            shape = self.parameters[0].shape
            indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
            values = torch.empty(0, *shape[1:], dtype=self.dtype, device=self.device)
            self._flat = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        else:
            self.flat.zero_()

    def _check_gradient(self, position: int, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            raise ReductionError(
                f"parameter {self.names[position]!r} received a sparse gradient in a dense bucket. Sparse gradients"
                " are expected from torch.nn.Embedding and torch.nn.EmbeddingBag with sparse=True only."
            )

    def unpack(self, result: torch.Tensor, skip: Sequence[bool] | None) -> None:
        """Write ``result`` (same layout as ``flat``) to the gradients; missing ones are created.

        Args:
            result: the reduced gradients; ``flat`` itself, or a tensor that a communication hook returned.
            skip: positions that stay untouched, because no rank used the parameter; None skips nothing.
        """
        if skip is None or not any(skip):
            for parameter, view in zip(self.parameters, self.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_strided(
                        view.shape, view.stride(), dtype=parameter.dtype, device=view.device
                    )
            gradients = [_detached(parameter.grad) for parameter in self.parameters]
            if self._is_native and result.is_contiguous() and result.dtype.is_floating_point:
                ops.unpack_(gradients, result.view(-1), 1.0, self._layout)
            else:
                torch._foreach_copy_(gradients, self._views_of_result(result))
            return
        views = self._views_of_result(result)
        for position, parameter in enumerate(self.parameters):
            if not skip[position]:
                self._copy_to_gradient(parameter, views[position])

    def _views_of_result(self, result: torch.Tensor) -> list[torch.Tensor]:
        if result is self._flat:
            return self.views
        if self._result is None or self._result[0] is not result:
            self._result = (result, self.views_of(result))
        return self._result[1]

    def unpack_as_views(self, result: torch.Tensor, skip: Sequence[bool] | None, *, adopt: bool = False) -> None:
        """Like ``unpack`` where gradients are the bucket's views: only a foreign ``result`` is copied.

        ``adopt`` replaces gradients that are not views (mixed precision's hook makes new ones), else they are an error.
        """
        if result is not self._flat:
            self.flat.copy_(result.view(-1))
        for position, parameter in enumerate(self.parameters):
            if skip is not None and skip[position]:
                continue
            gradient = parameter.grad
            if gradient is None or adopt:
                parameter.grad = self.gradient_view(position)
            elif (
                gradient is not self._gradient_views[position]
                and gradient.data_ptr() != self._addresses[position]
                and gradient.numel() > 0
            ):
                raise ReductionError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view with"
                    f" gradient_as_bucket_view=True (parameter {self.names[position]!r}). Something replaced the"
                    " gradient during backward, for example a second set of gradient hooks on the same parameter."
                )

    def unpack_sparse(self, result: torch.Tensor, skip: Sequence[bool] | None) -> None:
        """Let the parameter's gradient be the reduced sparse tensor."""
        if skip is not None and skip[0]:
            return
        parameter = self.parameters[0]
        parameter.grad = result

    def _copy_to_gradient(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.empty_strided(view.shape, view.stride(), dtype=parameter.dtype, device=view.device)
        _detached(parameter.grad).copy_(view)


def _detached(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.detach() if gradient.requires_grad else gradient
