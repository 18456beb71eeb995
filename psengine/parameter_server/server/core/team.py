"""The workers of one job at one shard and the job's chunks: who takes part, and what the chunks learn of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from psengine.parameter_server.server.core.capture import Cuts
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.job_record import JobRecord
from psengine.parameter_server.server.core.life import JOB, JobEvent, JobPhase, after
from psengine.parameter_server.server.core.membership import Member, Membership
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import ChunkStore
from psengine.parameter_server.server.rules.exchange import Reply, RuleContext
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.rules.statistics import JobStatistics


class Team:
    """See the module's text.

    Args:
        name: of the job, as in HELLO.
        rule: of the job, as in HELLO.
        lease_s: silence after which a worker is evicted.
        clocks: see there.
        take_memory: see ``ChunkStore``.
        note: told of what happens to workers, for people: see ``EventLog.note``.

    Attributes:
        phase: where the job stands in its life.
        expected_workers: how many there are to be, as they say.
        came: ranks that have been live in this life of the job.
    """

    def __init__(
        self,
        name: str,
        rule: Mapping[str, Any],
        lease_s: float,
        clocks: Clocks,
        take_memory: Any,
        note: Callable[..., None] | None = None,
    ) -> None:
        self.name = name
        self.rule = JobRule(rule)
        self.phase = JobPhase.NEW
        self.expected_workers = 1
        self.came: set[int] = set()
        self.statistics = JobStatistics()
        self.membership = Membership(lease_s, lambda: int(clocks.wall_s() * 1000))
        self.record = JobRecord(name, note, clocks.wall_s)
        self.cuts = Cuts()
        context = RuleContext(
            live_ranks=lambda: self.membership.live_ranks,
            missing_ranks=self.missing_ranks,
            statistics=self.statistics,
            exchange_ended=lambda: self.advance(JobEvent.ENDED),
        )
        self.chunks = ChunkStore(self.rule, context, take_memory)

    @property
    def rules(self) -> Collection[ChunkRule]:
        """Of all chunks."""
        return self.chunks.rules.values()

    @property
    def is_sealed(self) -> bool:
        """See ``JobPhase``."""
        return self.phase.is_sealed

    @property
    def has_started(self) -> bool:
        """See ``JobPhase``."""
        return self.phase.has_started

    def advance(self, event: JobEvent) -> None:
        """Something happens to the job."""
        self.phase = after(JOB, self.phase, event)

    def start(self) -> None:
        """It is learnt that an exchange has ended elsewhere, if that was not known yet."""
        if not self.has_started:
            self.advance(JobEvent.STARTED)

    def missing_ranks(self) -> tuple[int, ...]:
        """Expected workers that are not here, or never were, as the rule's gathering has it."""
        awaited = self.rule.kind.gathering.awaited
        here = awaited(self.membership.live_ranks, self.came, has_started=self.has_started)
        if here is None or len(here) >= self.expected_workers:
            return ()
        return tuple(rank for rank in range(self.expected_workers) if rank not in here)

    def admit(self, member: Member) -> list[Reply]:
        """From here on exchanges wait for this worker, which needs nobody's state for that."""
        is_new_process = not member.phase.was_live
        self.came.add(member.rank)
        self.membership.admit(member.rank)
        self.record.joined(member)
        return [reply for rule in self.rules for reply in rule.worker_came(member.rank, is_new_process=is_new_process)]

    def departed(self, member: Member, reason: str, why: str) -> None:
        """Tell of a worker that goes, before it is forgotten."""
        steps = self.steps()
        step = steps.get(member.rank, 0) if steps else member.telemetry.times.steps or 0
        self.record.departed(member, reason, why, step)
        self.statistics.recent_staleness.pop(member.rank, None)

    def left(self, rank: int) -> list[Reply]:
        """Exchanges do not wait for this worker any more, or not for the process that had its rank."""
        self.cuts.left(rank)
        return [reply for rule in self.rules for reply in rule.worker_left(rank)]

    def steps(self) -> dict[int, int]:
        """Per worker the step it is in, by the first chunk that is trained; {} where this shard has none."""
        return next((rule.clocks() for rule in self.rules if rule.is_trained), {})
