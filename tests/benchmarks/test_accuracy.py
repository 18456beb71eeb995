"""The pieces of benchmarks/accuracy: a run's points, modelled bytes and times, and trainings of a few steps."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from accuracy.outcomes import Link, at_time, equal_samples, mean_text
from accuracy.studies import STUDIES
from accuracy.tasks import task_of
from accuracy.trainings import Plan, Run, train_in_ranks, train_in_turns
from accuracy.wire import sent_bytes
from harness.ranks import run_ranks

from psengine.parameter_server.client.embedded import EmbeddedServer

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


def curve_of_plain_steps(plan: Plan) -> list[tuple[int, float, float]]:
    """The same training without psengine, judged after the same steps."""
    torch.manual_seed(plan.seed)
    task = task_of(plan.task)
    model, generator = task.model(), torch.Generator().manual_seed(1000 * plan.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate, momentum=plan.momentum)
    curve = []
    for step in range(1, plan.steps + 1):
        optimizer.param_groups[0]["lr"] = plan.learning_rate * min(1.0, 2 * (1 - (step - 1) / plan.steps))
        optimizer.zero_grad()
        task.loss(model, plan.batch_size, generator).backward()
        optimizer.step()
        if step in plan.judged_steps():
            curve.append((step * plan.batch_size, *task.judge(model)))
    return curve


def test_a_run_is_judged_at_ends_of_rounds_and_at_its_end():
    for study in STUDIES.values():
        for name in study.candidates:
            for task in study.settings:
                plan = study.plan(task, name, 0, None, 1.0)
                assert max(plan.judged_steps()) == plan.steps
                assert all(step % plan.round_steps == 0 for step in plan.judged_steps())
                assert plan.samples == study.settings[task].samples, "equal samples"


def test_a_curve_is_read_between_its_points():
    run = Run(plan=PLAN, curve=[(2, 4.0, 0.0), (4, 2.0, 0.0), (16, 1.0, 0.0)], seconds=0.0)
    link = Link(sent_bytes=0.0, step_s=1.0)
    assert [at_time(run, link, second, 1) for second in (0.5, 1.0, 2.0, 4.0, 8.0, 9.0)] == [4, 4, 2, 1.5, 1, 1]
    assert mean_text([1.0, 3.0], 1) == "2.0 ± 1.4"
    assert mean_text([1.0, float("nan"), 1e9], 1) == "diverged (2 of 3)"


def test_bytes_are_those_of_the_codecs_road():
    task = task_of("text")
    numel = sum(parameter.numel() for parameter in task.model().parameters())
    plain = sent_bytes(task, "sync", 4)
    assert plain == 1.5 * 4 * numel
    assert sent_bytes(task, "sync:compress=bf16", 4) == plain / 2
    assert sent_bytes(task, "sync:compress=topk,ratio=0.01,error_feedback=false", 4) == 3 * 8 * -(-numel // 100)
    assert plain / 8 < sent_bytes(task, "sync:compress=fp4", 4) < plain / 6
    assert plain / 32 < sent_bytes(task, "sync:compress=onebit", 4) < plain / 28


def test_one_worker_of_a_shard_learns_what_a_plain_process_learns_and_several_are_stale():
    alone = train_in_turns(PLAN)
    plan = replace(PLAN, workers=3, samples=36)
    apart = [train_in_turns(plan) for _ in range(2)]
    for (samples, loss, wrong), expected in zip(alone.curve, curve_of_plain_steps(PLAN), strict=True):
        assert (samples, loss, wrong) == pytest.approx(expected, rel=1e-5)
    assert alone.staleness == 0
    assert 1 < apart[0].staleness < 2, "two of three, but for each worker's first step"
    assert apart[0].curve == apart[1].curve, "the order is the seed's, not the machine's"
    study = replace(
        STUDIES["staleness"], reference="one", candidates={"one": STUDIES["staleness"].candidates["hardsync"]}
    )
    assert equal_samples(study, task_of("text"), [alone]).rows[0][0] == "one"


def test_ranks_train_and_a_dropped_difference_does_not_count():
    together = replace(PLAN, workers=2, strategy="sync", samples=24, learning_rate=0.01)
    apart = replace(together, strategy="diloco-server:quorum=2,every=2", round_steps=2)
    plans = [asdict(plan) for plan in (together, apart, replace(apart, dropped=1.0))]
    with EmbeddedServer.start() as server:
        environment = {"PSENGINE_SERVERS": server.addresses[0]}
        runs = run_ranks(train_in_ranks, 2, plans, "test", deadline_s=60, environment=environment)[0]
    losses = [[point[1] for point in run["curve"]] for run in runs]
    torch.manual_seed(PLAN.seed)
    untrained = task_of("text").judge(task_of("text").model())[0]
    assert losses[0][-1] < untrained
    assert losses[1][-1] < untrained
    assert losses[2] == pytest.approx([untrained] * len(losses[2])), "nobody's difference counted"
