"""The seam between values and what travels in their place: a codec.

::

    rank 0   values ─ encode ─► payload ──┐                          ┌─► decode ─► values
    rank 1   values ─ encode ─► payload ──┴─► a collective, a server ┴─► decode ─► values

A payload is a 1-D tensor. Its dtype and numel follow from those of the values alone (``payload_spec``), so that memory
is allocated beforehand, and whoever receives a payload can check its size before decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """The form of a payload.

    Attributes:
        dtype: of the payload's elements.
        numel: number of elements.
    """

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return self.numel * self.dtype.itemsize


class CodecState:
    """What a codec keeps between the payloads of one bucket: the residual, which earlier payloads left out.

    Args:
        numel, dtype, device: of the bucket's values.

    Attributes:
        residual: 1-D, laid out like the values; zeros at first. ``encode`` adds it to the next values.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = self._former = torch.zeros(numel, dtype=dtype, device=device)

    def replace(self, residual: torch.Tensor) -> None:
        """Keep ``residual`` (owned and mutated here) for the next payload.

        A value that is not finite becomes zero: it would be in the residual for ever, and so in all later payloads.
        """
        self._former, self.residual = self.residual, residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def give_back(self) -> None:
        """The last payload did not count: what it brought of the residual is to go with the next one."""
        self.residual = self._former


class Codec(ABC):
    """Turns values into payloads and back. One object serves many buckets; what differs is in their ``CodecState``.

    Attributes:
        name: what users write to get it, as in ``compress=name``.
        is_lossless: whether decoding yields the very bits that were encoded.
        is_identity: whether the payload is the values, so that callers may hand over these.
        encodes_answers: whether servers may answer by payloads of it: averages and weights. What these leave out never
            comes, so it is False for a codec with a residual.

    Values that are not finite must stay visible: where there is one, the decoded values are not all finite. Training
    code looks for them (``check_finite``, ``torch.amp.GradScaler``).
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    encodes_answers: ClassVar[bool] = True

    def __repr__(self) -> str:
        """What users write to get this one, such as "topk:ratio=0.01"."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @property
    def options(self) -> Mapping[str, Any]:
        """The options it was made with, by name: numbers, booleans, words. Servers make the like of it by them."""
        return {}

    def covers(self, dtype: torch.dtype) -> bool:
        """Whether it encodes values of ``dtype``; others travel as they are. Default: floating dtypes."""
        return dtype.is_floating_point

    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of payloads that are nothing but the values in another dtype, so that a collective may add them.

        Such a codec has no state: packing gradients may write the payload, and reading the sum may decode it.
        None: payloads are gathered from all ranks, decoded, and added up in the order of ranks.
        """
        return None

    @abstractmethod
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        """The form of the payload of ``numel`` values of ``dtype``."""

    def make_state(self, numel: int, dtype: torch.dtype, device: torch.device) -> CodecState | None:
        """The state of a bucket before its first payload. Default: None, nothing is kept."""
        return None

    @abstractmethod
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        """Write the payload of ``values``.

        Args:
            values: 1-D, contiguous, of a dtype that ``covers`` takes.
            payload: 1-D, contiguous, on the same device, of the form that ``payload_spec`` says; mutated. Shares no
                memory with ``values``.
            state: from ``make_state``; mutated.
        """

    @abstractmethod
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        """Write the values of ``payload`` to ``into``: 1-D, contiguous, of the dtype and numel that were encoded.

        A server decodes what a worker sent: any bytes of the right size must be decoded to some values, or refused by
        ``ProtocolError``.
        """
