"""A server-side optimizer's state, as ``optimizer.state`` here: what ``state_dict`` shows and ``load_state_dict`` sets.

Servers keep flat slots, one element for each of a chunk's; torch keeps tensors by parameter. Slot names are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import optimizer_name, slot_names, wire_groups
from psengine.protocol.layout import ChunkSpec, Segment
from psengine.tensors.bucket import is_non_overlapping_and_dense

# torch counts steps in a tensor for these; SGD does not count.
_COUNTS_STEPS = ("Adam", "AdamW", "Adagrad", "RMSprop")


@dataclass(frozen=True, kw_only=True)
class ServerOptimizerState:
    """The state of one optimizer, at the servers and here.

    Attributes:
        session: the worker's.
        optimizer: whose ``state`` is read and written.
        parameters: name to parameter.
        specs: the chunks that the optimizer trains, configured with a run for each segment.
    """

    session: WorkerSession
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.nn.Parameter]
    specs: Sequence[ChunkSpec]

    def _slots(self) -> tuple[str, ...]:
        return slot_names(optimizer_name(self.optimizer), wire_groups(self.optimizer))

    def _zeros(self, slots: Sequence[str]) -> dict[tuple[int, str], torch.Tensor]:
        """(key, slot) -> a slot of a chunk: flat, on the CPU."""
        return {(spec.key, slot): torch.zeros(spec.numel, dtype=spec.dtype) for spec in self.specs for slot in slots}

    def fetch(self) -> None:
        """Overwrite ``optimizer.state`` by the servers'; parameters that were never stepped get none."""
        name, slots = optimizer_name(self.optimizer), self._slots()
        landed = self._zeros(slots)
        if not landed:
            return
        requests = {(key, slot): self.session.pull(key, [flat], slot=slot) for (key, slot), flat in landed.items()}
        wait_all(list(requests.values()))
        # A chunk's slots all say the same.
        steps_of = {key: list(request.wait().body.get("steps", [])) for (key, _), request in requests.items()}
        for spec, segment, index, start in self._segments():
            parameter = self.parameters[segment.name]
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

    def store(self) -> None:
        """Overwrite the servers' state by ``optimizer.state``; a parameter without state counts as never stepped."""
        name, slots = optimizer_name(self.optimizer), self._slots()
        steps_of = {spec.key: [0.0] * len(spec.segments) for spec in self.specs}
        flats = self._zeros(slots)
        for spec, segment, index, start in self._segments():
            state = self.optimizer.state.get(self.parameters[segment.name], {})
            if not state:
                continue
            steps_of[spec.key][index] = float(state.get("step", 1.0))
            for slot in slots:
                if state.get(slot) is not None:
                    flats[spec.key, slot][start : start + segment.numel].copy_(_elements(state[slot], segment))
                elif name == "SGD":
                    steps_of[spec.key][index] = 0.0
        wait_all([self.session.store(key, flat, slot=slot, steps=steps_of[key]) for (key, slot), flat in flats.items()])

    def _segments(self) -> Iterator[tuple[ChunkSpec, Segment, int, int]]:
        """(chunk, segment, index of its run, its first element in the chunk) of all segments."""
        for spec in self.specs:
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
    assert is_non_overlapping_and_dense(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))[segment.start : segment.start + segment.numel]
