"""The second of a strategy's interfaces: a replica comes into service, starts equal, is saved, and leaves.

prepare(replica) ─ Exchange.lay_out(buckets) ─ join() ─ ... training ... ─ close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One process's copy of the model, as a strategy sees it.

    Attributes:
        parameters: name to parameter, for every parameter whose gradient is exchanged, in model order.
        buffers: returns name to buffer (such as running statistics), in model order, of those to keep equal; asked anew
            each time, because a module may assign new ones. Empty where the user keeps buffers apart.
        state: name to tensor of everything that has to be equal at the start: all parameters, frozen ones too, and the
            buffers to share.
        collective: the group of replicas.
        device: where the parameters live; of several devices the first.
        sparse: names of those parameters whose gradients are sparse.
        is_known_equal: whether the user vouches that all replicas are equal already.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    state: Mapping[str, torch.Tensor]
    collective: Collective
    device: torch.device
    sparse: Sequence[str] = ()
    is_known_equal: bool = False


class LifeCycle(ABC):
    """A replica in service. One object serves one replica at a time."""

    @property
    def worker_rank(self) -> int | None:
        """The rank of this worker where workers meet elsewhere than in a process group; None: that in the group."""
        return None

    @abstractmethod
    def prepare(self, replica: Replica) -> None:
        """Take the replica into service, and see that the replicas can start equal.

        Raises:
            ConfigurationError: the strategy serves another replica already, and was not closed.
            ReplicaMismatchError: the replicas' parameters or buffers differ in number, shape, stride or dtype.
        """

    @abstractmethod
    def join(self) -> None:
        """Buckets are laid out: make all replicas start equal. Mutates ``replica.state`` in place.

        Raises:
            ReplicaMismatchError: see ``prepare``. Whoever called closes the strategy after any error.
        """

    def report(  # noqa: B027 - most tell nobody
        self, loss: torch.Tensor | float | None = None, samples: int | None = None
    ) -> None:
        """Tell whoever shows this worker's progress how training goes; see ``DistributedDataParallel.report``."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the model and its optimizer so that training goes on as it would have:
        tensors, numbers, text and containers of them. Each rank has its own. Default: nothing.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, under the same strategy with the same options.

        Raises:
            ConfigurationError: the state is not one of this strategy's.
        """
        if state:
            raise ConfigurationError(f"strategy {self!r} keeps no state (expected an empty one, got {sorted(state)})")

    def close(self) -> None:  # noqa: B027 - most strategies hold nothing
        """Release what the strategy holds. Safe to call twice."""

    def abandon(self) -> None:
        """The replica was garbage-collected, on this rank perhaps sooner than on others: release what is held."""
        self.close()
