"""A copy of what a shard holds, cut between the steps of its workers: a step is in all its chunks, or in none.

    worker 0's step 7   chunk 0 ──── chunk 1 ── copy ── chunk 2          chunk 2 is applied to the copy, too
    worker 1's step 4                              │    chunk 0 ────     not to the copy: this step began after it
                                                   └ awaited: worker 0's step 7

Nothing waits for the copy: pushes go on, and those that are part of a step which the copy has begun are applied twice,
to the chunk and to the copy. A step that its worker never ends (it died, or failed) stays as it is, in the chunks as in
the copy.

Several shards of a server wait for each other, so that all copy at the same moment, and each awaits what another has of
a step. Pure, but for ``CopyBarrier``, where threads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Contribution, RuleContext
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.parameter_server.server.snapshots.files import ChunkState, JobState

# How long shards wait for each other; one that is busy for longer is cut at another moment.
BARRIER_S = 1.0
# Of a chunk's meta and tensors: what only a log that goes on from the copy needs.
UNDER_WAY = "under_way"

# By job and rank, the last step that was begun.
Goals = dict[int, dict[int, int]]


class Step(NamedTuple):
    """The step that a push is part of: PUSH's ``step``."""

    number: int  # of the worker's step, growing
    parts: int  # how many chunks of this shard the step pushes
    is_whole: bool  # each of its steps pushes all chunks that are pushed at all, at every shard


@dataclass(slots=True)
class OpenStep:
    """A step of which some chunks have come."""

    number: int
    keys: set[int] = field(default_factory=set)

    def take(self, key: int, step: Step) -> bool:
        """A chunk came; whether it was the last."""
        self.keys.add(key)
        return len(self.keys) >= step.parts


@dataclass
class JobCapture:
    """The copy of one job."""

    state: JobState
    awaited: dict[int, OpenStep]  # by rank, the steps of which the copy has not all
    restore_rule: Callable[..., ChunkRule]  # see ``ChunkStore.restore_rule``
    on_complete: Callable[[], None]  # called once nothing is awaited any more; not where nothing ever was
    _rules: dict[int, ChunkRule] = field(default_factory=dict)

    def pushed(self, push: Contribution, key: int, step: Step | None) -> None:
        """A push was taken in by the chunk; the copy takes it, too, if it is of a step that the copy has begun."""
        known = self.awaited.get(push.rank)
        if known is None:
            return
        if step is None or step.number > known.number:
            self.left(push.rank)  # it never ended the other
            return
        self._rule(key).push(push)
        if step.number == known.number and known.take(key, step):
            self.left(push.rank)

    def left(self, rank: int) -> None:
        """Nothing more is to come of this worker's step."""
        if self.awaited.pop(rank, None) is not None and not self.awaited:
            self.on_complete()

    def _rule(self, key: int) -> ChunkRule:
        rule = self._rules.get(key)
        if rule is None:
            chunk = next(chunk for chunk in self.state.chunks if chunk.key == key)
            alone = RuleContext(live_ranks=tuple, missing_ranks=tuple, statistics=JobStatistics())
            rule = self._rules[key] = self.restore_rule(chunk.meta, chunk.tensors, alone)
        return rule

    def result(self) -> JobState:
        """The copy, as far as it has come."""
        chunks = [
            chunk_state(self._rules[chunk.key]) if chunk.key in self._rules else chunk for chunk in self.state.chunks
        ]
        return JobState(self.state.name, self.state.meta, chunks)


class Cuts:
    """The steps that the workers of one job are in, at one shard, and the copy that awaits some of these."""

    def __init__(self) -> None:
        # By rank, the last step that began here, of workers whose steps are whole.
        self.begun: dict[int, int] = {}
        self._open: dict[int, OpenStep] = {}
        self._capture: JobCapture | None = None

    def pushed(self, push: Contribution, key: int, mark: Sequence[Any] | None) -> None:
        """A push was taken in; ``mark`` is its message's ``step``."""
        rank, step = push.rank, None if mark is None else Step(*mark)
        known = self._open.get(rank)
        if step is not None and step.is_whole:
            self.begun[rank] = step.number
        if step is not None and (known is None or known.number != step.number):
            known = self._open[rank] = OpenStep(step.number)
        if known is not None and (step is None or known.take(key, step)):
            del self._open[rank]
        if self._capture is not None:
            self._capture.pushed(push, key, step)
            self._let_go()

    def left(self, rank: int) -> None:
        """The worker is gone, or another process has its rank."""
        self._open.pop(rank, None)
        self.begun.pop(rank, None)
        if self._capture is not None:
            self._capture.left(rank)
            self._let_go()

    def awaited(self, goals: Mapping[int, int], ranks: Collection[int]) -> dict[int, OpenStep]:
        """Steps of these workers that a copy made now has in part; ``goals``: steps that another shard has begun."""
        awaited = {rank: OpenStep(one.number, set(one.keys)) for rank, one in self._open.items() if rank in ranks}
        for rank, number in goals.items():
            if rank in ranks and number > self.begun.get(rank, 0):
                awaited[rank] = OpenStep(number)
        return awaited

    def follow(self, capture: JobCapture) -> None:
        """Hand on to a copy what it awaits."""
        self._capture = capture
        self._let_go()

    def _let_go(self) -> None:
        """Hold a copy no longer than it awaits something."""
        if self._capture is not None and not self._capture.awaited:
            self._capture = None


def chunk_state(rule: ChunkRule, *, copies: bool = False, is_whole: bool = False) -> ChunkState:
    """A chunk's part of a snapshot; its own tensors, unless ``copies``; ``is_whole``: with what is under way."""
    tensors, meta = rule.outcome.tensors(), {"spec": rule.spec.to_body(), **rule.to_meta()}
    if is_whole:
        meta[UNDER_WAY], more = rule.under_way()
        tensors |= {f"{UNDER_WAY}/{name}": tensor for name, tensor in more.items()}
    copied = {name: tensor.clone() if copies else tensor for name, tensor in tensors.items()}
    return ChunkState(rule.spec.key, meta, copied)


class Capture:
    """The copies of all jobs of a shard."""

    def __init__(self) -> None:
        self.states: Future[list[JobState]] = Future()  # set once nothing is awaited any more, or by ``end``
        self._jobs: list[JobCapture] = []

    def add(self, job: JobCapture) -> None:
        """One more job."""
        self._jobs.append(job)

    def look(self) -> None:
        """End it if nothing is awaited any more."""
        if not any(job.awaited for job in self._jobs):
            self.end()

    def end(self) -> list[str]:
        """Take the copies as they are; the steps that are in some chunks only, for people."""
        torn = [
            f"step {one.number} of worker {rank} of job {job.result().name!r}"
            for job in self._jobs
            for rank, one in sorted(job.awaited.items())
        ]
        if not self.states.done():
            self.states.set_result([job.result() for job in self._jobs])
        for job in self._jobs:
            job.awaited.clear()
        return torn


class CopyBarrier:
    """The shards of a server wait here for each other, to be copied at one moment."""

    def __init__(self, shards: int) -> None:
        self._barrier = threading.Barrier(shards, timeout=BARRIER_S)
        self._begun: list[Goals] = []

    def wait(self, begun: Goals) -> Goals:
        """The furthest step that any shard has begun; {} where not all came in time. ``begun``: of this shard."""
        self._begun.append(begun)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            return {}
        furthest: Goals = {}
        for one in tuple(self._begun):
            for job, steps in one.items():
                known = furthest.setdefault(job, {})
                for rank, number in steps.items():
                    known[rank] = max(number, known.get(rank, 0))
        return furthest
