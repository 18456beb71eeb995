"""Strategy "diloco-server": each worker goes at its own pace; the servers merge what a quorum of workers brings.

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428)::

    worker 0   H steps ─ difference, samples ──► servers: merge, outer step ──► parameters ─ H steps ...
    worker 1   H steps, slower ─────────── difference, samples ──► the next merge ...

The servers hold what all agreed on last and the outer optimizer, in their snapshots too; a worker that comes reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Unpack, override

from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.operation import wait_all
from psengine.strategies.local.fragments import parameter_buckets
from psengine.strategies.local.outer_step import OuterStep
from psengine.strategies.local.rounds import Part, Rounds
from psengine.strategies.local.schedule import Schedule, checked_options
from psengine.strategies.servers.base import ServerOptions, ServerStrategy
from psengine.strategies.servers.pushes import Pushes
from psengine.strategies.servers.server_optimizer import ServerState
from psengine.tensors.bucket import Bucket


class DilocoServer(Rounds, ServerStrategy):
    """Step locally; after ``every`` steps let the servers merge the difference; needs ``DistributedOptimizer``.

    A merge is an outer Nesterov step with the average of the differences, each weighed by the samples since its
    worker's last merge (``model.batch_weight``; without it, by steps). Workers may come, leave, die, and differ in
    speed and in ``every``. Buffers are those that came to the servers last; each worker keeps its own. A worker waits
    for its merge, where the paper's learners go on.

    Args:
        quorum: a merge begins with the differences of so many workers, or of all who can bring one where these are
            fewer. All chunks are merged of the same workers.
        every: local steps of this worker's round.
        grace: how long a merge waits for more workers that are expected, as a share of the time between two merges of
            a worker; 0 does not wait.
        outer_lr: learning rate of the outer step.
        outer_momentum: its Nesterov momentum.
        **options: see ``ServerStrategy``.
        compress: the codec, or its name, of the differences. The servers' answers are exact.

    Attributes:
        completed_steps: merges that this worker took part in.
    """

    name = "diloco-server"
    capabilities = replace(ServerStrategy.capabilities, counts_absent=False, steps_alone=True)

    def __init__(
        self,
        quorum: int = 2,
        *,
        every: int = 100,
        grace: float = 0.25,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **options: Unpack[ServerOptions],
    ) -> None:
        rounds = checked_options(self.name, {"every": every, "outer_lr": outer_lr, "outer_momentum": outer_momentum})
        super().__init__({"name": "merge", "quorum": quorum, "grace": grace}, **options)
        self._codec = only_gradients(self._codec)
        self._outer_options = rounds["outer_lr"], rounds["outer_momentum"]
        self._schedule = Schedule(every=every)

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Buckets of parameters, in the place of the reducer's, whose memory gradients may be."""
        assert self._replica is not None, "laid out before it was prepared"
        super().lay_out(parameter_buckets(self._replica.parameters, self.allocate))

    @override
    def _entered(self, state: str) -> None:
        """The servers get the outer optimizer; another worker's, with the same options, is the same."""
        assert self._replica is not None, "in service"
        outer = OuterStep(self._replica.parameters, *self._outer_options)
        trained = self.session.attach_optimizer(self.chunks.specs, outer.optimizer, outer.anchors)
        pushes = Pushes(self.session, self.chunks, trained)
        self._outer, self._parts, self._is_settled = outer, [_Merge(self._buckets, pushes, outer)], True

    @property
    def _outer_step(self) -> OuterStep:
        _ = self.replica
        assert self._outer is not None, "made when the worker joined"
        return self._outer

    @override
    def _agree(self) -> None:
        """Worker 0's parameters become the servers', as under "async"."""
        self._outer_step.settle()
        self._store()

    @override
    def _end_round(self) -> None:
        self.completed_steps += 1

    @override
    def conclude(self) -> None:
        """All workers that share a process group have what the servers have: the last merge's parameters.

        What this worker did since its own last merge is merged first. Then it abstains, so that no other worker's merge
        waits for it.
        """
        assert self._replica is not None, "in service"
        if self._parts[0].steps:
            self._bring_together()
        self._bring_together()
        self._replica.collective.barrier().wait()
        with torch.no_grad():
            self.pull_values(self.chunks.specs)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """As ``Rounds.state_dict``; the momentum is the servers'."""
        self._server_state().fetch()
        return super().state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Worker 0's parameters and momentum become the servers'; every worker goes on within its own round."""
        super().load_state_dict(state)
        self._store()

    def _server_state(self) -> ServerState:
        """The outer step's state, which the servers keep."""
        outer = self._outer_step
        trained = [spec for chunks in self.chunks.of_bucket for spec, _, _ in chunks]
        return ServerState(outer.optimizer, outer.anchors, self.session, trained)

    def _store(self) -> None:
        """Worker 0's anchors and momentum become the servers'."""
        if self.session.rank != 0:
            return
        stores = []
        for bucket in self._buckets:
            bucket.pack(self._outer_step.anchors_of(bucket))
            for spec, start, end in self.chunks.of_bucket[bucket.index]:
                stores.append(self.session.store(spec.key, bucket.flat[start:end].cpu()))
        wait_all(stores)
        self._server_state().store()


class _Merge(Part):
    """All parameters, which servers merge."""

    def __init__(self, buckets: Sequence[Bucket], pushes: Pushes, outer: OuterStep) -> None:
        super().__init__()
        self._buckets = buckets
        self._pushes = pushes
        self._outer = outer

    @override
    def leave(self) -> None:
        """Abstain where this worker has taken no step."""
        weight = float(self.steps) if self.samples is None else self.samples
        for bucket in self._buckets:
            bucket.pack(self._outer.differences(bucket))
            self._pushes.push(bucket, weight=weight)
        self._pushes.push_buffers()

    @override
    def arrive(self, *, keeps: bool = True) -> None:
        self._pushes.wait()
        self._outer.follow()
