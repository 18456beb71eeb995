"""A torch.distributed process group whose CPU tensors travel through shared memory: the backend "psengine".

torch offers no constructor for backends written in Python, so this is a whole group. Five operations are its own, where
shared memory covers the tensors. An ordinary group does the rest, over gloo, and over nccl for CUDA tensors::

    allreduce (SUM, AVG), broadcast, barrier,
    all_gather_single, reduce_scatter_single (SUM, AVG)                                        shared memory
    everything else: lists, coalesced, send, recv, gather, other sums, dtypes, layouts         gloo
    CUDA tensors                                                                               nccl, else gloo

A caller of ``wait()`` works on the operation itself. For callers that do not wait, such as native DDP, which waits for
a future, one thread per group waits for operations in the order they began. It starts with the first of them::

    caller    begin(0)  begin(1)            wait(1) ── works on 0 and 1 ── True
    waiter       wait(0) ── works on 0 ── future(0) done ── wait(1) ── future(1) done
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from psengine.collectives.base import Work
from psengine.collectives.c10d import C10dCollective, newest
from psengine.collectives.operands import copying, plain
from psengine.collectives.shared_memory.collective import SharedMemoryCollective, SharedMemoryWork
from psengine.collectives.torch_backend import NAME
from psengine.errors import CollectiveError

# How long the end of a group waits for operations in flight; those that still miss a rank then fail.
DRAIN_S = 2.0
# How long the others then take to notice.
LEAVE_S = 0.5

_AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
_ReduceScatterOptions = torch._C._distributed_c10d.ReduceScatterOptions
_BackendType = dist.ProcessGroup.BackendType
# Not left to torch: called through a group written in Python, its backends run with the interpreter's lock, which
# gloo's threads may need before the operation can end.
_LEFT_OVER = (
    *("send", "recv", "recv_anysource", "gather", "scatter", "reduce"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
    *("allgather", "allgather_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "allreduce_coalesced"),
)
_NO_TIMEOUT = timedelta(0)
# Native DDP's join(divide_by_initial_world_size=False) keeps a forward's count of ranks by its C++ half alone (torch
# 2.13): when Python's half goes, wait() is no longer ours and never returns. So the last works of such a size are kept.
_KEPT, _KEPT_BYTES = 16, 64


class GroupWork(dist.Work):
    """What an operation of the group returns; it completes whether or not anybody waits for it.

    Args:
        operation: in shared memory.
        result: the tensors that hold the result, which the future returns.
        timeout_s: deadline of the operation.
        finish: called once, after the operation: copies results to their places.
    """

    def __init__(
        self,
        operation: SharedMemoryWork,
        result: Sequence[torch.Tensor],
        timeout_s: float,
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._operation: Any = operation
        self._result = list(result)
        self._timeout_s = timeout_s
        self._finish: Any = finish
        self._completing = threading.Lock()
        self._is_done = False
        self._until_done = threading.Lock()  # held until then; an Event takes longer to make than a small operation
        self._until_done.acquire()
        self._error: Exception | None = None
        self._signals: list[torch.futures.Future[None]] = []  # of those who asked for a future

    @property
    def result_bytes(self) -> int:
        """Bytes of the result."""
        return sum(tensor.nbytes for tensor in self._result)

    def complete(self) -> None:
        """Work on the operation until it is done or has failed; raises only interrupts."""
        with self._completing:
            if self._is_done:
                return
            try:
                self._operation.wait(timeout_s=self._timeout_s)
                self._finish()
            except Exception as error:
                self._error = error
            self._operation = self._finish = None
            self._is_done = True
            self._until_done.release()
        self._tell_futures()

    def _tell_futures(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._signals.pop().set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result may be read.

        Args:
            timeout: where it is shorter than the group's own, passing it leaves the operation under way.

        Raises:
            CollectiveError: the operation failed or passed the group's timeout, or ``timeout`` passed.
            PeerLostError: the same, and ranks could be named.
        """
        timeout_s = timeout.total_seconds()
        if 0 < timeout_s < self._timeout_s:
            # Shared memory ends the group at a deadline, so a short wait leaves the work to the group's thread.
            if not self._until_done.acquire(timeout=timeout_s):
                raise CollectiveError(f"the operation did not complete within {timeout_s:g} s; it is still under way")
            self._until_done.release()
        elif not self._is_done:
            self.complete()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result's tensors; failed, it raises a ``RuntimeError`` with the text of the error."""
        # Future.set_exception hides the error from C++, where native DDP waits; a failed callback does not.
        signal: torch.futures.Future[None] = torch.futures.Future()
        future = signal.then(lambda _: self._outcome())
        self._signals.append(signal)
        if self._is_done:
            self._tell_futures()
        return future

    def _outcome(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether the operation is done or has failed."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._is_done and self._error is None


class Waiter:
    """The thread that completes a group's operations in the order they began; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: GroupWork) -> None:
        """Complete ``work`` in its turn."""
        with self._lock:
            if self._thread is None:
                # It holds no reference to this object or the group, so that both can go.
                thread = threading.Thread(target=_complete_in_order, args=(self._works,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self._works.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Let it complete what was begun and end; False where ``timeout_s`` passed first. Safe to call again."""
        self._works.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _complete_in_order(works: queue.SimpleQueue[GroupWork | None]) -> None:
    kept: deque[GroupWork] = deque(maxlen=_KEPT)
    while True:
        work: Any = works.get()
        if work is None:
            return
        if work.result_bytes <= _KEPT_BYTES:
            kept.append(work)
        work.complete()
        del work  # not kept until the next one comes


class SharedMemoryProcessGroup(dist.ProcessGroup):
    """The ranks of one host. Made by ``torch.distributed`` for the backend "psengine"; every rank makes it together.

    Args:
        options: torch's ``_DistributedBackendOptions``: the group's own store, rank, size, timeout of every operation,
            name, and of its ranks their ranks in the default group.
        nccl_options: ``ProcessGroupNCCL.Options`` of the user, or None.

    Raises:
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """

    def __init__(self, options: Any, nccl_options: Any = None) -> None:
        store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
        # The constructor with a store makes no object that C++ would ask for Python's methods.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        # For what this group's own operations leave over, and what its ranks meet over.
        self._ordinary = dist.ProcessGroup(store, rank, size)
        self._gloo = gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        backends: list[tuple[str, Any, Any]] = [("cpu", _BackendType.GLOO, gloo), ("cuda", _BackendType.GLOO, gloo)]
        if dist.is_nccl_available() and torch.cuda.is_available():
            nccl_options = nccl_options or dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, nccl_options)
            backends[1] = ("cuda", _BackendType.NCCL, nccl)
        for group in (self._ordinary, self):
            group._set_default_backend(_BackendType.GLOO)
            for device, kind, backend in backends:
                backend.options.global_ranks_in_group = options.global_ranks_in_group
                backend.options.group_name = options.group_id
                group._register_backend(torch.device(device), kind, backend)
        name: Any = f"{options.group_id}/ordinary"
        self._ordinary._set_group_name(name)
        self._shared = SharedMemoryCollective(C10dCollective(self._ordinary, timeout.total_seconds()))
        self._shared.connect()
        self._waiter = Waiter(f"psengine-group-{options.group_id}")
        # Also at interpreter exit, because a thread within native code must not outlive the interpreter.
        self._end = weakref.finalize(self, _end_group, self._waiter, self._shared, os.getpid(), DRAIN_S)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """The group's own store."""
        return self._store

    # ---- operations in shared memory ----

    def allreduce(self, tensors: Any, *opts: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Sum ``tensors``, a list of one, over ranks in place."""
        given = _given(dist.AllreduceOptions, opts, options)
        if given is None or not isinstance(tensors, list) or not _sums(given, *tensors):
            return self._ordinary.allreduce(tensors, *opts, **options)
        flat = plain(tensors[0])
        return self._begun(self._shared.all_reduce(flat, self._scale(given)), tensors, given, [flat])

    def broadcast(self, tensors: Any, *opts: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Overwrite ``tensors``, a list of one, by that of ``opts.rootRank``."""
        given = _given(dist.BroadcastOptions, opts, options)
        if given is None or not isinstance(tensors, list) or not _copies(*tensors):
            return self._ordinary.broadcast(tensors, *opts, **options)
        flat = plain(tensors[0])
        work = self._shared.broadcast([flat], given.rootRank)
        return self._begun(work, tensors, given, [flat] if given.rootRank != self.rank() else tensors)

    def barrier(self, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Wait until every rank has called it."""
        arguments = () if opts is None else (opts,)
        given = _given(dist.BarrierOptions, arguments, options)
        if given is None or (given.device is not None and given.device.type != "cpu"):
            return self._ordinary.barrier(*arguments, **options)
        return self._begun(self._shared.barrier(), [], given, [])

    def all_gather_single(self, output: Any, input: Any, *opts: Any) -> Any:
        """Fill ``output`` with every rank's ``input``, in rank order."""
        given = _given(_AllgatherOptions, opts)
        if given is None or not _copies(output) or not _copies(input) or not self._is_whole(output, input):
            return newest(self._ordinary, "all_gather_single", "_allgather_base")(output, input, *opts)
        whole = plain(output)
        return self._begun(self._shared.all_gather(whole, input), [output], given, [whole])

    def reduce_scatter_single(self, output: Any, input: Any, *opts: Any) -> Any:
        """Sum ``input`` over ranks; each keeps its part in ``output``."""
        given = _given(_ReduceScatterOptions, opts)
        if given is None or not _sums(given, output) or not _sums(given, input) or not self._is_whole(input, output):
            return newest(self._ordinary, "reduce_scatter_single", "_reduce_scatter_base")(output, input, *opts)
        part = plain(output)
        work = self._shared.reduce_scatter(part, plain(input), self._scale(given))
        return self._begun(work, [output], given, [part])

    # The names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _begun(
        self, operation: Work, places: Sequence[torch.Tensor], opts: Any, results: Sequence[torch.Tensor]
    ) -> dist.Work:
        """The work for ``operation``, after which ``results`` are copied to ``places``; complete where the caller waits
        anyway.
        """
        assert isinstance(operation, SharedMemoryWork)
        # gloo's where none is given, because set_timeout() and torch's own ways to change a group's timeout change it.
        timeout_s = opts.timeout.total_seconds()
        timeout_s = timeout_s if timeout_s > 0 else self._gloo.options._timeout.total_seconds()
        work = GroupWork(operation, places, timeout_s, copying(places, results))
        if opts.asyncOp:
            self._waiter.add(work)
        else:
            work.wait()
        return work

    def _is_whole(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether ``whole`` has room for every rank's ``part``."""
        return whole.numel() == part.numel() * self.size() and whole.dtype == part.dtype

    def _scale(self, opts: Any) -> float:
        return 1.0 / self.size() if opts.reduceOp == dist.ReduceOp.AVG else 1.0

    # ---- the end ----

    def shutdown(self) -> None:
        """End the group: operations under way may complete for a moment, later ones fail. Safe to call twice."""
        self._end()
        self._ordinary.shutdown()

    def abort(self) -> None:
        """End the group at once; operations under way fail."""
        if self._end.detach() is not None:
            _end_group(self._waiter, self._shared, os.getpid(), 0.0)
        self._ordinary.abort()


def _end_group(waiter: Waiter, shared: SharedMemoryCollective, process_id: int, drain_s: float) -> None:
    if os.getpid() != process_id:
        return  # a forked child's copy; the thread and the place in the group are its parent's
    has_ended = waiter.stop(drain_s)
    shared.close()
    # Ranks that wait for this one fail now, which ends its own waits. Without such ranks, this one gives up itself.
    if not has_ended and not waiter.stop(LEAVE_S):
        shared.give_up()
        waiter.stop(LEAVE_S)


def _left_over(name: str) -> Callable[..., dist.Work]:
    def operation(self: SharedMemoryProcessGroup, *arguments: Any, **options: Any) -> dist.Work:
        work: dist.Work = getattr(self._ordinary, name)(*arguments, **options)
        return work

    return operation


for _name in _LEFT_OVER:
    if hasattr(dist.ProcessGroup, _name):  # some have another name in other versions of torch
        setattr(SharedMemoryProcessGroup, _name, _left_over(_name))


def _given(kind: Any, opts: tuple[Any, ...], options: dict[str, Any] | None = None) -> Any:
    """The options of a call, of type ``kind``; None where it has others, which another overload takes."""
    if options or len(opts) > 1 or not all(isinstance(given, kind) for given in opts):
        return None
    return opts[0] if opts else kind()


def _copies(*tensors: torch.Tensor) -> bool:
    """Whether there is one tensor, which shared memory copies."""
    return len(tensors) == 1 and SharedMemoryCollective.copies(tensors[0])


def _sums(opts: Any, *tensors: torch.Tensor) -> bool:
    """Whether there is one tensor, and a reduction that shared memory does of it."""
    if len(tensors) != 1 or not SharedMemoryCollective.sums(tensors[0]):
        return False
    operation = opts.reduceOp
    return bool(operation == dist.ReduceOp.SUM or (operation == dist.ReduceOp.AVG and tensors[0].is_floating_point()))
