"""From the options of ``psengine run`` to what is to be done; contradictions are refused before anything starts."""

from __future__ import annotations

import shutil
import signal
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from psengine.cli.run_arguments import RunArguments, check_program, given_options
from psengine.environment.context import default_strategy, read_variable
from psengine.errors import ConfigurationError

# Of torchrun's, what --independent workers heed; -m and --no-python say what the script is.
_HEEDED_ALONE = (
    "--nproc-per-node",
    "--max-restarts",
    "--signals-to-handle",
    "--shutdown-timeout",
    "-m",
    "--module",
    "--no-python",
    "--nnodes",  # 1, or refused in words of its own
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, decided.

    Attributes:
        torchrun: its options, parsed.
        script: the program and its arguments.
        workers: of this node.
        servers: how many to start; 0 where there are some already, or none are needed.
        uses_servers: whether ``strategy`` does; a script may choose another.
        named_servers: addresses of those that run already and are needed.
        server_options, snapshot_dir, status_port: of those.
        variables: PSENGINE_* that workers get besides those of this process.
        independent: workers are worlds of their own.
        first_worker: rank of the first of those.
        is_multi_node: other nodes may take part.
        is_prefixed: lines of output have their rank before them; False: not those of rank 0, or of the first
            independent worker; None: where more than one worker writes.
    """

    torchrun: Namespace
    script: tuple[str, ...]
    workers: int
    servers: int = 0
    uses_servers: bool = False
    named_servers: tuple[str, ...] = ()
    server_options: tuple[str, ...] = ()
    snapshot_dir: Path | None = None
    status_port: int | None = 0
    variables: dict[str, str] = field(default_factory=dict)
    independent: bool = False
    first_worker: int = 0
    is_multi_node: bool = False
    is_prefixed: bool | None = None


def make_plan(
    parts: RunArguments,
    *,
    workers: str | None = None,
    strategy: str | None = None,
    collective: str | None = None,
    servers: int | None = None,
    server_address: str | None = None,
    server_options: tuple[str, ...] = (),
    snapshot_dir: Path | None = None,
    status_port: int | None = 0,
    independent: bool = False,
    first_worker: int = 0,
    is_prefixed: bool | None = None,
    default_workers: int | None = None,
) -> Plan:
    """Decide a run; the arguments are the options of the same names, None where not given.

    ``default_workers`` counts where neither option nor variable says how many; None: one for each GPU, else 1.

    Raises:
        ConfigurationError: an option has a wrong value, or contradicts another; there is no such script.
    """
    from psengine.cli.launching.torchrun_options import (
        choose_meeting_point,
        local_world_size,
        node_counts,
        parse_torchrun,
        torchrun_options,
    )

    options = parse_torchrun(_with_workers(parts, workers, default_workers), parts.script or ["-"])
    if options.run_path:
        if options.module or options.no_python:
            raise ConfigurationError(
                "--run-path runs a script's file in Python (expected neither -m nor --no-python with it, got"
                f" {'-m' if options.module else '--no-python'})"
            )
        # A function that torch runs in a forked worker, with no process group of its own and no pipe as its output;
        # the same file, run as any other, is the same program.
        options.run_path = False
    check_program(parts.script, is_module=options.module, has_python=not options.no_python)
    _check_signals(options.signals_to_handle)
    if options.numa_binding is not None:
        _check_numa_binding(options.numa_binding)
    nodes = node_counts(options)
    count = local_world_size(options.nproc_per_node)
    options.nproc_per_node = str(count)
    if options.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts is a number (expected 0 or more, got {options.max_restarts})")
    needs_servers = check_strategy(strategy or default_strategy())
    variables = {}
    if strategy:
        variables["PSENGINE_STRATEGY"] = strategy
    if collective:
        from psengine.collectives.registry import check_name

        check_name(collective)
        variables["PSENGINE_COLLECTIVE"] = collective
    named_servers: tuple[str, ...] = ()
    if server_address or needs_servers:
        from psengine.parameter_server.client.addresses import parse_addresses

        named_servers = parse_addresses(server_address)
    if server_address:
        variables["PSENGINE_SERVERS"] = ",".join(named_servers)
    if independent:
        _check_independent(strategy or default_strategy(), needs_servers, is_multi_node=nodes.maximum > 1)
        unheeded = [name for name in given_options(parts, torchrun_options()) if not _is_heeded_alone(name)]
        if unheeded:
            raise ConfigurationError(
                f"--independent workers have no agent and no meeting, and have no use for torchrun's"
                f" {', '.join(unheeded)} (expected of torchrun's options only --nproc-per-node, -m, --no-python,"
                " --max-restarts, --signals-to-handle, --shutdown-timeout)"
            )
    elif first_worker:
        raise ConfigurationError(
            "--first-worker numbers independent workers (expected --independent with it); the ranks of others come from"
            " their meeting"
        )
    else:
        choose_meeting_point(options, nodes)
    named = server_address or read_variable("PSENGINE_SERVERS")
    if named and servers:
        raise ConfigurationError(
            f"--servers starts servers of this run's own (expected no others, got {named} in"
            f" {'--server-address' if server_address else 'PSENGINE_SERVERS'}). Fix: leave one of them out"
        )
    uses_servers = needs_servers or "servers=" in (strategy or default_strategy())
    if servers and strategy and not uses_servers:
        raise ConfigurationError(
            f"strategy {strategy!r} uses no servers (expected no --servers, got --servers {servers})."
            " Fix: leave --servers out, or use --strategy async or sync-server"
        )
    started = 0 if named else (1 if needs_servers else 0) if servers is None else servers
    if started:
        if nodes.maximum > 1:
            raise ConfigurationError(_several_nodes(strategy or default_strategy(), options.nnodes))
        from psengine.cli.launching.servers import server_options as check_server_options
        from psengine.environment.extras import require_server_packages

        require_server_packages("parameter servers")
        check_server_options(server_options)
        if snapshot_dir is not None:
            _check_snapshot_dir(snapshot_dir)
    elif independent and not named:
        raise ConfigurationError(
            "independent workers meet at parameter servers (expected --servers 1 or more, or --server-address; got"
            " --servers 0)"
        )
    return Plan(
        torchrun=options,
        script=tuple(parts.script),
        workers=count,
        servers=started,
        uses_servers=uses_servers,
        named_servers=named_servers,
        server_options=server_options,
        snapshot_dir=snapshot_dir,
        status_port=status_port,
        variables=variables,
        independent=independent,
        first_worker=first_worker,
        is_multi_node=nodes.maximum > 1,
        is_prefixed=is_prefixed,
    )


def check_strategy(specification: str) -> bool:
    """Whether the strategy needs servers that its specification does not name.

    Raises:
        ConfigurationError: there is no such strategy, or it has no such option.
    """
    from psengine.strategies.registry import resolve_strategy
    from psengine.strategies.servers.base import ServerStrategy

    return isinstance(resolve_strategy(specification), ServerStrategy) and "servers=" not in specification


def _check_signals(names: str) -> None:
    for name in (part.strip() for part in names.split(",")):
        if name and name not in signal.Signals.__members__:
            raise ConfigurationError(f"--signals-to-handle takes names of signals (expected as SIGTERM, got {name!r})")
        if name and signal.Signals[name] in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigurationError(f"nobody can handle {name} (expected others in --signals-to-handle, got {names})")


def _check_numa_binding(mode: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"--numa-binding {mode} keeps each worker near its GPU (expected CUDA devices, got none that torch can use)"
        )
    if shutil.which("numactl") is None:
        raise ConfigurationError(
            f"--numa-binding {mode} needs the program numactl (expected it on the PATH, got none). Fix: install it, for"
            " example with apt install numactl"
        )


def _check_snapshot_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(
            f"--snapshot-dir is a folder for the servers to write in (got {folder}: {error.strerror})"
        ) from error


def _is_heeded_alone(option: str) -> bool:
    # Their spelling with underscores is torchrun's second one.
    return option.replace("_", "-") in _HEEDED_ALONE


def _with_workers(parts: RunArguments, workers: str | None, default: int | None) -> list[str]:
    given = any(o.split("=")[0] in ("--nproc-per-node", "--nproc_per_node") for o in parts.torchrun)
    if given and workers is not None:
        raise ConfigurationError("--workers and --nproc-per-node are the same option: give one of them")
    if workers is None and (given or read_variable("PET_NPROC_PER_NODE")):
        return parts.torchrun
    return [*parts.torchrun, f"--nproc-per-node={workers or default or _default_workers()}"]


def _default_workers() -> int:
    import torch

    return max(1, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _check_independent(strategy: str, needs_servers: bool, *, is_multi_node: bool) -> None:
    if not needs_servers and "servers=" not in strategy:
        raise ConfigurationError(
            f"--independent workers are joined through parameter servers alone (expected --strategy async or"
            f" sync-server, got {strategy!r}, whose ranks need each other)"
        )
    if is_multi_node:
        raise ConfigurationError(
            "--independent workers need no meeting of nodes (expected no --nnodes). Fix: run the line on each node by"
            " itself, with one --server-address for all and another --first-worker on each"
        )


def _several_nodes(strategy: str, nnodes: str) -> str:
    return (
        f"strategy {strategy!r} over several nodes needs a server that all of them reach (expected --server-address or"
        " PSENGINE_SERVERS, got neither). Start one on a machine of yours, with keys:\n"
        "  psengine-server --bind tcp://0.0.0.0:7077 --curve-key keys/server.key --allow allowed\n"
        "then on every node, with PSENGINE_SERVER_KEY=keys/server.pub and PSENGINE_CLIENT_KEY=keys/worker.key set:\n"
        f"  psengine run --nnodes {nnodes} --rdzv-endpoint HOST:29400 --strategy {strategy}"
        " --server-address tcp://HOST:7077 ..."
    )
