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

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, Work
from psengine.collectives.forwarding import Forwarding
from psengine.errors import CollectiveError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.operation import Push, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.partition import TensorImage, cut_images
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode
from psengine.strategies.elastic.guarded import LOOK_S, GuardedWork

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
        has_news: see ``GuardedCollective``.
    """

    def __init__(
        self,
        inner: Collective,
        options: SessionOptions,
        virtual_workers: int,
        view: int,
        has_news: Callable[[], bool],
    ) -> None:
        super().__init__(inner)
        job = f"{options.job}.sums.{view % NAMES}"
        self._options = replace(options, job=job, rule=RULE, run="", nonce=None, world_size=virtual_workers)
        self._has_news = has_news
        self._allocated: list[torch.Tensor] = []
        # By address of a bucket's memory, its chunks: (spec, first element, end).
        self._chunks: dict[int, list[tuple[ChunkSpec, int, int]]] = {}
        # Of this worker's virtual workers, in the order of rows.
        self._sessions: list[WorkerSession] = []

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
        """The average of all contributions; the first call in a group blocks until its job has begun."""
        if not self._sessions:
            self._begin([v for v, (rank, _) in enumerate(owners) if rank == self.rank])
        chunks = self._chunks[memory.data_ptr()]
        pushes = [
            [session.push(spec.key, row[start:end], ()) for spec, start, end in chunks]
            for session, row in zip(self._sessions, memory[1:], strict=True)
        ]
        yield GuardedWork(_Averages([push for row in pushes for push in row], len(owners), what), self._has_news)
        for push, (_, start, end) in zip(pushes[0], chunks, strict=True):
            memory[0][start:end].copy_(push.wait().payload)

    @override
    def abandon(self) -> None:
        for session in self._sessions:
            session.abandon()
        super().abandon()

    def _begin(self, virtual_workers: Sequence[int]) -> None:
        """Have these take part in the group's job."""
        specs = self._lay_out(rows=1 + len(virtual_workers))
        entered = []
        for virtual_worker in virtual_workers:
            self._sessions.append(WorkerSession(replace(self._options, rank=virtual_worker)))
            entered.append(_enter(self._sessions[-1], specs))
        GuardedWork(_Entered(entered), self._has_news).wait()
        # A process that stood still may come to the next job of a name, instead of one of this group.
        self.inner.barrier().wait()

    def _lay_out(self, *, rows: int) -> list[ChunkSpec]:
        """The chunks of all buckets, which are alike on all workers."""
        specs: list[ChunkSpec] = []
        for index, memory in enumerate(self._allocated):
            row = memory.view(rows, -1)[0]
            images, servers = {f"bucket {index}": TensorImage(row)}, len(self._options.addresses)
            of_bucket = cut_images(ChunkKind.PARAMETER, images, row.dtype, len(specs), servers=servers)
            ends = list(itertools.accumulate(spec.numel for spec in of_bucket))
            self._chunks[memory.data_ptr()] = list(zip(of_bucket, [0, *ends], ends, strict=False))
            specs += of_bucket
        self._allocated.clear()
        return specs


def _enter(session: WorkerSession, specs: Sequence[ChunkSpec]) -> Future[None]:
    """Begin to take part in a job without values, in a thread: each of these waits for the others."""
    entered: Future[None] = Future()

    def enter() -> None:
        try:
            session.start()
            session.enter(specs, lambda spec: None)
            entered.set_result(None)
        except BaseException as error:
            entered.set_exception(error)

    threading.Thread(target=enter, name="psengine-enter", daemon=True).start()
    return entered


class _ServerWork(Work):
    """Requests to servers; ``_look`` waits for them, ``LOOK_S`` at most, and returns whether all are answered."""

    @abstractmethod
    def _look(self) -> bool: ...

    @override
    def wait(self) -> None:
        self.wait_unless(lambda: False)

    @override
    def wait_unless(self, is_interrupted: Callable[[], bool]) -> bool:
        try:
            while not self._look():
                if is_interrupted():
                    return False
            return True
        except (ServerLostError, ServerRefusedError) as error:
            if isinstance(error, ServerRefusedError) and error.code not in _TRANSIENT:
                raise
            raise CollectiveError(f"the servers did not sum contributions: {error}") from error


class _Entered(_ServerWork):
    """All of a worker's sessions take part."""

    def __init__(self, entered: Sequence[Future[None]]) -> None:
        self._entered = entered

    @override
    def _look(self) -> bool:
        done = wait(self._entered, LOOK_S, FIRST_EXCEPTION).done
        for one in done:
            one.result()
        return len(done) == len(self._entered)


class _Averages(_ServerWork):
    """The averages of a bucket's chunks, of all virtual workers."""

    def __init__(self, pushes: Sequence[Push], virtual_workers: int, what: str) -> None:
        self._pushes, self._virtual_workers, self._what = pushes, virtual_workers, what

    @override
    def _look(self) -> bool:
        if not wait_all(self._pushes, LOOK_S):
            return False
        for push in self._pushes:
            count = push.wait().body.get("contributors")
            if count != self._virtual_workers:
                raise CollectiveError(
                    f"{self._what}: servers averaged without some virtual workers, whose workers were silent for longer"
                    f" than their lease (expected {self._virtual_workers} contributions, got {count})"
                )
        return True
