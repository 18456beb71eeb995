"""The graph of a backward: which parameters get gradients, and how often their hooks fire.

One object, chosen when a model is wrapped; ``static_graph`` replaces it::

    EveryParameter   each parameter gets one gradient in each backward            (the default)
    SearchedGraph    those that the outputs depend on; a walk finds the others    (find_unused_parameters)
    StaticGraph      those of the first iteration, as often as they fired then    (static_graph)

Under the latter two the ranks tell each other which parameters they used. A parameter that some rank used is averaged
everywhere; one that no rank used keeps its gradient, None included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Work
from psengine.gradients import error_texts
from psengine.strategies.base import Strategy

logger = logging.getLogger(__name__)


class EveryParameter:
    """Each parameter gets one gradient in each backward.

    Attributes:
        may_rebuild: whether buckets may be laid out again in the order in which gradients arrive.
        takes_long_way: whether a hook has more to do than to count its bucket down.
        records_usage: whether hooks set ``used``, inside no_sync too: gradients accumulated there are exchanged with
            the next backward, even if that one does not use the parameter.
        is_being_counted: whether the coming backward is the one that shows which hooks fire how often.
        counted_nothing: whether in that one no hook fired, so that none may fire later.
        finds_unused: whether some parameters may get no gradient, so that ranks agree which ones.
        has_marked_unused: whether this backward's unused parameters were counted as ready.
        used: by parameter, 1 where this rank used it since the last agreement; after an agreement, where any rank did.
        summed: by parameter, how many ranks used it in the last backward that agreed on it: int32.
        unused: indices of parameters that the last search, or a static graph's first backward, found without gradient.
        never_changed: whether every search found the same ones.
    """

    may_rebuild = True
    takes_long_way = False
    finds_unused = False
    records_usage = False
    is_being_counted = False
    counted_nothing = False
    never_changed = True

    def __init__(self, names: Sequence[str]) -> None:
        self.has_marked_unused = False
        self.used = bytearray(len(names))
        self.summed = torch.zeros(len(names), dtype=torch.int32)
        self.unused: list[int] = []
        self._names = names

    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        """A backward from ``outputs`` is expected; return the parameters that a walk found to get no gradient."""
        self.has_marked_unused = False
        return ()

    def agree(self, *, has_data: bool) -> None:
        """Before backward, on every rank: agree with the other ranks, where that cannot wait for its end."""

    def is_unused_everywhere(self, indices: Sequence[int]) -> bool:
        """Whether the ranks agreed before backward that none uses any of these parameters."""
        return False

    def count(self, index: int) -> None:
        """A parameter's hook fired in the backward that is being counted."""

    def unused_now(self) -> Sequence[int]:
        """A hook fired: return parameters whose gradients count as ready because they will not arrive."""
        return ()

    def agree_at_end(self, *, has_data: bool) -> None:
        """Every bucket of this backward was handed over, on every rank: agree, where that may wait until now."""

    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        """For each of these parameters whether no rank used it; None where some rank used each of them."""
        return None

    def settle(self) -> None:
        """The end of a backward."""

    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        """The error's text for a backward in which some parameters (index to name) got no gradient."""
        return error_texts.unfinished_reduction_message(rank, missing, find_unused=False)

    def describe_repetition(self, rank: int, index: int) -> str:
        """The error's text for a parameter whose hook fired again after its gradient was ready."""
        return error_texts.marked_twice_message(index, self._names[index], has_marked_unused=self.has_marked_unused)


class _UsedParameters(EveryParameter):
    """The used-map of one replica, which ``strategy`` sums over ranks on ``device``."""

    takes_long_way = True
    finds_unused = True

    def __init__(self, names: Sequence[str], device: torch.device, strategy: Strategy) -> None:
        super().__init__(names)
        self.summed = self.summed.to(device)
        self._strategy = strategy
        self._work: Work | None = None
        self._unused_everywhere: set[int] = set()

    def _reduce(self, *, has_data: bool = True) -> None:
        """Begin summing this rank's map over ranks; without data it used nothing. ``settle`` waits for the sum."""
        used = torch.frombuffer(bytearray(self.used), dtype=torch.uint8) * has_data
        self.summed = used.to(torch.int32).to(self.summed.device)
        self._work = self._strategy.reduce_usage(self.summed)

    def _take_sum(self) -> None:
        """Wait for a sum in flight, if there is one; from then on ``used`` holds the usage of all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.used = bytearray(self.summed.ne(0).to(torch.uint8).tolist())

    @override
    def unused_now(self) -> Sequence[int]:
        """At the first hook of a backward: parameters that get no gradient must not hold up their buckets."""
        if self.has_marked_unused:
            return ()
        self.has_marked_unused = True
        return self.unused

    @override
    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        if 0 not in self.used or all(self.used[index] for index in indices):
            return None  # without waiting for the other ranks
        self._take_sum()
        unused = [not self.used[index] for index in indices]
        return unused if any(unused) else None

    @override
    def settle(self) -> None:
        self._take_sum()  # ranks must not sum two maps at once
        self._unused_everywhere = set()


class SearchedGraph(_UsedParameters):
    """Before each backward the graph is walked from the outputs to the parameters' accumulation ``nodes``.

    With ``skips_buckets`` ranks agree before backward which parameters nobody uses, and skip buckets without others.
    """

    may_rebuild = False
    records_usage = True

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        strategy: Strategy,
        nodes: Sequence[Any],
        *,
        skips_buckets: bool,
    ) -> None:
        super().__init__(names, device, strategy)
        self._index_of_node = {node: index for index, node in enumerate(nodes)}
        self._skips_buckets = skips_buckets
        self._has_searched = False
        self._has_warned = False

    @override
    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        super().begin(outputs)
        previously_unused = self.unused
        with torch.autograd.profiler.record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            self.unused = self._unreached(outputs)
        if self._has_searched and self.unused != previously_unused:
            self.never_changed = False
        self._has_searched = True
        if not self.unused and not self._has_warned:
            self._has_warned = True
            logger.warning(error_texts.NONE_UNUSED_MESSAGE)
        return self.unused

    def _unreached(self, outputs: Iterable[torch.Tensor]) -> list[int]:
        stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(stack)
        missing = set(self._index_of_node)
        while stack and missing:
            for node, _ in stack.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    missing.discard(node)
                    stack.append(node)
        return sorted(self._index_of_node[node] for node in missing)

    @override
    def agree(self, *, has_data: bool) -> None:
        """Agree which parameters no rank uses; parameters used inside no_sync count as used. Blocks."""
        if not self._skips_buckets:
            return
        used = torch.full((len(self.used),), int(has_data), dtype=torch.int32)
        used[[index for index in self.unused if not self.used[index]]] = 0
        used = used.to(self.summed.device)
        self._strategy.reduce_usage(used).wait()
        self._unused_everywhere = {index for index, count in enumerate(used.tolist()) if count == 0}

    @override
    def is_unused_everywhere(self, indices: Sequence[int]) -> bool:
        return self._unused_everywhere.issuperset(indices)

    @override
    def agree_at_end(self, *, has_data: bool) -> None:
        self._reduce(has_data=has_data)

    @override
    def settle(self) -> None:
        super().settle()
        self.used = bytearray(len(self.used))

    @override
    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        return error_texts.unfinished_reduction_message(rank, missing, find_unused=True)


class StaticGraph(_UsedParameters):
    """The user promises that the graph never changes: its first iteration is counted, every later one is the same.

    The parameters that some rank used in the first iteration count as used for good.

    Attributes:
        counts: by parameter, how often its hook fired in the first iteration.
    """

    def __init__(self, names: Sequence[str], device: torch.device, strategy: Strategy) -> None:
        super().__init__(names, device, strategy)
        self._set_counting(True)
        self.counts = [0] * len(names)

    def _set_counting(self, counts: bool) -> None:
        self.is_being_counted = self.records_usage = counts
        # Those that get no gradient are marked as ready at the first hook.
        self.takes_long_way = counts or bool(self.unused)

    @override
    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        super().begin(outputs)
        if self.is_being_counted:
            self.counts = [0] * len(self._names)  # an earlier attempt may have raised half-way
        return ()

    @override
    def agree(self, *, has_data: bool) -> None:
        """A rank without data takes part in the exchange of used-maps that ``learn`` begins on the others."""
        if self.is_being_counted and not has_data:
            self._reduce(has_data=False)
            self._set_counting(False)

    @override
    def count(self, index: int) -> None:
        self.counts[index] += 1

    def learn(self) -> None:
        """The first iteration is over: parameters that it did not use stay unused; begin to exchange the used-maps."""
        self._reduce()
        self.unused = [index for index, count in enumerate(self.counts) if count == 0]
        self._set_counting(False)
        self.counted_nothing = self.records_usage = not any(self.counts)

    @override
    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        return error_texts.graph_changed_message(rank, missing)

    @override
    def describe_repetition(self, rank: int, index: int) -> str:
        if self.counted_nothing:
            return error_texts.counted_nothing_message(rank)
        return error_texts.newly_used_message(self._names[index], rank)
