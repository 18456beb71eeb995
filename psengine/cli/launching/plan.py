"""From the command line of ``psengine run`` to what is to be done; contradictions are refused before anything starts.

The line has options of its own and torchrun's, then the script with the script's arguments.
"""

from __future__ import annotations

import math
import os
import signal
import uuid
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from typer.core import TyperCommand
from typing_extensions import override

import psengine
from psengine.cli import other_copy
from psengine.environment.variables import default_collective, default_strategy, read_variable
from psengine.errors import ConfigurationError
from psengine.specification import Specification, did_you_mean

# Key of the parsed line in a command's ``context.meta``.
PARTS = "psengine.run_arguments"
# Between the signal that asks workers to end and SIGKILL, as torchrun's: schedulers give about as long to save.
SHUTDOWN_S = 30
# The options of torchrun that --independent workers accept.
_INDEPENDENT_OPTIONS = (
    *("--nproc-per-node", "--max-restarts", "--signals-to-handle", "--shutdown-timeout"),
    *("-m", "--module", "--no-python"),
)
# How often a worker with virtual workers is started again, unless --max-restarts says it; and the life of one that is
# no longer counted. A program that fails at its start ends the run.
ELASTIC_RESTARTS, ELASTIC_FORGIVEN_S = 10, 30.0
# psengine's own, known before torch is imported.
SERVER_STRATEGIES = ("sync-server", "async", "diloco-server")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A command line in its parts.

    Attributes:
        own: options of ``psengine run``, as typer takes them.
        torchrun: torchrun's options by their name, such as "--nnodes", with their values; None for flags.
        script: the script, module or program, and its arguments; [] where none was given.
    """

    own: list[str] = field(default_factory=list)
    torchrun: dict[str, str | None] = field(default_factory=dict)
    script: list[str] = field(default_factory=list)


class ScriptCommand(TyperCommand):
    """A command that takes torchrun's options too; its line ends in a script with the script's own arguments."""

    @override
    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        # Completion, and --help alone, need no launcher.
        if context.resilient_parsing or args[:1] in ([name] for name in context.help_option_names):
            return super().parse_args(context, args)
        own = {
            option: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(context)
            for option in [*parameter.opts, *parameter.secondary_opts]
        }
        try:
            parts = split_arguments(args, own, {})
        except ConfigurationError:  # not all are ours; torch, which knows torchrun's, takes a second to import
            parts = split_arguments(args, own, torchrun_options(), command=context.command_path)
        context.meta[PARTS] = parts
        return super().parse_args(context, parts.own)

    @override
    def collect_usage_pieces(self, context: Any) -> list[str]:
        return ["[OPTIONS]", "[TORCHRUN OPTIONS]", "SCRIPT.py | -m MODULE", "[ARGUMENTS]..."]


def torchrun_options() -> dict[str, bool]:
    """Each option of torchrun to whether it takes a value."""
    from torch.distributed.run import get_args_parser

    return {
        option: action.nargs != 0
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def split_arguments(
    arguments: Sequence[str], own: Mapping[str, bool], torchrun: Mapping[str, bool], *, command: str = "psengine run"
) -> RunArguments:
    """Cut ``arguments`` at the script: the first that is no option, or whatever follows ``--``.

    Args:
        arguments: after the command's name.
        own: each option to whether it takes a value.
        torchrun: the same.
        command: named in errors.

    Raises:
        ConfigurationError: an option that nobody knows, or one without its value.
    """
    parts = RunArguments()
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if torchrun.get(name[:2]) and not name.startswith("--"):
            name, equals, value = name[:2], name[2:], argument[2:]  # -r3
        if name not in own and name not in torchrun:
            hint = did_you_mean(name, sorted({*own, *torchrun})) or f". See {command} --help."
            raise ConfigurationError(
                f"no such option: {name} (expected an option of {command} or of torchrun before the script){hint}"
            )
        takes_value = own[name] if name in own else torchrun[name]
        if takes_value and not equals:
            if not remaining:
                raise ConfigurationError(f"{name} needs a value (expected {name} VALUE, got the end of the line)")
            value = remaining.pop(0)
        if name in own:
            parts.own.extend([name, value] if takes_value else [argument])
        else:
            parts.torchrun[name.replace("_", "-")] = value if takes_value else None
    parts.script.extend(remaining[1:] if remaining[:1] == ["--"] else remaining)
    return parts


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
    server_option: Sequence[str] | None = None
    snapshot_dir: str | None = None
    status_port: int = 0
    metrics_port: int | None = None
    independent: bool = False
    first_worker: int = 0
    total_workers: int | None = None
    continues: bool = False
    replace_ddp: bool = False
    prefix: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, decided.

    Attributes:
        options: as they were given.
        torchrun: torchrun's options, parsed.
        script: the program and its arguments.
        workers: processes on this node.
        nodes: how many take part, at least and at most.
        signals: names of those that end the run.
        servers: how many to start; 0 where there are some already, or none are needed.
        uses_servers: whether the strategy does.
        variables: that workers get besides those of this process.
        forgiven_s: an independent worker that has run so long may be started again as often as at first.
    """

    options: RunOptions = field(default_factory=RunOptions)
    torchrun: Namespace
    script: Sequence[str]
    workers: int
    nodes: tuple[int, int] = (1, 1)
    signals: tuple[str, ...] = ()
    servers: int = 0
    uses_servers: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    forgiven_s: float = math.inf

    @property
    def is_multi_node(self) -> bool:
        """Whether other nodes may take part."""
        return self.nodes[1] > 1

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
        folder = "." if self.torchrun.module or self.torchrun.no_python else str(Path(self.script[0]).parent)
        notes = [note] if (note := other_copy(folder)) else []
        if self.uses_servers:
            who = "it alone is" if self.options.independent else "all are"
            again = f"{who} started again (--max-restarts {self.torchrun.max_restarts})"
            if not self.torchrun.max_restarts:
                again = "it is not started again" if self.options.independent else "the run ends"
            other = "the others go on" if self.options.independent else "with --independent the others go on"
            fate = f"{again}; {other}"
            servers = "a server that dies is started again; " if self.servers else ""
            notes.append(f"{servers}when a worker dies, {fate}")
        elif self.servers or self.options.server_address:
            notes.append("the servers are for tables alone (psengine.ServerEmbedding): the strategy uses none")
        if self.options.replace_ddp:
            strategy = self.options.strategy or default_strategy()
            notes.append(f"native DistributedDataParallel is psengine's in the script, with strategy {strategy!r}")
        if self.is_multi_node:
            place = self.torchrun.rdzv_endpoint or self.torchrun.master_addr
            notes.append(f"waiting for {self.nodes[1]} nodes at {place}")
        return notes


def make_plan(parts: RunArguments, given: RunOptions) -> Plan:
    """Decide a run.

    Raises:
        ConfigurationError: an option has a wrong value, or contradicts another; there is no script.
    """
    options = parse_torchrun(parts, given)
    if not (options.module or options.no_python or Path(parts.script[0]).exists()):
        raise ConfigurationError(f"there is no script {parts.script[0]} (expected a file's path, or -m module)")
    nodes, workers = _counts(options)
    strategy = given.strategy or default_strategy()
    check_names(given)
    named = given.server_address or read_variable("PSENGINE_SERVERS")
    is_elastic = _is_elastic(given)
    uses_servers = is_elastic or Specification.parse("strategy", strategy).name in SERVER_STRATEGIES
    if given.servers and named:
        raise ConfigurationError(
            f"--servers starts servers of this run's own (expected no others, got {named}). Fix: leave --servers out,"
            " or --server-address and PSENGINE_SERVERS"
        )
    if given.replace_ddp:
        _check_replaceable(given, strategy)
    servers, forgiven_s = expected_servers(given), math.inf
    if given.independent:
        _check_independent(parts, strategy, uses_servers=uses_servers)
        if is_elastic and not ("--max-restarts" in parts.torchrun or read_variable("PET_MAX_RESTARTS")):
            options.max_restarts, forgiven_s = ELASTIC_RESTARTS, ELASTIC_FORGIVEN_S
    elif given.first_worker or given.total_workers:
        option = "--first-worker" if given.first_worker else "--total-workers"
        raise ConfigurationError(f"{option} numbers independent workers (expected --independent with it)")
    else:
        choose_rendezvous(options, is_alone=nodes[1] == 1)
    if servers and nodes[1] > 1:
        raise ConfigurationError(
            f"strategy {strategy!r} over several nodes needs a server that all of them reach (expected --server-address"
            " or PSENGINE_SERVERS, got neither). Fix: start psengine-server --bind tcp://0.0.0.0:7077 --secret-file"
            " FILE on one node, and add --server-address tcp://THAT-NODE:7077 on every node"
        )
    # Python runs the sitecustomize.py that it finds there.
    path = f"{psengine.__path__[0]}/integrations/replacing", read_variable("PYTHONPATH")
    variables = {
        "PSENGINE_STRATEGY": given.strategy,
        "PSENGINE_COLLECTIVE": given.collective,
        "PSENGINE_SERVERS": given.server_address,
        "PSENGINE_CONTINUE": "1" if given.continues else None,
        "PYTHONPATH": os.pathsep.join(filter(None, path)) if given.replace_ddp else None,
        "PSENGINE_METRICS_PORT": None if given.metrics_port is None else str(given.metrics_port),
    }
    return Plan(
        options=given,
        torchrun=options,
        script=parts.script,
        workers=workers,
        nodes=nodes,
        signals=_signals(options.signals_to_handle),
        servers=servers,
        uses_servers=uses_servers,
        variables={name: value for name, value in variables.items() if value},
        forgiven_s=forgiven_s,
    )


def expected_servers(given: RunOptions) -> int:
    """How many servers a run starts that is not refused; known before torch is imported."""
    if given.server_address or read_variable("PSENGINE_SERVERS"):
        return 0
    strategy = Specification.parse("strategy", given.strategy or default_strategy())
    needed = strategy.name in SERVER_STRATEGIES and not strategy.options.get("servers")
    needed |= _is_elastic(given)  # whose coordinator is a server without chunks
    return int(needed) if given.servers is None else given.servers


def parse_torchrun(parts: RunArguments, given: RunOptions) -> Namespace:
    """What torchrun's own parser makes of its options, and of its ``PET_*`` variables.

    Raises:
        ConfigurationError: a value that an option cannot have.
    """
    from torch.distributed.run import get_args_parser

    if not parts.script:
        raise ConfigurationError(
            "which script? (expected script.py or -m module after the options, got none)."
            " Example: psengine run --workers 2 train.py"
        )
    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise ConfigurationError(message)

    parser.error = fail  # type: ignore[method-assign]
    torchrun = dict(parts.torchrun)
    is_given = "--nproc-per-node" in torchrun
    if is_given and given.workers is not None:
        raise ConfigurationError("--workers and --nproc-per-node are the same option: give one of them")
    if given.workers is not None or not (is_given or read_variable("PET_NPROC_PER_NODE")):
        import torch

        # torch counts no devices where CUDA cannot be used.
        count = given.workers or given.default_workers or max(1, torch.cuda.device_count())
        torchrun["--nproc-per-node"] = str(count)
    words = [part for name, value in torchrun.items() for part in ([name] if value is None else [name, value])]
    options = parser.parse_args([*words, *parts.script])
    # torch would call a function of the file in a forked worker; run as any other, the same file is the same program.
    options.run_path = False
    if options.shutdown_timeout is None:
        options.shutdown_timeout = int(read_variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or SHUTDOWN_S)
    return options


def choose_rendezvous(options: Namespace, *, is_alone: bool) -> None:
    """Fill in where the nodes' agents meet: one node at a free port of its own, several where the user says.

    Raises:
        ConfigurationError: several nodes, and no address.
    """
    is_named = bool(options.rdzv_endpoint) or options.master_port is not None or options.master_addr != "127.0.0.1"
    if is_alone and (options.standalone or (options.rdzv_backend in ("c10d", "static") and not is_named)):
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


def _counts(options: Namespace) -> tuple[tuple[int, int], int]:
    """((fewest nodes, most nodes), workers on this node)."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        fewest, most = parse_min_max_nnodes(options.nnodes)
        workers = int(determine_local_world_size(options.nproc_per_node))
        if not 0 < fewest <= most or workers < 1:
            raise ValueError("both must be at least 1")
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            "--nnodes is N or MIN:MAX, and --workers a number, auto, cpu, gpu or xpu (got"
            f" {options.nnodes!r} and {options.nproc_per_node!r}: {error})"
        ) from None
    options.nproc_per_node = str(workers)
    return (fewest, most), workers


def _is_elastic(given: RunOptions) -> bool:
    """Whether independent workers exchange among themselves, with virtual workers."""
    strategy = Specification.parse("strategy", given.strategy or default_strategy())
    return given.independent and "virtual_workers" in strategy.written


def check_names(given: RunOptions) -> None:
    """Raise ConfigurationError where psengine has no such strategy, collective, option or value."""
    from psengine.collectives.registry import COLLECTIVES
    from psengine.strategies.registry import resolve_strategy

    resolve_strategy(given.strategy)
    COLLECTIVES.read(given.collective or default_collective())


def _signals(names: str) -> tuple[str, ...]:
    """The signals that end the run; one that is ignored when it begins (nohup's SIGHUP) stays ignored."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if wrong := [name for name in found if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")]:
        raise ConfigurationError(
            f"--signals-to-handle takes names of signals that can be handled (expected as SIGTERM, got {wrong[0]!r})"
        )
    heeded = (name for name in found if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN)
    return tuple(dict.fromkeys([*heeded, "SIGTERM"]))


def _check_independent(parts: RunArguments, strategy: str, *, uses_servers: bool) -> None:
    if not uses_servers:
        raise ConfigurationError(
            "--independent workers have no process group (expected --strategy sync:virtual_workers=V, async,"
            f" sync-server or diloco-server, got {strategy!r}). Give it here also where the script names it"
        )
    if refused := [name for name in parts.torchrun if name not in _INDEPENDENT_OPTIONS]:
        raise ConfigurationError(
            f"--independent workers have no use for torchrun's {', '.join(refused)} (expected of torchrun's"
            f" options only {', '.join(_INDEPENDENT_OPTIONS)}). On several nodes run the line on each, with one"
            " --server-address for all and another --first-worker on each"
        )


def _check_replaceable(given: RunOptions, strategy: str) -> None:
    """Refuse what a script that was written for native DDP cannot do."""
    refused = "--independent" if given.independent else "virtual_workers"
    if given.independent or refused in Specification.parse("strategy", strategy).written:
        raise ConfigurationError(
            f"--replace-ddp runs a script that makes a process group and deals out its data by ranks (expected a"
            f" strategy with both, got {refused}). Fix: leave {refused} out; or --replace-ddp, and change the script:"
            " context = psengine.init() in the place of init_process_group, context.worker and .workers in that of rank"
            " and world size; with virtual workers also psengine.ElasticLoader in that of DataLoader"
        )
