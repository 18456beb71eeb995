"""The optimizer that servers run in this process's stead: checks, hooks of its step, and its state.

Pushes carry gradients and hyperparameters; they carry neither the list of parameters nor
the optimizer's state, so a step after a change of those is refused.

Servers keep flat slots, one element for each of a chunk's; torch keeps tensors by parameter. Slot names are torch's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import SLOTS, optimizer_name, slot_names, wire_groups
from psengine.protocol.layout import ChunkSpec, Segment
from psengine.strategies.step_hooks import ReplacedOptimizer

# torch counts steps in a tensor for these; SGD does not count.
_COUNTS_STEPS = ("Adam", "AdamW", "Adagrad", "RMSprop")


class ServerOptimizer(ReplacedOptimizer):
    """The distributed ``optimizer``, as the servers were told of it.

    Args:
        optimizer: the distributed one.
        parameters: name to parameter, for those whose gradients reach the servers.
        session: the worker's.
        specs: the chunks that the optimizer trains, configured with a run for each segment.
        strategy: its name, for messages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        session: WorkerSession,
        specs: Sequence[ChunkSpec],
        strategy: str,
    ) -> None:
        super().__init__(optimizer, set(parameters.values()), strategy)
        self._parameters = parameters
        self._session = session
        self._specs = specs
        self._note_state()

    def _note_state(self) -> None:
        self._state = self.optimizer.state
        self._state_count = len(self._state)

    # ---- checks ------------------------------------------------------------------------------------------------

    @override
    def check(self) -> None:
        """As ``ReplacedOptimizer.check``; also for a state that is not the servers' copy any more."""
        super().check()
        state = self.optimizer.state
        if state is not self._state:
            difference = "expected the mapping that psengine knows, got another"
        elif len(state) < self._state_count:
            difference = f"expected that of {self._state_count} parameters, got {len(state)}"
        else:
            return
        raise ConfigurationError(
            f"optimizer.state is only a copy of the servers', which do not see it change ({difference}). Fix: to set"
            " it, optimizer.load_state_dict(...); to reset it, with {'state': {}, 'param_groups':"
            " optimizer.state_dict()['param_groups']}."
        )

    # ---- state -------------------------------------------------------------------------------------------------

    def fetch_state(self) -> None:
        """Overwrite ``optimizer.state`` by the servers'; parameters that were never stepped get none."""
        name, slots, landed = self._slots(())
        requests = {(key, slot): self._session.pull(key, [flat], slot=slot) for (key, slot), flat in landed.items()}
        # Slots that are switched off (a momentum of 0), if the servers have them: torch keeps them, and saves them.
        asked = {
            (s.key, slot): self._session.pull(s.key, slot=slot)
            for s in self._specs
            for slot in SLOTS[name]
            if slot not in slots
        }
        wait_all([*requests.values(), *asked.values()])
        found = {place: request.wait().payload for place, request in asked.items()}
        kept = {slot for (_, slot), values in found.items() if values is not None}
        if kept:
            name, slots, flats = self._slots(kept)
            landed = flats | {place: values for place, values in found.items() if values is not None} | landed
            requests |= {place: request for place, request in asked.items() if place[1] in kept}
        # All slots of a chunk have the same step counts.
        steps_of = {key: list(request.wait().body.get("steps", [])) for (key, _), request in requests.items()}
        for spec, segment, index, start in self._segments() if requests else ():
            parameter = self._parameters[segment.name]
            steps = steps_of[spec.key]
            if segment.start == 0:
                self.optimizer.state.pop(parameter, None)
            if not steps or not steps[index]:
                continue
            state: dict[str, Any] = self.optimizer.state[parameter]
            if name in _COUNTS_STEPS:
                state["step"] = torch.tensor(steps[index], dtype=torch.float32)
            for slot in slots:
                if segment.start == 0 or slot not in state:
                    state[slot] = torch.empty_strided(
                        segment.shape, segment.strides, dtype=parameter.dtype, device=parameter.device
                    ).zero_()
                _elements(state[slot], segment).copy_(landed[spec.key, slot][start : start + segment.numel])
        self._note_state()

    def store_state(self, *, counts: bool) -> None:
        """Overwrite the servers' state by this worker's ``optimizer.state``, if it counts; without state a parameter
        was never stepped.
        """
        self._note_state()
        if not counts:
            return
        # Also of slots that are switched off.
        found = {slot for state in self.optimizer.state.values() for slot in state if state[slot] is not None}
        name, slots, flats = self._slots(found)
        steps_of = {spec.key: [0.0] * len(spec.segments) for spec in self._specs}
        for spec, segment, index, start in self._segments():
            state = self.optimizer.state.get(self._parameters[segment.name], {})
            if not state:
                continue
            steps_of[spec.key][index] = float(state.get("step", 1.0))
            for slot in slots:
                if state.get(slot) is not None:
                    flats[spec.key, slot][start : start + segment.numel].copy_(_elements(state[slot], segment))
                elif name == "SGD":
                    steps_of[spec.key][index] = 0.0
        stores = flats.items()
        wait_all([self._session.store(key, flat, slot=slot, steps=steps_of[key]) for (key, slot), flat in stores])

    def _slots(self, more: Collection[str]) -> tuple[str, tuple[str, ...], dict[tuple[int, str], torch.Tensor]]:
        """The optimizer's name, its slots with those of ``more``, and by (key, slot) zeros for a chunk's slot."""
        name = optimizer_name(self.optimizer)
        needed = slot_names(name, wire_groups(self.optimizer))
        slots = tuple(slot for slot in SLOTS[name] if slot in needed or slot in more)
        flats = {(s.key, slot): torch.zeros(s.numel, dtype=s.dtype) for s in self._specs for slot in slots}
        return name, slots, flats

    def _segments(self) -> Iterator[tuple[ChunkSpec, Segment, int, int]]:
        """(chunk, segment, index of its run, its first element in the chunk) of all segments."""
        for spec in self._specs:
            start = 0
            for index, segment in enumerate(spec.segments):
                yield spec, segment, index, start
                start += segment.numel


def _elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's elements of a tensor like the parameter, in the parameter's memory order."""
    if tuple(tensor.stride()) != segment.strides:
        aligned = torch.empty_strided(segment.shape, segment.strides, dtype=tensor.dtype, device=tensor.device)
        aligned.copy_(tensor)
        tensor = aligned
    return tensor.as_strided((tensor.numel(),), (1,))[segment.start : segment.start + segment.numel]
