"""The optimizer that servers run in this process's stead: checks, and its state.

Pushes carry gradients and hyperparameters; they carry neither the list of parameters nor
the optimizer's state, so a step after a change of those is refused.

Servers keep flat slots, one element for each of a chunk's; torch keeps tensors by parameter. Slot names are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError
from psengine.kernels.ops import in_memory_order
from psengine.parameter_server.client.operation import Request, wait_all
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import SLOTS, optimizer_name, slot_names, wire_groups
from psengine.protocol.layout import ChunkSpec, Segment

# torch counts steps in a tensor for these; SGD does not count.
_COUNTS_STEPS = ("Adam", "AdamW", "Adagrad", "RMSprop")


@dataclass(eq=False)
class ServerState:
    """The state of ``optimizer``, which servers keep.

    Attributes:
        optimizer: the servers were told of it.
        parameters: name to parameter, for those that servers step.
        session: the worker's.
        specs: the chunks that the optimizer trains, configured with a run for each segment.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]
    session: WorkerSession
    specs: Sequence[ChunkSpec]

    def fetch(self) -> None:
        """Overwrite ``optimizer.state`` by the servers'; parameters that were never stepped get none.

        Slots that are switched off (a momentum of 0) come too, if the servers have them: torch keeps and saves them.
        """
        name = optimizer_name(self.optimizer)
        requests = [[self.session.pull(spec.key, slot=slot) for slot in SLOTS[name]] for spec in self.specs]
        wait_all([request for pulls in requests for request in pulls])
        for spec, pulls in zip(self.specs, requests, strict=True):
            answers = {slot: request.wait() for slot, request in zip(SLOTS[name], pulls, strict=True)}
            start = 0
            for index, segment in enumerate(spec.segments):
                parameter, places = self.parameters[segment.name], slice(start, start + segment.numel)
                start += segment.numel
                if segment.start == 0:
                    self.optimizer.state.pop(parameter, None)
                for slot, answer in answers.items():
                    steps = answer.body["steps"][index]
                    if not steps or answer.payload is None:
                        continue
                    state = self.optimizer.state[parameter]
                    if name in _COUNTS_STEPS:
                        state["step"] = torch.tensor(steps, dtype=torch.float32)
                    if slot not in state:
                        state[slot] = torch.empty_strided(
                            segment.shape, segment.strides, dtype=parameter.dtype, device=parameter.device
                        ).zero_()
                    _elements(state[slot], segment).copy_(answer.payload[places])

    def store(self) -> None:
        """Overwrite the servers' state by ``optimizer.state``; without state a parameter was never stepped."""
        name = optimizer_name(self.optimizer)
        # Also of slots that are switched off.
        found = {slot for state in self.optimizer.state.values() for slot in state if state[slot] is not None}
        slots = found.union(slot_names(name, wire_groups(self.optimizer))).intersection(SLOTS[name])
        requests: list[Request] = []
        for spec in self.specs:
            flats = {slot: torch.zeros(spec.numel, dtype=spec.dtype) for slot in slots}
            steps: list[float] = []
            start = 0
            for segment in spec.segments:
                state = self.optimizer.state.get(self.parameters[segment.name], {})
                places = slice(start, start + segment.numel)
                start += segment.numel
                steps.append(float(state.get("step", state.get("momentum_buffer") is not None)))
                for slot, flat in flats.items():
                    if state.get(slot) is not None:
                        flat[places].copy_(_elements(state[slot], segment))
            requests += [self.session.store(spec.key, flat, slot=slot, steps=steps) for slot, flat in flats.items()]
        wait_all(requests)


@dataclass(eq=False)
class ServerOptimizer(ServerState):
    """The distributed ``optimizer``, whose step never runs here, as the servers were told of it."""

    def __post_init__(self) -> None:
        self._groups = self._group_ids()
        known = {id(parameter) for parameter in self.parameters.values()}
        self._untrained = [
            (group_index, index, parameter)
            for group_index, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in known
        ]
        # A fused optimizer's kernel would divide by GradScaler's scale, which servers do not know: so the scaler itself
        # divides, and leaves out steps with gradients that are not finite.
        self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self.note_state()

    def note_state(self) -> None:
        """``optimizer.state`` is a copy of the servers'."""
        self._state = self.optimizer.state
        self._state_count = len(self._state)

    @override
    def fetch(self) -> None:
        super().fetch()
        self.note_state()

    def _group_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def check(self) -> None:
        """See that the servers' step is this optimizer's.

        Raises:
            ConfigurationError: its parameters changed, its state is not the servers' copy any more, or there is a
                gradient that would not be applied.
        """
        groups, state = self._group_ids(), self.optimizer.state
        if groups != self._groups:
            expected, got = ([len(group) for group in known] for known in (self._groups, groups))
            raise ConfigurationError(
                "strategy 'async' trains the parameters that the optimizer had when"
                " psengine.DistributedOptimizer was made, each in its group (expected the same ones, in groups of"
                f" {expected}, got others, in groups of {got}). Fix: give it all of them before, and freeze some"
                " (requires_grad_(False) after wrapping with find_unused_parameters=True). Or strategy='sync'."
            )
        if state is not self._state or len(state) < self._state_count:
            raise ConfigurationError(
                "optimizer.state is only a copy of the servers', which do not see it change (expected the mapping that"
                f" psengine knows, of {self._state_count} parameters, got another, or fewer: {len(state)}). Fix: set it"
                " by optimizer.load_state_dict(...); a 'state' of {} resets it."
            )
        for group_index, index, parameter in self._untrained:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) has a gradient that was"
                    " not exchanged: when the model was wrapped it was frozen, ignored, or not there yet (expected grad"
                    " = None). Fix: freeze it after wrapping with find_unused_parameters=True; wrap after"
                    " load_state_dict(..., assign=True); or give it an optimizer of its own."
                )
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:  # for torch's fused kernels, which divide by it
            raise ConfigurationError(
                "strategy 'async' does not divide gradients by optimizer.grad_scale (expected it unset, got"
                f" {float(scale)}). Fix: divide the gradients before step(), or let a torch.amp.GradScaler do it."
            )


def _elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's elements of a tensor like the parameter, in the parameter's memory order."""
    end = segment.start + segment.numel
    return in_memory_order(tensor, segment.shape, segment.strides)[segment.start : end]
