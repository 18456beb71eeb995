"""A call that all ranks make with a value each: checked to be alike on every rank before any of it is used.

A call begins with a digest from each rank, gathered by all: of what the rank calls and of its value's structure. Ranks
whose digests differ exchange what they digested, so that each of them raises the same error instead of waiting.
"""

from __future__ import annotations

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


def check_has_met(process_group: dist.ProcessGroup | None, verb: str) -> None:
    """Refuse to act as a process alone does where the launcher has started others too.

    Raises:
        ConfigurationError: there is no process group; or this worker plays virtual workers, so that others may join,
            who are not in the same call. Names ``verb``, the public function.
    """
    if process_group is None and current_player() is not None:
        raise ConfigurationError(
            f"psengine.{verb}() waits for all workers, and one that joins a training with virtual workers is elsewhere"
            " (expected no such call). Fix: step.record(value) in the loop over step.batches, step.mean() after it."
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

    def check(self, kinds: Mapping[str, str]) -> None:
        """Make sure that all ranks made the same call, with values of the same ``kinds`` by path.

        Raises:
            PSEngineError: the first of this rank's ``faults``.
            ReplicaMismatchError: the ranks called different verbs, or with values of different structure.
        """
        if self.collective.world_size > 1:
            description = {"the call": self.verb, "the transport's device": self.device.type, **kinds}
            description |= {path: kind for path, (kind, _) in self.faults.items()}
            text = json.dumps(description).encode()
            digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
            digests = self.collective.gather(digest.to(self._header_device), what=f"header of {self.verb}()")
            if not all(digests[0].equal(other) for other in digests):
                texts = self.collective.gather_bytes(text, self._header_device, what="metrics description")
                if not self.faults:
                    raise ReplicaMismatchError(first_difference(list(map(json.loads, texts)), self.collective.rank))
        for _, fault in self.faults.values():
            raise fault

    def all_reduce(self, kinds: Mapping[str, str], *groups: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the sum over ranks of each addend, with its shape and on its device, once ``check`` has passed.

        Args:
            kinds: as of ``check``.
            groups: of addends; those of a group have one dtype, float64 or int64.
        """
        self.check(kinds)
        if self.collective.world_size == 1:
            return [list(group) for group in groups]
        return [self._totals(group) if group else [] for group in groups]

    def _totals(self, group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([addend.reshape(-1).to(self.device) for addend in group])
        if flat.numel():
            self.collective.sum(flat, what=f"metrics of {self.verb}()")
        totals = flat.split([addend.numel() for addend in group])
        return [total.to(addend.device).view(addend.shape) for total, addend in zip(totals, group, strict=True)]


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
