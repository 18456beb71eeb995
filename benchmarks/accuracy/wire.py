"""How long a step of "sync" takes on links of a given rate: bytes that a host sends, divided by the rate."""

from __future__ import annotations

import statistics
import time

import torch
from accuracy.tasks import Task

from psengine.codecs.registry import resolve_codec, row_numel

FLOAT_BYTES = 4
WARM_UP_STEPS, TIMED_STEPS = 10, 40


def sent_bytes(task: Task, strategy: str, hosts: int) -> float:
    """Bytes of payload that each of ``hosts`` hosts sends in a step of ``strategy``, "sync" with or without a codec."""
    codec = resolve_codec(strategy.partition("compress=")[2].replace(",", ":", 1) or None)
    parameters = list(task.model().parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    pieces = [(parameter.numel(), row_numel(parameter.shape, parameter.stride())) for parameter in parameters]
    payload_bytes = codec.for_pieces(pieces).payload_spec(numel, torch.float32).size_bytes
    cannot_be_cut = codec.slice_numel is None and codec.summed_dtype(torch.float32) is None
    if cannot_be_cut and not codec.is_summed_in_rounds and not codec.is_identity:
        return (hosts - 1) * payload_bytes  # an all-gather of whole payloads
    # An all-reduce, or an all-to-all and an all-gather of slices.
    return 2 * (hosts - 1) / hosts * payload_bytes


def compute_s(task: Task, batch_size: int) -> float:
    """Median CPU time of forward, backward and step without any exchange, on one core of this machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, generator = task.model(), torch.Generator().manual_seed(0)
    optimizer, seconds = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        begin_s = time.thread_time()
        optimizer.zero_grad()
        task.loss(model, batch_size, generator).backward()
        optimizer.step()
        seconds.append(time.thread_time() - begin_s)
    return statistics.median(seconds[WARM_UP_STEPS:])
