"""One job at one shard: its workers, its chunks, and what they say to each other.

team.py        who takes part, and what the chunks learn of it
life.py        where the job stands: the table of its phases
weights.py     what a worker needs that comes, and what is lost with a server or a worker
exchanges.py   pushes, and what became of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.capture import JobCapture, chunk_state
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.exchanges import Exchanges
from psengine.parameter_server.server.core.life import JobEvent, JobPhase
from psengine.parameter_server.server.core.membership import MAX_WORKERS, Greeting, Member
from psengine.parameter_server.server.core.team import Team
from psengine.parameter_server.server.core.weights import Weights
from psengine.parameter_server.server.core.weights_here import WeightsHere
from psengine.parameter_server.server.core.weights_in_workers import WeightsInWorkers
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.snapshots.store import JobState
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode, Message


class Job(Team):
    """The workers and chunks of one job at one shard.

    Args:
        name: as in HELLO.
        rule: as in HELLO: "average" with a quorum, or "apply" with its options.
        lease_s: silence after which a worker is evicted.
        clocks: see there.
        take_memory: see ``ChunkStore``.
        note: told of what happens to workers, for people: see ``EventLog.note``.
        begun_by: the peer whose HELLO was the first, see ``Sender``; "" where that is not known.
    """

    def __init__(
        self,
        name: str,
        rule: Mapping[str, Any],
        lease_s: float,
        clocks: Clocks,
        take_memory: Any,
        note: Callable[..., None] | None = None,
        begun_by: str = "",
    ) -> None:
        super().__init__(name, rule, lease_s, clocks, take_memory, note)
        self.number = job_number(name)
        self.begun_by = begun_by
        self.fingerprint = 0
        self.weights: Weights = (WeightsHere if self.rule.holds_weights else WeightsInWorkers)(self)
        self.exchanges = Exchanges(self, self.weights, clocks.measure_s)

    @property
    def version(self) -> int:
        """What all chunks have reached."""
        return min((rule.version for rule in self.rules), default=0)

    # ---- coming ------------------------------------------------------------------------------------------------

    def greet(
        self, message: Message, user_id: str, route: bytes, now_s: float
    ) -> tuple[str, Member | None, list[Reply]]:
        """HELLO of a worker: (state of WELCOME, the member, answers that may leave now).

        Raises:
            ProtocolError: the rank is taken, or belongs to another key, or is out of bounds.
        """
        body = message.body
        rank, members = body.get("rank"), body.get("members") or []
        holder = self.membership.members.get(rank) if rank is not None else None
        largest = max(rank or 0, body["world_size"] - 1, *members, 0)
        if largest >= MAX_WORKERS:
            raise ProtocolError(
                f"a job has at most {MAX_WORKERS} workers (expected ranks below that, got {largest})",
                ErrorCode.BAD_VALUE,
            )
        self.weights.told(members, now_s)
        greeting = self.membership.greet(
            rank=rank,
            nonce=body["nonce"],
            incarnation=message.incarnation,
            user_id=user_id,
            route=route,
            host=body["host"],
            pid=body["pid"],
            progress=self.statistics.averaged,
            now_s=now_s,
            knows_members=rank in members,
        )
        if greeting.verdict == "wait":
            return "wait", None, []
        member = greeting.member
        if member is None:
            raise self._rank_taken(rank, greeting)
        if not self.has_started:
            self.expected_workers = max(self.expected_workers, body["world_size"])
        replies = []
        if greeting.replaced_live:
            if holder is not None:
                self.departed(holder, "fenced", f"a new process has its rank, {body['pid']} on {body['host']}")
            replies = self.weights.left(member.rank)
        state, more = self._place(greeting, member, now_s)
        return state, member, [*replies, *more]

    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        if not self.is_sealed:
            return "initialise" if member.rank == self.weights.initialiser else "wait", []
        if member.phase.is_live:
            return "ready", []
        return self.weights.place(greeting, member, now_s)

    def _rank_taken(self, rank: int | None, greeting: Greeting) -> ProtocolError:
        holder = self.membership.members.get(rank if rank is not None else -1)
        where = f"process {holder.pid} on {holder.host}" if holder is not None else "another process"
        if greeting.verdict == "denied":
            return ProtocolError(f"rank {rank} of job {self.name!r} belongs to another key", ErrorCode.DUPLICATE_RANK)
        return ProtocolError(
            f"rank {rank} of job {self.name!r} is held by {where}, which is alive. Every worker needs a rank of its"
            " own: check RANK, or give this run a job of its own (PSENGINE_JOB).",
            ErrorCode.DUPLICATE_RANK,
        )

    def check_initialiser(self, member: Member, what: str) -> None:
        """Raise ProtocolError unless this worker may register chunks and seal them now."""
        initialiser = self.weights.initialiser
        if self.is_sealed or member.rank != initialiser:
            raise ProtocolError(
                f"{what}: job {self.name!r} takes chunks from worker {initialiser} before it is sealed (got worker"
                f" {member.rank}, {'sealed' if self.is_sealed else 'not sealed'})"
            )

    def seal(self, message: Message, member: Member) -> list[Reply]:
        """SEAL: all chunks of this shard are here."""
        chunks, fingerprint = message.body["chunks"], message.body["fingerprint"]
        if self.is_sealed and (chunks, fingerprint) == (len(self.chunks), self.fingerprint):
            return []  # the OK was lost
        self.check_initialiser(member, "SEAL")
        if chunks != len(self.chunks):
            raise ProtocolError(
                f"job {self.name!r} is sealed with all its chunks (expected {len(self.chunks)}, got {chunks})"
            )
        self.fingerprint = fingerprint
        self.advance(JobEvent.SEALED)
        self.weights.sealed(member)
        return [] if member.phase.is_live else self.admit(member)

    # ---- going -------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[int]:
        """Some time has passed; ranks whose lease ran out."""
        self.weights.tick(now_s)
        return self.membership.expired(now_s)

    def stood_still(self, pause_s: float) -> None:
        """See ``Membership.stood_still``."""
        self.membership.stood_still(pause_s)
        self.weights.stood_still(pause_s)

    def goodbye(self, rank: int, now_s: float) -> list[Reply]:
        """BYE: the worker leaves, and another process may have its rank at once; answers that may leave now."""
        self.departed(self.membership.members[rank], "left", "it said goodbye")
        return self._remove(rank, self.statistics.averaged, now_s, forget=True)

    def fence(self, rank: int, why: str, now_s: float) -> list[Reply]:
        """A worker lacks what nobody can tell it any more: it has to join, even if the job does nothing until then."""
        member = self.membership.members.get(rank)
        if member is not None:
            self.statistics.evicted += 1
            self.record.out(member, f"it lacks what nobody can give it any more ({why})", now_s)
            self.departed(member, "fenced", "the others are further on")
        return self._remove(rank, -1, now_s)

    def _remove(self, rank: int, progress: int, now_s: float, *, forget: bool = False) -> list[Reply]:
        self.membership.remove(rank, progress=progress, now_s=now_s, forget=forget)
        return self.weights.left(rank)

    def evict(self, ranks: Sequence[int], now_s: float) -> list[Reply]:
        """Workers whose leases ran out together; answers that may leave now.

        All are out before an exchange ends for want of them: else those evicted last would not seem to have missed it.
        """
        averaged = self.statistics.averaged
        for rank in ranks:
            member = self.membership.members[rank]
            self.statistics.evicted += 1
            silent_s = now_s - member.last_heard_s
            why = "its lease was ended by hand"
            if silent_s > self.membership.lease_s:
                why = f"silent for {silent_s:.1f} s, longer than its lease"
            self.record.out(member, why, now_s)
            self.departed(member, "evicted", why)
            self.membership.remove(rank, progress=averaged, now_s=now_s)
        return [reply for rank in ranks for reply in self.weights.left(rank)]

    # ---- for snapshots -----------------------------------------------------------------------------------------

    def copy(
        self, goals: Mapping[int, int], awaited_ranks: tuple[int, ...], on_complete: Callable[[], None]
    ) -> JobCapture:
        """A copy of everything a snapshot keeps.

        Args:
            goals: by rank, steps that another shard has begun.
            awaited_ranks: workers of whom it is to have the whole of steps that are under way.
            on_complete: see ``JobCapture``.
        """
        state = JobState(self.name, self.to_meta(), [chunk_state(rule, copies=True) for rule in self.rules])
        if not any(rule.is_changed_by_each for rule in self.rules):
            awaited_ranks = ()
        return self.cuts.copy(state, self.chunks.make_rule, goals, awaited_ranks, on_complete)

    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps of the job itself."""
        return {
            "rule": self.rule.body,
            "expected_workers": self.expected_workers,
            "has_started": self.has_started,
            "came": sorted(self.came),
            "fingerprint": self.fingerprint,
            **self.membership.to_meta(),
        }

    def restore_meta(self, meta: dict[str, Any], now_s: float) -> None:
        """Take over a snapshot's; its workers get a fresh lease."""
        self.expected_workers = meta["expected_workers"]
        self.came = set(meta["came"])
        self.phase = JobPhase.RESTORED_RUNNING if meta["has_started"] else JobPhase.RESTORED_OPEN
        self.fingerprint = meta["fingerprint"]
        self.membership.restore(meta, now_s)
        self.weights.restored()
