"""A job whose servers average, and its oracle.

A contribution is a function of rank, step, chunk and model, so whoever knows the model before a step and who is in its
average can compute the model after it. The oracle looks for the workers whose contributions, added in the order of
ranks, have the bits that a worker got; they are the same in all chunks, and every other worker gets the same.

A step to which nobody contributed has no average, and does not change the parameters.

Some jobs have buffers, which each worker changes in its own way before a step, and a usage map with a bit for each
worker. After a step all have the buffers of the lowest rank that took part, as native DDP's broadcast makes them; the
sum of maps says who that is, each once.

A finished step is undone only where nobody holds it any more: whoever had it is dead, or was put out.

Under a codec a contribution has 12 in one element, which is its own: every codec keeps averages of 1 to 4 of them.
In other jobs contributions are not so, and ``residuals.py`` follows what payloads leave out.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from psengine.errors import FencedError, PSEngineError, ServerRefusedError
from psengine.parameter_server.client import join
from psengine.parameter_server.client.flow import Flow
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import ErrorCode, Message
from simulation.job import Job
from simulation.reference import Values, average, layout, numbers
from simulation.residuals import Residuals
from simulation.violation import Violation, require

SIZES = np.array([1.0, 1e-8, 1.0, 1e8, 1e16])
CODED_NUMEL, CODED_VALUE = 256, 12.0  # divisible by the numbers of workers
WEIGHTS = (0.0, 1.0, 1.0, 2.0, 8.0)  # of batches
STATE_BLOB = "worker_state"
BUFFERS = ((torch.float64, 3), (torch.int64, 2))  # dtype and numel, as of running statistics and counts of batches


@dataclass
class Replica:
    """A worker's model: parameters, and then buffers."""

    values: list[torch.Tensor]
    step: int = 0

    @property
    def base(self) -> bytes:
        """The model's bytes."""
        return b"".join(value.numpy().tobytes() for value in self.values)


@dataclass
class Finished:
    """A step that some worker has completed.

    Attributes:
        base: the model before it.
        contributors: whose gradients are in its averages.
        answers: by chunk: averages, the buffers after the step, and the sum of maps.
        holders: processes that have it, and when they got it.
    """

    base: bytes
    contributors: tuple[int, ...]
    answers: list[Values]
    holders: dict[Any, float] = field(default_factory=dict)


class AveragingJob(Job):
    """See the module's text."""

    hears_former = True  # a worker that has its average gives it to the new leader

    def __init__(self, world) -> None:
        super().__init__(world)
        scenario = self.scenario
        self._numel = CODED_NUMEL if scenario.codec else len(SIZES)
        self._dtype = torch.float32 if scenario.codec not in ("", "fp32") else torch.float64
        self._values_dtype = str(self._dtype).removeprefix("torch.")
        self._parameters = self.specs = layout(scenario.chunks, self._numel, self._dtype)
        if scenario.has_buffers:
            kinds = [(ChunkKind.BUFFER, *buffer) for buffer in BUFFERS]
            kinds.append((ChunkKind.USAGE, torch.int32, 1))
            self.specs = self.specs + [
                ChunkSpec(key, kind, dtype, numel, (Segment(f"b{key}", (numel,), (1,), 0, numel),))
                for key, (kind, dtype, numel) in enumerate(kinds, scenario.chunks)
            ]
        self._buffers = [spec for spec in self.specs if spec.kind is ChunkKind.BUFFER]
        self._held = [*self._parameters, *self._buffers]  # by workers, in this order
        self.rule: dict[str, Any] = {"name": "average"}
        self._finished: dict[int, Finished] = {}
        self._leads: dict[Any, int] = {}  # the life of the lead in which this process completed a step last
        # (step, rank) -> the models that its processes have contributed from, and how often.
        self._given: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        self._gave: Counter[tuple[int, int]] = Counter()
        leaves_residuals = scenario.codec and scenario.leaves_residuals
        self._residuals = Residuals(self, scenario.codec, self._parameters) if leaves_residuals else None

    def begin_anew(self) -> None:
        for known in (self._finished, self._given, self._gave):
            known.clear()

    # ---- a worker; follows strategies/servers/sync.py ---------------------------------------------------------------

    def program(self, process) -> Flow[None]:
        """Train."""
        replica = Replica([torch.zeros(spec.numel, dtype=spec.dtype) for spec in self._held])
        begun_s = list[float]()

        def initial(spec: ChunkSpec) -> torch.Tensor:
            begun_s.append(self.world.clock.now_s)
            return replica.values[spec.key].clone() if spec in self._held else torch.zeros(spec.numel, dtype=spec.dtype)

        state = yield from process.enter(self.specs, initial)
        if state == "initialised":
            known = [
                one for one in self._finished.values() if min(one.holders.values(), default=math.inf) < begun_s[-1]
            ]
            held = [one for one in known if self._holders(one)]
            require(not held, "worker {} begins a job anew that others are in", process.rank)
            self._finished.clear()
        else:
            yield from self._receive(process, replica, whole=state == "joined")
        while replica.step < self.scenario.steps_of(process.rank):
            yield self.think_s()
            yield from self._step(process, replica)
            process.has_state = True  # before its first step it is one of those that need another's

    def _receive(self, process, replica: Replica, *, whole: bool) -> Flow[None]:
        try:
            yield [process.session.pull(spec.key, [replica.values[spec.key]]) for spec in self._held]
            if whole:
                blob = process.session.pull_piece(STATE_BLOB, 0)
                yield [blob]
                replica.step = struct.unpack("<q", bytes(blob.wait().payload.numpy()))[0]
        except ServerRefusedError as error:
            if error.code not in (ErrorCode.NOT_READY, ErrorCode.UNKNOWN_KEY):
                raise
            raise FencedError("a server restarted meanwhile", ErrorCode.FENCED) from None

    def _step(self, process, replica: Replica) -> Flow[None]:
        landings = [torch.zeros(spec.numel, dtype=spec.dtype) for spec in self.specs]
        yield from join.donate(process.receiver, lambda: self._deposit(process, replica))
        pushes = [self._push(process, replica, spec.key, landings[spec.key]) for spec in self.specs]
        process.session.end_step()
        yield pushes
        answers = [push.wait() for push in pushes]
        self.answered += len(answers)
        refused = [one for answer in answers if (one := answer.body.get("refused")) not in (None, "abstained")]
        require(not refused, "worker {} was refused: {}", process.rank, refused)
        gradients, others = pushes[: len(self._parameters)], pushes[len(self._parameters) :]
        counts = {push.counts for push in gradients}
        require(len(counts) == 1, "step {} of worker {} counts in some chunks only", replica.step + 1, process.rank)
        for key, push in enumerate(pushes):
            process.land(push, landings[key])
            if self._residuals is None:
                residual = process.session.residual(key)
                require(residual is None or not residual.any(), "chunk {} has a residual: {}", key, residual)
            elif push in gradients:
                self._residuals.end(process, key, counts=counts == {True})
        is_empty = all(push.is_empty for push in gradients)
        are_whole = {push.is_empty for push in gradients} == {is_empty} and not any(push.is_empty for push in others)
        require(are_whole, "step {} of worker {} has answers in some chunks only", replica.step + 1, process.rank)
        for landing in landings[: len(gradients)] if is_empty else ():
            landing.zero_()  # what has landed was taken back
        if self.world.views.has(process):  # else it has yet to hear that it is out, and that its step was taken back
            _, weight = self._contribution(process.rank, replica.step + 1, 0, replica.base)
            answers, is_in = [landing.numpy() for landing in landings], counts == {True} and weight > 0
            self._complete(process, replica, answers, is_in=is_in, is_empty=is_empty)
        for spec, value in zip(self._held, replica.values, strict=True):
            value.copy_(landings[spec.key] if spec in self._buffers else value - landings[spec.key])
        replica.step += 1

    def _deposit(self, process, replica: Replica) -> Iterator[Any]:
        blob = torch.frombuffer(bytearray(struct.pack("<q", replica.step)), dtype=torch.uint8)
        yield [process.session.store(spec.key, replica.values[spec.key].clone()) for spec in self._held]
        yield process.session.store_blob(STATE_BLOB, [blob])

    def _push(self, process, replica: Replica, key: int, landing: torch.Tensor) -> Any:
        process.check_lent(key)
        if key >= len(self._parameters):
            values = self._local(process.rank, replica.step + 1, key, replica.base)
            return process.session.push(key, torch.from_numpy(values), [landing])
        values, weight = self._contribution(process.rank, replica.step + 1, key, replica.base)
        if weight:
            self._given[replica.step + 1, process.rank].add(replica.base)
        self._gave[replica.step + 1, process.rank] += key == 0
        push = process.session.push(
            key,
            process.packed(key, torch.from_numpy(values.copy())),
            [landing],
            weight=weight if self.scenario.weighs else None,
            reads_in_place=True,
        )
        if self._residuals is not None:
            self._residuals.push(process, push.message, replica.base, values, weight)
        return push

    def _contribution(self, rank: int, step: int, key: int, base: bytes) -> tuple[Values, float]:
        seed = self.scenario.seed
        if self.scenario.codec and not self.scenario.leaves_residuals:
            values = np.zeros(CODED_NUMEL, self._values_dtype)
            values[(step * self.scenario.ranks + rank + 40 * key) % CODED_NUMEL] = CODED_VALUE
            return values, 1.0
        weight = WEIGHTS[int(len(WEIGHTS) * (numbers(1, seed, rank, step)[0] + 0.5))] if self.scenario.weighs else 1.0
        if self.scenario.codec:
            return numbers(CODED_NUMEL, seed, rank, step, key, base).astype(self._values_dtype), weight
        return numbers(len(SIZES), seed, rank, step, key, base) * SIZES, weight

    def _local(self, rank: int, step: int, key: int, base: bytes) -> Values:
        """What this worker's forward makes of a buffer before a step; or its usage map."""
        spec = self.specs[key]
        if spec.kind is ChunkKind.USAGE:
            return np.array([1 << rank], np.int32)
        former, change = self._split(base)[key], numbers(spec.numel, self.scenario.seed, rank, step, key)
        return former + change if spec.dtype is torch.float64 else former + 1 + (100 * change).astype(np.int64)

    def _split(self, base: bytes) -> list[Values]:
        """A model's values, by chunk."""
        values, start = list[Values](), 0
        for spec in self._held:
            dtype = str(spec.dtype).removeprefix("torch.")
            values.append(np.frombuffer(base, dtype, spec.numel, start))
            start += spec.size_bytes
        return values

    # ---- the oracle --------------------------------------------------------------------------------------------

    def failed(self, process, error: PSEngineError) -> None:
        if self._residuals is not None and isinstance(error, FencedError):
            self._residuals.fenced(process)

    def applied(self, server, shard: Any, message: Message, outgoing: list[Any]) -> None:
        if self._residuals is not None:
            self._residuals.applied(server, shard, message, outgoing)

    def _holders(self, one: Finished) -> list[int]:
        """Ranks of those that have this step and take part, or have ended their training with it."""
        views = self.world.views
        return sorted(
            process.rank
            for process, since_s in one.holders.items()
            if (process.has_finished and self._is_remembered(process))
            or not (process.is_dead or views.was_out(process, since_s))
        )

    def _is_remembered(self, process) -> bool:
        """Only where updates last is it known after the lead's restart that a job has ended: a zombie goes on alone."""
        return self.keeps_updates or self._leads[process] == self.world.lead.epoch

    def _complete(self, process, replica: Replica, answers: list[Values], *, is_in: bool, is_empty: bool) -> None:
        step, base, rank = replica.step + 1, replica.base, process.rank
        known = self._finished.get(step)
        if known is not None and (known.base != base or not _are_equal(known.answers, answers)):
            holders = self._holders(known)
            require(not holders, "step {} of worker {} has other bits than that of workers {}", step, rank, holders)
            known = None
        if known is None:
            before = self._finished.get(step - 1)
            if before is not None and not self._follows(before, base):
                holders = self._holders(before)
                require(not holders, "worker {} is at step {} with another model than {}", rank, step, holders)
            for later in [number for number in self._finished if number >= step]:
                del self._finished[later]
            contributors = () if is_empty else self._contributors(step, base, answers)
            known = self._finished[step] = Finished(base, contributors, answers)
            self._check_whole(step, known)
            self._check_buffers(step, known)
        if not self.world.views.is_out(process):  # the others may take back what it completes
            known.holders[process] = self.world.clock.now_s
            self._leads[process] = self.world.lead.epoch
        # What is in the average may be what it gave before it was put out, or the process before it did.
        is_other = not is_in and self._gave[step, rank] > 1
        require(
            is_other or is_in == (rank in known.contributors),
            "worker {} was told that its gradient of step {} {}, and its average is of workers {}",
            rank,
            step,
            "counts" if is_in else "does not count",
            known.contributors,
        )

    def _contributors(self, step: int, base: bytes, answers: list[Values]) -> tuple[int, ...]:
        """The workers whose contributions make these averages, in every chunk."""
        if self._residuals is not None:
            return self._residuals.made(step, answers[: len(self._parameters)], base)
        ranks = [rank for rank in range(self.scenario.ranks) if base in self._given[step, rank]]
        for count in range(len(ranks), 0, -1):
            for some in itertools.combinations(ranks, count):
                if all(
                    np.array_equal(average([self._contribution(rank, step, key, base) for rank in some]), found)
                    for key, found in enumerate(answers[: len(self._parameters)])
                ):
                    return some
        raise Violation(f"step {step} is no average of the same workers in every chunk, in the order of {ranks}")

    def _check_buffers(self, step: int, one: Finished) -> None:
        """Buffers are those of the lowest rank of all that took part, whose gradients count if they weigh something."""
        if not self._buffers:
            return
        ranks = [rank for rank in range(self.scenario.ranks) if one.answers[-1][0] >> rank & 1]
        require(one.answers[-1][0] == sum(1 << rank for rank in ranks), "step {} has a map of nobody", step)
        for spec in self._buffers:
            lowest = self._local(ranks[0], step, spec.key, one.base)
            is_lowest = np.array_equal(lowest, one.answers[spec.key])
            require(is_lowest, "buffer {} of step {} is not that of worker {}", spec.key, step, ranks[0])
        weigh = tuple(rank for rank in ranks if self._contribution(rank, step, 0, one.base)[1] > 0)
        require(one.contributors == weigh, "step {} has workers {} and averages of {}", step, weigh, one.contributors)

    def _follows(self, before: Finished, base: bytes) -> bool:
        """Whether this is the model after that step."""
        former = self._split(before.base)
        after = [
            before.answers[spec.key] if spec in self._buffers else value - before.answers[spec.key]
            for spec, value in zip(self._held, former, strict=True)
        ]
        return b"".join(value.tobytes() for value in after) == base

    def _check_whole(self, step: int, one: Finished) -> None:
        """Everybody who takes part is in an average."""
        least = self.world.views.least_members(self.world.clock.now_s - 2 * self.scenario.lease_s)
        givers = [rank for rank in least if one.base in self._given[step, rank]]
        missing = [rank for rank in givers if rank not in one.contributors]
        require(not missing, "step {} has workers {} and not {}", step, one.contributors, missing)


def _are_equal(some: list[Values], others: list[Values]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))
