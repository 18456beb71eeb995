"""Rule "apply": a contribution is applied when it arrives; its answer, the new weights, may be held.

    rank 0   push ─► apply ─► weights           rank 2, four times slower
    rank 1      push ─► apply ─► weights        push ─► apply ─► weights
    rank 0         push ─► apply ─ held: more than max_staleness steps ahead of rank 2 ─────► weights

Unbounded without ``max_staleness``, with it the stale-synchronous parallel model (Ho et al. 2013, "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server"). The coordinator says how far the slowest worker is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule, KnownWorker
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.payloads import HeldWeights
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.views import Release, View


class Apply(ChunkRule):
    """See the module's text. The chunk's version counts the contributions that changed it."""

    holds_weights = True
    kept: ClassVar[dict[str, Any]] = {
        "version": int,
        "stores": dict[int, tuple[int, int]],
        "workers": dict[int, KnownWorker],
        "compensation": DelayCompensation | None,
    }
    values: torch.Tensor

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        if values is None:
            raise ProtocolError(f"{spec.describe()}: expected initial values as payload, got none")
        super().__init__(spec, values, context)
        options = context.rule
        self._place = Place(values)
        self._is_trained = spec.kind.is_trained
        # An answer is held while its step is more than this many after the last that all have committed; None never
        # holds.
        self._max_staleness: int | None = options.get("max_staleness")
        self._scales_by_staleness = options.get("staleness_scaling") == "inverse"
        strength: float = options.get("delay_compensation", 0.0) if spec.kind is ChunkKind.PARAMETER else 0.0
        self.compensation = DelayCompensation(strength, options.get("compensation_decay")) if strength else None

    @override
    def push(self, contribution: Contribution) -> list[Reply]:
        rank, step, known = contribution.rank, contribution.step, self.workers[contribution.rank]
        reason = self._reason_to_refuse(contribution)
        if reason is None:
            self.context.use(self, (contribution,))
        self._take(contribution, reason)
        if known.held is not None and known.held.step != contribution.held:
            known.held.step = None
        if self._max_staleness is None:
            return [self._answer(rank, step)]
        known.is_waiting = True
        return self._let_go()

    def _reason_to_refuse(self, contribution: Contribution) -> str | None:
        if contribution.values is None:
            return "abstained"
        if contribution.base_version < (self.workers[contribution.rank].oldest_base or 0):
            return "stale"
        return None if self._is_finite(contribution) else "non_finite"

    def _is_finite(self, contribution: Contribution) -> bool:
        """Whether nothing speaks against using its values."""
        assert contribution.values is not None
        # A buffer may hold infinities on purpose, such as an attention mask.
        return not self._is_trained or is_finite(contribution.values)

    def _take(self, contribution: Contribution, reason: str | None) -> None:
        """The step is answered, or will be, also where it does not count for this reason."""
        known = self.workers[contribution.rank]
        known.step, known.ahead, known.refused = contribution.step, contribution.ahead, reason
        if reason is not None:
            self.context.discarded(contribution, self.spec, reason)

    @override
    def answer_again(self, rank: int, step: int) -> Reply | None:
        known = self.workers[rank]
        if step != known.step:
            return None
        if self._is_held(known):
            known.is_waiting = True  # its worker had left the view
            return None
        return self._answer(rank, step, repeated=True)

    def _is_held(self, known: KnownWorker) -> bool:
        step = known.step + known.ahead
        return self._max_staleness is not None and step - self._max_staleness > self.context.floor

    def _let_go(self) -> list[Reply]:
        """Answers that may leave now, with the weights of now."""
        replies = []
        for rank, known in sorted(self.workers.items()):
            if known.is_waiting and not self._is_held(known):
                known.is_waiting = False
                replies.append(self._answer(rank, known.step))
        return replies

    @override
    def release(self, release: Release) -> list[Reply]:
        return self._let_go()

    @override
    def adopt(self, view: View) -> list[Reply]:
        """Nothing that was applied is taken back, and who left is known: its answer may be to come when it is back."""
        members = {member.rank: member.incarnation for member in view.members}
        for rank, known in list(self.workers.items()):
            if members.get(rank) == known.incarnation:
                if known.oldest_base is None:
                    known.oldest_base = self.version
                continue
            known.is_waiting, known.held = False, None
            if rank in members:
                del self.workers[rank]
            elif self._max_staleness is not None:
                known.oldest_base = None
        for rank, incarnation in members.items():
            self.workers.setdefault(rank, KnownWorker(incarnation))
        return []

    @override
    def begin_life(self, *, keeps_log: bool) -> None:
        """A worker whose answer was held may have got it, with weights that the restart lost: it asks, or has it."""
        for known in self.workers.values():
            known.is_waiting = False

    @override
    def waits(self) -> dict[int, list[int]]:
        members = () if self.context.view is None else self.context.view.members
        bound = self._max_staleness or 0
        return {
            rank: [other.rank for other in members if not self.has(other.rank, known.step + known.ahead - bound)]
            for rank, known in self.workers.items()
            if known.is_waiting
        }

    # ---- steps -------------------------------------------------------------------------------------------------

    def use(self, given: Sequence[Contribution]) -> None:
        """Change the weights by these contributions, which bring values: one version. An error leaves all as it was."""
        (one,) = given
        assert one.values is not None
        self._step(one.values, given, one.groups, one.absent)

    def _step(
        self,
        values: torch.Tensor,
        given: Sequence[Contribution],
        groups: Sequence[Mapping[str, Any]] | None = None,
        absent: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``use`` the combined ``values`` of these contributions."""
        if self.optimizer is None:
            self._overwrite(values)
        else:
            if self.compensation is not None:
                self.optimizer.check(groups, absent)  # before anything changes
                values = self._compensated(self.compensation, values, given[0])
            place = self.memory.next_of(self._place)
            self.optimizer.apply(
                values,
                groups=groups,
                # Zhang et al. 2016, "Staleness-aware Async-SGD" (https://arxiv.org/abs/1511.05950)
                learning_rate_scale=self._learning_rate_scale(given),
                absent=absent,
                into=place.values,
            )
            self._place, self.values = place, place.values
        self._count(given)

    def _learning_rate_scale(self, given: Sequence[Contribution]) -> float:
        """After a restart workers may be ahead of the restored weights for one push."""
        staleness = max(0, self.version - min(one.base_version for one in given))
        return 1.0 / (staleness + 1) if self._scales_by_staleness else 1.0

    def _count(self, given: Sequence[Contribution]) -> None:
        """The values are of the next version."""
        if self._is_trained:
            statistics = self.context.statistics
            statistics.applied += len(given)
            for one in given:
                statistics.count_staleness(max(0, self.version - one.base_version), one.rank)
        self.version += 1

    def _compensated(self, by: DelayCompensation, gradient: torch.Tensor, given: Contribution) -> torch.Tensor:
        """The gradient of one worker, corrected for what changed since its weights left."""
        by.observe(gradient)
        held = self.workers[given.rank].held
        if held is None or held.version != given.base_version or held.version >= self.version:
            return gradient
        return by.correct(gradient, self.values, held.values)

    def _overwrite(self, values: torch.Tensor) -> None:
        place = self.memory.next_of(self._place)
        place.values.copy_(values)
        if self.optimizer is not None:
            self.optimizer.move_to(place.values)
        self._place, self.values = place, place.values

    # ---- answers -----------------------------------------------------------------------------------------------

    def _answer(self, rank: int, step: int, *, repeated: bool = False) -> Reply:
        """UPDATED; ``repeated``: the worker may have received the first one, so that this must bring the same."""
        version, place, known = self.version, self._place, self.workers[rank]
        if self.compensation is not None or self.payloads.answers_differences:
            held = self.payloads.next_held(known.held, step, version, self.values, repeated=repeated)
            known.held, version = held, held.version
            place = Place(self.payloads.encode(held.values) if held.payload is None else held.payload)
        elif self.payloads.encodes_answers:
            place = Place(self.payloads.encode(self.values))
        answer = self._updated(rank, step, version, place)
        if known.refused is not None:
            answer.body["refused"] = known.refused
        return answer

    # ---- values and memory -------------------------------------------------------------------------------------

    @override
    def read(self) -> tuple[int, torch.Tensor]:
        return self.version, self.values

    @override
    def store(self, values: torch.Tensor, version: int) -> None:
        self._overwrite(values)
        for known in self.workers.values():
            if known.held is not None:
                known.held.step = None
        self.version += 1

    @override
    def note_base(self, rank: int) -> bool:
        known = self.workers.get(rank)
        if self.compensation is None or known is None:
            return False
        known.held = HeldWeights(self.version, self.values.clone(), None)
        return True

    @override
    def take_back(self) -> None:
        super().take_back()
        if self._place.segment is not None:
            self._place = self.memory.new()
            self._place.values.copy_(self.values)
            self.values = self._place.values
            if self.optimizer is not None:
                self.optimizer.move_to(self.values)

    @override
    def lent_places(self) -> int:
        view, is_made_anew = self.context.view, self.compensation is not None or self.payloads.encodes_answers
        # Each worker may read another version, and who pushes reads none.
        return 0 if view is None or is_made_anew or self.spec.kind is ChunkKind.CONSTANT else view.world_size

    @override
    def size_bytes(self) -> int:
        parts = [self.optimizer, self.compensation, *(known.held for known in self.workers.values())]
        parts_bytes = sum(part.size_bytes for part in parts if part is not None)
        return self.spec.size_bytes + self.memory.extra_bytes + parts_bytes
