"""The collective between processes of one host: sums in shared memory, at the speed of memory.

Algorithm, for W ranks and n bytes (csrc/shared_memory/group.h says how it is done)::

    tensor from allocate()   in place: each byte of the W tensors is read once and written once, by whoever has time
    any other tensor         in pieces of a staging slot: copied in, summed, copied out
    up to 16 KiB             copied in, then summed by every rank for itself: one round trip

A call costs two notifications a piece (one where it is small). There is no thread: ranks work while they begin or wait
for an operation, so communication takes no core from ranks that still compute.

::

    rank 0   all_reduce(0)  all_reduce(1)         wait(0) ── sums what is left of 0 and 1 ── done
             arrived 0      arrived 1, sums 0
    rank 1              all_reduce(0)        all_reduce(1)  wait(0) ── done
                        arrived 0            arrived 1, sums 1

Memory is anonymous (memfd) and opened through /proc/<process>/fd: the size of /dev/shm does not matter, and the memory
is released however processes end.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Work
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.operands import check_flat, check_parts, copying, plain, real
from psengine.collectives.shared_memory.failures import error_of
from psengine.collectives.shared_memory.host import ORDERS, join_host_group
from psengine.collectives.shared_memory.kinds import SCALAR_KINDS, SUMMED_DTYPES, kind_at_once
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.collectives.shared_memory.work import SharedMemoryWork
from psengine.errors import CollectiveError, ConfigurationError
from psengine.kernels import native
from psengine.specification import did_you_mean
from psengine.tracing.stall_inspector import inspector, stall_after_s
from psengine.tracing.timeline import is_profiling, profiled, recorder, span

# With more operations in flight, complete ones are looked for, in case nobody waits for them.
FORGET_FROM = 64
# A number no operation reaches.
NO_OPERATION = 2**63


class SharedMemoryCollective(Collective):
    """Collective operations on CPU tensors between ranks that share a host.

    Ranks connect at the first operation, or by ``connect``. Sums are of the dtypes in ``SCALAR_KINDS`` and of complex
    ones, copies of any dtype; see ``sums`` and ``copies``.

    Args:
        meeting: a collective of the same ranks, over which they connect; for CPU tensors. Its deadline is taken over,
            and it says where ranks wait that are missing.
        segments: the memory that ``allocate`` gives, where some was given before this collective was made.
        order: in which the ranks' values are added. "ring" is gloo's (``ring_order``), with gloo's bits; "rank" is that
            of ranks, which does not depend on an element's place in its tensor, with 16-bit sums carried in float32.
            The same on every rank; ``connect`` compares.

    Scaling: each addend is multiplied by ``scale`` and rounded to its dtype, then the products are added, as native DDP
    does over gloo, to the last bit. A reduce-scatter gives the bits of its part of the all-reduce.

    Operations raise:
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """

    def __init__(self, meeting: C10dCollective, order: str = "ring", segments: SharedSegments | None = None) -> None:
        if order not in tuple(ORDERS):
            raise ConfigurationError(
                f"order of collective 'shared_memory' says how the ranks' values are added (expected one of"
                f" {list(ORDERS)}, got {order!r}){did_you_mean(str(order), ORDERS)}"
            )
        self._meeting = meeting
        self._order = order
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self.timeout_s = meeting.timeout_s
        after_s = stall_after_s()
        self._stall_after_s = after_s if self.world_size > 1 else 0.0  # one rank never waits
        self._extension: Any = native.extension
        self._host = socket.gethostname()
        self._group: Any = None
        self._has_ended = False
        self._connecting = threading.Lock()
        self._segments = segments or (SharedSegments(self._extension) if native.has_shared_memory() else None)
        # By operation, its tensors, kept until the native side is done.
        self._outstanding: dict[int, torch.Tensor | tuple[torch.Tensor, ...]] = {}

    @property
    @override
    def scales_for_free(self) -> bool:
        return True

    @property
    @override
    def has_ended(self) -> bool:
        """Also where another rank failed or left: all ranks then agree to replace the collective."""
        if self._has_ended or self._group is None:
            return self._has_ended
        return bool(self._extension.shared_memory_has_ended(self._group))

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have met."""
        return self._group is not None

    @override
    def connect(self) -> None:
        """Raises ``SharedMemoryUnavailableError`` where the ranks cannot share memory, on all of them."""
        if self._group is not None:
            return
        with self._connecting:
            if self._group is None:
                group = join_host_group(self._meeting, self._order)
                assert self._segments is not None
                self._segments.attach(group)
                self._group = group
                self._meeting.note_processes([state[0] for state in self._extension.shared_memory_states(group)])

    @staticmethod
    def copies(tensor: torch.Tensor) -> bool:
        """Whether operations that copy carry ``tensor``."""
        return tensor.is_cpu and tensor.layout is torch.strided

    @staticmethod
    def sums(tensor: torch.Tensor) -> bool:
        """Whether operations that sum carry ``tensor``."""
        return tensor.dtype in SUMMED_DTYPES and tensor.is_cpu and tensor.layout is torch.strided

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory in which ``all_reduce`` needs no copies; for one reduction all ranks use such memory, or none does."""
        if self._segments is None or device.type != "cpu" or dtype not in SCALAR_KINDS:
            return super().allocate(numel, dtype, device)
        return self._segments.allocate(numel, dtype)

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> SharedMemoryWork:
        if (work := self.begin_at_once(flat, scale, what)) is not None:
            return work
        what = f"all-reduce of {what}"
        check_flat(self, what, flat, scale)
        flat = real(flat)
        kind = self._kind(what, flat)
        return self._begin_on(flat, what, "shared_memory_all_reduce", flat.data_ptr(), flat.numel(), kind, scale)

    def begin_at_once(self, flat: torch.Tensor, scale: float, what: str) -> SharedMemoryWork | None:
        """``all_reduce`` in one native call. None, and nothing has happened, where more is to be checked."""
        kind = kind_at_once(flat, scale)
        if kind is None or self._group is None or is_profiling():
            return None
        what = f"all-reduce of {what}"
        try:
            arguments = flat.data_ptr(), flat.numel(), kind, scale
            operation = self._extension.shared_memory_all_reduce(self._group, *arguments)
        except RuntimeError as error:
            raise self._failure(what, error) from error
        self._outstanding[operation] = flat
        if len(self._outstanding) > FORGET_FROM:
            self.completed()
        return SharedMemoryWork(self, operation, what)

    @override
    def sum(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> None:
        if not self.sum_at_once(flat, scale, what):
            super().sum(flat, scale, what=what)

    def sum_at_once(self, flat: torch.Tensor, scale: float, what: str) -> bool:
        """``sum`` in one call of the native side, which begins, spins and adds; only a longer wait is watched and
        sleeps. False, and nothing has happened, where there is more to check, convert or note.
        """
        kind = kind_at_once(flat, scale)
        if kind is None or self._group is None or recorder.is_on or is_profiling():
            return False
        try:
            operation = self._extension.shared_memory_sum(self._group, flat.data_ptr(), flat.numel(), kind, scale)
        except RuntimeError as error:
            raise self._failure(f"all-reduce of {what}", error) from error
        if operation != 0:
            self._outstanding[operation] = flat
            self.finish(operation, f"all-reduce of {what}", self.timeout_s, has_spun=True)
        return True

    def reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor"
    ) -> SharedMemoryWork:
        """Begin ``output = scale * sum over ranks of this rank's part of each rank's flat``, for the torch backend.

        Args:
            output: dense contiguous tensor; mutated.
            flat: dense contiguous, ``world_size`` times as many elements of the same dtype; part r belongs to rank r.
            scale: as for ``all_reduce``.
            what: as for ``all_reduce``.
        """
        what = f"reduce-scatter of {what}"
        check_parts(self, what, flat, output)
        check_flat(self, what, output, scale)
        part, whole = real(output.detach()), real(flat.detach())
        arguments = whole.data_ptr(), part.data_ptr(), part.numel(), self._kind(what, part), scale
        return self._begin_on((whole, part), what, "shared_memory_reduce_scatter", *arguments)

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> SharedMemoryWork:
        what = f"all-gather of {what}"
        check_parts(self, what, output, tensor)
        self._check_copies(what, tensor)
        payload = plain(tensor)
        arguments = payload.data_ptr(), output.data_ptr(), payload.nbytes
        return self._begin_on((payload, output), what, "shared_memory_all_gather", *arguments)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        """An operation for each tensor."""
        what = f"broadcast of {what} from rank {source_rank}"
        work: Work = CompletedWork()
        copies: list[Callable[[], None]] = []
        for tensor in tensors:
            self._check_copies(what, tensor)
            payload = plain(tensor)
            copy = copying([tensor], [payload])
            if copy is not None and self.rank != source_rank:
                copies.append(copy)
            arguments = payload.data_ptr(), payload.nbytes, source_rank
            # Operations complete in call order, so the last one stands for all, with the copies of all.
            work = self._begin_on((payload,), what, "shared_memory_broadcast", *arguments, finish=copies)
        return work

    @override
    def barrier(self, timeout_s: float | None = None) -> SharedMemoryWork:
        operation = self._begin("barrier", "shared_memory_barrier")
        return SharedMemoryWork(self, operation, "barrier", timeout_s=timeout_s)

    @override
    def progress(self) -> None:
        if self._outstanding:
            self.completed()

    def completed(self) -> int:
        """Advance operations without waiting; the last one of which all before it are complete too."""
        complete = self._begin("an earlier operation", "shared_memory_progress")
        self._forget(complete)
        return complete

    def late_ranks(self) -> tuple[int, ...]:
        """The ranks that entered fewer rounds than this one."""
        arrived = [state[1] for state in self._extension.shared_memory_states(self._group)]
        return tuple(rank for rank, rounds in enumerate(arrived) if rounds < arrived[self.rank])

    @override
    def hosts(self) -> tuple[str, ...]:
        return (self._host,) * self.world_size if self._group is not None else ()

    @override
    def close(self) -> None:
        """Tells the ranks that wait for this one."""
        self._has_ended = True
        if self._group is not None:
            self._extension.shared_memory_close(self._group)

    def give_up(self) -> None:
        """Fail the operations in flight, on every rank."""
        self._has_ended = True
        if self._group is not None:
            self._extension.shared_memory_wait(self._group, NO_OPERATION, 0.0, False)

    def _kind(self, what: str, tensor: torch.Tensor) -> int:
        kind = SCALAR_KINDS.get(tensor.dtype)
        if kind is None or not self.copies(tensor):
            raise CollectiveError(
                f"{what} failed on rank {self.rank} of {self.world_size}: shared memory sums CPU tensors of"
                f" {', '.join(map(str, SCALAR_KINDS))} (got {tensor.layout} {tensor.dtype} on {tensor.device})"
            )
        return kind

    def _check_copies(self, what: str, tensor: torch.Tensor) -> None:
        if not self.copies(tensor):
            raise CollectiveError(
                f"{what} failed on rank {self.rank} of {self.world_size}: shared memory copies strided CPU tensors (got"
                f" {tensor.layout} on {tensor.device})"
            )

    def _begin_on(
        self,
        tensors: torch.Tensor | tuple[torch.Tensor, ...],
        what: str,
        function: str,
        *arguments: Any,
        finish: Sequence[Callable[[], None]] = (),
    ) -> SharedMemoryWork:
        """Begin an operation on ``tensors``, which are kept until it is done."""
        operation = self._begin(what, function, *arguments)
        self._outstanding[operation] = tensors
        if len(self._outstanding) > FORGET_FROM:
            self.completed()
        return SharedMemoryWork(self, operation, what, finish=finish)

    def _forget(self, complete: int) -> None:
        for operation in list(self._outstanding):
            if operation > complete:
                break
            self._outstanding.pop(operation, None)  # another thread may wait too

    def _begin(self, what: str, function: str, *arguments: Any) -> int:
        """Call ``function`` of the native extension; return the number of the operation it began."""
        if self._group is None:
            self.connect()
        try:
            operation: int = self._call_profiled(what, function, *arguments)
        except RuntimeError as error:
            raise self._failure(what, error) from error
        return operation

    def _failure(self, what: str, error: RuntimeError) -> CollectiveError:
        """What to raise for a call that the native side refused."""
        return CollectiveError(f"{what} failed on rank {self.rank} of {self.world_size}: {error}")

    def _call_profiled(self, what: str, function: str, *arguments: Any) -> Any:
        call = getattr(self._extension, function)
        if not is_profiling():
            return call(self._group, *arguments)
        with profiled(what):
            return call(self._group, *arguments)

    def finish(self, operation: int, what: str, timeout_s: float, *, has_spun: bool = False) -> None:
        failure = None
        try:
            with span(what, category="collective"):
                if has_spun or not self._extension.shared_memory_spin(self._group, operation):
                    failure = self._sleep(operation, what, timeout_s)
        except CollectiveError:
            self.close()  # the others need not wait for this rank
            raise
        except RuntimeError as error:
            self.close()
            raise self._failure(what, error) from error
        if failure is not None:
            raise self._error_of(what, timeout_s, failure)
        self._outstanding.pop(operation, None)
        if min(self._outstanding, default=operation) < operation:
            self._forget(operation)

    def _sleep(self, operation: int, what: str, timeout_s: float) -> tuple[int, int, str] | None:
        """Go on waiting after the native side has spun, watched by the stall inspector. Return what failed, if so."""
        operations, after_s = self._meeting.pending_operations, self._stall_after_s
        with inspector.watch(operations, f"{what}, operation {operation}", after_s, self.late_ranks):
            return self._wait(operation, timeout_s, is_slice=False)

    def _wait(self, operation: int, timeout_s: float, *, is_slice: bool) -> tuple[int, int, str] | None:
        """``is_slice``: after ``timeout_s`` the status is UNDER_WAY, else the group has failed."""
        failure: tuple[int, int, str] | None = self._extension.shared_memory_wait(
            self._group, operation, timeout_s, is_slice
        )
        return failure

    def _error_of(self, what: str, timeout_s: float, failure: tuple[int, int, str]) -> Exception:
        """What to raise for a wait that failed."""
        states = self._extension.shared_memory_states(self._group)
        return error_of(what, self.rank, self._host, timeout_s, states, failure)
