"""A server-side optimizer's state, as ``optimizer.state`` here: what ``state_dict`` shows and ``load_state_dict`` sets.

Servers keep flat slots, one element for each of a chunk's; torch keeps tensors by parameter. Slot names are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from psengine.buckets import is_non_overlapping_and_dense
from psengine.client.operation import wait_all
from psengine.client.session import WorkerSession
from psengine.protocol.hyperparameters import optimizer_name, slot_names, wire_groups
from psengine.protocol.layout import ChunkSpec, Segment
from psengine.strategies.chunked_replica import ChunkedReplica

# torch counts steps in a tensor for these; SGD does not count.
_COUNTS_STEPS = ("Adam", "AdamW", "Adagrad", "RMSprop")


def fetch(
    session: WorkerSession,
    chunks: ChunkedReplica,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    trained: Set[int],
) -> None:
    """Overwrite ``optimizer.state`` by the servers'; parameters that were never stepped get none."""
    name = optimizer_name(optimizer)
    specs = [spec for spec in chunks.specs if spec.key in trained]
    landed: dict[tuple[int, str], torch.Tensor] = {}
    requests = {}
    slots = slot_names(name, wire_groups(optimizer))
    for slot in slots:
        for spec in specs:
            flat = landed[spec.key, slot] = torch.zeros(spec.numel, dtype=spec.dtype)
            requests[spec.key, slot] = session.pull(spec.key, [flat], slot=slot)
    steps_of: dict[int, list[float]] = {}
    if not requests:
        return
    wait_all(list(requests.values()))
    for (key, _), request in requests.items():
        steps_of[key] = list(request.wait().body.get("steps", []))
    for spec, segment, index, start in _segments(specs):
        parameter = parameters[segment.name]
        steps = steps_of[spec.key]
        if segment.start == 0:
            optimizer.state.pop(parameter, None)
        if not steps or not steps[index]:
            continue
        state: dict[str, Any] = optimizer.state[parameter]
        if name in _COUNTS_STEPS:
            state["step"] = torch.tensor(steps[index], dtype=torch.float32)
        for slot in slots:
            if segment.start == 0 or slot not in state:
                state[slot] = torch.empty_strided(
                    segment.shape, segment.strides, dtype=parameter.dtype, device=parameter.device
                ).zero_()
            _elements(state[slot], segment).copy_(landed[spec.key, slot][start : start + segment.numel])


def store(
    session: WorkerSession,
    chunks: ChunkedReplica,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    trained: Set[int],
) -> None:
    """Overwrite the servers' state by ``optimizer.state``; a parameter without state counts as never stepped."""
    name = optimizer_name(optimizer)
    specs = [spec for spec in chunks.specs if spec.key in trained]
    steps_of: dict[int, list[float]] = {spec.key: [0.0] * len(spec.segments) for spec in specs}
    flats: dict[tuple[int, str], torch.Tensor] = {}
    slots = slot_names(name, wire_groups(optimizer))
    for spec in specs:
        for slot in slots:
            flats[spec.key, slot] = torch.zeros(spec.numel, dtype=spec.dtype)
    for spec, segment, index, start in _segments(specs):
        state = optimizer.state.get(parameters[segment.name], {})
        if not state:
            continue
        steps_of[spec.key][index] = float(state.get("step", 1.0))
        for slot in slots:
            if state.get(slot) is not None:
                flats[spec.key, slot][start : start + segment.numel].copy_(_elements(state[slot], segment))
            elif name == "SGD":
                steps_of[spec.key][index] = 0.0
    wait_all([session.store(key, flat, slot=slot, steps=steps_of[key]) for (key, slot), flat in flats.items()])


def _segments(specs: list[ChunkSpec]) -> Iterator[tuple[ChunkSpec, Segment, int, int]]:
    """(chunk, segment, index of its run, its first element in the chunk) of all segments."""
    for spec in specs:
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
