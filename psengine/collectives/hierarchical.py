"""The collective of several hosts with several ranks each: sums inside hosts in shared memory, then between hosts.

An all-reduce of n elements, K hosts, of which the one with fewest ranks has L; rank l of each host, l < L, carries
slice l between hosts, which its host's other ranks leave to it::

    sum      each host in shared memory: every rank of it has the host's sum           nothing sent
    trade    ranks l of all hosts: all_to_all of slice l, in K parts                   (K-1)/K n a host
             host h adds the K parts that are its own, in the order of hosts
    collect  ranks l of all hosts: all_gather of the added parts                       (K-1)/K n a host
    spread   each host in shared memory: rank l broadcasts slice l                     nothing sent

A ring over all W ranks sends 2 (W-1)/W n over each link between hosts, so two hosts with two ranks each send 0.67 as
much here. gloo's own reduce_scatter would send a whole all-reduce, therefore all_to_all.

The order of additions, from which the bits follow: inside a host that of ranks, then that of hosts, which are numbered
by their lowest rank. 16-bit sums are carried in float32 and rounded once inside the host and once between hosts. The
bits depend on which ranks share a host, and on nothing else: they are the same on every rank and in every run.

Each of the four steps is a stage with a channel of its own (two groups in shared memory, two of gloo), so operations
overlap, and each channel sees them in the order of calls on every rank. Nothing has a thread: stages begin when a rank
begins an operation, makes progress or waits.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from psengine.collectives.base import Interruption, Work
from psengine.collectives.c10d import C10dCollective, all_to_all_of
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.operands import check_flat, flat_bytes, real
from psengine.collectives.shared_memory.collective import UNDER_WAY, Failure, SharedMemoryCollective
from psengine.collectives.shared_memory.files import succeed_together
from psengine.collectives.shared_memory.host import BY_RANK, meet_hosts
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.errors import CollectiveError, PeerLostError, SharedMemoryUnavailableError

# Tensors go through the stages in pieces, so that links are busy while hosts add: whole buckets of 25 MB, which leave
# links idle between the stages, take a fifth longer (benchmarks/cluster, 2 x 2 ranks at 1 Gbit/s).
PIECE_BYTES = 4 * 1024 * 1024
STAGES = 4
# 16-bit sums are carried in these.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class HostMemory(SharedMemoryCollective):
    """The ranks of one host, numbered among themselves. Its waits and its errors are those of all ranks.

    A rank of this host may wait for another host. So whoever waits here looks for alarms, and answers roll calls.

    Args:
        meeting, segments: see ``SharedMemoryCollective``.
        own: this host's ranks, as all count.
        everybody: all ranks, over torch.distributed.

    Attributes:
        number: of the operation that is waited for, as all ranks count.
    """

    def __init__(
        self,
        meeting: C10dCollective,
        segments: SharedSegments | None,
        own: tuple[int, ...],
        everybody: C10dCollective,
    ) -> None:
        super().__init__(meeting, BY_RANK, segments)
        self.number = 0
        self._own = own
        self._everybody = everybody

    @override
    def _sleep(self, operation: int, what: str, timeout_s: float, is_interrupted: Interruption) -> Failure | None:
        failure: Failure | None = None

        def wait_for_s(seconds: float) -> bool:
            nonlocal failure
            # In slices: after these seconds the status is UNDER_WAY, and the group has not failed.
            failure = self._extension.shared_memory_wait(self._group, operation, seconds, True)
            return failure is None or failure[0] != UNDER_WAY

        self._everybody.watch(wait_for_s, lambda: False, what, self.number, is_interrupted)
        return failure

    @override
    def _error_of(self, what: str, timeout_s: float, failure: Failure) -> CollectiveError:
        """All ranks are asked: one that has stopped waiting may be named here for another that is gone."""
        error = super()._error_of(what, timeout_s, failure)
        if not isinstance(error, PeerLostError):
            return CollectiveError(f"{error} (ranks are numbered within this host; among all they are {self._own})")
        lost = tuple(self._own[rank] for rank in error.ranks)
        names = ", ".join(f"rank {rank}" for rank in lost)
        found = self._everybody.diagnose(RuntimeError(f"{names} of this host did not come, or left"), what)
        return found if isinstance(found, PeerLostError) else PeerLostError(f"Lost {names}. {found}", lost)


class Levels:
    """The channels of the four stages, made together by all ranks.

    Attributes:
        hosts: the ranks of each host.
        host: the number of this rank's.
        lanes: how many ranks of each host exchange values with other hosts.
        place: this rank among those of its host.
        sums, spreads: shared memory of this host, None for a host of one rank.
        trades, collects: the ranks at this place on each host; None where this rank has no lane, or there is one host.
    """

    def __init__(self, everybody: C10dCollective, segments: SharedSegments) -> None:
        self.everybody = everybody
        places, self.hosts = meet_hosts(everybody)
        self.host = next(number for number, host in enumerate(self.hosts) if everybody.rank in host)
        self.own = self.hosts[self.host]
        self.place = self.own.index(everybody.rank)
        self.lanes = min(map(len, self.hosts))
        prefix = f"psengine/hierarchical/{places[0].token:x}"
        self.sums: HostMemory | None = None
        self.spreads: HostMemory | None = None
        self.trades: dist.ProcessGroup | None = None
        self.collects: dist.ProcessGroup | None = None
        self._meeting: dist.ProcessGroup | None = None
        try:
            succeed_together(everybody, lambda: self._connect(prefix, segments), "hierarchical")
        except SharedMemoryUnavailableError:
            self.close()
            raise

    def _connect(self, prefix: str, segments: SharedSegments) -> None:
        everybody = self.everybody
        if len(self.own) > 1:
            self._meeting = self._group(f"{prefix}/host {self.host}", self.place, len(self.own))
            meeting = C10dCollective(self._meeting, everybody.timeout_s)
            self.sums = HostMemory(meeting, segments, self.own, everybody)
            self.spreads = HostMemory(meeting, None, self.own, everybody)
            self.sums.connect()
            self.spreads.connect()
        if len(self.hosts) > 1 and self.place < self.lanes:
            self.trades = self._group(f"{prefix}/trade {self.place}", self.host, len(self.hosts))
            self.collects = self._group(f"{prefix}/collect {self.place}", self.host, len(self.hosts))

    def _group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        """Ranks that share a host or a lane, over gloo; unknown to torch.distributed, which counts groups by rank."""
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        timeout = timedelta(seconds=self.everybody.timeout_s)
        group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_group_name(dist.distributed_c10d.GroupName(name))
        return group

    @property
    def memories(self) -> list[HostMemory]:
        return [memory for memory in (self.sums, self.spreads) if memory is not None]

    @property
    def has_ended(self) -> bool:
        return any(memory.has_ended for memory in self.memories)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


def stages(levels: Levels, flat: torch.Tensor, scale: float, what: str, number: int) -> Iterator[Any]:
    """An all-reduce: begin the next stage, and yield its work, or None where this rank or this sum has none.

    Args:
        levels: the channels.
        flat: contiguous, of real numbers; gets the sum.
        scale: of each addend.
        what: its name in errors.
        number: the same on every rank.
    """
    if levels.sums is not None:
        yield levels.sums.all_reduce(flat, scale, what=what)
    else:
        if scale != 1.0:
            flat.mul_(scale)
        yield None
    hosts, lanes = len(levels.hosts), levels.lanes
    if flat.numel() == 0 or hosts == 1:
        return

    # A lane's slice has a part for each host. Parts at the tensor's end are shorter, or empty.
    part_numel = -(-flat.numel() // (lanes * hosts))
    slices = [flat[lane * part_numel * hosts : (lane + 1) * part_numel * hosts] for lane in range(lanes)]
    if levels.trades is None or levels.collects is None:
        yield None
        yield None
    else:
        own = slices[levels.place]
        sizes = [max(0, min(part_numel, own.numel() - host * part_numel)) for host in range(hosts)]
        received = [sizes[levels.host]] * hosts
        traded = own.new_empty(sum(received))
        exchange = all_to_all_of(levels.trades)
        begin = levels.everybody.begin
        yield begin(lambda: [exchange(traded, own, received, sizes)], what, own.device, operation=number)

        # gloo gathers equal parts.
        is_whole = own.numel() == part_numel * hosts
        gathered = own if is_whole else own.new_empty(part_numel * hosts)
        part = _added(traded.view(hosts, -1))
        if not is_whole:
            part = torch.cat([part, part.new_zeros(part_numel - part.numel())])
        parts = list(flat_bytes(gathered).view(hosts, -1).unbind())
        collects = levels.collects
        yield begin(lambda: [collects.allgather([parts], [flat_bytes(part)])], what, own.device, operation=number)
        if not is_whole:
            own.copy_(gathered[: own.numel()])

    work: Work | None = None
    if levels.spreads is not None:
        for lane, values in enumerate(slices):
            if values.numel() > 0:
                # They complete in the order of calls, so the last one stands for all.
                work = levels.spreads.broadcast([values], lane, what=what)
    yield work


def _added(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the hosts' rows, in the order of hosts."""
    total = rows[0].to(_WIDE.get(rows.dtype, rows.dtype), copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total.to(rows.dtype)


class Sum(Work):
    """An all-reduce on its way through the stages.

    Attributes:
        stage: how many are over.
        work: of the one that it is in, or None.
    """

    def __init__(self, collective: HierarchicalCollective, number: int, on_the_way: Iterator[Any]) -> None:
        self.number = number
        self.stage = 0
        self._collective = collective
        self._stages = on_the_way
        self.work = next(on_the_way)

    @override
    def wait(self, is_interrupted: Interruption = None) -> bool:
        self._collective.complete(self)
        return True

    def advance(self, before: int) -> None:
        """Go through the stages that are over, at most to stage ``before``, where the operation before this one is."""
        while self.stage < before and (self.work is None or self.work.is_done()):
            if self.work is not None:
                self.work.wait()
            self.stage += 1
            self.work = next(self._stages, None)


class HierarchicalCollective(Forwarding):
    """All-reduces in two levels; the other operations, and tensors that shared memory does not sum, over ``inner``.

    Args:
        inner: the same ranks over torch.distributed; says who is missing after a failure.
    """

    inner: C10dCollective

    def __init__(self, inner: C10dCollective) -> None:
        super().__init__(inner)
        self._segments = SharedSegments()
        self._levels: Levels | None = None
        self._has_ended = False
        # Begun and not complete, in the order of calls.
        self._under_way: collections.deque[Sum] = collections.deque()

    @override
    def connect(self) -> None:
        """Raises ``SharedMemoryUnavailableError`` on every rank where a channel cannot be made."""
        if self._levels is None:
            self._levels = Levels(self.inner, self._segments)

    @property
    @override
    def scales_for_free(self) -> bool:
        return self._levels is not None and min(map(len, self._levels.hosts)) > 1

    @property
    @override
    def has_ended(self) -> bool:
        return self._has_ended or (self._levels is not None and self._levels.has_ended)

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._segments.allocate(numel, dtype, device)

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        if not SharedMemoryCollective.sums(flat):
            return self.inner.all_reduce(flat, scale, what=what)
        what = f"all-reduce of {what}"
        check_flat(self, what, flat, scale)
        if self._has_ended:
            raise CollectiveError(
                f"{what} failed on rank {self.rank} of {self.world_size}: the collective is closed, or has failed"
            )
        self.connect()
        assert self._levels is not None
        values, number = real(flat.detach()).view(-1), self.inner.count()
        with self._closing_after_a_failure():
            for piece in values.split(max(1, PIECE_BYTES // values.element_size())):
                begun = Sum(self, number, stages(self._levels, piece, scale, what, number))
                self._under_way.append(begun)
        self.progress()
        return begun  # which ends after the others

    @override
    def progress(self) -> None:
        """Begin every stage that can begin. An operation enters a stage after those that were called before it."""
        before = STAGES
        with self._closing_after_a_failure():
            for begun in self._under_way:
                begun.advance(before)
                before = begun.stage
        while self._under_way and self._under_way[0].stage == STAGES:
            self._under_way.popleft()

    def complete(self, last: Sum) -> None:
        """Wait for ``last`` and the operations before it."""
        assert self._levels is not None
        while last.stage != STAGES:
            first = self._under_way[0]
            for memory in self._levels.memories:
                memory.number = first.number
            if first.work is not None:
                with self._closing_after_a_failure():
                    first.work.wait()
            self.progress()

    @contextlib.contextmanager
    def _closing_after_a_failure(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError:
            self.close()
            raise

    @override
    def close(self) -> None:
        """Tells the ranks of this host that wait for this one."""
        self._has_ended = True
        if self._levels is not None:
            self._levels.close()
