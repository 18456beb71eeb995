"""The one place where what a worker sent for a chunk becomes the chunk's values."""

from __future__ import annotations

import torch

from psengine.errors import ProtocolError
from psengine.protocol.codec import payload_tensor
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message


def received_values(message: Message, spec: ChunkSpec) -> torch.Tensor:
    """The payload as the chunk's values: 1-D, read-only, valid for as long as it is referenced.

    Raises:
        ProtocolError: there is no payload, or it is not of the chunk's dtype and size.
    """
    if message.payload is None or (message.dtype, message.numel) != (spec.dtype, spec.numel):
        got = "none" if message.payload is None else f"{message.numel} of {message.dtype}"
        raise ProtocolError(f"{spec.describe()}: expected {spec.numel} values of {spec.dtype}, got {got}")
    return payload_tensor(message)
