"""States without pickle: documents for JSON, their tensors apart, and files of both.

value      tensors, numbers, text and None, in dicts, lists, tuples and sets, as ``state_dict`` methods return them
document   the value, with each tensor's name and form in its place
file       safetensors: the tensors by name; in its header the document, and a SHA-256 of document and tensors
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psengine.errors import ArgumentTypeError
from psengine.kernels.ops import is_dense

# By the name that stands in a document. JSON's own lists need none.
CONTAINERS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, tuple, set)}
_TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a tensor is without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A dense tensor of this form, uninitialised."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Parts:
    """A value taken apart; ``tensors`` are dense, detached, and by name in the order in which the document has them."""

    document: Any
    tensors: dict[str, torch.Tensor]

    def copied(self) -> Parts:
        """The same with tensors of its own, on the CPU."""
        return Parts(self.document, {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()})


def take_apart(value: Any, name: str = "") -> Parts:
    """Take ``value`` apart; names of tensors are paths, below ``name``.

    Raises:
        ArgumentTypeError: something in it is none of the kinds above.
    """
    tensors: dict[str, torch.Tensor] = {}
    return Parts(_document(value, name, tensors), tensors)


def _document(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        tensor = value.detach().resolve_conj().resolve_neg()
        if not is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
        tensors[path] = tensor
        return {_TENSOR: [path, str(tensor.dtype), list(tensor.shape), list(tensor.stride())]}
    below = f"{path}/" if path else ""
    if isinstance(value, dict):
        kind = next(one for one in type(value).__mro__ if one in (dict, OrderedDict, Counter))
        entries = [[_document(key, path, tensors), _document(v, f"{below}{key}", tensors)] for key, v in value.items()]
        return {kind.__name__: entries}
    if isinstance(value, (list, tuple, set)):
        items = [_document(item, f"{below}{index}", tensors) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {("tuple" if isinstance(value, tuple) else "set"): items}
    raise ArgumentTypeError(
        "a state travels without pickle (expected tensors, numbers, text and None, in dicts, lists, tuples and sets;"
        f" got {type(value).__name__} as {path or 'the state'!r}). Fix: turn it into these in state_dict()."
    )


def put_together(document: Any, tensor_of: Callable[[str, Form], torch.Tensor]) -> Any:
    """Undo ``take_apart``; ``tensor_of`` is asked for each tensor, in the order of ``Parts.tensors``.

    Raises:
        LookupError, ValueError, TypeError, AttributeError: the document is none.
    """
    if isinstance(document, list):
        return [put_together(item, tensor_of) for item in document]
    if not isinstance(document, dict):
        return document
    ((kind, content),) = document.items()
    if kind == _TENSOR:
        name, dtype, shape, strides = content
        found = getattr(torch, dtype.removeprefix("torch."))
        return tensor_of(name, Form(dtype=found, shape=tuple(shape), strides=tuple(strides)))
    return CONTAINERS[kind](
        {put_together(key, tensor_of): put_together(value, tensor_of) for key, value in content}
        if kind in ("dict", "OrderedDict", "Counter")
        else [put_together(item, tensor_of) for item in content]
    )


def to_file(parts: Parts) -> bytes:
    """The bytes of a file. ``parts`` are ``copied``: the format knows no tensors that share memory."""
    from safetensors.torch import save

    document = json.dumps(parts.document)
    tensors = {name: _saved(tensor) for name, tensor in parts.tensors.items()}
    return save(tensors, metadata={"document": document, "sha256": _digest(document, tensors)})


def from_file(data: bytes) -> Any:
    """Undo ``take_apart`` and ``to_file``; tensors are on the CPU and own their memory.

    Raises:
        ValueError: the bytes are not those of ``to_file``; the message says why.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)  # checks the header first
        header_bytes = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
        expected, got = metadata["sha256"], _digest(metadata["document"], tensors)
        if got != expected:
            raise ValueError(f"the content is damaged (expected sha256 {expected}, got {got})")

        def tensor_of(name: str, form: Form) -> torch.Tensor:
            values = _bytes(tensors[name]).view(form.dtype)
            return form.empty("cpu").copy_(values.view(form.shape))

        return put_together(json.loads(metadata["document"]), tensor_of)
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"no file of a state, or a damaged one: {error}") from error


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as safetensors takes it, which lacks complex numbers and strides."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _digest(document: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(document.encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(_bytes(tensor).numpy().data)
    return digest.hexdigest()
