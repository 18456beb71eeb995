"""``psengine advise``: which strategy fits this script on these machines?"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.advising.advice import Advice, advise
from psengine.cli.advising.step_times import StepTimes, step_times
from psengine.cli.console import duration
from psengine.cli.failure_report import show_outcome, speaker
from psengine.cli.launching.plan import Plan, RunOptions, make_plan
from psengine.cli.run_arguments import PARTS, ScriptCommand
from psengine.errors import ConfigurationError, PSEngineError

if TYPE_CHECKING:
    from psengine.cli.advising.scale import Training
    from psengine.cli.advising.scale_report import Source
    from psengine.cli.advising.step_model import Network

DEFAULT_WORKERS = 2
WARM_UP_STEPS = 5
FEWEST_STEPS = 8
MAX_ECHO_BYTES = 16 << 20
SERVER_TIMEOUT_S = 10.0

HELP = """Measure a script's steps on each rank, and say which strategy fits.

Runs the script under strategy "sync" for --steps steps, ends it, and compares the ranks. If they are similar, the \
advice is sync; if one rank is always slow, a smaller share of the samples for it; if slowness moves from rank to \
rank, bounded staleness or backup workers. The samples/s are predictions from the measured times, and say nothing \
about accuracy. Any option of torchrun may stand before the script.

With --hosts and --mbit it predicts instead what a step takes on so many hosts, under each strategy and codec, and \
says what it assumed. The step is measured here, or given by --parameters and --step-ms.

[bold]Examples[/bold]

psengine advise train.py --epochs 1  (two workers)

psengine advise --workers 4 --steps 60 --json -m package.train

psengine advise --hosts 8 --mbit 1000 train.py

psengine advise --hosts 1000 --mbit 1000 --parameters 124M --step-ms 350

Exit codes: 0 advice was given, 1 the script failed, 2 a wrong command line, or too few steps."""


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
    hosts: Annotated[
        int | None, typer.Option(metavar="N", help="Predict steps on so many hosts, joined by a network.")
    ] = None,
    mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Rate of a host's link in Mbit/s, in each direction.")
    ] = None,
    round_trip_ms: Annotated[
        float | None, typer.Option(metavar="R", help="Round trip between two hosts. Default: 0.2.")
    ] = None,
    ranks_per_host: Annotated[int | None, typer.Option(metavar="K", help="Ranks on each host. Default: 1.")] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="P", help="Trained parameters, such as 124M, instead of a script.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(metavar="T", help="With --parameters: a rank's step without exchange.")
    ] = None,
) -> None:
    """Measure, judge, show."""
    parts, of_network = context.meta[PARTS], (mbit, round_trip_ms, ranks_per_host, parameters, step_ms)
    if hosts is None:
        if any(option is not None for option in of_network):
            raise ConfigurationError(
                "--mbit, --round-trip-ms, --ranks-per-host, --parameters and --step-ms describe a network of hosts"
                " (expected --hosts N with them)"
            )
        network = None
    else:
        # Codecs import torch, which takes a second.
        from psengine.cli.advising.scale import checked_network, checked_training
        from psengine.cli.advising.scale_report import Source

        network = checked_network(hosts, mbit, round_trip_ms, 1 if ranks_per_host is None else ranks_per_host)
        if parameters is not None or step_ms is not None:
            training = checked_training(parameters, step_ms, parts.script)
            predict(training, network, Source(), as_json=as_json)
            return
    options = RunOptions(workers=workers, strategy="sync", default_workers=max(DEFAULT_WORKERS, ranks_per_host or 0))
    plan = make_plan(parts, options)
    check_plan(plan)
    times = measured_steps(plan, steps)
    if network is not None:
        predict(measured_training(times), network, Source(times), as_json=as_json)
        return
    through_s = None
    try:
        through_s = server_exchange_s(times.exchanged_bytes) if times.exchanged_bytes else None
    except PSEngineError as error:
        speaker(Console(stderr=True, highlight=False), "psengine advise")(
            f"could not measure an exchange through servers: {error}"
        )
    advice = advise(times, through_s)
    if as_json:
        print(json.dumps(describe(advice, times, through_s)))
    else:
        show(Console(highlight=False), advice, times, through_s)


def predict(training: Training, network: Network, source: Source, *, as_json: bool) -> None:
    """Measure the codecs, predict every strategy, show."""
    from psengine.cli.advising.coding_speed import codings_of
    from psengine.cli.advising.scale import advise_scale
    from psengine.cli.advising.scale_report import describe_scale, show_scale

    codings = codings_of(training.value_bytes)
    advice = advise_scale(training, network, codings)
    if as_json:
        print(json.dumps(describe_scale(advice, training, network, codings, source)))
    else:
        show_scale(Console(highlight=False), advice, training, network, codings, source)


def measured_training(times: StepTimes) -> Training:
    """A replica as it was measured: the slowest rank's steps, because replicas wait for each other.

    Raises:
        ConfigurationError: the timeline does not say how much is exchanged.
    """
    from psengine.cli.advising.scale import Training

    if not times.exchanged_bytes:
        raise ConfigurationError(
            "the timeline does not say how many bytes a step exchanges (expected buckets of gradients, got none)."
            " Fix: --parameters and --step-ms instead of a script"
        )
    return Training(
        value_bytes=times.exchanged_bytes,
        compute_s=max(statistics.median(own) for own in times.compute_s),
        samples=statistics.fmean(times.samples) if times.has_samples else None,
    )


def measured_steps(plan: Plan, steps: int) -> StepTimes:
    """Run the script for so many steps under sync. Ends the program where the script fails.

    Raises:
        ConfigurationError: a rank recorded no steps, or too few.
    """
    from psengine.cli.launching.run import run_training
    from psengine.tracing.files import find_parts, merge, read

    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="psengine-advise-") as directory:
        part = Path(directory) / "timeline.json"
        # The end of the last step is the beginning of one more.
        variables = {
            **plan.variables,
            "PSENGINE_TIMELINE": str(part),
            "PSENGINE_TIMELINE_STEPS": str(steps + 1),
            "PSENGINE_TIMELINE_SYNCHRONIZE": "1",
        }
        sys.stdout.flush()
        # What the script prints goes to stderr; stdout is for the advice.
        outcome = run_training(
            replace(plan, variables=variables),
            report=speaker(console, "psengine advise"),
            stdout=sys.stderr.buffer,
            stderr=sys.stderr.buffer,
            is_enough=lambda: len(find_parts(part)) == plan.workers,
        )
        if outcome.exit_code != 0:
            show_outcome(console, outcome, independent=False, command="psengine advise")
            raise typer.Exit(130 if outcome.signal_number else 1)
        parts = find_parts(part)
        if len(parts) < plan.workers:
            raise ConfigurationError(
                f"{plan.workers - len(parts)} of {plan.workers} ranks recorded no steps (expected a model wrapped by"
                " psengine.DistributedDataParallel and trained on every rank)"
            )
        return step_times(merge([read(one) for one in parts]), warm_up=WARM_UP_STEPS, fewest=FEWEST_STEPS)


def check_plan(plan: Plan) -> None:
    """Raise for one worker, or several nodes, whose ranks cannot be compared; the message has a command that works."""
    if plan.workers >= 2 and not plan.is_multi_node:
        return
    module = "-m " if plan.torchrun.module else ""
    expected, got = "--workers 2 or more", "--workers 1"
    if plan.is_multi_node:
        expected, got = "one node", f"--nnodes {plan.torchrun.nnodes}"
    raise ConfigurationError(
        f"advise compares the ranks of one host (expected {expected}, got {got})."
        f" Fix: psengine advise --workers {max(plan.workers, DEFAULT_WORKERS)} {module}{shlex.join(plan.script)}"
    )


def server_exchange_s(size_bytes: int) -> float:
    """Seconds that ``size_bytes`` take to a server on this host and back; it applies nothing, and serves nobody else.

    Raises:
        PSEngineError: packages for servers are missing, or the server did not start or answer.
    """
    from psengine.verify.experiment import comparison_server

    with comparison_server() as address:
        from psengine.parameter_server.client.client import connect

        echoed_bytes = max(1, min(size_bytes, MAX_ECHO_BYTES))
        with connect(address, role="reader", timeout_s=SERVER_TIMEOUT_S, connect_timeout_s=SERVER_TIMEOUT_S) as client:
            # The first two open connections and grow buffers.
            seconds = [client.echo(echoed_bytes) for _ in range(9)][2:]
    return statistics.median(seconds) * size_bytes / echoed_bytes


def describe(advice: Advice, times: StepTimes, through_s: float | None) -> dict[str, object]:
    """The advice in JSON types; ``server_exchange_s`` is None where it was not measured and ``exchange_s`` was used."""
    return {
        **asdict(advice),
        "steps": times.steps,
        "exchange_s": times.exchange_s,
        "server_exchange_s": through_s,
        "exchanged_bytes": times.exchanged_bytes,
        "measured_rate": times.measured_rate,
        "rate_unit": "samples/s" if times.has_samples else "steps/s",
    }


def show(console: Console, advice: Advice, times: StepTimes, through_s: float | None) -> None:
    """The advice for people."""
    ranks = Table(title=f"{times.steps} steps under sync", title_justify="left")
    for name in ("rank", "host", "compute, median", "compute, p90", "waited"):
        ranks.add_column(name, justify="left" if name == "host" else "right")
    for row in advice.ranks:
        cells = (duration(row.median_s), duration(row.p90_s), f"{row.waited_share:.0%}")
        ranks.add_row(str(row.rank), row.host, *cells)
    console.print(ranks)
    through = "taken to be the same, not measured" if through_s is None else f"{duration(through_s)}, on this host"
    console.print(
        f"slowest over fastest: {advice.spread:.2f}; an exchange takes {duration(times.exchange_s)}"
        f" (through servers: {through})\n",
        soft_wrap=True,
    )
    unit = "samples/s" if times.has_samples else "steps/s of all ranks"
    rates = Table(title="predicted from these times (speed, not accuracy)", title_justify="left")
    rates.add_column("strategy")
    rates.add_column(unit, justify="right")
    rates.add_column("against sync", justify="right")
    rates.add_row("sync, as measured", f"{times.measured_rate:.0f}", "", style="dim")
    for name, rate in advice.predictions.items():
        rates.add_row(name, f"{rate:.0f}", f"{rate / advice.predictions['sync']:.2f}")
    console.print(rates)
    console.print(
        '"sync, as measured" is the measured rate; "sync" is a prediction like the others: compare them with it.',
        soft_wrap=True,
    )
    console.print(Text(f"\nAdvice: {advice.reason}"), soft_wrap=not console.is_terminal)
    if advice.shares:
        shares = ", ".join(f"{share:g}" for share in advice.shares)
        console.print(Text(f"  psengine.ProportionalSampler(dataset, shares=[{shares}])"))
        console.print(Text("  model.batch_weight(len(batch))  # before each forward"))
    console.print(Text(f"  psengine run --workers {times.world_size} --strategy {advice.strategy} ..."))
