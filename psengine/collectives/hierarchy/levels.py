"""The channels over which the stages of an all-reduce go: shared memory inside hosts, gloo between them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from psengine.collectives.base import Interruption
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.shared_memory.collective import UNDER_WAY, Failure, SharedMemoryCollective
from psengine.collectives.shared_memory.files import succeed_together
from psengine.collectives.shared_memory.host import BY_RANK, meet_hosts
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.errors import CollectiveError, PeerLostError, SharedMemoryUnavailableError


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
