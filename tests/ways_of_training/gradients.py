"""What is done with gradients, and with the graph, beside one plain backward; hooks of tensors and modules."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways_of_training.networks import Pieces, classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import refused, row


@row
def gradient_penalty(run: Run) -> None:
    """A penalty on the gradient at the input: double backward."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        x.requires_grad_()
        loss = classify(model, x, y)
        (at_input,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + at_input.square().sum()
        loss.backward()
        run.note(loss)


@row
def autograd_grad_alone(run: Run) -> None:
    """One step's loss is only differentiated by torch.autograd.grad; the others train."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        loss = classify(model, x, y)
        if step == 1:
            run.note(torch.autograd.grad(loss, model.module[0].weight)[0])
            continue
        loss.backward()
        optimizer.step()


@row
def graph_kept_for_a_second_backward(run: Run) -> None:
    """retain_graph, and backward twice through one forward."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        loss = classify(model, x, y)
        loss.backward(retain_graph=True)
        loss.backward()


@row
def two_forwards_one_backward(run: Run) -> None:
    """Two forwards, one backward through both."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        (classify(model, x, y) + classify(model, x.flip(1), y)).backward()


@row
def backward_into_some_inputs(run: Run) -> None:
    """backward(inputs=...) at the first layer only, in one of four steps."""
    model = run.wrap(mlp(), find_unused_parameters=True)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        loss = classify(model, x, y)
        if step == 2:
            loss.backward(inputs=list(model.module.parameters()))
        else:
            loss.backward()


class TwoHeads(Pieces):
    """Returns the scores of both heads."""

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), self.spare(hidden)


@row
def output_without_a_loss_searched(run: Run) -> None:
    """An output that has no part in the loss, with find_unused_parameters."""
    model = run.wrap(TwoHeads(), find_unused_parameters=True)
    for x, y in run.training(run.sgd(model)):
        F.cross_entropy(model(x)[0], y).backward()


@row
def gradients_as_bucket_views(run: Run) -> None:
    """gradient_as_bucket_view, gradients zeroed and gradients dropped by turns, clipped."""
    model = run.wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(5)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        classify(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@row
def gradients_by_hand(run: Run) -> None:
    """Gradients that torch.autograd.grad made of the inner model, assigned."""
    module = mlp()
    model = run.wrap(module)
    optimizer = run.sgd(model)
    for x, y in run.batches():
        parameters = list(module.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(classify(module, x, y), parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()


@row
def past_the_wrapper(run: Run) -> None:
    """In every second step the inner model is called."""
    model = run.wrap(mlp())
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        classify(model if step % 2 else model.module, x, y).backward()


class Drop(torch.autograd.Function):
    """The first argument; the other one's gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@row
def undefined_gradient(run: Run) -> None:
    """A parameter that takes part, and whose gradient is undefined, under weight decay."""

    class Dropping(Pieces):
        def forward(self, x: Tensor) -> Tensor:
            return Drop.apply(super().forward(x), self.spare.weight) + self.spare.bias

    model = run.wrap(Dropping())
    train(run, model, optimizer=run.sgd(model, weight_decay=0.1))


OVERWRITTEN = refused("has been modified by an inplace operation")


@row(native=OVERWRITTEN, plain=OVERWRITTEN, everywhere=OVERWRITTEN)
def graph_of_older_weights(run: Run) -> None:
    """Backward through weights that a step has overwritten since."""
    model = run.wrap(mlp())
    (batch, other) = run.batches(2)
    late = classify(model.module, *batch)
    for x, y in run.training(run.sgd(model), batches=[other]):
        classify(model, x, y).backward()
    late.backward()


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@row
def tensor_hook_on_a_parameter(run: Run) -> None:
    """parameter.register_hook scales a gradient before it is exchanged."""
    model = run.wrap(mlp())
    model.module[0].weight.register_hook(lambda gradient: gradient * 0.5)
    train(run, model)


@row
def post_accumulate_hook_before_wrapping(run: Run) -> None:
    """register_post_accumulate_grad_hook changes gradients in place; registered before wrapping."""
    module = mlp()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    train(run, run.wrap(module))


@row
def hooks_on_the_wrapper(run: Run) -> None:
    """Forward hooks on the wrapped model itself."""
    model = run.wrap(mlp())
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    train(run, model)
