"""A torch.distributed process group whose CPU tensors travel through shared memory: the backend "psengine".

torch offers no constructor for backends written in Python, so this is a whole group. It holds an ordinary one, over
gloo, for its own set-up and for what shared memory does not do; CUDA tensors go to nccl, made for the first of them::

    all_reduce (SUM, AVG), reduce_scatter (SUM, AVG), broadcast, all_gather, barrier         shared memory
    send, recv, gather, scatter, reduce, all_to_all, other sums, dtypes, layouts             gloo
    CUDA tensors                                                                             nccl, else gloo
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from psengine.collectives.base import Work
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.operands import copying, plain
from psengine.collectives.shared_memory.collective import SharedMemoryCollective, SharedMemoryWork
from psengine.collectives.torch_backend import NAME
from psengine.collectives.torch_backend.group_work import GroupWork, Waiter
from psengine.errors import SharedMemoryUnavailableError

# How long the end of a group waits for operations in flight; those that still miss a rank then fail.
DRAIN_S = 2.0
# How long the others then take to notice.
LEAVE_S = 0.5

_AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
_ReduceScatterOptions = torch._C._distributed_c10d.ReduceScatterOptions


def _delegated(*names: str) -> Callable[..., dist.Work]:
    """A method that the ordinary group carries out, under the first of ``names`` that this torch has."""

    def operation(self: SharedMemoryProcessGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self._delegate(names, *arguments, **options)

    operation.__name__, operation.__doc__ = names[0], "Over the ordinary group."
    return operation


class SharedMemoryProcessGroup(dist.ProcessGroup):
    """The ranks of one host. Made by ``torch.distributed`` for the backend "psengine"; every rank makes it together.

    Args:
        store: key-value store of this group alone.
        rank: this process in the group.
        size: number of ranks.
        timeout: deadline of every operation.
        name: the group's name, the same on every rank.
        global_ranks: of the group's ranks, their ranks in the default group; empty for the default group.
        nccl_options: ``ProcessGroupNCCL.Options`` of the user, or None.

    Raises:
        SharedMemoryUnavailableError: the ranks do not share a host, or cannot open each other's memory.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: Any,
        global_ranks: Sequence[int] = (),
        nccl_options: Any = None,
    ) -> None:
        # The constructor with a store makes no object that C++ would ask for Python's methods.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._timeout = timeout
        self._name = name
        self._global_ranks = list(global_ranks)
        self._nccl_options = nccl_options
        self._has_cuda = False
        # For what C++ asks of this group without asking Python, it is an ordinary one too.
        self._ordinary = dist.ProcessGroup(store, rank, size)
        gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        gloo.options.global_ranks_in_group = self._global_ranks
        gloo.options.group_name = name
        self._gloo = gloo
        for group in (self._ordinary, self):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        ordinary_name: Any = f"{name}/ordinary"
        self._ordinary._set_group_name(ordinary_name)
        self._shared = SharedMemoryCollective(C10dCollective(self._ordinary, timeout.total_seconds()))
        try:
            self._shared.connect()
        except SharedMemoryUnavailableError as error:
            raise SharedMemoryUnavailableError(
                f"backend 'psengine' is for ranks that share a host's memory: {error}. Fix: use backend 'gloo', over"
                " which psengine.DistributedDataParallel(collective='auto') takes shared memory where it can."
            ) from error
        self._waiter = Waiter(f"psengine-group-{name}")
        # Also at interpreter exit, because a thread within native code must not outlive the interpreter.
        self._end = weakref.finalize(self, _end_group, self._waiter, self._shared, os.getpid(), DRAIN_S)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """The group's own store."""
        return self._store

    # ---- operations in shared memory ----

    def allreduce(self, tensors: Any, opts: Any = None, *arguments: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Sum ``tensors``, a list of one, over ranks in place."""
        if arguments or options or not _sums(tensors, opts, (dist.AllreduceOptions, dist.AllreduceCoalescedOptions)):
            name = "allreduce_coalesced" if isinstance(opts, dist.AllreduceCoalescedOptions) else "allreduce"
            return self._delegate((name,), tensors, *_given(opts), *arguments, **options)
        flat = plain(tensors[0])
        work = self._shared.all_reduce(flat, self._scale(opts))
        return self._begun(work, tensors, opts, copying(tensors, [flat]))

    def broadcast(self, tensors: Any, opts: Any = None, *arguments: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Overwrite ``tensors``, a list of one, by that of ``opts.rootRank``."""
        if arguments or options or opts is None or not _copies(tensors, opts, dist.BroadcastOptions):
            return self._delegate(("broadcast",), tensors, *_given(opts), *arguments, **options)
        flat = plain(tensors[0])
        work: Any = self._shared.broadcast([flat], opts.rootRank)
        has_news = opts.rootRank != self.rank()
        return self._begun(work, tensors, opts, copying(tensors, [flat]) if has_news else None)

    def barrier(self, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Wait until every rank has called it."""
        device = getattr(opts, "device", None)
        if options or isinstance(opts, timedelta) or (device is not None and device.type != "cpu"):
            if device is not None and device.type == "cuda":
                self._add_cuda()
            return self._delegate(("barrier",), *_given(opts), **options)
        return self._begun(self._shared.barrier(), (), opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Fill ``output_tensors``, a list of one list, with every rank's tensor, in rank order."""
        is_ours = not options and _copies(input_tensors, opts, _AllgatherOptions)
        if not is_ours or not _are_parts(output_tensors, input_tensors[0], self.size()):
            return self._delegate(("allgather",), output_tensors, input_tensors, *_given(opts), **options)
        payload = plain(input_tensors[0])
        gathered = payload.new_empty((self.size(), *payload.shape))
        work = self._shared.all_gather(gathered, payload)
        outputs = output_tensors[0]
        return self._begun(work, outputs, opts, copying(outputs, gathered.unbind()))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Fill ``output`` with every rank's ``input``, in rank order."""
        is_ours = all(_copies([tensor], opts, _AllgatherOptions) for tensor in (output, input))
        if not is_ours or not self._is_whole(output, input):
            return self._delegate(("all_gather_single", "_allgather_base"), output, input, *_given(opts))
        whole = plain(output)
        work = self._shared.all_gather(whole, input)
        return self._begun(work, [output], opts, copying([output], [whole]))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Sum the lists of ``input_tensors``, a list of one, over ranks; rank r keeps the sum of their r-th tensor."""
        is_ours = not options and _sums(output_tensors, opts, _ReduceScatterOptions)
        if not is_ours or not _are_parts(input_tensors, output_tensors[0], self.size()):
            return self._delegate(("reduce_scatter",), output_tensors, input_tensors, *_given(opts), **options)
        whole = torch.cat([plain(part).reshape(-1) for part in input_tensors[0]])
        return self._reduce_scatter(output_tensors[0], whole, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Sum ``input`` over ranks; each keeps its part in ``output``."""
        is_ours = all(_sums([tensor], opts, _ReduceScatterOptions) for tensor in (output, input))
        if not is_ours or not self._is_whole(input, output):
            return self._delegate(("reduce_scatter_single", "_reduce_scatter_base"), output, input, *_given(opts))
        return self._reduce_scatter(output, plain(input), opts)

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> dist.Work:
        part = plain(output)
        work = self._shared.reduce_scatter(part, whole, self._scale(opts))
        return self._begun(work, [output], opts, copying([output], [part]))

    # torch's functional collectives call these with one tensor.

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """``allreduce`` of each of ``tensors``."""
        if len(tensors) == 1:
            return self.allreduce(tensors, opts)
        return self._delegate(("allreduce_coalesced",), tensors, *_given(opts))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """``all_gather_single`` of each of ``inputs``."""
        if len(inputs) == 1:
            return self.all_gather_single(outputs[0], inputs[0], opts)
        names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return self._delegate(names, outputs, inputs, *_given(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """``reduce_scatter_single`` of each of ``inputs``."""
        if len(inputs) == 1:
            return self.reduce_scatter_single(outputs[0], inputs[0], opts)
        names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return self._delegate(names, outputs, inputs, *_given(opts))

    # The names before torch 2.13, and those that C++ looks up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _begun(
        self,
        operation: Work,
        result: Sequence[torch.Tensor],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        """The work for ``operation``; complete where the caller waits anyway."""
        assert isinstance(operation, SharedMemoryWork)
        work = GroupWork(operation, result, self._deadline_s(opts), finish)
        if getattr(opts, "asyncOp", True):
            self._waiter.add(work)
        else:
            work.wait()
        return work

    def _is_whole(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether ``whole`` has room for every rank's ``part``."""
        return whole.numel() == part.numel() * self.size() and whole.dtype == part.dtype

    def _scale(self, opts: Any) -> float:
        return 1.0 / self.size() if opts is not None and opts.reduceOp == dist.ReduceOp.AVG else 1.0

    def _deadline_s(self, opts: Any) -> float:
        timeout_s: float = opts.timeout.total_seconds() if opts is not None else 0.0
        # gloo's, because set_timeout() and torch's own ways to change a group's timeout change it there.
        return timeout_s if timeout_s > 0 else float(self._gloo.options._timeout.total_seconds())

    # ---- everything else ----

    def _delegate(self, names: Sequence[str], *arguments: Any, **options: Any) -> dist.Work:
        """Have the ordinary group do it, under the first of ``names`` that this torch has."""
        if _have_cuda(arguments) or _have_cuda(options.values()):
            self._add_cuda()
        function = next(getattr(self._ordinary, name) for name in names if hasattr(self._ordinary, name))
        work: dist.Work = function(*arguments, **options)
        return work

    send = _delegated("send")
    recv = _delegated("recv")
    recv_anysource = _delegated("recv_anysource")
    gather = _delegated("gather")
    scatter = _delegated("scatter")
    reduce = _delegated("reduce")
    alltoall = _delegated("alltoall")
    all_to_all_single = alltoall_base = _delegated("all_to_all_single", "alltoall_base")
    allgather_coalesced = _delegated("allgather_coalesced")

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cuda":
            self._add_cuda()
        return super()._get_backend(device)

    def _add_cuda(self) -> None:
        """Make the backend of CUDA tensors; ranks need not do so together."""
        if self._has_cuda:
            return
        self._has_cuda = True
        backend: Any = self._gloo
        kind = dist.ProcessGroup.BackendType.GLOO
        if dist.is_nccl_available() and torch.cuda.is_available():
            options = self._nccl_options or dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.global_ranks_in_group = self._global_ranks
            options.group_name = self._name
            store = PrefixStore("nccl/", self._store)
            backend = dist.ProcessGroupNCCL(store, self.rank(), self.size(), options)
            kind = dist.ProcessGroup.BackendType.NCCL
        for group in (self._ordinary, self):
            group._register_backend(torch.device("cuda"), kind, backend)

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


def _copies(tensors: Any, opts: Any, options: Any) -> bool:
    """Whether ``tensors`` is a list of one strided CPU tensor, and ``opts`` are None or ``options``."""
    return (
        isinstance(tensors, list)
        and len(tensors) == 1
        and (opts is None or isinstance(opts, options))
        and SharedMemoryCollective.copies(tensors[0])
    )


def _sums(tensors: Any, opts: Any, options: Any) -> bool:
    """``_copies``, for a reduction that shared memory does, of a dtype that it sums."""
    if not _copies(tensors, opts, options):
        return False
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    scales = operation == dist.ReduceOp.AVG and tensors[0].is_floating_point()
    return SharedMemoryCollective.sums(tensors[0]) and (scales or operation == dist.ReduceOp.SUM)


def _are_parts(lists: Any, part: torch.Tensor, world_size: int) -> bool:
    """Whether ``lists`` is one list with a tensor such as ``part`` for each rank."""
    return (
        isinstance(lists, list)
        and len(lists) == 1
        and len(lists[0]) == world_size
        and all(
            t.shape == part.shape and t.dtype == part.dtype and t.device == part.device and t.layout == part.layout
            for t in lists[0]
        )
    )


def _given(opts: Any) -> tuple[Any, ...]:
    """The options as arguments: none where there are none, because C++ takes no None."""
    return () if opts is None else (opts,)


def _have_cuda(values: Any) -> bool:
    """Whether there is a CUDA tensor among ``values``, or in their lists."""
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else isinstance(value, list | tuple) and _have_cuda(value)
        for value in values
    )
