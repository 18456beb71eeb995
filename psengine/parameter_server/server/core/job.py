"""One job at one shard: its workers, its chunks, and who takes part. Pure.

states.py           where the job and its workers stand: tables of phases
server_weights.py   this server holds the weights: a joiner reads them; without workers the job waits
worker_weights.py   the workers hold them: a joiner needs another's state; without workers the job is lost
exchanges.py        pushes, and what became of them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.events import JobRecord
from psengine.parameter_server.server.interfaces import Clocks
from psengine.parameter_server.server.core.journal import Journal
from psengine.parameter_server.server.core.membership import MAX_WORKERS, Greeting, Member, Membership
from psengine.parameter_server.server.core.refusals import rank_taken
from psengine.parameter_server.server.core.states import JOB, JobEvent, JobPhase, after
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import ChunkStore, chunk_state
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import ErrorCode, Message


class Job(ABC):
    """See the module's text.

    Args:
        name: as in HELLO.
        lease_s: silence after which a worker is evicted.
        take_memory: see ``ChunkStore``.
        note: told of what happens to workers, for people: see ``EventLog.note``.
        now_s: the time that the shard was given last.
        journal: told of what a restart must find.

    Attributes:
        phase: where the job stands in its life.
        expected_workers: how many there are to be, as they say.
        came: ranks that have been live in this life of the job.
        outdated: why nobody may go on from the state that is here; "" where they may.
    """

    def __init__(
        self,
        name: str,
        rule: JobRule,
        lease_s: float,
        clocks: Clocks,
        take_memory: Callable[[int, str], None],
        note: Callable[..., None],
        now_s: Callable[[], float] = lambda: 0.0,
        journal: Journal | None = None,
    ) -> None:
        self.name = name
        self.number = job_number(name)
        self.rule = rule
        self.clocks = clocks
        self.journal = journal or Journal()
        self.phase = JobPhase.NEW
        self.fingerprint = 0
        self._registrar = 0  # incarnation of the process that gave values last
        self.expected_workers = 1
        self.came: set[int] = set()
        self.outdated = ""
        self.statistics = JobStatistics()
        self.membership = Membership(lease_s, lambda: int(clocks.wall_s() * 1000))
        self.record = JobRecord(name, note, clocks.wall_s)
        context = RuleContext(
            live_ranks=lambda: self.membership.live_ranks,
            missing_ranks=self.missing_ranks,
            are_stuck=self._are_stuck,
            statistics=self.statistics,
            now_s=now_s,
            exchange_ended=lambda: self.advance(JobEvent.ENDED),
            discarded=self._discarded,
        )
        self.chunks = ChunkStore(self.rule, context, take_memory)

    @property
    def rules(self) -> Collection[ChunkRule]:
        return self.chunks.rules.values()

    @property
    def version(self) -> int:
        """The lowest of all chunks."""
        return min((rule.version for rule in self.rules), default=0)

    @property
    def is_sealed(self) -> bool:
        return self.phase.is_sealed

    @property
    def has_started(self) -> bool:
        return self.phase.has_started

    @property
    def initialiser(self) -> int:
        """The rank that registers the chunks."""
        return 0

    @property
    def restored_version(self) -> int:
        """The version that all chunks had reached by what was on the disk when this server started."""
        return min((rule.restored_version for rule in self.rules), default=0)

    def advance(self, event: JobEvent) -> None:
        self.phase = after(JOB, self.phase, event)

    def missing_ranks(self) -> tuple[int, ...]:
        """Expected workers that exchanges wait for although they are not here.

        Where all work together, in the first exchange; where each works alone, the clocks of others stand at 0.
        """
        is_single = self.rule.kind.aggregation.is_single
        if not is_single and self.has_started:
            return ()
        here: Collection[int] = self.came if is_single else self.membership.live_ranks
        if len(here) >= self.expected_workers:
            return ()
        return tuple(rank for rank in range(self.expected_workers) if rank not in here)

    def _are_stuck(self, ranks: Iterable[int]) -> bool:
        """Whether all these workers say that they wait, and what they have open at this shard is here, unanswered."""
        waits = {rank: self.membership.waits_of(rank) for rank in ranks}
        if None in waits.values():  # before the sums, which take time
            return False
        return all(sum(rule.open_exchange(rank) for rule in self.rules) == waits[rank] for rank in waits)

    def hear_waits(self, member: Member, waits: int | None) -> None:
        """See ``Member.waits``."""
        if self.rule.kind.aggregation.minds_who_is_stuck and member.hear_waits(waits):
            self.journal.members(self)  # merges come about by it

    def is_awaited(self, rank: int | None, nonce: int) -> bool:
        """Whether a process belongs to the job as it is: exchanges wait for its rank, or it was a worker before."""
        return rank in self.missing_ranks() or self.membership.knows(rank, nonce)

    def steps(self) -> dict[int, int]:
        """Per worker the step it is in, by the first chunk that is trained; {} where this shard has none."""
        return next((rule.clocks() for rule in self.rules if rule.is_trained), {})

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
        holder = self.membership.members.get(-1 if rank is None else rank)
        largest = max(rank or 0, body["world_size"] - 1, *members, 0)
        if largest >= MAX_WORKERS:
            raise ProtocolError(
                f"a job has at most {MAX_WORKERS} workers (expected ranks below that, got {largest})",
                ErrorCode.BAD_VALUE,
            )
        self.told(members, now_s)
        greeting = self.membership.greet(message, user_id, route, self.statistics.averaged, now_s)
        if greeting == "wait":
            return "wait", None, []
        if isinstance(greeting, str):
            raise rank_taken(self.name, rank, greeting, holder)
        member = greeting.member
        if not self.has_started:
            self.expected_workers = max(self.expected_workers, body["world_size"])
        replies = []
        if greeting.replaced_live:
            if holder is not None:
                self._tell_departed(holder, "fenced", f"a new process has its rank, {body['pid']} on {body['host']}")
            replies = self.left(member.rank)
        if not self.is_sealed:
            return "initialise" if member.rank == self.initialiser else "wait", member, replies
        if member.phase.is_live:
            return "ready", member, replies
        state, more = self._place(greeting, member, now_s)
        return state, member, [*replies, *more]

    def told(self, members: Collection[int], now_s: float) -> None:  # noqa: B027 - only averaging jobs need it
        """A worker that says HELLO names the ranks that it knew alive; none where it knew nobody."""

    @abstractmethod
    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        """A worker that is not live greets a job whose values are here: (state of WELCOME, answers)."""

    def check_registering(self, member: Member, what: str) -> None:
        """Raise ProtocolError unless this worker may register a chunk now; see ``JobEvent.REOPENED``.

        It seals the lead last, which tells everybody else that there are values: what only it knew of is worth nothing.
        """
        rank = member.rank
        if rank == self.initialiser and member.incarnation != self._registrar:
            self._registrar = member.incarnation
            if JobEvent.REOPENED in JOB[self.phase] and self.came <= {rank}:
                self.advance(JobEvent.REOPENED)
                if member.phase.is_live:
                    self.membership.demote(rank)
                self.chunks.clear()
                self.journal.members(self)
        # Others may have read the values that are here.
        if self.is_sealed and rank == self.initialiser and (self.rule.holds_weights or not self.has_started):
            raise ProtocolError(
                f"{what}: job {self.name!r} has values here; another server has lost its own. Fix: start all anew.",
                ErrorCode.STATE_LOST,
            )
        self._check_initialiser(member, what)

    def _check_initialiser(self, member: Member, what: str) -> None:
        """Raise ProtocolError unless this worker may register chunks and seal them now."""
        initialiser = self.initialiser
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
        self._check_initialiser(member, "SEAL")
        if chunks != len(self.chunks):
            raise ProtocolError(
                f"job {self.name!r} is sealed with all its chunks (expected {len(self.chunks)}, got {chunks})"
            )
        self.fingerprint = fingerprint
        self.advance(JobEvent.SEALED)
        self.journal.members(self)
        return [] if member.phase.is_live else self.let_in(member)

    def let_in(self, member: Member) -> list[Reply]:
        """From here on exchanges wait for this worker, which needs nobody's state for that."""
        is_new_process = not member.phase.was_live
        self.came.add(member.rank)
        self.membership.admit(member.rank)
        self.record.note("joined", member, " joined")
        replies = [rule.worker_came(member.rank, is_new_process=is_new_process) for rule in self.rules]
        self.journal.members(self, came=(member.rank, is_new_process))
        return [reply for some in replies for reply in some]

    # ---- averaging jobs only -----------------------------------------------------------------------------------

    def join(self, member: Member, request: int) -> list[Reply]:
        """JOIN: a worker that comes late wants the state of one that was there; OK is held until it is admitted."""
        raise self._refusal("JOIN")

    def admit(self, message: Message, donor: Member) -> list[Reply]:
        """ADMIT: the donor has deposited its state; the joiner takes part from the donor's next exchange on."""
        raise self._refusal("ADMIT")

    def leave(self, message: Message, member: Member) -> list[Reply]:
        """LEAVE: OK is held until every live worker has the averages that this one has."""
        raise self._refusal("LEAVE")

    def _refusal(self, what: str) -> ProtocolError:
        return ProtocolError(f"{what} is for averaging jobs (job {self.name!r} is none)")

    # ---- at work -----------------------------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        """Whether this server holds the weights that are trained."""
        return True

    @abstractmethod
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        """PROGRESS: a worker says how far it was with a server that lived before this one."""

    def _discarded(self, push: Contribution, spec: ChunkSpec, why: str) -> None:
        """A gradient was refused, or came late."""
        member = self.membership.members[push.rank]
        if why == "late":
            member.late += 1
            text = f"of step {push.sequence} came after the others' average"
        else:
            member.refused += 1
            text = f"of {spec.describe()} was refused ({why})"
        self.record.note("late" if why == "late" else "refused", member, f": its gradient {text}")

    @abstractmethod
    def note_taken(self, rule: ChunkRule, message: Message, version: int) -> None:
        """A message was taken in by its chunk, which had this version before: write to the log what a restart needs."""

    def store(self, message: Message) -> None:
        """STORE: overwrite what PULL reads."""
        self.chunks.store(message)

    def pushed(self, rank: int) -> list[Reply]:
        """A worker has pushed; answers that may leave because of it, beside those of the exchange."""
        return []

    @abstractmethod
    def is_missed(self, now_s: float) -> bool:
        """Whether somebody may still want this job, which has no workers."""

    def tick(self, now_s: float) -> list[int]:
        """Some time has passed; ranks whose lease ran out."""
        return self.membership.expired(now_s)

    def tick_rules(self) -> list[Reply]:
        """Some time has passed; answers that rules held until now."""
        replies = [reply for rule in self.rules for reply in rule.tick()]
        if replies:
            self.journal.tick(self)
        return replies

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now nobody listened here."""
        self.membership.stood_still(pause_s)

    # ---- going -------------------------------------------------------------------------------------------------

    def left(self, rank: int) -> list[Reply]:
        """Exchanges do not wait for this worker any more, or not for the process that had its rank."""
        replies = [reply for rule in self.rules for reply in rule.worker_left(rank)]
        self.journal.members(self, left=rank)
        return replies

    def goodbye(self, rank: int, now_s: float) -> list[Reply]:
        """BYE: the worker leaves, and another process may have its rank at once; answers that may leave now."""
        self._tell_departed(self.membership.members[rank], "left", "it said goodbye")
        self.membership.remove(rank, progress=self.statistics.averaged, now_s=now_s, forget=True)
        return self.left(rank)

    def fence(self, member: Member, why: str, now_s: float) -> list[Reply]:
        """A worker lacks an average that nobody has any more: it has to join, even if nothing happens until then."""
        self._put_out(member, "fenced", f"it lacks what nobody can give it any more ({why})", -1, now_s)
        return self.left(member.rank)

    def evict(self, ranks: Sequence[int], now_s: float) -> list[Reply]:
        """Workers whose leases ran out together; answers that may leave now.

        All are out before an exchange ends for want of them: else those evicted last would not seem to have missed it.
        """
        averaged = self.statistics.averaged
        for rank in ranks:
            member = self.membership.members[rank]
            silent_s = now_s - member.last_heard_s
            silent = f"silent for {silent_s:.1f} s, longer than its lease"
            why = silent if silent_s > self.membership.lease_s else "its lease was ended by hand"
            self._put_out(member, "evicted", why, averaged, now_s)
        return [reply for rank in ranks for reply in self.left(rank)]

    def _put_out(self, member: Member, reason: str, why: str, progress: int, now_s: float) -> None:
        self.statistics.evicted += 1
        self.record.out(member, why, now_s)
        self._tell_departed(member, reason, why)
        self.membership.remove(member.rank, progress=progress, now_s=now_s)

    def _tell_departed(self, member: Member, reason: str, why: str) -> None:
        """Tell people of a worker that goes, before it is forgotten."""
        steps = self.steps()
        step = steps.get(member.rank, 0) if steps else member.telemetry.times.steps or 0
        self.record.went(member, reason, why, step)
        self.statistics.recent_staleness.pop(member.rank, None)

    # ---- for snapshots -----------------------------------------------------------------------------------------

    def copy(self, *, is_whole: bool = False) -> JobState:
        """A copy of everything a snapshot keeps; ``is_whole``: with what is under way, for a log to go on from it."""
        meta = {**self.to_meta(), "is_sealed": self.is_sealed, "last_stores": self.chunks.last_stores()}
        chunks = [chunk_state(rule, copies=True, is_whole=is_whole) for rule in self.rules]
        return JobState(self.name, meta, chunks)

    def to_meta(self) -> dict[str, Any]:
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
        self.chunks.note_stores(meta.get("last_stores", ()))
        self.membership.restore(meta, now_s)
