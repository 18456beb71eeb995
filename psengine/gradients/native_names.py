"""What others call on native DDP's reducer, under its names: Lightning, Join, torch's communication hooks and tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from psengine.gradients.contribution import Contribution
from psengine.gradients.flight import Flight
from psengine.gradients.usage import ParameterUsage


class NativeNames(ABC):
    """The names that a reducer answers to besides its own.

    Attributes:
        contribution: what this rank's gradients count.
    """

    contribution: Contribution
    _flight: Flight

    @property
    @abstractmethod
    def usage(self) -> ParameterUsage:
        """Which parameters are used, on this rank and on any."""

    @property
    def buckets_reduced(self) -> int:
        """How many buckets the last backward exchanged."""
        return self._flight.buckets_reduced

    @abstractmethod
    def set_static_graph(self) -> None:
        """Promise that every iteration uses the same parameters equally often."""

    def _set_static_graph(self) -> None:
        self.set_static_graph()

    @abstractmethod
    def _ensure_prior_reduction_finished(self) -> None: ...

    def _check_reducer_finalized(self) -> None:
        """Raise unless the last backward was finished (``_check_reducer_finalized`` of the wrapper)."""
        self._ensure_prior_reduction_finished()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.contribution.set_live_ranks_work(work, use_initial_world_size=use_static_world_size)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for ``futures`` (of a buffer communication hook) before backward returns."""
        self._flight.futures.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor:
        """By index, how many ranks used each parameter in the last backward that agreed on it: int32."""
        return self.usage.summed()

    def _set_optimizer_in_backward(self) -> None:
        """The communication hook steps optimizers itself; gradients are not written back."""
        self._flight.writes_gradients = False

    def _ddp_graph_static(self) -> bool:
        """Whether every search so far found the same parameters unused, so that ``static_graph`` would have served."""
        return self.usage.never_changed
