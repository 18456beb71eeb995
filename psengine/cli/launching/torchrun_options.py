"""torchrun's options: which there are, what they say, and where the nodes meet if they say nothing."""

from __future__ import annotations

import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed.run as torchrun
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from psengine.errors import ConfigurationError


def torchrun_options() -> dict[str, bool]:
    """Each option of torchrun to whether it takes a value."""
    return {
        option: action.nargs != 0
        for action in torchrun.get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def parse_torchrun(options: Sequence[str], script: Sequence[str]) -> Namespace:
    """What torchrun's own parser makes of its options, and of its ``PET_*`` variables.

    Raises:
        ConfigurationError: a value that an option cannot have.
    """
    parser: ArgumentParser = torchrun.get_args_parser()

    def fail(message: str) -> NoReturn:
        raise ConfigurationError(message)

    parser.error = fail  # type: ignore[method-assign]
    namespace: Namespace = parser.parse_args([*options, *script])
    return namespace


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many nodes take part: torchrun's MIN:MAX."""

    minimum: int
    maximum: int


def node_counts(options: Namespace) -> Nodes:
    """What ``--nnodes`` says.

    Raises:
        ConfigurationError: not N or MIN:MAX with 0 < MIN <= MAX.
    """
    try:
        minimum, maximum = torchrun.parse_min_max_nnodes(options.nnodes)
        if 0 < minimum <= maximum:
            return Nodes(minimum=minimum, maximum=maximum)
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
    try:
        count = int(torchrun.determine_local_world_size(nproc_per_node))
    except ValueError as error:
        raise ConfigurationError(
            f"--workers is a number of processes, or auto, cpu, gpu or xpu (got {nproc_per_node!r}: {error})"
        ) from None
    if count < 1:
        raise ConfigurationError(f"--workers is a number of processes (expected at least 1, got {count})")
    return count


def choose_meeting_point(options: Namespace, nodes: Nodes) -> None:
    """Fill in where the nodes' agents meet: one node, on a free port of its own; several, where the user says.

    Raises:
        ConfigurationError: several nodes, and no address; no such backend; an address that is none.
    """
    if options.standalone and nodes.maximum > 1:
        raise ConfigurationError(
            f"--standalone is one node alone (expected no --nnodes, or --nnodes 1; got --nnodes {options.nnodes}). Fix:"
            " give every node --rdzv-endpoint HOST:PORT in its place"
        )
    backends = sorted(rendezvous_handler_registry._registry)
    if options.rdzv_backend not in backends:
        raise ConfigurationError(
            f"--rdzv-backend is one of those torch has (expected one of {backends}, got {options.rdzv_backend!r})"
        )
    says_where = options.rdzv_endpoint or options.master_port is not None or options.master_addr != "127.0.0.1"
    is_alone = nodes.maximum == 1 and options.rdzv_backend in ("c10d", "static") and not _meets_in_a_file(options)
    if options.standalone or (is_alone and not says_where):
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        if options.standalone or options.rdzv_id == "none":
            options.rdzv_id = str(uuid.uuid4())
        if options.local_addr is None:
            # Names of containers and laptops often have no address.
            options.local_addr = "127.0.0.1"
        return
    if not says_where and not _meets_in_a_file(options):
        raise ConfigurationError(
            f"--nnodes {options.nnodes} needs an address at which the nodes meet (expected --rdzv-endpoint HOST:PORT"
            " with a host of theirs and a free port; got none). Run the same line on every node, for example:\n"
            f"  psengine run --nnodes {options.nnodes} --rdzv-endpoint node-0:29400 ..."
        )
    if options.rdzv_endpoint and options.rdzv_backend == "static":
        options.rdzv_backend = "c10d"
        if options.rdzv_id == "none":
            options.rdzv_id = "psengine"
    if options.rdzv_backend == "c10d" and not _meets_in_a_file(options):
        try:
            parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=0)
        except ValueError as error:
            raise ConfigurationError(
                f"--rdzv-endpoint is HOST:PORT (expected a host and a port, got {options.rdzv_endpoint!r}): {error}"
            ) from None
    if options.master_port is None:
        options.master_port = 29500


def _meets_in_a_file(options: Namespace) -> bool:
    """Whether the endpoint is a path: torch's c10d backend over a file that all nodes see."""
    return options.rdzv_backend == "c10d" and "store_type=file" in options.rdzv_conf.replace(" ", "")
