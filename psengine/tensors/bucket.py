"""A bucket: tensors that travel together, and the flat memory they travel in.

The tensors may be any that are shaped like the bucket's parameters: their gradients, or the parameters themselves.
``pack`` writes them to the flat tensor, divided on the way; ``unpack`` writes a result with the same layout back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from psengine.errors import ReductionError
from psengine.kernels import ops
from psengine.tensors.share import WHOLE, Share

Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]

# From this size on a gradient is packed the moment it is ready, while the cache still holds it. Smaller ones wait for
# their bucket and go in one call, because a call costs more than their bytes (benchmarks/step_overhead).
EAGER_PACK_BYTES = 64 * 1024


def view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``flat`` from ``offset`` in the layout autograd gives this parameter's gradient.

    Dense parameters get their own strides, others row-major ones: the gradient layout contract of
    torch/csrc/autograd/functions/accumulate_grad.h, which makes copies between the two run along memory.
    """
    if ops.is_dense(parameter.shape, parameter.stride()):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Parameters that stand next to each other and are packed in one call.

    Attributes:
        first, last: positions in the bucket; ``last`` is the first that no longer belongs.
        parameters: those at these positions.
        flat: their part of the bucket's flat tensor.
        layout: where in it each tensor belongs; see ``ops.layout_of``.
    """

    first: int
    last: int
    parameters: list[torch.Tensor]
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
        allocate: makes the flat tensor; see ``Strategy.allocate``. Where its dtype is another one, packing converts.
        counts_non_finite: whether packing counts values that are not finite (``take_non_finite_counts``).
        divides_copies: native DDP's ``batched_grad_copy``: copies are divided too, instead of multiplied by the
            reciprocal while they are made. That takes another pass.

    Attributes:
        flat: the packed tensors: 1-D dense, or the sparse gradient itself.
        views: per parameter its part of ``flat``, shaped and strided like its gradient.
        addresses: where the views are in memory; -1 for those without elements.
        eager_runs: by position, each parameter that is large enough to be packed by itself.
        runs: the small parameters between them.
        facts: the bucket, as timelines describe it.
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
        counts_non_finite: bool = False,
        divides_copies: bool = False,
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
        self.facts: dict[str, Any] = {"bucket": index, "bytes": self.size_bytes, "parameters": self.names[:4]}
        self.counts_non_finite = counts_non_finite
        self._divides_copies = divides_copies
        self.offsets: list[int] = []
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.eager_runs: dict[int, Run] = {}
        self.runs: list[Run] = []
        self._non_finite: list[tuple[int, torch.Tensor]] = []  # see ``take_non_finite_counts``
        # Autograd may leave the gradients of these conjugated or negated lazily. It copies others, which resolves them.
        self.may_be_lazy = [i for i, p in enumerate(self.parameters) if p.is_complex() or p.numel() == 1]
        self.flat = self.sparse_zeros() if sparse else allocate(self.numel, self.dtype, self.device)
        if not sparse:
            self._lay_out()

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.parameters)} parameters, {self.size_bytes} bytes, {self.dtype})"

    def describe(self) -> str:
        """The bucket's name in error messages."""
        names = self.names if len(self.names) <= 4 else [*self.names[:2], f"{len(self.names) - 3} more", self.names[-1]]
        return f"gradient bucket {self.index} ({', '.join(names)})"

    # ---- layout ------------------------------------------------------------------------------------------------

    def sparse_zeros(self) -> torch.Tensor:
        """The content of a sparse bucket whose parameter got no gradient."""
        # One sparse dimension, rows, like the gradients of embeddings: gloo sizes its messages by that number.
        shape = self.parameters[0].shape
        indices = torch.empty(1, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *shape[1:], dtype=self.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)

    def _lay_out(self) -> None:
        *self.offsets, _ = accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        self.views = self.views_of(self.flat)
        self.addresses = [view.data_ptr() if view.numel() > 0 else -1 for view in self.views]
        self._layout = ops.layout_of(self.parameters)
        self._is_native = ops.covers(self.flat, self.dtype)
        first = 0
        for is_eager, parameters in groupby(self.parameters, key=lambda p: p.nbytes >= EAGER_PACK_BYTES):
            last = first + len(list(parameters))
            if is_eager:
                self.eager_runs |= {alone: self._make_run(alone, alone + 1) for alone in range(first, last)}
            else:
                self.runs.append(self._make_run(first, last))
            first = last

    def _make_run(self, first: int, last: int) -> Run:
        end = self.offsets[last] if last < len(self.parameters) else self.numel
        parameters = self.parameters[first:last]
        flat, layout = self.flat[self.offsets[first] : end], ops.layout_of(parameters)
        return Run(first=first, last=last, parameters=parameters, flat=flat, layout=layout)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per parameter its part of a flat tensor with this bucket's layout; most are ``flat`` itself."""
        if flat is self.flat and self.views:
            return self.views
        return [view_like(flat, offset, p) for offset, p in zip(self.offsets, self.parameters, strict=True)]

    # ---- there and back ----------------------------------------------------------------------------------------

    def pack(self, tensors: Sequence[torch.Tensor | None], share: Share = WHOLE) -> None:
        """Write ``tensors``, one for each parameter and shaped like it, to ``flat``; None counts as zeros.

        Division follows native DDP to the bit: a copy multiplies by 1/divisor; a tensor that is its own view of
        ``flat`` already is divided in place.
        """
        resolved = list(tensors)
        for position in self.may_be_lazy:
            resolved[position] = resolve_lazy(resolved[position])
        for run in (*self.eager_runs.values(), *self.runs):
            self.pack_run(run, resolved[run.first : run.last], share)

    def pack_run(self, run: Run, tensors: Sequence[torch.Tensor | None], share: Share) -> None:
        """``pack`` for the parameters of one run; none of the tensors is lazily conjugated or negated."""
        if share.is_nothing:
            run.flat.zero_()
            return
        divisor = 1.0 if self._divides_copies else share.divisor
        defined = [tensor for tensor in tensors if tensor is not None]
        if len(defined) < len(tensors) or not self._copy_run(run, defined, divisor):
            self.pack_each(run, tensors, share)
        elif divisor != share.divisor:
            run.flat.div_(share.divisor)

    def pack_each(self, run: Run, tensors: Sequence[torch.Tensor | None], share: Share) -> None:
        """``pack_run`` one by one, for tensors of which some are None, or views of ``flat`` already."""
        for position, tensor in enumerate(tensors, run.first):
            self._pack_one(position, tensor, share.divisor)

    def _copy_run(self, run: Run, tensors: list[torch.Tensor], divisor: float) -> bool:
        """Copy a run's tensors in one call; False where one of them needs care: sparse, or in the flat memory."""
        if not self._is_native and any(tensor.is_sparse for tensor in tensors):
            return False
        try:
            if self.counts_non_finite:
                counts = ops.pack_counting_(run.flat, tensors, 1.0 / divisor, run.layout)
                self._non_finite.append((run.first, counts))
            elif self._is_native:
                ops.pack_(run.flat, tensors, 1.0 / divisor, run.layout)
            else:
                torch._foreach_copy_(self.views[run.first : run.last], tensors)
                if divisor != 1:
                    run.flat.mul_(1.0 / divisor)
        except RuntimeError:
            storage = self.flat.untyped_storage().data_ptr()
            if not any(tensor.is_sparse or tensor.untyped_storage().data_ptr() == storage for tensor in tensors):
                raise
            return False
        return True

    def _pack_one(self, position: int, tensor: torch.Tensor | None, divisor: float) -> None:
        view = self.views[position]
        if tensor is None:
            view.zero_()
            return
        if tensor.is_sparse:
            raise ReductionError(
                f"parameter {self.names[position]!r} received a sparse gradient in a dense bucket. Sparse gradients"
                " are expected from torch.nn.Embedding and torch.nn.EmbeddingBag with sparse=True only."
            )
        is_in_place = tensor.data_ptr() == self.addresses[position]
        if is_in_place or divisor == 1 or self._divides_copies:
            if not is_in_place:
                view.copy_(tensor)
            if divisor != 1:
                view.div_(divisor)
        else:
            # Rounded once, after the division, as the kernel does it.
            wide = tensor.detach().to(torch.promote_types(tensor.dtype, view.dtype))
            torch.mul(wide, 1.0 / divisor, out=view)
        if self.counts_non_finite:
            self.note_non_finite(position, view)  # a read of its own, which a run of plain tensors does without

    def unpack(self, tensors: list[torch.Tensor], result: torch.Tensor) -> None:
        """Write ``result``, laid out like ``flat``, to ``tensors``, one for each parameter and shaped like it.

        Their version counters may stay as they are.
        """
        if self._is_native and (result is self.flat or (result.is_contiguous() and result.dtype.is_floating_point)):
            ops.unpack_(tensors, result if result is self.flat else result.view(-1), 1.0, self._layout)
        else:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], self.views_of(result))

    # ---- values that are not finite ----------------------------------------------------------------------------

    def note_non_finite(self, position: int, *parts: torch.Tensor) -> None:
        """Count the values that are not finite in ``parts``, one for each parameter from ``position`` on."""
        counts = torch.stack([part.isfinite().logical_not_().sum() for part in parts])
        self._non_finite.append((position, counts))

    def note_encoded(self, payload: torch.Tensor) -> None:
        """Count the values that became infinite when ``flat`` was converted to ``payload``, which travels."""
        if self.counts_non_finite:
            self.note_non_finite(0, *payload.split([parameter.numel() for parameter in self.parameters]))

    def take_non_finite_counts(self) -> list[tuple[int, torch.Tensor]]:
        """The last packing's counts, as pairs: a position, and int64 counts for the parameters from it on."""
        found, self._non_finite = self._non_finite, []
        return found


def resolve_lazy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Carry out a lazy conjugation or negation of ``tensor``, because kernels read its memory directly."""
    if tensor is None or not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.resolve_conj().resolve_neg()
