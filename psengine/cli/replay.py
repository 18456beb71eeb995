"""``psengine replay``: what each push of a run did, and the weights behind any of them, from its servers' logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psengine.errors import ConfigurationError, SnapshotError

if TYPE_CHECKING:
    from psengine.parameter_server.server.durability.history import Push

EXIT_NOT_FINITE = 1
EPILOG = (
    "Example: [bold]psengine replay /var/lib/psengine-0 /var/lib/psengine-1 --until-push 3:1742 --out"
    " weights.safetensors[/bold]. Columns: worker and step; by how many updates its weights were old; L2 norms of the"
    " gradient and of the update (of a merge: of all in it); how many values of the gradient, and of the weights after"
    " it, are NaN or infinite. Exit code 0: done; 1: done, and some values are not finite; 2: wrong arguments, or no"
    " such history."
)
_COLUMNS = "worker      step   stale    gradient      update  not finite  in weights"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(replay)


def replay(
    directories: Annotated[
        list[Path], typer.Argument(help="The --snapshot-dir of each of the job's servers; these may run.")
    ],
    until_push: Annotated[
        str | None, typer.Option(metavar="WORKER:N", help="Stop right behind this worker's push of step N.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the weights there, as safetensors.")] = None,
    job: Annotated[
        str, typer.Option(metavar="NAME", help="The job; NAME.tables has its tables.", envvar="PSENGINE_JOB")
    ] = "default",
) -> None:
    """Replay a run of async or diloco-server, bit for bit, from its servers' logs.

    The servers need --durability log --keep-history from their start on. Pushes are in the order of the first shard.
    """
    import torch
    from safetensors.torch import save_file

    from psengine.parameter_server.server.durability.history import History

    torch.set_num_threads(1)  # as in servers: the bits of some codecs depend on it
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out is a file in a directory that exists (got {out})")
    history = History(job, _parse(until_push))
    try:
        for directory in directories:
            print(f"reading {directory}", file=sys.stderr)
            history.read(directory)
        pushes, tensors = history.finish()
        if out is not None:
            # Tied names share memory, which the file cannot.
            save_file(
                {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, out
            )
    except OSError as error:
        raise SnapshotError(f"{error.filename}: {error.strerror}") from error
    finally:
        for note in history.notes:
            print(f"note: {note}", file=sys.stderr)
    print("\n".join([_COLUMNS, *map(_line, pushes)]))
    bad = next((push for push in pushes if push.bad_gradients or push.bad_weights), None)
    if bad is not None:
        print(f"worker {bad.rank}'s push of step {bad.step} is the first with values that are not finite")
        raise typer.Exit(EXIT_NOT_FINITE)


def _parse(until_push: str | None) -> tuple[int, int] | None:
    rank, _, step = (until_push or "0:0").partition(":")
    if not (rank.isdecimal() and step.isdecimal()):
        raise ConfigurationError(f"--until-push is WORKER:N, such as 3:1742 (got {until_push!r})")
    return None if until_push is None else (int(rank), int(step))


def _line(push: Push) -> str:
    numbers = f"{push.rank:6}{push.step:10}{push.staleness:8}{push.gradient:12.4g}{push.update:12.4g}"
    remark = f"  refused: {push.refused}" if push.refused else ""
    return f"{numbers}{push.bad_gradients:12}{push.bad_weights:12}{remark}"
