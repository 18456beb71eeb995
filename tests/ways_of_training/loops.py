"""Loops around steps: where batches come from, evaluation between steps, several models."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import WIDTH, Run
from ways_of_training.table import apart_from, left_out, refused, row

ALONE = left_out("one worker has nobody whose data could end earlier or later")
VIEWS_MOVE = apart_from("gradient", reason="native's buckets, which gradients are views of, take part to the end")


@row
def batch_without_samples(run: Run) -> None:
    """A batch of size zero on one rank, under a summed loss."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(4)):
        size = 0 if step == 1 and run.rank == 0 else 4
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:size]), y[:size], reduction="sum") / 4
        loss.backward()
        optimizer.step()
        run.note(loss)


@row(
    views=VIEWS_MOVE,
    sync_server=refused("divides by all ranks inside join"),
    one_worker=ALONE,
)
def uneven_inputs_divided_by_who_is_there(run: Run) -> None:
    """join with divide_by_initial_world_size=False; rank 0 has a batch more."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    with model.join(divide_by_initial_world_size=False):
        for x, y in run.training(optimizer, 4 - run.rank):
            classify(model, x, y).backward()


@row(one_worker=ALONE)
def uneven_inputs_end_together(run: Run) -> None:
    """join with throw_on_early_termination: everybody stops with the first."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    try:
        with model.join(throw_on_early_termination=True):
            for x, y in run.training(optimizer, 2 + run.rank):
                classify(model, x, y).backward()
    except RuntimeError:
        run.note(1.0)
    dist.barrier()


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


@row
def evaluated_with_gradients(run: Run) -> None:
    """After each step a forward with gradients whose loss nobody differentiates."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        model.eval()
        run.note(classify(model, x, y))
        model.train()


@row
def first_used_for_evaluation(run: Run) -> None:
    """The wrapped model's very first forwards are evaluations."""
    model = run.wrap(mlp())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for x, y in run.batches(2):
                run.note(classify(model, x, y))
    train(run, model)
