"""The names of native DDP's reducer that torch's own hooks, Lightning and native DDP's inherited methods call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.gradients.bucket_layout import BucketLayout
from psengine.gradients.graphs import EveryParameter
from psengine.gradients.hooks import AccumulationNodes
from psengine.gradients.in_flight import BucketsInFlight


class NativeNames:
    """The part of a reducer that psengine itself calls under other names, or not at all."""

    # Sums a communication hook's bucket over ranks; a future of its buffer.
    _run_allreduce_hook: Callable[[Any], Any]

    graph: EveryParameter
    in_flight: BucketsInFlight
    _layout: BucketLayout
    _nodes: AccumulationNodes

    def _push_all_rebuilt_params(self) -> None:
        """``Reducer.shadow_backward`` has done it."""

    def _remove_autograd_hooks(self) -> None:
        """Stop listening to autograd; gradients stay local from now on."""
        self._nodes.stop_listening()

    def _set_optimizer_in_backward(self) -> None:
        """The communication hook steps optimizers itself; gradients are not written back."""
        self.in_flight.writes_gradients = False

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for ``futures`` (of a buffer communication hook) before backward returns."""
        self.in_flight.futures.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor:
        """By index, how many ranks used each parameter in the last backward that agreed on it: int32."""
        return self.graph.summed

    def _ddp_graph_static(self) -> bool:
        """Whether every search so far found the same parameters unused, so that ``static_graph`` would have served."""
        return self.graph.never_changed
