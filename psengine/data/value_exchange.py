"""A call that all ranks make with a value each: checked to be alike on every rank before anything else travels."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.registry import collective_for, default_group
from psengine.environment.context import group_place
from psengine.errors import ArgumentTypeError, ConfigurationError, PSEngineError, ReplicaMismatchError
from psengine.tensors.leaves import CPU, Description, Leaf, Walk, is_real_scalar, rebuild, to_float


def check_has_met(process_group: dist.ProcessGroup | None, verb: str) -> None:
    """Refuse to act as a process alone does where the launcher has started others too.

    Raises:
        ConfigurationError: there is no process group; names ``verb``, the public function.
    """
    if process_group is None and default_group() is None and (world_size := group_place()[1]) > 1:
        raise ConfigurationError(
            f"psengine.{verb}() needs the process group (expected psengine.init() before it and no shutdown() since,"
            f" got no group in a process that is one of {world_size})"
        )


class ValueExchange:
    """One call's value on this rank, and the ranks it is exchanged with.

    Args:
        verb: the call's name; all ranks make the same call.
        value: numbers and tensors, nested at will.
        process_group: the ranks; None means the default group, or this process alone without one.

    Raises:
        ConfigurationError: the launcher started several ranks, and there is no process group.

    Attributes:
        collective: exchanges with the other ranks.
        leaves, paths: the value's numbers and tensors, and where each stands.
        device: where leaves travel.
    """

    def __init__(self, verb: str, value: Any, process_group: Any) -> None:
        check_has_met(process_group, verb.partition(" ")[0])
        self._verb = verb
        self._value = value
        process_group = process_group or default_group()
        self.collective = collective_for(process_group)
        self.world_size = self.collective.world_size
        self._walk = Walk()
        self._walk.visit(value, "value")
        self.leaves = self._walk.leaves
        self.paths = self._walk.paths
        self._header_device, self.device = CPU, CPU
        if self.world_size > 1:
            self._header_device, self.device = _transport_devices(process_group, self.leaves)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.collective.rank

    def add_fault(self, path: str, kind: str, error: PSEngineError) -> None:
        """Let ``check`` raise ``error`` on this rank, after the others were told that it has ``kind`` at ``path``."""
        self._walk.add_fault(path, kind, error)

    def check_weight(self, weight: Any) -> float:
        """Return the weight as a number, 1 for None; ``check`` raises where the weight is refused."""
        if weight is None:
            return 1.0
        self._verb = "mean with a weight"
        if not isinstance(weight, numbers.Real) and not is_real_scalar(weight):
            got = type(weight).__name__
            message = f"mean(weight=) is one real number a rank, such as its sample count (expected a float, got {got})"
            self._walk.add_fault("weight", got, ArgumentTypeError(message))
            return 1.0
        share = to_float(weight)
        if not 0 <= share < math.inf:
            message = f"mean(weight=) says how much a rank counts (expected a finite number >= 0, got {share})"
            self._walk.add_fault("weight", f"{share}", ConfigurationError(message))
        return share

    def check(self, kind: Callable[[Leaf], str], size_bytes: int = 0) -> list[int]:
        """Make sure that the ranks' values are alike, as far as ``kind`` tells; return each rank's ``size_bytes``.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's own value cannot be exchanged.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        sizes_bytes = [size_bytes]
        if self.world_size > 1:
            description = {"the call": self._verb, "the transport's device": self.device.type}
            description |= self._walk.description
            description |= {path: kind(leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)}
            payload = json.dumps(description).encode()
            header = hashlib.sha256(payload).digest() + size_bytes.to_bytes(8, sys.byteorder)
            flat = torch.frombuffer(bytearray(header), dtype=torch.int64).to(self._header_device)
            headers = [t.tolist() for t in self.collective.gather(flat, what=f"header of {self._verb}()")]
            if any(h[:4] != headers[0][:4] for h in headers):
                payloads = self.collective.gather_bytes(payload, self._header_device, what="metrics description")
                descriptions: list[Description] = [json.loads(other) for other in payloads]
                if not self._walk.faults:
                    raise ReplicaMismatchError(_first_difference(descriptions, self.collective.rank))
            sizes_bytes = [h[4] for h in headers]
        for fault in self._walk.faults:
            raise fault
        return sizes_bytes

    def all_reduce(self, addends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sum over ranks of each addend, all of one dtype, with its shape and on its device."""
        if self.world_size == 1 or not addends:
            return list(addends)
        flat = torch.cat([addend.reshape(-1).to(self.device) for addend in addends])
        self.collective.sum(flat, what=f"metrics of {self._verb}()")
        totals = flat.split([addend.numel() for addend in addends])
        return [total.to(addend.device).view(addend.shape) for total, addend in zip(totals, addends, strict=True)]

    def gather(self, payload: torch.Tensor, sizes_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's flat payload, of ``sizes_bytes[rank]`` bytes."""
        longest = max(sizes_bytes)
        if self.world_size == 1 or longest == 0:
            return [payload] * self.world_size
        padded = torch.cat([payload, payload.new_zeros(longest - payload.numel())])
        gathered = self.collective.gather(padded, what=f"metrics of {self._verb}()")
        return [flat[:size_bytes] for flat, size_bytes in zip(gathered, sizes_bytes, strict=True)]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value's structure, in new containers, around ``leaves``."""
        return rebuild(self._value, iter(leaves))


def _transport_devices(process_group: Any, leaves: Sequence[Leaf]) -> tuple[torch.device, torch.device]:
    """The devices of the header and of the leaves in transport: the host, or the accelerator that holds the leaves."""
    try:
        entries = dist.get_backend_config(process_group).split(",")
    except ValueError:  # a group torch.distributed did not make
        entries = ["cpu:unknown"]
    backends = dict(entry.split(":", 1) for entry in entries)
    host_backend = backends.get("cpu")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and backends.get(leaf.device.type, host_backend) != host_backend:
            return (leaf.device if host_backend is None else CPU), leaf.device
    if host_backend is not None:
        return CPU, CPU
    kind = next(iter(backends))
    device = getattr(process_group, "bound_device_id", None)
    device = device or torch.device(kind, torch.get_device_module(kind).current_device())
    return device, device


def _first_difference(descriptions: list[Description], this_rank: int) -> str:
    paths = dict.fromkeys(path for description in descriptions for path in description)
    for path in paths:
        kinds = [description.get(path, "nothing") for description in descriptions]
        others: dict[str, list[str]] = {}
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                others.setdefault(kind, []).append(str(rank))
        if others:
            got = ", ".join(f"{kind} on rank {' and '.join(ranks)}" for kind, ranks in others.items())
            return (
                f"every rank makes the same call, with values of the same structure (expected {path} to be {kinds[0]}"
                f" as on rank 0, got {got}; seen on rank {this_rank}). Make the same call, with the same keys, types"
                " and shapes, on every rank."
            )
    return f"the ranks' metrics differ, though not in what can be shown (seen on rank {this_rank})"
