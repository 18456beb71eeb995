"""The seam between a replica and the way replicas agree: a strategy.

One backward pass, seen from here (the reducer calls, the strategy answers)::

    reducer    ready(bucket 0)      ready(bucket 1)   used-map      end of backward
    strategy   reduce(bucket 0) ──► reduce(bucket 1)  reduce_usage  reduction 0 .wait() ─ 1 .wait() ─ finish()
    optimizer                                                                             step() ──► step(local_step)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psengine.collectives.base import Collective, CompletedWork, Work
from psengine.errors import ConfigurationError
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share


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
    """

    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Callable[[], Mapping[str, torch.Tensor]]
    state: Mapping[str, torch.Tensor]
    collective: Collective
    device: torch.device
    sparse: Sequence[str] = ()


class Reduction(ABC):
    """A bucket's gradients on their way."""

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Return the reduced gradients, laid out like ``Bucket.flat`` (often that very tensor).

        None means that gradients stay what this process computed: the strategy applies them elsewhere.

        Raises:
            CollectiveError: the exchange failed or passed its deadline; the message names who is missing.
        """

    @property
    def is_superseded(self) -> bool:
        """Whether what ``wait`` returned is no longer the result, so that it is to be called again.

        Asked when everything of a backward was waited for: a worker that lost its place in the job and joined again
        takes part in a later step than the one it was in, with every bucket.
        """
        return False

    def drop(self) -> None:
        """``wait``, and use nothing of the result: what a codec left out of earlier gradients is as it was before."""
        self.wait()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the rest of psengine knows about a strategy, before any object of it is made.

    Attributes:
        needs_process_group: the replicas are the ranks of a process group. False: workers meet at servers, so that a
            process may be a world of its own.
        keeps_first_layout: buckets stay as they were first laid out. False: the reducer rebuilds them once, in the
            order in which gradients arrive.
        carries_buffers: running statistics travel with the gradients. False: they are broadcast before each forward.
        gathers: ``Strategy.gather`` reaches the other replicas.
        workers_step: each worker steps its own optimizers, of any kind and number. False: servers step.
        defines_gradients: backward leaves zeros where a gradient is undefined, as an average of several gradients does.
            False: gradients are applied elsewhere, which can leave such a parameter alone.
        exchange_name: what a timeline calls the exchange of a bucket.
    """

    needs_process_group: bool = True
    keeps_first_layout: bool = False
    carries_buffers: bool = False
    gathers: bool = False
    workers_step: bool = True
    defines_gradients: bool = True
    exchange_name: str = "reduce"


class Strategy(ABC):
    """How replicas agree. One object serves one replica; nothing outside ``strategies/`` asks which kind it is.

    Attributes:
        name: what users write to get it.
        capabilities: what the rest of psengine knows about it.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @property
    def worker_rank(self) -> int | None:
        """The rank of this worker where workers meet elsewhere than in a process group; None: that in the group."""
        return None

    @abstractmethod
    def prepare(self, replica: Replica, *, synchronize: bool) -> None:
        """Take the replica into service; with ``synchronize`` make all replicas start equal, after verifying that they
        can be. Mutates ``replica.state`` in place.

        Raises:
            ConfigurationError: the strategy serves another replica already, and was not closed.
            ReplicaMismatchError: the replicas' parameters or buffers differ in number, shape, stride or dtype.
        """

    def weigh(self, weight: float | None) -> None:
        """Before ``begin``, on every rank: in the coming backward this replica's gradients count ``weight`` (its
        samples, >= 0), so that the result is sum(weight * gradient) / sum(weight). None: all replicas count alike.

        Raises:
            ConfigurationError: the strategy cannot weigh gradients.
        """
        if weight is not None:
            raise ConfigurationError(
                f"strategy {self.name!r} does not average gradients by samples (expected batch_weight = None, got"
                f" {weight:g}). Fix: leave model.batch_weight alone, or use strategy='sync'."
            )

    def begin(self, live_world_size: int, *, in_join: bool = False) -> Share:
        """The first gradient of a backward is ready, and ``live_world_size`` ranks contribute to this one.

        ``in_join``: ranks without data may take part with zeros, and do not know how many have some.

        Returns what this replica's gradients count; the reducer applies it while it packs them.
        """
        return WHOLE

    @property
    def needs_packing(self) -> bool:
        """False where gradients are final as they are (one replica), so that the reducer copies nothing."""
        return True

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        """Return an uninitialised flat tensor for a bucket, in the memory this strategy exchanges best.

        Where that is memory of another dtype, packing converts gradients; with ``keeps_dtype``, for gradients that are
        views of the tensor, it is ``dtype`` itself.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def lay_out(self, buckets: Sequence[Bucket]) -> None:  # noqa: B027 - most strategies take buckets as they come
        """The reducer has made its buckets, before the first forward or when it remakes them."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Reduction:
        """A bucket is packed on this rank: begin exchanging it. Buckets come in the same order on every rank.

        Must not block. ``bucket.flat`` belongs to the strategy until the reduction was waited for.
        """

    def progress(self) -> None:  # noqa: B027 - most have somebody who works for them
        """A large gradient was packed while buckets may be under way: do for those what needs no waiting."""

    @abstractmethod
    def reduce_usage(self, used: torch.Tensor) -> Work:
        """Begin summing over ranks, in place, which parameters this backward used (int32, 1 or 0 by index)."""

    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return every replica's ``tensor``, by rank, where ``gathers``; all call it at the same place."""
        return [tensor]

    def finish(self) -> Work:
        """Every bucket of this backward was handed over: begin to exchange what travels beside them.

        The work is waited for after the reductions; then gradients are what ``step`` may use.
        """
        return CompletedWork()

    def bind_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most leave it alone
        """``optimizer`` will step through this strategy.

        Raises:
            ConfigurationError: the strategy cannot apply this kind of optimizer.
        """

    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """``optimizer.step(closure)``: return what it returns. Default: this worker steps itself.

        Args:
            local_step: the optimizer's own step, closure included.
            closure: what the user passed, for strategies that do not call ``local_step``.
        """
        return local_step()

    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most have it here
        """Before ``optimizer.state_dict()``: bring its state here from wherever it is kept."""

    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most have it here
        """After ``optimizer.load_state_dict()``: take the new state to wherever it is kept."""

    def report(  # noqa: B027 - most tell nobody
        self, loss: torch.Tensor | float | None = None, samples: int | None = None
    ) -> None:
        """Tell whoever shows this worker's progress how training goes; see ``DistributedDataParallel.report``."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0) -> None:
        """Overwrite ``tensors`` on every replica by those of ``source_rank`` (buffers before a forward)."""

    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        """Return the value of an exchange that user code began during this backward (a buffer hook's)."""
        return future.wait()

    def register_comm_hook(self, hook: Callable[[Bucket], torch.futures.Future[Any]]) -> None:
        """Let ``hook`` exchange buckets in the strategy's place; raises where a strategy has no room for one."""
        raise ConfigurationError(
            f"strategy {self.name!r} exchanges gradients itself and takes no communication hook; use strategy='sync'"
        )

    def close(self) -> None:  # noqa: B027 - most strategies hold nothing
        """Release what the strategy holds. Safe to call twice."""

    def abandon(self) -> None:
        """The replica was garbage-collected, on this rank perhaps sooner than on others: release what is held."""
        self.close()
