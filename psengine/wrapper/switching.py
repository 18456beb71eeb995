"""``model.switch_strategy``: another strategy takes over between two steps.

::

    check      every rank: can the new strategy serve this replica, are its servers up?      nothing has changed yet
    agree      the ranks tell each other; one refusal is everybody's
    conclude   the old strategy makes replicas equal, and gives the optimizer's state back
    start      the new strategy joins; the optimizers are bound to it, with their state
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, PSEngineError, ReductionError
from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.strategies.stepping import Stepping
from psengine.tensors.objects import from_bytes, to_bytes
from psengine.wrapper import arguments as checks


def switch_strategy(model: Any, strategy: str | Strategy) -> None:
    """``DistributedDataParallel.switch_strategy``."""
    former: Strategy = model.strategy
    problem = None
    try:
        following = resolve_strategy(strategy)
        _check(model, following)
    except PSEngineError as error:
        problem = error
    _agree(model._collective, model.device, problem)
    optimizers: list[Any] = list(model._optimizers)
    former.conclude()
    for optimizer in optimizers:
        former.fetch_optimizer_state(optimizer)
        if former.capabilities.steps_alone and not following.capabilities.steps_alone:
            _take_state_of_rank_0(optimizer, model._collective, model.device)
    try:
        # Not closed: the name of its job stays taken, because servers keep that job's values.
        former.abandon()
        model.strategy = following
        model._restart(init_sync=True)
    except BaseException as error:
        stopped = _Stopped(
            f"the change of strategy from {former.name!r} to {following.name!r} failed after the round had ended:"
            f" {error}. The model has no strategy now (expected one for forward and step, got none). Fix: wrap"
            " model.module again, or save it with optimizer.state_dict(), which are those of the round's end."
        )
        model.reducer._remove_autograd_hooks()
        following.close()
        model.saves_strategy_state = False
        model.reducer = stopped
        for optimizer in optimizers:
            optimizer._psengine_strategy = stopped
        if isinstance(error, PSEngineError):
            raise ReductionError(stopped.text) from error
        raise


class _Stopped(Stepping):
    """In the place of a reducer and of an optimizer's strategy, after a change of strategy that failed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Any:
        raise ReductionError(self.text)

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        raise ReductionError(self.text)


def _check(model: Any, strategy: Strategy) -> None:
    """Raise where ``strategy`` could not take over; changes nothing."""
    if strategy is model.strategy:
        raise ConfigurationError(f"the model is under this very strategy object already (got {strategy!r})")
    is_embedded = getattr(model.strategy.rendezvous, "is_embedded", False)
    obstacles: dict[str, Any] = {
        "a communication hook, which belongs to the strategy that it was registered with": model._comm_hooks,
        "join, whose ranks without data would not take part": model._join_config.enable,
        "delay_all_reduce_named_params": model._delay_all_reduce_params,
        "mixed_precision": model.mixed_precision,
        "optimize_ddp='python_reducer' of torch.compile": model._use_python_reducer,
        "tables on a server that the strategy has started": model._tables and is_embedded,
    }
    for what, is_there in obstacles.items():
        if is_there:
            raise ConfigurationError(f"strategies are not switched under {what} (expected a model without it)")
    if model.reducer.is_in_backward:
        raise ConfigurationError(
            "strategies are switched between two steps (got a backward of which some gradients are missing)"
        )
    if strategy.capabilities.needs_process_group and model.process_group is None:
        raise ConfigurationError(
            f"strategy {strategy.name!r} needs the process group that the model was wrapped with (expected one, got"
            " none: it was wrapped before there was one). Fix: call psengine.init() before wrapping."
        )
    checks.check_meets_others(strategy)
    replica = model._describe_to_strategy(with_buffers=model.forward_sync_buffers, is_known_equal=False)
    strategy.check_ready(replica, list(model._optimizers))


def _agree(collective: Collective, device: torch.device, problem: PSEngineError | None) -> None:
    """Raise on every rank where the check of one found a problem."""
    text = b"" if problem is None else str(problem).encode()
    texts = collective.gather_bytes(text, device, what="checks before strategies are switched")
    if problem is not None:
        raise problem
    for rank, found in enumerate(texts):
        if found:
            raise ConfigurationError(
                f"strategies are switched on all ranks or on none (rank {rank}: {found.decode(errors='replace')})"
            )


def _take_state_of_rank_0(optimizer: torch.optim.Optimizer, collective: Collective, device: torch.device) -> None:
    """Replicas that are to have equal optimizers go on with the state of rank 0's."""
    own = torch.optim.Optimizer.state_dict(optimizer)
    state = collective.broadcast_bytes(to_bytes(own["state"]), 0, device, what="the optimizer's state")
    torch.optim.Optimizer.load_state_dict(optimizer, {**own, "state": from_bytes(state)})
