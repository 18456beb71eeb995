"""What users do around an asynchronous optimizer.step(), against one plain process: followed to the bit, or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.expectations import raises
from support.server_training import assert_equal, at_servers, network, state_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import psengine

STEPS = 4
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": rest}], lr=0.1, momentum=0.9)


@dataclass
class Training:
    """One way to train: in one plain process, or under 'async', with a job for each model.

    Attributes:
        job: None trains plainly.
        options: of the wrapper.
    """

    job: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    strategies: list[psengine.AsyncServer] = field(default_factory=list)

    def start(
        self, module: nn.Module, make: MakeOptimizer = momentum, *, number: int | None = None
    ) -> tuple[Any, torch.optim.Optimizer]:
        """The model, wrapped, and its optimizer; ``number`` is the job's, else the next one."""
        if self.job is None:
            return module, make(module)
        number = len(self.strategies) if number is None else number
        strategy = psengine.AsyncServer(job=f"{self.job}-{number}", timeout_s=20)
        self.strategies.append(strategy)
        wrapped = psengine.DistributedDataParallel(module, strategy=strategy, **self.options)
        return wrapped, psengine.DistributedOptimizer(make(module), wrapped)

    def local(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.job is None else model.no_sync()

    def close(self) -> None:
        for strategy in self.strategies:
            strategy.close()


def backward(model: nn.Module, step: int = 0) -> None:
    model(batch(step)).square().mean().backward()


# ---- like plain training -----------------------------------------------------------------------------------------


def micro_batches_alone(training: Training) -> nn.Module:
    model, optimizer = training.start(network())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with training.local(model):
                backward(model, 10 * step + part)
        optimizer.step()
    return model


def two_steps_for_a_backward(training: Training) -> nn.Module:
    model, optimizer = training.start(network())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        optimizer.step()
    return model


def gradients_by_hand(training: Training) -> nn.Module:
    module = network()
    model, optimizer = training.start(module)
    for step in range(STEPS):
        loss = module(batch(step)).square().mean()
        for parameter, gradient in zip(
            module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    return model


def past_the_wrapper(training: Training) -> nn.Module:
    module = network()
    model, optimizer = training.start(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model if step % 2 else module, step)
        optimizer.step()
    return model


def a_backward_that_raised(training: Training) -> nn.Module:
    """The head's gradients are new when it raises, the others are those of the step before."""
    module = network()
    model, optimizer = training.start(module)
    for step in range(STEPS - 1):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    module[1].register_full_backward_hook(interrupt)
    with raises(KeyError, "interrupted"):
        backward(model, 9)
    optimizer.step()
    return model


def interrupt(*_: Any) -> None:
    raise KeyError("interrupted")


def shared_trunk(training: Training) -> nn.Module:
    """Two models with a trunk in common, each with its own optimizer."""
    torch.manual_seed(0)
    trunk = nn.Linear(5, 7)
    left, right = nn.Sequential(trunk, nn.Tanh(), nn.Linear(7, 3)), nn.Sequential(trunk, nn.Linear(7, 2))
    trained = [training.start(left), training.start(right, lambda m: torch.optim.Adam(m.parameters(), lr=0.01))]
    for step in range(STEPS):
        for model, optimizer in trained:
            model.zero_grad()
            backward(model, step)
            optimizer.step()
    return nn.ModuleList([left, right])


def trunk_that_another_job_trained(training: Training) -> nn.Module:
    """Wrapping a model whose job the servers know already writes to the trunk that it shares with a wrapped model."""
    torch.manual_seed(0)
    trunk = nn.Linear(5, 7)
    left, right = nn.Sequential(trunk, nn.Linear(7, 3)), nn.Sequential(trunk, nn.Linear(7, 2))
    earlier = copy.deepcopy(right)
    model, optimizer = training.start(earlier)
    backward(model)
    optimizer.step()
    training.close()
    model, optimizer = training.start(left)
    training.start(right, number=0)
    if training.job is None:
        right.load_state_dict(earlier.state_dict())
    backward(model, 1)
    optimizer.step()
    return nn.ModuleList([left, right])


def state_reset_by_loading(training: Training) -> nn.Module:
    model, optimizer = training.start(network())
    for step in range(STEPS):
        if step == 2:
            optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def hooks_of_all_optimizers(training: Training) -> nn.Module:
    """Global ones too, each once, also after a state was loaded; one of them replaces the closure."""
    calls: list[str] = []
    model, optimizer = training.start(network())

    def note(name: str) -> Callable[..., None]:
        def hook(owner: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
            assert owner is optimizer
            assert arguments[0] is optimizer
            calls.append(f"{name} {len(arguments)} {sorted(options)}")

        return hook

    def replace_closure(owner: torch.optim.Optimizer, arguments: Any, options: Any) -> Any:
        calls.append("replace")

        def twice() -> float:
            calls.append("closure")
            optimizer.zero_grad()
            loss = model(batch(int(arguments[1]()))).square().mean() * 2
            loss.backward()
            return loss.item()

        return (owner,), {"closure": twice}

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
    ]
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        # All gradients of that step are the closure's.
        optimizer.zero_grad()
        handles.append(optimizer.register_step_pre_hook(replace_closure))
        calls.append(f"loss {optimizer.step(lambda: 7.0)}")
        handles.append(optimizer.register_step_pre_hook(lambda *_: "nonsense"))
        optimizer.zero_grad()
        with raises(RuntimeError, "must return None or a tuple of (new_args, new_kwargs), but got nonsense"):
            optimizer.step(lambda: 8.0)
    finally:
        for handle in handles:
            handle.remove()
    model.calls = calls
    return model


def set_rate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def step_scheduler(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


def clamp_weights(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.1, 0.1)


def load_weights(model: Any, optimizer: torch.optim.Optimizer) -> None:
    module = getattr(model, "module", model)
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()})


def changes_between_backward_and_step(training: Training) -> nn.Module:
    model, optimizer = training.start(network())
    for step, change in enumerate([set_rate, step_scheduler, clamp_weights, load_weights, set_rate]):
        optimizer.zero_grad()
        with training.local(model):
            backward(model, step)
        change(model, optimizer)
        optimizer.step()
    return model


FOLLOWED: list[Callable[[Training], nn.Module]] = [
    micro_batches_alone,
    two_steps_for_a_backward,
    gradients_by_hand,
    past_the_wrapper,
    a_backward_that_raised,
    shared_trunk,
    trunk_that_another_job_trained,
    state_reset_by_loading,
    hooks_of_all_optimizers,
    changes_between_backward_and_step,
]


@at_servers(1)
def test_one_worker_is_plain_training_whatever_comes_before_a_step(rank, world_size):
    failures = []
    for scenario in FOLLOWED:
        training = Training(
            job=scenario.__name__,
            # Small buckets, so that a backward can fail between two.
            options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
        )
        try:
            ours, plain = scenario(training), scenario(Training())
            assert_equal(state_of(getattr(ours, "module", ours)), state_of(plain))
            assert getattr(ours, "calls", None) == getattr(plain, "calls", None)
        except Exception as error:
            failures.append(f"{scenario.__name__}: {type(error).__name__}: {error}")
        finally:
            training.close()
    assert not failures, "\n".join(failures)


def old_graph(training: Training) -> None:
    """Backward needs the head's weights for the hidden layer's gradient, and a step has overwritten them."""
    model, optimizer = training.start(network())
    late = model(batch(1)).square().mean()
    backward(model)
    optimizer.step()
    with raises(RuntimeError, "has been modified by an inplace operation"):
        late.backward()


# ---- refused -----------------------------------------------------------------------------------------------------


def append_parameters(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] += optimizer.param_groups[1]["params"][:1]


def exchange_parameters(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].reverse()


def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def replace_state(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = type(optimizer.state)(dict)


def drop_state_of_one(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


CHANGED_GROUPS = "strategy 'async' trains the parameters that the optimizer had when psengine.DistributedOptimizer"
CHANGED_STATE = "optimizer.state is only a copy of the servers'"
# What is done before the third backward, and what is said then.
REFUSED: list[tuple[Callable[[Any, torch.optim.Optimizer], None], list[str]]] = [
    (append_parameters, [CHANGED_GROUPS, "in groups of [1, 3], got others, in groups of [2, 3]"]),
    (exchange_parameters, [CHANGED_GROUPS, "in groups of [1, 3], got others, in groups of [1, 3]"]),
    (add_group, [CHANGED_GROUPS, "in groups of [1, 3], got others, in groups of [1, 3, 1]"]),
    (replace_state, [CHANGED_STATE, "expected the mapping that psengine knows", "load_state_dict"]),
    (drop_state_of_one, [CHANGED_STATE, "of 4 parameters, got another, or fewer: 3", "load_state_dict"]),
]


def refuses_changes() -> None:
    for change, texts in REFUSED:
        training = Training(job=change.__name__)
        model, optimizer = training.start(network(), two_groups)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        change(model, optimizer)
        with raises(psengine.ConfigurationError, *texts):
            backward(model, 2)
            optimizer.step()
        training.close()


def refuses_untrained() -> None:
    texts = ["parameter 0 of group 0 (shape (7, 5)) has a gradient", "when the model was wrapped it was frozen"]

    training = Training(job="unfrozen")
    module = network()
    module[0].requires_grad_(False)
    model, optimizer = training.start(module)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    module[0].requires_grad_(True)
    backward(model, 2)
    with raises(psengine.ConfigurationError, *texts):
        optimizer.step()
    training.close()

    training = Training(job="ignored")
    module = network()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model, optimizer = training.start(module)
    backward(model)
    with raises(psengine.ConfigurationError, *texts, "an optimizer of its own"):
        optimizer.step()
    # The way out that it names.
    other = torch.optim.SGD([module[0].weight], lr=0.1)
    other.step()
    other.zero_grad()
    optimizer.step()
    training.close()


@at_servers(1)
def test_a_step_that_servers_would_take_otherwise_is_refused(rank, world_size):
    """An optimizer that changed since it was distributed, gradients that no server applies, graphs of older weights."""
    old_graph(Training())
    refuses_changes()
    refuses_untrained()
    training = Training(job="old graph")
    old_graph(training)
    training.close()
