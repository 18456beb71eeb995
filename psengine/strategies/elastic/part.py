"""A model that virtual workers train: their contributions, the averages, and the buffers that go with a step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ReductionError
from psengine.strategies.buffer_broadcast import BufferBroadcast
from psengine.strategies.exchange import BucketExchange, Driver, Gradients
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a model is set back to before each batch of a step.

    Attributes:
        gradients: indices of the parameters that have a gradient; it is zero.
        buffers: by name.
    """

    gradients: list[int]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """With what a step ends; plain values, because it also travels to a worker that lacks it.

    Attributes:
        averages: by bucket, in memory that stays as it is until the next ones are written.
        used: by parameter, how many workers used it; None where all count as used.
        order: in which gradients arrive, if buckets are to be laid out so from now on.
        buffers: by name, those of virtual worker 0.
    """

    averages: list[torch.Tensor]
    used: list[int] | None
    order: list[int] | None
    buffers: dict[str, torch.Tensor]


class Part:
    """The contributions of this worker's virtual workers to one model.

    A bucket has one memory: row 0 is for the averages, row 1 + k for the contribution in slot k.

    Args:
        replica: the model.
        gradients: the reducer of its gradients.

    Attributes:
        slots: how many virtual workers are played here.
        outcome: of the last step that ended; None before.
        is_played: whether a backward is expected, of a virtual worker's batch.
    """

    def __init__(self, replica: Replica, gradients: Gradients) -> None:
        self.replica = replica
        self.slots = 1
        self.outcome: Outcome | None = None
        self._gradients = gradients
        self._collective: Collective = replica.collective
        self._owners: Sequence[tuple[int, int]] = ()
        self._buckets: Sequence[Bucket] = ()
        self._memories: list[torch.Tensor] = []
        self._allocated: list[torch.Tensor] = []
        self._order: list[int] | None = None  # in which buckets are laid out; None until that is known
        self._driver = Driver(self._sum)
        self._broadcast = BufferBroadcast()
        # Of the batch that is played.
        self.is_played = False
        # Of the step, None before its first batch.
        self._start: Beginning | None = None
        self._used: torch.Tensor | None = None  # by parameter, 1 where a batch of this worker used it
        self._first_order: list[int] | None = None
        self._first_buffers: dict[str, torch.Tensor] = {}

    # ---- memory ------------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a bucket; see ``Exchange.allocate``."""
        rows = 1 + self.slots
        memory = self._collective.allocate(rows * numel, dtype, device).view(rows, numel)
        self._allocated.append(memory)
        return memory[1]

    def slot_memory(self, index: int, slot: int) -> torch.Tensor:
        """See ``Exchange.slot_memory``; memory was allocated in the order of buckets."""
        return self._allocated[index][1 + slot]

    def take_layout(self, buckets: Sequence[Bucket]) -> None:
        """The reducer has made its buckets."""
        self._buckets, self._memories, self._allocated = buckets, self._allocated, []

    def move(self, collective: Collective, owners: Sequence[tuple[int, int]], kept: Mapping[int, int]) -> None:
        """Go on in another group, in memory that the former one does not know.

        Args:
            collective: of the group.
            owners: by virtual worker, the rank that plays it, and the slot of its contribution there.
            kept: contributions of this step that stay: slot until now to slot from now on.
        """
        self._collective, self._owners = collective, owners
        self.slots = sum(rank == collective.rank for rank, _ in owners)
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
                    " (expected None, or +0.0 in each place). Fix: call optimizer.zero_grad() in each step, before the"
                    " loop over step.batches."
                )

    def end_batch(self, *, is_first: bool) -> bool:
        """The batch is over; ``is_first``: of virtual worker 0. Whether it had a backward."""
        if is_first:
            self._first_buffers = self._copied_buffers()
            self._first_order = self._gradients.arrival_order
        had_backward, self.is_played = not self.is_played, False
        return had_backward

    def note_used(self, used: torch.Tensor) -> None:
        """A backward used these parameters: int32, 1 or 0 by index."""
        self._used = used.clone() if self._used is None else self._used | used

    def packed(self, bucket: Bucket, *, begins: bool) -> None:
        """A bucket of the batch is packed; ``begins``: its exchange begins at once."""
        if bucket.index == len(self._buckets) - 1:
            self.is_played = False
        if begins:
            self._driver.begin(bucket)

    # ---- the end of a step -------------------------------------------------------------------------------------

    def _sum(self, bucket: Bucket) -> BucketExchange:
        memory = self._memories[bucket.index]
        yield from self._collective.sum_contributions(memory, self._owners, what=bucket.describe())
        return memory[0]

    def begin_exchanges(self) -> None:
        """All contributions are there, and none travels yet."""
        self._driver.clear()
        for bucket in self._buckets:
            self._driver.begin(bucket)

    def exchange(self) -> Outcome:
        """Wait for the averages, and exchange what else ends a step. What it begins anew from stays as it is."""
        for bucket in self._buckets:
            self._driver.result(bucket)
        used = None if self._used is None else self._used.clone()
        if used is not None:
            self._collective.sum(used, what="used parameters")
        return Outcome(
            averages=[memory[0] for memory in self._memories],
            used=None if used is None else used.tolist(),
            order=self._share_order(),
            buffers=self._share_buffers(),
        )

    @property
    def _first_rank(self) -> int:
        """The rank that plays virtual worker 0."""
        return self._owners[0][0]

    def _share_order(self) -> list[int] | None:
        if not self._gradients.awaits_order:
            return None
        order = torch.tensor(self._first_order or [0] * len(self.replica.parameters), dtype=torch.int64)
        self._collective.broadcast([order], self._first_rank, what="order of gradients").wait()
        return [int(index) for index in order]

    def _share_buffers(self) -> dict[str, torch.Tensor]:
        buffers = self._first_buffers if self._collective.rank == self._first_rank else self._copied_buffers()
        if buffers:
            self._broadcast.run(list(buffers.values()), self._collective, self._first_rank)
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
        """What it needs besides the model and its optimizers, as plain values."""
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
