"""Who measures when: candidates take turns within a round, so that load and clock changes affect all alike."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


def order_of(names: Sequence[T], round_index: int) -> list[T]:
    """The candidates of a round. Who begins rotates, and every other cycle runs backwards: nobody always meets the
    caches as the same neighbour left them.
    """
    start = round_index % len(names)
    order = [*names[start:], *names[:start]]
    return order if round_index // len(names) % 2 == 0 else order[::-1]


def labels_of(candidates: Sequence[str]) -> list[str]:
    """Unique names: a candidate given twice measures the noise, and the second "native" is "native#2"."""
    return [
        f"{name}#{earlier + 1}" if (earlier := candidates[:index].count(name)) else name
        for index, name in enumerate(candidates)
    ]


@dataclass(frozen=True)
class Turn:
    """What a candidate does in its turn: ``run`` is timed, what comes before it is not."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def wall_clock(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def copy_of(moved_bytes: int) -> Callable[[], object]:
    """memcpy of half of them reads and writes that many."""
    half = moved_bytes // 2
    source, target = torch.ones(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)

    def copy(_keep: tuple[torch.Tensor, torch.Tensor] = (source, target)) -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), half)

    return copy


def take_turns(
    candidates: Mapping[str, Turn],
    rounds: int,
    *,
    warm_up: int,
    barrier: Callable[[], object] = lambda: None,
    clock: Callable[[Callable[[], object]], T] = wall_clock,
) -> dict[str, list[T]]:
    """Return what the clock showed for each candidate in each round: this process's seconds. No garbage is collected
    meanwhile.

    Args:
        candidates: in the order of the table.
        rounds: turns of each.
        warm_up: rounds before them that are not timed.
        barrier: lets the ranks begin a turn together.
        clock: calls what it gets, and returns how long that took.
    """
    names = list(candidates)
    shown: dict[str, list[T]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_index in range(-warm_up, rounds):
            for name in order_of(names, round_index):
                turn = candidates[name]
                turn.before()
                barrier()
                taken = clock(turn.run)
                if round_index >= 0:
                    shown[name].append(taken)
    finally:
        gc.enable()
    return shown
