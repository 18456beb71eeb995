"""Plain values as bytes, and back: what JSON holds, tuples, and dense tensors, nested at will; no pickle. Pure.

::

    header   length (8 bytes), then JSON: numbers, text and None as they are; each container and tensor as one object
    body     the tensors' elements one after the other, in the order in which the header names them
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ConfigurationError, ProtocolError, PSEngineError
from psengine.tensors.leaves import COMPLEX_DTYPES, CPU, FLOATING_DTYPES, INTEGER_DTYPES

MAX_DEPTH = 100
_LENGTH_BYTES = 8
_ALLOWED = "None, bool, int, float, str, a dense tensor, or a list, tuple or dict of these"
_DTYPES = {str(dtype): dtype for dtype in INTEGER_DTYPES | FLOATING_DTYPES | COMPLEX_DTYPES}
_SCALARS = (type(None), bool, float, str)


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as bytes; a subclass of dict travels as a dict.

    Raises:
        ArgumentTypeError: something in it is of another type, whose path the message names, or cannot be read, such as
            the elements of a DTensor.
        ConfigurationError: it is nested too deeply, or an integer has thousands of digits.
    """
    tensors: list[torch.Tensor] = []
    try:
        tree = _encode(value, "value", tensors, 0)
        try:
            header = json.dumps(tree).encode()
        except ValueError as error:
            raise ConfigurationError(f"the value cannot be sent as JSON ({error})") from error
        return b"".join([len(header).to_bytes(_LENGTH_BYTES, "big"), header, *map(_bytes_of, tensors)])
    except PSEngineError:
        raise
    except Exception as error:  # of a subclass's own methods: the other ranks are to be told of these too
        raise ArgumentTypeError(
            f"the value cannot be read ({type(error).__name__}: {error}). Fix: send {_ALLOWED}; tensors and dicts that"
            " are no subclasses."
        ) from error


def from_bytes(payload: bytes) -> Any:
    """Undo ``to_bytes``. A tensor on an accelerator comes back on this process's current device of that kind.

    Raises:
        ProtocolError: these are no bytes of ``to_bytes``.
    """
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "big")
    if len(payload) < _LENGTH_BYTES or len(payload) < end:
        raise ProtocolError(f"a value's header ends early (got {len(payload)} bytes)")
    body = _Body(memoryview(payload)[end:])
    try:
        value = _decode(json.loads(payload[_LENGTH_BYTES:end]), body)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ProtocolError(f"a value's header is malformed ({type(error).__name__}: {error})") from error
    if body.rest:
        raise ProtocolError(f"a value has bytes that belong to no tensor (got {len(body.rest)})")
    return value


def _encode(value: Any, path: str, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigurationError(
            f"a value is nested at most {MAX_DEPTH} levels deep, and does not contain itself (got more below"
            f" {path[:60]}...)"
        )
    if type(value) in (*_SCALARS, int):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and str(value.dtype) in _DTYPES:
        if not value.is_meta:
            tensors.append(value.detach())
            return {"tensor": [str(value.dtype), list(value.shape), value.device.type]}
    elif isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if type(key) not in (*_SCALARS, int):
                raise _refusal(f"the key {key!r} of {path}", key)
            pairs.append([key, _encode(item, f"{path}[{key!r}]", tensors, depth + 1)])
        return {"dict": pairs}
    elif type(value) in (list, tuple):
        items = [_encode(item, f"{path}[{index}]", tensors, depth + 1) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    raise _refusal(path, value)


def _refusal(path: str, value: Any) -> ArgumentTypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.Tensor):
        kind += f" of {value.dtype}, layout {value.layout}, on {value.device.type}"
    return ArgumentTypeError(
        f"{path} cannot be sent without pickling it (expected {_ALLOWED}, got {kind}). Fix: send what it is made of,"
        " such as a dict of its fields, and build it anew on each rank."
    )


class _Body:
    """The tensors' elements, taken from the front."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self.rest):
            raise ValueError(f"a tensor of {size_bytes} bytes, and {len(self.rest)} are left")
        taken, self.rest = self.rest[:size_bytes], self.rest[size_bytes:]
        return taken


def _decode(tree: Any, body: _Body) -> Any:
    if not isinstance(tree, dict):
        if type(tree) in (*_SCALARS, int):
            return tree
        raise ValueError(f"a bare {type(tree).__name__}")
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return _tensor(content, body)
    if kind == "dict":
        return {_decode_key(key): _decode(item, body) for key, item in content}
    items = [_decode(item, body) for item in content]
    return {"list": list, "tuple": tuple}[kind](items)


def _decode_key(key: Any) -> Any:
    if type(key) not in (*_SCALARS, int):
        raise ValueError(f"a key of type {type(key).__name__}")
    return key


def _tensor(content: Any, body: _Body) -> torch.Tensor:
    name, shape, device = content
    dtype = _DTYPES[name]
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    size_bytes = math.prod(shape) * dtype.itemsize
    flat = torch.empty(size_bytes, dtype=torch.uint8, device=CPU)
    if size_bytes:
        # Copied, because a view of wider elements needs memory that is aligned for them, and bytes are read-only.
        flat.copy_(torch.frombuffer(bytearray(body.take(size_bytes)), dtype=torch.uint8))
    tensor = flat.view(dtype).view(shape) if size_bytes else torch.empty(shape, dtype=dtype, device=CPU)
    return tensor if device == "cpu" else tensor.to(_device_of(device))


def _device_of(kind: str) -> torch.device:
    """Return this process's current device of the kind, or the CPU where it has none of it."""
    try:
        module = torch.get_device_module(kind)
        return torch.device(kind, module.current_device()) if module.is_available() else CPU
    except RuntimeError:
        return CPU


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.to(CPU).resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = bytearray(flat.numel() * flat.element_size())
    if content:
        torch.frombuffer(content, dtype=torch.uint8).copy_(flat.view(torch.uint8))
    return bytes(content)
