"""The ``.grad`` of a replica that gets the averages of its share only, and what may go wrong with such gradients.

After backward a parameter of which this rank steps nothing has no gradient; of others, what this rank does not step is
zero. So ``torch.amp.GradScaler`` and ``psengine.clip_grad_norm_`` work; what would be wrong silently is found:

    another backward is added      the averages of a share count once for each rank    an error in backward
    torch's clip_grad_norm_        each rank scales its share by another norm          a warning after the step
    a share that is not finite     only its rank would leave out the step              every rank gets a NaN
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from psengine.collectives.base import Collective, DeferredWork, Work
from psengine.errors import ReductionError
from psengine.strategies.sharding.flat_parameters import in_memory_order
from psengine.strategies.sharding.plan import Piece

# So many elements are looked at again, to find out by what this rank's gradients were scaled since backward.
MAX_PROBES = 4
# Factors that differ by less are equal.
TOLERANCE = 1e-4


class ShareGradients:
    """Watches the gradients of ``parameters``, of which this rank steps some pieces.

    Args:
        names: by parameter.
        parameters: those that are exchanged.
        pieces: by index of the parameter, this rank's.
        collective: the ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        pieces: Mapping[int, Sequence[Piece]],
        collective: Collective,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._pieces = pieces
        self._collective = collective
        self._is_finite = True
        self._has_warned = False
        # Parameters of which no gradient has come since their average was written.
        self._averaged: set[int] = set()
        # They are called before autograd adds to a gradient: scripts may call zero_grad() between forward and backward.
        self._handles = [
            parameter.register_hook(functools.partial(self._check_empty, index))
            for index, parameter in enumerate(parameters)
            if pieces.get(index)
        ]
        # (index of the parameter, element in memory order, its value after backward)
        self._probes: list[tuple[int, int, float]] = []

    def note(self, is_finite: bool) -> None:
        """A part of this rank's share has come."""
        self._is_finite = self._is_finite and is_finite

    def _check_empty(self, index: int, _: torch.Tensor) -> None:
        """A parameter's gradient has come, and will be added to what is there.

        Raises:
            ReductionError: that is the average of the last backward.
        """
        if index not in self._averaged:
            return
        gradient = self._parameters[index].grad
        if gradient is not None and gradient.any():
            raise ReductionError(
                f"rank {self._collective.rank}: {self._names[index]!r} still has the average of the last backward, of"
                " which each rank has only its share, so that another backward cannot be added (expected a gradient of"
                " None or zeros). Fix: optimizer.zero_grad() before; to accumulate, model.no_sync() around all"
                " backwards but the last."
            )
        self._averaged.discard(index)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- the end of backward -----------------------------------------------------------------------------------

    def end_backward(self) -> Work:
        """All results were asked for: the work that finishes gradients, once these are there."""
        return DeferredWork(self._finish)

    def _finish(self) -> None:
        is_anything_lost = torch.tensor([0.0 if self._is_finite else 1.0])
        self._is_finite = True
        work = self._collective.all_reduce(is_anything_lost, what="whether gradients are finite")
        self._leave_out_other_shares()
        work.wait()
        self._averaged = {index for index, pieces in self._pieces.items() if pieces}
        if is_anything_lost.item():
            self._spoil()
        self._probe()

    def _leave_out_other_shares(self) -> None:
        foreign = [p for index, p in enumerate(self._parameters) if p.numel() and not self._pieces.get(index)]
        own = [p for index, p in enumerate(self._parameters) if self._pieces.get(index)]
        if all(parameter.grad is None for parameter in own):
            # GradScaler needs one gradient on every rank; this one is zero.
            foreign = [p for p in foreign if p.grad is not None][1:]
        for parameter in foreign:
            parameter.grad = None

    def _spoil(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.numel():
                in_memory_order(parameter.grad, parameter)[0] = math.nan
                return

    # ---- how gradients were scaled -----------------------------------------------------------------------------

    def _probe(self) -> None:
        self._probes = []
        for index, pieces in self._pieces.items():
            parameter = self._parameters[index]
            if parameter.grad is None or not pieces:
                continue
            own = in_memory_order(parameter.grad, parameter)[pieces[0].start : pieces[0].start + pieces[0].numel]
            place = int(own.abs().argmax())
            value = float(own[place])
            if value and math.isfinite(value):
                self._probes.append((index, pieces[0].start + place, value))
            if len(self._probes) == MAX_PROBES:
                return

    def begin_compare(self) -> Callable[[], None]:
        """Before a step: begin to compare by what ranks have scaled their gradients; the result warns, once."""
        if self._has_warned:
            return lambda: None
        factors = torch.empty(self._collective.world_size, dtype=torch.float64)
        own = torch.tensor([self._factor()], dtype=torch.float64)
        work = self._collective.all_gather(factors, own, what="factors of gradients")

        def end() -> None:
            work.wait()
            self._warn([factor for factor in factors.tolist() if math.isfinite(factor)])

        return end

    def _factor(self) -> float:
        """By what this rank's gradients were multiplied since backward; NaN where not all by one number."""
        factors = []
        for index, place, before in self._probes:
            parameter = self._parameters[index]
            if parameter.grad is not None:
                factors.append(float(in_memory_order(parameter.grad, parameter)[place]) / before)
        is_one = bool(factors) and max(factors) - min(factors) <= TOLERANCE * abs(max(factors))
        return factors[0] if is_one else math.nan

    def _warn(self, factors: Sequence[float]) -> None:
        if not factors or max(factors) - min(factors) <= TOLERANCE * max(map(abs, factors)):
            return
        self._has_warned = True
        warnings.warn(
            "ranks scaled their gradients differently since backward (expected one factor, got, by rank,"
            f" {', '.join(f'{factor:.4g}' for factor in factors)}): with shard_optimizer=true over torch.distributed"
            " each rank has the gradients of its share only, and torch.nn.utils.clip_grad_norm_ takes their norm for"
            " that of all. Fix: psengine.clip_grad_norm_(model, max_norm).",
            stacklevel=2,
        )

    def whole_norm(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm of all gradients, from that of this rank's; all ranks call it, and get the same bits."""
        if self._collective.world_size == 1:
            return norm
        # A rank may have gradients of some dtypes only.
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters))
        norms = torch.stack(self._collective.gather(norm.reshape(1).to(dtype), what="gradient norms")).view(-1)
        whole: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
        return whole
