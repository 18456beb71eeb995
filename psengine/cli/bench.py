"""``psengine bench``: the benchmark suite's short form, for a first look at a machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.environment.installation import build_command
from psengine.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from psengine.cli.bench_worker import Part

EXIT_FAILED = 3
SIZES_BYTES = (4 * 2**10, 2**20, 25 * 2**20)
MODEL_BYTES = 25 * 2**20
TURNS, QUICK_TURNS = 40, 8
TITLES = {
    "all-reduce": "All-reduce between 2 ranks",
    "training step": "Forward and backward of an MLP with 2.9 M parameters",
    "server": "A 25 MiB model to a parameter server (SGD) and back, one worker",
}
_EXAMPLES = """
[bold]Examples[/bold]

  psengine bench                 half a minute

  psengine bench --quick         seconds, and noisy

  psengine bench --json > bench.json

Two ranks on this machine's CPU. A first look, not a publication: the folders under benchmarks/ in the source measure
more sizes, models, peers and repetitions, and say what the figures mean.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(bench)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="Deadline, in seconds.")] = 300.0,
) -> None:
    """Measure this machine: all-reduce, a training step's overhead, push and pull of a model."""
    from psengine.verify.ranks import RankFailedError

    begin_s, machine = time.monotonic(), describe_machine()
    try:
        with Console(stderr=True).status("measuring"):
            parts, notes = measure(QUICK_TURNS if quick else TURNS, timeout_s)
    except RankFailedError as error:
        print(f"{error.rank_traceback}psengine: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    rows = [row for part in parts for row in rows_of(part)]
    elapsed_s = time.monotonic() - begin_s
    if as_json:
        print(json.dumps({"machine": machine, "elapsed_s": elapsed_s, "rows": rows, "notes": notes}, indent=1))
    else:
        print_tables(rows, machine, notes, elapsed_s)


def measure(turns: int, timeout_s: float) -> tuple[list[Part], list[str]]:
    """(rank 0's figures, notes on missing parts)."""
    from psengine.cli.bench_worker import run
    from psengine.kernels import native
    from psengine.verify.experiment import comparison_server
    from psengine.verify.ranks import run_ranks

    notes, server = [], None
    if not native.has_shared_memory():
        notes.append(
            "psengine's native extension is not built here, so there is no shared memory to measure. Fix: on Linux,"
            f" with a C++ compiler, {build_command()}"
        )
    with ExitStack() as stack:
        try:
            server = stack.enter_context(comparison_server())
        except (ConfigurationError, MissingExtraError) as error:
            notes.append(f"no server was measured: {error}")
        ranks = run_ranks(run, SIZES_BYTES, MODEL_BYTES, turns, server, world_size=2, timeout_s=timeout_s)
        return ranks[0], notes


def describe_machine() -> dict[str, Any]:
    """CPU, cores, load and versions, which the figures depend on."""
    import torch

    from psengine.version import __version__

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "psengine": __version__,
    }


def rows_of(part: Part) -> list[dict[str, Any]]:
    """One row for each candidate: median milliseconds, 10th and 90th percentile, and the ratio to the reference: the
    median of the ratios within a turn.
    """
    rows = []
    for candidate, own in part.seconds.items():
        deciles = statistics.quantiles(own, n=10, method="inclusive")
        ratios = [s / o for s, o in zip(own, part.seconds[part.reference], strict=True)]
        is_reference = candidate == part.reference
        rows.append(
            {
                "part": part.name,
                "size_bytes": part.size_bytes,
                "candidate": candidate,
                "turns": len(own),
                "median_ms": 1e3 * statistics.median(own),
                "p10_ms": 1e3 * deciles[0],
                "p90_ms": 1e3 * deciles[-1],
                "ratio": None if is_reference else statistics.median(ratios),
                "ratio_to": None if is_reference else part.reference,
            }
        )
    return rows


def print_tables(rows: list[dict[str, Any]], machine: dict[str, Any], notes: list[str], elapsed_s: float) -> None:
    """For people."""
    console = Console(highlight=False)
    software = f"Python {machine['python']}, torch {machine['torch']}, psengine {machine['psengine']}"
    hardware = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} at the start"
    console.print(Text(f"{hardware}; {software}; 2 ranks, one thread each"), soft_wrap=True)
    for part, title in TITLES.items():
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for heading in ("", "size", "median ms", "10th-90th", "against", "MB/s"):
            table.add_column(heading, justify="right" if heading else "left")
        for row in rows:
            if row["part"] != part:
                continue
            size_bytes = row["size_bytes"]
            table.add_row(
                row["candidate"],
                _size(size_bytes),
                f"{row['median_ms']:.3g}",
                f"{row['p10_ms']:.3g}-{row['p90_ms']:.3g}",
                "" if row["ratio"] is None else f"{row['ratio']:.2f} x {row['ratio_to']}",
                ""
                if size_bytes is None or row["candidate"] == "echo"
                else f"{size_bytes / row['median_ms'] / 1e3:.0f}",
            )
        if table.row_count:
            console.print(table)
    for note in notes:
        console.print(Text(f"- {note}"), soft_wrap=True)
    console.print(
        Text(f"{elapsed_s:.0f} s, every result checked. More: benchmarks/ in psengine's source.", style="dim"),
        soft_wrap=True,
    )


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    units = ((2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    return next(f"{size_bytes / factor:g} {unit}" for factor, unit in units if size_bytes >= factor)
