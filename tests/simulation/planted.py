"""Bugs by name, to be planted one at a time: the simulator has to find each. They are monkeypatches of the product.

Those whose name begins with "again:" undo a correction of a bug that the simulator has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership as ClientMembership
from psengine.parameter_server.client.operation import Operation
from psengine.parameter_server.client.progress import Ledger
from psengine.parameter_server.client.pushes import Pushes
from psengine.parameter_server.server.core.admission import Admissions
from psengine.parameter_server.server.core.capture import Cuts
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.journal import Journal
from psengine.parameter_server.server.core.life import JobPhase
from psengine.parameter_server.server.core.membership import Membership
from psengine.parameter_server.server.core.weights_in_workers import AveragingJob
from psengine.parameter_server.server.durability.replay import Replay
from psengine.parameter_server.server.log.log import SegmentWriter
from psengine.parameter_server.server.rules.average import AverageOutcome
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import ChunkStore
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.each import Each
from psengine.parameter_server.server.rules.exchange import Progress, Reply
from psengine.parameter_server.server.rules.grace import GraceWindow
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.parameter_server.server.rules.step import StepOutcome
from psengine.parameter_server.server.rules.together import Together
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.parameter_server.server.transport.segments import ShardSegments
from psengine.protocol.messages import ErrorCode, MessageType
from simulation import snapshots
from simulation.job import run
from simulation.scenario import draw

Patch = Callable[[ExitStack], None]
PLANTED: dict[str, Patch] = {}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the product has this bug."""
    with ExitStack() as stack:
        PLANTED[name](stack)
        yield


def _plant(name: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
    """Register: ``make`` turns what ``owner.attribute`` is into what it is with the bug."""

    def patch(stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))

    PLANTED[name] = patch


# ---- servers that apply ------------------------------------------------------------------------------------


def _window_off_by_one(gather: Any) -> Any:
    def one(self: Each, contribution: Any) -> list[Reply]:
        known = self.progress.last_sequence
        if known.get(contribution.rank) == contribution.sequence:
            known[contribution.rank] -= 1
        return gather(self, contribution)

    return one


def _takes_new_numbers_only_in_order(gather: Any) -> Any:
    def one(self: Each, contribution: Any) -> list[Reply]:
        self.progress.last_sequence.setdefault(contribution.rank, 1)
        return gather(self, contribution)

    return one


def _answers_before_it_applies(conclude: Any) -> Any:
    def one(self: StepOutcome, sequence: int, update: Any) -> None:
        if sequence % 5:
            conclude(self, sequence, update)

    return one


_plant("the window of numbers is off by one", Each, "_gather", _window_off_by_one)
_plant("the first push of a worker is taken for a repeat", Each, "_gather", _takes_new_numbers_only_in_order)
_plant("every fifth update is acknowledged and dropped", StepOutcome, "conclude", _answers_before_it_applies)


def _probe_repeats(probe: Any) -> Any:
    def one(self: Each, rank: int, sequence: int) -> list[Reply]:
        replies = probe(self, rank, sequence)
        if replies and replies[0].type is MessageType.SENT:
            return [self._answer(rank, sequence, repeated=True)]
        return replies

    return one


_plant("a probe repeats the answer", Each, "probe", _probe_repeats)
_plant(
    "a probe of a push that is here says missing, and forgets it",
    Each,
    "probe",
    lambda probe: (
        lambda self, rank, sequence: (
            self.progress.last_sequence.__setitem__(rank, sequence - 1),
            probe(self, rank, sequence),
        )[1]
    ),
)


def _lead_minus_one(lead: Any) -> Any:
    return lambda self, rank: lead(self, rank) - 1


_plant("the staleness bound is off by one", Each, "_lead", _lead_minus_one)


def _clock_of_a_newcomer(came: Any) -> Any:
    def one(self: Each, rank: int, *, is_new_process: bool) -> list[Reply]:
        replies = came(self, rank, is_new_process=is_new_process)
        self._clocks[rank] = max(self._clocks.values())
        return replies

    return one


_plant("a newcomer starts level with the fastest", Each, "worker_came", _clock_of_a_newcomer)
_plant(
    "a new process goes on with the numbers of its predecessor",
    Each,
    "worker_came",
    lambda came: lambda self, rank, *, is_new_process: came(self, rank, is_new_process=False),
)
_plant(
    "a worker that comes back begins its numbers anew",
    Each,
    "worker_came",
    lambda came: lambda self, rank, *, is_new_process: came(self, rank, is_new_process=True),
)


def _old_version(answer: Any) -> Any:
    def one(self: StepOutcome, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        reply = answer(self, rank, sequence, repeated=repeated)
        reply.version -= repeated
        return reply

    return one


_plant("a repeated answer has the version before", StepOutcome, "answer", _old_version)

# ---- membership --------------------------------------------------------------------------------------------


def _find_anybody(find: Any) -> Any:
    def one(self: Membership, message: Any, user_id: str, route: bytes, now_s: float) -> Any:
        member = self.members.get(message.worker)
        return find(self, message, user_id, route, now_s) if member is None else member

    return one


_plant("old incarnations are not fenced", Membership, "find", _find_anybody)


def _same_incarnation(greet: Any) -> Any:
    def one(self: Membership, hello: Any, user_id: str, route: bytes, progress: int, now_s: float) -> Any:
        greeting = greet(self, hello, user_id, route, progress, now_s)
        if not isinstance(greeting, str) and not hello.incarnation:
            greeting.member.incarnation = 7
        return greeting

    return one


_plant("every process of a rank gets the same incarnation", Membership, "greet", _same_incarnation)


_plant("leases never run out", Membership, "expired", lambda expired: lambda self, now_s: [])


# ---- servers that average ----------------------------------------------------------------------------------

_plant(
    "the order of ranks is lost",
    ContributionSet,
    "given",
    lambda given: property(lambda self: [one for one in self.by_rank.values() if one.values is not None]),
)


def _keeps_contributions(left: Any) -> Any:
    def one(self: Together, rank: int) -> list[Reply]:
        return self._complete_all()

    return one


_plant("contributions of a worker that left stay", Together, "worker_left", _keeps_contributions)


def _ends_without_the_last(complete: Any) -> Any:
    def one(self: Together, sequence: int) -> list[Reply]:
        gathered, live = self._open.get(sequence), self.context.live_ranks()
        if gathered is not None and self._quorum is None and 1 < len(gathered.by_rank) == len(live) - 1:
            return self._end(gathered, sequence, live)
        return complete(self, sequence)

    return one


_plant("an exchange ends without the last worker", Together, "_complete", _ends_without_the_last)
_plant(
    "averages are forgotten one exchange too early",
    AverageOutcome,
    "forget_before",
    lambda forget: lambda self, sequence: forget(self, sequence + 1),
)
_plant(
    "a joiner goes on one exchange too late",
    Progress,
    "continue_from",
    lambda go_on: (
        lambda self, rank, donor, *, was_live: (
            go_on(self, rank, donor, was_live=was_live),
            self.last_sequence.__setitem__(rank, self.last_sequence.get(rank, 0) + 1),
        )[0]
    ),
)


def _joins_at_once(join: Any) -> Any:
    def one(self: AveragingJob, member: Any, request: int) -> list[Reply]:
        replies = join(self, member, request)
        return [*replies, Reply(MessageType.OK, member.rank, request), *self.let_in(member)]

    return one


_plant("a joiner is let in before its donor has deposited anything", AveragingJob, "join", _joins_at_once)


def _missed_nothing(place: Any) -> Any:
    def one(self: AveragingJob, greeting: Any, member: Any, now_s: float) -> Any:
        if member.phase.was_live and self.membership.live_ranks:
            return "ready", self.let_in(member)
        return place(self, greeting, member, now_s)

    return one


_plant("a worker that comes back has missed nothing", AveragingJob, "_place", _missed_nothing)
_plant(
    "a donor is asked for each JOIN anew",
    Admissions,
    "admit",
    lambda admit: lambda self, rank, incarnation, given: True,
)


def _any_result(send: Any) -> Any:
    def one(self: ClientMembership, link: Link, message: Any, now_s: float) -> None:
        last = link.pushes.last_answered(message.key)
        if last is not None:
            link.send_result(
                type(message)(
                    MessageType.RESULT, key=message.key, sequence=message.sequence, payload=last.result() * 2.0
                )
            )

    return one


_plant("a worker returns another average than it had", ClientMembership, "_send_result", _any_result)

_plant(
    "a gradient's weight is forgotten",
    ContributionSet,
    "_combine_weighted",
    lambda combine: lambda self, tensors, weights: combine(self, tensors, [1.0] * len(weights)),
)

_plant(
    "memory is taken without a limit",
    ChunkStore,
    "register",
    lambda register: (
        lambda self, message: (setattr(self, "_take_memory", lambda size_bytes, what: None), register(self, message))[1]
    ),
)

# ---- servers that merge ------------------------------------------------------------------------------------

_plant(
    "a merge does not wait for its window",
    GraceWindow,
    "is_over",
    lambda is_over: lambda self, present, live, now_s: True,
)
_plant(
    "a merge does not wait for its quorum",
    Merge,
    "_absent",
    lambda absent: lambda self: absent(self)[:-1],
)
_plant(
    "a merge forgets which pushes it took",
    Merge,
    "_take",
    lambda take: lambda self, contribution: None,
)

# ---- shared memory -----------------------------------------------------------------------------------------

_plant(
    "weights are written over while a worker reads them",
    StepOutcome,
    "_next_memory",
    lambda next_memory: lambda self: self._memories[0] if self._memories else next_memory(self),
)


def _frees_places(keep_members: Any) -> Any:
    def one(self: ShardSegments, shard: Any) -> None:
        before = dict(self._segments)
        keep_members(self, shard)
        for key, segment in before.items():
            for read in tuple(segment.reads) if key not in self._segments else ():
                segment.leave(read)

    return one


_plant("who loses its membership reads no more", ShardSegments, "keep_members", _frees_places)


def _gives_a_borrowed_gradient(combine: Any) -> Any:
    def one(self: ContributionSet) -> Any:
        self.by_rank = {rank: given._replace(is_borrowed=False) for rank, given in self.by_rank.items()}
        return combine(self)

    return one


_plant("an average is the worker's own memory", ContributionSet, "combine", _gives_a_borrowed_gradient)

# ---- codecs ------------------------------------------------------------------------------------------------


def _encodes_again(answer: Any) -> Any:
    def one(self: HeldWeights, rank: int, sequence: int, version: int, weights: Any, *, repeated: bool) -> Any:
        known = self._held.get(rank)
        if known is not None and known.sequence == sequence:
            known.sequence -= 1
        return answer(self, rank, sequence, version, weights, repeated=False)

    return one


_plant("a repeated difference is another one", HeldWeights, "answer", _encodes_again)


def _encodes_for_each(answer: Any) -> Any:
    def one(self: AverageOutcome, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        reply = answer(self, rank, sequence, repeated=repeated)
        if repeated and self.payloads.encodes_answers and reply.payload is not None:
            reply.payload = reply.payload.clone().fill_(0)
        return reply

    return one


_plant("a repeated average is another one", AverageOutcome, "answer", _encodes_for_each)


def _all_arrives(encode_difference: Any) -> Any:
    def one(self: ChunkPayloads, weights: Any, held: Any) -> Any:
        payload = encode_difference(self, weights, held)
        held.copy_(weights)
        return payload

    return one


_plant("a server forgets what a difference leaves out", ChunkPayloads, "encode_difference", _all_arrives)

# ---- clients -----------------------------------------------------------------------------------------------


def _any_answer(find: Any) -> Any:
    return lambda self, message: self.sent.get(message.key)


def _gives_up(receive: Any) -> Any:
    def one(self: Pushes, message: Any, now_s: float) -> None:
        if message.type is not MessageType.MISSING:
            receive(self, message, now_s)

    return one


_plant("an answer to any push of the chunk is taken", Pushes, "find", _any_answer)
_plant("a client does not send again what is missing", Pushes, "receive_probed", _gives_up)
_plant("a client never asks about a push", Pushes, "tick", lambda tick: lambda self, now_s: None)
_plant(
    "a fenced client goes on with its own state",
    ClientMembership,
    "resume",
    lambda resume: lambda self, fenced=None: resume(self, None),
)
_plant(
    "a client does not look after its requests",
    Link,
    "_send_marker",
    lambda send: lambda self, now_s: None,
)

# ---- snapshots ---------------------------------------------------------------------------------------------

_plant("a snapshot does not await steps under way", Cuts, "awaited", lambda awaited: lambda self, goals, ranks: {})


def _without(*names: str) -> Callable[[Any], Any]:
    def make(to_meta: Any) -> Any:
        return lambda self: {**to_meta(self), **{name: {} for name in names}}

    return make


_plant("a snapshot lacks the table of numbers", Each, "to_meta", _without("last_sequence"))


def _version_ahead(to_meta: Any) -> Any:
    return lambda self: {**to_meta(self), "version": self.progress.version + 1}


_plant("a snapshot's version is one ahead", StepOutcome, "to_meta", _version_ahead)
_plant(
    "a snapshot keeps the values that the server goes on changing",
    StepOutcome,
    "tensors",
    lambda tensors: (
        lambda self: {
            name: _Uncopied.of(tensor) if name == "values" else tensor for name, tensor in tensors(self).items()
        }
    ),
)


class _Uncopied:
    """A tensor whose clone is itself, once."""

    @staticmethod
    def of(tensor: Any) -> Any:
        shown = tensor.view(-1)
        shown.clone = lambda: tensor
        return shown


# ---- the log ------------------------------------------------------------------------------------------------


def _at_once(send: Any) -> Any:
    def one(self: HeldAnswers, route: bytes, frames: Any, *, pins: Any = None, is_urgent: bool = False) -> None:
        send(self, route, frames, pins=pins, is_urgent=True)

    return one


_plant("an update is acknowledged before its fsync", HeldAnswers, "send", _at_once)
_plant("the log is written and never synced", SegmentWriter, "sync", lambda sync: lambda self: None)
_plant("the log is not replayed", Replay, "take", lambda take: lambda self, reader: [None for _ in reader] and None)


def _every_third(message: Any) -> Any:
    def one(self: Journal, job: Any, taken: Any) -> None:
        if taken.type is not MessageType.PUSH or taken.sequence % 3:
            message(self, job, taken)

    return one


_plant("every third push is not logged", Journal, "message", _every_third)
_plant(
    "segments that the snapshot needs are deleted",
    snapshots,
    "delete_before",
    lambda delete: lambda disk, starts: delete(disk, {shard: first + 1 for shard, first in starts.items()}),
)

# ---- what the simulator has found, again -------------------------------------------------------------------


def _forgets_the_replaced(greet: Any) -> Any:
    def one(self: Membership, *arguments: Any) -> Any:
        self._replaced.clear()
        return greet(self, *arguments)

    return one


_plant("again: a process that was replaced may come back", Membership, "greet", _forgets_the_replaced)


_plant(
    "again: a job without live workers gets its chunks from worker 0",
    AveragingJob,
    "initialiser",
    lambda initialiser: property(
        lambda self: (
            self.membership.live_ranks[0] if self.phase is JobPhase.REBUILDING and self.membership.live_ranks else 0
        )
    ),
)


_plant(
    "again: a worker catches up on averages that nobody has",
    ChunkRule,
    "can_catch_up",
    lambda can_catch_up: (
        lambda self, rank, reached: self.outcome.can_answer(self.progress.last_sequence.get(rank, 0) + 1, self.version)
    ),
)
_plant(
    "again: merges of several chunks wait for each other", Job, "_is_stuck", lambda is_stuck: lambda self, rank: False
)


def _takes_any_join(join: Any) -> Any:
    def one(self: Admissions, rank: int, request: int, live: Any) -> Any:
        self._joins.pop(rank, None)
        return join(self, rank, request, live)

    return one


def _gives_up_nothing(abandon: Any) -> Any:
    return lambda self: None


def _joins_twice(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Admissions, "join", _takes_any_join(Admissions.join)))
    stack.enter_context(mock.patch.object(Operation, "abandon", _gives_up_nothing(Operation.abandon)))


PLANTED["again: a JOIN that was given up is answered, and not the one that counts"] = _joins_twice


def _supplies_any(ask: Any) -> Any:
    def one(self: Together, sequence: int) -> list[Reply]:
        quorum, self._quorum = self._quorum, None
        try:
            return ask(self, sequence)
        finally:
            self._quorum = quorum

    return one


_plant("again: an average without its contributors is taken under a quorum", Together, "_ask_for_result", _supplies_any)


def _hears_nothing_while_held(receive: Any) -> Any:
    def one(self: Link, message: Any, now_s: float) -> None:
        lost = message.body.get("code") in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)
        if not (self.is_paused and lost):
            receive(self, message, now_s)

    return one


_plant("again: a recovery does not hear that it was in vain", Link, "_receive_error", _hears_nothing_while_held)


_plant(
    "again: a shard that was sealed before worker 0 died takes no values",
    Job,
    "check_registering",
    lambda check: Job._check_initialiser,
)


class _EveryLife(set[int]):
    """All numbers: no life of a server is one that has yet to let this worker in."""

    def __contains__(self, epoch: object) -> bool:
        return True


def _knows_every_life(welcomed: Any) -> Any:
    def one(self: Ledger, *arguments: Any) -> None:
        welcomed(self, *arguments)
        self.epochs = _EveryLife()

    return one


_plant("again: a recovery does not hear of one more restart", Ledger, "welcomed", _knows_every_life)


def _answers_first(gather: Any) -> Any:
    def one(self: Merge, contribution: Any) -> list[Reply]:
        version = self.progress.version
        replies = gather(self, contribution)
        if replies and replies[0].body.get("refused") == "abstained":
            replies[0].version = version
        return replies

    return one


_plant("again: who abstains gets newer weights than their version", Merge, "_gather", _answers_first)


def _waits_for_the_idle(go_on: Any) -> Any:
    def one(self: Merge, meta: Any, tensors: Any) -> None:
        go_on(self, meta, tensors)
        self._idle.clear()

    return one


_plant("again: a recovery waits for workers that abstained", Merge, "go_on", _waits_for_the_idle)


def _level(came: Any) -> Any:
    def one(self: Each, rank: int, *, is_new_process: bool) -> list[Reply]:
        own, bound = self._clocks.get(rank, 0), self._max_staleness
        others = [self._clocks.get(other, 0) for other in self.context.live_ranks() if other != rank]
        self._max_staleness = None if bound is None else -1
        try:
            came(self, rank, is_new_process=is_new_process)
        finally:
            self._max_staleness = bound
        self._clocks[rank] = min(others, default=own)
        return self._release()

    return one


_plant("again: a worker that comes back to one shard is level with the slowest", Each, "worker_came", _level)


def _counts_for_its_predecessor(late: Any) -> Any:
    def one(self: Together, contribution: Any) -> list[Reply]:
        ended = dict(self._ended)
        replies = late(self, contribution)
        self._ended.update({known: ranks for known, ranks in ended.items() if known in self._ended})
        for reply in replies:
            if contribution.rank in ended.get(reply.sequence, ()):
                reply.body.pop("late", None)
        return replies

    return one


_plant("again: a process counts for its predecessor", Together, "_answer_late", _counts_for_its_predecessor)


def seeds_until_found(name: str, limit: int) -> tuple[int, str]:
    """After how many seeds a planted bug is found, and by what; (0, "") where it is not within ``limit``."""
    with planted(name):
        for seed in range(limit):
            violation = run(draw(seed)).violation
            if violation:
                return seed + 1, violation
    return 0, ""
