"""``psengine advise``: sync or async? Measured on this machine with the user's script.

c(r, k) are the seconds that rank r computes in step k, b(r) its samples in a step, e what an exchange takes: under sync
the collective's, under async the servers'. Samples per second::

    sync     sum over r of b(r) * steps / sum over k of [max over r of c(r, k) + e]
    async    sum over r of b(r) * steps / sum over k of [c(r, k) + e]

Both are speeds. What stale gradients cost in accuracy is not in them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from psengine.cli.console import duration
from psengine.cli.launching.plan import PARTS, Plan, RunOptions, ScriptCommand, make_plan
from psengine.cli.run import make_logger
from psengine.errors import ConfigurationError, PSEngineError

DEFAULT_WORKERS = 2
WARM_UP_STEPS = 5
FEWEST_STEPS = 8
MAX_ECHO_BYTES = 16 << 20
SERVER_TIMEOUT_S = 10.0
# The async that learnt best in benchmarks/straggler.
ASYNC = "async:staleness_scaling=inverse"
# The gain from which on shares are advised, which compute the same as sync; and async, whose gradients are stale.
WORTH_SHARES, WORTH_ASYNC = 0.10, 0.25
# Times of shorter steps are mostly Python's and the scheduler's.
SHORTEST_S = 0.010
# Where the medians of two ranks differ by more than this factor, one rank is always slow.
SIMILAR = 1.15
# A step in which every rank took so many times its median contains something else, such as an evaluation.
UNUSUAL = 4.0

HELP = """Measure a script's steps on each rank, and say whether sync or async fits, and why.

Runs the script, as you would, under strategy "sync" for --steps steps, and ends it: whatever it writes until then is \
written, checkpoints too. Compares the ranks, then measures the same exchange through a server on this host. The \
advice is sync where ranks are similar; sync with shares for psengine.ProportionalSampler where one rank is always \
slow; async where slowness moves from rank to rank and async gains 25% or more. The samples/s are predictions from the \
measured times, and say nothing about accuracy. Any option of torchrun may stand before the script.

[bold]Examples[/bold]

psengine advise train.py --epochs 1  (two workers)

psengine advise --workers 4 --steps 60 --json -m package.train

Exit codes: 0 advice was given, 1 the script failed, 2 a wrong command line, or too few steps."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured steps, the same ones for all ranks.

    Attributes:
        compute_s: for each rank, what it took from one forward to the next less what it waited, for each step.
        waited_s: for each rank, how long it waited for others and for the exchange, for each step.
        samples: for each rank, samples in a step (mean); 1 where the model did not say.
        has_samples: whether ``samples`` were counted.
        exchanged_bytes: gradients that a rank exchanges in a step; 0 where the timeline does not say.
    """

    compute_s: tuple[tuple[float, ...], ...]
    waited_s: tuple[tuple[float, ...], ...]
    samples: tuple[float, ...]
    has_samples: bool
    exchanged_bytes: int = 0

    @property
    def exchange_s(self) -> float:
        """What the exchange itself takes: in each step the rank that waits least comes last, and waits for nobody."""
        return float(statistics.median(min(column) for column in zip(*self.waited_s, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advised strategy, and the reason.

    Attributes:
        strategy: what to give to ``--strategy``.
        reason: a sentence or two.
        shares: for ``psengine.ProportionalSampler``, in order of rank, the slowest 1; () unless they are advised.
        spread: largest over smallest median of the ranks' compute times.
        predictions: "sync", "async" and, where medians differ, "sync with shares": predicted samples per second.
    """

    strategy: str
    reason: str
    shares: tuple[float, ...]
    spread: float
    predictions: dict[str, float]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="advise", cls=ScriptCommand, help=HELP)(command)


def command(
    context: typer.Context,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help=f"Processes: at least 2, as a number, gpu, cpu or auto. Default: {DEFAULT_WORKERS}."
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=WARM_UP_STEPS + FEWEST_STEPS, metavar="N", help="Steps to measure; the first 5 are warm-up."),
    ] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON, alone on stdout.")] = False,
) -> None:
    """Measure, judge, show."""
    plan = make_plan(context.meta[PARTS], RunOptions(workers=workers, strategy="sync", default_workers=DEFAULT_WORKERS))
    check_plan(plan)
    script = " ".join(plan.script)
    make_logger("psengine advise")(f"running {script} for {steps} steps; files that it writes are written")
    times = measured_steps(plan, steps)
    through_s = None
    try:
        through_s = server_exchange_s(times.exchanged_bytes) if times.exchanged_bytes else None
    except PSEngineError as error:
        make_logger("psengine advise")(f"could not measure an exchange through servers: {error}")
    advice = advise(times, through_s)
    ranks = [
        {
            "rank": rank,
            "median_s": statistics.median(own),
            "waited_share": sum(waits) / max(sum(own) + sum(waits), 1e-9),
        }
        for rank, (own, waits) in enumerate(zip(times.compute_s, times.waited_s, strict=True))
    ]
    if as_json:
        exchanges = {"exchange_s": times.exchange_s, "server_exchange_s": through_s}
        unit = "samples/s" if times.has_samples else "steps/s"
        print(json.dumps({**asdict(advice), **exchanges, "ranks": ranks, "rate_unit": unit}))
    else:
        show(advice, times, through_s, ranks)


def check_plan(plan: Plan) -> None:
    """Raise for one worker, or several nodes, whose ranks cannot be compared."""
    if plan.workers < 2 or plan.is_multi_node:
        raise ConfigurationError(
            f"advise compares the ranks of one host (expected --workers 2 or more and one node, got --workers"
            f" {plan.workers} and --nnodes {plan.torchrun.nnodes})"
        )


def measured_steps(plan: Plan, steps: int) -> StepTimes:
    """Run the script for so many steps under sync. Ends the program where the script fails.

    Raises:
        ConfigurationError: a rank recorded no steps, or too few.
    """
    from psengine.cli.launching.run import run_training
    from psengine.tracing.timeline import find_parts, merge_parts

    with tempfile.TemporaryDirectory(prefix="psengine-advise-") as directory:
        part = Path(directory) / "timeline.json"
        # The end of the last step is the beginning of one more.
        variables = {
            **plan.variables,
            "PSENGINE_TIMELINE": str(part),
            "PSENGINE_TIMELINE_STEPS": str(steps + 1),
            "PSENGINE_TIMELINE_SYNCHRONIZE": "1",
        }
        # What the script prints goes to stderr; stdout is for the advice.
        with redirect_stdout(sys.stderr):
            code = run_training(
                replace(plan, options=replace(plan.options, prefix=True), variables=variables),
                report=make_logger("psengine advise"),
                is_enough=lambda: len(find_parts(part)) == plan.workers,
            )
        if code != 0:
            raise typer.Exit(130 if code == 130 else 1)
        parts = find_parts(part)
        if len(parts) < plan.workers:
            raise ConfigurationError(
                f"{plan.workers - len(parts)} of {plan.workers} ranks recorded no steps (expected a model wrapped by"
                " psengine.DistributedDataParallel and trained on every rank)"
            )
        return step_times(merge_parts(parts, part))


def step_times(trace: Mapping[str, Any]) -> StepTimes:
    """Read the steps of a merged timeline of strategy "sync"; the first ``WARM_UP_STEPS`` are left out.

    Raises:
        ConfigurationError: the script made too few steps, or trained with another strategy.
    """
    begins: dict[int, dict[int, float]] = defaultdict(dict)
    # By (rank, step).
    waits: dict[tuple[int, int], float] = defaultdict(float)
    samples: dict[tuple[int, int], float] = defaultdict(float)
    buckets: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        rank, step = at = event["pid"], event["args"]["step"]
        if "bucket" in event["args"] and "bytes" in event["args"]:
            # A bucket that is packed in parts has several spans; the last ones hold all of it.
            bucket = event["args"]["bucket"]
            buckets[at][bucket] = max(buckets[at].get(bucket, 0), event["args"]["bytes"])
        if event["name"] == "forward":
            # A model with several forwards in a step begins it with the first.
            begins[rank].setdefault(step, event["ts"] / 1e6)
            samples[at] += event["args"].get("samples") or 0
        elif event["cat"] in ("wait", "collective"):
            waits[at] += event["dur"] / 1e6
        elif event["name"] in ("push", "apply"):
            raise ConfigurationError(
                "advise measures strategy 'sync', and this script chose one over servers by itself (expected spans of a"
                f" collective, got {event['name']!r}). Fix: leave the script's strategy to PSENGINE_STRATEGY"
            )
    ranks = sorted(begins)
    ended = [{step for step in begins[rank] if step + 1 in begins[rank]} for rank in ranks]
    common = set.intersection(*ended) if ended else set()
    steps = [step for step in sorted(common) if step - min(common) >= WARM_UP_STEPS]
    if len(steps) < FEWEST_STEPS:
        raise ConfigurationError(
            f"too few steps to judge (expected {WARM_UP_STEPS + FEWEST_STEPS} or more on every rank, got"
            f" {len(common)}; the first {WARM_UP_STEPS} are left out as warm-up). Fix: let the script train longer"
        )
    period = {at: begins[at[0]][at[1] + 1] - begins[at[0]][at[1]] for at in itertools.product(ranks, steps)}
    waited = {at: min(period_s, waits[at]) for at, period_s in period.items()}
    compute = {at: period_s - waited[at] for at, period_s in period.items()}
    medians = {rank: statistics.median(compute[rank, step] for step in steps) for rank in ranks}
    usual = [step for step in steps if any(compute[rank, step] <= UNUSUAL * medians[rank] for rank in ranks)]
    has_samples = all(samples[at] > 0 for at in period)
    return StepTimes(
        compute_s=tuple(tuple(compute[rank, step] for step in usual) for rank in ranks),
        waited_s=tuple(tuple(waited[rank, step] for step in usual) for rank in ranks),
        samples=tuple(
            statistics.fmean(samples[rank, step] for step in usual) if has_samples else 1.0 for rank in ranks
        ),
        has_samples=has_samples,
        exchanged_bytes=int(statistics.median_high(sum(b.values()) for b in buckets.values())) if buckets else 0,
    )


def server_exchange_s(size_bytes: int) -> float:
    """Seconds that ``size_bytes`` take to a server on this host and back; it applies nothing, and serves nobody else.

    Raises:
        PSEngineError: packages for servers are missing, or the server did not start or answer.
    """
    from psengine.parameter_server.client.client import connect
    from psengine.parameter_server.client.embedded import EmbeddedServer

    echoed_bytes = max(1, min(size_bytes, MAX_ECHO_BYTES))
    with ExitStack() as stack:
        address, wait_s = stack.enter_context(EmbeddedServer.start()).addresses, SERVER_TIMEOUT_S
        client = stack.enter_context(connect(address, role="reader", timeout_s=wait_s, connect_timeout_s=wait_s))
        # The first two open connections and grow buffers.
        seconds = [client.echo(echoed_bytes) for _ in range(9)][2:]
    return statistics.median(seconds) * size_bytes / echoed_bytes


def advise(times: StepTimes, server_exchange_s: float | None = None) -> Advice:
    """Judge measured steps; see the module's text for the arithmetic.

    Args:
        times: measured under sync.
        server_exchange_s: what an exchange through servers takes; None takes what the collective took.
    """
    exchange_s, samples = times.exchange_s, times.samples
    through_s = exchange_s if server_exchange_s is None else server_exchange_s
    medians = [statistics.median(own) for own in times.compute_s]
    slowest = medians.index(max(medians))
    spread = medians[slowest] / max(min(medians), 1e-9)
    predictions = {
        "sync": sync_rate(times.compute_s, samples, exchange_s),
        "async": sum(b / (statistics.fmean(own) + through_s) for own, b in zip(times.compute_s, samples, strict=True)),
    }
    shares: tuple[float, ...] = ()
    if spread > SIMILAR:
        # With which all ranks would take equally long, if time goes with samples.
        speeds = [b / max(median, 1e-9) for b, median in zip(samples, medians, strict=True)]
        shares = tuple(round(speed / min(speeds), 2) for speed in speeds)
        dealt = [share * sum(samples) / sum(shares) for share in shares]
        scaled = [[t * new / b for t in own] for own, new, b in zip(times.compute_s, dealt, samples, strict=True)]
        predictions["sync with shares"] = sync_rate(scaled, dealt, exchange_s)
    gains = {name: rate / predictions["sync"] - 1 for name, rate in predictions.items()}
    by_async, by_shares = gains["async"], gains.get("sync with shares", 0.0)
    advised: tuple[float, ...] = ()
    strategy, step_s = "sync", medians[slowest] + exchange_s
    gain = f"{ASYNC} gains {by_async:.0%}{f', shares by speed {by_shares:.0%}' if shares else ''}"
    if step_s < SHORTEST_S:
        reason = (
            f"steps of {step_s * 1e3:.1f} ms are too short to judge (expected {SHORTEST_S * 1e3:g} ms or more): the"
            " scheduler's noise is larger than the ranks' differences. Measure with the model and the batch size that"
            " you will train with."
        )
    elif by_shares >= WORTH_SHARES and by_shares + WORTH_SHARES >= by_async:
        advised = shares
        reason = f"rank {slowest} is always slow ({spread:.2f} times the fastest's step time): {gain}. Shares compute"
        reason += " the same as sync."
    elif by_async >= WORTH_ASYNC:
        strategy = ASYNC
        reason = f"slowness moves from rank to rank, and costs more than the exchange: {gain}. Gradients become stale:"
        reason += " compare accuracy too."
    else:
        compared = "the ranks are similar" if spread <= SIMILAR else f"rank {slowest} is {spread:.2f} times as slow"
        reason = f"{compared}: {gain}, and less than {WORTH_ASYNC:.0%} is not worth async's staleness."
    return Advice(strategy=strategy, reason=reason, shares=advised, spread=spread, predictions=predictions)


def sync_rate(compute_s: Sequence[Sequence[float]], samples: Sequence[float], exchange_s: float) -> float:
    """Samples per second where every step waits for all ranks."""
    return sum(samples) / (statistics.fmean(map(max, zip(*compute_s, strict=True))) + exchange_s)


def show(advice: Advice, times: StepTimes, through_s: float | None, ranks: list[dict[str, float]]) -> None:
    """The advice for people."""
    print(f"{len(times.compute_s[0])} steps under sync")
    for row in ranks:
        computes, waits = duration(row["median_s"]), f"{row['waited_share']:.0%}"
        print(f"  rank {row['rank']:.0f} computes {computes} in a step (median) and waits {waits} of its time")
    through = "taken to be the same, not measured" if through_s is None else f"{duration(through_s)}, on this host"
    print(f"an exchange takes {duration(times.exchange_s)} (through servers: {through})")
    print("predicted from these times (speed, not accuracy)")
    for name, rate in advice.predictions.items():
        print(f"  {name}: {rate:.0f} {'samples/s' if times.has_samples else 'steps/s of all ranks'}")
    print(f"\nAdvice: {advice.reason}")
    if advice.shares:
        shares = ", ".join(f"{share:g}" for share in advice.shares)
        print(f"  psengine.ProportionalSampler(dataset, shares=[{shares}])")
        print("  model.batch_weight(len(batch))  # before each forward")
    print(f"  psengine run --workers {len(times.samples)} --strategy {advice.strategy} ...")
