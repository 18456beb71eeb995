"""The second of a strategy's interfaces: a replica comes into service, starts equal, is saved, and leaves.

prepare(replica) ─ Exchange.lay_out(buckets) ─ join() ─ ... training ... ─ close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError
from psengine.protocol.layout import OtherNames

if TYPE_CHECKING:
    from psengine.strategies.servers.discovery import Rendezvous


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One process's copy of the model, as a strategy sees it.

    Attributes:
        parameters: name to parameter, for every parameter whose gradient is exchanged, in model order.
        frozen: name to parameter, for the others that may get a gradient later.
        buffers: returns name to buffer (such as running statistics), in model order, of those to keep equal; asked anew
            each time, because a module may assign new ones. Empty where the user keeps buffers apart.
        state: name to tensor of everything that has to be equal at the start: all parameters, frozen ones too, and the
            buffers to share.
        collective: the group of replicas.
        device: where the parameters live; of several devices the first.
        sparse: names of those parameters whose gradients are sparse.
        is_known_equal: whether the user vouches that all replicas are equal already.
        options: what all ranks have to choose alike besides the strategy's, by name.
        other_names: which names of ``state`` the module does not save, and its further ones.
        find: returns the parameter that has a name now, None where none has; a program may put others in their place.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    state: Mapping[str, torch.Tensor]
    collective: Collective
    device: torch.device
    frozen: Mapping[str, torch.nn.Parameter] = field(default_factory=dict)
    sparse: Sequence[str] = ()
    is_known_equal: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    other_names: OtherNames = field(default_factory=OtherNames)
    find: Callable[[str], torch.nn.Parameter | None] = lambda name: None


class LifeCycle(ABC):
    """A replica in service. One object serves one replica at a time.

    Attributes:
        rendezvous: the servers of this worker, and its identity there; None: the strategy has none.
    """

    rendezvous: Rendezvous | None = None

    @property
    def worker_rank(self) -> int | None:
        """The rank of this worker at its servers; None: the rank in the process group counts."""
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
            ReplicaMismatchError: see ``prepare``. After any error the caller closes the strategy.
        """

    def report(  # noqa: B027 - most tell nobody
        self, loss: torch.Tensor | float | None = None, samples: int | None = None
    ) -> None:
        """Report this worker's progress; see ``DistributedDataParallel.report``."""

    def statistics(self) -> Mapping[str, Any]:
        """The fields of ``Statistics`` that the strategy knows better than the wrapper; default: none."""
        return {}

    def conclude(self) -> None:  # noqa: B027 - most replicas are equal between two steps
        """Another strategy follows: make all replicas equal, in parameters and in the buffers to keep equal.

        All replicas call it, between two steps.
        """

    @property
    def player(self) -> Any:
        """Who plays this worker's virtual workers.

        Raises:
            ConfigurationError: the strategy has none.
        """
        raise ConfigurationError(
            "register_state and checkpoint_every belong to strategies with virtual workers (expected one such as"
            f" 'sync:virtual_workers=8', got {self!r}). Fix: choose one, or save checkpoints of your own"
        )

    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:  # noqa: B027
        """Called before ``prepare`` where this strategy is to follow another one: see that what it needs is there.

        Exchanges nothing with other replicas.

        Raises:
            ConfigurationError: it cannot serve this replica, or these optimizers.
            ServerLostError: a server does not answer.
        """

    def restart(self) -> None:  # noqa: B027 - most strategies keep nothing that belongs to weights
        """The model is being loaded on all ranks, without this strategy's state: what it keeps begins anew."""

    def close(self) -> None:  # noqa: B027 - most strategies hold nothing
        """Release what the strategy holds. Safe to call twice."""

    def abandon(self) -> None:
        """``close`` after the replica was garbage-collected, which may happen at another time on other ranks."""
        self.close()
