"""From the options of ``psengine run`` to what is to be done; contradictions are refused before anything starts."""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psengine.cli.run_arguments import RunArguments, check_program
from psengine.environment.launchers import MAX_WORKERS, WORKER
from psengine.environment.variables import default_strategy, read_variable
from psengine.errors import ConfigurationError
from psengine.specification import Registry, Specification, did_you_mean

# Between the signal that asks workers to end and SIGKILL; torchrun's 30 s are long after a Ctrl-C.
SHUTDOWN_S = 15
# The options of torchrun that --independent workers accept.
_INDEPENDENT_OPTIONS = (
    *("--nproc-per-node", "--max-restarts", "--signals-to-handle", "--shutdown-timeout"),
    *("-m", "--module", "--no-python"),
)
# psengine's own, known before torch is imported.
SERVER_STRATEGIES = ("sync-server", "async", "diloco-server")
# The settings of psengine-server that psengine run gives itself.
_OUR_SERVER_OPTIONS = ("bind", "shards", "snapshot_dir", "status_port")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``psengine run`` by their names; None where one was not given.

    ``default_workers`` counts where neither option nor variable says how many; None: one for each GPU, else 1.
    """

    workers: str | None = None
    default_workers: int | None = None
    strategy: str | None = None
    collective: str | None = None
    servers: int | None = None
    server_address: str | None = None
    server_options: tuple[str, ...] = ()
    snapshot_dir: Path | None = None
    status_port: int = 0
    metrics_port: int | None = None
    independent: bool = False
    first_worker: int = 0
    total_workers: int | None = None
    prefix: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, decided.

    Attributes:
        options: as they were given.
        torchrun: torchrun's options, parsed.
        script: the program and its arguments.
        workers: processes on this node.
        signals: names of those that end the run.
        servers: how many to start; 0 where there are some already, or none are needed.
        server_arguments: of psengine-server, from ``--server-option``.
        uses_servers: whether the strategy does; a script may choose another.
        variables: PSENGINE_* that workers get besides those of this process.
        is_multi_node: other nodes may take part.
        notes: what a user may not have meant, to be said.
    """

    options: RunOptions = field(default_factory=RunOptions)
    torchrun: Namespace
    script: tuple[str, ...]
    workers: int
    signals: tuple[str, ...] = ()
    servers: int = 0
    server_arguments: tuple[str, ...] = ()
    uses_servers: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    is_multi_node: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> range:
        """The ranks of independent workers."""
        return range(self.options.first_worker, self.options.first_worker + self.workers)

    @property
    def total_workers(self) -> int:
        """Independent workers of the whole job; other command lines may start some of them."""
        return self.options.total_workers or self.ranks.stop

    @property
    def plain_ranks(self) -> Container[int]:
        """Ranks whose output is shown as it is."""
        if self.options.prefix is None:
            return () if self.workers > 1 or self.options.independent or self.is_multi_node else range(1)
        return () if self.options.prefix else self.ranks[:1]


def make_plan(parts: RunArguments, given: RunOptions) -> Plan:
    """Decide a run.

    Raises:
        ConfigurationError: an option has a wrong value, or contradicts another; there is no such script.
    """
    from psengine.cli.launching.torchrun_options import choose_rendezvous, local_world_size, node_counts, parse_torchrun

    options = parse_torchrun(_with_workers(parts, given), parts.script or ["-"])
    check_program(parts.script, is_module=options.module, has_python=not options.no_python)
    # torch would call a function of the file in a forked worker; run as any other, the same file is the same program.
    options.run_path = False
    is_multi_node = node_counts(options)[1] > 1
    count = local_world_size(options.nproc_per_node)
    options.nproc_per_node = str(count)
    if options.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts is a number (expected 0 or more, got {options.max_restarts})")
    if options.shutdown_timeout is None:
        options.shutdown_timeout = int(read_variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or SHUTDOWN_S)
    strategy = given.strategy or default_strategy()
    named = given.server_address or read_variable("PSENGINE_SERVERS")
    uses_servers, notes = _read_names(strategy, given.collective, _source_of(parts, is_module=options.module))
    if uses_servers is None:  # the script registers it
        uses_servers = bool(given.servers or named)
    needs_servers = uses_servers and not Specification.parse("strategy", strategy).options.get("servers")
    servers = 0 if named else int(needs_servers) if given.servers is None else given.servers
    if named and given.servers:
        raise ConfigurationError(
            f"--servers starts servers of this run's own (expected no others, got {named} in"
            f" {'--server-address' if given.server_address else 'PSENGINE_SERVERS'}). Fix: leave one of them out"
        )
    if (given.servers or given.server_address) and not uses_servers:
        option = "--servers" if given.servers else "--server-address"
        if given.strategy:
            raise ConfigurationError(
                f"strategy {strategy!r} uses no servers (got {option}). Fix: leave {option} out, or use"
                " --strategy async or sync-server"
            )
        notes.append(
            f"{strategy!r} uses no servers; those of {option} are for a strategy that the script names or switches to"
        )
    if given.independent:
        _check_independent(parts, strategy, uses_servers, is_multi_node=is_multi_node)
        last = given.first_worker + count
        if not last <= (given.total_workers or last) <= MAX_WORKERS:
            raise ConfigurationError(
                f"--total-workers counts the workers of the whole job, those of this line too (expected {last} to"
                f" {MAX_WORKERS}, got {given.total_workers or last}; this line starts {given.first_worker} to"
                f" {last - 1})"
            )
        if needs_servers and not servers and not named:
            raise ConfigurationError(
                "independent workers meet at parameter servers (expected --servers 1 or more, or --server-address; got"
                " --servers 0)"
            )
    elif given.first_worker or given.total_workers:
        option = "--first-worker" if given.first_worker else "--total-workers"
        raise ConfigurationError(
            f"{option} numbers independent workers (expected --independent with it); the ranks of others come from"
            " their rendezvous"
        )
    elif worker := read_variable(WORKER):
        raise ConfigurationError(
            f"{WORKER} makes each process an independent worker, which joins no process group (expected it unset"
            f" without --independent, got {WORKER}={worker}). Fix: unset {WORKER}, or add --independent"
        )
    else:
        choose_rendezvous(options)
    if servers:
        if is_multi_node:
            raise ConfigurationError(
                f"strategy {strategy!r} over several nodes needs a server that all of them reach (expected"
                " --server-address or PSENGINE_SERVERS, got neither). Start one on a machine of yours, with keys:\n"
                "  psengine-server --bind tcp://0.0.0.0:7077 --curve-key keys/server.key --allow allowed\n"
                "then on every node, with PSENGINE_SERVER_KEY=keys/server.pub and PSENGINE_CLIENT_KEY=keys/worker.key"
                f" set:\n  psengine run --nnodes {options.nnodes} --rdzv-endpoint HOST:29400 --strategy {strategy}"
                " --server-address tcp://HOST:7077 ..."
            )
        if given.snapshot_dir is not None:
            try:
                given.snapshot_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(
                    f"--snapshot-dir is a folder for the servers to write in (got {given.snapshot_dir}:"
                    f" {error.strerror})"
                ) from error
    variables = {"PSENGINE_STRATEGY": given.strategy, "PSENGINE_COLLECTIVE": given.collective}
    variables["PSENGINE_METRICS_PORT"] = None if given.metrics_port is None else str(given.metrics_port)
    if given.server_address:
        from psengine.parameter_server.client.addresses import parse_addresses

        variables["PSENGINE_SERVERS"] = ",".join(parse_addresses(given.server_address))
    return Plan(
        options=given,
        torchrun=options,
        script=tuple(parts.script),
        workers=count,
        signals=_signals(options.signals_to_handle),
        servers=servers,
        server_arguments=tuple(_server_arguments(given.server_options)) if servers else (),
        uses_servers=uses_servers,
        variables={name: value for name, value in variables.items() if value},
        is_multi_node=is_multi_node,
        notes=tuple(notes),
    )


def expected_servers(given: RunOptions) -> int:
    """How many servers ``make_plan`` will start if it refuses nothing; known before torch is imported."""
    if given.server_address or read_variable("PSENGINE_SERVERS"):
        return 0
    if given.servers is not None:
        return given.servers
    name, _, options = (given.strategy or default_strategy()).partition(":")
    return int(name in SERVER_STRATEGIES and "servers=" not in options)


def _source_of(parts: RunArguments, *, is_module: bool) -> str:
    """The text of the script, of a module under this folder too; "" where there is none to read."""
    name = parts.script[0]
    path = Path(*name.split(".")).with_suffix(".py") if is_module else Path(name)
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_names(strategy: str, collective: str | None, source: str) -> tuple[bool | None, list[str]]:
    """Return whether the strategy uses servers (None: only the script knows it), and notes on names it must register.

    Raises:
        ConfigurationError: a strategy or a collective of psengine's own has no such option; a name is like one of
            psengine's, and ``source``, the script's text, does not have it.
    """
    from psengine.codecs.registry import CODECS
    from psengine.collectives.registry import COLLECTIVES
    from psengine.strategies.registry import STRATEGIES, resolve_strategy
    from psengine.strategies.servers.base import ServerStrategy

    named = Specification.parse("strategy", strategy)
    names: list[tuple[Registry[Any], Any]] = [(STRATEGIES, named.name), (CODECS, named.options.get("compress"))]
    unknown = [(registry, name) for registry, name in names if isinstance(name, str) and name not in registry]
    if not unknown:
        resolve_strategy(strategy)
    if collective:
        name = Specification.parse("collective", collective).name
        if name in COLLECTIVES:
            COLLECTIVES.read(collective)
        else:
            unknown.append((COLLECTIVES, name))
    notes = []
    for registry, name in unknown:
        hint = did_you_mean(name, registry)
        if hint and source and name not in source:
            raise ConfigurationError(
                f"unknown {registry.kind} (expected one of {sorted(registry)}, or a name that stands in the script,"
                f" which registers it; got {name!r}){hint}"
            )
        notes.append(f"{registry.kind} {name!r} is none of psengine's: the script has to register it{hint}")
    if named.name not in STRATEGIES:
        return None, notes
    kind = STRATEGIES[named.name]
    return isinstance(kind, type) and issubclass(kind, ServerStrategy), notes


def _signals(names: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigurationError(
                f"--signals-to-handle takes names of signals that can be handled (expected as SIGTERM, got {name!r})"
            )
    return found


def _server_arguments(options: Sequence[str]) -> list[str]:
    """``["lease_s=10"]`` as psengine-server takes them."""
    from psengine.parameter_server.server.settings import ServerSettings

    known = {name: one.default for name, one in ServerSettings.model_fields.items() if name not in _OUR_SERVER_OPTIONS}
    arguments: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in known:
            raise ConfigurationError(
                f"--server-option takes a setting of psengine-server that psengine run does not set itself (expected"
                f" NAME=VALUE with one of {', '.join(known)}; got {option!r})"
            )
        flag = f"--{name.replace('_', '-')}"
        if not isinstance(known[name], bool):
            arguments += [flag, value]
        elif value.lower() in ("", "true", "1", "yes"):
            arguments.append(flag)
    return arguments


def _with_workers(parts: RunArguments, given: RunOptions) -> dict[str, str | None]:
    """The options of torchrun, with the number of workers among them."""
    is_given = "--nproc-per-node" in parts.torchrun
    if is_given and given.workers is not None:
        raise ConfigurationError("--workers and --nproc-per-node are the same option: give one of them")
    if given.workers is None and (is_given or read_variable("PET_NPROC_PER_NODE")):
        return parts.torchrun
    import torch

    # torch counts no devices where CUDA cannot be used.
    count = given.workers or given.default_workers or max(1, torch.cuda.device_count())
    return {**parts.torchrun, "--nproc-per-node": str(count)}


def _check_independent(parts: RunArguments, strategy: str, uses_servers: bool, *, is_multi_node: bool) -> None:
    if not uses_servers:
        raise ConfigurationError(
            f"--independent workers are joined through parameter servers alone (expected --strategy async or"
            f" sync-server, got {strategy!r}, whose ranks need each other)"
        )
    if is_multi_node:
        raise ConfigurationError(
            "--independent workers need no rendezvous of nodes (expected no --nnodes). Fix: run the line on each node"
            " by itself, with one --server-address for all and another --first-worker on each"
        )
    if refused := [name for name in parts.torchrun if name not in _INDEPENDENT_OPTIONS]:
        raise ConfigurationError(
            f"--independent workers have no agent and no rendezvous, and have no use for torchrun's"
            f" {', '.join(refused)} (expected of torchrun's options only {', '.join(_INDEPENDENT_OPTIONS)})"
        )
