"""Codecs turn values into payloads, which travel, and back.

::

    rank 0   values ─ encode ─► payload ──┐                          ┌─► decode ─► values
    rank 1   values ─ encode ─► payload ──┴─► a collective, a server ┴─► decode ─► values

A payload is a 1-D tensor. Its dtype and numel depend only on those of the values (``payload_spec``), so that memory is
allocated beforehand, and a receiver checks a payload's size before decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from psengine.specification import Configured, specified


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
        residual: 1-D, laid out like the values, of their dtype or float32; zeros at first. ``encode`` adds it to the
            next values.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)
        # The residual before the last payload, or memory for the next one.
        self._other: torch.Tensor | None = None
        self._has_former = False

    @property
    def size_bytes(self) -> int:
        """Memory of the residual, and of the one before."""
        return 2 * self.residual.nbytes

    def next_residual(self) -> torch.Tensor:
        """Memory for the residual that goes to ``keep``."""
        if self._other is None:
            self._other = torch.empty_like(self.residual)
        return self._other

    def keep(self) -> None:
        """What was written to ``next_residual``, finite values, counts from now on."""
        assert self._other is not None, "next_residual comes first"
        self._other, self.residual = self.residual, self._other
        self._has_former = True

    def replace(self, residual: torch.Tensor) -> None:
        """Keep ``residual`` (owned and mutated here) for the next payload.

        A value that is not finite becomes zero, or it would spoil all later payloads.
        """
        self._other = residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.keep()

    def give_back(self) -> None:
        """The last payload did not count: restore the residual before it."""
        if self._has_former:
            assert self._other is not None
            self._other, self.residual = self.residual, self._other
            self._has_former = False

    def give_back_part(self, first: int, end: int) -> None:
        """Of these values nothing counted: restore the residual before the last payload, if ``give_back`` has not."""
        if self._has_former:
            assert self._other is not None
            self.residual[first:end] = self._other[first:end]

    def settle(self) -> None:
        """What was sent so far counts; ``give_back`` restores no residual from before."""
        self._has_former = False

    def reset(self) -> None:
        """Nothing was left out: this replica begins anew."""
        self.residual.zero_()
        self._has_former = False


class Codec(Configured, ABC):
    """Turns values into payloads and back. One object serves many buckets, each with its own ``CodecState``.

    Attributes:
        name: users write ``compress=name``.
        is_lossless: whether decoding restores the bits that were encoded.
        is_identity: whether the payload is the values, so that callers may skip encoding.
        encodes_answers: whether servers encode their answers: averages, with a state at the server, and weights, as
            differences from what the worker holds, unless ``summed_dtype`` says that payloads are values.
        slice_numel: where the values may be cut: a payload of values that begin and end at multiples of this (the end
            of all values counts) is that part of the whole payload. None: nowhere.

    If a value is not finite, the decoded values must not all be finite: training code looks for them
    (``check_finite``, ``torch.amp.GradScaler``).
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool] = False
    is_identity: ClassVar[bool] = False
    encodes_answers: ClassVar[bool] = True
    slice_numel: ClassVar[int | None] = None

    def __repr__(self) -> str:
        """What users write to get this one, such as "topk:ratio=0.01"."""
        return specified(self.name, self._given)

    def covers(self, dtype: torch.dtype) -> bool:
        """Whether it encodes values of ``dtype``; others travel unchanged. Default: floating dtypes."""
        return dtype.is_floating_point

    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of payloads that are the values in another dtype, so that a collective may sum payloads.

        Such a codec has no state: packing may write the payload, and unpacking may decode the sum.
        None: payloads are decoded, and their values added in the order of ranks.
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

    def decode_add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of ``payload`` to ``total``, which is as ``into`` of ``decode``. Raises like ``decode``."""
        addend = torch.empty_like(total)
        self.decode(payload, addend)
        total.add_(addend)
