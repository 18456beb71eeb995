"""Shows what ``psengine advise --hosts`` predicts, and all that it assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.advising.scale import FIT, MOST_HOSTS, ScaleAdvice, Training
from psengine.cli.advising.step_model import BACKWARD, BUCKET_BYTES, Network
from psengine.cli.advising.step_times import StepTimes
from psengine.cli.advising.traffic import HIERARCHICAL, Coding
from psengine.cli.console import duration

WIDTH = 120


@dataclass(frozen=True)
class Source:
    """Where the step's time comes from: measured ``times``, or the command line."""

    times: StepTimes | None = None

    def sentence(self, training: Training) -> str:
        """In words."""
        step = f"a step without exchange takes {training.compute_s * 1e3:.4g} ms on each rank"
        if self.times is None:
            return f"{step} (--step-ms), with {training.value_bytes / 4e6:.4g} million parameters (--parameters)"
        return (
            f"{step}: measured here, the slowest of {self.times.world_size} ranks on one host, median of"
            f" {self.times.steps} steps; {training.value_bytes / 1e6:.4g} MB of gradients"
        )


def assumptions(training: Training, network: Network, codings: Mapping[str, Coding], source: Source) -> tuple[str, ...]:
    """What the predictions rest on, a sentence each."""
    speeds = ", ".join(
        f"{name} {1e-9 / coding.encode_s:.1f}" for name, coding in codings.items() if coding.encode_s > 0
    )
    return (
        f"Compute: {source.sentence(training)}. All ranks are alike, and none is late.",
        f"Links: {network.bytes_per_s * 8e-6:g} Mbit/s for each host, in each direction, all hosts at once; a round"
        f" trip of {network.round_trip_s * 1e3:g} ms. Switches are never the limit.",
        f"Overlap: buckets of {BUCKET_BYTES >> 20} MiB travel during backward, {BACKWARD:.0%} of the step, by cores"
        " that do not compute. local, diloco and async exchange after the step.",
        "Transport: gloo on the CPU; NCCL is not modelled. Strategies over servers have a shard on each host.",
        f"Codecs: encoding with the residual on one core of this machine, measured now, GB/s of values: {speeds}."
        " powersgd: matrices of 1024 columns.",
        f"The model was {FIT}."
        + (f" {network.hosts} hosts are more than were measured: extrapolated." if network.hosts > MOST_HOSTS else ""),
        "Speed only: not what a codec, staleness or local steps cost in accuracy, nor what a host that fails costs.",
    )


def describe_scale(
    advice: ScaleAdvice, training: Training, network: Network, codings: Mapping[str, Coding], source: Source
) -> dict[str, object]:
    """Everything in JSON types."""
    return {
        **asdict(advice),
        "network": asdict(network),
        "training": asdict(training),
        "rate_unit": rate_unit(training),
        "codecs": {name: asdict(coding) for name, coding in codings.items()},
        "assumptions": assumptions(training, network, codings, source),
    }


def rate_unit(training: Training) -> str:
    """Of a prediction's ``rate``."""
    return "samples/s" if training.samples is not None else "rank steps/s"


def show_scale(
    console: Console,
    advice: ScaleAdvice,
    training: Training,
    network: Network,
    codings: Mapping[str, Coding],
    source: Source,
) -> None:
    """The advice for people."""
    table = Table(
        title=f"predicted on {network.hosts} hosts x {network.ranks_per_host}, {network.bytes_per_s * 8e-6:g} Mbit/s",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("step", rate_unit(training), "computing", "MB sent"):
        table.add_column(name, justify="right")
    table.add_column("what it changes")
    for one in advice.predictions:
        name = "sync, collective hierarchical" if one.strategy == HIERARCHICAL else one.strategy
        rate = f"{one.rate:.4g}" if one.rate < 1000 else f"{one.rate:.0f}"
        cells = (duration(one.step_s), rate, f"{one.computing:.0%}", f"{one.sent_bytes / 1e6:.3g}")
        table.add_row(name, *cells, one.changes)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)  # a file has no edge
    console.print(table)
    wraps = not console.is_terminal
    console.print(Text(f"\nLossless: {advice.lossless_reason}"), soft_wrap=wraps)
    console.print(Text(f"Lossy: {advice.lossy_reason}"), soft_wrap=wraps)
    console.print("\nAssumed:")
    for sentence in assumptions(training, network, codings, source):
        console.print(Text(f"- {sentence}"), soft_wrap=wraps)
