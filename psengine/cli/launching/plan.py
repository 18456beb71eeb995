"""From the options of ``psengine run`` to what is to be done; contradictions are refused before anything starts."""

from __future__ import annotations

import signal
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from psengine.cli.run_arguments import RunArguments, check_program
from psengine.environment.launchers import MAX_WORKERS, WORKER
from psengine.environment.variables import default_strategy, read_variable
from psengine.errors import ConfigurationError
from psengine.specification import Registry, Specification, did_you_mean

# Between the signal that asks workers to end and SIGKILL; torchrun's 30 s are long after a Ctrl-C.
SHUTDOWN_S = 15
# torch's own, where --rdzv-conf does not say otherwise.
LAST_CALL_S = 30
# The options of torchrun that --independent workers accept.
_INDEPENDENT_OPTIONS = (
    *("--nproc-per-node", "--max-restarts", "--signals-to-handle", "--shutdown-timeout"),
    *("-m", "--module", "--no-python"),
)
# psengine's own, known before torch is imported.
SERVER_STRATEGIES = ("sync-server", "async", "diloco-server")
# The settings of psengine-server that psengine run gives itself.
_OUR_SERVER_OPTIONS = ("bind", "shards", "snapshot-dir", "status-port")


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
        uses_servers: whether the strategy does.
        variables: PSENGINE_* that workers get besides those of this process.
        is_multi_node: other nodes may take part.
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

    @property
    def ranks(self) -> range:
        """The numbers of independent workers."""
        return range(self.options.first_worker, self.options.first_worker + self.workers)

    @property
    def total_workers(self) -> int:
        """Independent workers of the whole job; other command lines may start some of them."""
        return self.options.total_workers or self.ranks.stop

    @property
    def first_is_plain(self) -> bool:
        """Whether the first worker of this node writes to our own stdout and stderr, without a prefix."""
        if self.options.prefix is None:
            return self.workers == 1 and not self.options.independent and not self.is_multi_node
        return not self.options.prefix

    @property
    def notes(self) -> list[str]:
        """What to say before the workers start: which failures the run survives, and how long it may wait."""
        notes = []
        if self.uses_servers:
            servers = (
                "a server that dies is started again" if self.servers else "this command does not start the servers"
            )
            again = f"(--max-restarts {self.torchrun.max_restarts})"
            if self.options.independent:
                fate = f"the others go on, and it alone is started again {again}"
            else:
                fate = f"all are started again {again}" if self.torchrun.max_restarts else "the run ends"
                fate += "; with --independent the others go on"
            notes.append(f"{servers}; when a worker dies, {fate}")
        if self.is_multi_node:
            from torch.distributed.run import get_rdzv_endpoint

            fewest, most = node_counts(self.torchrun)
            wait = f"waiting for {most} nodes at {get_rdzv_endpoint(self.torchrun)}"
            if fewest < most:
                last_call_s = _rendezvous_setting(self.torchrun, "last_call_timeout") or LAST_CALL_S
                wait += (
                    f"; once {fewest} {'has' if fewest == 1 else 'have'} come, {last_call_s} s more for the others"
                    " (--rdzv-conf last_call_timeout=SECONDS)"
                )
            notes.append(wait)
        return notes


def make_plan(parts: RunArguments, given: RunOptions) -> Plan:
    """Decide a run.

    Raises:
        ConfigurationError: an option has a wrong value, or contradicts another; there is no such script.
    """
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
    uses_servers = _uses_servers(strategy, given.collective, _source_of(parts, is_module=options.module))
    if uses_servers is None:  # the script registers it
        uses_servers = bool(given.servers or named)
    if given.servers and named:
        raise ConfigurationError(
            f"--servers starts servers of this run's own (expected no others, got {named} in"
            f" {'--server-address' if given.server_address else 'PSENGINE_SERVERS'}). Fix: leave one of them out"
        )
    if (given.servers or given.server_address) and not uses_servers:
        option = "--servers" if given.servers else "--server-address"
        raise ConfigurationError(
            f"strategy {strategy!r} uses no servers (got {option}). Fix: leave {option} out, or name the strategy that"
            " uses them: --strategy async or sync-server"
        )
    needs_servers = uses_servers and not Specification.parse("strategy", strategy).options.get("servers")
    servers = 0 if named else int(needs_servers) if given.servers is None else given.servers
    if given.independent:
        _check_independent(parts, given, strategy, count, uses_servers=uses_servers, is_multi_node=is_multi_node)
        if needs_servers and not servers and not named:
            raise ConfigurationError(
                "independent workers meet at parameter servers (expected --servers 1 or more, or --server-address; got"
                " --servers 0)"
            )
    elif given.first_worker or given.total_workers:
        option = "--first-worker" if given.first_worker else "--total-workers"
        raise ConfigurationError(f"{option} numbers independent workers (expected --independent with it)")
    elif worker := read_variable(WORKER):
        raise ConfigurationError(
            f"{WORKER} makes each process an independent worker, which joins no process group (expected it unset"
            f" without --independent, got {WORKER}={worker}). Fix: unset {WORKER}, or add --independent"
        )
    else:
        choose_rendezvous(options)
    if servers and is_multi_node:
        raise ConfigurationError(
            f"strategy {strategy!r} over several nodes needs a server that all of them reach (expected --server-address"
            " or PSENGINE_SERVERS, got neither). Fix: start psengine-server --bind tcp://0.0.0.0:7077 --secret-file"
            " FILE on one node, and add --server-address tcp://THAT-NODE:7077 on every node"
        )
    if servers and given.snapshot_dir is not None:
        try:
            given.snapshot_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--snapshot-dir is a folder for the servers to write in (got {given.snapshot_dir}: {error.strerror})"
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
        server_arguments=tuple(_server_arguments(given.server_options)),
        uses_servers=uses_servers,
        variables={name: value for name, value in variables.items() if value},
        is_multi_node=is_multi_node,
    )


def expected_servers(given: RunOptions) -> int:
    """How many servers ``make_plan`` will start if it refuses nothing; known before torch is imported."""
    if given.server_address or read_variable("PSENGINE_SERVERS"):
        return 0
    name, _, options = (given.strategy or default_strategy()).partition(":")
    needed = int(name in SERVER_STRATEGIES and "servers=" not in options)
    return needed if given.servers is None else given.servers


def torchrun_options() -> dict[str, bool]:
    """Each option of torchrun to whether it takes a value."""
    from torch.distributed.run import get_args_parser

    return {
        option: action.nargs != 0
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def parse_torchrun(options: Mapping[str, str | None], script: Sequence[str]) -> Namespace:
    """What torchrun's own parser makes of its options, and of its ``PET_*`` variables.

    Raises:
        ConfigurationError: a value that an option cannot have.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise ConfigurationError(message)

    parser.error = fail  # type: ignore[method-assign]
    given = [part for name, value in options.items() for part in ([name] if value is None else [name, value])]
    return parser.parse_args([*given, *script])


def node_counts(options: Namespace) -> tuple[int, int]:
    """How many nodes ``--nnodes`` says take part: (MIN, MAX).

    Raises:
        ConfigurationError: not N or MIN:MAX with 0 < MIN <= MAX.
    """
    from torch.distributed.run import parse_min_max_nnodes

    try:
        fewest, most = parse_min_max_nnodes(options.nnodes)
        if 0 < fewest <= most:
            return fewest, most
    except (ValueError, RuntimeError):
        pass
    raise ConfigurationError(
        f"--nnodes is a number of nodes or a range (expected N or MIN:MAX with 0 < MIN <= MAX, got {options.nnodes!r})"
    )


def local_world_size(nproc_per_node: str) -> int:
    """How many workers a node gets: a number, or what auto, cpu, gpu and xpu stand for here.

    Raises:
        ConfigurationError: neither, or no such device.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        count = int(determine_local_world_size(nproc_per_node))
    except ValueError as error:
        raise ConfigurationError(
            f"--workers is a number of processes, or auto, cpu, gpu or xpu (got {nproc_per_node!r}: {error})"
        ) from None
    if count < 1:
        raise ConfigurationError(f"--workers is a number of processes (expected at least 1, got {count})")
    return count


def choose_rendezvous(options: Namespace) -> None:
    """Fill in where the nodes' agents meet: one node at a free port of its own, several where the user says.

    Raises:
        ConfigurationError: several nodes, and no address.
    """
    is_alone = node_counts(options)[1] == 1
    is_named = bool(options.rdzv_endpoint) or options.master_port is not None or options.master_addr != "127.0.0.1"
    if options.standalone and not is_alone:
        raise ConfigurationError(
            f"--standalone is one node alone (expected no --nnodes, or --nnodes 1; got --nnodes {options.nnodes}). Fix:"
            " give every node --rdzv-endpoint HOST:PORT in its place"
        )
    if options.standalone or (is_alone and options.rdzv_backend in ("c10d", "static") and not is_named):
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        # Names of containers and laptops often have no address.
        options.local_addr = options.local_addr or "127.0.0.1"
    elif not is_named:
        raise ConfigurationError(
            f"--nnodes {options.nnodes} needs an address at which the nodes meet (expected --rdzv-endpoint HOST:PORT"
            " with a host of theirs and a free port; got none). Run the same line on every node, for example:\n"
            f"  psengine run --nnodes {options.nnodes} --rdzv-endpoint node-0:29400 ..."
        )
    elif options.rdzv_endpoint and options.rdzv_backend == "static":
        options.rdzv_backend = "c10d"
    if options.rdzv_id == "none" and options.rdzv_backend == "c10d":
        options.rdzv_id = str(uuid.uuid4()) if is_alone else "psengine"
    if options.master_port is None:
        options.master_port = 29500


def _rendezvous_setting(options: Namespace, name: str) -> str:
    pairs = (pair.partition("=") for pair in options.rdzv_conf.split(","))
    return next((value for key, _, value in pairs if key.strip() == name), "")


def _source_of(parts: RunArguments, *, is_module: bool) -> str:
    """The text of the script, of a module under this folder too; "" where there is none to read."""
    name = parts.script[0]
    path = Path(*name.split(".")).with_suffix(".py") if is_module else Path(name)
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _uses_servers(strategy: str, collective: str | None, source: str) -> bool | None:
    """Whether the strategy uses servers; None: only the script, which registers it, knows.

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
    if collective:
        names.append((COLLECTIVES, Specification.parse("collective", collective).name))
    unknown = [(registry, name) for registry, name in names if isinstance(name, str) and name not in registry]
    for registry, name in unknown:
        hint = did_you_mean(name, registry)
        if hint and source and name not in source:
            raise ConfigurationError(
                f"unknown {registry.kind} (expected one of {sorted(registry)}, or a name that stands in the script,"
                f" which registers it; got {name!r}){hint}"
            )
    if collective and (COLLECTIVES, names[-1][1]) not in unknown:
        COLLECTIVES.read(collective)
    if named.name not in STRATEGIES:
        return None
    if not unknown:
        resolve_strategy(strategy)
    kind = STRATEGIES[named.name]
    return isinstance(kind, type) and issubclass(kind, ServerStrategy)


def _signals(names: str) -> tuple[str, ...]:
    """The signals that end the run; one that is ignored when it begins (nohup's SIGHUP) stays ignored."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigurationError(
                f"--signals-to-handle takes names of signals that can be handled (expected as SIGTERM, got {name!r})"
            )
    heeded = (name for name in found if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN)
    return tuple(dict.fromkeys([*heeded, "SIGTERM"]))


def _server_arguments(options: Sequence[str]) -> list[str]:
    """``["lease_s=10"]`` as psengine-server takes them; whether it has such a setting it says itself."""
    arguments: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        name = name.strip().lstrip("-").replace("_", "-")
        if name in _OUR_SERVER_OPTIONS:
            raise ConfigurationError(
                f"--server-option takes a setting that psengine run does not set itself (expected none of"
                f" {', '.join(_OUR_SERVER_OPTIONS)}; got {option!r})"
            )
        arguments += [f"--{name}"] if value.lower() in ("", "true", "yes") else [f"--{name}", value]
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


def _check_independent(
    parts: RunArguments, given: RunOptions, strategy: str, count: int, *, uses_servers: bool, is_multi_node: bool
) -> None:
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
    last = given.first_worker + count
    if not last <= (given.total_workers or last) <= MAX_WORKERS:
        raise ConfigurationError(
            f"--total-workers counts the workers of the whole job, those of this line too (expected {last} to"
            f" {MAX_WORKERS}, got {given.total_workers or last}; this line starts {given.first_worker} to {last - 1})"
        )
