"""Strategy "sync-server": every step, the servers average the gradients of all workers, in rank order.

DDP's semantics without a process group: after backward every worker has the same gradients, and steps by itself.
Workers may join and leave at any time. A worker that joins late gets the state of a donor through the servers. One
whose lease has ended is started again, and joins late::

    joiner    COMMIT "join" ─────────► coordinator ──STATE_WANTED──► donor (any live worker)
    donor     at its next backward: values, buffers, optimizer ──► servers; COMMIT "donated"; then its own gradients
    joiner    ◄── a view with it, values, buffers, optimizer; takes part in that very step

A backward is one step of the protocol: gradients, usage map and buffers are pushed before the first answer is waited
for. With ``skip_all_reduce_unused_params`` the map is a step of its own, before the gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack, override

from psengine.collectives.base import DeferredWork, Work
from psengine.errors import FencedError, ServerRefusedError
from psengine.parameter_server.client.operation import Push, Request, wait_all
from psengine.protocol.messages import ErrorCode
from psengine.strategies.exchange import BucketExchange, Step
from psengine.strategies.replica_watch import Account, ReplicaWatch, write_account
from psengine.strategies.servers.base import ServerOptions, ServerStrategy
from psengine.strategies.servers.worker_state import OptimizerStates
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share

logger = logging.getLogger(__name__)

STATE_BLOB = "worker_state"


class _Exchange(NamedTuple):
    """A chunk in the backward under way: its push, and memory for the answer."""

    push: Push
    landing: torch.Tensor


class SyncServer(ServerStrategy):
    """Average each bucket over all workers at parameter servers; staleness 0, each worker steps its own optimizer.

    Args:
        **options: see ``ServerStrategy``.

    Attributes:
        completed_steps: steps of this worker's model; a worker that joined late starts with the donor's.
    """

    name = "sync-server"
    counts_usage = True
    _empty_steps = 0
    _is_in_closure = False  # of an optimizer's step, which goes on after it
    _is_searching = False  # that step has evaluated its closure, and may do so again

    def __init__(self, **options: Unpack[ServerOptions]) -> None:
        super().__init__({"name": "average"}, **options)

    def _forget(self) -> None:
        super()._forget()
        self.optimizers = OptimizerStates()
        self._payloads: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        # The backward under way. The usage map is exchanged twice where buckets that nobody uses are skipped.
        self._is_open = False
        self._is_empty = False  # nobody contributed to it; until the next one begins
        self._exchanges: list[_Exchange] = []
        self._account: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._weight: float | None = None
        self._gradient_keys: set[int] = set()

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        super().lay_out(buckets)
        self._gradient_keys = {spec.key for chunks in self.chunks.of_bucket for spec, _, _ in chunks}
        # Averages land apart from gradients, which are sent again where a step is taken back.
        self._results = [torch.empty(bucket.numel, dtype=bucket.dtype) for bucket in buckets]
        self._payloads = [
            bucket.flat if bucket.device.type == "cpu" else self.session.segments.allocate(bucket.numel, bucket.dtype)
            for bucket in buckets
        ]

    @override
    def _receive(self, state: str) -> None:
        """Pull the job's values, and a donor's state.

        Raises:
            FencedError: a server restarted meanwhile, and lacks them.
        """
        try:
            super()._receive(state)
            if state == "joined":
                self.completed_steps = self.optimizers.take(self.session.pull_blob(STATE_BLOB), self._parameter_names())
        except ServerRefusedError as error:
            if error.code not in (ErrorCode.NOT_READY, ErrorCode.UNKNOWN_KEY):
                raise
            text = f"a server restarted before worker {self.session.rank} had read the job's state. Fix: start it again"
            raise FencedError(text, ErrorCode.FENCED) from None

    # ---- are replicas still equal? -----------------------------------------------------------------------------

    @override
    def compare_replicas(self, watch: ReplicaWatch, exchanges: int, *, abstains: bool = False) -> None:
        """The lowest worker's account comes back with the step's averages, and is looked at before the next step.

        Raises:
            ReplicasDivergedError: on each worker that differs from the lowest in two steps that follow each other.
        """
        if self._account is not None and not self._is_open:
            step, own, lowest = self._account
            accounts = {int(Account.read(one, len(watch.parameters)).facts["worker"]): one for one in (lowest, own)}
            self._account = None
            watch.weigh(step, self.session.rank, accounts)
        if not watch.asks(self.completed_steps, in_pairs=True):
            return
        facts = {"worker": str(self.session.rank), **watch.facts()}
        own = write_account(list(watch.parameters.values()), facts, measures=False)
        lowest = torch.empty_like(own)
        self._account = self.completed_steps, own, lowest
        payloads = [
            flat.split([spec.numel for spec in self.chunks.accounts]) for flat in (own.view(-1), lowest.view(-1))
        ]
        for spec, payload, landing in zip(self.chunks.accounts, *payloads, strict=True):
            self._exchange(spec.key, payload, landing)

    # ---- a step ------------------------------------------------------------------------------------------------

    @override
    def weigh(self, weight: float | None) -> None:
        """The servers average by weight; weight 0 takes part and counts nothing."""
        self._weight = weight

    def begin(self, step: Step) -> Share:
        """Gradients travel undivided: only the servers know how many workers contribute.

        A worker that waits to join gets this one's state now, while weights are those before the step.
        """
        self._open_step()
        return WHOLE

    def _open_step(self) -> None:
        if self._is_open:
            return
        self._is_open, self._is_empty = True, False
        self.optimizers.forget_arrived(self.completed_steps)
        self._exchanges = []
        if not self._is_searching:  # a joiner would begin another search than the one under way
            self.session.serve_joiner(self._deposit_state)

    @override
    def exchange(self, bucket: Bucket) -> BucketExchange:
        payload, result = self._payloads[bucket.index], self._results[bucket.index]
        if payload is not bucket.flat:
            payload.copy_(bucket.flat)
        exchanges = [
            self._exchange(spec.key, payload[start:end], result[start:end])
            for spec, start, end in self.chunks.of_bucket[bucket.index]
        ]
        yield DeferredWork(partial(self._wait, exchanges))
        if any(one.push.is_empty for one in exchanges):
            self._is_empty = True
            return None
        return self._average(bucket, exchanges)

    def _average(self, bucket: Bucket, exchanges: Sequence[_Exchange]) -> torch.Tensor:
        """What these exchanges ended with: in the servers' memory if it lies there in one piece, to be read until the
        next step, else in this worker's.
        """
        taken = [one.push.take() for one in exchanges]
        average = neighbours(taken)
        if average is None:
            average = self._results[bucket.index]
            for one, values in zip(exchanges, taken, strict=True):
                if values is not None:
                    one.landing.copy_(values)
        return average if average.device == bucket.device else bucket.flat.copy_(average)

    def _exchange(self, key: int, payload: torch.Tensor, landing: torch.Tensor) -> _Exchange:
        self._open_step()
        is_gradient = key in self._gradient_keys
        weight = self._weight if is_gradient else None
        push = self.session.push(key, payload, [landing], weight=weight, reads_in_place=is_gradient)
        self._exchanges.append(_Exchange(push, landing))
        return self._exchanges[-1]

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        assert self.chunks.usage is not None
        landing = torch.empty(used.numel(), dtype=used.dtype)
        self._exchange(self.chunks.usage, used.cpu().contiguous().clone(), landing)

        def take_sum() -> None:
            self._wait()
            used.copy_(landing)

        return DeferredWork(take_sum)

    def _wait(self, exchanges: Sequence[_Exchange] | None = None) -> None:
        """Wait for these exchanges of the step under way; None: for all of them.

        The first wait ends the protocol's step, as at every worker.
        """
        exchanges = self._exchanges if exchanges is None else exchanges
        try:
            with self.session.telemetry.blocked():
                wait_all([one.push for one in exchanges])
        except BaseException:
            self._is_open = False
            self.session.release_payloads()
            raise

    @override
    def finish(self) -> Work:
        """Buffers become those of the lowest rank, as native DDP's broadcast makes them."""
        self.chunks.follow_buffers()
        exchanges = {}
        for key in self.chunks.buffers:
            spec = self.chunks.specs[key]
            landing = torch.empty(spec.numel, dtype=spec.dtype)
            exchanges[key] = self._exchange(key, self.chunks.values(spec), landing)

        self.session.end_step()

        def end_step() -> None:
            self._wait()
            landed = {key: one.landing for key, one in exchanges.items() if not one.push.is_empty}
            specs = [self.chunks.specs[key] for key in landed]
            self.chunks.write_images(self.chunks.load(specs, list(landed.values())))
            if self._is_empty:
                self._leave_out()
            self._is_open = False
            self.completed_steps += 1
            self.session.telemetry.step_ended()

        return DeferredWork(end_step)

    def _leave_out(self) -> None:
        """A step to which nobody contributed changes nothing.

        Optimizers that are not distributed, or have called their closure, step over gradients that are None. To others
        gradients are zeros: a GradScaler wants some that it can check.
        """
        optimizers = () if self._is_in_closure else self.optimizers.alive()
        checked = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        for parameter in self.replica.parameters.values():
            if parameter in checked and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        self._empty_steps += 1
        if self._empty_steps == 1:
            logger.warning(
                "worker %d: no worker contributed to step %d, because every batch weight is 0, so the optimizer leaves"
                " it out. Gradients are zeros or None. Later ones are counted in model.statistics().empty_steps",
                *(self.session.rank, self.completed_steps + 1),
            )

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """A step to which nobody contributed is left out: momentum and weight decay would move weights."""
        if closure is None:
            return None if self._is_empty else local_step()
        self._is_in_closure = True
        try:
            return local_step()
        finally:
            self._is_in_closure = self._is_searching = False

    @override
    def average_loss(self, loss: float) -> float:
        """A step of the protocol, in which servers add losses and weights."""
        assert self.chunks.loss is not None
        self._is_searching = True
        weight = 1.0 if self._weight is None else self._weight
        total = torch.empty(2, dtype=torch.float64)
        self._exchange(self.chunks.loss, torch.tensor([loss * weight, weight], dtype=torch.float64), total)
        self._wait()
        self._is_open = False
        losses, weights = total.tolist()
        return float(losses / (weights or 1.0))

    @override
    def statistics(self) -> dict[str, Any]:
        return {**super().statistics(), "empty_steps": self._empty_steps}

    # ---- joining late ------------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's state goes to workers that join; a joiner's comes from its donor.

        Raises:
            ServerError: this worker has joined others, which have no such optimizer.
        """
        self.optimizers.bind(optimizer, self._parameter_names())

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self.replica.parameters.items()}

    def _deposit_state(self) -> Iterator[Sequence[Request]]:
        """Store this worker's state at the servers, for a worker that waits to join."""
        yield [self.session.store(spec.key, self.chunks.values(spec)) for spec in self.chunks.specs]
        # Where a shard refuses weights, because a joiner reads, the rest is not stored: the lead may have no weights.
        pieces = self.optimizers.pack(self.completed_steps, self._parameter_names())
        yield self.session.store_blob(STATE_BLOB, pieces)


def neighbours(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """These 1-D tensors as one; None unless they lie one after the other in one storage."""
    first = tensors[0] if tensors else None
    if first is None:
        return None
    storage, end, numel = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if tensor is None or tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end, numel = end + tensor.nbytes, numel + tensor.numel()
    return first.as_strided((numel,), (1,))
