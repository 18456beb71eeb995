"""Losses and games: several models, several optimizers, several forwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from ways_of_training.networks import Pieces, classify, mlp
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import row


def seeded(module: type[nn.Module] | Any, *arguments: Any) -> nn.Module:
    """A network that is the same on every rank without being wrapped."""
    torch.manual_seed(11)
    network = module(*arguments)
    torch.manual_seed(100)
    return network


@row(slow=True)
def label_smoothing_and_weights(run: Run) -> None:
    """Cross entropy with smoothing and class weights."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]))
    for x, y in run.training(optimizer):
        loss_of(model(x), y).backward()


@row
def mixup(run: Run) -> None:
    """Mixup with a random state that the ranks share."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    shared = torch.Generator().manual_seed(7)
    for x, y in run.batches():
        share, order = torch.rand((), generator=shared), torch.randperm(len(x), generator=shared)
        optimizer.zero_grad()
        scores = model(share * x + (1 - share) * x[order])
        (share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])).backward()
        optimizer.step()


@row(slow=True)
def distillation(run: Run) -> None:
    """A teacher that is not wrapped, in inference mode."""
    teacher = seeded(mlp).eval()
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, _ in run.batches():
        with torch.inference_mode():
            target = teacher(x)
        optimizer.zero_grad()
        F.kl_div(model(x).log_softmax(1), target.clone().softmax(1), reduction="batchmean").backward()
        optimizer.step()


@row
def teacher_that_follows(run: Run) -> None:
    """A mean teacher: a copy of the inner module that follows by an exponential average (BYOL)."""
    model = run.wrap(mlp())
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = run.sgd(model)
    for x, _ in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(model(x), teacher(x.flip(1))).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    run.compare(teacher)


@row
def contrastive_with_all_samples(run: Run) -> None:
    """InfoNCE over all ranks' embeddings, gathered without their gradients."""
    model = run.wrap(mlp(8, outputs=4))
    for x, _ in run.training(run.sgd(model)):
        mine, other = F.normalize(model(x)), F.normalize(model(x + 0.1))
        gathered = [torch.empty_like(other) for _ in range(run.world_size)]
        dist.all_gather(gathered, other.detach().contiguous())
        gathered[run.rank] = other
        scores = mine @ torch.cat(gathered).T / 0.2
        F.cross_entropy(scores, torch.arange(len(x)) + run.rank * len(x)).backward()


@row
def contrastive_with_gradients_gathered(run: Run) -> None:
    """InfoNCE over all ranks' embeddings, gathered by torch.distributed.nn, which differentiates."""
    from torch.distributed.nn import all_gather

    model = run.wrap(mlp(8, outputs=4))
    for x, _ in run.training(run.sgd(model)):
        embedded = F.normalize(model(x))
        everybody = torch.cat(all_gather(embedded))
        F.cross_entropy(embedded @ everybody.T, torch.arange(len(x)) + run.rank * len(x)).backward()


@row(slow=True)
def triplets(run: Run) -> None:
    """A triplet loss: three forwards, one backward."""
    model = run.wrap(mlp(8, outputs=4))
    for x, _ in run.training(run.sgd(model)):
        F.triplet_margin_loss(model(x), model(x + 0.1), model(x.flip(0))).backward()


@row(slow=True)
def variational(run: Run) -> None:
    """A variational autoencoder: sampling inside forward, two terms of a loss."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, outputs=4), mlp(8, inputs=2, outputs=WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, dim=1)
            sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            return self.decoder(sample), mean, log_variance

    model = run.wrap(Autoencoder())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for x, _ in run.training(optimizer):
        back, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        (F.mse_loss(back, x) + 0.1 * divergence).backward()


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
def adversarial_networks_with_penalty(run: Run) -> None:
    """WGAN-GP: two critic steps a generator step, with a gradient penalty."""
    play(run, penalty=True, critic_steps=2)


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


@row(slow=True)
def policy_gradient(run: Run) -> None:
    """REINFORCE: rollouts under no_grad, one update from their log probabilities."""
    policy = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.Adam(policy.parameters(), lr=0.01), policy)
    for x, y in run.batches():
        states, actions, rewards = [], [], []
        state = x
        for _ in range(3):
            with torch.no_grad():
                action = Categorical(logits=policy(state)).sample()
            states.append(state)
            actions.append(action)
            rewards.append((action == y).float())
            state = state.roll(1, dims=1)
        optimizer.zero_grad()
        chosen = Categorical(logits=policy(torch.cat(states))).log_prob(torch.cat(actions))
        (-chosen * torch.cat(rewards)).mean().backward()
        optimizer.step()


@row
def proximal_policy(run: Run) -> None:
    """PPO: several epochs of minibatches over one rollout, clipped, policy and value in one module."""

    class Both(Pieces):
        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.body(x))
            return self.head(hidden), self.spare(hidden)[:, 0]

    model = run.wrap(Both())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for x, y in run.batches(2):
        with torch.no_grad():
            logits, value = model(x)
        action = Categorical(logits=logits).sample()
        before, advantage = Categorical(logits=logits).log_prob(action), (action == y).float() - value
        for _ in range(2):
            for part in torch.randperm(len(x)).split(2):
                logits, value = model(x[part])
                ratio = (Categorical(logits=logits).log_prob(action[part]) - before[part]).exp()
                gain = torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]).mean()
                loss = -gain + F.mse_loss(value, (action == y).float()[part])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


@row(slow=True)
def target_network(run: Run) -> None:
    """Q-learning: the target network is a copy that is replaced by load_state_dict every second step."""
    model = run.wrap(mlp())
    target = copy.deepcopy(model.module)
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(4)):
        with torch.no_grad():
            best = target(x.flip(1)).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(model(x).gather(1, y[:, None])[:, 0], 0.9 * best + 1).backward()
        optimizer.step()
        if step % 2:
            target.load_state_dict(model.module.state_dict())


@row(slow=True)
def elastic_weights(run: Run) -> None:
    """EWC: squared distance from earlier weights, weighed by earlier gradients."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    anchors: list[tuple[Tensor, Tensor]] = []
    for step, (x, y) in enumerate(run.training(optimizer, 4)):
        loss = classify(model, x, y)
        for (kept, weight), parameter in zip(anchors, model.parameters(), strict=bool(anchors)):
            loss = loss + (weight * (parameter - kept).square()).sum()
        loss.backward()
        if step == 1:
            anchors = [(p.detach().clone(), p.grad.square()) for p in model.parameters()]


@row(slow=True)
def sum_divided_by_all_tokens(run: Run) -> None:
    """A summed loss, divided by all ranks' tokens, times the world size."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, y in run.batches():
        count = torch.tensor(float(len(x) - run.rank))
        mine = int(count)
        dist.all_reduce(count)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:mine]), y[:mine], reduction="sum") * run.world_size / count
        loss.backward()
        optimizer.step()


@row(slow=True)
def uncertainty_weights(run: Run) -> None:
    """Losses weighed by parameters of the loss, which is wrapped with the model."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.log_variances = Pieces(), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            losses = torch.stack([F.cross_entropy(self.network(x, with_spare=s), y) for s in (False, True)])
            return (losses * (-self.log_variances).exp() + self.log_variances).sum()

    model = run.wrap(Weighed())
    for x, y in run.training(run.sgd(model)):
        model(x, y).backward()
