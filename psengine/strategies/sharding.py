"""Strategy "sync:shard_optimizer=true": each rank steps its range of the parameters (ZeRO stage 1).

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054. Gradients are those of "sync", whole on every rank. In a step
the user's own optimizer gets this rank's pieces of the parameters in their place, with their parts of the gradients::

    hooks before ─ closure ─ pieces in ─ the optimizer's own step ─ pieces out ─ ranks share their ranges ─ hooks after

The bits are those of "sync" with the plain optimizer, because each element is stepped by the same kernels.
"""

from __future__ import annotations

import copy
import mmap
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ReductionError
from psengine.kernels.ops import in_memory_order
from psengine.specification import specified
from psengine.strategies.exchange import Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.step_hooks import take_step
from psengine.strategies.stepping import check_one
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.strategies.verification import verify_replicas
from psengine.tensors.bucket import view_like
from psengine.tensors.objects import from_bytes, to_bytes
from psengine.tensors.share import Share
from psengine.tracing.stall_inspector import SHORTEST_GRACE_S, inspector, stall_after_s

# torch's kernels round the last elements of a tensor, which fill no vector, in another way: so parameters are cut at
# cache lines (also AVX-512's vector), counted from their first element.
LINE_BYTES = 64
# A piece's values, gradient and state stay in a core's second-level cache between the passes of a step.
MAX_PIECE_BYTES = 512 * 1024
# How long a rank that asks for the whole state waits until it asks where the others are.
LATE_S = 10.0
# Of torch's optimizers those that look at more of a parameter than one element at a time, or exchange it themselves.
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "ZeroRedundancyOptimizer")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive elements of one parameter, in the order of its memory, that one rank steps.

    Attributes:
        parameter: the whole.
        start, end: its elements.
        values: they, in the flat memory; 1-D, or 0-D like the parameter.
        owner: the rank.
    """

    parameter: torch.nn.Parameter
    start: int
    end: int
    values: torch.nn.Parameter
    owner: int

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a ``tensor`` like the parameter that are this piece's: a view where strides are equal."""
        elements = in_memory_order(tensor, self.parameter.shape, self.parameter.stride())
        return elements[self.start : self.end].view(self.values.shape)


class FlatParameters:
    """The replica's parameters as views of flat memory, of which each rank steps one range and all ranks see the whole.

    Parameters of one dtype stand one after the other, each at the start of a cache line; a range is W-th of that
    memory::

        parameters  |  0.weight                         |0.bias|..|  1.weight              |..........|   .. unused
        ranges      |  rank 0                         |  rank 1                        |  rank 2      |
        pieces      |  0.weight[:n]                   |[n:]|0.bias|..| 1.weight[:m]    |  [m:]        |

        one host      one memory that every rank maps     barrier ─ each rank steps its range in place ─ barrier
        otherwise     a memory for each rank              each rank steps its range ─ all-gather of the ranges

    Moves ``parameters``, by name, there; all ranks call it, and their values are equal already.

    Attributes:
        pieces: by parameter, its pieces in order.
        own: those of this rank.

    Raises:
        SharedMemoryUnavailableError: a rank has no memory left.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], collective: Collective) -> None:
        self._parameters = parameters
        self._collective = collective
        self.pieces: dict[torch.Tensor, list[Piece]] = {parameter: [] for parameter in parameters.values()}
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters.values():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        ranges_numel = {dtype: self._range_numel(dtype, members) for dtype, members in by_dtype.items()}
        size_bytes = sum(dtype.itemsize * numel for dtype, numel in ranges_numel.items()) * collective.world_size
        memory = collective.common_memory(size_bytes) if collective.world_size > 1 else None
        self._is_shared = memory is not None
        if memory is None:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # By dtype, the ranges of all ranks.
        self._flats: list[torch.Tensor] = []
        start_byte = 0
        with torch.no_grad():
            for dtype, members in by_dtype.items():
                numel = ranges_numel[dtype] * collective.world_size
                flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=start_byte)
                self._place(members, memory, start_byte, flat)
                self._flats.append(flat)
                start_byte += flat.nbytes
        self.own = {
            parameter: [piece for piece in pieces if piece.owner == collective.rank]
            for parameter, pieces in self.pieces.items()
        }
        self._addresses = [parameter.data_ptr() for parameter in parameters.values()]
        self.end_step()

    def _range_numel(self, dtype: torch.dtype, parameters: list[torch.nn.Parameter]) -> int:
        """Elements of a rank's range: whole lines, at least one."""
        line = LINE_BYTES // dtype.itemsize
        lines = sum(-(-parameter.numel() // line) for parameter in parameters)
        return max(1, -(-lines // self._collective.world_size)) * line

    def _place(self, parameters: list[torch.nn.Parameter], memory: Any, start_byte: int, flat: torch.Tensor) -> None:
        """Move parameters of one dtype to their places in ``flat``, which begins at ``start_byte``."""
        line = LINE_BYTES // flat.itemsize
        offset = 0
        for parameter in parameters:
            numel = parameter.numel()
            if numel:
                # A storage of its own: saving a view would save all of its storage.
                own = torch.frombuffer(
                    memory, dtype=flat.dtype, count=numel, offset=start_byte + offset * flat.itemsize
                )
                view = view_like(own, 0, parameter)
                if not self._is_shared or self._collective.rank == 0:
                    view.copy_(parameter)
                parameter.data = view
            self.pieces[parameter] = list(self._cut(parameter, offset, flat))
            offset += -(-numel // line) * line

    def _cut(self, parameter: torch.nn.Parameter, offset: int, flat: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a parameter that begins at ``offset`` in ``flat``; of an empty one, one that is empty."""
        world_size = self._collective.world_size
        range_numel = flat.numel() // world_size
        max_numel = MAX_PIECE_BYTES // flat.itemsize
        shape = parameter.shape if parameter.dim() == 0 else (-1,)
        start = 0
        while True:
            owner = min((offset + start) // range_numel, world_size - 1)
            end = min(parameter.numel(), (owner + 1) * range_numel - offset, start + max_numel)
            values = torch.nn.Parameter(flat[offset + start : offset + end].view(shape))
            yield Piece(parameter, start, end, values, owner)
            start = end
            if start == parameter.numel():
                return

    def check(self) -> None:
        """Raise where a parameter no longer is in the flat memory."""
        for (name, parameter), address in zip(self._parameters.items(), self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ReductionError(
                    f"rank {self._collective.rank}: parameter {name!r} was given other memory since"
                    " psengine.DistributedOptimizer was made, and a sharded optimizer steps the memory from before."
                    " Fix: parameter.data.copy_(...) in place; convert the module before it is wrapped."
                )

    def begin_step(self) -> None:
        """Return when this rank may write its range: in shared memory others may read it until they step too."""
        if self._is_shared:
            self._collective.barrier().wait()

    def end_step(self) -> None:
        """After this rank wrote its range: return when all ranges are written, and can be read here."""
        if self._is_shared:
            self._collective.barrier().wait()
        elif self._collective.world_size > 1:
            what = "stepped parameters"
            parts = [flat.chunk(self._collective.world_size)[self._collective.rank] for flat in self._flats]
            works = [
                self._collective.all_gather(flat, part, what=what)
                for flat, part in zip(self._flats, parts, strict=True)
            ]
            for work in works:
                work.wait()
        # The pieces have version counters of their own: graphs from before are out of date.
        torch.autograd.graph.increment_version(list(self.pieces))

    def release(self) -> None:
        """Give the parameters memory of their own again."""
        for parameter, address in zip(self.pieces, self._addresses, strict=True):
            if parameter.numel() and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()


class SyncShardedOptimizer(SyncAllReduce):
    """Average gradients like "sync"; step a range of the parameters on each rank. Needs ``DistributedOptimizer``.

    Each rank keeps 1/W of the optimizer's state, W being the world size. On one host the parameters live once, in
    memory that all ranks map, from the moment ``psengine.DistributedOptimizer`` is made; nobody writes it between two
    steps.

    Args:
        compress: as for ``SyncAllReduce``.
    """

    # Its flat memory has the parameters that it was bound with.
    capabilities = replace(SyncAllReduce.capabilities, exchanges_thawed=False)

    def __init__(self, *, compress: str | Codec | None = None) -> None:
        super().__init__(compress=compress)
        self._hook_handle: Any = None
        self._forget()

    def _forget(self) -> None:
        self._flat: FlatParameters | None = None
        self._optimizer: Any = None
        self._is_whole, self._fetches = False, 0  # the optimizer's state is, on all ranks; how often that was made

    @property
    @override
    def agreed_options(self) -> dict[str, str]:
        return super().agreed_options | {"shard_optimizer": "true"}

    @override
    def __repr__(self) -> str:
        return specified(self.name, {"shard_optimizer": True} | self._given)

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        for name, parameter in replica.parameters.items():
            got = "sparse gradients" if name in replica.sparse else str(parameter.device)
            if got != "cpu":
                raise ConfigurationError(
                    f"shard_optimizer=true steps parameters on the CPU with dense gradients (expected these, got {got}"
                    f" for {name!r}). Fix: strategy='sync'."
                )
        super().prepare(replica)
        reference = weakref.WeakMethod(self._refuse_other)

        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            method = reference()
            if method is not None:
                method(optimizer)

        self._hook_handle = register_optimizer_step_pre_hook(refuse)

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_one(optimizers, "sync:shard_optimizer=true")
        for optimizer in optimizers:
            _check_elementwise(optimizer)
        super().check_ready(replica, optimizers)

    @override
    def close(self) -> None:
        """The parameters get memory of their own again."""
        if self._hook_handle is not None:
            self._hook_handle.remove()
        if self._flat is not None:
            self._flat.release()
        self._forget()
        super().close()

    def _refuse_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise where ``optimizer`` would step this replica's parameters beside the one that is bound."""
        if self._replica is None or optimizer is self._optimizer:
            return
        exchanged = set(self._replica.parameters.values())
        if any(parameter in exchanged for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigurationError(
                "with shard_optimizer=true each rank steps only its range of the parameters (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model), and its step(), got a step of"
                f" {type(optimizer).__name__}, which would step all of them on every rank)."
            )

    @override
    def begin(self, step: Step) -> Share:
        if step.in_join:
            raise ConfigurationError(
                "join cannot shadow the steps of a sharded optimizer, in which all ranks take part (expected even"
                " inputs). Fix: give every rank as many batches (drop_last=True); or strategy='sync'."
            )
        return super().begin(step)

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters to flat memory; all ranks call it.

        Raises:
            ConfigurationError: an optimizer that cannot be sharded, or a second one.
            ReplicaMismatchError: the ranks' optimizers differ.
        """
        bound = [optimizer] if self._optimizer is None else [self._optimizer, optimizer]
        check_one(bound, "sync:shard_optimizer=true")
        _check_elementwise(optimizer)
        self.collective.connect()
        verify_replicas(self.collective, {}, {}, self.replica.device, _agreed_options(optimizer))
        self._flat = FlatParameters(self.replica.parameters, self.collective)
        self._optimizer = optimizer

    def _placed(self) -> FlatParameters:
        _ = self.replica  # a closed strategy raises
        assert self._flat is not None, "bound"
        return self._flat

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's range; return when all parameters are stepped. All ranks call it."""
        flat, self._is_whole = self._placed(), False
        unhooked_step = _unhooked_step_of(self._optimizer)

        def step_range() -> None:
            flat.check()
            flat.begin_step()
            with self._pieces_in_place(flat.own):
                unhooked_step(self._optimizer)
            flat.end_step()

        return take_step(self._optimizer, closure, step_range)

    @contextmanager
    def _pieces_in_place(self, own: Mapping[torch.Tensor, Sequence[Piece]]) -> Iterator[None]:
        """Let the optimizer have this rank's pieces for parameters, with their gradients and their state."""
        self._cut_state()
        for parameter, pieces in own.items():
            if parameter.grad is not None:
                for piece in pieces:
                    piece.values.grad = piece.part_of(parameter.grad)
        groups = self._optimizer.param_groups
        wholes = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [part for whole in group["params"] for part in _own_values(whole, own)]
        try:
            yield
        finally:
            for group, whole in zip(groups, wholes, strict=True):
                group["params"] = whole
            for pieces in own.values():
                for piece in pieces:
                    piece.values.grad = None

    def _cut_state(self) -> None:
        """Give this rank's pieces their parts of state that is whole, as ``load_state_dict`` leaves it."""
        state = self._optimizer.state
        for parameter, pieces in self._placed().own.items():
            entry = state.pop(parameter, None)
            if entry:  # who looks into a defaultdict leaves an empty one
                for piece in pieces:
                    state[piece.values] = {name: _part_of(value, piece) for name, value in entry.items()}

    @override
    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer.state`` be whole until the next step, put together of all ranks'; all ranks call it.

        Raises:
            ConfigurationError: others wait in another operation.
        """
        flat, collective, state = self._placed(), self.collective, optimizer.state
        if self._is_whole:
            return  # this rank may ask again, alone
        self._fetches += 1
        _meet(collective, self._fetches)
        self._cut_state()
        own = [state.pop(piece.values, None) for pieces in flat.own.values() for piece in pieces]
        for rank in range(collective.world_size):
            what = "optimizer state (every rank calls optimizer.state_dict())"
            content = to_bytes(own) if rank == collective.rank else b""
            entries = from_bytes(collective.broadcast_bytes(content, rank, torch.device("cpu"), what=what))
            pieces = [piece for parameter in flat.pieces.values() for piece in parameter if piece.owner == rank]
            for piece, entry in zip(pieces, entries, strict=True):
                if entry is not None:
                    _write(entry, piece, state[piece.parameter])
        self._is_whole = True

    @override
    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_whole = False


def _meet(collective: Collective, number: int) -> None:
    """Wait at the rendezvous store until all ranks are here: a collective operation would meet those of others.

    Raises:
        ConfigurationError: others wait in another operation.
    """
    liveness = collective.liveness
    if liveness is None or collective.world_size == 1:
        return
    what = "optimizer state (every rank calls optimizer.state_dict())"
    here, began_s = f"optimizer state {number}", time.monotonic()
    ask_s = began_s + LATE_S
    with inspector.watch(liveness, what, stall_after_s()):
        liveness.arrive(here)
        while (absent := liveness.absent(here)) and not liveness.lost_processes():
            time.sleep(min(0.1, 0.001 + (time.monotonic() - began_s) / 10))
            if time.monotonic() < ask_s:
                continue
            question, ask_s = liveness.ask(), time.monotonic() + LATE_S
            time.sleep(SHORTEST_GRACE_S)
            found = liveness.answers(question)
            elsewhere = [
                f"{liveness.describe(rank)} in {found[rank]}" for rank in absent if found.get(rank, what) != what
            ]
            if elsewhere:
                raise ConfigurationError(
                    "optimizer.state_dict() puts the parts of all ranks together under shard_optimizer=true (expected"
                    f" a call on every rank, got one on rank {collective.rank}, and {'; '.join(elsewhere)}). Fix: call"
                    " it on every rank, and save what it returns on the main process."
                )


def _unhooked_step_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """The step of the user's class, without torch's hooks around it: ``take_step`` calls them, with whole parameters.

    torch replaces a class's ``step`` by a wrapper when the first optimizer of the class is made.
    """
    wrappers = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    found: Callable[[Any], Any] = next(step.__wrapped__ for step in wrappers if hasattr(step, "__wrapped__"))
    return found


def _own_values(whole: torch.Tensor, own: Mapping[torch.Tensor, Sequence[Piece]]) -> Sequence[torch.Tensor]:
    """What this rank steps of a parameter: all of one whose gradient is not exchanged, as under "sync"."""
    return [piece.values for piece in own[whole]] if whole in own else [whole]


def _part_of(value: Any, piece: Piece) -> Any:
    """The piece's own copy of a value of its parameter's state: a part of what is shaped like the parameter."""
    if isinstance(value, torch.Tensor) and value.shape == piece.parameter.shape:
        return piece.part_of(value).clone()
    return copy.deepcopy(value)


def _write(entry: dict[str, Any], piece: Piece, whole: dict[str, Any]) -> None:
    """Write the state of a piece to that of its parameter."""
    parameter = piece.parameter
    for name, value in entry.items():
        if isinstance(value, torch.Tensor) and value.shape == piece.values.shape:
            if name not in whole:
                whole[name] = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype)
            piece.part_of(whole[name]).copy_(value)
        else:
            whole[name] = value


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in NOT_ELEMENTWISE and kind.__module__.startswith("torch."):
            raise ConfigurationError(
                "shard_optimizer=true steps parts of parameters (expected an optimizer whose step treats each element"
                f" alike, got {kind.__name__}). Fix: use one such as AdamW; or strategy='sync' without shard_optimizer."
            )


def _agreed_options(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What all ranks have to choose alike, by name: the optimizer's class and hyperparameters that are plain values."""
    options = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options[f"group {number} parameters"] = str(len(group["params"]))
        for name, value in group.items():
            if isinstance(value, (bool, int, float, str, tuple)):
                options[f"group {number} {name}"] = str(value)
    return options
