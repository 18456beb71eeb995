"""Which rank's gradient is not finite, in which parameter: exchanged before averages are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.base import Collective
from psengine.errors import NonFiniteGradientError
from psengine.tensors.bucket import Bucket


class FiniteCheck:
    """Collects what packing counted (``Bucket.take_non_finite_counts``) and lets the ranks tell each other.

    Where the ranks do not wait for each other (``Capabilities.averages_gradients``), the one with the fault raises
    before the bucket leaves.
    """

    def __init__(self, names: Sequence[str], collective: Collective, *, tells_others: bool) -> None:
        self._collective = collective
        self._names = names
        self._tells_others = tells_others
        # By device, which is read once: indices of parameters, and how many of their values are not finite.
        self._found: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A backward is expected; forget an earlier one."""
        self._found = {}
        for bucket in buckets:
            bucket.take_non_finite_counts()

    def note(self, bucket: Bucket) -> None:
        """``bucket`` is packed and about to leave, or was converted when it left.

        Raises:
            NonFiniteGradientError: it holds the fault, and the other ranks cannot be told.
        """
        for position, counts in bucket.take_non_finite_counts():
            indices, parts = self._found.setdefault(counts.device, ([], []))
            indices += bucket.parameter_indices[position : position + counts.numel()]
            parts.append(counts)
        if not self._tells_others:
            self._raise_faults({self._collective.rank: self._take_local_fault()})

    def agree(self, device: torch.device) -> None:
        """Exchange findings; inside ``join`` ranks without data take part.

        Raises:
            NonFiniteGradientError: on every rank, where some rank's gradients are not finite.
        """
        if self._tells_others:
            fault = torch.tensor(self._take_local_fault(), device=device)
            faults = self._collective.gather(fault, what="counts of gradients that are not finite")
            self._raise_faults({rank: row.tolist() for rank, row in enumerate(faults)})

    def _take_local_fault(self) -> list[int]:
        """How many values are not finite, in how many parameters, and the index of the first such parameter."""
        found, self._found = self._found, {}
        counts_by_index = {
            index: count
            for indices, parts in found.values()
            for index, count in zip(indices, torch.cat(parts).tolist(), strict=True)
            if count
        }
        return [sum(counts_by_index.values()), len(counts_by_index), min(counts_by_index, default=0)]

    def _raise_faults(self, faults: dict[int, list[int]]) -> None:
        faulty = {rank: fault for rank, fault in faults.items() if fault[0]}
        if not faulty:
            return
        lines = [
            f"rank {rank}: {values} values, first in parameter {self._names[first]!r}"
            + (f" and {parameters - 1} more" if parameters > 1 else "")
            for rank, (values, parameters, first) in faulty.items()
        ]
        raise NonFiniteGradientError(
            "gradients must be finite, as they travel (check_finite=True), got NaN or infinity on "
            + "; ".join(lines)
            + ". No average was copied to a gradient. torch.autograd.set_detect_anomaly(True) finds the operation.",
            ranks=tuple(faulty),
            parameters=tuple(dict.fromkeys(self._names[first] for _, _, first in faulty.values())),
        )
