"""Strategy "sync:virtual_workers=V": the averages of V virtual workers, whoever computes their gradients.

The bits are those of native DDP with V ranks: each virtual worker's gradients are divided by V, kept apart, and added
in the order of gloo's ring of V ranks. A bucket has one memory::

    row 0        the averages, which stay as they are until the next ones are written
    row 1 + k    the contribution in slot k: of the k-th virtual worker that is played here
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Work
from psengine.errors import ConfigurationError, ReductionError
from psengine.strategies.base import Capabilities, Strategy, compare_over
from psengine.strategies.buffer_broadcast import BufferBroadcast
from psengine.strategies.elastic.player import Outcome, Player, player_for
from psengine.strategies.exchange import BucketExchange, Driver, Gradients, Step
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a model is set back to before each batch of a step.

    Attributes:
        gradients: indices of the parameters that have a gradient; it is zero.
        buffers: by name.
    """

    gradients: list[int]
    buffers: Mapping[str, torch.Tensor]


class SyncVirtualWorkers(Strategy):
    """Average the gradients of ``virtual_workers`` batches in each step; ``psengine.ElasticLoader`` deals them out.

    Workers may die and others may come: as long as one has the state, the bits are those of the undisturbed run.

    Args:
        virtual_workers: V, the number of batches in a step; at least the number of workers.

    Attributes:
        slots: how many virtual workers are played here.
        outcome: of the last step that ended; None before.
        is_played: whether a backward is expected, of a virtual worker's batch.
        watch: compares this replica with the others.

    Raises:
        ConfigurationError: ``virtual_workers`` is less than 1.
    """

    name = "sync"
    capabilities = Capabilities(
        needs_process_group=False, orders_buckets=True, carries_buffers=True, has_virtual_workers=True
    )
    slots = 1

    def __init__(self, *, virtual_workers: int) -> None:
        if not isinstance(virtual_workers, int) or virtual_workers < 1:
            raise ConfigurationError(
                f"virtual_workers of strategy {self.name!r} (expected a whole number of at least 1, got"
                f" {virtual_workers!r})"
            )
        self.virtual_workers = virtual_workers
        self._player: Player | None = None

    @property
    @override
    def player(self) -> Player:
        """Who plays this worker's virtual workers."""
        _ = self.replica
        assert self._player is not None, "a replica is in service"
        return self._player

    # ---- life --------------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        """Nothing is exchanged yet: workers meet, and are made equal, when training begins."""
        if replica.sparse or replica.device.type != "cpu":
            got = f"sparse gradients of {replica.sparse[0]!r}" if replica.sparse else str(replica.device)
            raise ConfigurationError(
                f"virtual workers train dense gradients on the CPU (expected these, got {got}). Fix: strategy='sync'"
            )
        super().prepare(replace(replica, is_known_equal=True))
        self._player = player_for(self.virtual_workers, replica.collective)

    @override
    def serve(self, gradients: Gradients) -> None:
        self.slots, self.is_played = 1, False
        self.outcome: Outcome | None = None
        self._gradients, self._group, self.watch = gradients, self.collective, gradients.watch
        self._owners: Sequence[tuple[int, int]] = ()
        self._buckets: Sequence[Bucket] = ()
        self._memories: list[torch.Tensor] = []
        self._allocated: list[torch.Tensor] = []
        self._order: list[int] | None = None  # in which buckets are laid out; None until that is known
        self._driver, self._broadcast = Driver(self._sum), BufferBroadcast()
        # Of the step, None before its first batch.
        self._start: Beginning | None = None
        self._used: torch.Tensor | None = None  # by parameter, 1 where a batch of this worker used it
        self._first_order: list[int] | None = None
        self._first_buffers: dict[str, torch.Tensor] = {}
        self.player.parts.append(self)

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self.player.state.bind(optimizer)

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        raise ConfigurationError(
            f"virtual workers begin with the training (expected strategy={self!r} when the model is wrapped, got it"
            " from switch_strategy)"
        )

    @override
    def statistics(self) -> Mapping[str, Any]:
        return self.player.statistics()

    @override
    def equal_after(self, exchanges: int) -> int | None:
        """The player compares, between steps: there workers' groups change."""
        return None

    def compare(self, step: int) -> None:
        """The step after ``step`` begins: compare the replicas of the group.

        Raises:
            CollectiveError: a worker of the group is gone.
            ReplicasDivergedError: see ``ReplicaWatch``.
        """
        if self.watch.asks(step):
            compare_over(self._group, self.watch, step)

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Each worker steps itself, with the averages."""
        if self.player.is_in_step:
            raise ReductionError(
                "gradients are averages once the loop over step.batches has ended (expected optimizer.step() after"
                " it, got one before). Fix: move it after the loop, and do not break out of the loop."
            )
        return local_step()

    @override
    def close(self) -> None:
        if self._player is not None:
            self._player.drop(self)
        self._player = None
        super().close()

    # ---- memory ------------------------------------------------------------------------------------------------

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        rows = 1 + self.slots
        memory = self._group.allocate(rows * numel, dtype, device).view(rows, numel)
        self._allocated.append(memory)
        return memory[1]

    @override
    def slot_memory(self, index: int, slot: int) -> torch.Tensor:
        return self._allocated[index][1 + slot]

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets, self._memories, self._allocated = buckets, self._allocated, []

    def move(self, group: Collective, owners: Sequence[tuple[int, int]], kept: Mapping[int, int]) -> None:
        """Go on in another group, in memory that the former one does not know.

        Args:
            group: its collective.
            owners: by virtual worker, the rank that plays it, and the slot of its contribution there.
            kept: contributions of this step that stay: slot until now to slot from now on.
        """
        self._group, self._owners = group, owners
        self.slots = sum(rank == group.rank for rank, _ in owners)
        former = self._memories
        self._driver.clear()
        self._gradients.lay_out_again()
        for old, new in zip(former, self._memories, strict=True) if kept else ():
            for slot, now in kept.items():
                new[1 + now].copy_(old[1 + slot])

    # ---- batches -----------------------------------------------------------------------------------------------

    def begin_batch(self, slot: int) -> None:
        """A virtual worker's batch follows, from the same beginning as any other batch of the step.

        Args:
            slot: of its contribution.

        Raises:
            ReductionError: a gradient is left from another step.
        """
        if self._start is None:
            self._check_gradients()
            self._used, self._start = None, self.beginning()
        else:  # also where contributions of the batches before were dealt to another worker
            self._restore(self._start)
        self.is_played = True
        self._gradients.pack_in(slot)

    def _restore(self, start: Beginning) -> None:
        self._set_gradients(start.gradients, range(len(self.replica.parameters)))
        self._write_buffers(start.buffers)

    def _check_gradients(self) -> None:
        for name, parameter in self.replica.parameters.items():
            if parameter.grad is not None and not _is_zero(parameter.grad.detach()):
                raise ReductionError(
                    f"the gradient of {name!r} is left from another step, and a worker that joins would lack it"
                    " (expected None, or +0.0). Fix: optimizer.zero_grad() in each step, before step.batches."
                )

    @override
    def begin(self, step: Step) -> Share:
        if not self.is_played:
            raise ReductionError(
                "with virtual workers each batch of step.batches has one backward (expected it inside the loop, once,"
                f" got {'one outside the loop' if self.player.playing is None else 'a second one'}). Fix: accumulate"
                " inside the batch's loss; use psengine.ElasticLoader's batches."
            )
        return Share(self.virtual_workers)

    @override
    def exchange(self, bucket: Bucket) -> BucketExchange:
        yield from ()
        if bucket.index == len(self._buckets) - 1:
            self.is_played = False
        self.player.packed(self._driver, bucket)
        return None

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        self._used = used.clone() if self._used is None else self._used | used
        return CompletedWork()

    def end_batch(self, *, is_first: bool) -> bool:
        """The batch is over; ``is_first``: of virtual worker 0. Whether it had a backward."""
        if is_first:
            self._first_buffers = self._copied_buffers()
            self._first_order = self._gradients.arrival_order
        had_backward, self.is_played = not self.is_played, False
        return had_backward

    # ---- the end of a step -------------------------------------------------------------------------------------

    def _sum(self, bucket: Bucket) -> BucketExchange:
        memory = self._memories[bucket.index]
        yield from self._group.sum_contributions(memory, self._owners, what=bucket.describe())
        return memory[0]

    def begin_exchanges(self) -> None:
        """All contributions are there, and none travels yet."""
        self._driver.clear()
        for bucket in self._buckets:
            self._driver.begin(bucket)

    def finish_exchanges(self) -> Outcome:
        """Wait for the averages, and exchange what else ends a step. What it begins anew from stays as it is."""
        for bucket in self._buckets:
            self._driver.result(bucket)
        used = None if self._used is None else self._used.clone()
        if used is not None:
            self._group.sum(used, what="used parameters")
        return Outcome(
            averages=[memory[0] for memory in self._memories],
            used=None if used is None else used.tolist(),
            order=self._share_order(),
            buffers=self._share_buffers(),
        )

    def _share_order(self) -> list[int] | None:
        if not self._gradients.awaits_order:
            return None
        order = torch.tensor(self._first_order or [0] * len(self.replica.parameters), dtype=torch.int64)
        first_rank, _ = self._owners[0]
        self._group.broadcast([order], first_rank, what="order of gradients").wait()
        return [int(index) for index in order]

    def _share_buffers(self) -> dict[str, torch.Tensor]:
        first_rank, _ = self._owners[0]
        buffers = self._first_buffers if self._group.rank == first_rank else self._copied_buffers()
        if buffers:
            self._broadcast.run(list(buffers.values()), self._group, first_rank)
        return buffers

    def end_step(self, outcome: Outcome) -> None:
        """The step is over, here or elsewhere: averages become the gradients of the parameters that a batch used."""
        assert self._start is not None, "a step that ends has begun"
        used = outcome.used
        if used is not None:
            self._set_gradients(self._start.gradients, [index for index, count in enumerate(used) if not count])
        for bucket, average in zip(self._buckets, outcome.averages, strict=True):
            self._gradients.write(bucket, average, used)
        self._write_buffers(outcome.buffers)
        self.outcome, self._start = outcome, None
        self._lay_out(outcome.order)

    # ---- what a worker that joins takes ------------------------------------------------------------------------

    def beginning(self) -> Beginning:
        """Of the step under way, or of one that would begin now."""
        if self._start is not None:
            return self._start
        parameters = enumerate(self.replica.parameters.values())
        return Beginning(
            gradients=[index for index, parameter in parameters if parameter.grad is not None],
            buffers=self._copied_buffers(),
        )

    def progress(self) -> dict[str, Any]:
        """What a worker needs besides the model and its optimizers, as plain values."""
        return {"order": self._order, "gradients": self.beginning().gradients}

    def take_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from another worker's ``progress``."""
        self._set_gradients(progress["gradients"], range(len(self.replica.parameters)))
        self._lay_out(progress["order"])

    def _lay_out(self, order: list[int] | None) -> None:
        if order is not None and order != self._order:
            self._order = order
            self._gradients.lay_out_again(order)

    def _set_gradients(self, defined: Container[int], indices: Iterable[int]) -> None:
        """Let the gradients of these parameters be zeros where ``defined`` has them, else None."""
        parameters = list(self.replica.parameters.values())
        for index in indices:
            parameters[index].grad = torch.zeros_like(parameters[index]) if index in defined else None

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.replica.buffers().items()}

    def _write_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        buffers = self.replica.buffers()
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether adding to it is as if it were not there: not where it has -0.0."""
    values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return not (values.any() or values.signbit().any())
