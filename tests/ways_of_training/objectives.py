"""Games: several models, several optimizers, several forwards."""

from __future__ import annotations

import torch
from ways_of_training.networks import mlp
from ways_of_training.run import WIDTH, Run
from ways_of_training.table import row


@row
def adversarial_networks(run: Run) -> None:
    """GAN: two wrapped models; the critic is frozen while the generator learns."""
    generator = run.wrap(mlp(8, inputs=4, outputs=WIDTH))
    critic = run.wrap(mlp(8, outputs=1))
    of_generator = run.optimizer(torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9)), generator)
    of_critic = run.optimizer(torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9)), critic)
    for x, _ in run.batches():
        of_critic.zero_grad()
        fake = generator(torch.randn(len(x), 4)).detach()
        (critic(fake).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)
        loss = -critic(generator(torch.randn(len(x), 4))).mean()
        loss.backward()
        critic.requires_grad_(True)
        of_generator.step()
        run.note(loss)
