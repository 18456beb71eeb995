"""The collective between processes of one host: sums in shared memory, at the speed of memory.

Algorithm, for W ranks and n bytes (csrc/shared_memory.h says how it is done)::

    tensor from allocate()   in place: each byte of the W tensors is read once and written once, by whoever has time
    any other tensor         in pieces of a staging slot: copied in, summed, copied out
    up to 16 KiB             copied in, then summed by every rank for itself: one round trip

A call costs two notifications a piece (one where it is small). There is no thread: ranks work while they begin or wait
for an operation, so communication takes no core away from whoever still computes.

::

    rank 0   all_reduce(0)  all_reduce(1)         wait(0) ── sums what is left of 0 and 1 ── done
             arrived 0      arrived 1, sums 0
    rank 1              all_reduce(0)        all_reduce(1)  wait(0) ── done
                        arrived 0            arrived 1, sums 1

Memory is anonymous (memfd) and opened through /proc/<process>/fd: the size of /dev/shm does not matter, and nothing is
left behind, however processes end.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, Work
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.operands import copying, is_plain, plain
from psengine.collectives.shared_memory.host import join_host_group
from psengine.collectives.shared_memory.segments import SharedSegments
from psengine.errors import CollectiveError, PeerLostError, SharedMemoryUnavailableError
from psengine.kernels import native
from psengine.tracing.stall_inspector import Whereabouts, inspector
from psengine.tracing.timeline import is_profiling, now_ns, profiled, record_wait, recorder

logger = logging.getLogger(__name__)

# csrc/kernels.h, ScalarKind
SCALAR_KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int32: 4,
    torch.int64: 5,
}
# csrc/shared_memory.h, WaitStatus
LOST, TIMED_OUT, MISMATCHED, CLOSED = 1, 2, 3, 4
# So many operations may be under way before the complete ones are looked for, in case nobody waits for them.
FORGET_FROM = 64
# A number no operation reaches.
NO_OPERATION = 2**63


class SharedMemoryCollective(Collective):
    """Collective operations between the ranks of a process group that share a host.

    Ranks connect at the first operation on a CPU tensor. Tensors that shared memory does not cover (sparse, on other
    devices, of rarer dtypes) go through the process group.

    Args:
        process_group: the group, or a collective over it; None means the default group. For CPU tensors it needs a
            backend that takes them.
        timeout_s: deadline of every wait; None takes the process group's own timeout.
        required: False to go on over the process group where ranks cannot share memory, saying so at info level.

    Scaling: each addend is multiplied by ``scale`` and rounded to its dtype, and the products are added in rank order,
    16-bit ones in float32. Between two ranks that is what native DDP does over gloo, to the last bit.

    Attributes:
        collects_square_sums: whether each all-reduce also yields the sum of squares of its result
            (``SharedMemoryWork.square_sum``), which costs no further pass.

    Operations raise:
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """

    def __init__(self, process_group: Any = None, timeout_s: float | None = None, *, required: bool = True) -> None:
        is_collective = isinstance(process_group, C10dCollective)
        self._c10d = process_group if is_collective else C10dCollective(process_group, timeout_s)
        self.rank = self._c10d.rank
        self.world_size = self._c10d.world_size
        self.timeout_s = self._c10d.timeout_s
        self.collects_square_sums = False
        self._required = required
        self._extension: Any = native.extension
        self._host = socket.gethostname()
        self._group: Any = None
        self._is_unavailable = False
        self._connecting = threading.Lock()
        self._segments = SharedSegments(self._extension) if native.has_shared_memory() else None
        # By operation, what it works on: kept until the native side is done, whoever drops the work.
        self._outstanding: dict[int, tuple[torch.Tensor, ...]] = {}

    def __repr__(self) -> str:
        return f"SharedMemoryCollective(rank={self.rank}, world_size={self.world_size})"

    @property
    @override
    def scales_for_free(self) -> bool:  # type: ignore[override]
        """Connects the ranks, because only then is it known."""
        return self._is_connected()

    def _is_connected(self) -> bool:
        """Whether ranks share memory; the first call, which all ranks make at the same place, connects them."""
        if self._group is None and not self._is_unavailable:
            with self._connecting:
                if self._group is None and not self._is_unavailable:
                    self._connect()
        return self._group is not None

    def connect(self) -> None:
        """Connect the ranks now, if they are not, instead of at the first operation; all ranks call it.

        Raises:
            SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
        """
        self._is_connected()

    def _connect(self) -> None:
        try:
            self._group = join_host_group(self._c10d)
        except SharedMemoryUnavailableError as error:
            if self._required:
                raise
            self._is_unavailable = True
            logger.info("%s; going on over torch.distributed", error)
            return
        assert self._segments is not None
        self._segments.attach(self._group)
        self._c10d.note_processes([state[0] for state in self._extension.shared_memory_states(self._group)])

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory in which ``all_reduce`` needs no copies.

        All ranks must allocate what they will reduce together, or none of them.
        """
        if self._segments is None or self._is_unavailable or device.type != "cpu" or dtype not in SCALAR_KINDS:
            return torch.empty(numel, dtype=dtype, device=device)
        return self._segments.allocate(numel, dtype)

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        """Complex tensors are reduced through their real view."""
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        kind = SCALAR_KINDS.get(flat.dtype)
        if kind is None or not is_plain(flat) or not self._is_connected():
            return self._c10d.all_reduce(flat, scale, what=what)
        self._check_scale(f"all-reduce of {what}", flat, scale)
        what = f"all-reduce of {what}"
        operation = self._begin(
            what,
            self._extension.shared_memory_all_reduce,
            flat.data_ptr(),
            flat.numel(),
            kind,
            scale,
            self.collects_square_sums,
        )
        self._keep(operation, flat)
        return SharedMemoryWork(self, operation, what, self.collects_square_sums)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> None:
        is_covered = all(t.device.type == "cpu" and t.layout == torch.strided for t in tensors)
        if not is_covered or not self._is_connected():
            self._c10d.broadcast(tensors, source_rank, what=what)
            return
        what = f"broadcast of {what} from rank {source_rank}"
        work = None
        for tensor in tensors:
            payload = plain(tensor)
            work = self.start_broadcast(payload, source_rank, what=what)
            copy = copying([tensor], [payload])
            if copy is not None and self.rank != source_rank:
                work.wait()
                copy()
        if work is not None:
            work.wait()

    def start_broadcast(self, payload: torch.Tensor, source_rank: int, *, what: str) -> SharedMemoryWork:
        """Begin to overwrite ``payload``, contiguous on the CPU, by ``source_rank``'s, between connected ranks."""
        operation = self._begin(
            what,
            self._extension.shared_memory_broadcast,
            payload.data_ptr(),
            payload.numel() * payload.element_size(),
            source_rank,
        )
        self._keep(operation, payload)
        return SharedMemoryWork(self, operation, what, wants_square_sum=False)

    @override
    def all_gather(self, tensor: torch.Tensor, *, what: str = "tensor") -> list[torch.Tensor]:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not self._is_connected():
            return self._c10d.all_gather(tensor, what=what)
        payload = plain(tensor)
        gathered = payload.new_empty((self.world_size, *payload.shape))
        self.start_all_gather(gathered, payload, what=f"all-gather of {what}").wait()
        return list(gathered.unbind())

    def start_all_gather(self, gathered: torch.Tensor, payload: torch.Tensor, *, what: str) -> SharedMemoryWork:
        """Begin to fill ``gathered`` with every rank's ``payload``, in rank order, between connected ranks.

        Both are contiguous CPU tensors; ``gathered`` has ``world_size`` times as many bytes, and may hold ``payload``
        in its own place.
        """
        operation = self._begin(
            what,
            self._extension.shared_memory_all_gather,
            payload.data_ptr(),
            gathered.data_ptr(),
            payload.numel() * payload.element_size(),
        )
        self._keep(operation, payload, gathered)
        return SharedMemoryWork(self, operation, what, wants_square_sum=False)

    def reduce_scatter(
        self, output: torch.Tensor, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor"
    ) -> Work:
        """Begin ``output = scale * sum over ranks of this rank's part of each rank's flat``.

        Args:
            output: contiguous CPU tensor of a dtype in ``SCALAR_KINDS``; mutated.
            flat: contiguous, ``world_size`` times as many elements of the same dtype; part r belongs to rank r.
            scale: as in ``all_reduce``.
            what: as in ``all_reduce``.
        """
        if flat.numel() != output.numel() * self.world_size or flat.dtype != output.dtype:
            raise CollectiveError(
                f"reduce-scatter of {what}: every rank gets an equal part (expected {output.numel() * self.world_size}"
                f" elements of {output.dtype}, got {flat.numel()} of {flat.dtype})"
            )
        if flat.dtype not in SCALAR_KINDS or not is_plain(flat) or not is_plain(output):
            raise CollectiveError(
                f"reduce-scatter of {what}: only contiguous CPU tensors of {', '.join(map(str, SCALAR_KINDS))} are"
                f" covered (got {flat.dtype} on {flat.device} and {output.device})"
            )
        self._check_scale(f"reduce-scatter of {what}", flat, scale)
        if not self._is_connected():
            raise CollectiveError(f"reduce-scatter of {what} needs ranks that share memory")
        what = f"reduce-scatter of {what}"
        operation = self._begin(
            what,
            self._extension.shared_memory_reduce_scatter,
            flat.data_ptr(),
            output.data_ptr(),
            output.numel(),
            SCALAR_KINDS[flat.dtype],
            scale,
        )
        self._keep(operation, flat, output)
        return SharedMemoryWork(self, operation, what, wants_square_sum=False)

    @override
    def barrier(self, timeout_s: float | None = None) -> None:
        if self._group is None:
            self._c10d.barrier(timeout_s)
            return
        self.start_barrier().wait(timeout_s)

    def start_barrier(self) -> SharedMemoryWork:
        """Begin a barrier between connected ranks."""
        operation = self._begin("barrier", self._extension.shared_memory_barrier)
        return SharedMemoryWork(self, operation, "barrier", wants_square_sum=False)

    @override
    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        return self._c10d.wait_for(future, what)

    @property
    def whereabouts(self) -> Whereabouts | None:
        """See ``stall_inspector.Watched``."""
        return self._c10d.whereabouts

    def late_ranks(self) -> tuple[int, ...] | None:
        """See ``stall_inspector.Watched``: those that have not come as far as this rank."""
        arrived = [state[1] for state in self._extension.shared_memory_states(self._group)]
        return tuple(rank for rank, rounds in enumerate(arrived) if rounds < arrived[self.rank])

    @override
    def hosts(self) -> tuple[str, ...]:
        return (self._host,) * self.world_size if self._group is not None else self._c10d.hosts()

    @override
    def diagnose(self, error: BaseException, what: str) -> Exception:
        return self._c10d.diagnose(error, what)

    @override
    def close(self) -> None:
        """Ranks that wait for this one learn that it left."""
        if self._group is not None:
            self._extension.shared_memory_close(self._group)

    def find_lost(self, what: str, within_s: float) -> CollectiveError | None:
        """The error that names the connected ranks whose process has ended or ends ``within_s``; None if all run on."""
        deadline = time.monotonic() + within_s
        while True:
            states = self._extension.shared_memory_states(self._group)
            rank_bits = sum(1 << rank for rank, (*_, is_running) in enumerate(states) if not is_running)
            if rank_bits:
                return self._error(what, self.timeout_s, LOST, rank_bits, "")
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def give_up(self) -> None:
        """Fail, on every rank, what is under way; for a group whose end does not come by itself."""
        if self._group is not None:
            self._extension.shared_memory_wait(self._group, NO_OPERATION, 0.0)

    def take_square_sum(self, operation: int) -> float | None:
        """The sum of squares of a completed all-reduce, once; None where a rank did not compute its part."""
        value: float = self._extension.shared_memory_take_square_sum(self._group, operation)
        return None if math.isnan(value) else value

    def _check_scale(self, what: str, flat: torch.Tensor, scale: float) -> None:
        if scale != 1.0 and not flat.is_floating_point():
            raise CollectiveError(
                f"{what}: integers are summed, not scaled (expected scale 1.0 for {flat.dtype}, got {scale})"
            )

    def _keep(self, operation: int, *tensors: torch.Tensor) -> None:
        self._outstanding[operation] = tensors
        if len(self._outstanding) > FORGET_FROM:
            self._forget(self._begin("an earlier operation", self._extension.shared_memory_progress))

    def _forget(self, complete: int) -> None:
        for operation in list(self._outstanding):
            if operation > complete:
                break
            self._outstanding.pop(operation, None)  # another thread may wait too

    def _begin(self, what: str, begin: Any, *arguments: Any) -> int:
        try:
            if is_profiling():
                with profiled(what):
                    operation: int = begin(self._group, *arguments)
            else:
                operation = begin(self._group, *arguments)
        except RuntimeError as error:
            raise CollectiveError(f"{what} failed on rank {self.rank} of {self.world_size}: {error}") from error
        return operation

    def _wait(self, operation: int, what: str, timeout_s: float | None = None) -> None:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        started_ns = now_ns() if recorder.is_on else 0
        stall_after_s = self._c10d.stall_after_s
        watched = inspector.enter(self, operation, what, timeout_s, stall_after_s) if stall_after_s else None
        try:
            if is_profiling():
                with profiled(f"wait for {what}"):
                    failure = self._extension.shared_memory_wait(self._group, operation, timeout_s)
            else:
                failure = self._extension.shared_memory_wait(self._group, operation, timeout_s)
        except RuntimeError as error:
            self.close()  # the others need not wait for this rank
            raise CollectiveError(f"{what} failed on rank {self.rank} of {self.world_size}: {error}") from error
        finally:
            if watched is not None:
                inspector.leave(watched)
        if failure is not None:
            raise self._error(what, timeout_s, *failure)
        if started_ns:
            record_wait(what, started_ns)
        self._forget(operation)

    def _error(self, what: str, timeout_s: float, status: int, rank_bits: int, detail: str) -> CollectiveError:
        failed = f"{what} failed on rank {self.rank} of {self.world_size}"
        if status == MISMATCHED:
            return CollectiveError(
                f"{failed}: ranks must call the same operations in the same order ({detail or 'another rank differs'})."
                " Look for a branch that only some ranks take."
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
        states = self._extension.shared_memory_states(self._group)
        lost = ", ".join(
            f"rank {rank} (process {states[rank][0]} on {self._host}, which"
            f" {fates[status] if states[rank][4] else fates[LOST]})"
            for rank in ranks
        )
        return PeerLostError(
            f"Lost {lost}. {failed}.\nLook at the first error in the output of the ranks named above; restart the job"
            " from its last checkpoint.",
            ranks,
        )


class SharedMemoryWork(Work):
    """An operation in shared memory."""

    def __init__(self, collective: SharedMemoryCollective, operation: int, what: str, wants_square_sum: bool) -> None:
        self._collective = collective
        self._operation = operation
        self._what = what
        self._wants_square_sum = wants_square_sum

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """``timeout_s`` overrides the collective's deadline. Passing it ends the whole group."""
        self._collective._wait(self._operation, self._what, timeout_s)
        if self._wants_square_sum:
            self._wants_square_sum = False
            self.square_sum = self._collective.take_square_sum(self._operation)
