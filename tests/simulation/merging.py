"""A job whose servers merge, and its oracle: each merge again, in the order of ranks, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import release_of, view_of
from simulation import inspection
from simulation.applying import ApplyingJob, Version
from simulation.reference import State, Values, average, numbers
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.server import ServerProcess
    from simulation.worker import WorkerProcess
    from simulation.world import Simulation

WEIGHTS = (1.0, 1.0, 2.0, 8.0)  # powers of two: products with them are exact
ABSTAINS = 0.1
Contributors = tuple[tuple[int, int], ...]


class MergingJob(ApplyingJob):
    """See the module's text; the program is that of ``ApplyingJob``."""

    def __init__(self, world: Simulation) -> None:
        super().__init__(world)
        self.optimizer = "merge"
        self.rule = {"name": "merge", "quorum": self.scenario.quorum, "grace": self.scenario.grace}
        # Decisions by coordinator's life and number: (rank, step) of each contribution.
        self._decided: dict[tuple[int, int], Contributors] = {}
        # By decision and chunk, the updates that were merged.
        self._merged: dict[tuple[int, int], dict[int, frozenset[tuple[int, int]]]] = defaultdict(dict)
        self._weights: dict[tuple[int, int], float] = {}
        # Steps of workers that all shards have and no merge has taken, by the coordinator's word: rank -> step.
        self._waiting: dict[int, int] = {}
        self._idle: set[int] = set()

    def _gradient(self, process: WorkerProcess, key: int) -> tuple[torch.Tensor | None, float | None]:
        step = self.steps_done[process.rank]
        draw = numbers(2, self.scenario.seed, process.number, step) + 0.5
        if draw[0] < ABSTAINS:
            return None, 0.0
        values, _ = super()._gradient(process, key)
        return values, WEIGHTS[int(4 * draw[1])]

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def coordinated(self, server: ServerProcess, message: Message | None, outgoing: list[Any]) -> None:
        """See ``Job``: note what it decides."""
        if message is not None and message.type is MessageType.COMMIT and message.body["what"] == "step":
            rank = message.worker
            if self.world.views.members.get(rank, (0, 0))[0] == message.incarnation:
                (self._idle.add if message.body["abstained"] else self._idle.discard)(rank)
        for one in outgoing:
            if one.message.type is MessageType.RELEASE:
                self._note_decision(server.epoch, release_of(one.message.body))
            elif one.message.type is MessageType.VIEW:
                for release in view_of(one.message.body).releases:
                    self._note_decision(server.epoch, release)

    def _note_decision(self, epoch: int, release: Any) -> None:
        known = self._decided.setdefault((epoch, release.number), release.contributors)
        # A change of the view takes those out that are gone.
        is_same = set(release.contributors) <= set(known)
        require(is_same, "merge {} is decided twice: {} and {}", release.number, known, release.contributors)
        ranks = [rank for rank, _ in release.contributors]
        require(len(ranks) == len(set(ranks)), "merge {} has a worker twice: {}", release.number, ranks)
        if known is release.contributors:
            assert self.scenario.quorum is not None
            able = self.world.views.members.keys() - self._idle | set(ranks)
            is_quorum = len(ranks) >= min(self.scenario.quorum, len(able))
            require(is_quorum, "merge {} has workers {} of {}", release.number, ranks, sorted(able))

    # ---- the shards --------------------------------------------------------------------------------------------

    def _note_push(self, process: WorkerProcess, push: Message) -> None:
        super()._note_push(process, push)
        self._weights[process.number, push.sequence] = push.body.get("weight", 1.0)

    def _take(
        self, server: ServerProcess, shard: Any, key: int, version: int, values: Values, push: Message | None
    ) -> None:
        """A chunk has a new version: that of one merge, or of several that waited for each other."""
        chunk = self.chunks[key]
        count = version - chunk.version
        merges = inspection.last_merges(shard, key, count)
        require(count == len(merges) > 0, "chunk {} went from version {} to {}", key, chunk.version, version)
        before = chunk.versions[chunk.version]
        for number, decision in enumerate(merges, chunk.version + 1):
            after = self._merge(key, before, self._decided.get(decision, ()), where=f"merge {decision} of chunk {key}")
            chunk.versions[number] = before = after
            self._check_same(server, decision, key, after.updates - chunk.versions[number - 1].updates)
        is_same = np.array_equal(before.values, values)
        require(is_same, "merges {} of chunk {} made {} of it, expected {}", merges, key, values, before.values)

    def _merge(self, key: int, before: Version, contributors: Sequence[tuple[int, int]], where: str) -> Version:
        chunk = self.chunks[key]
        updates, parts = [], []
        for rank, step in sorted(contributors):
            process = self.world.views.process_at(rank, step, chunk.pushed)
            update = None if process is None else (process.number, step)
            values = None if update is None else chunk.pushed.get(update)
            if update is None or values is None or key not in self.taken[update]:
                continue
            require(update not in before.updates, "{} has push {} a second time", where, update)
            updates.append(update)
            parts.append((values.astype(before.values.dtype), before.values.dtype.type(self._weights[update])))
        require(parts, "{} has no contributions", where)
        after = before.values - average(parts)
        return Version(after, State(after), before.updates | set(updates))

    def _check_same(
        self, server: ServerProcess, decision: tuple[int, int], key: int, updates: frozenset[tuple[int, int]]
    ) -> None:
        """The same contributions in every chunk, where no server has lost one of a worker that is gone."""
        merged = self._merged[decision]
        merged[key] = updates
        if self.scenario.keeps_log or not self.world.counts["kill server"] + self.world.counts["kill lead"]:
            is_same = len(set(merged.values())) == 1
            require(is_same, "merge {} has other contributors in other chunks: {}", decision, merged)
