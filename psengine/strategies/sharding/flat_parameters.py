"""The replica's parameters as views of flat memory, of which each rank steps its blocks and all ranks see the whole.

::

    one host      one memory that every rank maps     barrier ─ each rank steps its blocks in place ─ barrier
    otherwise     a memory for each rank              each rank steps its blocks ─ all-gather of the blocks
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ReductionError
from psengine.strategies.sharding.plan import LINE_BYTES, SharePlan
from psengine.tensors.bucket import view_like


class Section:
    """The parameters of one dtype.

    Attributes:
        indices: of the parameters, by their place in ``plan``.
        plan: which rank steps what.
        start_byte: where the section begins in the memory of all.
        values: the flat memory; set when parameters are placed.
    """

    def __init__(self, dtype: torch.dtype, indices: Sequence[int], plan: SharePlan, start_byte: int) -> None:
        self.dtype = dtype
        self.indices = list(indices)
        self.plan = plan
        self.start_byte = start_byte
        self.values = torch.empty(0, dtype=dtype)

    def block_of(self, flat: torch.Tensor, block: int) -> torch.Tensor:
        """Its part of a tensor like ``values``."""
        return flat[block * self.plan.block_numel : (block + 1) * self.plan.block_numel]

    def by_rank(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor like ``values`` as a view of shape (rounds, ranks, elements of a block)."""
        return flat.view(-1, self.plan.world_size, self.plan.block_numel)


def make_sections(parameters: Sequence[torch.Tensor], world_size: int) -> list[Section]:
    """A section for each dtype, in the order in which dtypes come first."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_dtype.setdefault(parameter.dtype, []).append(index)
    sections, start_byte = [], 0
    for dtype, indices in by_dtype.items():
        plan = SharePlan([parameters[index].numel() for index in indices], dtype.itemsize, world_size)
        sections.append(Section(dtype, indices, plan, start_byte))
        start_byte += plan.numel * dtype.itemsize
    return sections


class FlatParameters(ABC):
    """``parameters`` by name, and the flat memory they are views of once ``place`` was called.

    Attributes:
        sections: by dtype.
        has_whole_gradients: whether every rank gets all gradients, not only those of its share.
    """

    has_whole_gradients: bool

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], collective: Collective) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.collective = collective
        self.sections = make_sections(self.parameters, collective.world_size)
        self._addresses: list[int] = []

    @property
    def size_bytes(self) -> int:
        """Of the memory of all sections."""
        last = self.sections[-1]
        return last.start_byte + last.plan.numel * last.dtype.itemsize

    def place(self) -> None:
        """Move the parameters' values to the flat memory; all ranks call it, and rank 0's values count."""
        memory = self._allocate()
        for section in self.sections:
            section.values = torch.frombuffer(
                memory, dtype=section.dtype, count=section.plan.numel, offset=section.start_byte
            )
        views = [
            self._view(memory, section, place) for section in self.sections for place in range(len(section.indices))
        ]
        indices = [index for section in self.sections for index in section.indices]
        with torch.no_grad():
            self._fill([self.parameters[index] for index in indices], views)
        for index, view in zip(indices, views, strict=True):
            self.parameters[index].data = view
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    def _view(self, memory: Any, section: Section, place: int) -> torch.Tensor:
        """The place of a parameter, with a storage of its own: saving a view would save all of its storage."""
        parameter = self.parameters[section.indices[place]].detach()
        if parameter.numel() == 0:
            return parameter
        start_byte = section.start_byte + section.plan.offsets[place] * section.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=section.dtype, count=parameter.numel(), offset=start_byte)
        return view_like(flat, 0, parameter)

    def check(self) -> None:
        """Raise where a parameter no longer is in the flat memory."""
        for name, parameter, address in zip(self.names, self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ReductionError(
                    f"rank {self.collective.rank}: parameter {name!r} was given other memory (parameter.data = ...,"
                    " or a conversion of the module) since psengine.DistributedOptimizer was made, and a sharded"
                    " optimizer steps the memory from before. Fix: write values in place, parameter.data.copy_(...);"
                    " or convert the module before it is wrapped."
                )

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.numel() and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
        self._addresses = []

    def _fill(self, values: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        """Copy the parameters' values to their places."""
        for value, view in zip(values, views, strict=True):
            view.copy_(value)

    @abstractmethod
    def _allocate(self) -> Any:
        """A buffer of ``size_bytes`` zeros."""

    @abstractmethod
    def begin_step(self) -> None:
        """Return when this rank may write its blocks."""

    @abstractmethod
    def end_step(self) -> None:
        """After this rank wrote its blocks: return when all are, and can be read here."""

    @abstractmethod
    def make_slot(self, name: str) -> None:
        """Before the first use of a slot of the optimizer's state; all ranks call it."""

    @abstractmethod
    def slot_of(self, name: str, section: Section, block: int) -> torch.Tensor:
        """The memory of a block's slot: zeros."""

    @abstractmethod
    def whole_slot(self, name: str, section: Section, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """A slot of all blocks, flat like ``section.values``; ``own``: those of this rank's blocks."""

    @abstractmethod
    def settle_state(self) -> None:
        """State was loaded: return when other ranks may read it."""

    @abstractmethod
    def most_of(self, counts: Sequence[float]) -> list[float]:
        """The largest of the ranks' counts, one by one."""


class SharedParameters(FlatParameters):
    """One memory for all ranks of a host. Between two steps nobody writes it."""

    has_whole_gradients = True

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], collective: Collective, memory: Any) -> None:
        super().__init__(parameters, collective)
        self._memory = memory
        self._slots: dict[str, list[torch.Tensor]] = {}

    @override
    def _allocate(self) -> Any:
        return self._memory

    @override
    def _fill(self, values: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        if self.collective.rank == 0:
            super()._fill(values, views)
        self.collective.barrier().wait()

    @override
    def begin_step(self) -> None:
        """Other ranks may still read the weights, until they step too."""
        self.collective.barrier().wait()

    @override
    def end_step(self) -> None:
        self.collective.barrier().wait()

    @override
    def make_slot(self, name: str) -> None:
        if name not in self._slots:
            memory = self.collective.common_memory(self.size_bytes)
            self._slots[name] = [
                torch.frombuffer(memory, dtype=s.dtype, count=s.plan.numel, offset=s.start_byte) for s in self.sections
            ]

    @override
    def slot_of(self, name: str, section: Section, block: int) -> torch.Tensor:
        return section.block_of(self._slots[name][self.sections.index(section)], block)

    @override
    def whole_slot(self, name: str, section: Section, own: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._slots[name][self.sections.index(section)]

    @override
    def settle_state(self) -> None:
        self.collective.barrier().wait()

    @override
    def most_of(self, counts: Sequence[float]) -> list[float]:
        return list(counts)  # gradients are whole, so every rank counts alike


class GatheredParameters(FlatParameters):
    """A memory for each rank, and messages."""

    has_whole_gradients = False

    @override
    def _allocate(self) -> Any:
        return mmap.mmap(-1, max(self.size_bytes, LINE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @override
    def _fill(self, values: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        super()._fill(values, views)
        if self.collective.world_size > 1:
            flats = [section.values for section in self.sections]
            self.collective.broadcast(flats, 0, what="parameters").wait()

    @override
    def begin_step(self) -> None:
        """Nobody else reads this rank's weights."""

    @override
    def end_step(self) -> None:
        if self.collective.world_size == 1:
            return
        works = []
        for section in self.sections:
            own = section.by_rank(section.values)[:, self.collective.rank].contiguous()
            gathered = own.new_empty((self.collective.world_size, *own.shape))
            works.append((section, gathered, self.collective.all_gather(gathered, own, what="stepped parameters")))
        for section, gathered, work in works:
            work.wait()
            section.by_rank(section.values).copy_(gathered.transpose(0, 1))

    @override
    def make_slot(self, name: str) -> None:
        """Blocks make their own."""

    @override
    def slot_of(self, name: str, section: Section, block: int) -> torch.Tensor:
        return torch.zeros(section.plan.block_numel, dtype=section.dtype)

    @override
    def whole_slot(self, name: str, section: Section, own: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.empty_like(section.values)
        what = f"optimizer state {name} (every rank calls optimizer.state_dict())"
        gathered = self.collective.gather(torch.stack(list(own)), what=what)
        section.by_rank(whole).copy_(torch.stack(gathered, dim=1))
        return whole

    @override
    def settle_state(self) -> None:
        """Nobody reads it elsewhere."""

    @override
    def most_of(self, counts: Sequence[float]) -> list[float]:
        what = "optimizer step counts (every rank calls optimizer.state_dict())"
        gathered = self.collective.gather(torch.tensor(counts, dtype=torch.float64), what=what)
        most: list[float] = torch.stack(gathered).amax(0).tolist()
        return most


def flat_parameters(parameters: Mapping[str, torch.nn.Parameter], collective: Collective) -> FlatParameters:
    """Place ``parameters`` in the memory that serves these ranks; all ranks call it.

    Raises:
        ConfigurationError: parameters that native DDP's mixed precision converts in each forward.
        SharedMemoryUnavailableError: a rank has no memory left.
    """
    for name, parameter in parameters.items():
        if hasattr(parameter, "_mp_param"):
            raise ConfigurationError(
                f"mixed_precision gives parameters other memory in every forward (expected mixed_precision=None with"
                f" shard_optimizer=true, got it for {name!r}). Fix: leave it out and use torch.autocast; or"
                " strategy='sync'."
            )
    gathered = GatheredParameters(parameters, collective)
    memory = collective.common_memory(gathered.size_bytes) if collective.world_size > 1 else None
    flat = gathered if memory is None else SharedParameters(parameters, collective, memory)
    flat.place()
    return flat


def in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a ``tensor`` like ``parameter``, which is dense, in the order of the parameter's memory: a view
    where both have the same strides, else a copy.
    """
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor.view(-1)
    if tensor.stride() != parameter.stride():
        aligned = torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype)
        tensor = aligned.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
