"""A job's run told again from its servers' logs: what each push did to the weights, and the weights behind any push.

directory ─ oldest generation, then the log ─► shards ─► use(rule, contributions) ─┬─► pushes, summed over all chunks
                                                                                   └─► chunks behind the push looked for

Each chunk has its own order of pushes, in which its shard applied them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.restoring import replay_log
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.parameter_server.server.rules.rows import Rows
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.snapshots.files import read_generation
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.layout import ChunkSpec, OtherNames, job_number
from psengine.protocol.messages import Message

Values = tuple[torch.Tensor, ...]  # of a chunk; of a part of a table ids and rows


@dataclass(slots=True)
class Push:
    """A worker's push, over all chunks.

    Attributes:
        rank, step: whose, and which.
        staleness: updates since the weights that it was computed from, the most of a chunk.
        gradient: L2 norm of what was pushed, decoded.
        update: of the change of the weights; in a merge that of all who are in it.
        bad_gradients, bad_weights: values that are not finite, in the gradient and in the weights after it.
        refused: why some chunk, or all, did not use it; "" where they did.
    """

    rank: int
    step: int
    staleness: int = 0
    gradient: float = 0.0
    update: float = 0.0
    bad_gradients: int = 0
    bad_weights: int = 0
    refused: str = ""


@dataclass(slots=True)
class Run:
    """What happened under one registration of the job.

    Attributes:
        pushes: by rank, incarnation and step, in the order of the first shard that was read.
        behind: chunks right behind the push that is looked for, of its worker's newest process.
    """

    pushes: dict[tuple[int, int, int], Push] = field(default_factory=dict)
    behind: dict[int, Values] = field(default_factory=dict)


class History:
    """Reads the directories of all servers of a job, one after the other; their servers may run.

    Args:
        name: of the job.
        until: rank and step of the push that is looked for; None: the end.

    Attributes:
        notes: what was left out, for people.
        runs: by the job's key.
    """

    def __init__(self, name: str, until: tuple[int, int] | None = None) -> None:
        self.name, self.until = name, until
        self.notes: list[str] = []
        self.runs = defaultdict[bytes, Run](Run)
        self._last: list[Job] = []  # of all shards, at the end

    def read(self, directory: Path) -> None:
        """Take in what a server's directory has.

        Raises:
            SnapshotError: it has no such history; the message says why.
            OSError: it cannot be read.
        """
        store = Generations(DirectoryDisk(directory))
        first = store.first_logged()
        if first is None:
            raise SnapshotError(
                f"{directory} has no log (expected the --snapshot-dir of a server with --durability log --keep-history)"
            )
        state = read_generation(store.disk, first)
        for index, jobs in enumerate(state.shards):
            versions = [chunk.meta["version"] for job in jobs if job.name == self.name for chunk in job.chunks]
            if any(versions):
                text = "{}: the history of shard {} begins at update {}; its follower's directory may have the rest"
                self.notes.append(text.format(directory, index, max(versions)))
            reader = LogReader(store.disk, index, state.places.get(index), self.notes)
            shard = replay_log(reader, index, jobs, state.coordinators, make_job=self._make_job)
            job = shard.jobs.get(job_number(self.name))
            if job is None or not job.holds_weights or any(other.key != job.key for other in self._last):
                raise SnapshotError(
                    f"shard {index} in {directory} has nothing to tell of this run of job {self.name!r} (expected a job"
                    " of async or diloco-server, as the log of one that averages has no gradients; and directories of"
                    " the servers of one run). psengine-server inspect lists jobs, for --job"
                )
            self._last.append(job)

    def _make_job(self, name: str, *given: Any) -> Job:
        return _WatchedJob(self, name, *given) if name == self.name else Job(name, *given)

    def finish(self) -> tuple[list[Push], dict[str, torch.Tensor]]:
        """The pushes, and the tensors by name, to the push that is looked for or to the end.

        A table has ``NAME.ids`` and ``NAME.rows``, in the same order.

        Raises:
            SnapshotError: a server's directory was not named, or there is no such push.
        """
        shards = max((len(job.view.shards) for job in self._last if job.view is not None), default=0)
        rules = {key: rule for job in self._last for key, rule in sorted(job.rules.items())}
        if len(self._last) != shards or len(rules) != sum(len(job.rules) for job in self._last):
            raise SnapshotError(
                f"these are not the directories of all servers of job {self.name!r}, each once (expected"
                f" {shards} shards, got {len(self._last)}; a server and its follower have the same)"
            )
        run = self.runs[self._last[0].key]
        pushes = list(run.pushes.values())
        there = [place for place, push in enumerate(pushes, 1) if (push.rank, push.step) == self.until]
        if self.until is not None and not there:
            text = "the logs have no push {}:{} (expected one that psengine replay lists without --until-push, of {})"
            raise SnapshotError(text.format(*self.until, f"workers {sorted({push.rank for push in pushes})}"))
        chunks = [(rule.spec, run.behind.get(key) or _values_of(rule)) for key, rule in rules.items()]
        tensors = _by_name(chunks)
        return pushes[: max(there, default=None)], OtherNames.take(tensors).complete(tensors)


class _WatchedJob(Job):
    """Notes what contributions do."""

    def __init__(self, history: History, *given: Any) -> None:
        super().__init__(*given)
        self._history = history

    @override
    def push(self, message: Message) -> list[Reply]:
        rank, step = self._history.until or (-1, 0)
        if message.worker == rank and message.sequence > step:  # those that the push did not touch
            behind = self._history.runs[self.key].behind
            behind |= {key: _values_of(rule) for key, rule in self.rules.items() if key not in behind}
        return super().push(message)

    @override
    def use(self, rule: Apply, given: Sequence[Contribution]) -> None:
        before, version = _weights(rule, given), rule.version
        super().use(rule, given)
        pushes = [self._note_push(rule, one) for one in given]
        if rule.spec.kind.is_trained:
            after = _weights(rule, given)
            update, is_bad = _measure(after - before)
            for one, push in zip(given, pushes, strict=True):
                push.staleness = max(push.staleness, version - one.base_version)
                push.update = math.hypot(push.update, update)
                push.bad_weights += is_bad and _measure(after)[1]

    @override
    def discarded(self, push: Contribution, spec: ChunkSpec, why: str) -> None:
        super().discarded(push, spec, why)
        noted = self._note_push(self.rules[spec.key], push)
        noted.refused = noted.refused if why == "abstained" else why

    def _note_push(self, rule: ChunkRule, one: Contribution) -> Push:
        """The push, to which this chunk's gradient is added."""
        place, run = (one.rank, one.incarnation, one.step), self._history.runs[self.key]
        if (one.rank, one.step) == self._history.until:
            run.behind[rule.spec.key] = _values_of(rule)
        push = run.pushes.setdefault(place, Push(one.rank, one.step))
        if one.values is not None and rule.spec.kind.is_trained:
            norm, bad = _measure(one.values)
            push.gradient = math.hypot(push.gradient, norm)
            push.bad_gradients += bad
        return push


def _weights(rule: Apply, given: Sequence[Contribution]) -> torch.Tensor:
    """A copy of the weights that these contributions change."""
    if not isinstance(rule, Rows):
        return rule.values.clone()
    ids = torch.cat([one.ids for one in given if one.ids is not None]).unique()
    rows = torch.empty(len(ids), rule.of.dim)
    rule.table.gather(ids, rows)
    return rows


def _values_of(rule: ChunkRule) -> Values:
    if isinstance(rule, Rows):
        return rule.table.changed_since(-1)[:2]
    assert rule.values is not None
    return (rule.values.clone(),)


def _measure(values: torch.Tensor) -> tuple[float, int]:
    """The L2 norm, and how many elements are not finite."""
    norm = float(torch.linalg.vector_norm(values.to(torch.promote_types(values.dtype, torch.float64))))
    return norm, 0 if math.isfinite(norm) else int((~torch.isfinite(values)).sum())


def _by_name(chunks: Sequence[tuple[ChunkSpec, Values]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for spec, values in chunks:
        if spec.table is not None:
            for name, part in zip((f"{spec.table.name}.ids", f"{spec.table.name}.rows"), values, strict=True):
                tensors[name] = torch.cat([tensors.get(name, part[:0]), part])
        place = 0
        for segment in spec.segments:
            whole = torch.empty_strided(segment.shape, segment.strides, dtype=spec.dtype)
            whole = tensors.setdefault(segment.name, whole).as_strided((whole.numel(),), (1,))
            whole[segment.start : segment.start + segment.numel] = values[0][place : place + segment.numel]
            place += segment.numel
    return tensors
