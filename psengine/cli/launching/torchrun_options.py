"""torchrun's options: which there are, what they say, and where the nodes meet if they say nothing."""

from __future__ import annotations

import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch.distributed.run as torchrun

from psengine.errors import ConfigurationError


def torchrun_options() -> dict[str, bool]:
    """Each option of torchrun to whether it takes a value."""
    return {
        option: action.nargs != 0
        for action in torchrun.get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def parse_torchrun(options: Mapping[str, str | None], script: Sequence[str]) -> Namespace:
    """What torchrun's own parser makes of its options, and of its ``PET_*`` variables.

    Raises:
        ConfigurationError: a value that an option cannot have.
    """
    parser: ArgumentParser = torchrun.get_args_parser()

    def fail(message: str) -> NoReturn:
        raise ConfigurationError(message)

    parser.error = fail  # type: ignore[method-assign]
    given = [part for name, value in options.items() for part in ([name] if value is None else [name, value])]
    namespace: Namespace = parser.parse_args([*given, *script])
    return namespace


def node_counts(options: Namespace) -> tuple[int, int]:
    """How many nodes ``--nnodes`` says take part: (MIN, MAX).

    Raises:
        ConfigurationError: not N or MIN:MAX with 0 < MIN <= MAX.
    """
    try:
        minimum, maximum = torchrun.parse_min_max_nnodes(options.nnodes)
        if 0 < minimum <= maximum:
            return minimum, maximum
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
        if options.rdzv_id == "none":
            options.rdzv_id = str(uuid.uuid4())
        # Names of containers and laptops often have no address.
        options.local_addr = options.local_addr or "127.0.0.1"
        return
    if not is_named:
        raise ConfigurationError(
            f"--nnodes {options.nnodes} needs an address at which the nodes meet (expected --rdzv-endpoint HOST:PORT"
            " with a host of theirs and a free port; got none). Run the same line on every node, for example:\n"
            f"  psengine run --nnodes {options.nnodes} --rdzv-endpoint node-0:29400 ..."
        )
    if options.rdzv_endpoint and options.rdzv_backend == "static":
        options.rdzv_backend = "c10d"
        if options.rdzv_id == "none":
            options.rdzv_id = "psengine"
    if options.master_port is None:
        options.master_port = 29500
