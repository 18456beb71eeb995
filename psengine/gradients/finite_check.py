"""Whose gradient is not finite, in which parameter: asked at the end of a backward, before an average is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError
from psengine.tensors.bucket import Bucket


class FiniteCheck:
    """Collects what packing counted (``Bucket.take_non_finite_counts``) and lets the ranks tell each other.

    Where a strategy's replicas cannot tell each other (``Capabilities.gathers``), the one with the fault raises before
    the bucket leaves.

    Args:
        names: of all parameters, by index; the same on every rank.
        collective: carries the ranks' findings.
        tells_others: whether replicas can tell each other.
    """

    def __init__(self, names: Sequence[str], collective: Collective, *, tells_others: bool) -> None:
        self._names = names
        self.collective = collective
        self._tells_others = tells_others
        self._found: list[tuple[Bucket, int, torch.Tensor]] = []

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A backward is expected; forget an earlier one."""
        self._found = []
        for bucket in buckets:
            bucket.take_non_finite_counts()

    def note(self, bucket: Bucket) -> None:
        """``bucket`` is packed and about to leave, or was converted when it left.

        Raises:
            NonFiniteGradientError: it holds the fault, and the other ranks cannot be told.
        """
        self._found += [(bucket, position, counts) for position, counts in bucket.take_non_finite_counts()]
        if not self._tells_others:
            error = self._describe([self._local_fault()], [self.collective.rank])
            self._found = []
            if error is not None:
                raise error

    def agree(self, device: torch.device) -> NonFiniteGradientError | None:
        """Exchange findings and return the error that every rank is to raise; None where all gradients are finite."""
        if not self._tells_others:
            return None
        fault = torch.tensor(self._local_fault(), device=device)
        self._found = []
        faults = self.collective.gather(fault, what="counts of gradients that are not finite")
        return self._describe([row.tolist() for row in faults], range(len(faults)))

    def _local_fault(self) -> list[int]:
        """How many values are not finite, in how many parameters, and the index of the first such parameter."""
        if self._count_values() == 0:
            return [0, 0, 0]
        values, indices = 0, []
        for bucket, position, counts in self._found:
            for offset, count in enumerate(counts.tolist()):
                if count:
                    values += count
                    indices.append(bucket.parameter_indices[position + offset])
        return [values, len(indices), min(indices)]

    def _count_values(self) -> int:
        """Their number, with one look at each device."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, _, counts in self._found:
            by_device.setdefault(counts.device, []).append(counts)
        return sum(int(torch.cat(counts).sum().item()) for counts in by_device.values())

    def _describe(self, faults: Sequence[Sequence[int]], ranks: Sequence[int]) -> NonFiniteGradientError | None:
        faulty = {rank: fault for rank, fault in zip(ranks, faults, strict=True) if fault[0]}
        if not faulty:
            return None
        lines = [
            f"rank {rank}: {values} values, first in parameter {self._names[first]!r}"
            + (f" and {parameters - 1} more" if parameters > 1 else "")
            for rank, (values, parameters, first) in faulty.items()
        ]
        names = tuple(dict.fromkeys(self._names[first] for _, _, first in faulty.values()))
        return NonFiniteGradientError(
            "gradients must be finite, as they travel (check_finite=True), got NaN or infinity on "
            + "; ".join(lines)
            + ". No average was copied to a gradient. torch.autograd.set_detect_anomaly(True) finds the operation.",
            ranks=tuple(faulty),
            parameters=names,
        )

    def add_shadow(self, device: torch.device) -> None:
        """Take part in the exchange for a rank without data, inside ``join``."""
        if self._tells_others:
            error = self.agree(device)
            if error is not None:
                raise error
