"""Strategy "local-server": each worker steps by itself; every H steps the servers average the parameters of all.

The exchange of a round is a step of "sync-server": workers may join, leave and die at any time. A worker that joins, or
was silent for longer than its lease, gets a donor's state and takes no part in that round's average, whose result it
gets like everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.collectives.base import CompletedWork, Work
from psengine.errors import ConfigurationError
from psengine.strategies.exchange import Reduction, StaysLocal, Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.local.fragments import copies_of, parameter_buckets
from psengine.strategies.local.scaled_step import ScaledStep, bound, check_bound
from psengine.strategies.local.schedule import Schedule
from psengine.strategies.servers.base import DEFAULT_TIMEOUT_S
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.stepping import check_one
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share


class LocalServer(SyncServer):
    """Average the parameters of all workers at servers after every ``every`` steps; needs ``DistributedOptimizer``.

    Buffers become the lowest rank's. The optimizers' state stays each worker's own; a worker that joins gets a donor's.
    Where ``model.batch_weight`` is called in every step, parameters are weighed by the samples since the last average;
    where all workers have none, each keeps its own.

    Args:
        every: local steps of a round.
        servers, job, timeout_s, checksum, durability: see ``ServerStrategy``. A worker that joins waits for its donor's
            next round: ``timeout_s`` has to be longer than a round.
        compress: the codec, or its name, of the differences from the last average, and of the answers; costs a copy of
            the model. None: parameters travel as they are.

    Attributes:
        completed_steps: rounds of this worker's model; a worker that joined late starts with the donor's.
    """

    name = "local-server"
    capabilities = replace(SyncServer.capabilities, steps_alone=True)
    counts_usage = False

    def __init__(
        self,
        every: int = 16,
        *,
        servers: str | Sequence[str] | None = None,
        job: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checksum: bool = False,
        compress: str | Codec | None = None,
        durability: str | None = None,
    ) -> None:
        Schedule(every=every)
        self._sends_differences = not resolve_codec(compress).is_lossless
        super().__init__(
            servers=servers,
            job=job,
            timeout_s=timeout_s,
            checksum=checksum,
            compress=compress,
            durability=durability,
        )
        self._options["every"] = every

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name != "quorum"}

    def _forget(self) -> None:
        super()._forget()
        self._stepper: ScaledStep | None = None
        self._steps = 0
        self._samples: float | None = None
        # Per bucket what all agreed on last, where differences travel.
        self._anchors: list[torch.Tensor] = []

    @property
    @override
    def rule(self) -> dict[str, Any]:
        return {"name": "average", "quorum": None, "every": self._options["every"]}

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Buckets of parameters, in the place of the reducer's, whose memory gradients may be."""
        assert self._replica is not None, "laid out before it was prepared"
        super().lay_out(parameter_buckets(self._replica.parameters, self.allocate))

    @override
    def _entered(self, state: str) -> None:
        super()._entered(state)
        self._note_agreed()
        if state == "joined":
            with torch.no_grad():
                self._exchange_parameters(sits_out=True)

    @override
    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.release()
        super().close()

    # ---- gradients stay where they are -------------------------------------------------------------------------

    @property
    @override
    def needs_packing(self) -> bool:
        return False

    @override
    def begin(self, step: Step) -> Share:
        self._bound()
        return WHOLE

    @override
    def weigh(self, weight: float | None) -> None:
        super().weigh(weight)
        if weight is not None:
            self._samples = (self._samples or 0.0) + weight

    @override
    def reduce(self, bucket: Bucket) -> Reduction:
        return StaysLocal()

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        return CompletedWork()

    @override
    def finish(self) -> Work:
        return CompletedWork()

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps of ``optimizer`` are counted; its state goes to workers that join.

        Raises:
            ConfigurationError: a second optimizer.
            ServerError: this worker has joined others, which have no such optimizer.
        """
        self._stepper = bound(self._stepper, optimizer, self.name)
        super().bind(optimizer)

    def _bound(self) -> ScaledStep:
        _ = self.session  # a closed strategy raises
        return check_bound(self._stepper, self.name)

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step locally; at the end of a round return with the average."""
        result = self._bound().take(local_step)
        self._steps += 1
        if self._steps % self._options["every"] == 0:
            with torch.no_grad():
                self._exchange_parameters()
        return result

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_one(optimizers, self.name)
        super().check_ready(replica, optimizers)

    @override
    def conclude(self) -> None:
        """End the round under way."""
        with torch.no_grad():
            self._exchange_parameters()

    @override
    def shadow_step(self) -> None:
        """A rank without data takes part in the rounds, with the parameters that it has."""
        self.step(lambda: None)

    def _exchange_parameters(self, *, sits_out: bool = False) -> None:
        self._weight, self._samples = self._samples, None
        super().begin(Step(live_world_size=1))
        self._sits_out = self._sits_out or sits_out
        reductions = []
        for index, bucket in enumerate(self._buckets):
            sent: Sequence[torch.Tensor] = bucket.parameters
            if self._anchors:
                sent = torch._foreach_sub(bucket.views_of(self._anchors[index]), bucket.parameters)
            bucket.pack(sent)
            reductions.append(super().reduce(bucket))
        remainder = super().finish()
        results = [reduction.wait() for reduction in reductions]
        remainder.wait()
        if self.rejoins:
            self._note_agreed()  # the others' values, which came with their state
        pushes = iter(self._pushes)
        for index, (bucket, result) in enumerate(zip(self._buckets, results, strict=True)):
            assert result is not None, "servers that average answer"
            contributors = [(next(pushes).wait().contributors, chunk) for chunk in self.chunks.of_bucket[bucket.index]]
            if self._anchors:
                self._anchors[index].sub_(result)
                result = self._anchors[index]
            elif not all(count for count, _ in contributors):
                result = result.clone()
                for count, (_, start, end) in contributors:
                    if not count:  # every worker's samples are 0: the average of nothing is zeros
                        result[start:end] = bucket.flat[start:end].to(result.device)
            bucket.unpack(bucket.parameters, result)

    def _note_agreed(self) -> None:
        if self._sends_differences:
            self._anchors = copies_of(self._buckets)

    @override
    def _deposit_state(self) -> None:
        """A joiner gets what all agreed on last, from which its differences are."""
        if not self._anchors:
            super()._deposit_state()
            return
        own = [[parameter.detach().clone() for parameter in bucket.parameters] for bucket in self._buckets]
        for bucket, anchor in zip(self._buckets, self._anchors, strict=True):
            torch._foreach_copy_(bucket.parameters, bucket.views_of(anchor))
        try:
            super()._deposit_state()
        finally:
            for bucket, kept in zip(self._buckets, own, strict=True):
                torch._foreach_copy_(bucket.parameters, kept)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """How far the round is, what all agreed on last where differences travel, and the codec's residuals."""
        names = [
            (name, view.clone())
            for bucket, anchor in zip(self._buckets, self._anchors, strict=False)
            for name, view in zip(bucket.names, bucket.views_of(anchor), strict=True)
        ]
        return {
            "steps": self._steps % self._options["every"],
            "anchors": dict(names),
            "residuals": super().state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        anchored = {name for bucket in self._buckets for name in bucket.names} if self._anchors else set()
        if set(state) != {"steps", "anchors", "residuals"} or set(state["anchors"]) != anchored:
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected steps, residuals and the anchors of"
                f" {len(anchored)} parameters, got {sorted(state)}). Fix: use the same options, or leave out the"
                " strategy's state."
            )
        super().load_state_dict(state["residuals"])
        self._steps = state["steps"]
        for bucket, anchor in zip(self._buckets, self._anchors, strict=False):
            for name, view in zip(bucket.names, bucket.views_of(anchor), strict=True):
                view.copy_(state["anchors"][name])
