"""The pieces of benchmarks/accuracy: equal samples, and trainings of a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accuracy.studies import STUDIES
from accuracy.tasks import task_of
from accuracy.trainings import Plan, train_in_turns

PLAN = Plan(
    task="text",
    candidate="one",
    strategy="async",
    workers=1,
    batch_size=2,
    samples=12,
    optimizer="SGD",
    learning_rate=0.1,
    momentum=0.9,
    seed=3,
)


def plain_training(plan: Plan) -> tuple[float, float]:
    """What the same training without psengine learns."""
    torch.manual_seed(plan.seed)
    task = task_of(plan.task)
    model, generator = task.model(), torch.Generator().manual_seed(1000 * plan.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate, momentum=plan.momentum)
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = plan.learning_rate * min(1.0, 2 * (1 - step / plan.steps))
        optimizer.zero_grad()
        task.loss(model, plan.batch_size, generator).backward()
        optimizer.step()
    return task.judge(model)


def test_candidates_learn_from_equally_many_samples_in_whole_rounds():
    for study in STUDIES.values():
        for name, candidate in study.candidates.items():
            for task in study.rates:
                plan = study.plan(task, name, 0, 1.0)
                assert plan.samples == study.samples
                assert plan.steps % candidate.round_steps == 0


def test_one_worker_of_a_shard_learns_what_a_plain_process_learns_and_several_are_stale():
    alone = train_in_turns(PLAN)
    plan = replace(PLAN, workers=3, samples=36)
    apart = [train_in_turns(plan) for _ in range(2)]
    assert (alone.loss, alone.wrong) == pytest.approx(plain_training(PLAN), rel=1e-5)
    assert alone.staleness == 0
    assert 1 < apart[0].staleness < 2, "two of three, but for each worker's first step"
    assert apart[0] == apart[1], "the order is the seed's, not the machine's"
