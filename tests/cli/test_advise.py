"""psengine advise: predictions against a simulation event by event, verdicts, and one real script with a slow rank."""

from __future__ import annotations

import heapq
import json
import random
from pathlib import Path

import pytest
import torch
from support.command_process import run_command

from psengine.cli.advise import WARM_UP_STEPS
from psengine.cli.advising import advice
from psengine.cli.advising.step_times import StepTimes, step_times
from psengine.cli.console import duration
from psengine.cli.main import main
from psengine.errors import ConfigurationError
from psengine.parameter_server.server.rules.together import HISTORY

TRAINING = str(Path(__file__).parents[1] / "support" / "launched_training.py")


def made(*compute_s, waited_s=None, samples=None):
    count = len(compute_s)
    return StepTimes(
        compute_s=tuple(tuple(own) for own in compute_s),
        waited_s=waited_s or tuple((0.0,) * len(own) for own in compute_s),
        samples=samples or (8.0,) * count,
        hosts=("h",) * count,
        has_samples=True,
    )


def random_times(world_size, steps=60, seed=0):
    rng = random.Random(seed)
    return [[rng.uniform(0.5, 1.5) * (1 + 0.4 * rank) for _ in range(steps)] for rank in range(world_size)]


class Simulation:
    """Workers as processes on a clock: one event at a time, whoever may begin a step begins it."""

    def __init__(self, compute_s, exchange_s):
        self.compute_s = compute_s
        self.exchange_s = exchange_s
        self.steps = len(compute_s[0])
        self.done = [0] * len(compute_s)
        self.finished = [[] for _ in compute_s]
        self.events = []
        self.idle = set(range(len(compute_s)))

    def may_begin(self, rank, now):
        raise NotImplementedError

    def arrived(self, rank, now):
        pass

    def run(self):
        now = 0.0
        while True:
            for rank in sorted(self.idle):
                if self.done[rank] < self.steps and self.may_begin(rank, now):
                    self.idle.remove(rank)
                    took = self.compute_s[rank][self.done[rank]] + self.exchange_s
                    heapq.heappush(self.events, (now + took, rank))
            if not self.events:
                return self
            now, rank = heapq.heappop(self.events)
            self.done[rank] += 1
            self.finished[rank].append(now)
            self.idle.add(rank)
            self.arrived(rank, now)


class Bounded(Simulation):
    max_staleness = 0

    def may_begin(self, rank, now):
        return self.done[rank] - min(self.done) <= self.max_staleness


class Rounds(Simulation):
    every = 1

    def may_begin(self, rank, now):
        return min(self.done) >= self.done[rank] // self.every * self.every


class Quorum(Simulation):
    quorum = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.closed_steps = 0
        self.counted = 0
        self.end = 0.0

    def may_begin(self, rank, now):
        return self.done[rank] <= self.closed_steps

    def arrived(self, rank, now):
        self.counted += self.done[rank] > self.closed_steps
        while True:
            there = sum(done > self.closed_steps for done in self.done)
            kept = min(self.done) + advice.KEPT_AVERAGES > self.closed_steps
            if there < self.quorum or not kept:
                return
            self.closed_steps += 1
            self.end = now


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_closed_forms_are_what_a_simulation_finds(world_size):
    times, samples = random_times(world_size, seed=world_size), [8.0] * world_size
    bounded = type("Bound", (Bounded,), {"max_staleness": 0})(times, 0.1).run()
    last = max(own[-1] for own in bounded.finished)
    assert advice.sync_rate(times, samples, 0.1) == pytest.approx(8.0 * world_size * 60 / last)
    for max_staleness in (1, 4):
        found = type("Bound", (Bounded,), {"max_staleness": max_staleness})(times, 0.1).run().finished
        expected = sum(8.0 * 30 / (own[59] - own[29]) for own in found)
        assert advice.bounded_rate(times, samples, 0.1, max_staleness) == pytest.approx(expected)
    free = type("Bound", (Bounded,), {"max_staleness": 10**6})(times, 0.1).run().finished
    assert advice.async_rate(times, samples, 0.1) == pytest.approx(sum(8.0 * 60 / own[-1] for own in free))
    local = type("Rounds", (Rounds,), {"every": 6})(times, 0.0).run()
    last = max(own[-1] for own in local.finished) + 10 * 0.1
    assert advice.local_rate(times, samples, 0.1, 6) == pytest.approx(8.0 * world_size * 60 / last)
    for quorum in range(1, world_size + 1):
        found = type("Q", (Quorum,), {"quorum": quorum})(times, 0.1).run()
        expected = 8.0 * found.counted / found.end
        assert advice.quorum_rate(times, samples, 0.1, quorum) == pytest.approx(expected), quorum


def test_sync_server_keeps_as_many_averages_as_predicted():
    assert advice.KEPT_AVERAGES == HISTORY


def test_bounds_meet_their_ends():
    times = random_times(3)
    rates = [advice.bounded_rate(times, [1.0] * 3, 0.0, bound) for bound in (0, 1, 4, 16)]
    assert rates == sorted(rates)
    assert advice.quorum_rate(times, [1.0] * 3, 0.0, 3) == pytest.approx(advice.sync_rate(times, [1.0] * 3, 0.0))


def drawn(draw, ranks=4, steps=25):
    """Step times drawn from ``random.Random(1)``."""
    rng = random.Random(1)
    return made(*([draw(rng) for _ in range(steps)] for _ in range(ranks)))


@pytest.mark.parametrize(
    ("times", "verdict", "reason"),
    [
        (drawn(lambda rng: rng.gauss(0.1, 0.001)), "similar", "the ranks are similar"),
        (made([0.1] * 25, [0.117] * 25), "similar", "the difference is too small"),
        (
            made([1.0] * 25, [1.3] * 25, waited_s=((1.3,) * 25, (1.0,) * 25)),
            "similar",
            "rank 1 computes 1.30 times as long as the fastest, but the exchange outweighs the difference",
        ),
        # Bounded staleness would gain by 1.1 to 1.25, which is not worth it.
        (
            made(*([0.1 * (1.6 if (step + 2 * rank) % 4 == 0 else 1) for step in range(40)] for rank in range(2))),
            "similar",
            "the ranks are similar",
        ),
        (drawn(lambda rng: rng.uniform(0.001, 0.003), ranks=2), "short", "too short to judge"),
    ],
)
def test_what_stays_with_sync(times, verdict, reason):
    found = advice.advise(times)
    assert (found.verdict, found.strategy, found.shares) == (verdict, "sync", ())
    assert reason in found.reason


def test_a_rank_that_is_slow_for_good_gets_a_smaller_share():
    found = advice.advise(made([0.1] * 25, [0.3] * 25, [0.1] * 25))
    assert (found.verdict, found.strategy) == ("permanent", "sync")
    assert found.shares == (3.0, 1.0, 3.0)
    assert found.spread == pytest.approx(3.0)
    # 24 samples a step, at 80 + 80/3 + 80 samples/s.
    assert found.predictions["sync with shares"] == pytest.approx(80 * 7 / 3)
    assert found.predictions["sync"] == pytest.approx(80.0)
    assert found.predictions["async"] == pytest.approx(80 * 7 / 3)
    # The slow one's pace for all, whatever the bound.
    assert found.predictions["async:max_staleness=4"] == pytest.approx(80.0, rel=0.05)
    assert found.ranks[1].median_s == pytest.approx(0.3)
    assert "rank 1 is always slow" in found.reason


def test_passing_slowness_is_bridged():
    found = advice.advise(drawn(lambda rng: 0.5 if rng.random() < 0.1 else 0.1, steps=100))
    assert found.verdict == "passing"
    assert found.strategy in ("sync-server:quorum=3", "async:staleness_scaling=inverse")
    assert found.predictions[found.strategy] > 1.3 * found.predictions["sync"]
    assert found.shares == ()


def test_passing_slowness_outweighs_a_small_lasting_one():
    rng = random.Random(1)
    times = [[own * (5 if rng.random() < 0.1 else 1) for _ in range(100)] for own in (0.1, 0.1, 0.1, 0.117)]
    found = advice.advise(made(*times))
    assert found.spread == pytest.approx(1.17)
    assert found.predictions["sync with shares"] < 1.1 * found.predictions["sync"]
    assert (found.verdict, found.strategy) == ("passing", "async:staleness_scaling=inverse")
    gain = found.predictions[found.strategy] / found.predictions["sync"] - 1
    assert gain > 0.3
    assert f"async:staleness_scaling=inverse {gain:.0%}" in found.reason
    assert "no rank is slow for long" not in found.reason


def test_servers_cost_what_was_measured():
    times = made(*([0.5 if (step + rank) % 4 == 0 else 0.1 for step in range(40)] for rank in range(2)))
    assert advice.advise(times).strategy == "async:staleness_scaling=inverse"
    found = advice.advise(times, 0.5)
    assert (found.verdict, found.strategy) == ("similar", "sync")
    assert found.predictions["sync"] == advice.advise(times).predictions["sync"]
    assert found.predictions["async"] == pytest.approx(2 * 8 / (0.2 + 0.5))


@pytest.mark.parametrize(
    ("seconds", "text"), [(85e-6, "85 µs"), (0.00127, "1.27 ms"), (0.0213, "21.3 ms"), (16.46, "16.5 s")]
)
def test_short_times_keep_their_digits(seconds, text):
    assert duration(seconds) == text


def trace(*ranks, waits=(), steps=20, samples=8, name="wait", forwards=1, device="cpu", is_synchronized=False):
    """A timeline in which rank r's step takes ranks[r] seconds, of which it waits waits[r]."""
    events = []
    for rank, took in enumerate(ranks):
        for step in range(steps):
            begin = {"ph": "X", "pid": rank, "ts": step * took * 1e6, "args": {"step": step, "samples": samples}}
            events += [{**begin, "name": "forward", "cat": "forward", "dur": 1000.0}] * forwards
            if waits:
                events.append({**begin, "name": name, "cat": name, "dur": waits[rank] * 1e6})
    processes = [{"rank": rank, "host": "h"} for rank in range(len(ranks))]
    other = {"processes": processes, "device": device, "is_synchronized": is_synchronized}
    return {"traceEvents": events, "otherData": other}


def test_times_are_read_from_a_timeline():
    times = step_times(trace(0.3, 0.3, waits=(0.2, 0.05)))
    assert times.steps == 14  # of 20: 5 to warm up, and the last has no end
    assert times.compute_s[0][0] == pytest.approx(0.1)
    assert times.compute_s[1][0] == pytest.approx(0.25)
    assert times.exchange_s == pytest.approx(0.05)
    assert (times.samples, times.has_samples) == ((8.0, 8.0), True)
    assert times.measured_rate == pytest.approx(16 / 0.3)
    assert step_times(trace(0.3, 0.3, samples=None)).has_samples is False
    assert times.exchanged_bytes == 0
    timeline = trace(0.3, 0.3)
    for bucket, size_bytes in ((0, 40), (0, 100), (1, 30)):  # the first in parts
        for rank in range(2):
            span = {"ph": "X", "pid": rank, "ts": 0.0, "dur": 1.0, "name": "pack", "cat": "pack"}
            timeline["traceEvents"].append({**span, "args": {"step": 7, "bucket": bucket, "bytes": size_bytes}})
    assert step_times(timeline).exchanged_bytes == 130
    on_gpu = step_times(trace(0.3, 0.3, waits=(0.2, 0.05), device="cuda", is_synchronized=True))
    assert on_gpu.compute_s == times.compute_s
    # Two forwards, as with accumulation: the step has both one's samples.
    assert step_times(trace(0.3, 0.3, forwards=2)).samples == (16.0, 16.0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (trace(), "no steps"),
        (trace(0.1, 0.1, steps=9), "too few steps to judge (expected 13 or more on every rank, got 8"),
        (trace(0.1, 0.1, waits=(0.0, 0.0), name="push"), "chose one over servers by itself"),
        (trace(0.1, 0.1, device="cuda"), "expected waits of the device cuda, got the host's"),
    ],
)
def test_what_cannot_be_judged_is_said(found, message):
    with pytest.raises(ConfigurationError) as error:
        step_times(found)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script"),
        (
            ["--workers", "1", TRAINING, "5"],
            f"expected --workers 2 or more, got --workers 1). Fix: psengine advise --workers 2 {TRAINING} 5",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "h:1", TRAINING],
            f"expected one node, got --nnodes 2). Fix: psengine advise --workers 2 {TRAINING}",
        ),
        (["--steps", "3", TRAINING], "Invalid value for '--steps'"),
        (["--jsn", TRAINING], "Did you mean --json?"),
    ],
)
def test_what_is_wrong_with_the_line_is_one_message(arguments, message, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        main(["advise", *arguments])
    written = capfd.readouterr()
    assert end.value.code == 2
    assert message in written.err
    assert "Traceback" not in written.err


def test_a_slow_rank_of_a_real_script_is_found():
    # It would train for minutes: advise ends it.
    code, out, err = run_command(["advise", "--steps", "13", "--json", TRAINING, "5000", "1", "0.05"])
    assert code == 0, err
    found = json.loads(out)
    assert found["verdict"] == "permanent"
    assert found["steps"] == 13 - WARM_UP_STEPS
    assert found["ranks"][1]["median_s"] >= 0.05
    assert found["ranks"][0]["waited_share"] > found["ranks"][1]["waited_share"]
    assert found["shares"][0] > found["shares"][1] == 1.0
    assert found["rate_unit"] == "samples/s"
    assert found["exchanged_bytes"] == 4 * (4 * 2 + 2)
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
    assert found["verdict"] == "permanent"
    assert found["spread"] > 2
    assert found["ranks"][0]["waited_share"] > found["ranks"][1]["waited_share"]


@pytest.mark.slow
def test_a_script_that_is_too_short_or_fails_is_said():
    code, out, err = run_command(["advise", "--workers", "2", TRAINING, "4"])
    assert (code, out) == (2, "")
    assert "too few steps" in err
    code, out, err = run_command(["advise", "--workers", "2", TRAINING, "many"])
    assert (code, out) == (1, "")
    assert "failed first" in err
    assert "ValueError: invalid literal" in err
