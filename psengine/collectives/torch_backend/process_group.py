"""A torch.distributed process group whose CPU tensors travel through shared memory: the backend "psengine".

torch offers no constructor for backends written in Python, so this is a whole group. It holds an ordinary one, over
gloo, for its own set-up and for what shared memory does not do; CUDA tensors go to nccl, made for the first of them::

    all_reduce (SUM, AVG), reduce_scatter (SUM, AVG), broadcast, all_gather, barrier   shared memory
    send, recv, gather, scatter, reduce, all_to_all, other sums, other dtypes, sparse  gloo
    CUDA tensors                                                                       nccl, gloo where there is none
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

from psengine.collectives.c10d import C10dCollective
from psengine.collectives.operands import are_multiples, are_parts, copying, describe, given, have_cuda, plain
from psengine.collectives.shared_memory.collective import SCALAR_KINDS, SharedMemoryCollective
from psengine.collectives.torch_backend import NAME
from psengine.collectives.torch_backend.group_work import GroupWork, OrdinaryWork, Waiter
from psengine.collectives.transport_errors import is_transport_error
from psengine.errors import CollectiveError, SharedMemoryUnavailableError

# How long the end of a group waits for operations that nobody waited for; those that still miss a rank then fail.
DRAIN_S = 2.0
# How long the others then take to notice.
LEAVE_S = 0.5
# Whose works explain their errors; those of others stay torch's own, of which recv's knows the source rank.
EXPLAINED = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter")
# How long after its connections a process that dies may take to end.
DEATH_S = 0.5


def _over_gloo(what: str, *names: str) -> Callable[..., dist.Work]:
    """The method ``names[0]`` of a group that has its ordinary group do ``what``."""

    def operation(self: SharedMemoryProcessGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self._delegate(what, names, *arguments, **options)

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

    def __repr__(self) -> str:
        return f"SharedMemoryProcessGroup(name={self._name!r}, rank={self.rank()}, size={self.size()})"

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """The group's own store."""
        return self._store

    # ---- operations in shared memory ----

    def allreduce(self, tensors: Any, opts: Any = None, *arguments: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Sum ``tensors``, a list of one, over ranks in place."""
        if not self._is_covered(tensors, opts, dist.AllreduceOptions) or arguments or options:
            return self._delegate("all_reduce", ("allreduce",), tensors, *given(opts), *arguments, **options)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Sum each of ``tensors`` over ranks in place."""
        if not self._is_covered(tensors, opts, dist.AllreduceCoalescedOptions, count=None):
            return self._delegate("all_reduce", ("allreduce_coalesced",), tensors, *given(opts))
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        scale = self._scale(opts)
        flats = [plain(tensor) for tensor in tensors]
        operation = None
        for flat in flats:
            operation = self._shared.all_reduce(flat, scale)
        return self._begun(operation, tensors, opts, copying(tensors, flats))

    def broadcast(self, tensors: Any, opts: Any = None, *arguments: Any, **options: Any) -> dist.Work:  # type: ignore[override]
        """Overwrite ``tensors``, a list of one, by that of ``opts.rootRank``."""
        is_ours = self._is_covered(tensors, opts, dist.BroadcastOptions, any_dtype=True) and opts is not None
        if not is_ours or arguments or options:
            return self._delegate("broadcast", ("broadcast",), tensors, *given(opts), *arguments, **options)
        flat = plain(tensors[0])
        operation = self._shared.broadcast([flat], opts.rootRank)
        has_news = opts.rootRank != self.rank()
        return self._begun(operation, tensors, opts, copying(tensors, [flat]) if has_news else None)

    def barrier(self, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Wait until every rank has called it."""
        device = getattr(opts, "device", None)
        if options or isinstance(opts, timedelta) or (device is not None and device.type != "cpu"):
            return self._delegate("barrier", ("barrier",), *given(opts), device=device, **options)
        return self._begun(self._shared.barrier(), (), opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Fill ``output_tensors``, a list of one list, with every rank's tensor, in rank order."""
        is_ours = self._is_covered(input_tensors, opts, _AllgatherOptions, any_dtype=True) and not options
        if not is_ours or not are_parts(output_tensors, input_tensors[0], self.size()):
            return self._delegate("all_gather", ("allgather",), output_tensors, input_tensors, *given(opts), **options)
        payload = plain(input_tensors[0])
        gathered = payload.new_empty((self.size(), *payload.shape))
        operation = self._shared.all_gather(gathered, payload)
        outputs = output_tensors[0]
        return self._begun(operation, outputs, opts, copying(outputs, gathered.unbind()))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Fill ``output`` with every rank's ``input``, in rank order."""
        return self._gather_into([output], [input], opts, ("all_gather_single", "_allgather_base"), output, input)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """As ``all_gather_single``, for each of ``outputs`` and ``inputs``."""
        names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return self._gather_into(outputs, inputs, opts, names, outputs, inputs)

    def _gather_into(self, outputs: Any, inputs: Any, opts: Any, names: Sequence[str], *arguments: Any) -> dist.Work:
        if not (
            self._is_covered(inputs, opts, _AllgatherOptions, any_dtype=True, count=None)
            and self._is_covered(outputs, opts, _AllgatherOptions, any_dtype=True, count=None)
            and are_multiples(outputs, inputs, self.size())
        ):
            return self._delegate("all_gather", names, *arguments, *given(opts))
        gathered = [plain(output) for output in outputs]
        operation = None
        for whole, part in zip(gathered, inputs, strict=True):
            operation = self._shared.all_gather(whole, part)
        return self._begun(operation, outputs, opts, copying(outputs, gathered))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **options: Any) -> dist.Work:  # type: ignore[override]
        """Sum the lists of ``input_tensors``, a list of one, over ranks; rank r keeps the sum of their r-th tensor."""
        is_ours = self._is_covered(output_tensors, opts, _ReduceScatterOptions) and not options
        if not is_ours or not are_parts(input_tensors, output_tensors[0], self.size()):
            return self._delegate(
                "reduce_scatter", ("reduce_scatter",), output_tensors, input_tensors, *given(opts), **options
            )
        whole = torch.cat([plain(part).reshape(-1) for part in input_tensors[0]])
        return self._reduce_scatter(output_tensors, [whole], opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Sum ``input`` over ranks; each keeps its part in ``output``."""
        names = ("reduce_scatter_single", "_reduce_scatter_base")
        return self._scatter_from([output], [input], opts, names, output, input)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """As ``reduce_scatter_single``, for each of ``outputs`` and ``inputs``."""
        names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return self._scatter_from(outputs, inputs, opts, names, outputs, inputs)

    def _scatter_from(self, outputs: Any, inputs: Any, opts: Any, names: Sequence[str], *arguments: Any) -> dist.Work:
        if not (
            self._is_covered(inputs, opts, _ReduceScatterOptions, count=None)
            and self._is_covered(outputs, opts, _ReduceScatterOptions, count=None)
            and are_multiples(inputs, outputs, self.size())
        ):
            return self._delegate("reduce_scatter", names, *arguments, *given(opts))
        return self._reduce_scatter(outputs, [plain(whole) for whole in inputs], opts)

    def _reduce_scatter(self, outputs: list[torch.Tensor], wholes: list[torch.Tensor], opts: Any) -> dist.Work:
        scale = self._scale(opts)
        parts = [plain(output) for output in outputs]
        operation = None
        for part, whole in zip(parts, wholes, strict=True):
            operation = self._shared.reduce_scatter(part, whole, scale)
        return self._begun(operation, outputs, opts, copying(outputs, parts))

    # The names before torch 2.13, and those that C++ looks up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _begun(
        self,
        operation: Any,
        result: Sequence[torch.Tensor],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        """The work for ``operation``; complete where the caller waits anyway."""
        work = GroupWork(operation, result, self._deadline_s(opts), finish)
        if getattr(opts, "asyncOp", True):
            self._waiter.add(work)
        else:
            work.wait()
        return work

    # ---- what shared memory covers ----

    def _is_covered(
        self, tensors: Any, opts: Any, options: Any, *, any_dtype: bool = False, count: int | None = 1
    ) -> bool:
        """Whether these are strided CPU tensors of dtypes (all the same to a copy) and a reduction we can do."""
        if not isinstance(tensors, list) or len(tensors) != (count or len(tensors)) or not tensors:
            return False
        if opts is not None and not isinstance(opts, options):
            return False
        if any(t.device.type != "cpu" or t.layout is not torch.strided for t in tensors):
            return False
        if any_dtype:
            return True
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == dist.ReduceOp.SUM:
            return all(t.dtype in SCALAR_KINDS or t.is_complex() for t in tensors)
        return bool(operation == dist.ReduceOp.AVG) and all(
            t.is_floating_point() and t.dtype in SCALAR_KINDS for t in tensors
        )

    def _scale(self, opts: Any) -> float:
        return 1.0 / self.size() if opts is not None and opts.reduceOp == dist.ReduceOp.AVG else 1.0

    def _deadline_s(self, opts: Any) -> float:
        timeout_s: float = opts.timeout.total_seconds() if opts is not None else 0.0
        # gloo's, because set_timeout() and torch's own ways to change a group's timeout change it there.
        return timeout_s if timeout_s > 0 else float(self._gloo.options._timeout.total_seconds())

    # ---- everything else ----

    def _delegate(
        self, what: str, names: Sequence[str], *arguments: Any, device: torch.device | None = None, **options: Any
    ) -> dist.Work:
        """Have the ordinary group do it, under the first of ``names`` that this torch knows."""
        is_cuda = (device is not None and device.type == "cuda") or have_cuda(arguments) or have_cuda(options.values())
        if is_cuda:
            self._add_cuda()
        function = next(getattr(self._ordinary, name) for name in names if hasattr(self._ordinary, name))

        def explain(error: RuntimeError) -> Exception:
            return self._describe_failure(error, what, arguments)

        try:
            work: dist.Work = function(*arguments, **options)
        except RuntimeError as error:
            raise explain(error) from error
        return OrdinaryWork(work, explain) if what in EXPLAINED and not is_cuda else work

    def _describe_failure(self, error: RuntimeError, what: str, arguments: Any) -> Exception:
        message = str(error).strip()
        if is_transport_error(error):
            lost = self._shared.find_lost(what, DEATH_S)
            if lost is not None:
                return lost
        return CollectiveError(
            f"{what} failed on rank {self.rank()} of {self.size()}: shared memory does not cover"
            f" {describe(arguments)}, and the transport that does it instead says: {message}"
        )

    send = _over_gloo("send", "send")
    recv = _over_gloo("recv", "recv")
    recv_anysource = _over_gloo("recv", "recv_anysource")
    gather = _over_gloo("gather", "gather")
    scatter = _over_gloo("scatter", "scatter")
    reduce = _over_gloo("reduce", "reduce")
    alltoall = _over_gloo("all_to_all", "alltoall")
    all_to_all_single = alltoall_base = _over_gloo("all_to_all", "all_to_all_single", "alltoall_base")
    allgather_coalesced = _over_gloo("all_gather", "allgather_coalesced")

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
    # Ranks that wait for this one fail now, which ends its own waits. Where nobody waits, this one has to say so.
    if not has_ended and not waiter.stop(LEAVE_S):
        shared.give_up()
        waiter.stop(LEAVE_S)


_AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
_ReduceScatterOptions = torch._C._distributed_c10d.ReduceScatterOptions
