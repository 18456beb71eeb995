"""What is known of a backward's graph: which parameters get gradients, and how often their hooks fire.

One object, chosen when a model is wrapped; ``static_graph`` replaces it::

    EveryParameter   each parameter gets one gradient in each backward            (the default)
    SearchedGraph    those that the outputs depend on; a walk finds the others    (find_unused_parameters)
    StaticGraph      those of the first iteration, as often as they fired then    (static_graph)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from typing_extensions import override

from psengine.gradients.error_texts import graph_changed_message, unfinished_reduction_message
from psengine.gradients.usage import ParameterUsage

logger = logging.getLogger(__name__)


class EveryParameter:
    """Each parameter gets one gradient in each backward.

    Args:
        usage: of the parameters, on this rank and over all.
        names: of the parameters, by index.

    Attributes:
        may_rebuild: whether the order in which gradients arrive is worth following.
        takes_long_way: whether a hook has more to do than to count its bucket down.
        records_usage: whether hooks note which parameters are used, inside no_sync too: what a micro-batch accumulates
            has to be exchanged, whoever uses the parameter last.
        is_being_counted: whether the coming backward is the one that shows which hooks fire how often.
        has_marked_unused: whether this backward's unused parameters were counted as ready.
        has_changed: whether a hook fired in this backward that must not.
    """

    may_rebuild = True
    takes_long_way = False
    records_usage = False
    is_being_counted = False

    def __init__(self, usage: ParameterUsage, names: Sequence[str]) -> None:
        self.usage = usage
        self.has_marked_unused = False
        self.has_changed = False
        self._names = names

    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        """A backward from ``outputs`` is expected; return the parameters that a walk found to get no gradient."""
        self.has_marked_unused = self.has_changed = False
        return ()

    def agree(self, *, has_data: bool) -> None:
        """Before backward, on every rank: agree on what has to be known beforehand."""

    def arrived(self, index: int) -> Sequence[int]:
        """A parameter's hook fired: return the parameters whose gradients are ready now, this one last."""
        return (index,)

    def _with_unused(self, ready: Sequence[int]) -> Sequence[int]:
        """At the first hook of a backward: parameters that get no gradient must not hold up their buckets."""
        if self.has_marked_unused:
            return ready
        self.has_marked_unused = True
        return (*self.usage.unused, *ready)

    @property
    def never_arriving(self) -> Sequence[int]:
        """Parameters whose hooks will not fire, for an order that has to name all."""
        return ()

    def handed_over(self) -> None:
        """Every bucket of this backward was handed over."""

    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        """For each of these parameters whether no rank used it, so that its gradient stays; None: all were used."""
        return None

    def settle(self) -> None:
        """The end of a backward."""

    def restart(self, usage: ParameterUsage) -> None:
        """Forget earlier backwards: the group of ranks is another one. ``usage`` is new."""
        self.usage = usage

    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        """The error's text for a backward in which some parameters (index to name) got no gradient."""
        return unfinished_reduction_message(rank, missing, find_unused=False)

    # ---- a rank without data, inside join ----------------------------------------------------------------------

    def shadow_end(self) -> None:
        """Take part in what other ranks agree on once their buckets were handed over."""


class SearchedGraph(EveryParameter):
    """Before each backward the graph is walked from the outputs.

    Args:
        usage, names: see ``EveryParameter``.
        skips_buckets: ranks agree before backward which parameters nobody uses, and skip buckets that hold no others.
    """

    may_rebuild = False
    takes_long_way = True
    records_usage = True

    def __init__(self, usage: ParameterUsage, names: Sequence[str], *, skips_buckets: bool) -> None:
        super().__init__(usage, names)
        self._skips_buckets = skips_buckets

    @override
    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        super().begin(outputs)
        self.usage.search(outputs)
        return self.usage.unused

    @override
    def agree(self, *, has_data: bool) -> None:
        """Which parameters no rank uses."""
        if self._skips_buckets:
            self.usage.agree_before_backward(has_data=has_data)

    @override
    def arrived(self, index: int) -> Sequence[int]:
        return self._with_unused((index,))

    @override
    def handed_over(self) -> None:
        self.usage.reduce()

    @override
    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        return self.usage.unused_positions(indices)

    @override
    def settle(self) -> None:
        self.usage.settle(forget=True)

    @override
    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        return unfinished_reduction_message(rank, missing, find_unused=True)

    @override
    def shadow_end(self) -> None:
        self.usage.shadow()


class StaticGraph(EveryParameter):
    """The user promises that the graph never changes: its first iteration is counted, every later one is the same."""

    takes_long_way = True

    def __init__(self, usage: ParameterUsage, names: Sequence[str]) -> None:
        super().__init__(usage, names)
        self._set_counting(True)
        self._counts = [0] * len(names)
        self._left: list[int] = []

    def _set_counting(self, counts: bool) -> None:
        self.is_being_counted = self.records_usage = counts

    @override
    def begin(self, outputs: Iterable[torch.Tensor]) -> Sequence[int]:
        super().begin(outputs)
        if self.is_being_counted:
            self._counts = [0] * len(self._names)  # an earlier attempt may have raised half-way
        self._left = list(self._counts)
        return ()

    @override
    def arrived(self, index: int) -> Sequence[int]:
        if self.is_being_counted:
            self._counts[index] += 1
            return ()
        self._left[index] -= 1
        self.has_changed = self._left[index] < 0
        return self._with_unused((index,) if self._left[index] == 0 else ())

    def learn(self) -> None:
        """The first iteration is over: parameters that it did not use never will be; begin to tell the other ranks."""
        self.usage.reduce()
        self._set_counting(False)
        self.usage.unused = unused = [index for index, count in enumerate(self._counts) if count == 0]
        if unused:
            logger.info(
                "Parameter(s) %s is(are) unused during first iteration. Since static_graph=True is enabled for DDP,"
                " we expect this set of unused parameters to remain consistent on this rank throughout the training.",
                ", ".join(f"{{{self._names[i]}, {i}}}" for i in unused),
            )

    @property
    @override
    def never_arriving(self) -> Sequence[int]:
        return self.usage.unused

    @override
    def unused_positions(self, indices: Sequence[int]) -> list[bool] | None:
        return self.usage.unused_positions(indices)

    @override
    def settle(self) -> None:
        self.usage.settle(forget=False)  # what the first iteration used holds for good

    @override
    def restart(self, usage: ParameterUsage) -> None:
        """The next backward is counted: the other ranks may use other parameters."""
        super().restart(usage)
        self._set_counting(True)

    @override
    def describe_missing(self, rank: int, missing: Mapping[int, str]) -> str:
        return graph_changed_message(rank, missing)

    @override
    def agree(self, *, has_data: bool) -> None:
        """A rank without data takes part in what others exchange first in the first backward; see ``learn``."""
        if self.is_being_counted and not has_data:
            self.usage.shadow()
            self._set_counting(False)
