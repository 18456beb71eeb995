"""``psengine run``: one line that launches a training, on a laptop and on each node of a cluster."""

from __future__ import annotations

import io
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from psengine.cli.console import print_if_read
from psengine.cli.launching.plan import Plan, RunOptions, make_plan
from psengine.cli.run_arguments import PARTS, ScriptCommand
from psengine.errors import ConfigurationError

HELP = """Launch a training script: on one machine, or by the same line on every node.

A superset of torchrun: torchrun's options stand before the script and have the same meaning (--nnodes, \
--rdzv-endpoint, --max-restarts, --log-dir, ...; torchrun --help). psengine run starts the parameter servers that the \
strategy needs, names the rank that failed first with its error, and ends all processes on Ctrl-C.

[bold]Examples[/bold]

psengine run --workers 2 train.py --epochs 3

psengine run --workers 4 --strategy async:staleness_scaling=inverse --servers 2 train.py

psengine run --workers 4 --strategy async --independent --max-restarts 3 train.py

psengine run --workers 2 --timeline out.json -m package.train

psengine run --nnodes 2 --workers 8 --rdzv-endpoint node-0:29400 train.py  (the same on both nodes)

Exit codes: the failed rank's own (128 + the signal that killed it), 130 after Ctrl-C, 2 for a wrong command line."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="run", cls=ScriptCommand, help=HELP)(run)


def run(
    context: typer.Context,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Processes on this node: a number, gpu, cpu or auto; torchrun's --nproc-per-node. Default: one for"
            " each GPU, else 1.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="How replicas agree if the script does not set it: sync, sync-server, async,"
            " async:staleness_scaling=inverse, ..., or one that the script registers.",
        ),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The transport of strategy sync, unless the script sets it: auto, c10d, shared_memory, hierarchical.",
        ),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Number of parameter servers to start on loopback; one that dies is started again. Default: 1 if"
            " --strategy needs one.",
        ),
    ] = None,
    server_address: Annotated[
        str | None,
        typer.Option(
            metavar="TCP://HOST:PORT,...", help="Running servers, instead of new ones; sets PSENGINE_SERVERS."
        ),
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A setting of the started servers, such as lease_s=10; may be repeated. See psengine-server --help.",
        ),
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the servers' snapshots; a later run continues from them. Default: temporary.",
        ),
    ] = None,
    status_port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port of the first server's dashboard; 0: a free one."),
    ] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Port of rank 0's metrics for Prometheus, on 127.0.0.1; 0: a free one. Default: none.",
        ),
    ] = None,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Workers are connected through the servers only: if one dies the others go on, and that one alone"
            " is started again (--max-restarts). Not for strategy sync.",
        ),
    ] = False,
    first_worker: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="W", help="Number of this line's first independent worker."),
    ] = 0,
    total_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Independent workers of the whole job, where several command lines start some each. Default:"
            " --first-worker + --workers.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Record what each rank does when, for ui.perfetto.dev.")
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            show_default=False,
            help="Prefix each line of output with its rank; --no-prefix leaves rank 0's lines unchanged. Default:"
            " --prefix with several workers.",
        ),
    ] = None,
) -> None:
    """Decide, run, report."""
    from psengine.cli.launching.servers import launched_servers

    options = RunOptions(
        workers=workers,
        strategy=strategy,
        collective=collective,
        servers=servers,
        server_address=server_address,
        server_options=tuple(server_option or ()),
        snapshot_dir=snapshot_dir,
        status_port=status_port,
        metrics_port=metrics_port,
        independent=independent,
        first_worker=first_worker,
        total_workers=total_workers,
        prefix=prefix,
    )
    say = make_logger()
    with launched_servers(options) as launched:
        plan = make_plan(context.meta[PARTS], options)
        for note in plan.notes:
            say(note)
        from psengine.cli.launching.run import run_training

        with recorded(plan, timeline, say) as plan:
            code = run_training(plan, report=say, launched=launched)
    raise typer.Exit(code)


def make_logger(command: str = "psengine run") -> Callable[[str], None]:
    """A function that prints a line in the launcher's name, from any thread, whether or not somebody reads stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Workers' lines are shown when they come, and a character that the terminal lacks ends nothing.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        print_if_read(console, Text(f"{'' if line.startswith('  ') else f'{command}: '}{line}"), soft_wrap=True)

    return say


@contextmanager
def recorded(plan: Plan, timeline: Path | None, say: Callable[[str], None]) -> Iterator[Plan]:
    """Have the workers of the block record a timeline; after it their parts are merged into one file.

    Raises:
        ConfigurationError: ``timeline`` cannot be written.
    """
    if timeline is None:
        yield plan
        return
    from psengine.tracing.files import find_parts, merge_parts

    path = timeline.absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"--timeline writes to a file in an existing folder (got {timeline})")
    with tempfile.TemporaryDirectory(prefix="psengine-timeline-") as directory:
        part = Path(directory) / "timeline.json"
        yield replace(plan, variables={**plan.variables, "PSENGINE_TIMELINE": str(part)})
        parts = find_parts(part)
        if not parts:
            say("no rank wrote a timeline (a model must be wrapped, and its process end in order)")
            return
        if plan.is_multi_node:
            # Each node has the parts of its own ranks; the folder may be shared, and so may a host's name.
            first = parts[0].name.rpartition(".rank")[2]
            path = path.with_name(f"{path.stem}.{socket.gethostname()}.rank{first}{path.suffix}")
        merge_parts(parts, path)
        ranks = "1 rank" if len(parts) == 1 else f"{len(parts)} ranks"
        say(f"timeline of {ranks} in {path}; open it at https://ui.perfetto.dev or chrome://tracing")
