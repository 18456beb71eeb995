"""What a worker has at a step's beginning, and how another one gets it, over their collective.

source    document ──► all ranks      tensors, in pieces ──► all ranks
taker                                 they land in memory of its own
others    take part, because broadcasts are everybody's, and drop what they get
all       barrier; then a taker checks everything, installs it at once, and is as good a source as any
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ArgumentTypeError, ConfigurationError, ReplicaMismatchError
from psengine.strategies.servers.worker_state import OptimizerState, OptimizerStates
from psengine.tensors.documents import Form, Parts, put_together, take_apart

if TYPE_CHECKING:
    from psengine.strategies.elastic.sync import SyncVirtualWorkers

HOST = torch.device("cpu")
# So that workers that drop what they get have little of it at once; and so many pieces are under way.
PIECE_BYTES = 1024 * 1024
PIECES = 16


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A worker's state at a step's beginning.

    Attributes:
        completed: steps until then.
        progress: by model, what else there is.
        tensors: name to parameter or buffer, of all models.
        optimizers: as the fields of ``OptimizerState``, in the order in which they were made.
        registered: name to state.
    """

    completed: int
    progress: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    registered: dict[str, Any]


class StateRegistry:
    """What belongs to the state of this worker.

    Args:
        parts: its models.
    """

    def __init__(self, parts: Sequence[SyncVirtualWorkers]) -> None:
        self._parts = parts
        self._optimizers = OptimizerStates()
        self._registered: dict[str, Any] = {}

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` steps parameters of the models."""
        self._optimizers.bind(optimizer, self._names())

    def register(self, name: str, holder: Any) -> None:
        """The state of ``holder``, such as a scheduler or a ``GradScaler``, belongs to this worker's, under ``name``.

        Raises:
            ArgumentTypeError: it has no ``state_dict`` and ``load_state_dict``, or a state that cannot travel.
            ConfigurationError: the name is taken.
        """
        if not all(callable(getattr(holder, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ArgumentTypeError(
                f"a registered state has state_dict and load_state_dict (got {type(holder).__name__} as {name!r})"
            )
        if self._registered.get(name, holder) is not holder:
            raise ConfigurationError(f"each registered state has a name of its own (got a second {name!r})")
        take_apart(holder.state_dict(), name)
        self._registered[name] = holder

    def check_complete(self) -> None:
        """Raise ConfigurationError where a worker that joins would lack a state that decides bits."""
        optimizers = self._optimizers.alive()
        if not optimizers and not self._registered:
            raise ConfigurationError(
                "a worker that joins takes the optimizer's state from another one (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model), got no optimizer of this model)"
            )
        is_scheduled = any("initial_lr" in group for one in optimizers for group in one.param_groups)
        if is_scheduled and not self._registered:
            raise ConfigurationError(
                "a worker that joins would begin the learning rate's schedule anew (expected a registered state, got"
                " none). Fix: model.register_state('scheduler', scheduler) before the first epoch."
            )

    def facts(self) -> dict[str, str]:
        """What all workers must have alike, by name: bits depend on it, or states would not fit."""
        own = self.snapshot(0)
        described = json.dumps(list(_describe(replace(own, optimizers=[], registered={})).items())).encode()
        optimizers = [str(OptimizerState(one["kind"], one["parameters"])) for one in own.optimizers]
        return {
            "version of torch": str(torch.__version__),
            "CPU capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "optimizers": ", ".join(optimizers) or "none",
            "registered states": ", ".join(sorted(own.registered)) or "none",
            "model": f"{len(own.tensors)} parameters and buffers, digest {hashlib.sha256(described).hexdigest()[:16]}",
        }

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def snapshot(self, completed: int) -> Snapshot:
        """Return the state of this worker as the step began that is under way, or as it is between two steps.

        Its tensors are no copies, but for buffers.
        """
        names = self._names()
        return Snapshot(
            completed=completed,
            progress=[part.progress() for part in self._parts],
            tensors=self._tensors() | _named([part.beginning().buffers for part in self._parts]),
            optimizers=[
                vars(replace(OptimizerState.of(one, names), state_dict=one.state_dict()))
                for one in self._optimizers.alive()
            ],
            registered={name: holder.state_dict() for name, holder in self._registered.items()},
        )

    def install(self, snapshot: Snapshot, whose: str) -> None:
        """Go on from ``snapshot``, of which this worker keeps tensors. Mutates parameters and buffers in place.

        Raises:
            ReplicaMismatchError: the state of ``whose`` is not one of this model and its optimizers; nothing has
                changed.
        """
        expected, got = _describe(snapshot), _describe(self.snapshot(0))
        for what in expected | got:
            if expected.get(what) != got.get(what):
                raise ReplicaMismatchError(
                    f"the state of {whose} does not fit this worker's model (expected {what} to be"
                    f" {expected.get(what, 'absent')}, got {got.get(what, 'absent')}). Fix: build them alike."
                )
        own = self._tensors()
        with torch.no_grad():
            for name, tensor in snapshot.tensors.items():
                own[name].copy_(tensor)
        for optimizer, one in zip(self._optimizers.alive(), snapshot.optimizers, strict=True):
            optimizer.load_state_dict(one["state_dict"])
            _keep_dtypes(optimizer, one["state_dict"])
        for name, holder in self._registered.items():
            holder.load_state_dict(snapshot.registered[name])
        for part, progress in zip(self._parts, snapshot.progress, strict=True):
            part.take_progress(progress)

    # ---- between workers -------------------------------------------------------------------------------------------

    def transfer(self, collective: Collective, source_rank: int, completed: int, *, has_state: bool) -> None:
        """Bring the state of ``source_rank``, after ``completed`` steps, to ranks without one; all ranks call it.

        Raises:
            CollectiveError: a rank was lost; nothing of this worker has changed.
            ReplicaMismatchError: see ``install``.
        """
        is_source = collective.rank == source_rank
        parts = take_apart(vars(self.snapshot(completed))) if is_source else Parts(None, {})
        sent = json.dumps(parts.document).encode()
        text = collective.broadcast_bytes(sent, source_rank, HOST, what="description of a worker's state")
        tensors = list(parts.tensors.values())

        def allocate(_name: str, form: Form) -> torch.Tensor:
            tensors.append(form.empty("meta" if has_state else HOST))
            return tensors[-1]

        arriving = None if is_source else Snapshot(**put_together(json.loads(text), allocate))
        pieces = _pieces(tensors)
        for first in range(0, len(pieces), PIECES):
            under_way = pieces[first : first + PIECES]
            landings = [torch.empty_like(piece, device=HOST) if piece.is_meta else piece for piece in under_way]
            collective.broadcast(landings, source_rank, what="a worker's state").wait()
        collective.barrier().wait()
        if arriving is not None and not has_state:
            self.install(arriving, "the others")

    # ---- what this worker has --------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        replicas = [part.replica for part in self._parts]
        return _named([{**one.state, **one.parameters, **one.buffers()} for one in replicas])

    def _names(self) -> dict[torch.Tensor, str]:
        return {tensor: name for name, tensor in self._tensors().items()}


def _named(models: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of all models by name; those of another than the first begin with its number."""
    numbered = enumerate(models)
    return {f"{number}/{name}" if number else name: t for number, model in numbered for name, t in model.items()}


def _describe(snapshot: Snapshot) -> dict[str, str]:
    """What two workers must have alike, by place."""
    described = {
        f"tensor {index} of the model": f"{name!r} with shape {tuple(tensor.shape)} and {tensor.dtype}"
        for index, (name, tensor) in enumerate(snapshot.tensors.items())
    }
    for number, one in enumerate(snapshot.optimizers):
        described[f"optimizer {number}"] = one["kind"]
        for group, names in enumerate(one["parameters"]):
            for index, name in enumerate(names):
                described[f"parameter {index} of group {group} of optimizer {number}"] = repr(name)
    return described | {f"the registered state {name!r}": "registered" for name in sorted(snapshot.registered)}


def _keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Undo what ``load_state_dict`` does to tensors of another dtype than their parameter: it converts them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in state_dict["state"].items():
        state = optimizer.state[parameters[index]]
        for name, value in saved.items():
            loaded = state.get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                state[name] = value


def _pieces(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of dense ``tensors`` as flat pieces of at most ``PIECE_BYTES``."""
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors if tensor.numel()]
    return [piece for flat in flats for piece in flat.split(PIECE_BYTES // flat.element_size())]
