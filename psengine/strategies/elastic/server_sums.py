"""Contributions of a group that servers sum, in an averaging job in which each virtual worker is a rank.

::

    worker 0, of virtual workers 0 and 1   row 1 ── rank 0 ──► servers ── the average of ranks 0, 1, 2 ──► row 0
                                           row 2 ── rank 1 ──►
    worker 1, of virtual worker 2          row 1 ── rank 2 ──►

The servers add in the order of ranks, so the bits are those of "sync-server" with as many workers as there are virtual
ones. A job serves one group and begins with the group's first exchange. An average counts only if all ranks are in it.
Where one is missing, or a server, a CollectiveError is raised, and another group exchanges the contributions again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from psengine.collectives.base import BlockingWork, Collective, CompletedWork, Intermediate, Work
from psengine.collectives.forwarding import Forwarding
from psengine.errors import CollectiveError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.operation import Push, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.partition import TensorImage, cut_images
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode

RULE = {"name": "average", "quorum": None}
# Jobs of successive groups have different names, because one is over only at the end of a dead worker's lease. A name
# comes again, so that servers forget the job that had it.
NAMES = 4
# Refusals that another group will not meet.
_TRANSIENT = (
    *(ErrorCode.FENCED, ErrorCode.NOT_MEMBER, ErrorCode.STALE, ErrorCode.NOT_READY, ErrorCode.UNKNOWN_KEY),
    *(ErrorCode.STATE_LOST, ErrorCode.DUPLICATE_RANK, ErrorCode.SHUTTING_DOWN),
)


class ServerSums(Forwarding):
    """See the module's text.

    Args:
        inner: the group's collective.
        options: of this worker's client of the elastic job.
        virtual_workers: how many there are.
        view: number of the group's view.
    """

    def __init__(self, inner: Collective, options: SessionOptions, virtual_workers: int, view: int) -> None:
        super().__init__(inner)
        job = f"{options.job}.sums.{view % NAMES}"
        self._options = replace(options, job=job, rule=RULE, run="", nonce=None, world_size=virtual_workers)
        self._allocated: list[torch.Tensor] = []
        # By address of a bucket's memory, its chunks.
        self._chunks: dict[int, list[ChunkSpec]] = {}
        # Of this worker's virtual workers, in the order of rows.
        self._sessions: list[WorkerSession] = []
        self._has_entered = False

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A bucket's memory; all of them are made before the first exchange."""
        assert not self._sessions, "the buckets of a group stay"
        self._allocated.append(torch.empty(numel, dtype=dtype, device=device))
        return self._allocated[-1]

    @override
    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        """The average of all contributions. A group's first exchange waits until its job has begun, and so do those
        that begin meanwhile.
        """
        if not self._sessions:
            specs = self._lay_out(rows=len(memory))
            ranks = [virtual_worker for virtual_worker, (rank, _) in enumerate(owners) if rank == self.rank]
            self._sessions = [WorkerSession(replace(self._options, rank=rank)) for rank in ranks]
            yield Intermediate(self._asking(lambda: self._enter(specs)))
            # A process that stood still may come to the next job of a name, instead of one of this group.
            yield Intermediate(self.inner.barrier())
            self._has_entered = True
        elif not self._has_entered:
            yield Intermediate(CompletedWork())
        chunks = self._chunks[memory.data_ptr()]
        pushes = [
            session.push(spec.key, _part(row, spec), ())
            for session, row in zip(self._sessions, memory[1:], strict=True)
            for spec in chunks
        ]
        yield self._asking(lambda: _wait_for_averages(pushes, len(owners), what))
        for push, spec in zip(pushes, chunks, strict=False):  # those of the first row
            _part(memory[0], spec).copy_(push.wait().payload)

    @override
    def abandon(self) -> None:
        for session in self._sessions:
            session.abandon()
        super().abandon()

    def _lay_out(self, *, rows: int) -> list[ChunkSpec]:
        """The chunks of all buckets, which are alike on all workers."""
        specs: list[ChunkSpec] = []
        for index, memory in enumerate(self._allocated):
            row, servers = memory.view(rows, -1)[0], len(self._options.addresses)
            images = {f"bucket {index}": TensorImage(row)}
            self._chunks[memory.data_ptr()] = cut_images(
                ChunkKind.PARAMETER, images, row.dtype, len(specs), servers=servers
            )
            specs += self._chunks[memory.data_ptr()]
        self._allocated.clear()
        return specs

    def _enter(self, specs: Sequence[ChunkSpec]) -> None:
        """Have all virtual workers of this worker take part in the group's job, which has no values of its own."""
        for session in self._sessions:
            session.start()  # all of them, because the job waits for each
        for session in self._sessions:
            session.enter(specs, lambda spec: None)

    def _asking(self, ask: Callable[[], None]) -> Work:
        """``ask`` servers, which blocks; where another group may succeed, a failure is that of this one."""

        def ask_them() -> None:
            try:
                ask()
            except (ServerLostError, ServerRefusedError) as error:
                if isinstance(error, ServerRefusedError) and error.code not in _TRANSIENT:
                    raise
                raise CollectiveError(f"the servers did not sum contributions: {error}") from error

        return BlockingWork(ask_them)


def _part(row: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    """The elements of a bucket's row that are in a chunk."""
    (segment,) = spec.segments
    return row[segment.start : segment.start + segment.numel]


def _wait_for_averages(pushes: Sequence[Push], virtual_workers: int, what: str) -> None:
    """Raise CollectiveError unless all virtual workers are in each average."""
    wait_all(pushes)
    for push in pushes:
        count = push.wait().body.get("contributors")
        if count != virtual_workers:
            raise CollectiveError(
                f"{what}: servers averaged without some virtual workers, whose workers were silent for longer than"
                f" their lease (expected {virtual_workers} contributions, got {count})"
            )
