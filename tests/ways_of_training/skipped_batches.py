"""A batch is skipped: an exception is caught, somewhere in a step, and training goes on."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import SAME, left_out, refused, row

UNFINISHED = "Expected to have finished reduction in the prior iteration"


class BadBatchError(Exception):
    """What the loops here skip."""


def refuse(*_: Any) -> None:
    raise BadBatchError


def train(run: Run, model: Any, step_of: Callable[[int, Tensor, Tensor], None]) -> None:
    """Five steps, of which those that raise are skipped."""
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(5)):
        try:
            optimizer.zero_grad()
            step_of(step, x, y)
        except BadBatchError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        run.note(classify(model.module, x, y))


def let_pass(hidden: Tensor) -> None:
    """What a forward does in good steps."""


def attack(hidden: Tensor) -> None:
    """Let backward raise when it comes here."""
    hidden.register_hook(refuse)


class Watched(nn.Module):
    """Calls ``watch`` with what is between its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(8, outputs=8), mlp(8, inputs=8)
        self.watch: Callable[[Tensor], Any] = let_pass

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.watch(hidden)
        return self.second(hidden)


def train_watched(run: Run, bad_steps: tuple[int, ...], watch: Callable[[Tensor], Any]) -> None:
    """In bad steps ``watch`` is what lies between the two halves."""
    model = run.wrap(Watched())

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.watch = watch if step in bad_steps else let_pass
        classify(model, x, y).backward()

    train(run, model, step_of)


@row
def forward_raises(run: Run) -> None:
    """Forward raises between two layers on the very first batch, and on a later one."""
    train_watched(run, (0, 3), refuse)


@row(native=refused(UNFINISHED), everywhere=refused(UNFINISHED))
def backward_raises_half_way(run: Run) -> None:
    """A tensor hook raises in the middle of backward, after the second half's exchange, on all ranks, twice."""
    train_watched(run, (1, 3), attack)


@row
def new_wrapper_after_a_backward_that_raised(run: Run) -> None:
    """Backward raises half-way, and training goes on in a new wrapper with a new optimizer."""
    module = Watched()
    model = run.wrap(module)
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(5)):
        model.module.watch = attack if step == 2 else let_pass
        optimizer.zero_grad()
        try:
            classify(model, x, y).backward()
        except BadBatchError:
            del model, optimizer
        else:
            optimizer.step()
            continue
        gc.collect()  # the old wrapper must be gone before the model is wrapped again
        module.zero_grad()
        model = run.wrap(module)
        optimizer = run.sgd(model)


@row
def backward_raises_inside_no_sync(run: Run) -> None:
    """Backward raises half-way inside no_sync; the other micro-batch counts alone, after zero_grad."""
    model = run.wrap(Watched())

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.watch = attack if step == 2 else let_pass
        try:
            with model.no_sync():
                classify(model, x[:2], y[:2]).backward()
        except BadBatchError:
            model.zero_grad()
            model.module.watch = let_pass
        classify(model, x[2:], y[2:]).backward()

    train(run, model, step_of)


@row
def backward_of_a_freed_graph(run: Run) -> None:
    """backward twice without retain_graph: the second raises and is caught."""
    model = run.wrap(mlp())

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        loss = classify(model, x, y)
        loss.backward()
        if step == 1:
            try:
                loss.backward()
            except RuntimeError:
                raise BadBatchError from None

    train(run, model, step_of)


@row(everywhere=left_out("which gradients are averages depends on the buckets"), one_worker=SAME)
def step_after_a_backward_that_raised(run: Run) -> None:
    """Backward raises half-way, and the optimizer steps with the gradients that are there."""
    model = run.wrap(Watched(), gradient_as_bucket_view=True)
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches()):
        model.module.watch = attack if step == 2 else let_pass
        optimizer.zero_grad()
        with contextlib.suppress(BadBatchError):
            classify(model, x, y).backward()
        optimizer.step()
