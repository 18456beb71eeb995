"""Losses and games: several models, several optimizers, several forwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways_of_training.networks import mlp
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import row


@row
def contrastive_with_gradients_gathered(run: Run) -> None:
    """InfoNCE over all ranks' embeddings, gathered by torch.distributed.nn, which differentiates."""
    from torch.distributed.nn import all_gather

    model = run.wrap(mlp(8, outputs=4))
    for x, _ in run.training(run.sgd(model)):
        embedded = F.normalize(model(x))
        everybody = torch.cat(all_gather(embedded))
        F.cross_entropy(embedded @ everybody.T, torch.arange(len(x)) + run.rank * len(x)).backward()


def play(run: Run, *, penalty: bool = False, critic_steps: int = 1) -> None:
    """A generator and a critic, each wrapped, each with its optimizer."""
    generator = run.wrap(mlp(8, inputs=4, outputs=WIDTH))
    critic = run.wrap(mlp(8, outputs=1))
    of_generator = run.optimizer(torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9)), generator)
    of_critic = run.optimizer(torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9)), critic)
    for x, _ in run.batches():
        for _ in range(critic_steps):
            of_critic.zero_grad()
            fake = generator(torch.randn(len(x), 4)).detach()
            loss = critic(fake).mean() - critic(x).mean()
            if penalty:
                between = (x + fake).div(2).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)
        loss = -critic(generator(torch.randn(len(x), 4))).mean()
        loss.backward()
        critic.requires_grad_(True)
        of_generator.step()
        run.note(loss)


@row
def adversarial_networks(run: Run) -> None:
    """GAN: two wrapped models; the critic is frozen while the generator learns."""
    play(run)


@row
def adversarial_networks_in_one_module(run: Run) -> None:
    """A GAN in one wrapped module, the two sides by turns, with find_unused_parameters."""

    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = mlp(8, inputs=4, outputs=WIDTH), mlp(8, outputs=1)

        def forward(self, x: Tensor, turn: int) -> Tensor:
            fake = self.generator(torch.ones(len(x), 4))
            if turn == 0:
                return self.critic(fake.detach()).mean() - self.critic(x).mean()
            return -self.critic(fake).mean()

    model = run.wrap(Game(), find_unused_parameters=True)
    for turn, (x, _) in enumerate(run.training(run.sgd(model), 4)):
        loss = model(x, turn % 2)
        loss.backward()
        run.note(loss)


@row
def cycle(run: Run) -> None:
    """Two wrapped models in one graph, back and forth, one loss, an optimizer each (CycleGAN's cycle)."""
    there, back = run.wrap(mlp(8, outputs=WIDTH)), run.wrap(mlp(8, outputs=WIDTH))
    optimizers = [run.sgd(there), run.sgd(back)]
    for x, _ in run.batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        (F.mse_loss(back(there(x)), x) + F.mse_loss(there(back(x)), x)).backward()
        for optimizer in optimizers:
            optimizer.step()


@row
def encoder_and_head_wrapped_apart(run: Run) -> None:
    """An encoder and a head in wrappers of their own; the encoder is trained in every second step."""
    encoder, head = run.wrap(mlp(8, outputs=8)), run.wrap(nn.Linear(8, CLASSES))
    optimizers = [run.sgd(encoder), run.sgd(head)]
    for step, (x, y) in enumerate(run.batches(4)):
        hidden = encoder(x)
        loss = F.cross_entropy(head(hidden.detach() if step % 2 else hidden), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers[step % 2 :]:
            optimizer.step()
