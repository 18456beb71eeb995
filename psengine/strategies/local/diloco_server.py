"""Strategy "diloco-server": each worker goes at its own pace; the servers merge what a quorum of workers brings.

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428)::

    worker 0   H steps ─ difference, samples ──► servers: merge, outer step ──► parameters ─ H steps ...
    worker 1   H steps, slower ─────────── difference, samples ──► the next merge ...

The servers hold what all agreed on last and the outer optimizer, in their snapshots too; a worker that comes reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Unpack, override

from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.operation import wait_all
from psengine.strategies.local.rounds import OuterStep, Part, RoundOptions, Rounds, parameter_buckets
from psengine.strategies.servers.asynchronous import Pushes, ServerState
from psengine.strategies.servers.base import ServerOptions, ServerStrategy
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
        self._rounds = RoundOptions.checked(self.name, every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
        super().__init__({"name": "merge", "quorum": quorum, "grace": grace}, **options)
        self._codec = only_gradients(self._codec)

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Buckets of parameters, in the place of the reducer's, whose memory gradients may be."""
        super().lay_out(parameter_buckets(self.replica.parameters, self.allocate))

    @override
    def _entered(self, state: str) -> None:
        """The servers get the outer optimizer; another worker's, with the same options, is the same."""
        self._outer = OuterStep(self.replica.parameters, self._rounds)
        self._parts = [_Merge(self, self._outer)]
        self._is_settled = True

    @override
    def _end_round(self) -> None:
        self.completed_steps += 1

    @override
    def conclude(self) -> None:
        """All workers that share a process group have what the servers have: the last merge's parameters.

        What this worker did since its own last merge is merged first. Then it abstains, so that no other worker's merge
        waits for it.
        """
        self._begin()
        if self._parts[0].steps:
            self._exchange_all()
        self._exchange_all()
        self.collective.barrier().wait()
        self.pull_values()


class _Merge(Part):
    """All parameters, which servers merge. Worker 0's are the servers' where a first round begins, or one was loaded:
    every worker goes on within its own round.
    """

    def __init__(self, strategy: DilocoServer, outer: OuterStep) -> None:
        super().__init__()
        self._session = session = strategy.session
        self._chunks = chunks = strategy.chunks
        self._buckets = strategy._buckets
        self._outer = outer
        self._await_worker_0 = strategy.await_worker_0
        specs = session.attach_optimizer(chunks.specs, outer.optimizer, outer.anchors)
        self._pushes = Pushes(session, chunks, specs)
        self._server_state = ServerState(outer.optimizer, outer.anchors, session, specs)

    @override
    def settle(self) -> None:
        super().settle()
        if self._session.rank == 0:
            self._store()
            return
        self._await_worker_0({key: values.clone() for key, values in self._anchors()})

    def _anchors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What replicas agreed on last, by chunk, on the CPU."""
        for bucket in self._buckets:
            bucket.pack(self._outer.anchors_of(bucket))
            for spec, start, end in self._chunks.of_bucket[bucket.index]:
                yield spec.key, bucket.flat[start:end].cpu()

    def _store(self) -> None:
        if self._session.rank != 0:
            return
        wait_all([self._session.store(key, values) for key, values in self._anchors()])
        self._server_state.store()

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

    @override
    def state(self) -> dict[str, Any]:
        """The momentum is the servers'."""
        self._server_state.fetch()
        return super().state()

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._store()
