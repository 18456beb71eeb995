"""The oracle of weights that travel as differences from what a worker holds: it keeps what each worker holds itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from psengine.protocol.messages import Message
from simulation.payloads import Values, decoded, kept
from simulation.violation import require

# "onebit" multiplies by a mean, whose additions have no order.
TOLERANCE = 1e-4


class Place(NamedTuple):
    """A worker's copy of a chunk. An incarnation may end while its process, and what that holds, live on."""

    epoch: int
    key: int
    worker: int
    incarnation: int


class Told(NamedTuple):
    """An answer: what its worker holds with it."""

    version: int
    values: Values
    payload: bytes


class ToldWeights:
    """Of one job.

    Args:
        numel, dtype: of a chunk; payloads of another form are differences.

    Attributes:
        are_differences: whether the codec has any.
    """

    def __init__(self, codec: str, numel: int, dtype: torch.dtype) -> None:
        self._codec, self._numel, self._dtype = codec, numel, dtype
        self.are_differences = codec.partition(":")[0] in ("int8", "fp4", "onebit", "topk")
        self._said: dict[Place, tuple[int, int | None]] = {}  # (number of the push, what was said with it)
        # By life of a server, chunk and worker: where its last answer went, and the number of that.
        self._last: dict[tuple[int, int, int], tuple[Place, int]] = {}
        self._told: dict[tuple[Place, int], list[Told]] = {}

    def said(self, epoch: int, push: Message) -> None:
        """A worker has pushed: it says whose answer it holds. A push that is overtaken says it of long ago."""
        place = Place(epoch, push.key, push.worker, push.incarnation)
        known = self._said.get(place)
        if known is None or push.sequence >= known[0]:
            self._said[place] = push.sequence, push.body.get("held")

    def updated(self, epoch: int, message: Message, weights: Values, version: int) -> None:
        """An answer leaves, while the servers have ``weights``."""
        place = Place(epoch, message.key, message.worker, message.incarnation)
        payload = message.payload
        assert isinstance(payload, torch.Tensor)
        told = self._told.setdefault((place, message.sequence), [])
        data = payload.view(torch.uint8).numpy().tobytes()
        if any((one.version, one.payload) == (message.version, data) for one in told):
            return  # the same answer again
        former = self._last.get(place[:3])
        if former is not None and former[1] == message.sequence:
            again = [one for one in self._told[former] if (one.version, one.payload) == (message.version, data)]
            if again:  # to the process's next incarnation, which this shard let in while it knew the former
                told.append(again[-1])
                self._last[place[:3]] = place, message.sequence
                return
        where = f"the answer to push {message.sequence} of chunk {message.key} to worker {message.worker}"
        require(message.version == version, "{} has version {}, expected {}", where, message.version, version)
        if payload.dtype is self._dtype and payload.numel() == self._numel:
            values = payload.numpy().copy()
            require(np.array_equal(values, weights), "{} brings weights that are not the servers'", where)
        else:
            said, last = self._said.get(place), self._last.get(place[:3], (place, None))
            is_held = said is not None and said[1] is not None and said[1] == last[1]
            require(is_held, "{} is a difference from answer {}, the worker holds {}", where, last[1], said)
            held = self._told[last][-1].values  # type: ignore[index]
            brought = decoded(self._codec, payload, self._numel)
            expected = kept(self._codec, weights - held, payload.nbytes)
            require(
                np.allclose(brought, expected, rtol=TOLERANCE, atol=TOLERANCE),
                "{} brings a difference of {}, expected {}",
                where,
                brought[:8].tolist(),
                expected[:8].tolist(),
            )
            values = held + brought
        told.append(Told(message.version, values, data))
        self._last[place[:3]] = place, message.sequence

    def has_told(self, place: Place, sequence: int, version: int, landed: torch.Tensor) -> bool:
        """Whether the answer to this push brought these weights, with this version."""
        values = landed.numpy()
        return any(
            one.version == version and np.array_equal(one.values, values)
            for one in self._told.get((place, sequence), ())
        )
