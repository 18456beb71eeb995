"""A model that virtual workers train: their contributions, the averages, and the buffers that go with a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.strategies.buffer_broadcast import BufferBroadcast
from psengine.strategies.exchange import BucketExchange, Driver, Gradients
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket


class Part:
    """The contributions of this worker's virtual workers to one model.

    A bucket has one memory: row 0 is for the averages, row 1 + k for the contribution in slot k.

    Args:
        replica: the model.
        gradients: the reducer of its gradients.

    Attributes:
        averages: of the last step that ended, by bucket, as they stay until the next ones are written.
        order: in which buckets are laid out; None until it is known, or where it never changes.
        slots: how many virtual workers are played here.
        is_played: whether a backward is expected, of a virtual worker's batch.
        used: by parameter, 1 where one of this worker's virtual workers used it in this step; None where all count.
    """

    def __init__(self, replica: Replica, gradients: Gradients) -> None:
        self.replica = replica
        self._gradients = gradients
        self.averages: list[torch.Tensor] = []
        self.order: list[int] | None = None
        self.used: torch.Tensor | None = None
        self._buckets: Sequence[Bucket] = ()
        self._memories: list[torch.Tensor] = []
        self._allocated: list[torch.Tensor] = []
        self._collective: Collective = replica.collective
        self.slots = 1
        self._broadcast = BufferBroadcast()
        self._driver = Driver(self._sum)
        self._owners: Sequence[tuple[int, int]] = ()
        # Of the batch that is played.
        self.is_played = False
        self._exchanges_at_once = False
        # Of the step.
        self._is_at_start = True
        self._first_order: list[int] | None = None
        self._start_gradients: list[torch.Tensor | None] = []
        self._start_buffers: dict[str, torch.Tensor] = {}
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

    def lay_out(self, order: list[int] | None) -> None:
        """Once, between two steps: lay out buckets in the order in which gradients arrive."""
        if order is not None and self.order is None:
            self.order = order
            self._gradients.lay_out_again(order)

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """No contribution was made yet."""
        gradients = [parameter.grad for parameter in self.replica.parameters.values()]
        self._start_gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        self._start_buffers = self._copied_buffers()
        self._first_buffers = {}
        self._is_at_start, self._first_order = True, None
        self.used = None

    def begin_batch(self, slot: int, *, exchanges_at_once: bool) -> None:
        """A virtual worker's batch follows.

        Args:
            slot: of its contribution.
            exchanges_at_once: whether it is the last one, so that buckets are exchanged as they fill.
        """
        if not self._is_at_start:  # also where contributions of the batches before were dealt to another worker
            self._restore()
        self._is_at_start = False
        self.is_played, self._exchanges_at_once = True, exchanges_at_once
        self._gradients.pack_in(slot)

    def _restore(self) -> None:
        """Set gradients and buffers back to the beginning of the step."""
        for parameter, gradient in zip(self.replica.parameters.values(), self._start_gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self._write_buffers(self._start_buffers)

    def end_batch(self, *, is_first: bool) -> bool:
        """The batch is over; ``is_first``: of virtual worker 0. Whether it had a backward."""
        if is_first:
            self._first_buffers = self._copied_buffers()
            self._first_order = self._gradients.arrival_order
        had_backward, self.is_played = not self.is_played, False
        return had_backward

    def note_used(self, used: torch.Tensor) -> None:
        """A backward used these parameters: int32, 1 or 0 by index."""
        self.used = used.clone() if self.used is None else self.used | used

    def packed(self, bucket: Bucket) -> None:
        """A bucket of the batch is packed."""
        if bucket.index == len(self._buckets) - 1:
            self.is_played = False
        if self._exchanges_at_once:
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

    def end_exchanges(self) -> list[torch.Tensor]:
        """Wait for the averages; by bucket."""
        return [self._require(self._driver.result(bucket)) for bucket in self._buckets]

    @staticmethod
    def _require(average: torch.Tensor | None) -> torch.Tensor:
        assert average is not None, "every bucket's exchange was begun"
        return average

    @property
    def _first_rank(self) -> int:
        """The rank that plays virtual worker 0."""
        return self._owners[0][0]

    def share_buffers(self) -> None:
        """All workers' buffers become those of virtual worker 0."""
        if self._collective.rank == self._first_rank:
            self._write_buffers(self._first_buffers)
        if self._start_buffers:
            self._broadcast.run(list(self.replica.buffers().values()), self._collective, self._first_rank)

    def share_order(self) -> list[int] | None:
        """In which order buckets are to be laid out once this step is over; None: they stay as they are."""
        if not self._gradients.awaits_order:
            return None
        count = len(self.replica.parameters)
        order = torch.tensor(self._first_order or [0] * count, dtype=torch.int64)
        self._collective.broadcast([order], self._first_rank, what="order of gradients").wait()
        return [int(index) for index in order]

    def write(self, averages: list[torch.Tensor], used: Sequence[float] | None) -> None:
        """The step is over: averages become the gradients, but of parameters that no virtual worker used."""
        self.averages = averages
        if used is not None:
            names = zip(self.replica.parameters.values(), self._start_gradients, used, strict=True)
            for parameter, gradient, count in names:
                if not count:
                    parameter.grad = gradient
        for bucket, average in zip(self._buckets, averages, strict=True):
            self._gradients.write(bucket, average, used)

    # ---- what travels to others --------------------------------------------------------------------------------

    def result(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What a worker needs that lacks the last step's averages; ``buffers``: of its end. See ``take_result``."""
        return {"averages": self.averages, "buffers": list(buffers.values())}

    def take_result(self, result: Mapping[str, Any], used: Sequence[float] | None) -> None:
        """End the step with what another worker has of it."""
        self._write_buffers(dict(zip(self.replica.buffers(), result["buffers"], strict=True)))
        self.write(result["averages"], used)

    def buffers_at_start(self) -> Mapping[str, torch.Tensor]:
        """The buffers with which the step began that is under way."""
        return self._start_buffers

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.replica.buffers().items()}

    def _write_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        buffers = self.replica.buffers()
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)
