"""A call that all ranks make with a value each: checked to be alike on every rank before any of it is used.

A call begins with one block of ``BLOCK_BYTES`` from each rank, gathered by all::

    32 bytes   digest of what the rank calls, and of its value's structure
     8 bytes   size of its payload
   216 bytes   the payload, where it fits on the host; else it travels in a collective operation of its own
"""

from __future__ import annotations

import functools
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

HEADER_BYTES = 40
BLOCK_BYTES = 256


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

    def check(
        self, kind: Callable[[Leaf], str], size_bytes: int = 0, payload: torch.Tensor | None = None
    ) -> tuple[list[int], torch.Tensor | None]:
        """Make sure that the ranks' values are alike, as far as ``kind`` tells; say how large each rank's payload is.

        Args:
            kind: what must be alike of a leaf.
            size_bytes: of this rank's payload.
            payload: flat uint8 of ``size_bytes``, to travel along where it fits; None where it travels otherwise.

        Returns:
            each rank's ``size_bytes``, and for each rank a row that begins with its payload, or None where one did not
            fit.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's own value cannot be exchanged.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        sizes_bytes, rows = [size_bytes], None
        if self.world_size > 1:
            description = {"the call": self._verb, "the transport's device": self.device.type}
            description |= self._walk.description
            description |= {path: kind(leaf) for path, leaf in zip(self.paths, self.leaves, strict=True)}
            content = bytearray(BLOCK_BYTES)
            content[:HEADER_BYTES] = _digest(tuple(description.items())) + size_bytes.to_bytes(8, sys.byteorder)
            block = torch.frombuffer(content, dtype=torch.uint8)
            may_fit = payload is not None and self.device.type == "cpu"  # alike on all ranks, whose digests say so
            if payload is not None and may_fit and size_bytes <= BLOCK_BYTES - HEADER_BYTES:
                block[HEADER_BYTES : HEADER_BYTES + size_bytes] = payload
            blocks = self._gather(block.to(self._header_device), f"header of {self._verb}()")
            headers = blocks.view(torch.int64)[:, : HEADER_BYTES // 8].tolist()
            if any(h[:4] != headers[0][:4] for h in headers):
                text = json.dumps(description).encode()
                texts = self.collective.gather_bytes(text, self._header_device, what="metrics description")
                descriptions: list[Description] = [json.loads(other) for other in texts]
                if not self._walk.faults:
                    raise ReplicaMismatchError(_first_difference(descriptions, self.collective.rank))
            sizes_bytes = [h[4] for h in headers]
            if may_fit and max(sizes_bytes) <= BLOCK_BYTES - HEADER_BYTES:
                rows = blocks[:, HEADER_BYTES:]
        for fault in self._walk.faults:
            raise fault
        return sizes_bytes, rows

    def all_reduce(self, kind: Callable[[Leaf], str], *groups: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the sum over ranks of each addend, with its shape and on its device, once ``check`` has passed.

        What fits the block is added in the order of ranks; the rest as the collective adds.

        Args:
            kind: as of ``check``.
            groups: of addends; those of a group have one dtype, of 8 bytes an element.
        """
        if self.world_size == 1:
            self.check(kind)
            return [list(addends) for addends in groups]
        flats = [self._flat(addends) for addends in groups]
        payload = torch.cat([flat.view(torch.uint8) for flat in flats])
        _, rows = self.check(kind, payload.numel(), payload)
        start = 0
        for flat in flats:
            if rows is None:
                if flat.numel():
                    self.collective.sum(flat, what=f"metrics of {self._verb}()")
                continue
            first, *others = rows[:, start : start + flat.nbytes].view(flat.dtype)
            flat.copy_(first)
            for other in others:
                flat.add_(other)
            start += flat.nbytes
        return [self._parts(flat, addends) for flat, addends in zip(flats, groups, strict=True)]

    def _flat(self, addends: Sequence[torch.Tensor]) -> torch.Tensor:
        if not addends:
            return torch.empty(0, dtype=torch.float64, device=self.device)
        return torch.cat([addend.reshape(-1).to(self.device) for addend in addends])

    @staticmethod
    def _parts(flat: torch.Tensor, addends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        totals = flat.split([addend.numel() for addend in addends]) if addends else ()
        return [total.to(addend.device).view(addend.shape) for total, addend in zip(totals, addends, strict=True)]

    def gather(self, kind: Callable[[Leaf], str], payload: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's flat uint8 ``payload``, of any size, once ``check`` has passed."""
        sizes_bytes, rows = self.check(kind, payload.numel(), payload)
        longest = max(sizes_bytes)
        if self.world_size == 1 or longest == 0:
            return [payload] * self.world_size
        if rows is None:
            padded = torch.cat([payload, payload.new_zeros(longest - payload.numel())])
            rows = self._gather(padded, f"metrics of {self._verb}()")
        return [flat[:size_bytes] for flat, size_bytes in zip(rows, sizes_bytes, strict=True)]

    def _gather(self, flat: torch.Tensor, what: str) -> torch.Tensor:
        rows = flat.new_empty((self.world_size, flat.numel()))
        self.collective.all_gather(rows, flat, what=what).wait()
        return rows

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value's structure, in new containers, around ``leaves``."""
        return rebuild(self._value, iter(leaves))


@functools.lru_cache(maxsize=64)
def _digest(description: tuple[tuple[str, str], ...]) -> bytes:
    return hashlib.sha256(json.dumps(description).encode()).digest()


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
