"""A module's tensors by name: parameters to exchange, state that replicas share, and the broadcast of buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch

# The widest element (complex128) decides the alignment of every buffer's place in the packed bytes.
ALIGNMENT_BYTES = 16


def reducible_parameters(module: torch.nn.Module, ignored: Set[str]) -> list[tuple[str, torch.nn.Parameter, bool]]:
    """(name, parameter, has sparse gradients) for each parameter whose gradient is exchanged, in model order."""
    found: list[tuple[str, torch.nn.Parameter, bool]] = []
    seen: set[torch.nn.Parameter] = set()
    for module_name, submodule in module.named_modules():
        is_sparse = isinstance(submodule, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and submodule.sparse
        for short_name, parameter in submodule.named_parameters(recurse=False):
            name = f"{module_name}.{short_name}" if module_name else short_name
            if parameter.requires_grad and name not in ignored and parameter not in seen:
                seen.add(parameter)
                found.append((name, parameter, is_sparse))
    return found


def named_buffers(module: torch.nn.Module, ignored: Set[str]) -> dict[str, torch.Tensor]:
    """Name to buffer, without duplicates and without the ``ignored`` names."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def shared_state(module: torch.nn.Module, ignored: Set[str], *, with_buffers: bool) -> dict[str, torch.Tensor]:
    """The tensors that must be equal on all replicas, by name: parameters and buffers, detached."""
    state = {name: p for name, p in module.named_parameters() if name not in ignored}
    buffers = named_buffers(module, ignored) if with_buffers else {}
    return {name: tensor.detach() for name, tensor in (state | buffers).items()}


class BufferBroadcast:
    """Broadcasts many small buffers of mixed dtypes as one message per device.

    Native DDP sends one message per dtype and flattens anew each time; BatchNorm alone has two dtypes, and a message
    of a few KB costs 0.3 ms and more. Here the packed bytes and the views into them are kept between forwards.
    """

    def __init__(self) -> None:
        self._signature: tuple[tuple[torch.Size, torch.dtype, torch.device], ...] = ()
        self._packed: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []

    def run(
        self,
        buffers: Sequence[torch.Tensor],
        broadcast: Callable[[Sequence[torch.Tensor]], None],
        *,
        is_source: bool,
    ) -> None:
        """Overwrite ``buffers`` by the source's, of the same shapes and dtypes, by one call of ``broadcast``."""
        signature = tuple((b.shape, b.dtype, b.device) for b in buffers)
        if signature != self._signature:
            with torch.inference_mode(False):  # tensors made inside inference mode could never be written outside
                self._lay_out(buffers)
            self._signature = signature
        if is_source:
            torch._foreach_copy_(self._views, list(buffers))
        broadcast(self._packed)
        if not is_source:
            torch._foreach_copy_(list(buffers), self._views)

    def _lay_out(self, buffers: Sequence[torch.Tensor]) -> None:
        offsets: list[int] = []
        ends: dict[torch.device, int] = {}
        for buffer in buffers:
            offset = ends.get(buffer.device, 0)
            offsets.append(offset)
            ends[buffer.device] = offset + -(-buffer.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        packed = {device: torch.zeros(end, dtype=torch.uint8, device=device) for device, end in ends.items()}
        self._packed = list(packed.values())
        self._views = [
            packed[b.device][offset : offset + b.nbytes].view(b.dtype).view(b.shape)
            for b, offset in zip(buffers, offsets, strict=True)
        ]
