"""The workers of a job: leases, incarnations, claims to a rank, restarts. Pure; the caller brings the time.

``states.py`` has the table of what a worker can be. A rank belongs to one process at a time. The incarnation, given by
the lead, tells two lives of a rank apart; a message of an older one is *fenced*: answered by an error, never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psengine.parameter_server.server.core.states import MEMBER, MemberEvent, MemberPhase, after
from psengine.parameter_server.server.core.telemetry import WorkerTelemetry
from psengine.protocol.messages import CONTROL, Message, MessageType

# Longer than two heartbeats: a rank that stayed silent since a newcomer claimed it is dead.
CLAIM_PATIENCE_S = 2.5
# Messages that a process sent before it died may still arrive after its successor's first one.
CLAIM_GRACE_S = 0.5
# Ranks lie below this: it bounds what is remembered of workers that are gone.
MAX_WORKERS = 65_536
# Of one rank, processes that others have replaced; where there are more, the oldest are forgotten.
MAX_REPLACED = 64


@dataclass(slots=True)
class Member:
    """One worker, as a shard knows it."""

    rank: int  # its place in the order of summation
    incarnation: int  # which life of the rank
    nonce: int  # random number of the process's client; equal nonces are the same process
    user_id: str  # its public key, "" without CURVE
    route: bytes  # the routing id of the newest connection that it says HELLO and heartbeats by
    phase: MemberPhase  # what it is to its job
    last_heard_s: float  # when its last message came
    host: str = ""  # as ``pid``: where it runs, for people
    pid: int = 0
    pushes: int = 0
    refused: int = 0
    late: int = 0
    telemetry: WorkerTelemetry = field(default_factory=WorkerTelemetry)  # what its steps are made of
    version: int | None = None  # where workers hold the weights: the last exchange that it has of every chunk, if any
    # While it waits for answers, the sum of the numbers of its exchanges that are open here; see ``are_stuck``.
    # Its last two heartbeats said the same: in between, each worker that had gone on has said so.
    waits: int | None = None
    said_waits: int | None = None  # by its last heartbeat
    data_route: bytes = b""  # as ``route``, of everything else; b"" where nothing else came yet
    hello: int = 0  # the id of its newest HELLO, which may come twice

    def route_of(self, type: MessageType) -> bytes:
        """The connection for a message of this type; b"" without one."""
        return self.route if type in CONTROL else self.data_route or self.route

    @property
    def is_expected(self) -> bool:
        """A restarted server was told of it, and has not heard from it yet."""
        return self.phase is MemberPhase.EXPECTED

    def advance(self, event: MemberEvent) -> None:
        """Something happens to it."""
        self.phase = after(MEMBER, self.phase, event)

    def hear_waits(self, waits: int | None) -> bool:
        """A heartbeat says what it waits for; whether ``waits`` changes."""
        before, last = self.waits, self.said_waits
        self.waits, self.said_waits = waits if waits == last else None, waits
        return self.waits != before

    def to_meta(self) -> dict[str, Any]:
        """For a snapshot."""
        names = ("rank", "incarnation", "nonce", "user_id", "host", "pid")
        phases = {"is_live": self.phase.is_live, "was_live": self.phase.was_live}
        waits = {} if self.waits is None else {"waits": self.waits}
        return {**{name: getattr(self, name) for name in names}, **phases, **waits}

    @staticmethod
    def from_meta(meta: Mapping[str, Any], now_s: float) -> Member:
        """Inverse of ``to_meta``, with a fresh lease."""
        phase = MemberPhase.BEHIND if meta["was_live"] else MemberPhase.NEWCOMER
        if meta["is_live"]:
            phase = MemberPhase.LIVE
        identity = meta["rank"], meta["incarnation"], meta["nonce"], meta["user_id"]
        return Member(*identity, b"", phase, now_s, meta["host"], meta["pid"], waits=meta.get("waits"))


@dataclass(slots=True)
class _Claim:
    """Newcomers want a rank whose last process may be alive: since when, and when they last asked."""

    since_s: float
    asked_s: float


@dataclass(slots=True)
class _Absence:
    """A worker that is gone: its last state, the job's progress, and when it went."""

    member: Member
    progress: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Greeting:
    """The result of a HELLO that was accepted."""

    member: Member  # the worker
    missed_nothing: bool = False  # it was gone, and the job did nothing meanwhile
    progress: int = -1  # of the job when it was put out for its silence; -1 where it was not, or lacks what nobody has
    replaced_live: bool = False  # the rank was another process's, which exchanges waited for
    knows_members: bool = False  # it says that it took part itself


@dataclass
class Membership:
    """The workers of one job at one shard.

    Args:
        lease_s: silence after which a worker is evicted.
        wall_clock_ms: makes incarnations grow even across a server that forgot them; not used for liveness.
    """

    lease_s: float
    wall_clock_ms: Callable[[], int]
    members: dict[int, Member] = field(default_factory=dict)
    live_ranks: tuple[int, ...] = ()
    _claims: dict[int, _Claim] = field(default_factory=dict)
    _absent: dict[int, _Absence] = field(default_factory=dict)
    # By rank, the nonces of processes that newer ones have replaced. What became of their exchanges is not known any
    # more: the rank's numbers are those of the newer ones, even once these are gone.
    _replaced: dict[int, list[int]] = field(default_factory=dict)
    # Ranks that were here, in this life of the server, and went.
    _went: set[int] = field(default_factory=set)
    # Ranks whose last process took part and said goodbye: their numbers are those of that process.
    _ended: set[int] = field(default_factory=set)

    def greet(self, hello: Message, user_id: str, route: bytes, progress: int, now_s: float) -> Greeting | str:
        """A worker says HELLO; it becomes a member, not live yet.

        Without a rank it gets that of the same process before, else the lowest free one. Its incarnation is the one
        that the lead gave it; 0 asks for one (this shard is the lead). ``progress`` is a number that changes whenever
        the job does something that a worker could miss.

        A string is a refusal: "wait" (ask again), "duplicate" (the rank's process is alive), "replaced" (the rank went
        to a newer process), "denied" (it belongs to another key).
        """
        body, nonce, incarnation = hello.body, hello.body["nonce"], hello.incarnation
        # It was live, perhaps in a life of this server that the server knows nothing of.
        knows_members = body.get("rank") in (body.get("members") or ())
        rank = body.get("rank")
        if rank is None:
            rank = self._rank_of(nonce)
        holder, absence = self.members.get(rank), self._absent.get(rank)
        if holder is not None and holder.user_id != user_id and not holder.is_expected:
            return "denied"
        previous = holder or (absence.member if absence is not None else None)
        if holder is not None and holder.is_expected and absence is not None and not knows_members:
            previous = absence.member if absence.member.nonce == nonce else holder  # others name it, and it has to join
        # A process of a former life of the server, which this one has never met.
        is_late = previous is None and knows_members and rank in self._ended
        if is_late or nonce in self._replaced.get(rank, ()):
            return "replaced"
        is_awaited = holder is not None and holder.is_expected and knows_members
        is_known = previous is not None and previous.incarnation > 0 and previous.nonce == nonce
        same_process = is_known or is_awaited
        # An incarnation above the holder's: the lead has decided between the two processes.
        if holder is not None and not same_process and incarnation <= holder.incarnation:
            verdict = self._judge_claim(rank, holder, now_s)
            if verdict != "free":
                return verdict
        self._claims.pop(rank, None)
        self._absent.pop(rank, None)
        is_present = same_process and holder is not None and previous is holder
        if previous is not None and not same_process and previous.nonce:
            replaced = self._replaced.setdefault(rank, [])
            replaced.append(previous.nonce)
            del replaced[:-MAX_REPLACED]
        event = MemberEvent.KNEW_OTHERS if knows_members else MemberEvent.CAME
        if same_process:
            event = MemberEvent.HEARD
        phase = after(MEMBER, previous.phase if previous is not None else MemberPhase.ABSENT, event)
        known = previous.incarnation if previous is not None else 0
        if not incarnation:
            # Who is not live joins anew after each HELLO: an ADMIT that it was promised before does not count.
            goes_on = is_present and known and (phase.is_live or not self.is_said_anew(hello, user_id))
            incarnation = known if goes_on else max(known + 1, self.wall_clock_ms())
        member = Member(rank, incarnation, nonce, user_id, route, phase, now_s, body["host"], body["pid"])
        member.version, member.hello = body.get("version"), hello.sequence
        if holder is not None and is_present:
            member.hello = max(member.hello, holder.hello)
            member.pushes, member.refused, member.late = holder.pushes, holder.refused, holder.late
            member.telemetry = holder.telemetry
            if holder.data_route != holder.route:  # a connection of its own, of which HELLO says nothing
                member.data_route = holder.data_route
        self.members[rank] = member
        self._recount()
        left_at = absence.progress if same_process and absence is not None else None
        return Greeting(
            member,
            missed_nothing=left_at == progress,
            progress=-1 if left_at is None else left_at,
            replaced_live=holder is not None and holder.phase.is_live and not is_present,
            knows_members=knows_members,
        )

    def is_said_anew(self, hello: Message, user_id: str) -> bool:
        """Whether a member says HELLO once more, and this one is neither repeated nor late."""
        rank, nonce = hello.body.get("rank"), hello.body["nonce"]
        holder = None if rank is None else self.members.get(rank)
        if holder is None or (holder.nonce, holder.user_id) != (nonce, user_id):
            return False
        return hello.sequence > holder.hello

    def _rank_of(self, nonce: int) -> int:
        gone = [absence.member for absence in self._absent.values()]
        here = [member for member in self.members.values() if not member.is_expected]
        known = (member.rank for member in (*gone, *here) if member.nonce == nonce)
        free = (rank for rank in range(len(self.members) + 1) if rank not in self.members)
        return next(known, next(free))

    def _judge_claim(self, rank: int, holder: Member, now_s: float) -> str:
        claim = self._claims.get(rank)
        if claim is None or now_s - claim.asked_s > CLAIM_PATIENCE_S:
            self._claims[rank] = _Claim(now_s, now_s)
            return "wait"
        claim.asked_s = now_s
        if not holder.is_expected and holder.last_heard_s > claim.since_s + CLAIM_GRACE_S:
            del self._claims[rank]
            return "duplicate"
        return "wait" if now_s - claim.since_s < CLAIM_PATIENCE_S else "free"

    def find(self, message: Message, user_id: str, route: bytes, now_s: float) -> Member | str:
        """The member a message comes from, its lease renewed; or "fenced", or "stranger" for one never met."""
        rank = message.worker
        member = self.members.get(rank)
        if member is not None and member.is_expected:
            return "stranger"
        if member is not None and (member.incarnation, member.user_id) == (message.incarnation, user_id):
            member.last_heard_s = now_s
            if message.type in CONTROL:
                member.route = route
            else:
                member.data_route = route
            return member
        return "fenced" if member is not None or rank in self._absent else "stranger"

    def admit(self, rank: int) -> None:
        """From here on exchanges wait for this worker."""
        self.members[rank].advance(MemberEvent.ADMITTED)
        self._recount()

    def demote(self, rank: int) -> None:
        """Exchanges no longer wait for this worker, which stays a member: it has asked for state."""
        self.members[rank].advance(MemberEvent.DEMOTED)
        self._recount()

    def remove(self, rank: int, *, progress: int, now_s: float, forget: bool = False) -> None:
        """The worker is gone; with ``forget`` (it said goodbye) another process may take the rank at once."""
        member = self.members.pop(rank, None)
        if member is not None:
            self._went.add(rank)
            if forget and member.phase.was_live:
                self._ended.add(rank)
            self._claims.pop(rank, None)
            if not member.phase.is_live:
                progress = -1  # it waited for state, and had missed something already
            member.advance(MemberEvent.LEFT)
            if not forget and member.phase is not MemberPhase.ABSENT:
                self._absent[rank] = _Absence(member, progress, now_s)
            self._recount()

    def _recently_gone(self, now_s: float) -> list[_Absence]:
        """Workers that have not been gone for a lease."""
        return [gone for gone in self._absent.values() if now_s - gone.since_s <= self.lease_s]

    def has_survivor(self, rank: int, now_s: float) -> bool:
        """Whether another worker than ``rank`` has been live, and is here or has not been gone for a lease."""
        others = [*self.members.values(), *(gone.member for gone in self._recently_gone(now_s))]
        return any(other.phase.was_live for other in others if other.rank != rank)

    def may_others_be_ahead(self, rank: int, progress: int, now_s: float) -> bool:
        """Whether a worker may come back that was put out less than a lease ago, and after ``progress``."""
        others = (gone for gone in self._recently_gone(now_s) if gone.member.rank != rank)
        return any(gone.member.phase.was_live and gone.progress > progress for gone in others)

    def knows(self, rank: int | None, nonce: int) -> bool:
        """Whether the rank is taken (its process, or its successor, says HELLO), or the process was here before."""
        gone = (absence.member for absence in self._absent.values())
        return rank in self.members or any(member.nonce == nonce for member in (*self.members.values(), *gone))

    def lose_track(self) -> None:
        """The job goes on from one worker: all who are gone have to join, however far they were."""
        for gone in self._absent.values():
            gone.progress = -1

    def waits_of(self, rank: int) -> int | None:
        """See ``Member.waits``; None for who is no member."""
        member = self.members.get(rank)
        return None if member is None else member.waits

    def forget_waits(self) -> None:
        """The server has restarted: what workers wait for comes again."""
        for member in self.members.values():
            member.waits = None

    def begin_anew(self) -> None:
        """The job begins anew: all who were live are survivors of its former life."""
        for member in (*self.members.values(), *(gone.member for gone in self._absent.values())):
            member.advance(MemberEvent.ORPHANED)

    def remembered_count(self, now_s: float) -> int:
        """Workers that are here, or were put out less than a lease ago and may come back."""
        return len(self.members) + len(self._recently_gone(now_s))

    def is_remembered(self, now_s: float) -> bool:
        """Whether there is any of them."""
        return self.remembered_count(now_s) > 0

    def expired(self, now_s: float) -> list[int]:
        """Ranks whose lease ran out."""
        return [rank for rank, member in self.members.items() if now_s - member.last_heard_s > self.lease_s]

    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now nobody listened here: no lease and no claim ran meanwhile."""
        for member in self.members.values():
            member.last_heard_s += pause_s
        for claim in self._claims.values():
            claim.since_s += pause_s
            claim.asked_s += pause_s
        for gone in self._absent.values():
            gone.since_s += pause_s

    def expect(self, ranks: Iterable[int], now_s: float) -> None:
        """Wait one lease for workers that a restarted server is told of; they will say HELLO themselves.

        One that the snapshot has as a worker about to enter has entered since, or nobody would name it. One that was
        put out since the restart is not waited for, and has to join: it may name itself.
        """
        for rank in ranks:
            member = self.members.get(rank)
            if member is None and rank in self._went:
                continue
            if member is None:
                phase = after(MEMBER, MemberPhase.ABSENT, MemberEvent.TOLD)
                self.members[rank] = Member(rank, 0, 0, "", b"", phase, now_s, "expected")
            elif not member.route and not member.phase.is_live:  # of the snapshot, and not heard since
                member.advance(MemberEvent.TOLD)
        self._recount()

    def forget_expected(self) -> None:
        """The job begins anew: nobody is waited for who was named in its former life."""
        self.members = {rank: member for rank, member in self.members.items() if not member.is_expected}
        self._recount()

    def _recount(self) -> None:
        self.live_ranks = tuple(sorted(rank for rank, member in self.members.items() if member.phase.is_live))

    def to_meta(self) -> dict[str, Any]:
        """For a snapshot: members, and those gone, whose exchanges must not be applied again when they return."""
        return {
            "members": [member.to_meta() for member in self.members.values() if not member.is_expected],
            "absent": [gone.member.to_meta() for gone in self._absent.values()],
            "replaced": {str(rank): list(nonces) for rank, nonces in self._replaced.items()},
            "ended": sorted(self._ended),
        }

    def restore(self, meta: Mapping[str, Any], now_s: float) -> None:
        """Take over a snapshot's members; how much those gone have missed is unknown."""
        self.members = {m["rank"]: Member.from_meta(m, now_s) for m in meta["members"]}
        self._absent = {m["rank"]: _Absence(Member.from_meta(m, now_s), -1, now_s) for m in meta["absent"]}
        # Snapshots of older versions do not have them.
        self._replaced = {int(rank): list(nonces) for rank, nonces in meta.get("replaced", {}).items()}
        self._ended = set(meta.get("ended", ()))
        self._recount()
