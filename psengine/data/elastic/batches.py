"""Fetch batches: in torch's loader processes ahead of time, or in this process, with the same bits.

::

    step               17       18       19         two loader processes, two batches ahead in each
    plays here         2 3      2 3      2 3
    requested          ................             another worker dies in step 17: its virtual worker 5 is fetched in
    then plays here    2 3 5    2 3 5    2 3 5      this process. As step 18 begins, all is requested anew
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from psengine.data.elastic.sample_plan import Request, SeededDataset
from psengine.environment.processes import end_with_parent

# torch's own alignment of tensors on the CPU.
ALIGNMENT_BYTES = 64


class Batches:
    """The batches of virtual workers; those that are expected are fetched ahead.

    It is the batch sampler from which torch takes a request for each batch that loader processes fetch.

    Args:
        dataset: map-style.
        request: the key and the indices of a step's virtual worker.
        upcoming: the virtual workers that are played here in a step; empty after the last step.
        num_workers, fetching: as of torch's ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        request: Callable[[int, int], Request],
        upcoming: Callable[[int], Sequence[int]],
        *,
        num_workers: int,
        **fetching: Any,
    ) -> None:
        self._request, self._upcoming = request, upcoming
        # The step in which requests begin; (step, virtual worker) of those whose batches are to come, in order.
        self._step, self._requested = 0, deque[tuple[int, int]]()
        make_loader: Any = functools.partial(
            DataLoader,
            SeededDataset(dataset),
            generator=torch.Generator(),  # torch draws a seed for its loader processes; not from the training's state
        )
        self._wanted: list[Request] = []
        here = {name: fetching[name] for name in ("collate_fn", "pin_memory") if name in fetching}
        self._here = make_loader(batch_sampler=self._wanted, **here)
        begin = functools.partial(_enter_loader_process, fetching.pop("worker_init_fn", None))
        self._processes = make_loader(
            batch_sampler=self,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            in_order=True,
            worker_init_fn=begin,
            **fetching,
        )
        self._fetched: Iterator[Any] = iter(())
        # A first call keeps MKL from choosing fewer threads: not only where batches are fetched in this process.
        torch.set_num_threads(torch.get_num_threads())

    def __iter__(self) -> Iterator[Request]:
        self._requested.clear()
        for step, virtual_worker in self._expected():
            self._requested.append((step, virtual_worker))
            yield self._request(step, virtual_worker)

    def _expected(self) -> Iterator[tuple[int, int]]:
        for step in itertools.count(self._step):
            virtual_workers = self._upcoming(step)
            if not virtual_workers:
                return
            for virtual_worker in virtual_workers:
                yield step, virtual_worker

    def begin_step(self, step: int) -> None:
        """A step begins. Where another one plays what was requested, loader processes get new requests."""
        self._step = step
        expected = itertools.islice(self._expected(), max(1, len(self._requested)))
        if self._processes.num_workers > 0 and list(expected) != list(self._requested):
            self._fetched = iter(self._processes)

    def fetch(self, step: int, virtual_worker: int) -> Any:
        """Return a batch. Random state is as the dataset left it, or unchanged."""
        wanted = step, virtual_worker
        if wanted in self._requested:
            found = None
            while found != wanted:  # what comes before it is played by another worker now
                found, batch = self._requested.popleft(), next(self._fetched)
        else:
            self._wanted[:] = [self._request(step, virtual_worker)]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as in a loader process: a sum over a large tensor depends on it
            try:
                batch = next(iter(self._here))
            finally:
                torch.set_num_threads(threads)
        return _aligned(batch)

    def close(self) -> None:
        """End the loader processes."""
        self._fetched, self._processes = iter(()), self._here


def _enter_loader_process(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    # It has its parent's sockets, which stay open while it lives: peers would not see that the parent was killed.
    end_with_parent()
    if worker_init_fn is not None:
        worker_init_fn(number)


def _aligned(batch: Any) -> Any:
    """``batch``, in which tensors on the CPU begin where torch has them begin.

    A matrix product's bits depend on it. A tensor over NumPy's memory begins elsewhere, unless it came from another
    process.
    """
    return tree_map_only(torch.Tensor, lambda one: one.clone() if _is_misaligned(one) else one, batch)


def _is_misaligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.data_ptr() % ALIGNMENT_BYTES != 0
