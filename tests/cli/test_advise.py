"""psengine advise: verdicts on known step times, timelines, and one real script with a slow rank."""

import json
import random
from pathlib import Path

import pytest
import torch
from support.command_process import run_command

from psengine.cli.advise import ASYNC, StepTimes, advise, step_times
from psengine.errors import ConfigurationError

TRAINING = str(Path(__file__).parents[1] / "support" / "scheduled_training.py")


def made(*compute_s, waited_s=None):
    count = len(compute_s)
    return StepTimes(
        compute_s=tuple(tuple(own) for own in compute_s),
        waited_s=waited_s or tuple((0.0,) * len(own) for own in compute_s),
        samples=(8.0,) * count,
        has_samples=True,
    )


def drawn(draw, ranks=4, steps=25):
    """Step times drawn from ``random.Random(1)``."""
    rng = random.Random(1)
    return made(*([draw(rng) for _ in range(steps)] for _ in range(ranks)))


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (drawn(lambda rng: rng.gauss(0.1, 0.001)), "the ranks are similar"),
        (made([0.1] * 25, [0.117] * 25), "rank 1 is 1.17 times as slow"),
        # The exchange outweighs the difference.
        (made([1.0] * 25, [1.3] * 25, waited_s=((3.3,) * 25, (3.0,) * 25)), "rank 1 is 1.30 times as slow"),
        # async would gain by 1.1 to 1.25.
        (
            made(*([0.1 * (1.6 if (step + 2 * rank) % 4 == 0 else 1) for step in range(40)] for rank in range(2))),
            "the ranks are similar",
        ),
        (drawn(lambda rng: rng.uniform(0.001, 0.003), ranks=2), "too short to judge"),
    ],
)
def test_what_stays_with_sync(times, reason):
    found = advise(times)
    assert (found.strategy, found.shares) == ("sync", ())
    assert reason in found.reason


def test_a_rank_that_is_slow_for_good_gets_a_smaller_share():
    found = advise(made([0.1] * 25, [0.3] * 25, [0.1] * 25))
    assert found.strategy == "sync"
    assert found.shares == (3.0, 1.0, 3.0)
    assert found.spread == pytest.approx(3.0)
    # 24 samples a step, at 80 + 80/3 + 80 samples/s.
    assert found.predictions["sync with shares"] == pytest.approx(80 * 7 / 3)
    assert found.predictions["sync"] == pytest.approx(80.0)
    assert found.predictions["async"] == pytest.approx(80 * 7 / 3)
    assert "rank 1 is always slow" in found.reason


def test_servers_cost_what_was_measured():
    times = made(*([0.5 if (step + rank) % 4 == 0 else 0.1 for step in range(40)] for rank in range(2)))
    assert advise(times).strategy == ASYNC
    found = advise(times, 0.5)
    assert found.strategy == "sync"
    assert found.predictions["sync"] == advise(times).predictions["sync"]
    assert found.predictions["async"] == pytest.approx(2 * 8 / (0.2 + 0.5))


def trace(*ranks, waits=(), steps=20, samples=8, name="wait", forwards=1):
    """A timeline in which rank r's step takes ranks[r] seconds, of which it waits waits[r]."""
    events = []
    for rank, took in enumerate(ranks):
        for step in range(steps):
            begin = {"ph": "X", "pid": rank, "ts": step * took * 1e6, "args": {"step": step, "samples": samples}}
            events += [{**begin, "name": "forward", "cat": "forward", "dur": 1000.0}] * forwards
            if waits:
                events.append({**begin, "name": name, "cat": name, "dur": waits[rank] * 1e6})
    return {"traceEvents": events}


def test_times_are_read_from_a_timeline():
    times = step_times(trace(0.3, 0.3, waits=(0.2, 0.05)))
    assert len(times.compute_s[0]) == 14  # of 20: 5 to warm up, and the last has no end
    assert times.compute_s[0][0] == pytest.approx(0.1)
    assert times.compute_s[1][0] == pytest.approx(0.25)
    assert times.exchange_s == pytest.approx(0.05)
    assert (times.samples, times.has_samples) == ((8.0, 8.0), True)
    assert step_times(trace(0.3, 0.3, samples=None)).has_samples is False
    timeline = trace(0.3, 0.3)
    for bucket, size_bytes in ((0, 40), (0, 100), (1, 30)):  # the first in parts
        for rank in range(2):
            span = {"ph": "X", "pid": rank, "ts": 0.0, "dur": 1.0, "name": "pack", "cat": "pack"}
            timeline["traceEvents"].append({**span, "args": {"step": 7, "bucket": bucket, "bytes": size_bytes}})
    assert step_times(timeline).exchanged_bytes == 130
    # Two forwards, as with accumulation: the step has both one's samples.
    assert step_times(trace(0.3, 0.3, forwards=2)).samples == (16.0, 16.0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (trace(), "got 0"),
        (trace(0.1, 0.1, steps=9), "too few steps to judge (expected 13 or more on every rank, got 8"),
        (trace(0.1, 0.1, waits=(0.0, 0.0), name="push"), "chose one over servers by itself"),
    ],
)
def test_what_cannot_be_judged_is_said(found, message):
    with pytest.raises(ConfigurationError) as error:
        step_times(found)
    assert message in str(error.value)


def test_a_slow_rank_of_a_real_script_is_found(tmp_path):
    # It would train for minutes: advise ends it.
    training = [TRAINING, str(tmp_path), "--steps", "5000", "--slow", "1", "--pause", "0.05"]
    code, out, err = run_command(["advise", "--steps", "13", "--json", *training])
    assert code == 0, err
    found = json.loads(out)
    assert found["ranks"][1]["median_s"] >= 0.05
    assert found["ranks"][0]["waited_share"] > found["ranks"][1]["waited_share"]
    if found["strategy"] == "sync":  # on a busy machine the other rank's steps differ too much for it
        assert found["shares"][0] > found["shares"][1] == 1.0
    assert found["rate_unit"] == "samples/s"
    assert 0 < found["server_exchange_s"] < 10
    assert found["predictions"]["sync with shares"] > found["predictions"]["sync"]


ON_GPUS = """
import torch, psengine
context = psengine.init()
model = psengine.DistributedDataParallel(torch.nn.Linear(64, 64).to(context.device))
for _ in range(5000):
    torch.cuda._sleep(100_000_000 if context.rank == 1 else 25_000_000)  # cycles; the host goes on at once
    model(torch.ones(8, 64, device=context.device)).sum().backward()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: ranks over NCCL")
def test_a_slow_rank_on_gpus_is_found(tmp_path):
    (tmp_path / "on_gpus.py").write_text(ON_GPUS)
    code, out, err = run_command(["advise", "--steps", "13", "--json", str(tmp_path / "on_gpus.py")])
    assert code == 0, err
    found = json.loads(out)
    assert (found["strategy"], len(found["shares"])) == ("sync", 2)
    assert found["spread"] > 2
    assert found["ranks"][0]["waited_share"] > found["ranks"][1]["waited_share"]
