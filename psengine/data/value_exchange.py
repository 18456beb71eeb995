"""A call that all ranks make with a value each: checked to be alike on every rank before any of it is used.

A call begins with one block of ``BLOCK_BYTES`` from each rank, gathered by all::

    32 bytes   digest of what the rank calls, and of its value's structure
     8 bytes   size of its payload
   216 bytes   the payload, where it fits on the host; else it travels in a collective operation of its own

No torch operator runs between the value and its block, nor between the blocks and their sum, if the value is numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import numbers
import operator
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.base import Collective
from psengine.collectives.registry import collective_for, default_group
from psengine.environment.context import group_place
from psengine.errors import ArgumentTypeError, ConfigurationError, PSEngineError, ReplicaMismatchError
from psengine.tensors.leaves import CPU, Description, Leaf, Walk, is_real_scalar, rebuild, to_float

HEADER_BYTES = 40
BLOCK_BYTES = 256
NUMBER_BYTES = 8


class _Transport:
    """What calls in one group keep from one to the next.

    Attributes:
        backends: of the group, by type of device.
    """

    def __init__(self, process_group: Any, world_size: int) -> None:
        self.backends = _backends_of(process_group)
        self._world_size = world_size
        # More than one where threads call at once.
        self._blocks: list[_Blocks] = []

    def take_blocks(self) -> _Blocks:
        """Memory for one call, until ``give_back``."""
        return self._blocks.pop() if self._blocks else _Blocks(self._world_size)

    def give_back(self, blocks: _Blocks) -> None:
        """The content is no longer needed."""
        self._blocks.append(blocks)


class _Blocks:
    """The block of this rank and those of all, as bytes and as tensors of the same memory."""

    def __init__(self, world_size: int) -> None:
        self.own, self.gathered = bytearray(BLOCK_BYTES), bytearray(world_size * BLOCK_BYTES)
        self.own_tensor = torch.frombuffer(self.own, dtype=torch.uint8)
        self.gathered_tensor = torch.frombuffer(self.gathered, dtype=torch.uint8)


# By collective, whose group they must not keep alive.
_transports: weakref.WeakKeyDictionary[Collective, _Transport] = weakref.WeakKeyDictionary()


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
        process_group = process_group or default_group()
        if process_group is None:
            check_has_met(None, verb.partition(" ")[0])
        self._verb = verb
        self._value = value
        self.collective = collective_for(process_group)
        self.world_size = self.collective.world_size
        self._walk = Walk()
        self._walk.visit(value, "value")
        self.leaves = self._walk.leaves
        self.paths = self._walk.paths
        self._header_device, self.device = CPU, CPU
        if self.world_size > 1:
            transport = _transports.get(self.collective)
            if transport is None:
                transport = _transports[self.collective] = _Transport(process_group, self.world_size)
            self._transport = transport
            self._header_device, self.device = _transport_devices(process_group, self.leaves, transport.backends)

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

    def fits_block(self, numbers: int) -> bool:
        """Whether so many numbers travel in the block; alike on all ranks whose values are."""
        return self.device.type == "cpu" and numbers * NUMBER_BYTES <= BLOCK_BYTES - HEADER_BYTES

    def check(
        self, kind: Callable[[Leaf], str], size_bytes: int = 0, payload: bytes = b""
    ) -> tuple[list[int], list[bytearray]]:
        """Make sure that the ranks' values are alike, as far as ``kind`` tells; say how large each rank's payload is.

        Args:
            kind: what must be alike of a leaf.
            size_bytes: of this rank's payload.
            payload: to travel along; empty where it travels otherwise.

        Returns:
            by rank its ``size_bytes``, and what begins with its payload.

        Raises:
            ArgumentTypeError, ConfigurationError: this rank's own value cannot be exchanged.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        if self.world_size == 1:
            for fault in self._walk.faults:
                raise fault
            return [size_bytes], [bytearray(payload)]
        description = {"the call": self._verb, "the transport's device": self.device.type}
        description |= self._walk.description
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            description[path] = kind(leaf)
        digest = _digest(tuple(description.items()))
        blocks = self._transport.take_blocks()
        blocks.own[: HEADER_BYTES + len(payload)] = digest + size_bytes.to_bytes(8, sys.byteorder) + payload
        self._gather_blocks(blocks)
        rows = [blocks.gathered[start : start + BLOCK_BYTES] for start in range(0, len(blocks.gathered), BLOCK_BYTES)]
        self._transport.give_back(blocks)
        if not all(row.startswith(digest) for row in rows):
            text = json.dumps(description).encode()
            texts = self.collective.gather_bytes(text, self._header_device, what="metrics description")
            descriptions: list[Description] = [json.loads(other) for other in texts]
            if not self._walk.faults:
                raise ReplicaMismatchError(_first_difference(descriptions, self.collective.rank))
        for fault in self._walk.faults:
            raise fault
        sizes_bytes = [int.from_bytes(row[len(digest) : HEADER_BYTES], sys.byteorder) for row in rows]
        return sizes_bytes, [row[HEADER_BYTES:] for row in rows]

    def _gather_blocks(self, blocks: _Blocks) -> None:
        what = f"header of {self._verb}()"
        if self._header_device.type == "cpu":
            self.collective.all_gather(blocks.gathered_tensor, blocks.own_tensor, what=what).wait()
        else:
            gathered = self._gather(blocks.own_tensor.to(self._header_device), what)
            blocks.gathered_tensor.copy_(gathered.view(-1))

    def add_numbers(
        self, kind: Callable[[Leaf], str], floats: Sequence[float], integers: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        """Return the sums over ranks of numbers that fit the block, added in the order of ranks, once ``check`` passed.

        Args:
            kind: as of ``check``.
            floats: added in float64.
            integers: within int64; added exactly.
        """
        form = f"={len(floats)}d{len(integers)}q"
        payload = struct.pack(form, *floats, *integers)
        _, rows = self.check(kind, len(payload), payload)
        columns = zip(*(struct.unpack_from(form, row) for row in rows), strict=True)
        totals = [functools.reduce(operator.add, column) for column in columns]
        return totals[: len(floats)], totals[len(floats) :]

    def all_reduce(self, kind: Callable[[Leaf], str], *groups: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the sum over ranks of each addend, with its shape and on its device, once ``check`` has passed.

        Args:
            kind: as of ``check``.
            groups: of addends; those of a group have one dtype, of 8 bytes an element.
        """
        if self.world_size == 1:
            self.check(kind)
            return [list(addends) for addends in groups]
        flats = [self._flat(addends) for addends in groups]
        self.check(kind, sum(flat.nbytes for flat in flats))
        for flat in flats:
            if flat.numel():
                self.collective.sum(flat, what=f"metrics of {self._verb}()")
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
        size_bytes = payload.numel()
        carried = bytearray()
        # Ranks' sizes may differ, so a rank whose payload fits sends it, and looks whether all fitted.
        if self.world_size > 1 and 0 < size_bytes <= BLOCK_BYTES - HEADER_BYTES and self.device.type == "cpu":
            carried = bytearray(size_bytes)
            torch.frombuffer(carried, dtype=torch.uint8).copy_(payload)
        sizes_bytes, rows = self.check(kind, size_bytes, bytes(carried))
        longest = max(sizes_bytes)
        if self.world_size == 1 or longest == 0:
            return [payload] * self.world_size
        if self.device.type == "cpu" and longest <= BLOCK_BYTES - HEADER_BYTES:
            flats = [torch.frombuffer(row, dtype=torch.uint8) for row in rows]
        else:
            padded = torch.cat([payload, payload.new_zeros(longest - size_bytes)])
            flats = list(self._gather(padded, f"metrics of {self._verb}()"))
        return [flat[:size_bytes] for flat, size_bytes in zip(flats, sizes_bytes, strict=True)]

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


def _backends_of(process_group: Any) -> dict[str, str]:
    """The group's backends by type of device."""
    try:
        entries = dist.get_backend_config(process_group).split(",")
    except ValueError:  # a group torch.distributed did not make
        entries = ["cpu:unknown"]
    return dict(entry.split(":", 1) for entry in entries)


def _transport_devices(
    process_group: Any, leaves: Sequence[Leaf], backends: Mapping[str, str]
) -> tuple[torch.device, torch.device]:
    """The devices of the header and of the leaves in transport: the host, or the accelerator that holds the leaves."""
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
