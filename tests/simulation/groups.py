"""Groups of workers that exchange among themselves: what TCP and gloo do.

    view n ── meet by the coordinator's word ── connect, each with each ── operations, in order

Over a link that is cut what is sent waits. The others learn after a while, or never, that somebody has left or died.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from psengine.collectives.base import Collective, Interruption, Work
from psengine.errors import CollectiveError
from psengine.protocol.views import View
from simulation.reference import Values
from simulation.violation import require

TIMEOUT_S = 1800.0
LOSES = 0.5  # of what is under way as its sender dies


def ring_sum(rows: Values) -> Values:
    """The sum of rows [V, n]: an element's place decides with which row it begins, as in a ring of V ranks."""
    count, numel = rows.shape
    places = np.arange(numel)
    total = rows[places % count, places].copy()
    for number in range(1, count):
        total += rows[(places + number) % count, places]
    return total


@dataclass(eq=False)
class Operation:
    """The n-th of a group; ``source``: whose tensors all get, None: all ranks' count."""

    name: str
    source: int | None
    given: dict[int, Any] = field(default_factory=dict)
    works: dict[int, SimulatedWork] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class SimulatedGroup:
    """Those of one view.

    Attributes:
        processes: by rank, those that listen.
    """

    def __init__(self, groups: Groups, view: View) -> None:
        self._groups = groups
        self.size = len(view.members)
        self.processes: dict[int, Any] = {}
        self.failed: set[int] = set()  # ranks that have left, or know that somebody has
        self._left: set[int] = set()
        self._operations: list[Operation] = []
        self._counts: dict[int, int] = defaultdict(int)

    def is_connected(self, process) -> bool:
        """Whether nothing is cut between a process, which knows where all listen, and them."""
        links = [(one, process) for one in self.processes.values()] + [
            (process, one) for one in self.processes.values()
        ]
        return not any(self._groups.is_cut(sender, receiver) for sender, receiver in links)

    def leave(self, rank: int, *, is_silent: bool = False) -> None:
        """A process closes its connections, or its machine dies silently."""
        if rank in self._left:
            return
        self._left.add(rank)
        self.failed.add(rank)
        for other in () if is_silent else [one for one in self.processes if one != rank]:
            self._carry(rank, other, partial(self.failed.add, other), is_end=True)

    def break_between(self, some: int, others: int) -> None:
        """The connection of these workers breaks."""
        ranks = [rank for rank, process in self.processes.items() if process.rank in (some, others)]
        for rank in ranks if len(ranks) == 2 else ():
            self.processes[rank].happens(partial(self.failed.add, rank))

    def _carry(self, sender: int, receiver: int, call: Callable[[], object], *, is_end: bool = False) -> None:
        if sender in self.processes:
            self._groups.carry(self.processes[sender], self.processes[receiver], call, is_end=is_end)

    def begin(
        self, rank: int, name: str, source: int | None, given: Any, finish: Callable[[dict[int, Any]], None]
    ) -> SimulatedWork:
        """A rank begins its next operation."""
        index, self._counts[rank] = self._counts[rank], self._counts[rank] + 1
        if index == len(self._operations):
            self._operations.append(Operation(name, source))
        one = self._operations[index]
        require((one.name, one.source) == (name, source), "operation {} is {!r} and {!r}", index, one.name, name)
        one.given[rank] = given
        one.works[rank] = work = SimulatedWork(self, rank, finish)
        if source in (None, rank):
            for other in [other for other in range(self.size) if other != rank]:
                self._carry(rank, other, partial(self._arrive, one, other, rank))
        self._arrive(one, rank, rank)
        return work

    def _arrive(self, one: Operation, receiver: int, sender: int) -> None:
        one.arrived[receiver].add(sender)
        work = one.works.get(receiver)
        needed = set(range(self.size)) if one.source is None else {one.source}
        if work is None or work.is_done or receiver in self.failed or not needed <= one.arrived[receiver]:
            return
        work.finish(one.given)
        self._groups.world.faults.noticed(one.name.partition(" ")[0])


class Groups:
    """All groups of a run, and the links between workers."""

    def __init__(self, world) -> None:
        self.world = world
        self._rng = random.Random(f"groups {world.scenario.seed}")
        self._groups: dict[tuple[int, int], SimulatedGroup] = {}
        self._cuts: list[tuple[int, int]] = []  # (from worker, to worker)
        self._held: list[tuple[Any, Any, Callable[[], object], bool]] = []

    def of(self, view: View) -> SimulatedGroup:
        """The group of a view."""
        return self._groups.setdefault((view.epoch, view.number), SimulatedGroup(self, view))

    def died(self, process, *, is_silent: bool) -> None:
        """A process has ended."""
        for group in self._groups.values():
            for rank in [rank for rank, one in group.processes.items() if one is process]:
                group.leave(rank, is_silent=is_silent)

    def is_cut(self, sender, receiver) -> bool:
        """Whether nothing passes from one process to another."""
        return (sender.rank, receiver.rank) in self._cuts

    def cut(self, links: Sequence[tuple[int, int]]) -> None:
        """Links are cut."""
        self._cuts += links

    def mend(self, links: Sequence[tuple[int, int]], *, breaks: bool) -> None:
        """They are whole again: what waited arrives, or connections break."""
        for link in links:
            self._cuts.remove(link)
            for group in self._groups.values() if breaks else ():
                group.break_between(*link)
        held, self._held = self._held, []
        for *one, is_end in held:
            self.carry(*one, is_end=is_end)  # type: ignore[arg-type]

    def carry(self, sender, receiver, call: Callable[[], object], *, is_end: bool) -> None:
        """Something goes from one process to another; what a process had sent that dies may be lost."""
        if self.is_cut(sender, receiver):
            self._held.append((sender, receiver, call, is_end))
            return
        low_s, high_s = self.world.scenario.latency_s
        delay_s = low_s + (high_s - low_s) * self._rng.random() ** 3
        is_lost = not is_end and self._rng.random() < LOSES
        self.world.clock.after(delay_s, self._arrive, sender, receiver, call, is_lost)

    def _arrive(self, sender, receiver, call: Callable[[], object], is_lost: bool) -> None:
        if not (is_lost and sender.is_dead):
            receiver.happens(call)


class SimulatedWork(Work):
    """One rank's part of an operation."""

    def __init__(self, group: SimulatedGroup, rank: int, finish: Callable[[dict[int, Any]], None]) -> None:
        self._group, self._rank, self._finish = group, rank, finish
        self.is_done = False

    def finish(self, given: dict[int, Any]) -> None:
        """The result is there; ``given``: by rank."""
        self.is_done = True
        self._finish(given)

    def wait(self, is_interrupted: Interruption = None) -> bool:
        failed = self._group.failed
        process = self._group.processes[self._rank]
        process.park(lambda: self.is_done or self._rank in failed or (is_interrupted is not None and is_interrupted()))
        if not self.is_done and self._rank in failed:
            raise CollectiveError("a connection broke")
        return self.is_done


class SimulatedCollective(Collective):
    """One process's end of a group."""

    timeout_s = TIMEOUT_S

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group, self.rank, self.world_size = group, rank, group.size

    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        def finish(given: dict[int, torch.Tensor]) -> None:
            flat.copy_(sum(given[rank] for rank in range(self.world_size)) * scale)  # type: ignore[arg-type]

        return self._group.begin(self.rank, what, None, flat.clone(), finish)

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        def finish(given: dict[int, list[torch.Tensor]]) -> None:
            for tensor, value in zip(tensors, given[source_rank], strict=True):
                tensor.copy_(value)

        given = [tensor.clone() for tensor in tensors] if self.rank == source_rank else []
        return self._group.begin(self.rank, what, source_rank, given, finish)

    def barrier(self) -> Work:
        return self._group.begin(self.rank, "barrier", None, None, lambda given: None)

    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        require(len(set(owners)) == len(owners), "a contribution counts twice: {}", owners)

        def finish(given: dict[int, torch.Tensor]) -> None:
            require(torch.equal(memory[1:], given[self.rank]), "contributions changed while they travelled")
            rows = [given[rank][number].numpy() for rank, number in owners]
            memory[0].copy_(torch.from_numpy(ring_sum(np.stack(rows))))

        yield self._group.begin(self.rank, f"{what} of {owners}", None, memory[1:].clone(), finish)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        raise NotImplementedError

    def all_to_all(self, *arguments: Any, **options: Any) -> Work:
        raise NotImplementedError

    def abandon(self) -> None:
        self._group.leave(self.rank)
