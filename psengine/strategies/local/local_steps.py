"""Strategies "local" and "diloco": each replica steps by itself; every H steps a collective synchronises them.

"local" averages parameters (local SGD; after a while of "sync", post-local SGD, Lin et al. 2018, arXiv 1808.07217)::

    rank 0   step ─ step ─ ... ─ step ─┐                        ┌─ step ...
    rank 1   step ─ step ─ ... ─ step ─┴─ average of parameters ┴─ step ...

"diloco" takes an outer Nesterov step with the average of the replicas' differences from what they agreed on last
(Douillard et al. 2023, arXiv 2311.08105); a part of the model at a time, while inner steps go on (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.strategies.base import Capabilities
from psengine.strategies.life_cycle import Replica
from psengine.strategies.local.fragments import Fragment, cut
from psengine.strategies.local.rounds import OuterStep, RoundOptions, Rounds


class LocalSteps(Rounds):
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
        averages_gradients=False,
        counts_absent=True,
        steps_alone=True,
    )
    _parts: Sequence[Fragment] = ()

    def __init__(self, every: int = 16, *, compress: str | Codec | None = None) -> None:
        self._rounds = RoundOptions.checked(self.name, every=every)
        self._codec = resolve_codec(compress)
        # With a codec, differences travel: its error must not be that of parameters.
        self._has_outer_step = not self._codec.is_lossless

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        self._outer = OuterStep(replica.parameters, self._rounds) if self._has_outer_step else None
        self._parts = [
            Fragment(parameters, replica.collective, self._codec, self._outer, self._rounds)
            for parameters in cut(replica.parameters, self._rounds.fragments)
        ]

    @override
    def join(self) -> None:
        """Rank 0's parameters and buffers overwrite everybody's, and a first round begins."""
        self._settle()

    @override
    def _settle(self) -> None:
        super().join()
        super()._settle()

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def shadow_step(self) -> None:
        """A rank without data takes part in the exchanges, with the parameters that it has."""
        self._begin()
        self._count_step()

    @override
    def _end_round(self) -> None:
        """Average the buffers that are floating-point; others become rank 0's."""
        ranks, buffers = self.collective.world_size, [one.detach() for one in self.replica.buffers().values()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers if ranks > 1):
            group = [buffer for buffer in buffers if buffer.dtype == dtype]
            if not dtype.is_floating_point:
                self.collective.broadcast(group, 0, what="buffers of local replicas").wait()
                continue
            flat = torch.cat([buffer.reshape(-1) for buffer in group]).mul_(1.0 / ranks)
            self.collective.sum(flat, what="buffers of local replicas")
            for buffer, average in zip(group, flat.split([buffer.numel() for buffer in group]), strict=True):
                buffer.copy_(average.view(buffer.shape))

    @override
    def conclude(self) -> None:
        """End the round under way: all fragments are exchanged now."""
        if not self._is_settled:  # the model was just loaded
            self._settle()
            return
        self._exchange_all()
        self._end_round()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def residuals(self) -> dict[str, torch.Tensor]:
        return {name: one for part in self._parts for name, one in part.residuals().items()}

    @override
    def take_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        for part in self._parts:
            part.take_residuals(residuals)


class Diloco(LocalSteps):
    """Step locally; every ``every`` steps an outer Nesterov step with the average of the replicas' differences.

    Costs a copy of the parameters, the outer momentum, and with ``overlap`` a copy of what travels. Buffers are
    averaged and replicas weighed as under "local".

    Args:
        every: local steps of a round.
        fragments: parts of the model that are exchanged in turn, each once in a round.
        overlap: local steps that are taken while a part travels.
        keep: with ``overlap``, the share of its own parameters that a replica keeps when a part arrives.
        outer_lr: learning rate of the outer step.
        outer_momentum: its Nesterov momentum.
        compress: the codec, or its name, of the differences (outer gradients).

    Raises:
        ConfigurationError: an option is out of its range.
    """

    name = "diloco"

    def __init__(
        self,
        every: int = 100,
        *,
        fragments: int = 1,
        overlap: int = 0,
        keep: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        compress: str | Codec | None = None,
    ) -> None:
        self._rounds = RoundOptions.checked(
            self.name,
            every=every,
            fragments=fragments,
            overlap=overlap,
            keep=keep,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
        )
        self._codec = resolve_codec(compress)
        self._has_outer_step = True
