"""Codecs turn values into payloads, which travel, and back.

::

    rank 0   values ─ encode ─► payload ──┐                          ┌─► decode ─► values
    rank 1   values ─ encode ─► payload ──┴─► a collective, a server ┴─► decode ─► values

A payload is a 1-D tensor. Its dtype and numel depend only on those of the values (``payload_spec``), so that memory is
allocated beforehand, and a receiver checks a payload's size before decoding.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import Self


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
    """The state of a codec for one bucket: the residual, the part of values that earlier payloads left out.

    Args:
        numel, dtype, device: of the bucket's values.

    Attributes:
        residual: 1-D, laid out like the values; zeros at first. ``encode`` adds it to the next values.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = self._former = torch.zeros(numel, dtype=dtype, device=device)

    def replace(self, residual: torch.Tensor) -> None:
        """Keep ``residual`` (owned and mutated here) for the next payload.

        A value that is not finite becomes zero, or it would spoil all later payloads.
        """
        self._former, self.residual = self.residual, residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def give_back(self) -> None:
        """The last payload did not count: restore the residual before it."""
        self.residual = self._former


class Codec(ABC):
    """Turns values into payloads and back. One object serves many buckets, each with its own ``CodecState``.

    Attributes:
        name: users write ``compress=name``.
        is_lossless: whether decoding restores the bits that were encoded.
        is_identity: whether the payload is the values, so that callers may skip encoding.
        encodes_answers: whether servers encode their answers, averages and weights. False for a codec with a residual,
            because no later answer brings what one left out.

    If a value is not finite, the decoded values must not all be finite: training code looks for them
    (``check_finite``, ``torch.amp.GradScaler``).
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    encodes_answers: ClassVar[bool] = True
    _given: Mapping[str, Any]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Keep the constructor's arguments by name."""
        codec = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        named = {
            name
            for name, one in signature.parameters.items()
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        }
        given = signature.bind_partial(codec, *arguments, **options).arguments
        codec._given = {name: value for name, value in given.items() if name in named and value is not codec}
        return codec

    def __repr__(self) -> str:
        """What users write to get this one, such as "topk:ratio=0.01"."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options by name: numbers, booleans, words. Servers make an equal codec from them.

        Default: the arguments that the constructor was given.
        """
        return self._given

    def covers(self, dtype: torch.dtype) -> bool:
        """Whether it encodes values of ``dtype``; others travel unchanged. Default: floating dtypes."""
        return dtype.is_floating_point

    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of payloads that are the values in another dtype, so that a collective may sum payloads.

        Such a codec has no state: packing may write the payload, and unpacking may decode the sum.
        None: each rank gathers all payloads, decodes them, and sums in the order of ranks.
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

        A server decodes bytes of workers: any bytes of the right size must be decoded to some values, or refused by
        ``ProtocolError``.
        """
