"""The collective over torch.distributed: any backend, any device."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Interruption, Work
from psengine.collectives.liveness import PATIENCE_S, Liveness
from psengine.collectives.operands import check_flat, check_parts, copying, flat_bytes, plain, real
from psengine.errors import CollectiveError, PeerLostError, ReplicaMismatchError
from psengine.tracing.stall_inspector import inspector, stall_after_s
from psengine.tracing.timeline import span

# How long a wait stays inside the transport before it looks whether another rank raised the alarm.
WAIT_SLICE_S = 1.0
# How long a wait stays there that may be interrupted.
INTERRUPTIBLE_SLICE_S = 0.02
# How long a rank that has not exited may take to answer a roll call; see Liveness.
ROLL_CALL_GRACE_S = 10.0
# Between two ranks gloo sums two halves of a message, one on each of its two threads, 12 to 16 % sooner than the whole
# (benchmarks/step_overhead), with the same bits. With more ranks the order of additions depends on an element's place
# in its message, so nothing is split.
SPLIT_FROM_BYTES = 4 * 1024 * 1024
# So many operations are held after they end. A transport's thread that is the last to let go of one frees Python's
# tensors, for which it needs the interpreter's lock; while the interpreter finalizes, that aborts the process.
LATEST_WORKS = 4


class C10dCollective(Collective):
    """Collective operations of a ``torch.distributed`` process group.

    Args:
        process_group: the group; None means the default group. Held weakly, because the group's store keeps its port.
        timeout_s: deadline of every wait; None takes the process group's own timeout.
        is_watched: look for missing ranks through the group's store, before and after a failure.

    Scaling: ``all_reduce`` multiplies the addends by ``scale`` and sums, as native DDP does, so results agree bitwise.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        *,
        is_watched: bool = True,
    ) -> None:
        group: dist.ProcessGroup = process_group or dist.distributed_c10d._get_default_group()
        self.process_group: dist.ProcessGroup = weakref.proxy(group)
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout_s = timeout_s if timeout_s is not None else _group_timeout_s(group)
        self._is_gloo = "gloo" in _backends(group)
        self._latest_works: collections.deque[list[dist.Work]] = collections.deque(maxlen=LATEST_WORKS)
        self.stall_after_s = stall_after_s()
        self._begun = self._choices = 0
        self.liveness = _start_liveness(group, self.timeout_s) if is_watched else None

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        what = f"all-reduce of {what}"
        check_flat(self, what, flat, scale)
        if scale != 1.0:
            flat.mul_(scale)
        if self.world_size == 1:
            return CompletedWork()
        payload = real(flat)
        messages = self._messages(payload)
        return self.begin(lambda: [self.process_group.allreduce([part]) for part in messages], what, payload.device)

    def _messages(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors to send for one: halves where that is faster and adds nothing in another order."""
        is_splittable = self._is_gloo and self.world_size == 2 and payload.device.type == "cpu"
        if not is_splittable or payload.is_sparse or payload.numel() * payload.element_size() < SPLIT_FROM_BYTES:
            return (payload,)
        return payload.tensor_split(2)

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        what = f"all-gather of {what}"
        check_parts(self, what, output, tensor)
        parts = list(flat_bytes(output.detach()).view(self.world_size, -1).unbind())
        payload = flat_bytes(plain(tensor))
        return self.begin(lambda: [self.process_group.allgather([parts], [payload])], what, tensor.device)

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        what = f"all-to-all of {what}"
        if self.world_size == 1:
            output.view(-1).copy_(flat)
            return CompletedWork()
        is_sender = [rank in senders for rank in range(self.world_size)]
        received = [sizes[self.rank] * sends for sends in is_sender]
        sent = [size * is_sender[self.rank] for size in sizes]
        return self.begin(
            lambda: [all_to_all_of(self.process_group)(output.view(-1), flat, received, sent)], what, flat.device
        )

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        """A message for each tensor, of its own memory where that holds its elements in order."""
        if self.world_size == 1 or not tensors:
            return CompletedWork()
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        payloads = [plain(tensor) for tensor in tensors]
        is_on_host = any(payload.is_cpu for payload in payloads)
        return self.begin(
            lambda: [self.process_group.broadcast([flat_bytes(payload)], options) for payload in payloads],
            f"broadcast of {what} from rank {source_rank}",
            None if is_on_host else payloads[0].device,
            finish=None if self.rank == source_rank else copying(tensors, payloads),
        )

    @override
    def barrier(self) -> Work:
        return self.begin(lambda: [self.process_group.barrier()], "barrier", None)

    def begin(
        self,
        start: Callable[[], list[dist.Work]],
        what: str,
        device: torch.device | None,
        finish: Callable[[], object] | None = None,
        operation: int | None = None,
    ) -> C10dWork:
        """Start an operation on tensors of ``device`` (None: on the host); failing to start is diagnosed too.
        ``operation``: the number that ``count`` gave; None counts it.
        """
        try:
            works = start()
        except (RuntimeError, ReferenceError) as error:  # ReferenceError: the group is gone
            raise self.diagnose(error, what) from error
        self._latest_works.append(works)
        operation = self.count() if operation is None else operation
        # NCCL orders streams and keeps deadlines itself; everything else, gloo on CUDA tensors too, blocks the host.
        is_stream_ordered = device is not None and device.type != "cpu" and not self._is_gloo
        return C10dWork(self, works, what, operation, is_stream_ordered, finish)

    def check_choice(self, what: str, mine: str) -> None:
        """See that all ranks choose the same ``what``, without an exchange, which another choice might not share. Ranks
        choose in the same order.

        Raises:
            ReplicaMismatchError: a rank that was here before has chosen another one.
        """
        if self.liveness is None:
            return
        first = self.liveness.first_choice(f"{what}/{self._choices}", mine)
        if first != mine:
            raise ReplicaMismatchError(
                f"all ranks have the same {what} (expected {first!r}, which another rank has chosen, got {mine!r} on"
                f" rank {self.rank}). Fix: give every rank the same {what}= or PSENGINE_{what.upper()}."
            )
        self._choices += 1

    def count(self) -> int:
        """The number of a new operation. All ranks count alike, so that a stalled wait can tell who is behind."""
        self._begun += 1
        return self._begun

    @override
    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        self.watch(is_done.wait, is_done.is_set, what, self._begun)
        try:
            return future.wait()
        except Exception as error:
            # The hook itself may have failed: only a certain death or a transport's error makes it a lost peer.
            has_lost = self.liveness is not None and self.liveness.lost_processes()
            if has_lost or _is_transport_error(error):
                raise self.diagnose(error, what) from error
            raise

    def watch(
        self,
        wait_for_s: Callable[[float], bool],
        is_done: Callable[[], bool],
        what: str,
        operation: int,
        is_interrupted: Interruption = None,
    ) -> bool:
        """Wait in slices until ``wait_for_s(seconds)`` returns True, and look for other ranks' alarms between them.
        Return False if ``is_interrupted`` does.

        ``operation`` is the number of this rank's latest, for the stall inspector.

        Raises:
            PeerLostError, CollectiveError: ranks are missing, or the deadline passed.
        """
        began_s = time.monotonic()
        deadline, next_look = began_s + self.timeout_s, began_s + WAIT_SLICE_S
        slice_s = min(WAIT_SLICE_S if is_interrupted is None else INTERRUPTIBLE_SLICE_S, self.timeout_s)
        with inspector.watch(self.liveness, f"{what}, operation {operation}", self.stall_after_s):
            while not wait_for_s(slice_s):
                if is_interrupted is not None and is_interrupted():
                    return False
                now_s = time.monotonic()
                if now_s >= deadline:
                    raise self.diagnose(TimeoutError(f"no result within {self.timeout_s:g} s"), what)
                if is_interrupted is not None and now_s < next_look:
                    continue
                next_look = now_s + WAIT_SLICE_S
                try:
                    is_alarmed = self.liveness is not None and self.liveness.alarm_raised()
                except Exception as store_error:
                    raise self.diagnose(store_error, what) from store_error
                if is_alarmed and not is_done():
                    error = self.diagnose(RuntimeError("another rank reported a failure"), what, begin=False)
                    if isinstance(error, PeerLostError):
                        raise error
        return True

    def diagnose(self, error: BaseException, what: str, *, begin: bool = True) -> Exception:
        """Hold a roll call, or answer one where nothing failed here (``begin`` False). Return the error that names the
        missing ranks, else ``CollectiveError``.
        """
        if isinstance(error, CollectiveError):
            return error
        failure = f"{what} failed on rank {self.rank} of {self.world_size}: {str(error).strip()}"
        if self.liveness is None:
            return CollectiveError(failure)
        try:
            missing = self.liveness.missing_ranks(what, begin=begin)
        except Exception as store_error:
            missing = self.liveness.lost_processes()
            failure += (
                f"\nThe rendezvous store does not answer either ({store_error}); rank 0, or torchrun's agent, hosts it."
            )
            missing = missing or ((0,) if self.rank != 0 else ())
        if not missing:
            return CollectiveError(f"{failure}\n{self.liveness.describe_waits()}")
        return PeerLostError(
            f"Lost {', '.join(map(self.liveness.describe_lost, missing))}. {failure}\n"
            "Look at the first error in the output of the ranks named above. Unless something restarts the job by"
            " itself, restart it from its last checkpoint.",
            missing,
        )


@dataclass(eq=False)
class C10dWork(Work):
    """c10d works whose wait has a deadline, looks for other ranks' alarms, and names missing ranks.

    Attributes:
        collective: which began them.
        works: torch's.
        what: their name in errors.
        operation: their number, for the stall inspector.
        is_stream_ordered: the wait is queued on the current stream instead of blocking the host.
        finish: called once, by the wait.
    """

    collective: C10dCollective
    works: Sequence[dist.Work]
    what: str
    operation: int
    is_stream_ordered: bool
    finish: Callable[[], object] | None

    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return all(work.is_completed() for work in self.works)

    @override
    def wait(self, is_interrupted: Interruption = None) -> bool:
        with span(self.what, category="collective"):
            for work in self.works:
                if self.is_stream_ordered:
                    self._wait_once(work, None)
                    continue
                wait_for_s = functools.partial(self._wait_once, work)
                watch = self.collective.watch
                if not watch(wait_for_s, work.is_completed, self.what, self.operation, is_interrupted):
                    return False
            finish, self.finish = self.finish, None
            if finish is not None:
                finish()
        return True

    def _wait_once(self, work: dist.Work, timeout_s: float | None) -> bool:
        """Wait; False when ``timeout_s`` passed and the operation is still under way."""
        try:
            if timeout_s is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=timeout_s))
                # A timed-out wait leaves the operation running. It may complete meanwhile: the next wait says how.
                if not work.is_completed():
                    return False
            work.wait()
        except RuntimeError as error:
            raise self.collective.diagnose(error, self.what) from error
        return True


def newest(process_group: dist.ProcessGroup, *names: str) -> Any:
    """The group's operation, under the first of ``names`` that this torch has."""
    return next(getattr(process_group, name) for name in names if hasattr(process_group, name))


def all_to_all_of(process_group: dist.ProcessGroup) -> Any:
    """The group's all-to-all of one tensor: called with (output, input, output's sizes, input's sizes)."""
    return newest(process_group, "all_to_all_single", "alltoall_base")  # since torch 2.13, and before


def _is_transport_error(error: BaseException) -> bool:
    """Whether ``error`` comes from a transport of torch.distributed: a lost connection, a timeout, a dead store.

    torch has types for the errors of NCCL, sockets and stores. gloo's exceptions reach Python as plain RuntimeError
    (seen in torch 2.13 with a killed peer), as do those that passed through a future's callback in C++. Only the text,
    which names gloo's source file or NCCL, tells them from a RuntimeError of a communication hook's own code.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in ("gloo", "NCCL"))


def _backends(process_group: dist.ProcessGroup) -> str:
    """Such as "cpu:gloo,cuda:nccl"; the backend's name where torch.distributed knows nothing of the group."""
    noted: str | None = dist.distributed_c10d._world.pg_backend_config.get(process_group)
    return noted or process_group.name()


def _group_timeout_s(process_group: dist.ProcessGroup) -> float:
    device = torch.device("cpu") if "cpu" in str(process_group._device_types) else process_group._device_types[0]
    try:
        return float(process_group._get_backend(device).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return dist.distributed_c10d.default_pg_timeout.total_seconds()


def _start_liveness(process_group: dist.ProcessGroup, timeout_s: float) -> Liveness | None:
    if process_group.size() == 1:
        return None
    try:
        liveness = Liveness(
            _default_store(process_group),
            process_group.group_name,
            process_group.rank(),
            process_group.size(),
            grace_s=min(ROLL_CALL_GRACE_S, timeout_s),
            patience_s=min(PATIENCE_S, timeout_s),
        )
        inspector.add_group(liveness)
        return liveness
    except (RuntimeError, ValueError, NotImplementedError):
        return None  # a group made without a store (threaded and fake backends) goes without


def _default_store(process_group: dist.ProcessGroup) -> Any:
    """The store of the default group, where processes of all groups tell where they wait."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    # The default group itself, which is under way: its backend "psengine" has the same store, with another prefix.
    store: Any = process_group.get_group_store()
    return getattr(store, "underlying_store", store)
