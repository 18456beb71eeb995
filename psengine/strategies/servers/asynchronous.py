"""Strategy "async": the servers apply each worker's gradients when they arrive, and weights come back.

    worker 0   backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...
    worker 1        backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...

No worker waits for another (with ``max_staleness``, only for those too far behind); in exchange, gradients are computed
from weights that other workers have changed since.

Pushes carry gradients and hyperparameters; they carry neither the list of parameters nor the optimizer's state, so a
step after a change of those is refused. Servers keep flat slots, one element for each of a chunk's; torch keeps tensors
by parameter. Slot names are torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import Unpack, override

from psengine.errors import ConfigurationError
from psengine.kernels.ops import in_memory_order
from psengine.parameter_server.client.operation import Push, Request, wait_all
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import SLOTS, optimizer_name, slot_names, wire_groups
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.strategies.base import StepStrategy
from psengine.strategies.life_cycle import Replica
from psengine.strategies.servers.base import ChunkedReplica, ServerOptions, ServerStrategy
from psengine.strategies.step_hooks import take_step
from psengine.tensors.bucket import Bucket
from psengine.tracing.timeline import EXCHANGE, Span, span

logger = logging.getLogger(__name__)

# Weights are loaded when so much of them is here, while more travel. Less wakes this thread more often.
LOADED_BYTES = 4 * 1024 * 1024
REFUSALS = {"non_finite": "it holds NaN or infinity", "stale": "computed before this worker was away"}
# torch counts steps in a tensor for these; SGD does not count.
_COUNTS_STEPS = ("Adam", "AdamW", "Adagrad", "RMSprop")


class Pushes:
    """The pushes of the step under way to servers that step, and the weights that come back.

    Args:
        session: the worker's.
        chunks: of its replica.
        trained: the chunks that hold a trained parameter; others are never pushed.

    Attributes:
        refused: how many chunks the servers refused.
    """

    def __init__(self, session: WorkerSession, chunks: ChunkedReplica, trained: Collection[ChunkSpec]) -> None:
        self._trained = {spec.key for spec in trained}
        self.refused = 0
        self._session = session
        self._chunks = chunks
        self._pushes: list[tuple[Bucket, Span, list[tuple[ChunkSpec, Push]]]] = []
        self._buffer_pushes: list[Push] = []
        # Of buckets on another device: the values, where servers of this host read them.
        self._payloads: dict[int, torch.Tensor] = {}

    def push(
        self,
        bucket: Bucket,
        *,
        missing: Collection[str] = (),
        groups: Sequence[Mapping[str, Any]] | None = None,
        weight: float | None = None,
    ) -> None:
        """Send a packed bucket, whose memory must not change until the servers have answered.

        Args:
            bucket: of gradients or differences.
            missing: names of its parameters that have none.
            groups: the optimizer's hyperparameters now.
            weight: what they count in a merge; 0 only asks for the weights.
        """
        travelling = span("push", bucket.facts, track=EXCHANGE)
        payload = bucket.flat
        if bucket.device.type != "cpu":
            if bucket.index not in self._payloads:
                self._payloads[bucket.index] = self._session.segments.allocate(bucket.numel, bucket.dtype)
            payload = self._payloads[bucket.index].copy_(payload)
        pushes: list[tuple[ChunkSpec, Push]] = []
        self._pushes.append((bucket, travelling, pushes))
        for spec, start, end in self._chunks.of_bucket[bucket.index]:
            if spec.key not in self._trained:
                continue
            absent = [index for index, segment in enumerate(spec.segments) if segment.name in missing]
            values: torch.Tensor | None = payload[start:end]
            if weight == 0 or len(absent) == len(spec.segments):
                # This worker only asks for the weights; others must not wait for what it computed.
                absent, values = [], None
            # Weights are read where they come.
            push = self._session.push(spec.key, values, (), groups, absent, weight, reads_in_place=True)
            pushes.append((spec, push))

    def push_buffers(self) -> None:
        """Send the buffers' values, which ends the step. Nothing comes back: workers keep their running statistics."""
        self._chunks.follow_buffers()
        for key in self._chunks.buffers:
            self._buffer_pushes.append(self._session.push(key, self._chunks.values(self._chunks.specs[key]), ()))
        self._session.end_step()

    def wait(self) -> None:
        """Wait for all answers. Weights are loaded while others travel."""
        buckets, self._pushes = self._pushes, []
        buffer_pushes, self._buffer_pushes = self._buffer_pushes, []
        self._chunks.follow_parameters()
        try:
            for bucket, travelling, pushes in buckets:
                copied: set[str] = set()
                last: Sequence[tuple[ChunkSpec, Push]] = ()
                with span("wait", bucket.facts):
                    for group in _groups(pushes):
                        copied |= self._load(last)
                        last = group
                        with self._session.telemetry.blocked():
                            wait_all([push for _, push in group])
                travelling.close()
                with span("apply", bucket.facts):
                    self._chunks.write_images(copied | self._load(last))
            with self._session.telemetry.blocked():
                wait_all(buffer_pushes)
        except BaseException:
            self._session.release_payloads()
            raise
        self._session.telemetry.step_ended()
        for _, _, pushes in buckets:
            for spec, push in pushes:
                refused = push.wait().body.get("refused")
                if refused and refused != "abstained":
                    self._report_refusal(spec, refused)

    def _load(self, pushes: Sequence[tuple[ChunkSpec, Push]]) -> set[str]:
        values = [values for _, push in pushes if (values := push.take()) is not None]
        return self._chunks.load([spec for spec, _ in pushes], values)

    def _report_refusal(self, spec: ChunkSpec, reason: str) -> None:
        self.refused += 1
        # At powers of two: often enough to be seen, rarely enough to be read.
        if self.refused & (self.refused - 1) == 0:
            logger.warning(
                "the servers refused the gradient of %s (%s), and this worker goes on from their weights; %d so far",
                *(spec.describe(), REFUSALS.get(reason, reason), self.refused),
            )


def _groups(pushes: Sequence[tuple[ChunkSpec, Push]]) -> Iterator[Sequence[tuple[ChunkSpec, Push]]]:
    """Neighbouring chunks of about ``LOADED_BYTES`` together."""
    first, size_bytes = 0, 0
    for index, (spec, _) in enumerate(pushes, 1):
        size_bytes += spec.size_bytes
        if size_bytes >= LOADED_BYTES or index == len(pushes):
            yield pushes[first:index]
            first, size_bytes = index, 0


@dataclass(eq=False)
class ServerState:
    """The state of ``optimizer``, which servers keep.

    Attributes:
        optimizer: the servers were told of it.
        parameters: name to parameter, for those that servers step.
        session: the worker's.
        specs: the chunks that the optimizer trains, configured with a run for each segment.
    """

    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]
    session: WorkerSession
    specs: Sequence[ChunkSpec]

    def fetch(self) -> None:
        """Overwrite ``optimizer.state`` by the servers'; parameters that were never stepped get none.

        Slots that are switched off (a momentum of 0) come too, if the servers have them: torch keeps and saves them.
        """
        name = optimizer_name(self.optimizer)
        requests = [[self.session.pull(spec.key, slot=slot) for slot in SLOTS[name]] for spec in self.specs]
        wait_all([request for pulls in requests for request in pulls])
        for spec, pulls in zip(self.specs, requests, strict=True):
            answers = {slot: request.wait() for slot, request in zip(SLOTS[name], pulls, strict=True)}
            start = 0
            for index, segment in enumerate(spec.segments):
                parameter, places = self.parameters[segment.name], slice(start, start + segment.numel)
                start += segment.numel
                if segment.start == 0:
                    self.optimizer.state.pop(parameter, None)
                for slot, answer in answers.items():
                    steps = answer.body["steps"][index]
                    if not steps or answer.payload is None:
                        continue
                    state = self.optimizer.state[parameter]
                    if name in _COUNTS_STEPS:
                        state["step"] = torch.tensor(steps, dtype=torch.float32)
                    if slot not in state:
                        state[slot] = torch.empty_strided(
                            segment.shape, segment.strides, dtype=parameter.dtype, device=parameter.device
                        ).zero_()
                    _elements(state[slot], segment).copy_(answer.payload[places])

    def store(self) -> None:
        """Overwrite the servers' state by ``optimizer.state``; without state a parameter was never stepped."""
        name = optimizer_name(self.optimizer)
        # Also of slots that are switched off.
        found = {slot for state in self.optimizer.state.values() for slot in state if state[slot] is not None}
        slots = found.union(slot_names(name, wire_groups(self.optimizer))).intersection(SLOTS[name])
        requests: list[Request] = []
        for spec in self.specs:
            flats = {slot: torch.zeros(spec.numel, dtype=spec.dtype) for slot in slots}
            steps: list[float] = []
            start = 0
            for segment in spec.segments:
                state = self.optimizer.state.get(self.parameters[segment.name], {})
                places = slice(start, start + segment.numel)
                start += segment.numel
                steps.append(float(state.get("step", state.get("momentum_buffer") is not None)))
                for slot, flat in flats.items():
                    if state.get(slot) is not None:
                        flat[places].copy_(_elements(state[slot], segment))
            requests += [self.session.store(spec.key, flat, slot=slot, steps=steps) for slot, flat in flats.items()]
        wait_all(requests)


@dataclass(eq=False)
class ServerOptimizer(ServerState):
    """The distributed ``optimizer``, whose step never runs here, as the servers were told of it."""

    def __post_init__(self) -> None:
        self._groups = self._group_ids()
        known = {id(parameter) for parameter in self.parameters.values()}
        self._untrained = [
            (group_index, index, parameter)
            for group_index, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in known
        ]
        # A fused optimizer's kernel would divide by GradScaler's scale, which servers do not know: so the scaler itself
        # divides, and leaves out steps with gradients that are not finite.
        self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self.note_state()

    def note_state(self) -> None:
        """``optimizer.state`` is a copy of the servers'."""
        self._state = self.optimizer.state
        self._state_count = len(self._state)

    @override
    def fetch(self) -> None:
        super().fetch()
        self.note_state()

    def _group_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def check(self) -> None:
        """See that the servers' step is this optimizer's.

        Raises:
            ConfigurationError: its parameters changed, its state is not the servers' copy any more, or there is a
                gradient that would not be applied.
        """
        groups, state = self._group_ids(), self.optimizer.state
        if groups != self._groups:
            expected, got = ([len(group) for group in known] for known in (self._groups, groups))
            raise ConfigurationError(
                "strategy 'async' trains the parameters that the optimizer had when"
                " psengine.DistributedOptimizer was made, each in its group (expected the same ones, in groups of"
                f" {expected}, got others, in groups of {got}). Fix: give it all of them before, and freeze some"
                " (requires_grad_(False) after wrapping with find_unused_parameters=True). Or strategy='sync'."
            )
        if state is not self._state or len(state) < self._state_count:
            raise ConfigurationError(
                "optimizer.state is only a copy of the servers', which do not see it change (expected the mapping that"
                f" psengine knows, of {self._state_count} parameters, got another, or fewer: {len(state)}). Fix: set it"
                " by optimizer.load_state_dict(...); a 'state' of {} resets it."
            )
        for group_index, index, parameter in self._untrained:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) has a gradient that was"
                    " not exchanged: when the model was wrapped it was frozen, ignored, or not there yet (expected grad"
                    " = None). Fix: freeze it after wrapping with find_unused_parameters=True; wrap after"
                    " load_state_dict(..., assign=True); or give it an optimizer of its own."
                )
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:  # for torch's fused kernels, which divide by it
            raise ConfigurationError(
                "strategy 'async' does not divide gradients by optimizer.grad_scale (expected it unset, got"
                f" {float(scale)}). Fix: divide the gradients before step(), or let a torch.amp.GradScaler do it."
            )


def _elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's elements of a tensor like the parameter, in the parameter's memory order."""
    end = segment.start + segment.numel
    return in_memory_order(tensor, segment.shape, segment.strides)[segment.start : end]


class AsyncServer(StepStrategy[ServerOptimizer], ServerStrategy):
    """Push gradients in ``optimizer.step()``, get the servers' weights back; needs ``psengine.DistributedOptimizer``.

    Args:
        max_staleness: hold a worker that is more than this many steps ahead of the slowest (stale-synchronous
            parallel, Ho et al. 2013); None never does.
        staleness_scaling: "inverse" divides the learning rate of a gradient that is s updates old by s + 1 (Zhang et
            al. 2016, https://arxiv.org/abs/1511.05950); None does not.
        delay_compensation: strength of DC-ASGD's correction g + strength * g * g * (w_now - w_then) (Zheng et al.
            2017, https://arxiv.org/abs/1609.08326); costs the servers a copy of the model for each worker. 0 is off.
        compensation_decay: from 0 up to 1: each element's strength is divided by the root of a running mean of its
            squared gradients with this decay (their DC-ASGD-a; 0.95, with a strength of 2); costs the servers one more
            copy of the model. None: the strength is constant.
        **options: see ``ServerStrategy``.

    Attributes:
        completed_steps: how many steps this worker took.
    """

    name = "async"
    capabilities = replace(ServerStrategy.capabilities, workers_step=False)

    # Whether the job began with this worker's model.
    _gave_values: bool
    # The writes to parameters that were there when these were as the servers sent them.
    _known_writes: tuple[int, int]
    # Made when an optimizer is bound.
    _pushes: Pushes

    def __init__(
        self,
        max_staleness: int | None = None,
        staleness_scaling: str | None = None,
        delay_compensation: float = 0.0,
        *,
        compensation_decay: float | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        rule = {
            "max_staleness": max_staleness,
            "staleness_scaling": staleness_scaling,
            "delay_compensation": delay_compensation,
            "compensation_decay": compensation_decay,
        }
        super().__init__({"name": "apply", **rule}, **options)
        if compensation_decay is not None and not delay_compensation:
            raise ConfigurationError(
                f"compensation_decay={compensation_decay!r} changes a strength of 0. Fix: delay_compensation=2 too"
            )

    @override
    def _entered(self, state: str) -> None:
        self._gave_values = state == "initialised"
        self._known_writes = self._count_writes()

    # ---- the optimizer -----------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers get the optimizer's class, groups and hyperparameters.

        Raises:
            ConfigurationError: the servers cannot run this optimizer.
            ServerRefusedError: the job's other workers use another one.
        """
        super().bind(optimizer)
        parameters = self.replica.parameters
        trained = self.session.attach_optimizer(self.chunks.specs, optimizer, parameters)
        self.stepper = ServerOptimizer(optimizer, parameters, self.session, trained)
        self._pushes = Pushes(self.session, self.chunks, trained)
        if optimizer.state and self._gave_values:
            # Loaded before, from a checkpoint as the model was: like the model it counts where the job began with it.
            self.stepper.store()

    # ---- a step ------------------------------------------------------------------------------------------------

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Push all gradients; return with the servers' new weights."""
        bound = self.bound()

        def push_and_pull() -> None:
            bound.check()
            self._store_written()
            groups = wire_groups(bound.optimizer)
            for bucket in self._buckets:
                gradients = [parameter.grad for parameter in bucket.parameters]
                with span("pack", bucket.facts):
                    bucket.pack(gradients)
                missing = {name for name, gradient in zip(bucket.names, gradients, strict=True) if gradient is None}
                self._pushes.push(bucket, missing=missing, groups=groups)
            self._pushes.push_buffers()
            self._pushes.wait()
            self._known_writes = self._count_writes()
            self.completed_steps += 1

        return take_step(bound.optimizer, closure, push_and_pull)

    def _count_writes(self) -> tuple[int, int]:
        """Changes with every write that torch counts, and when a parameter is given other memory."""
        parameters = self.replica.parameters.values()
        return sum(p._version for p in parameters), hash(tuple(p.data_ptr() for p in parameters))

    def _store_written(self) -> None:
        """After a write (``load_state_dict``), send worker 0's values to the servers; those of others are lost.

        Before the first step others wait for worker 0's, so that nobody trains the values of before.
        """
        if self._count_writes() == self._known_writes:
            return
        parameters = [spec for spec in self.chunks.specs if spec.kind is ChunkKind.PARAMETER]
        if self.session.rank != 0 and not self.completed_steps:
            self.await_worker_0({spec.key: self.chunks.values(spec) for spec in parameters})
        elif self.session.rank != 0:
            logger.warning("parameters were written on worker %d; only worker 0's writes count", self.session.rank)
        else:
            logger.warning("parameters were written on worker 0; they become the servers' weights")
            wait_all([self.session.store(spec.key, self.chunks.values(spec)) for spec in self.chunks.specs])

    # ---- another strategy follows ------------------------------------------------------------------------------

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer_name(optimizer)
            wire_groups(optimizer)
        super().check_ready(replica, optimizers)

    @override
    def conclude(self) -> None:
        """All workers that share a process group have what the servers have after the last push of each."""
        self.collective.barrier().wait()
        self.pull_values()

    # ---- the optimizer's state ---------------------------------------------------------------------------------

    @override
    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.bound().fetch()

    @override
    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        bound = self.bound()
        bound.note_state()
        if self.session.rank == 0:
            bound.store()
        else:
            logger.info("worker %d loaded optimizer state; the servers' (worker 0's) counts", self.session.rank)
