"""Losses and games: several models, several optimizers, several forwards."""

from __future__ import annotations

import torch
from ways_of_training.networks import mlp
from ways_of_training.run import WIDTH, Run
from ways_of_training.table import row


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
