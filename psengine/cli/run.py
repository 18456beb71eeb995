"""``psengine run``: one line that launches a training, on a laptop and on each node of a cluster."""

from __future__ import annotations

import io
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from psengine.cli.launching.plan import PARTS, Plan, RunOptions, ScriptCommand, make_plan
from psengine.errors import ConfigurationError

HELP = """Launch a training script: on one machine, or by the same line on every node.

A superset of torchrun: torchrun's options stand before the script and have the same meaning (--nnodes, \
--rdzv-endpoint, --max-restarts, --log-dir, ...; torchrun --help). psengine run starts the parameter servers that the \
strategy needs, names the rank that failed first with its error, and ends all processes on Ctrl-C.

[bold]Examples[/bold]

psengine run --workers 2 train.py --epochs 3

psengine run --workers 4 --strategy async:staleness_scaling=inverse --servers 2 train.py

psengine run --workers 4 --strategy async --independent --max-restarts 3 train.py

psengine run --workers 4 --strategy sync:virtual_workers=8 --independent train.py

psengine run --workers 2 --replace-ddp --strategy async written_for_native_ddp.py

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
        typer.Option(metavar="N", help="Processes on this node: a number, gpu, cpu, auto. Default: one per GPU, or 1."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME[:OPTION=VALUE,...]", help="How replicas synchronise, if the script does not say."),
    ] = None,
    collective: Annotated[str | None, typer.Option(metavar="NAME", help="What carries strategy sync.")] = None,
    servers: Annotated[
        int | None, typer.Option(min=0, metavar="S", help="Parameter servers to start here. Default: 1 if needed.")
    ] = None,
    server_address: Annotated[
        str | None, typer.Option(metavar="TCP://HOST:PORT,...", help="Running servers, instead of new ones.")
    ] = None,
    server_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of the started servers; may be repeated.")
    ] = None,
    snapshot_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the servers keep their state. Default: a temporary folder.")
    ] = None,
    status_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Of the first server's dashboard; 0: a free one.")
    ] = 0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Of rank 0's metrics for Prometheus.")
    ] = None,
    independent: Annotated[
        bool, typer.Option("--independent", help="No process group: workers may die and restart alone.")
    ] = False,
    first_worker: Annotated[
        int, typer.Option(min=0, max=65535, metavar="W", help="Number of this line's first independent worker.")
    ] = 0,
    total_workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Independent workers of the whole job, of all lines.")
    ] = None,
    continues: Annotated[
        bool, typer.Option("--continue", help="Go on from the values that another run has trained at the servers.")
    ] = False,
    replace_ddp: Annotated[
        bool, typer.Option("--replace-ddp", help="Native DDP is psengine's in the script, which stays as it is.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="OUT.json", help="Record what each rank does when, for ui.perfetto.dev.")
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option("--prefix/--no-prefix", help="Whether rank 0's lines begin with its rank, as all others' do."),
    ] = None,
) -> None:
    """Decide, run, report."""
    from psengine.cli.launching.servers import launched_servers

    options = RunOptions(**{name: value for name, value in context.params.items() if name != "timeline"})
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

    def say(line: str) -> None:
        # The reader may be gone (``2>&1 | head -1``), and a signal's handler may come while its thread is in a write.
        with suppress(OSError, ValueError, RuntimeError):
            sys.stderr.write(f"{'' if line.startswith('  ') else f'{command}: '}{line}\n")

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
    from psengine.tracing.timeline import find_parts, merge_parts

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
