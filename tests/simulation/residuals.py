"""What payloads of averages leave out, at workers and at servers, and who is in an average that arrives changed.

A payload is the encoding of values and a residual, and what it leaves out is the next residual:

- of a worker: from zeros on, as long as its process lives; a gradient that does not count changes nothing;
- of a server: from zeros on, as long as its life; a step that a view with members takes back changes nothing.

So the oracle, which encodes by itself, makes the payloads of gradients to the bit. Of an average it looks for the
workers whose payloads, added in the order of ranks to what the server kept, are encoded to what the server answers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from oracles.payloads import BLOCKS, CASTS, decoded, encode_blocks_, encode_largest_

from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import view_of
from simulation import inspection
from simulation.reference import Values, average
from simulation.violation import Violation, require


class Pushed(NamedTuple):
    """A gradient on its way: the model that it was made from, its payload's bytes and values, and its weight."""

    base: bytes
    payload: bytes
    values: Values
    weight: float


class Made(NamedTuple):
    """The contributors of an average, and the models that they have contributed from."""

    ranks: tuple[int, ...]
    bases: frozenset[bytes]


@dataclass
class Kept:
    """A chunk at a server, in one life and since its job was begun there.

    Attributes:
        pushed: by step and rank, under the present view.
        closed: by step, the residual after it; None where this life has only its result.
    """

    view: int
    pushed: dict[int, dict[int, Pushed]] = field(default_factory=lambda: defaultdict(dict))
    closed: dict[int, Values | None] = field(default_factory=dict)


class Residuals:
    """See the module's text."""

    def __init__(self, job, codec: str, specs: list[ChunkSpec]) -> None:
        self._world, self._specs = job.world, specs
        self._name, _, ratio = codec.partition(":ratio=")
        self._share = float(ratio or 1)
        self._pushed: dict[tuple[Any, int, int], Pushed] = {}  # process, step and chunk
        self._of_worker: dict[tuple[Any, int], Values] = {}  # process and chunk
        self._next: dict[tuple[Any, int], Values] = {}  # the same, if the last push counts
        self._of_server: dict[tuple[int, int], Kept] = {}  # life and chunk
        self._made: dict[tuple[int, int, bytes], Made] = {}  # chunk, step and values

    # ---- workers -----------------------------------------------------------------------------------------------

    def push(self, process, message: Message, base: bytes, values: Values, weight: float) -> None:
        """A worker has encoded a gradient; one that weighs nothing is not sent."""
        key = message.key
        former = self._of_worker.setdefault((process, key), np.zeros(values.size, values.dtype))
        self._next[process, key] = former
        if not weight:
            require(message.payload is None, "worker {} sends a gradient that weighs nothing", process.rank)
            return
        payload, self._next[process, key] = self._encoded(values, former)
        same = "chunk {} of worker {} is not sent as its gradient and residual"
        require(bytes(message.payload.view(torch.uint8).numpy()) == payload, same, key, process.rank)
        pushed = Pushed(base, payload, self._decoded(payload, key), weight)
        self._pushed[process, message.sequence, key] = pushed

    def end(self, process, key: int, *, counts: bool) -> None:
        """A worker knows whether what it pushed last counts."""
        if counts:
            self._of_worker[process, key] = self._next[process, key]
        found, expected = process.session.residual(key), self._of_worker[process, key]
        is_same = np.array_equal(expected, np.zeros_like(expected) if found is None else found.numpy())
        require(is_same, "worker {} keeps another residual of chunk {} than it left out", process.rank, key)

    def fenced(self, process) -> None:
        """A worker was put out: what it pushed last does not count."""
        for one, key in list(self._next):
            if one is process:
                self.end(process, key, counts=False)

    def made(self, step: int, answers: list[Values], base: bytes) -> tuple[int, ...]:
        """The contributors of a step's averages, which are the same in every chunk."""
        found = [self._made.get((key, step, _bits(values))) for key, values in enumerate(answers)]
        require(None not in found, "step {} has averages that no server has made: {}", step, found)
        require(set(found) == {Made(found[0].ranks, frozenset([base]))}, "step {} has averages of {}", step, found)
        return found[0].ranks  # type: ignore[union-attr]

    # ---- servers -----------------------------------------------------------------------------------------------

    def applied(self, server, shard: Any, message: Message, outgoing: list[Any]) -> None:
        """A shard has taken a message."""
        if any(one.message.type is MessageType.ERROR for one in outgoing):
            return
        number = self._world.number
        view = inspection.view_number(shard, number)[1]
        if message.type is MessageType.VIEW:
            adopted = view_of(message.body)
            from_step = adopted.from_step if adopted.members else math.inf
            for (life, key), kept in self._of_server.items():
                if life == server.epoch and inspection.has_chunk(shard, number, key) and kept.view != view:
                    self._adopt(kept, from_step, view)
            return
        key, step = message.key, message.sequence
        if message.type is MessageType.REGISTER and not view:
            self._of_server.pop((server.epoch, key), None)
        if (
            message.type not in (MessageType.PUSH, MessageType.RESULT)
            or key >= len(self._specs)
            or message.view != view
        ):
            return  # its sender says it again under this view, where it still counts
        kept = self._of_server.setdefault((server.epoch, key), Kept(view))
        if message.type is MessageType.RESULT:
            kept.closed.setdefault(step, None)
            return
        self._take(kept, message)
        answers = [one.message for one in outgoing if one.message.type is MessageType.UPDATED]
        if answers and step not in kept.closed:
            self._close(kept, step, key, answers[0])

    def _adopt(self, kept: Kept, from_step: float, view: int) -> None:
        kept.view = view
        kept.pushed.clear()
        kept.closed = {step: residual for step, residual in kept.closed.items() if step < from_step}

    def _take(self, kept: Kept, push: Message) -> None:
        process = self._world.process_of(push.worker, push.incarnation)
        if process is None or push.payload is None:
            return
        known = self._pushed[process, push.sequence, push.key]
        is_same = bytes(push.payload) == known.payload and push.body.get("weight", 1.0) == known.weight
        require(is_same, "push {} of chunk {} came with other bytes than before", push.sequence, push.key)
        kept.pushed[push.sequence][push.worker] = known

    def _close(self, kept: Kept, step: int, key: int, answer: Message) -> None:
        left = [one for _, one in sorted(kept.closed.items()) if one is not None]
        former = left[-1] if left else np.zeros(self._specs[key].numel, str(self._specs[key].dtype)[len("torch.") :])
        if answer.payload is None:
            kept.closed[step] = former
            return
        values, ranks = self._decoded(answer.payload, key), sorted(kept.pushed[step])
        for count in range(len(ranks), 0, -1):
            for some in itertools.combinations(ranks, count):
                given = [kept.pushed[step][rank] for rank in some]
                payload, left_out = self._encoded(average([(one.values, one.weight) for one in given]), former)
                if np.array_equal(self._decoded(payload, key), values):
                    kept.closed[step] = left_out
                    self._made[key, step, _bits(values)] = Made(some, frozenset(one.base for one in given))
                    return
        raise Violation(f"step {step} of chunk {key} is no average of {ranks} and what the server left out before")

    # ---- the codec ---------------------------------------------------------------------------------------------

    def _encoded(self, values: Values, residual: Values) -> tuple[bytes, Values]:
        """The payload of values and a residual, and the next residual."""
        tensor, left_out = torch.from_numpy(values), torch.from_numpy(residual)
        if self._name in CASTS:
            return bytes(tensor.to(CASTS[self._name]).view(torch.uint8).numpy()), residual
        following = torch.empty_like(left_out)
        if self._name == "topk":
            count = int(np.ceil(self._share * values.size))
            places, found = torch.empty(count, dtype=torch.int32), torch.empty(count)
            encode_largest_(places, found, tensor, left_out, following)
            payload = torch.cat([places.view(torch.uint8), found.view(torch.uint8)])
        else:
            form = BLOCKS[self._name]
            blocks = -(-values.size // form.numel)
            payload = torch.empty(blocks * (form.scale_bytes + form.code_bytes), dtype=torch.uint8)
            encode_blocks_(payload, tensor, self._name, left_out, following)
        return bytes(payload.numpy()), following.numpy()

    def _decoded(self, payload: Any, key: int) -> Values:
        return decoded(self._name, payload, self._specs[key].numel).numpy()  # type: ignore[no-any-return]


def _bits(values: Values) -> bytes:
    """Those of values, where zeros have no sign."""
    return (values + 0.0).tobytes()
