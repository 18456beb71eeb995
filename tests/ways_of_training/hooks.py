"""Hooks: of tensors, modules, parameters, optimizers; and communication hooks."""

from torch import Tensor
from ways_of_training.networks import mlp, train
from ways_of_training.run import Run
from ways_of_training.table import row


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
