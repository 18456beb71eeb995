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

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import CompletedWork, DeferredWork, Interruption, Work
from psengine.collectives.c10d import INTERRUPTIBLE_SLICE_S, C10dCollective
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.operands import check_flat, check_parts, copying, plain, real
from psengine.collectives.shared_memory.files import map_file, share_file
from psengine.collectives.shared_memory.host import RING, join_host_group
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.errors import CollectiveError, PeerLostError, SharedMemoryUnavailableError
from psengine.kernels import native
from psengine.tracing.stall_inspector import inspector
from psengine.tracing.timeline import is_profiling, profiled, recorder, span

logger = logging.getLogger(__name__)

# csrc/kernels/kernels.h, ScalarKind
SCALAR_KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
SUMMED_DTYPES = {*SCALAR_KINDS, torch.complex64, torch.complex128}
# csrc/shared_memory/group.h, WaitStatus
LOST, TIMED_OUT, MISMATCHED, CLOSED, UNDER_WAY = 1, 2, 3, 4, 6
# With more operations in flight, complete ones are looked for, in case nobody waits for them.
FORGET_FROM = 64
# A number no operation reaches.
NO_OPERATION = 2**63

# Of a wait that failed: a WaitStatus, ranks as bits, and what differs between ranks for MISMATCHED.
Failure = tuple[int, int, str]


class SharedMemoryCollective(Forwarding):
    """Collective operations on CPU tensors between ranks that share a host; other tensors go over ``inner``.

    Ranks connect at the first operation that shared memory carries, or by ``connect``. Sums are of the dtypes in
    ``SCALAR_KINDS`` and of complex ones, copies of any dtype; see ``sums`` and ``copies``.

    Args:
        inner: a collective of the same ranks, over which they connect; for CPU tensors. Its deadline is taken over, and
            it says where ranks wait that are missing.
        order: in which the ranks' values are added, the same on every rank. RING is gloo's (csrc/shared_memory/ring.h),
            with gloo's bits; BY_RANK does not depend on an element's place in its tensor, with 16-bit sums carried in
            float32.
        segments: the memory that ``allocate`` gives, where some was given before this collective was made.
        is_required: ``connect``, and with it the first operation, raises ``SharedMemoryUnavailableError`` where the
            ranks do not share a host, or cannot open each other's memory; later ones go over ``inner``. False: that is
            logged, and all goes over ``inner``.

    Scaling: each addend is multiplied by ``scale`` and rounded to its dtype, then the products are added, as native DDP
    does over gloo, to the last bit. A reduce-scatter gives the bits of its part of the all-reduce.
    """

    inner: C10dCollective

    def __init__(
        self,
        inner: C10dCollective,
        order: int = RING,
        segments: SharedSegments | None = None,
        *,
        is_required: bool = True,
    ) -> None:
        super().__init__(inner)
        self._order = order
        self.is_required = is_required
        self._extension: Any = native.extension
        self._group: Any = None
        self._is_unavailable = False
        self._has_ended = False
        self._connecting = threading.Lock()
        self._segments = segments or SharedSegments()
        # By operation, its tensors, kept until the native side is done.
        self._outstanding: dict[int, torch.Tensor | tuple[torch.Tensor, ...]] = {}

    @property
    @override
    def scales_for_free(self) -> bool:
        return self._group is not None

    @override
    def common_memory(self, size_bytes: int) -> Any:
        self.connect()
        if self._group is None:
            return None
        whole_bytes = max(size_bytes, 1)
        return share_file(self, whole_bytes, lambda descriptor, _: map_file(descriptor, whole_bytes))

    @property
    @override
    def has_ended(self) -> bool:
        """Also where another rank failed or left: all ranks then agree to replace the collective."""
        if self._has_ended or self._group is None:
            return self._has_ended
        return bool(self._extension.shared_memory_has_ended(self._group))

    @override
    def connect(self) -> None:
        """Raises ``SharedMemoryUnavailableError``, on all ranks, where they must share memory and cannot."""
        with self._connecting:
            if self._group is not None or (self._is_unavailable and not self.is_required):
                return
            try:
                group = join_host_group(self.inner, self._order)
            except SharedMemoryUnavailableError as error:
                self._is_unavailable = True
                if self.is_required:
                    # Who asks for it again gets another one, which refuses again; who has this one may go on with it.
                    self._has_ended, self.is_required = True, False
                    raise
                logger.info("%s; going on over torch.distributed", error)
                return
            self._segments.attach(group)
            self._group = group
            if self.inner.liveness is not None:
                self.inner.liveness.note_processes([state[0] for state in self._extension.shared_memory_states(group)])

    @staticmethod
    def copies(tensor: torch.Tensor) -> bool:
        """Whether operations that copy carry ``tensor``."""
        return tensor.is_cpu and tensor.layout is torch.strided

    @staticmethod
    def sums(tensor: torch.Tensor) -> bool:
        """Whether operations that sum carry ``tensor``."""
        return tensor.dtype in SUMMED_DTYPES and tensor.is_cpu and tensor.layout is torch.strided

    def _carries(self, is_covered: bool) -> bool:
        """Whether shared memory carries an operation whose tensors it covers or not. The same on every rank, because
        tensors have the same device, layout and dtype there; the first that it covers connects.
        """
        if is_covered and self._group is None:
            self.connect()
        return is_covered and self._group is not None

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory in which ``all_reduce`` needs no copies; for one reduction all ranks use such memory, or none does."""
        return (self.inner if self._is_unavailable else self._segments).allocate(numel, dtype, device)

    def _kind_at_once(self, flat: torch.Tensor, scale: float) -> int | None:
        """The kind of a tensor that is summed as it is; None where it must be looked at more closely, or refused."""
        kind = SCALAR_KINDS.get(flat.dtype)
        if kind is None or self._group is None or (scale != 1.0 and not flat.is_floating_point()):
            return None
        # What operands.plain sees to.
        is_plain = flat.is_cpu and flat.layout is torch.strided and flat.is_contiguous() and not flat.is_neg()
        return kind if is_plain else None

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        kind = self._kind_at_once(flat, scale)
        if kind is None:
            if not self._carries(self.sums(flat)):
                return self.inner.all_reduce(flat, scale, what=what)
            check_flat(self, f"all-reduce of {what}", flat, scale)
            flat = real(flat)
            kind = SCALAR_KINDS[flat.dtype]
        what = f"all-reduce of {what}"
        return self._begin(flat, what, "shared_memory_all_reduce", flat.data_ptr(), flat.numel(), kind, scale)

    @override
    def sum(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> None:
        """In one call of the native side, which begins, spins and adds; only a longer wait is watched and sleeps."""
        kind = self._kind_at_once(flat, scale)
        if kind is None or recorder.is_on or is_profiling():
            super().sum(flat, scale, what=what)
            return
        try:
            operation = self._extension.shared_memory_sum(self._group, flat.data_ptr(), flat.numel(), kind, scale)
        except RuntimeError as error:
            raise self._failure(f"all-reduce of {what}", error) from error
        if operation != 0:
            self._outstanding[operation] = flat
            self.finish(operation, f"all-reduce of {what}", self.timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor"
    ) -> SharedMemoryWork:
        """Begin ``output = scale * sum over ranks of this rank's part of each rank's flat``, for the torch backend.

        Args:
            output: dense contiguous tensor that shared memory sums; mutated.
            flat: dense contiguous, ``world_size`` times as many elements of the same dtype; part r belongs to rank r.
            scale: as for ``all_reduce``.
            what: as for ``all_reduce``.
        """
        what = f"reduce-scatter of {what}"
        check_parts(self, what, flat, output)
        check_flat(self, what, output, scale)
        self._carries(is_covered=True)
        part, whole = real(output.detach()), real(flat.detach())
        arguments = whole.data_ptr(), part.data_ptr(), part.numel(), SCALAR_KINDS[part.dtype], scale
        return self._begin((whole, part), what, "shared_memory_reduce_scatter", *arguments)

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        if not self._carries(self.copies(tensor)):
            return self.inner.all_gather(output, tensor, what=what)
        what = f"all-gather of {what}"
        check_parts(self, what, output, tensor)
        payload = plain(tensor)
        arguments = payload.data_ptr(), output.data_ptr(), payload.nbytes
        return self._begin((payload, output), what, "shared_memory_all_gather", *arguments)

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        """By an all-gather, because memory is not a link: the other ranks' parts are not read."""
        if not self._carries(self.copies(flat)):
            return self.inner.all_to_all(output, flat, sizes, senders, what=what)
        gathered = flat.new_empty((self.world_size, sum(sizes)))
        if self.rank not in senders:
            flat = flat.new_zeros(sum(sizes))
        first = sum(sizes[: self.rank])
        part = gathered[:, first : first + sizes[self.rank]]
        rows = slice(None) if len(senders) == self.world_size else list(senders)
        return DeferredWork(lambda: output.copy_(part[rows]), after=self.all_gather(gathered, flat, what=what))

    @override
    def sum_contributions(
        self, memory: torch.Tensor, owners: Sequence[tuple[int, int]], *, what: str = "contributions"
    ) -> Generator[Work, None, None]:
        """One operation, in place; memory from another place than ``allocate`` is refused."""
        if not self._carries(self.sums(memory)):
            yield from self.inner.sum_contributions(memory, owners, what=what)
            return
        assert len(memory) == 1 + sum(rank == self.rank for rank, _ in owners), "a row for each own contribution"
        if memory.numel() == 0:
            return
        rows = real(memory.detach())
        table = torch.tensor([(rank, 1 + number) for rank, number in owners], dtype=torch.int32)
        arguments = rows.data_ptr(), rows[0].numel(), SCALAR_KINDS[rows.dtype], table.data_ptr(), len(table)
        yield self._begin((rows, table), f"sum of {what}", "shared_memory_sum_contributions", *arguments)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        """An operation for each tensor."""
        if not self._carries(all(map(self.copies, tensors))):
            return self.inner.broadcast(tensors, source_rank, what=what)
        what = f"broadcast of {what} from rank {source_rank}"
        payloads = [plain(tensor) for tensor in tensors]
        finish = () if self.rank == source_rank else (copying(tensors, payloads),)
        work: Work = CompletedWork()
        for payload in payloads:
            arguments = payload.data_ptr(), payload.nbytes, source_rank
            # Operations complete in call order, so the last one stands for all, with the copies of all.
            work = self._begin((payload,), what, "shared_memory_broadcast", *arguments, finish=finish)
        return work

    @override
    def barrier(self) -> Work:
        return self.inner.barrier() if self._group is None else self._begin((), "barrier", "shared_memory_barrier")

    @override
    def progress(self) -> None:
        if self._outstanding:
            self.completed()

    def completed(self) -> int:
        """Advance operations without waiting; the last one of which all before it are complete too."""
        complete = self._call("an earlier operation", "shared_memory_progress")
        self._forget(complete)
        return complete

    def late_ranks(self) -> tuple[int, ...]:
        """The ranks that entered fewer rounds than this one."""
        arrived = [state[1] for state in self._extension.shared_memory_states(self._group)]
        return tuple(rank for rank, rounds in enumerate(arrived) if rounds < arrived[self.rank])

    @override
    def close(self) -> None:
        """Tells the ranks that wait for this one."""
        self._has_ended = True
        if self._group is not None:
            self._extension.shared_memory_close(self._group)

    @override
    def abandon(self) -> None:
        self.close()
        self.inner.abandon()

    def give_up(self) -> None:
        """Fail the operations in flight, on every rank."""
        self._has_ended = True
        if self._group is not None:
            self._extension.shared_memory_wait(self._group, NO_OPERATION, 0.0, False)

    def _begin(
        self,
        tensors: torch.Tensor | tuple[torch.Tensor, ...],
        what: str,
        function: str,
        *arguments: Any,
        finish: Sequence[Callable[[], None]] = (),
    ) -> SharedMemoryWork:
        """Begin an operation on ``tensors``, which are kept until it is done."""
        operation = self._call(what, function, *arguments)
        self._outstanding[operation] = tensors
        if len(self._outstanding) > FORGET_FROM:
            self.completed()
        return SharedMemoryWork(self, operation, what, finish)

    def _forget(self, complete: int) -> None:
        for operation in list(self._outstanding):
            if operation > complete:
                break
            self._outstanding.pop(operation, None)  # another thread may wait too

    def _call(self, what: str, function: str, *arguments: Any) -> int:
        """Call ``function`` of the native extension; return the number of an operation."""
        call: Callable[..., int] = getattr(self._extension, function)
        try:
            with profiled(what) if is_profiling() else contextlib.nullcontext():
                return call(self._group, *arguments)
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> CollectiveError:
        """What to raise for a call that the native side refused."""
        return CollectiveError(f"{what} failed on rank {self.rank} of {self.world_size}: {error}")

    def finish(self, operation: int, what: str, timeout_s: float, is_interrupted: Interruption = None) -> bool:
        """Wait until ``operation`` is complete; False if interrupted. Passing the deadline ends the whole group."""
        failure = None
        try:
            with span(what, category="collective"):
                if not self._extension.shared_memory_spin(self._group, operation):
                    failure = self._sleep(operation, what, timeout_s, is_interrupted)
        except CollectiveError:
            self.close()  # the others need not wait for this rank
            raise
        except RuntimeError as error:
            self.close()
            raise self._failure(what, error) from error
        if failure is not None:
            if failure[0] == UNDER_WAY:
                return False
            raise self._error_of(what, timeout_s, failure)
        self._outstanding.pop(operation, None)
        if min(self._outstanding, default=operation) < operation:
            self._forget(operation)
        return True

    def _sleep(self, operation: int, what: str, timeout_s: float, is_interrupted: Interruption) -> Failure | None:
        """Go on waiting after the native side has spun, watched by the stall inspector. Return what failed, if so;
        UNDER_WAY where the wait was interrupted.
        """
        wait = self._extension.shared_memory_wait
        failure: Failure | None = (UNDER_WAY, 0, "")
        position = f"{what}, operation {operation}"
        deadline_s = time.monotonic() + timeout_s
        with inspector.watch(self.inner.liveness, position, self.inner.stall_after_s, self.late_ranks):
            while is_interrupted is not None and failure is not None and failure[0] == UNDER_WAY:
                if is_interrupted():
                    return failure
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    break
                failure = wait(self._group, operation, min(INTERRUPTIBLE_SLICE_S, left_s), True)
            if failure is not None and failure[0] == UNDER_WAY:
                failure = wait(self._group, operation, max(0.0, deadline_s - time.monotonic()), False)
        return failure

    def _error_of(self, what: str, timeout_s: float, failure: Failure) -> CollectiveError:
        """What to raise for a wait that failed; it names the operation and the ranks."""
        status, rank_bits, detail = failure
        failed = f"{what} failed on rank {self.rank} of {self.world_size}"
        if status == MISMATCHED:
            return CollectiveError(
                f"{failed}: ranks must call the same operations in the same order"
                f" ({detail or 'another rank differs'}). Look for a branch that only some ranks take."
            )
        ranks = tuple(rank for rank in range(self.world_size) if rank_bits >> rank & 1)
        if self.rank in ranks:
            return CollectiveError(
                f"{failed}: the group has ended, because another rank stopped waiting for this one (its timeout passed,"
                " or it left with operations under way). Look at the first error in the output of the other ranks."
            )
        if not ranks:
            return CollectiveError(f"{failed}: no result within {timeout_s:g} s, though every rank arrived")
        fates = {LOST: "has exited", TIMED_OUT: f"did not arrive within {timeout_s:g} s", CLOSED: "has left the group"}
        host, states = socket.gethostname(), self._extension.shared_memory_states(self._group)
        lost = ", ".join(
            f"rank {rank} (process {process_id} on {host}, which {fates[status if is_running else LOST]})"
            for rank, (process_id, *_, is_running) in enumerate(states)
            if rank in ranks
        )
        return PeerLostError(
            f"Lost {lost}. {failed}.\nLook at the first error in the output of the ranks named above. Unless something"
            " restarts the job by itself, restart it from its last checkpoint.",
            ranks,
        )


@dataclass(eq=False)
class SharedMemoryWork(Work):
    """An operation in shared memory.

    Attributes:
        collective: runs the operation.
        operation: its number.
        what: its name in errors.
        finish: copy results to their places; called once, in order, when the operation is over.
    """

    collective: SharedMemoryCollective
    operation: int
    what: str
    finish: Sequence[Callable[[], None]]

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once; advances operations."""
        return self.collective.completed() >= self.operation

    @override
    def wait(self, is_interrupted: Interruption = None, timeout_s: float | None = None) -> bool:
        """``timeout_s`` overrides the collective's deadline. Passing it ends the whole group."""
        timeout_s = self.collective.timeout_s if timeout_s is None else timeout_s
        with profiled(f"wait for {self.what}") if is_profiling() else contextlib.nullcontext():
            is_over = self.collective.finish(self.operation, self.what, timeout_s, is_interrupted)
        if is_over:
            finish, self.finish = self.finish, ()
            for copy in finish:
                copy()
        return is_over
