"""A job at one shard as people and programs see it: its workers, what they wait for, versions, counters."""

from __future__ import annotations

from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.status_model import ShardJob, ShardWorker, State


def _waiting(job: Job) -> dict[int, tuple[int, ...]]:
    """Per rank whose answers are held, the ranks it waits for, ascending, over all chunks."""
    # One bit per rank: workers wait for many others in many chunks, and uniting sets for each is slow.
    masks: dict[int, int] = {}
    for rule in job.chunks.rules.values():
        # Those in one exchange of a chunk share a list.
        last: list[int] = []
        mask = 0
        for rank, missing in rule.waiting().items():
            if missing is not last:
                last, mask = missing, sum(1 << other for other in missing)
            masks[rank] = masks.get(rank, 0) | mask
    ranks = {
        mask: tuple(r for r, bit in enumerate(reversed(f"{mask:b}")) if bit == "1") for mask in set(masks.values())
    }
    return {rank: ranks[mask] for rank, mask in masks.items()}


def _state_of(member: Member, now_s: float, heartbeat_s: float) -> State:
    if not member.phase.is_live:
        return "joining"
    return "silent" if now_s - member.last_heard_s > 2 * heartbeat_s else "live"


def status_of(job: Job, now_s: float, heartbeat_s: float) -> ShardJob:
    """The job at this shard, as it is now."""
    rules = list(job.chunks.rules.values())
    waiting = _waiting(job)
    clocks = job.steps()
    return ShardJob(
        rule=job.rule.body,
        sealed=job.is_sealed,
        started=job.has_started,
        expected_workers=job.expected_workers,
        chunks=len(rules),
        values_bytes=sum(rule.spec.size_bytes for rule in rules),
        memory_bytes=job.chunks.size_bytes(),
        version_min=min((rule.version for rule in rules), default=0),
        version_max=max((rule.version for rule in rules), default=0),
        members=len(job.membership.members),
        workers=tuple(
            ShardWorker(
                rank=m.rank,
                incarnation=m.incarnation,
                state=_state_of(m, now_s, heartbeat_s),
                host=m.host,
                pid=m.pid,
                silent_s=round(now_s - m.last_heard_s, 3),
                pushes=m.pushes,
                refused=m.refused,
                late=m.late,
                clock=clocks.get(m.rank),
                waiting_for=waiting.get(m.rank, ()),
                staleness=job.statistics.staleness_of(m.rank),
                telemetry=m.telemetry.times,
            )
            for m in sorted(job.membership.members.values(), key=lambda m: m.rank)
        ),
        departed=tuple(job.record.departed),
        **job.statistics.to_status(),
    )
