"""Strategy "async": the servers apply each worker's gradients when they arrive, and weights come back.

    worker 0   backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...
    worker 1        backward ─ step: gradients ──► servers: apply ──► weights ─ forward ...

Nobody waits for anybody (or, with ``max_staleness``, only for those too far behind); the price is that gradients are
computed from weights that others have moved on from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.errors import ConfigurationError, PSEngineError, ReductionError
from psengine.strategies.exchange import Reduction, StaysLocal, Step
from psengine.strategies.servers.base import DEFAULT_TIMEOUT_S, ServerStrategy
from psengine.strategies.servers.optimizer_binding import OptimizerBinding
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share
from psengine.tracing.spans import PushSpans
from psengine.tracing.timeline import now_ns, recorder

if TYPE_CHECKING:
    from psengine.parameter_server.client.operation import Push
    from psengine.protocol.layout import ChunkSpec
    from psengine.strategies.servers.optimizer_state import ServerOptimizerState

logger = logging.getLogger(__name__)


class AsyncServer(ServerStrategy):
    """Push gradients in ``optimizer.step()``, get the servers' weights back; needs ``psengine.DistributedOptimizer``.

    Args:
        max_staleness: hold a worker that is more than this many steps ahead of the slowest (stale-synchronous
            parallel, Ho et al. 2013); None never does.
        staleness_scaling: "inverse" divides the learning rate of a gradient that is s updates old by s + 1 (Zhang et
            al. 2016, https://arxiv.org/abs/1511.05950); None does not.
        delay_compensation: strength of DC-ASGD's correction g + strength * g * g * (w_now - w_then) (Zheng et al.
            2017, https://arxiv.org/abs/1609.08326); costs the servers a copy of the model for each worker. 0 is off.
        push: "step" sends gradients in ``optimizer.step()``, so that whatever happens to them after backward (clipping,
            unscaling) counts. "backward" sends each bucket as soon as it is full, while backward goes on; changing
            gradients, hyperparameters or weights between the two is an error, so neither clipping nor
            ``torch.amp.GradScaler`` goes with it. To notice that, ``step()`` reads gradients once more;
            ``gradient_as_bucket_view=True`` costs a copy of them on top. What did not leave is sent in ``step()``.
        servers, job, timeout_s, checksum, compress: see ``ServerStrategy``.

    Attributes:
        completed_steps: how many steps this worker took.
        refused_pushes: how many chunks the servers refused (not finite, or too stale after this worker was away).
    """

    name = "async"
    capabilities = replace(ServerStrategy.capabilities, workers_step=False)

    def __init__(
        self,
        max_staleness: int | None = None,
        staleness_scaling: str | None = None,
        delay_compensation: float = 0.0,
        *,
        push: str = "step",
        servers: str | Sequence[str] | None = None,
        job: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checksum: bool = False,
        compress: str | Codec | None = None,
    ) -> None:
        _check_options(max_staleness, staleness_scaling, delay_compensation, push)
        super().__init__(servers=servers, job=job, timeout_s=timeout_s, checksum=checksum, compress=compress)
        self._options.update(
            max_staleness=max_staleness,
            staleness_scaling=staleness_scaling,
            delay_compensation=float(delay_compensation),
            push=push,
        )

    def _forget(self) -> None:
        super()._forget()
        self.refused_pushes = 0
        # The hyperparameters of the step under way, as its pushes carry them.
        self._groups: list[dict[str, Any]] = []
        self._binding: OptimizerBinding | None = None
        # Chunks without a trained parameter are never pushed.
        self._trained: set[int] = set()
        # The parameters in those that are.
        self._pushed_parameters: list[torch.nn.Parameter] = []
        # Indices of the buckets that left since the last step.
        self._left: set[int] = set()
        self._pushes: list[tuple[ChunkSpec, Push]] = []
        self._buffer_pushes: list[Push] = []
        self._landings: dict[int, torch.Tensor] = {}
        self._pushed_gradients: list[_PushedGradient] = []
        self._weight_versions = (0, 0)
        self._spans = PushSpans()

    @property
    @override
    def rule(self) -> dict[str, Any]:
        options = self._options
        return {
            "name": "apply",
            "max_staleness": options["max_staleness"],
            "staleness_scaling": options["staleness_scaling"],
            "delay_compensation": options["delay_compensation"],
        }

    def _entered(self, state: str) -> None:
        if state != "initialised":
            assert self._replica is not None
            _count_landing(self._replica.state.values())
        self._note_weights()

    # ---- the optimizer -----------------------------------------------------------------------------------------

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers get the optimizer's class, groups and hyperparameters.

        Raises:
            ConfigurationError: the servers cannot run this optimizer.
            ServerRefusedError: the job's other workers use another one.
        """
        from psengine.parameter_server.client.operation import wait_all
        from psengine.parameter_server.client.partition import runs_of
        from psengine.protocol.hyperparameters import optimizer_name, wire_groups
        from psengine.protocol.layout import ChunkKind

        if self._binding is not None and self._binding.optimizer is not optimizer:
            raise ConfigurationError(
                "strategy 'async' steps one optimizer for each wrapped model (expected one"
                " psengine.DistributedOptimizer, got a second). Fix: give one optimizer several parameter groups; or"
                " wrap the parts of the model one by one, each with its own optimizer; or use strategy='sync-server',"
                " where every worker steps any number of optimizers itself."
            )
        name, groups = optimizer_name(optimizer), wire_groups(optimizer)
        assert self._replica is not None
        parameters = self._replica.parameters
        group_of = self._groups_by_name(optimizer)
        requests = []
        for spec in self.chunks.specs:
            if spec.kind is not ChunkKind.PARAMETER:
                continue
            runs = runs_of(spec, group_of)
            if any(group >= 0 for _, _, group in runs):
                self._trained.add(spec.key)
                body = {"optimizer": name, "groups": groups, "runs": runs}
                requests.append(self.session.configure(spec.key, body))
        wait_all(requests)
        pushed = {segment.name for key in self._trained for segment in self.chunks.specs[key].segments}
        self._pushed_parameters = [parameters[name] for name in pushed]
        self._binding = OptimizerBinding(optimizer, set(parameters.values()))
        # A fused optimizer's kernel would divide by GradScaler's scale, of which servers never hear: let the scaler do
        # it, as it does for others, and leave out the steps whose gradients are not finite.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if optimizer.state:
            # State that was loaded before wrapping counts like one that is loaded afterwards.
            self.store_optimizer_state(optimizer)

    def _groups_by_name(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        assert self._replica is not None
        names = {parameter: name for name, parameter in self._replica.parameters.items()}
        return {
            names[parameter]: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter in names
        }

    def _bound(self) -> OptimizerBinding:
        _ = self.session  # a closed strategy says so
        if self._binding is None:
            raise ConfigurationError(
                "strategy 'async' applies gradients at the servers (expected optimizer ="
                " psengine.DistributedOptimizer(optimizer, model) before the first backward, got a plain optimizer)"
            )
        return self._binding

    # ---- a step ------------------------------------------------------------------------------------------------

    @property
    def needs_packing(self) -> bool:
        """Gradients stay where they are until ``step``, unless they leave during backward."""
        return bool(self._options["push"] == "backward")

    @override
    def begin(self, step: Step) -> Share:
        """Nothing is divided, because nothing is added up."""
        binding = self._bound()
        if self._left:
            raise ReductionError(
                "a second backward came before optimizer.step(), while the gradients of the first are with the servers"
                " already (push='backward'). Fix: accumulate inside model.no_sync(), or use AsyncServer(push='step'),"
                " which a GradScaler needs: it leaves steps out."
            )
        if self._options["push"] == "backward":
            binding.check_groups()
            self._note_hyperparameters(binding.optimizer)
        return WHOLE

    def weigh(self, weight: float | None) -> None:
        """See ``Strategy.weigh``.

        Raises:
            ConfigurationError: there is a weight, and no average for it to count in.
        """
        if weight is not None:
            raise ConfigurationError(
                "an asynchronous server averages nothing: each worker's gradient is applied by itself (expected"
                f" batch_weight = None, got {weight!r}). Fix: scale the learning rate with the batch, which the servers"
                " follow for each worker; or use strategy='sync' or 'sync-server'."
            )

    def _note_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        from psengine.protocol.hyperparameters import wire_groups

        self._groups = wire_groups(optimizer)

    @override
    def reduce(self, bucket: Bucket) -> Reduction:
        """With push='step' nothing leaves here: it is called only because the reducer packs
        buckets for ``gradient_as_bucket_view``.
        """
        if self._options["push"] == "backward":
            if not self._left:
                self._store_edited_weights()
                self._begin_pushes()
            # Where gradients are views of the bucket, only a copy stays what it was if they are changed.
            flat = bucket.flat.clone() if _shares_memory(bucket) else bucket.flat
            self._push(bucket, flat)
            sent = bucket.views if flat is bucket.flat else bucket.views_of(flat)
            self._pushed_gradients += map(_PushedGradient, bucket.parameters, sent)
            self._left.add(bucket.index)
        return StaysLocal()

    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Push what was not pushed during backward, and return once the servers' weights are here."""
        binding = self._bound()
        call, closure = binding.call_pre_hooks(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with torch.no_grad():
            self._check_step(binding)
            if not self._left:
                self._store_edited_weights()
                self._begin_pushes()
                self._note_hyperparameters(binding.optimizer)
            for bucket in self._buckets:
                if bucket.index not in self._left:
                    self._pack_and_push(bucket)
            self._push_buffers()
            self._await_weights()
        binding.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look for
        self.completed_steps += 1
        self.session.telemetry.step_ended()
        binding.call_post_hooks(call)
        return result

    def _begin_pushes(self) -> None:
        """What this step pushes belongs together: a server's snapshot has all of it, or nothing."""
        self.session.begin_step([*self._trained, *self.chunks.buffers], is_whole=True)

    def _check_step(self, binding: OptimizerBinding) -> None:
        """Raise where the servers' step would not be the one that this process asks for."""
        try:
            binding.check()
            if self._left:
                self._check_unchanged_since_backward(binding.optimizer)
        except PSEngineError:
            if self._left:
                self._await_weights()
            raise

    def _pack_and_push(self, bucket: Bucket) -> None:
        started_ns = now_ns() if recorder.is_on else 0
        bucket.pack([parameter.grad for parameter in bucket.parameters])
        if started_ns:
            recorder.add("pack", started_ns, args=bucket.facts)
        self._push(bucket, bucket.flat)

    def _push(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send ``bucket``'s gradients, packed in ``flat``, which stays what it is until the servers have answered."""
        missing = {
            name for name, parameter in zip(bucket.names, bucket.parameters, strict=True) if parameter.grad is None
        }
        if recorder.is_on:
            self._spans.leaves(bucket)
        payload = flat if bucket.device.type == "cpu" else flat.cpu()
        if self._copies_payloads:
            payload = payload.clone()
        for spec, start, end in self.chunks.of_bucket[bucket.index]:
            if spec.key not in self._trained:
                continue
            absent = self.chunks.segment_indices(spec, missing) if missing else []
            # Without any gradient this worker only asks for the weights; others must not wait for a gradient of it.
            gradient = payload[start:end] if len(absent) < len(spec.segments) else None
            push = self.session.push(
                spec.key,
                gradient,
                self._landing(spec),
                groups=self._groups,
                absent=absent if gradient is not None else (),
            )
            self._pushes.append((spec, push))

    def _landing(self, spec: ChunkSpec) -> list[torch.Tensor]:
        """Where weights land: in the parameters, but beside them while a backward may still read those."""
        if self._options["push"] == "step":
            return self.chunks.parts(spec)
        if spec.key not in self._landings:
            self._landings[spec.key] = torch.empty(spec.numel, dtype=spec.dtype)
        return [self._landings[spec.key]]

    def _push_buffers(self) -> None:
        self.chunks.follow_buffers()
        for key in self.chunks.buffers:
            spec = self.chunks.specs[key]
            # No landing: a worker keeps its own running statistics.
            self._buffer_pushes.append(self.session.push(key, self.chunks.values(spec), ()))

    def _await_weights(self) -> None:
        from psengine.parameter_server.client.operation import wait_all

        pushes, self._pushes = self._pushes, []
        buffer_pushes, self._buffer_pushes = self._buffer_pushes, []
        self._pushed_gradients, self._left = [], set()
        started_ns = now_ns() if recorder.is_on else 0
        try:
            with self.session.telemetry.blocked():
                wait_all([*(push for _, push in pushes), *buffer_pushes])
        except BaseException:
            # What was sent may still be on its way from memory that the next step packs anew.
            self._copies_payloads = True
            raise
        if started_ns:
            started_ns = self._spans.all_answered(started_ns)
        if self._options["push"] == "backward":
            for spec, _ in pushes:
                self.chunks.assign(spec, self._landings[spec.key])
        else:
            self.chunks.write_back([spec for spec, _ in pushes])
            _count_landing(self._pushed_parameters)
        if started_ns:
            recorder.add("apply", started_ns)
        self._note_weights()
        for spec, push in pushes:
            refused = push.wait().refused
            if refused and refused != "abstained":
                self._report_refusal(spec, refused)

    def _report_refusal(self, spec: ChunkSpec, reason: str) -> None:
        self.refused_pushes += 1
        # The first, second, fourth, eighth ... time: often enough to be seen, rarely enough to be read.
        if self.refused_pushes & (self.refused_pushes - 1) == 0:
            logger.warning(
                "the servers refused the gradient of %s (%s); the weights stay as they were. %d refused so far",
                spec.describe(),
                {"non_finite": "it holds NaN or infinity", "stale": "computed before this worker was away"}.get(
                    reason, reason
                ),
                self.refused_pushes,
            )

    def _check_unchanged_since_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise where a gradient, or what the servers apply it with or to, is no longer what it was when it left."""
        from psengine.protocol.hyperparameters import wire_groups

        if not all(pushed.is_unchanged() for pushed in self._pushed_gradients):
            what = (
                "gradients were changed between backward and optimizer.step(), after they had left for the servers"
                " (push='backward'); GradScaler and clipping do that"
            )
        elif wire_groups(optimizer) != self._groups:
            what = (
                "hyperparameters were changed between backward and optimizer.step(), after gradients had left with the"
                " old ones (push='backward'); a scheduler that is stepped first does that"
            )
        elif self._count_writes() != self._weight_versions:
            what = (
                "parameters were written between backward and optimizer.step(), after gradients had left for the"
                " servers (push='backward'), whose weights overwrite them"
            )
        else:
            return
        raise ReductionError(f"{what}. Fix: use AsyncServer(push='step'), which sends all of it in step().")

    # ---- weights and state that are changed here ---------------------------------------------------------------

    def _note_weights(self) -> None:
        """Remember the parameters as the servers sent them."""
        self._weight_versions = self._count_writes()

    def _count_writes(self) -> tuple[int, int]:
        """Changes with every write that torch counts, and when a parameter is given other memory."""
        assert self._replica is not None
        parameters = self._replica.parameters.values()
        return sum(p._version for p in parameters), hash(tuple(p.data_ptr() for p in parameters))

    def _store_edited_weights(self) -> None:
        """Where parameters were written to (``load_state_dict``): worker 0's go to the servers, others' are lost."""
        if self._count_writes() == self._weight_versions:
            return
        from psengine.parameter_server.client.operation import wait_all
        from psengine.protocol.layout import ChunkKind

        if self.session.rank != 0:
            logger.warning(
                "parameters were written on worker %d; the servers' weights count, and overwrite them with this step."
                " Only worker 0's writes (load_state_dict) reach the servers.",
                self.session.rank,
            )
        else:
            logger.warning("parameters were written on worker 0; they become the servers' weights")
            specs = [spec for spec in self.chunks.specs if spec.kind is not ChunkKind.USAGE]
            wait_all([self.session.store(spec.key, self.chunks.values(spec)) for spec in specs])
        self._note_weights()

    @override
    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Fills ``optimizer.state`` from the servers."""
        self._server_state(optimizer).fetch()
        self._note_state()

    @override
    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Worker 0's state becomes the servers'."""
        if self.session.rank == 0:
            self._server_state(optimizer).store()
        else:
            logger.info("worker %d loaded optimizer state; the servers' (worker 0's) counts", self.session.rank)
        self._note_state()

    def _note_state(self) -> None:
        if self._binding is not None:
            self._binding.note_state()

    def _server_state(self, optimizer: torch.optim.Optimizer) -> ServerOptimizerState:
        from psengine.strategies.servers.optimizer_state import ServerOptimizerState

        session = self.session  # a closed strategy says so
        assert self._replica is not None
        return ServerOptimizerState(
            session=session,
            optimizer=optimizer,
            parameters=self._replica.parameters,
            specs=[spec for spec in self.chunks.specs if spec.key in self._trained],
        )


def _count_landing(tensors: Iterable[torch.Tensor]) -> None:
    """Count bytes that landed in ``tensors`` as a write: older graphs and other models may depend on what they were."""
    torch.autograd.graph.increment_version(tensors)


def _shares_memory(bucket: Bucket) -> bool:
    """Whether one of the bucket's gradients is its view."""
    return any(
        parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr() and view.numel() > 0
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )


class _PushedGradient:
    """A gradient as it left, to be known again.

    Args:
        parameter: whose gradient.
        sent: the values that the servers get, in the parameter's shape; zeros where it has no gradient.
    """

    def __init__(self, parameter: torch.Tensor, sent: torch.Tensor) -> None:
        self._parameter = parameter
        self._sent = sent
        self._gradient = parameter.grad
        self._version = -1 if parameter.grad is None else parameter.grad._version

    def is_unchanged(self) -> bool:
        """Whether it is the same tensor with the same values. Not every write counts up its version: those through
        ``.data`` do not, nor does ``torch.amp.GradScaler.unscale_``.
        """
        gradient, sent = self._gradient, self._sent
        if self._parameter.grad is not gradient:
            return False
        if gradient is None:
            return True
        if gradient._version != self._version:
            return False
        gradient = gradient.to(sent.dtype)
        # NaN is unlike itself, and rare enough for a second look.
        return torch.equal(gradient, sent) or torch.allclose(gradient, sent, rtol=0, atol=0, equal_nan=True)


def _check_options(max_staleness: Any, staleness_scaling: Any, delay_compensation: Any, push: Any) -> None:
    is_count = isinstance(max_staleness, int) and not isinstance(max_staleness, bool) and max_staleness >= 0
    if max_staleness is not None and not is_count:
        raise ConfigurationError(
            f"max_staleness is a number of steps (expected None or 0, 1, ..., got {max_staleness!r})"
        )
    if staleness_scaling not in (None, "inverse"):
        raise ConfigurationError(f"staleness_scaling (expected None or 'inverse', got {staleness_scaling!r})")
    is_number = isinstance(delay_compensation, int | float) and not isinstance(delay_compensation, bool)
    if not is_number or not 0 <= delay_compensation < 1e6:
        raise ConfigurationError(
            f"delay_compensation is a strength (expected 0 <= value < 1e6, got {delay_compensation!r})"
        )
    if push not in ("step", "backward"):
        raise ConfigurationError(f"push says when gradients leave (expected 'step' or 'backward', got {push!r})")
