"""Rule "apply": a contribution is applied when it arrives; its answer may be held.

    rank 0   push ─► apply ─► weights           rank 2, four times slower
    rank 1      push ─► apply ─► weights        push ─► apply ─► weights
    rank 0         push ─► apply ─ held: more than max_staleness steps ahead of rank 2 ─────► weights

Unbounded without ``max_staleness``, with it the stale-synchronous parallel model (Ho et al. 2013, "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server"). The coordinator says how far the slowest worker is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.parameter_server.server.rules.server_weights import ServerWeights
from psengine.protocol.messages import ErrorCode
from psengine.protocol.views import Release, View

# In ``_oldest_base``, of a worker that is not in the view.
_GONE = -1


class Apply(ServerWeights):
    """See the module's text. The chunk's version counts the contributions that changed it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # An answer is held while its step is more than this many after the last that all have committed; None never
        # holds.
        self._max_staleness: int | None = self.options.get("max_staleness")
        # By rank, the incarnation and its last step that was taken in. Of workers that left too: who comes back may
        # have an answer to come, and is not applied twice.
        self._taken: dict[int, tuple[int, int]] = {}
        # By rank, the step whose answer is held.
        self._waiting: dict[int, int] = {}
        # Pushes computed from older versions were under way when their worker was put out of the view.
        self._oldest_base: dict[int, int] = {}

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        rank, step = contribution.rank, contribution.step
        if contribution.weight is not None:
            raise ProtocolError(
                f"{self.spec.describe()}: an asynchronous job averages nothing, so that no gradient has a weight"
                f" (expected none, got {contribution.weight:g})",
                ErrorCode.BAD_VALUE,
            )
        self._check_ready()
        reason = self._reason_to_refuse(contribution)
        if reason is None and contribution.values is not None:
            self._step(contribution.values, (contribution,))
        self._note_reason(contribution, reason)
        self._note_held(contribution)
        self._taken[rank] = contribution.incarnation, step
        if self._max_staleness is None:
            return [self._answer(rank, step)]
        self._waiting[rank] = step
        return self._let_go()

    @override
    def _reason_to_refuse(self, contribution: Contribution) -> str | None:
        reason = super()._reason_to_refuse(contribution)
        is_stale = contribution.base_version < self._oldest_base.get(contribution.rank, 0)
        return "stale" if is_stale and contribution.values is not None else reason

    @override
    def has(self, rank: int, step: int) -> bool:
        return rank in self._taken and step <= self._taken[rank][1]

    @override
    def answer_again(self, rank: int, step: int) -> Reply | None:
        if rank not in self._taken or step != self._taken[rank][1]:
            return None
        if self._is_held(step):
            self._waiting[rank] = step  # its worker had left the view
            return None
        return self._answer(rank, step, repeated=True)

    def _is_held(self, step: int) -> bool:
        return self._max_staleness is not None and step - self._max_staleness > self.context.floor()

    def _let_go(self) -> list[Reply]:
        """Answers that may leave now, with the weights of now."""
        free = [(rank, step) for rank, step in sorted(self._waiting.items()) if not self._is_held(step)]
        for rank, _ in free:
            del self._waiting[rank]
        return [self._answer(rank, step) for rank, step in free]

    @override
    def release(self, release: Release) -> list[Reply]:
        return self._let_go()

    @override
    def adopt(self, view: View) -> list[Reply]:
        """Nothing that was applied is taken back. A new process of a rank begins anew."""
        members = {member.rank: member.incarnation for member in view.members}
        for rank in (*self._waiting, *self._backups):
            if rank not in members:
                self._waiting.pop(rank, None)
                self._forget_answers(rank)
        for rank, (incarnation, _) in list(self._taken.items()):
            if members.get(rank) == incarnation:
                if self._oldest_base.get(rank) == _GONE:
                    self._oldest_base[rank] = self.version
                continue
            self._waiting.pop(rank, None)
            self._forget_answers(rank)
            if rank in members:
                del self._taken[rank]
                self._oldest_base.pop(rank, None)
                self._refused.pop(rank, None)
            elif self._max_staleness is not None:
                self._oldest_base[rank] = _GONE
        return []

    @override
    def begin_life(self) -> None:
        """A worker whose answer was held may have got it, with weights that the restart lost: it asks, or has it."""
        self._waiting.clear()

    @override
    def waiting_for(self, rank: int, step: int) -> list[int]:
        view = self.context.view()
        if view is None or self._max_staleness is None or self._waiting.get(rank) != step:
            return []
        needed = step - self._max_staleness
        return [other.rank for other in view.members if self._taken.get(other.rank, (0, 0))[1] < needed]

    @override
    def open_steps(self) -> dict[int, int]:
        return dict(self._waiting)

    @override
    def to_meta(self) -> dict[str, Any]:
        tables: dict[str, dict[int, Any]] = {"taken": self._taken, "waiting": self._waiting}
        tables["oldest_base"] = self._oldest_base
        return super().to_meta() | {name: {str(k): v for k, v in table.items()} for name, table in tables.items()}

    @override
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        super().restore(meta, tensors)
        self._taken = {int(rank): (incarnation, step) for rank, (incarnation, step) in meta["taken"].items()}
        self._waiting = {int(rank): step for rank, step in meta["waiting"].items()}
        self._oldest_base = {int(rank): version for rank, version in meta["oldest_base"].items()}
