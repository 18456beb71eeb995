"""``psengine bench``: the benchmark suite's short form, for a first look at a machine."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.environment.installation import build_command

EXIT_FAILED = 3
WORKER = "psengine.cli.bench_worker"
SIZES_BYTES = (4 * 2**10, 2**20, 25 * 2**20)
MODEL_BYTES = 25 * 2**20
TURNS, QUICK_TURNS = 40, 8
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
    """Measure this machine: all-reduce, a training step's overhead, a model's way to a parameter server and back."""
    from psengine.verify.launch import RankFailedError

    begin_s, machine = time.monotonic(), describe_machine()
    work = {
        "sizes_bytes": SIZES_BYTES,
        "model_bytes": MODEL_BYTES,
        "turns": QUICK_TURNS if quick else TURNS,
        "server": None,
    }
    console = Console(stderr=True)
    try:
        with console.status("measuring"):
            found, notes = measure(work, timeout_s)
    except RankFailedError as error:
        print(f"{error.rank_traceback}psengine: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    if not found["has_shared_memory"]:
        notes.append(
            "psengine's native extension is not built here, so there is no shared memory to measure. Fix: on Linux,"
            f" with a C++ compiler, {build_command()}"
        )
    rows = rows_of(found)
    elapsed_s = time.monotonic() - begin_s
    if as_json:
        print(json.dumps({"machine": machine, "elapsed_s": elapsed_s, "rows": rows, "notes": notes}, indent=1))
        return
    print_tables(rows, machine, notes, elapsed_s)


def measure(work: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], list[str]]:
    """(rank 0's figures, notes on missing parts); the server's part is left out where no server can be started."""
    from psengine.errors import MissingExtraError
    from psengine.verify.launch import run_ranks
    from psengine.verify.servers import comparison_server, names_keys

    notes = []
    if names_keys():
        notes.append("no server was measured: one started here has no keys, and PSENGINE_SERVER_KEY is set")
    else:
        try:
            with comparison_server() as address:
                return run_ranks(WORKER, {**work, "server": address}, world_size=2, timeout_s=timeout_s)[0], notes
        except MissingExtraError as error:
            notes.append(f"no server was measured: {error}")
    return run_ranks(WORKER, work, world_size=2, timeout_s=timeout_s)[0], notes


def describe_machine() -> dict[str, Any]:
    """CPU, cores, load and versions, which the figures depend on."""
    import os

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


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each candidate: median milliseconds, 10th and 90th percentile, and the ratio to the first of its
    kind: the median of the ratios within a turn.
    """
    parts: list[tuple[str, int | None, dict[str, list[float]]]] = [
        ("all-reduce", int(size), seconds) for size, seconds in found["all_reduce"].items()
    ]
    parts.append(("training step", None, found["step"]))
    if found["server"] is not None:
        parts.append(("server", MODEL_BYTES, found["server"]))
    rows = []
    for part, size_bytes, seconds in parts:
        reference = "native DDP" if part == "training step" else next(iter(seconds))
        for candidate, own in seconds.items():
            pairs = zip(own, seconds[reference], strict=True)
            is_comparable = candidate not in (reference, "echo")
            rows.append(
                {
                    "part": part,
                    "size_bytes": 64 if candidate == "echo" else size_bytes,
                    "candidate": candidate,
                    "turns": len(own),
                    "median_ms": 1e3 * statistics.median(own),
                    "p10_ms": 1e3 * _quantile(own, 0.1),
                    "p90_ms": 1e3 * _quantile(own, 0.9),
                    "ratio": statistics.median(s / o for s, o in pairs) if is_comparable else None,
                    "ratio_to": reference if is_comparable else None,
                }
            )
    return rows


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[round(fraction * (len(ordered) - 1))]


def print_tables(rows: list[dict[str, Any]], machine: dict[str, Any], notes: list[str], elapsed_s: float) -> None:
    """For people."""
    console = Console(highlight=False)
    console.print(
        Text(
            f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} at the start; Python"
            f" {machine['python']}, torch {machine['torch']}, psengine {machine['psengine']}; 2 ranks, one thread each"
        ),
        soft_wrap=True,
    )
    titles = {
        "all-reduce": "All-reduce between 2 ranks",
        "training step": "Forward and backward of an MLP with 2.9 M parameters",
        "server": "A 25 MiB model to a parameter server (SGD) and back, one worker",
    }
    for part, title in titles.items():
        own = [row for row in rows if row["part"] == part]
        if not own:
            continue
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("")
        for heading in ("size", "median ms", "10th-90th", "against", "MB/s"):
            table.add_column(heading, justify="right")
        for row in own:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} x {row['ratio_to']}"
            rate = "" if row["size_bytes"] is None else f"{row['size_bytes'] / row['median_ms'] / 1e3:.0f}"
            table.add_row(
                row["candidate"],
                _size(row["size_bytes"]),
                f"{row['median_ms']:.3g}",
                f"{row['p10_ms']:.3g}-{row['p90_ms']:.3g}",
                ratio,
                "" if row["candidate"] == "echo" else rate,
            )
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
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"
