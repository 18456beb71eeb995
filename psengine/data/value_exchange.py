"""A call that all ranks make with a value each: checked to be alike on every rank before any of it is used.

A call begins with one block of ``BLOCK_BYTES`` from each rank, gathered by all: a digest of what the rank calls and of
its value's structure, and a few numbers, if they fit. Ranks whose digests differ exchange what they digested, so that
each of them raises the same error instead of waiting.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from psengine.collectives.registry import CPU, collective_for, default_group
from psengine.environment.context import group_place
from psengine.errors import ConfigurationError, PSEngineError, ReplicaMismatchError
from psengine.strategies.elastic.player import current_player
from psengine.tensors.leaves import first_difference

DIGEST_BYTES = 32
BLOCK_BYTES = 256
# So that a group without addends has a flat tensor; of the narrowest dtype, which no other one is promoted to.
_NOTHING = torch.empty(0, dtype=torch.bool, device=CPU)


def check_has_met(process_group: dist.ProcessGroup | None, verb: str) -> None:
    """Refuse to act as a process alone does where the launcher has started others too.

    Raises:
        ConfigurationError: there is no process group; or this worker plays virtual workers, so that others may join,
            who are not in the same call. Names ``verb``, the public function.
    """
    if process_group is None and current_player() is not None:
        raise ConfigurationError(
            f"psengine.{verb}() waits for all workers to make the same call, and a worker that joins a training with"
            " virtual workers is elsewhere (expected none beside sync:virtual_workers=, got one). Fix:"
            " step.record(value) in the loop over step.batches, and step.mean() after it."
        )
    if process_group is None and default_group() is None and (world_size := group_place()[1]) > 1:
        raise ConfigurationError(
            f"psengine.{verb}() needs the process group (expected psengine.init() before it and no shutdown() since,"
            f" got no group in a process that is one of {world_size})"
        )


class ValueExchange:
    """One call of this rank, and the ranks that make it too.

    Args:
        verb: the call's name; all ranks make the same call.
        process_group: the ranks; None means the default group, or this process alone without one.
        values: what travels, of which the tensors say where.

    Raises:
        ConfigurationError: the launcher started several ranks, and there is no process group.

    Attributes:
        collective: exchanges with the other ranks.
        device: where values travel.
        faults: by path, the kind that the other ranks are told, and the error that ``check`` then raises on this one.
    """

    def __init__(self, verb: str, process_group: Any, values: Sequence[Any] = ()) -> None:
        check_has_met(process_group, verb)
        process_group = process_group or default_group()
        self.verb = verb
        self.collective = collective_for(process_group)
        self._header_device, self.device = CPU, CPU
        if self.collective.world_size > 1:
            self._header_device, self.device = _transport_devices(process_group, values)
        self.faults: dict[str, tuple[str, PSEngineError]] = {}

    def check(self, kinds: Mapping[str, str], payload: torch.Tensor = _NOTHING) -> torch.Tensor:
        """Make sure that all ranks made the same call, with values of the same ``kinds`` by path.

        Args:
            kinds: what must be alike.
            payload: bytes that travel along, 1-D uint8 on the host, at most BLOCK_BYTES - DIGEST_BYTES.

        Returns:
            every rank's payload: a row for each rank.

        Raises:
            PSEngineError: the first of this rank's ``faults``.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        rows = payload.unsqueeze(0)
        if self.collective.world_size > 1:
            description = {"the call": self.verb, "the transport's device": self.device.type, **kinds}
            description |= {path: kind for path, (kind, _) in self.faults.items()}
            digest = hashlib.sha256(json.dumps(description).encode()).digest()
            block = torch.frombuffer(bytearray(digest).ljust(BLOCK_BYTES), dtype=torch.uint8)
            block[DIGEST_BYTES : DIGEST_BYTES + payload.numel()] = payload
            block = block.to(self._header_device)
            gathered = block.new_empty((self.collective.world_size, BLOCK_BYTES))
            self.collective.all_gather(gathered, block, what=f"header of {self.verb}()").wait()
            gathered = gathered.cpu()
            if (gathered[:, :DIGEST_BYTES] != gathered[0, :DIGEST_BYTES]).any():
                text = json.dumps(description).encode()
                texts = self.collective.gather_bytes(text, self._header_device, what="metrics description")
                if not self.faults:
                    raise ReplicaMismatchError(first_difference(list(map(json.loads, texts)), self.collective.rank))
            rows = gathered[:, DIGEST_BYTES : DIGEST_BYTES + payload.numel()]
        for _, fault in self.faults.values():
            raise fault
        return rows

    def all_reduce(self, kinds: Mapping[str, str], *groups: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the sum over ranks of each addend, with its shape and on its device, once ``check`` has passed.

        Args:
            kinds: as of ``check``.
            groups: of addends; those of a group have one dtype, float64 or int64. Few numbers travel with the header,
                and are added in the order of ranks.
        """
        if self.collective.world_size == 1:
            self.check({})
            return [list(group) for group in groups]
        flats = [torch.cat([addend.reshape(-1).to(self.device) for addend in (_NOTHING, *group)]) for group in groups]
        sizes = [flat.nbytes for flat in flats]
        if self.device.type == "cpu" and sum(sizes) <= BLOCK_BYTES - DIGEST_BYTES:
            rows = self.check(kinds, torch.cat([flat.view(torch.uint8) for flat in flats])).split(sizes, dim=1)
            parts = [row.contiguous().clone().view(flat.dtype) for row, flat in zip(rows, flats, strict=True)]
            flats = [functools.reduce(torch.add, part) for part in parts]
        else:
            self.check(kinds)
            for flat in flats:
                if flat.numel():
                    self.collective.sum(flat, what=f"metrics of {self.verb}()")
        return [
            [
                total.to(addend.device).view(addend.shape)
                for total, addend in zip(flat.split([addend.numel() for addend in group]), group, strict=True)
            ]
            for flat, group in zip(flats, groups, strict=True)
        ]


def _transport_devices(process_group: Any, values: Sequence[Any]) -> tuple[torch.device, torch.device]:
    """The devices of the header and of the values in transport: the host, or the accelerator that holds the values."""
    try:
        entries = dist.get_backend_config(process_group).split(",")
    except ValueError:  # a group torch.distributed did not make
        entries = ["cpu:unknown"]
    backends = dict(entry.split(":", 1) for entry in entries)
    host_backend = backends.get("cpu")
    for value in values:
        if isinstance(value, torch.Tensor) and backends.get(value.device.type, host_backend) != host_backend:
            return (value.device if host_backend is None else CPU), value.device
    if host_backend is not None:
        return CPU, CPU
    kind = next(iter(backends))
    device = getattr(process_group, "bound_device_id", None)
    device = device or torch.device(kind, torch.get_device_module(kind).current_device())
    return device, device
