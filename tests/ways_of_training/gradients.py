"""What is done with gradients, and with the graph, beside one plain backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from ways_of_training.networks import Pieces, classify, mlp, train
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import refused, row

UNFINISHED = "Expected to have finished reduction in the prior iteration"


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
def autograd_grad_beside_backward(run: Run) -> None:
    """torch.autograd.grad at some parameters, noted, before backward."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        loss = classify(model, x, y)
        for gradient in torch.autograd.grad(loss, list(model.parameters())[:2], retain_graph=True):
            run.note(gradient.norm())
        loss.backward()


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


@row(slow=True)
def graph_kept_and_not_used(run: Run) -> None:
    """retain_graph without a second backward."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward(retain_graph=True)


@row
def two_losses_two_backwards(run: Run) -> None:
    """Two forwards with a backward each, whose gradients add up in one step."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        classify(model, x.flip(1), y).backward()


@row
def two_forwards_one_backward(run: Run) -> None:
    """Two forwards, one backward through both."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        (classify(model, x, y) + classify(model, x.flip(1), y)).backward()


@row
def forward_fed_with_its_output(run: Run) -> None:
    """A recurrent use of the wrapped model: three forwards, one backward through all."""
    model = run.wrap(mlp(8, outputs=WIDTH))
    for x, _ in run.training(run.sgd(model)):
        state = x
        for _ in range(3):
            state = model(state)
        state.square().mean().backward()


@row
def losses_backward_in_a_list(run: Run) -> None:
    """torch.autograd.backward over a list of losses with weights."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        output = model(x)
        losses = [F.cross_entropy(output, y), output.square().mean()]
        torch.autograd.backward(losses, [torch.tensor(0.7), torch.tensor(0.3)])


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


def train_one_head(run: Run, **options: Any) -> None:
    model = run.wrap(TwoHeads(), **options)
    for x, y in run.training(run.sgd(model)):
        F.cross_entropy(model(x)[0], y).backward()


@row(native=refused(UNFINISHED), everywhere=refused(UNFINISHED))
def output_without_a_loss(run: Run) -> None:
    """An output that has no part in the loss."""
    train_one_head(run)


@row(native=refused(UNFINISHED), sync=refused(UNFINISHED), sync_server=refused(UNFINISHED))
def output_without_a_loss_searched(run: Run) -> None:
    """An output that has no part in the loss, with find_unused_parameters, which sees it used."""
    train_one_head(run, find_unused_parameters=True)


@row(native=refused(UNFINISHED), everywhere=refused(UNFINISHED))
def output_without_a_loss_in_a_static_graph(run: Run) -> None:
    """An output that has no part in the loss, with static_graph."""
    train_one_head(run, static_graph=True)


@row
def outputs_by_turns(run: Run) -> None:
    """One head's loss is multiplied by zero in every second step: gradients of zero, not none."""
    model = run.wrap(TwoHeads())
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        first, second = model(x)
        (F.cross_entropy(first, y) * (step % 2) + F.cross_entropy(second, y) * ((step + 1) % 2)).backward()


@row
def clipped_by_norm(run: Run) -> None:
    """clip_grad_norm_, torch's."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        run.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@row
def clipped_by_value(run: Run) -> None:
    """clip_grad_value_."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)


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


@row(slow=True)
def gradients_with_noise(run: Run) -> None:
    """Noise of a generator that the ranks share is added to the averages."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    generator = torch.Generator().manual_seed(5)
    for x, y in run.training(optimizer):
        classify(model, x, y).backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


@row
def gradients_by_sign(run: Run) -> None:
    """signSGD: gradients are replaced by new tensors before the step."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign()


@row
def some_gradients_dropped(run: Run) -> None:
    """Gradients of every second parameter are set to None before the step."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        for parameter in list(model.parameters())[::2]:
            parameter.grad = None


@row(slow=True)
def adversarial_examples(run: Run) -> None:
    """PGD: two steps on the input by torch.autograd.grad, then one on the weights."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, y in run.batches():
        attacked = x.clone()
        for _ in range(2):
            attacked.requires_grad_()
            (gradient,) = torch.autograd.grad(classify(model, attacked, y), attacked)
            attacked = (attacked + 0.1 * gradient.sign()).detach()
        optimizer.zero_grad()
        classify(model, attacked, y).backward()
        optimizer.step()


@row
def adversarial_examples_by_backward(run: Run) -> None:
    """FGSM by backward through the wrapped model, whose gradients are then zeroed."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, y in run.batches():
        x.requires_grad_()
        classify(model, x, y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        classify(model, attacked, y).backward()
        optimizer.step()


@row(slow=True)
def curvature(run: Run) -> None:
    """A Hessian-vector product on the averaged gradient, by hand on the inner module."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        parameters = list(model.module.parameters())
        gradients = torch.autograd.grad(classify(model.module, x, y), parameters, create_graph=True)
        along = sum((g * p.grad).sum() for g, p in zip(gradients, parameters, strict=True))
        for product in torch.autograd.grad(along, parameters):
            run.note(product.norm())


@row
def gradients_of_each_sample(run: Run) -> None:
    """Gradients sample by sample through the inner module, clipped one by one (DP-SGD); the wrapper only evaluates."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model), 2):
        total = [torch.zeros_like(parameter) for parameter in model.module.parameters()]
        for one, label in zip(x, y, strict=True):
            loss = classify(model.module, one[None], label[None])
            gradients = torch.autograd.grad(loss, list(model.module.parameters()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for sum_of, g in zip(total, gradients, strict=True):
                sum_of += g / norm.clamp(min=1.0)
        for parameter, gradient in zip(model.module.parameters(), total, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            run.note(classify(model, x, y))


@row
def functional_gradients_of_each_sample(run: Run) -> None:
    """torch.func.vmap over torch.func.grad of the inner module, noted between two steps."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model.module, parameters, (x[None],)), y[None])

    for x, y in run.batches():
        parameters = {name: parameter.detach() for name, parameter in model.module.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        run.note(sum(gradient.square().sum() for gradient in each.values()))
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


@row
def called_with_other_weights(run: Run) -> None:
    """functional_call of the inner module with weights that are computed from its own, whose gradients flow."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        halved = {name: parameter * 0.5 for name, parameter in model.module.named_parameters()}
        aside = F.cross_entropy(functional_call(model.module, halved, (x,)), y)
        (classify(model, x, y) + aside).backward()


@row
def meta_learning(run: Run) -> None:
    """MAML: an inner step whose graph is kept, through functional_call inside forward."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weights = dict(self.network.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(self.network, weights, (x[:2],)), y[:2])
                gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            return F.cross_entropy(functional_call(self.network, weights, (x[2:],)), y[2:])

    model = run.wrap(Learner())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for x, y in run.training(optimizer):
        loss = model(x, y)
        loss.backward()
        run.note(loss)


class Quantize(torch.autograd.Function):
    """Rounds; the gradient passes straight through."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


@row(slow=True)
def straight_through(run: Run) -> None:
    """Weights quantized in forward, with a straight-through gradient."""

    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Quantize.apply(self.weight), self.bias)

    train(run, run.wrap(nn.Sequential(Quantized(WIDTH, 8), nn.Tanh(), Quantized(8, CLASSES))))


@row(slow=True)
def gradient_reversal(run: Run) -> None:
    """Domain-adversarial training: one head behind a gradient that is turned round."""

    class Domains(Pieces):
        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.body(x))
            return self.head(hidden), self.spare(Reverse.apply(hidden))

    model = run.wrap(Domains())
    for x, y in run.training(run.sgd(model)):
        classes, domains = model(x)
        (F.cross_entropy(classes, y) + F.cross_entropy(domains, y.flip(0))).backward()


@row(slow=True)
def loss_computed_in_forward(run: Run) -> None:
    """Forward takes the labels and returns the loss."""

    class WithLoss(Pieces):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x, with_spare=True), y)

    model = run.wrap(WithLoss())
    for x, y in run.training(run.sgd(model)):
        model(x, y=y).backward()


@row(slow=True)
def anomaly_mode(run: Run) -> None:
    """torch.autograd.detect_anomaly around two of three steps."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches()):
        with torch.autograd.set_detect_anomaly(step != 1):
            optimizer.zero_grad()
            classify(model, x, y).backward()
            optimizer.step()


@row(slow=True)
def saved_tensors_packed(run: Run) -> None:
    """saved_tensors_hooks store activations as float64 and bring them back."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        with torch.autograd.graph.saved_tensors_hooks(_as_double, _from_double):
            loss = classify(model, x, y)
        loss.backward()


def _as_double(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
    return tensor.dtype, tensor.double() if tensor.is_floating_point() else tensor


def _from_double(packed: tuple[torch.dtype, Tensor]) -> Tensor:
    return packed[1].to(packed[0])


@row
def saved_tensors_on_the_cpu(run: Run) -> None:
    """torch.autograd.graph.save_on_cpu."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        with torch.autograd.graph.save_on_cpu():
            loss = classify(model, x, y)
        loss.backward()
