"""Norms of averaged gradients that a pass over them yielded anyway, and clipping by them."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from psengine.errors import ArgumentTypeError
from psengine.tensors.bucket import Bucket
from psengine.tracing.observers import Observer

# Not every write counts up a tensor's version: torch.amp.GradScaler.unscale_ does not, nor do writes through ``.data``.
# What rescales gradients shows in any value that is not zero, so a few of the largest gradients' are compared.
SAMPLED_GRADIENTS = 4
SAMPLES = 16


class GradientNorms:
    """The sums of squares of one backward's averaged buckets, as long as nobody changes the gradients.

    Attributes:
        are_wanted: whether sums are worth collecting; set by whoever asked once.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        self._noted: list[_NotedBucket] = []

    def begin(self) -> None:
        """A backward is expected; what is known of the last one ends."""
        self._noted = []

    @Observer("a norm of gradients, which are read again instead,")
    def note(self, bucket: Bucket, square_sum: torch.Tensor | float | None) -> None:
        """``bucket``'s average, whose sum of squares this is (None: not known), has become its gradients."""
        if self.are_wanted and square_sum is not None:
            self._noted.append(_NotedBucket(bucket, square_sum))

    def split(self, parameters: Iterable[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
        """Return the known sum of squares, and the gradients among those of ``parameters`` that it does not cover."""
        unread = {id(parameter): parameter for parameter in parameters if parameter.grad is not None}
        square_sum = 0.0
        for noted, known in self._current_square_sums(unread):
            square_sum += known
            for parameter in noted.parameters:
                del unread[id(parameter)]
        return square_sum, [parameter.grad for parameter in unread.values() if parameter.grad is not None]

    def _current_square_sums(self, asked: Mapping[int, torch.Tensor]) -> list[tuple[_NotedBucket, float]]:
        """The buckets among those asked for whose gradients are unchanged, with one look at each device."""
        by_device: dict[torch.device, list[tuple[_NotedBucket, torch.Tensor]]] = {}
        for noted in self._noted:
            if all(id(parameter) in asked for parameter in noted.parameters):
                verdict = noted.verdict()
                if verdict is not None:
                    by_device.setdefault(verdict.device, []).append((noted, verdict))
        current = []
        for pairs in by_device.values():
            values = torch.stack([verdict for _, verdict in pairs]).tolist()
            current += [
                (noted, square_sum) for (noted, _), (is_same, square_sum) in zip(pairs, values, strict=True) if is_same
            ]
        return current


class _NotedBucket:
    """A sum of squares, and the gradients it is of: tensors not kept alive, and their versions."""

    def __init__(self, bucket: Bucket, square_sum: torch.Tensor | float) -> None:
        self.square_sum = square_sum
        self.parameters = bucket.parameters
        gradients = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
        assert len(gradients) == len(bucket.parameters), "a bucket without skipped parameters has all gradients"
        self._gradients = [(weakref.ref(gradient), gradient._version) for gradient in gradients]
        by_numel = sorted(range(len(gradients)), key=lambda index: gradients[index].numel())
        self._sampled = [index for index in by_numel[-SAMPLED_GRADIENTS:] if gradients[index].numel() > 0]
        self._samples = self._sample(gradients)

    def verdict(self) -> torch.Tensor | None:
        """Whether gradients have the values they had, as far as samples tell, and the sum: float64, on their device.

        None where one is another tensor, or its version has gone up.
        """
        gradients: list[torch.Tensor] = []
        for parameter, (reference, version) in zip(self.parameters, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is None or reference() is not gradient or gradient._version != version:
                return None
            gradients.append(gradient)
        is_same = (self._samples == self._sample(gradients)).all() & self._samples.any()
        square_sum = torch.as_tensor(self.square_sum, dtype=torch.float64, device=is_same.device)
        return torch.stack((is_same.double(), square_sum))

    def _sample(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """A few values of the largest gradients, which are dense."""
        if not self._sampled:
            return torch.zeros(1)
        return torch.cat([_sample_memory(gradients[index].detach()) for index in self._sampled])


def _sample_memory(dense: torch.Tensor) -> torch.Tensor:
    count = min(SAMPLES, dense.numel())
    return dense.as_strided((count,), (dense.numel() // count,))


def clip_grad_norm_(
    model: torch.nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale ``model``'s averaged gradients in place so that their joint norm is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, except that from the second call on the 2-norm of a
    ``psengine.DistributedDataParallel`` comes from the pass that averaged its gradients or wrote them, where there was
    one and nobody has changed them since; only other gradients are read again. Call it on every rank.

    A change shows in the gradient's version, or in samples of a few large gradients where all were rescaled
    (``torch.amp.GradScaler``). Writes past torch's count, to ``.grad.data`` or through ``.grad.numpy()``, may show in
    neither, and the norm would be that before them: write to ``.grad`` under ``torch.no_grad()``, or call torch's.

    Args:
        model: any module; wrapped or not.
        max_norm: the largest norm to leave as it is.
        norm_type: which norm; others than 2.0 are always computed anew.
        error_if_nonfinite: raise where the norm is NaN or infinite, before anything is scaled.
        foreach: see ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, a scalar on the first gradient's device, of the dtype that all gradients promote to.
        It is summed in float64, so it may differ from torch's in the last bits; it has the same bits on every rank. On
        a GPU the host waits for it.

    Raises:
        ArgumentTypeError: ``model`` is no module, such as the parameters that torch's function takes.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"psengine.clip_grad_norm_ takes the model itself (expected a torch.nn.Module, got {type(model).__name__})."
            " Fix: psengine.clip_grad_norm_(model, max_norm), without .parameters()."
        )
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = getattr(getattr(model, "reducer", None), "norms", None)
    if not isinstance(norms, GradientNorms) or float(norm_type) != 2.0 or not parameters:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if not norms.are_wanted:
        norms.are_wanted = True
        model.strategy.collect_square_sums()  # type: ignore[union-attr, operator]
    total_norm = _total_norm(parameters, norms, foreach)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the norm of the gradients must be finite (expected error_if_nonfinite=True to hold, got"
            f" {total_norm.item()}). check_finite=True names the parameter and the rank."
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    return total_norm


def _total_norm(parameters: Sequence[torch.Tensor], norms: GradientNorms, foreach: bool | None) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square_sum, unread = norms.split(parameters)
    if len(unread) == len(gradients):
        return torch.nn.utils.get_total_norm(unread, 2.0, False, foreach)
    if unread:
        square_sum += torch.nn.utils.get_total_norm(unread, 2.0, False, foreach).double().item() ** 2
    dtype = functools.reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients})
    return torch.tensor(math.sqrt(square_sum), dtype=dtype, device=gradients[0].device)
