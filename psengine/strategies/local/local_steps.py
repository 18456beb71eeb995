"""Strategies "local" and "diloco": each replica steps by itself; every H steps a collective makes replicas agree.

"local" averages parameters (local SGD; after a while of "sync", post-local SGD, Lin et al. 2018, arXiv 1808.07217)::

    rank 0   step ─ step ─ ... ─ step ─┐                        ┌─ step ...
    rank 1   step ─ step ─ ... ─ step ─┴─ average of parameters ┴─ step ...

"diloco" takes an outer Nesterov step with the average of the replicas' differences from what they agreed on last
(Douillard et al. 2023, arXiv 2311.08105); a part of the model at a time, while inner steps go on (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512).

A round is counted in calls of ``optimizer.step()``, which all ranks make alike; a step that a rank's GradScaler leaves
out counts too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.errors import ConfigurationError
from psengine.strategies.base import Capabilities
from psengine.strategies.batch_weights import WHAT
from psengine.strategies.life_cycle import Replica
from psengine.strategies.local.fragments import Fragment, OuterStep, cut
from psengine.strategies.local.scaled_step import CountedSteps
from psengine.strategies.local.schedule import Schedule
from psengine.strategies.sync_all_reduce import OverCollective
from psengine.tensors.share import NOTHING, Share
from psengine.tracing.timeline import span


class LocalSteps(CountedSteps, OverCollective):
    """Average the parameters of all replicas after every ``every`` steps; needs ``psengine.DistributedOptimizer``.

    Buffers that are floating-point (running statistics) are averaged with the parameters; others become rank 0's. The
    optimizers' state stays each rank's own. Where ``model.batch_weight`` is called in every step, parameters are
    weighed by the samples since their last average; where all ranks have none, they count alike.

    Args:
        every: local steps of a round.
        compress: the codec, or its name, of the differences from the last average; costs a copy of the model. None:
            parameters travel as they are.

    Raises:
        ConfigurationError: an option is out of its range.
    """

    name = "local"
    capabilities = Capabilities(
        keeps_first_layout=True,
        carries_buffers=True,
        defines_gradients=False,
        counts_absent=True,
        steps_alone=True,
    )

    def __init__(self, every: int = 16, *, compress: str | Codec | None = None) -> None:
        codec = resolve_codec(compress)
        self._options = {"every": every, "compress": codec}
        self._set_up(Schedule(every=every), codec, None if codec.is_lossless else OuterStep())

    def _set_up(self, schedule: Schedule, codec: Codec, outer: OuterStep | None) -> None:
        super().__init__()
        self._schedule, self._codec, self._outer = schedule, codec, outer
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._fragments: list[Fragment] = []
        # (after which step it arrives, index) of the fragments on their way.
        self._travelling: deque[tuple[int, int]] = deque()
        self.stepper = None
        # By fragment, the samples since it left last; None where nobody calls ``batch_weight``.
        self._samples: list[float | None] = [None] * self._schedule.fragments
        # Whether parameters are rank 0's, or each rank's own, since the model was loaded without this state.
        self._is_settled = False

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        self._fragments = [
            Fragment(part, replica.collective, self._codec, self._outer)
            for part in cut(replica.parameters, self._schedule.fragments)
        ]

    @override
    def join(self) -> None:
        super().join()
        if not self._is_settled:
            self._settle()

    def _settle(self) -> None:
        """Parameters are equal: the next round begins with them."""
        self._is_settled = True
        self._travelling.clear()
        self._samples = [None] * self._schedule.fragments
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.settle()

    @override
    def close(self) -> None:
        super().close()
        self._forget()

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def weigh(self, weight: float | None) -> None:
        """Parameters are weighed by the samples since their last average."""
        if weight is not None:
            self._samples = [weight + (samples or 0.0) for samples in self._samples]

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step locally; exchange what is due after this step. All ranks call it."""
        stepper = self.bound()
        self._begin_anew()
        result = stepper.take(local_step)
        self._end_step()
        return result

    @override
    def shadow_step(self) -> None:
        """A rank without data takes part in the exchanges, with the parameters that it has."""
        self._begin_anew()
        self._end_step()

    def _begin_anew(self) -> None:
        """After the model was loaded without this strategy's state."""
        if not self._is_settled:
            self._steps = 0
            super().join()
            self._settle()

    def _end_step(self) -> None:
        self._steps += 1
        self._resend()
        leaving = self._schedule.leaving(self._steps)
        arrives = bool(self._travelling) and self._travelling[0][0] <= self._steps
        if not leaving and not arrives and not self._schedule.ends_round(self._steps):
            return
        with torch.no_grad(), span("average parameters"):
            for index in leaving:
                self._leave(index)
                self._travelling.append((self._steps + self._schedule.overlap, index))
            while self._travelling and self._travelling[0][0] <= self._steps:
                self._fragments[self._travelling.popleft()[1]].arrive()
            if self._schedule.ends_round(self._steps):
                self._average_buffers()

    @torch.no_grad()
    def _resend(self) -> None:
        for _, index in self._travelling:
            self._fragments[index].resend()

    def _leave(self, index: int) -> None:
        samples, self._samples[index] = self._samples[index], None
        self._fragments[index].leave(self._share_of(samples), overlaps=self._schedule.overlap > 0)

    def _share_of(self, samples: float | None) -> Share:
        """What this rank counts; all alike where nobody has samples."""
        if samples is not None:
            assert self._replica is not None, "prepared"
            total = torch.tensor([samples], dtype=torch.float64, device=self._replica.device)
            self.collective.sum(total, what=WHAT)
            if total.item():
                return Share(total.item() / samples) if samples else NOTHING
        return Share(self.collective.world_size)

    def _average_buffers(self) -> None:
        assert self._replica is not None, "prepared"
        buffers = [buffer.detach() for buffer in self._replica.buffers().values()]
        if self.collective.world_size == 1 or not buffers:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            if buffer.is_floating_point():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for group in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in group]).mul_(1.0 / self.collective.world_size)
            self.collective.sum(flat, what="buffers of local replicas")
            parts = flat.split([buffer.numel() for buffer in group])
            for buffer, part in zip(group, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
        others = [buffer for buffer in buffers if not buffer.is_floating_point()]
        if others:
            self.collective.broadcast(others, 0, what="buffers of local replicas").wait()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """How far the round is, what the replicas agreed on last, and the outer step's momentum."""
        return {
            "steps": self._steps,
            "travelling": [list(entry) for entry in self._travelling],
            "samples": list(self._samples),
            "fragments": [fragment.state() for fragment in self._fragments],
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expected = {"steps", "travelling", "samples", "fragments"}
        if set(state) != expected or len(state["fragments"]) != len(self._fragments):
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected {sorted(expected)} with"
                f" {len(self._fragments)} fragments, got {sorted(state)} with {len(state.get('fragments', ()))})"
            )
        self._steps = state["steps"]
        self._settle()
        self._travelling.extend((due, index) for due, index in state["travelling"])
        self._samples = list(state["samples"])
        with torch.no_grad():
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
                try:
                    fragment.load(saved)
                except KeyError as error:
                    raise ConfigurationError(
                        f"the saved state is not one of {self!r} (expected what it keeps of each parameter, got nothing"
                        f" for {error}). Fix: use the same options, or leave out the strategy's state."
                    ) from error

    @override
    def conclude(self) -> None:
        """End the round under way: all fragments are exchanged now."""
        if not self._is_settled:
            super().join()
            return
        self._resend()
        with torch.no_grad():
            while self._travelling:
                self._fragments[self._travelling.popleft()[1]].arrive()
            for index in range(len(self._fragments)):
                self._leave(index)
            for fragment in self._fragments:
                fragment.arrive(keeps=False)
            self._average_buffers()

    @override
    def restart(self) -> None:
        """The next step broadcasts rank 0's parameters and begins a round."""
        self._is_settled = False
