"""Strategy "diloco-server": each worker goes at its own pace; the servers merge what a quorum of workers brings.

Decoupled DiLoCo (https://arxiv.org/abs/2604.21428)::

    worker 0   H steps ─ difference, samples ──► servers: merge, outer step ──► parameters ─ H steps ...
    worker 1   H steps, slower ─────────── difference, samples ──► the next merge ...

The servers hold what all agreed on last and the outer optimizer, in their snapshots too; a worker that comes reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Unpack, override

from psengine.codecs.base import Codec
from psengine.errors import ConfigurationError
from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.operation import wait_all
from psengine.strategies.local.diloco import checked_outer
from psengine.strategies.local.fragments import OuterStep, copies_of, parameter_buckets
from psengine.strategies.local.scaled_step import CountedSteps
from psengine.strategies.local.schedule import Schedule
from psengine.strategies.servers.base import ServerOptions, ServerStrategy
from psengine.strategies.servers.server_optimizer import ServerOptimizer
from psengine.tensors.bucket import Bucket

logger = logging.getLogger(__name__)


class DilocoServer(CountedSteps, ServerStrategy):
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
        Schedule(every=every)
        outer_lr, outer_momentum = checked_outer(outer_lr, outer_momentum)
        super().__init__(**options)
        self._options.update(quorum=quorum, every=every, grace=grace, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self._check_options()

    def _forget(self) -> None:
        super()._forget()
        self.stepper = None
        self._steps = 0
        self._samples: float | None = None
        self._is_replaced = False  # the model was loaded without this state
        # Per bucket what the servers answered last.
        self._anchors: list[torch.Tensor] = []
        # The same by name of the parameter, and the outer optimizer, whose state the servers keep.
        self._views: dict[str, torch.Tensor] = {}
        self._outer: ServerOptimizer | None = None
        self.refused_pushes = 0

    @property
    @override
    def rule(self) -> dict[str, Any]:
        return {"name": "merge", "quorum": self._options["quorum"], "grace": self._options["grace"]}

    @override
    def session_codec(self) -> Codec:
        return only_gradients(super().session_codec())

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Buckets of parameters, in the place of the reducer's, whose memory gradients may be."""
        assert self._replica is not None, "laid out before it was prepared"
        super().lay_out(parameter_buckets(self._replica.parameters, self.allocate))

    @override
    def _entered(self, state: str) -> None:
        """The servers get the outer optimizer; another worker's, with the same options, is the same."""
        self._anchors = copies_of(self._buckets)
        views = {
            name: view
            for bucket, anchor in zip(self._buckets, self._anchors, strict=True)
            for name, view in zip(bucket.names, bucket.views_of(anchor), strict=True)
        }
        rate, momentum = self._options["outer_lr"], self._options["outer_momentum"]
        outer = OuterStep(learning_rate=rate, momentum=momentum).optimizer(list(views.values()))
        specs = self.session.attach_optimizer(self.chunks.specs, outer, views)
        self._outer = ServerOptimizer(outer, views, self.session, specs, self.name)  # type: ignore[arg-type]
        self._views = views

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def weigh(self, weight: float | None) -> None:
        if weight is not None:
            self._samples = (self._samples or 0.0) + weight

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step locally; at the end of this worker's round return with the merged parameters."""
        stepper = self.bound()
        if self._is_replaced:
            self._begin_anew()
        result = stepper.take(local_step)
        self._steps += 1
        if self._steps == self._options["every"]:
            with torch.no_grad():
                self._merge()
        return result

    @override
    def conclude(self) -> None:
        """All workers that share a process group have what the servers have: the last merge's parameters.

        What this worker did since its own last merge is merged first. Then it abstains, so that no other worker's merge
        waits for it.
        """
        assert self._replica is not None, "in service"
        with torch.no_grad():
            if self._steps:
                self._merge()
            self._merge()
            self._replica.collective.barrier().wait()
            self.pull_values(self.chunks.specs)
            self._note_agreed()

    def _begin_anew(self) -> None:
        self._is_replaced, self._steps, self._samples = False, 0, None
        with torch.no_grad():
            self._note_agreed()
            self.load_state_dict(self._state(momenta={}))

    def _note_agreed(self) -> None:
        for bucket, anchor in zip(self._buckets, self._anchors, strict=True):
            torch._foreach_copy_(bucket.views_of(anchor), bucket.parameters)

    def _merge(self) -> None:
        """Take part in a merge; abstain from it where this worker has taken no step."""
        counts, weight = self._steps > 0, float(self._steps) if self._samples is None else self._samples
        self._steps, self._samples = 0, None
        pushes = []
        for bucket, anchor in zip(self._buckets, self._anchors, strict=True):
            bucket.pack(list(torch._foreach_sub(bucket.views_of(anchor), bucket.parameters)))
            values = bucket.flat if bucket.device.type == "cpu" else bucket.flat.cpu()
            for spec, start, end in self.chunks.of_bucket[bucket.index]:
                sent = values[start:end] if weight else None
                pushes.append((spec, self.session.push(spec.key, sent, self.chunks.parts(spec), weight=weight)))
        self.chunks.follow_buffers()
        buffers = [
            self.session.push(key, self.chunks.values(self.chunks.specs[key]), ()) for key in self.chunks.buffers
        ]
        self.session.end_step()
        try:
            with self.session.telemetry.blocked():
                wait_all([*(push for _, push in pushes), *buffers])
        except BaseException:
            self.session.segments.withdraw()
            raise
        self.chunks.write_back([spec for spec, _ in pushes])
        for spec, push in pushes:
            refused = push.wait().body.get("refused")
            if refused not in (None, "abstained"):
                self.refused_pushes += 1
                logger.warning(
                    "the servers refused the difference of %s (%s); this worker goes on from their parameters",
                    spec.describe(),
                    refused,
                )
        self._note_agreed()
        if counts:
            self.completed_steps += 1
            self.session.telemetry.step_ended()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def _outer_state(self) -> ServerOptimizer:
        _ = self.session  # a closed strategy raises
        assert self._outer is not None, "made when the worker joined"
        return self._outer

    @override
    def state_dict(self) -> dict[str, Any]:
        """How far the round is, from where its difference counts, the servers' outer momentum, and residuals."""
        outer = self._outer_state()
        outer.fetch_state()
        slots = {name: outer.optimizer.state.get(view, {}).get("momentum_buffer") for name, view in self._views.items()}
        return self._state(momenta={name: slot.clone() for name, slot in slots.items() if slot is not None})

    def _state(self, momenta: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "samples": self._samples,
            "anchors": {name: view.clone() for name, view in self._views.items()},
            "momenta": dict(momenta),
            "residuals": super().state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Worker 0's parameters and momentum become the servers'; every worker goes on within its own round."""
        outer = self._outer_state()
        expected = {"steps", "samples", "anchors", "momenta", "residuals"}
        if set(state) != expected or set(state["anchors"]) != set(self._views):
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected {sorted(expected)}, and the anchors of"
                f" {len(self._views)} parameters, got {sorted(state)}). Fix: use the same options, or leave out the"
                " strategy's state."
            )
        super().load_state_dict(state["residuals"])
        self._steps, self._samples = state["steps"], state["samples"]
        for name, view in self._views.items():
            view.copy_(state["anchors"][name])
            outer.optimizer.state.pop(view, None)
            if name in state["momenta"]:
                outer.optimizer.state[view]["momentum_buffer"] = state["momenta"][name].clone()
        counts = self.session.rank == 0
        if counts:
            wait_all(
                [
                    self.session.store(spec.key, anchor[start:end].cpu())
                    for bucket, anchor in zip(self._buckets, self._anchors, strict=True)
                    for spec, start, end in self.chunks.of_bucket[bucket.index]
                ]
            )
        outer.store_state(counts=counts)

    @override
    def restart(self) -> None:
        """At the next step worker 0's parameters become the servers', as under "async"."""
        self._is_replaced = True
