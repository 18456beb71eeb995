"""Number formats: autocast, scaled gradients, models in other dtypes."""

import math

import torch
from torch import Tensor, nn
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import refused, row


def train_scaled(run: Run, *, clip: bool = False, **options: bool) -> None:
    """Under autocast; the second step has an infinite loss on rank 0, and is skipped by the scaler."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(run.batches(5)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = classify(model, x, y)
        if step == 1 and run.rank == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        run.note(scaler.get_scale())


@row
def scaled_gradients_clipped(run: Run) -> None:
    """GradScaler with unscale_ and clipping, and a step that is skipped."""
    train_scaled(run, clip=True)


@row
def scaled_gradients_in_a_fused_step(run: Run) -> None:
    """A GradScaler whose scale a fused kernel divides by."""
    train_scaled(run, fused=True)


@row
def models_in_other_dtypes(run: Run) -> None:
    """A model in float64 under SGD, one in bfloat16 under AdamW."""
    for dtype, make in ((torch.float64, torch.optim.SGD), (torch.bfloat16, torch.optim.AdamW)):
        model = run.wrap(mlp().to(dtype))
        optimizer = run.optimizer(make(model.parameters(), lr=0.05), model)
        train(run, model, optimizer=optimizer, batches=[(x.to(dtype), y) for x, y in run.batches()])


@row(one_worker=refused("expected optimizer = psengine.DistributedOptimizer", "servers step what they hold"))
def master_weights(run: Run) -> None:
    """A model in bfloat16 whose float32 copy is what the optimizer steps."""
    torch.manual_seed(4)
    module = mlp().to(torch.bfloat16)
    model = run.wrap(module)
    masters = [parameter.detach().float() for parameter in module.parameters()]
    plain = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for x, y in run.batches():
        model.zero_grad()
        classify(model, x.bfloat16(), y).backward()
        for master, parameter in zip(masters, module.parameters(), strict=True):
            master.grad = parameter.grad.float()
        plain.step()
        with torch.no_grad():
            for master, parameter in zip(masters, module.parameters(), strict=True):
                parameter.copy_(master)


class Phases(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex64) @ self.turn).abs())


@row
def complex_parameters(run: Run) -> None:
    """Complex parameters beside real ones."""
    train(run, run.wrap(Phases()))


@row
def memory_changed_after_wrapping(run: Run) -> None:
    """Parameters are given channels_last memory, and then copies."""
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))
    model = run.wrap(module)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4, size=10)):
        if step == 1:
            module.to(memory_format=torch.channels_last)
        if step == 2:
            for parameter in module.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        images = x.repeat(1, 9)[:, :50].view(-1, 2, 5, 5)
        classify(model, images, y).backward()
