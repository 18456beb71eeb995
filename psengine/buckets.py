"""Buckets: which gradients travel together, and the flat memory they travel in.

``plan_buckets`` is pure layout. A ``Bucket`` owns the flat tensor, the views of it that belong to each parameter, and
the two copies of a step: ``pack`` (gradients into the flat tensor, divided on the way) and ``unpack`` (the way back).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psengine.errors import ReductionError

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
    expected_stride = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected_stride:
            return tensor.numel() == 0
        expected_stride *= size
    return True


def view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``flat`` from ``offset`` in the layout autograd gives this parameter's gradient.

    Dense parameters get their own strides, others row-major ones: the gradient layout contract of
    torch/csrc/autograd/functions/accumulate_grad.h, which makes copies between the two run along memory.
    """
    if is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


class Bucket:
    """Parameters whose gradients are exchanged in one operation.

    Args:
        index: place in the order of reduction, 0 first; the same bucket on every rank.
        parameter_indices: which of ``parameters``, in packing order.
        parameters: all of the model's reducible parameters.
        names: their names, for errors.
        sparse: whether the only parameter's gradient is a sparse COO tensor; then there is no flat memory.
        allocate: makes the flat tensor; see ``Collective.allocate``.

    Attributes:
        flat: the packed gradients: 1-D dense, or the sparse gradient itself (None until packed).
        views: per parameter its part of ``flat``, shaped and strided like its gradient.
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
    ) -> None:
        self.index = index
        self.parameter_indices = parameter_indices
        self.parameters = [parameters[i] for i in parameter_indices]
        self.names = [names[i] for i in parameter_indices]
        self.sparse = sparse
        self.dtype = self.parameters[0].dtype
        self.device = self.parameters[0].device
        self.numel = sum(p.numel() for p in self.parameters)
        self.size_bytes = self.numel * self.parameters[0].element_size()
        self.pending = len(self.parameters)
        self.offsets: list[int] = []
        self.views: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        # Runs of small parameters that stand next to each other: (first position, last position + 1, flat slice).
        self._batches: list[tuple[int, int, torch.Tensor]] = []
        # Where results land when not in ``flat``, and its views: strategies use the same memory every step.
        self._result: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self.is_eager = [False] * len(self.parameters)
        if not sparse:
            self._lay_out(allocate(self.numel, self.dtype, self.device))

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
        self.is_eager = [p.numel() * p.element_size() >= EAGER_PACK_BYTES for p in self.parameters]
        first = 0
        while first < len(self.parameters):
            last = first
            while last < len(self.parameters) and not self.is_eager[last]:
                last += 1
            if last > first:
                end = self.offsets[last] if last < len(self.parameters) else offset
                self._batches.append((first, last, flat[self.offsets[first] : end]))
            first = last + 1

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per parameter its part of another flat tensor with this bucket's layout."""
        return [
            view_like(flat, offset, parameter) for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def pack_one(self, position: int, divisor: int, *, as_view: bool) -> None:
        """Copy one parameter's gradient, divided by ``divisor``, into its view; an undefined gradient counts as zero.

        Args:
            position: the parameter's place in this bucket.
            divisor: how many ranks the sum of the gradients is averaged over; 1 copies unchanged.
            as_view: afterwards let ``parameter.grad`` be the view itself.

        Division follows native DDP to the bit: the copy multiplies by 1/divisor, in place it divides.
        """
        parameter = self.parameters[position]
        gradient = parameter.grad
        view = self.views[position]
        if gradient is None:
            view.zero_()
            return
        if gradient is view or (as_view and gradient.data_ptr() == view.data_ptr() and view.numel() > 0):
            if divisor != 1:
                view.div_(divisor)
            return
        self._check_gradient(position, gradient)
        if divisor == 1 or gradient.dtype != view.dtype:
            view.copy_(gradient)
            if divisor != 1:
                view.mul_(1.0 / divisor)
        else:
            torch.mul(gradient.detach(), 1.0 / divisor, out=view)
        if as_view and gradient.dtype == view.dtype:
            parameter.grad = view

    def pack_rest(self, divisor: int, *, as_view: bool) -> None:
        """Pack what ``is_eager`` leaves: runs of small gradients, each with one copy call and one division."""
        for first, last, flat_slice in self._batches:
            if not self._pack_batch(first, last, flat_slice, divisor, as_view=as_view):
                for position in range(first, last):
                    self.pack_one(position, divisor, as_view=as_view)

    def _pack_batch(self, first: int, last: int, flat_slice: torch.Tensor, divisor: int, *, as_view: bool) -> bool:
        """Pack a run of plain gradients; False, with no gradient changed, where one needs ``pack_one``'s care."""
        parameters, views = self.parameters[first:last], self.views[first:last]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(gradients) < len(parameters):
            return False
        if as_view and any(g is v or g.data_ptr() == v.data_ptr() for g, v in zip(gradients, views, strict=True)):
            return False  # divided in place, not multiplied: see pack_one
        try:
            torch._foreach_copy_(views, gradients)
        except RuntimeError:
            return False  # a sparse gradient among them: pack_one names it
        if divisor != 1:
            flat_slice.mul_(1.0 / divisor)
        if as_view:
            for parameter, view, gradient in zip(parameters, views, gradients, strict=True):
                if gradient.dtype == view.dtype:
                    parameter.grad = view
        return True

    def pack_sparse(self, divisor: int) -> None:
        """Take the parameter's sparse gradient, divided, as the payload; an undefined one counts as zero."""
        parameter = self.parameters[0]
        gradient = parameter.grad
        if gradient is None:
            self.fill_with_zeros()
            return
        if not gradient.is_sparse:
            raise ReductionError(
                f"Expected variable to have sparse gradient. (parameter {self.names[0]!r}: expected torch.sparse_coo,"
                f" got {gradient.layout})"
            )
        # Not in place: the gradients of two embeddings may share their values.
        self._flat = gradient if divisor == 1 else gradient / divisor

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
        views = self._views_of_result(result)
        targets, sources = [], []
        for position, parameter in enumerate(self.parameters):
            if skip is not None and skip[position]:
                continue
            gradient = parameter.grad
            if gradient is None:
                self._create_gradient(parameter, views[position])
            else:
                targets.append(gradient.detach() if gradient.requires_grad else gradient)
                sources.append(views[position])
        if targets:
            torch._foreach_copy_(targets, sources)

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
            view = self.views[position]
            if gradient is None:
                parameter.grad = view
            elif adopt:
                # An alias: native's mixed precision exchanges a gradient's data in place, and the view must stay ours.
                parameter.grad = view.detach()
            elif gradient is not view and gradient.data_ptr() != view.data_ptr() and view.numel() > 0:
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

    def _create_gradient(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        gradient = torch.empty_strided(view.shape, view.stride(), dtype=parameter.dtype, device=view.device)
        parameter.grad = gradient.copy_(view)
