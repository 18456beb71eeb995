"""A job whose servers step, and its oracle, which shares no code with the shard.

Push n of a chunk adds 4^(n mod 26) to element n // 26 (float64, SGD, rate 1, from zeros); under a codec it has another
mark, see ``marks.py``. As one number in base 4 the chunk's values name each update: digit 0 is lost, 2 is doubled. Of n
pushes each has a bit, so a set of updates is one integer, and "is contained in" an and-not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.server.interfaces import Outgoing
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import Message, MessageType
from simulation.answers import SentAnswers
from simulation.marks import MOST, Marks, marks_for
from simulation.payloads import decoded
from simulation.told_weights import Place, ToldWeights
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.server import ServerProcess
    from simulation.worker import WorkerProcess

_TWOS = int("aa" * (MOST // 4), 16)
SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


def layout(chunks: int, numel: int, dtype: torch.dtype) -> list[ChunkSpec]:
    """The model."""
    return [
        ChunkSpec(key, ChunkKind.PARAMETER, dtype, numel, (Segment(f"p{key}", (numel,), (1,), 0, numel),))
        for key in range(chunks)
    ]


@dataclass
class PushRecord:
    """One push of a chunk, as its worker made it."""

    rank: int
    process: int
    step: int
    sequence: int
    is_refused: bool = False


@dataclass
class Cut:
    """What is known of a snapshot.

    Attributes:
        versions: of each chunk, when it was captured.
    """

    versions: dict[int, int]


@dataclass
class ChunkOracle:
    """What is known of one chunk.

    Attributes:
        pushes: push n is number n.
        applied: the updates in the servers' values, by the oracle's own account.
        states: version -> the updates that it has.
        clocks: by rank, how many pushes count since it came, from where it came in.
    """

    pushes: list[PushRecord] = field(default_factory=list)
    applied: int = 0
    states: dict[int, int] = field(default_factory=lambda: {0: 0})
    clocks: dict[int, int] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return len(self.states) - 1

    def pushes_of(self, updates: int) -> list[PushRecord]:
        """The pushes that made these."""
        return [push for number, push in enumerate(self.pushes) if updates >> (2 * number) & 1]


class ApplyingJob:
    """The program of every worker, and the oracle."""

    rule_name = "apply"

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.marks: Marks = marks_for(scenario.codec)
        self.specs = layout(scenario.chunks, self.marks.numel, self.marks.dtype)
        has_codec_down = "" if scenario.rule == "merge" else scenario.codec
        self._told = ToldWeights(has_codec_down, self.marks.numel, self.marks.dtype)
        self.rule: dict[str, Any] = {
            "name": "apply",
            "max_staleness": scenario.max_staleness,
            "staleness_scaling": None,
            "delay_compensation": 0.0,
        }
        self.chunks = [ChunkOracle() for _ in self.specs]
        self.epochs: dict[int, int] = {}  # by key, the life of the server that holds it
        self.steps_done: dict[int, int] = defaultdict(int)
        self.answered = 0
        # By (server, shard): the newest incarnation of each rank, who is live (rank -> nonce), and all that ever were.
        self._newest: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._live: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._came: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._processes: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # rank -> nonce, of the last one
        self._excused: set[int] = set()
        # By chunk, (life of its server, version) when a bit flipped, maybe of a record that was not synced yet.
        self._damaged: dict[int, tuple[int, int]] = {}
        self._sent = SentAnswers()
        self._seen: dict[tuple[int, int, int], int] = {}  # (process, chunk, life of the server) -> newest version
        # By server, the versions that its newest intact snapshot has at least.
        self._promised: dict[int, dict[int, int]] = defaultdict(dict)
        # By process and chunk, the answer that it reads in the server's memory.
        self._lent: dict[tuple[int, int], torch.Tensor] = {}
        self._last_sequence = 0  # of the sender of the message under way
        # (rank, nonce) of those that a restored shard has as about to enter: they enter anew.
        self._restored_newcomers: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self._entered: dict[int, WorkerProcess] = {}  # by rank, the process that entered last
        # When one of several workers that waited for each other was answered last, or one came or went.
        self._let_go_s = -math.inf
        self._changed: set[int] = set()  # by that message: ranks whose process went, came or was replaced
        # By (life of a server, shard) and rank, what its last two heartbeats said that it waits for.
        self._waits: dict[tuple[int, int], dict[int, tuple[int | None, int | None]]] = defaultdict(dict)
        # By (life of a server, chunk) and rank, its exchange that is here and not answered.
        self._unanswered: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    # ---- a worker ----------------------------------------------------------------------------------------------

    def is_done(self, rank: int) -> bool:
        """Whether this worker has taken all its steps."""
        return self.steps_done[rank] >= self.scenario.steps

    def program(self, process: WorkerProcess, think_s: Callable[[], float]) -> Flow[None]:
        """Train."""
        session = process.session
        weights = yield from self._enter(process)
        while not self.is_done(process.rank):
            yield think_s()
            step = self.steps_done[process.rank]
            pushes = [self._push(process, spec.key, step, weights[spec.key]) for spec in self.specs]
            with session.telemetry.blocked():
                yield [push for _, push in pushes]
            for number, push in pushes:
                self._check_answer(process, number, push, weights[push.key])
            self.steps_done[process.rank] = step + 1

    def _enter(self, process: WorkerProcess) -> Flow[list[torch.Tensor]]:
        """Take part, with the servers' weights."""
        session, membership = process.session, process.membership
        welcome = yield from handshake.enter(membership)
        weights = [torch.zeros(self.marks.numel, dtype=self.marks.dtype) for _ in self.specs]
        yield from join.take_part(membership, welcome.state, self.specs, lambda spec: weights[spec.key])
        process.has_state = True
        self._entered[process.rank] = process
        body = {"optimizer": "SGD", "groups": [SGD], "runs": [[0, self.marks.numel, 0]]}
        yield [session.configure(spec.key, body) for spec in self.specs]
        pulls = [session.pull(spec.key, [weights[spec.key]]) for spec in self.specs]
        yield pulls
        for spec, pull in zip(self.specs, pulls, strict=True):
            self._check_landed(process, spec.key, weights[spec.key], session.version(spec.key), pull.reply())
        return weights

    def _push(self, process: WorkerProcess, key: int, step: int, landing: torch.Tensor) -> tuple[int, Push]:
        chunk, session = self.chunks[key], process.session
        number = len(chunk.pushes)
        require(number < MOST, "the simulation has too few digits")
        self._check_lent(process, key, landing)
        push = session.push(key, -self.marks.mark(number), [landing], [SGD], reads_in_place=number % 3 > 0)
        chunk.pushes.append(PushRecord(process.rank, process.number, step, push.sequence))
        return number, push

    def _check_lent(self, process: WorkerProcess, key: int, landed: torch.Tensor) -> None:
        """An answer in the server's memory stays as it was until the next push."""
        lent = self._lent.pop((process.number, key), None)
        is_same = lent is None or torch.equal(lent, landed)
        require(is_same, "the answer of chunk {} changed while worker {} read it", key, process.rank)

    def _check_answer(self, process: WorkerProcess, number: int, push: Push, landing: torch.Tensor) -> None:
        result = push.wait()
        if push.lent is not None:
            landing.copy_(push.lent)
            self._lent[process.number, push.key] = push.lent
        chunk = self.chunks[push.key]
        self.answered += 1
        if result.refused is not None:
            chunk.pushes[number].is_refused = True
            require(
                not chunk.applied >> (2 * number) & 1, "push {} of chunk {} was refused, and applied", number, push.key
            )
        assert push.answer is not None
        if push.answer.epoch == self.epochs.get(push.key):
            if result.refused is None:
                is_there = chunk.applied >> (2 * number) & 1
                require(is_there, "push {} of chunk {} was acknowledged, and not applied", number, push.key)
            self._check_landed(process, push.key, landing, result.version, push.answer)
        residual = process.session.residual(push.key)
        require(residual is None or not residual.any(), "chunk {} has a residual: {}", push.key, residual)

    def _check_landed(
        self, process: WorkerProcess, key: int, landing: torch.Tensor, version: int, answer: Message
    ) -> None:
        if answer.epoch != self.epochs.get(key):
            return  # of a life of the server that has ended
        seen = process.number, key, answer.epoch
        known = self._seen.get(seen, 0)
        require(version >= known, "chunk {} fell from version {} to {} at worker {}", key, known, version, process.rank)
        self._seen[seen] = version
        if answer.type is MessageType.UPDATED and self._told.are_differences:
            place = Place(answer.epoch, key, process.rank, answer.incarnation)
            is_told = self._told.has_told(place, answer.sequence, version, landing)
            require(is_told, "worker {} holds what version {} of chunk {} was not", process.rank, version, key)
            return
        found = self.marks.updates(landing)
        expected = self.chunks[key].states.get(version)
        require(
            found == expected,
            "worker {} got version {} of chunk {} with updates {:x}, expected {:x}",
            process.rank,
            version,
            key,
            found,
            -1 if expected is None else expected,
        )

    # ---- the servers -------------------------------------------------------------------------------------------

    def told(self, server: ServerProcess, message: Message) -> None:
        """See ``ServerWitness``."""
        epoch, version = self._damaged.get(message.key, (-1, 0))
        is_damaged = message.epoch == epoch and message.version <= version
        if self.scenario.keeps_log and message.epoch == self.epochs.get(message.key) and not is_damaged:
            promised = self._promised[server.index]
            promised[message.key] = max(promised.get(message.key, 0), message.version)

    def is_excused(self, server: int) -> bool:
        """Whether bits of this server's disk have flipped."""
        return server in self._excused

    def captured(self, server: ServerProcess) -> Cut:
        """See ``SnapshotWitness``.

        Nothing is promised of a job that only some shards have: worker 0 is giving it its values, nobody else was told
        that there are any, and a restart leaves it out.
        """
        kept = [shard.jobs.kept() for shard in server.shards]
        keys = [key for jobs in kept for job in jobs for key in job.chunks.rules] if all(kept) else []
        versions = {key: self.chunks[key].version for key in keys}
        return Cut(versions)

    def durable(self, server: ServerProcess, note: Cut) -> None:
        """See ``SnapshotWitness``."""
        if not self.scenario.keeps_log:
            self._promised[server.index] = dict(note.versions)

    def damaged(self, server: int, note: Cut | None) -> None:
        """The newest snapshot that a server can restore is an older one, or none."""
        self._promised[server] = {} if note is None else dict(note.versions)
        self._excused.add(server)
        self._damaged |= {key: (epoch, self.chunks[key].version) for key, epoch in self.epochs.items()}

    def server_started(self, server: ServerProcess, note: Cut | None) -> None:
        """A life of a server begins: what it lost is allowed by its tier."""
        for shard in server.shards:
            place = server.index, shard.index
            self._newest[place], self._live[place], self._came[place] = {}, {}, set()
            self._processes[place] = {}
        restored: set[int] = set()
        for shard in server.shards:
            for job in shard.jobs.by_number.values():
                for key, rule in job.chunks.rules.items():
                    restored.add(key)
                    self._take_restored(key, server.epoch, rule)
                members = {rank: job.membership.members[rank].nonce for rank in job.membership.live_ranks}
                self._live[server.index, shard.index] = members
                self._came[server.index, shard.index] = set(job.came)
                membership = job.membership
                known = {rank: one.member for rank, one in membership._absent.items()} | membership.members
                processes = {rank: one.nonce for rank, one in known.items() if one.phase.was_live}
                self._processes[server.index, shard.index] = processes
                newcomers = {(rank, one.nonce) for rank, one in known.items() if not one.phase.was_live}
                self._restored_newcomers[server.index, shard.index] = newcomers
        for key, version in self._promised[server.index].items():
            is_there = key in restored and self.chunks[key].version >= version
            require(is_there, "version {} of chunk {} was durable, and is gone after a restart", version, key)

    def _take_restored(self, key: int, epoch: int, rule: Any) -> None:
        chunk = self.chunks[key]
        version, found = rule.version, self.marks.updates(rule.outcome.values)
        require(
            chunk.states.get(version) == found,
            "chunk {} came back as version {} with {:x}, expected {:x}",
            key,
            version,
            found,
            chunk.states.get(version, -1),
        )
        chunk.applied = found
        chunk.states = {known: updates for known, updates in chunk.states.items() if known < version} | {version: found}
        chunk.clocks = dict(rule.clocks())
        self.epochs[key] = epoch

    def before(self, server: ServerProcess, shard: Shard, message: Message) -> None:
        """See ``ServerWitness``."""
        self._last_sequence = self._sequence_of(shard, message) if message.type is MessageType.PUSH else 0

    def _sequence_of(self, shard: Shard, message: Message) -> int:
        """The last exchange of this worker that the chunk has counted."""
        job = shard.jobs.by_number.get(message.job)
        rule = None if job is None else job.chunks.rules.get(message.key)
        return 0 if rule is None else rule.progress.last_sequence.get(message.worker, 0)

    def after(self, server: ServerProcess, shard: Shard, message: Message | None, outgoing: list[Outgoing]) -> None:
        """See ``ServerWitness``."""
        place = server.index, shard.index
        if message is not None and message.type is MessageType.HELLO:
            rank, took_part = message.body["rank"], message.body.get("members") or ()
            nonce = message.body["nonce"]
            if rank in took_part and (rank, nonce) not in self._restored_newcomers[place]:
                # In a life of the server that this one knows nothing of.
                self._processes[place].setdefault(rank, nonce)
        for job in shard.jobs.by_number.values():
            live = job.membership.live_ranks
            known = self._live[place]
            members = {rank: job.membership.members[rank].nonce for rank in live}
            gone = {rank for rank in known.keys() | members.keys() if known.get(rank) != members.get(rank)}
            self._changed = gone
            if gone:
                self._let_go_s = server.clock.now_s
            self._note_members(place, members)
            self._note_waits(server, shard, gone, message, outgoing)
            self._check_changes(server, shard, message, job)
            if message is not None and message.type is MessageType.REGISTER and is_taken(outgoing):
                self.epochs[message.key] = server.epoch
                chunk = self.chunks[message.key]
                chunk.applied, chunk.states, chunk.clocks = 0, {0: 0}, {}
        self._sent.check(server.epoch, message, outgoing)
        for one in outgoing:
            kind = one.message.type
            if kind is MessageType.UPDATED:
                self._check_updated(server, shard, one.message)
            elif kind is MessageType.WELCOME and one.message.body["state"] != "wait":
                newest = self._newest[server.index, shard.index]
                newest[one.message.worker] = one.message.incarnation
        for job in shard.jobs.by_number.values():
            self._note_clocks(place, job.chunks.rules)

    def _note_members(self, place: tuple[int, int], members: dict[int, int]) -> None:
        self._live[place] = members
        self._came[place].update(members)

    def _note_clocks(self, place: tuple[int, int], keys: Any) -> None:
        """Where workers that came begin; the answers that left as those they replace went have leveled others."""
        members = self._live[place]
        for rank in self._changed & members.keys():
            for key in keys:
                clocks = self.chunks[key].clocks
                own = clocks.get(rank, 0)
                clock = min((clocks.get(other, 0) for other in members if other != rank), default=own)
                was_here = self._processes[place].get(rank) == members[rank]
                if was_here and (bound := self.scenario.max_staleness) is not None:
                    clock = max(own, clock - bound - 1)
                clocks[rank] = clock
        self._processes[place].update(members)

    def _check_changes(self, server: ServerProcess, shard: Shard, message: Message | None, job: Any) -> None:
        """What the chunks' values are now."""
        if message is not None and message.type is MessageType.PUSH:
            self._told.said(server.epoch, message)
            self._check_push((server.index, shard.index), shard, message)

    def _check_push(self, place: tuple[int, int], shard: Shard, message: Message) -> None:
        job = shard.jobs.by_number[message.job]
        rule = job.chunks.rules.get(message.key)
        if rule is None or message.payload is None:
            return
        chunk = self.chunks[message.key]
        if self._sequence_of(shard, message) != self._last_sequence:
            chunk.clocks[message.worker] = chunk.clocks.get(message.worker, 0) + 1
            epoch = self.epochs[message.key]
            self._unanswered[epoch, message.key][message.worker] = message.sequence
            self._waits[epoch, shard.index].pop(message.worker, None)
        gradient = decoded(self.scenario.codec, message.payload, self.marks.numel)
        pushed = self.marks.updates(torch.from_numpy(-gradient))
        found = self.marks.updates(rule.outcome.values)
        added = found - chunk.applied
        if not added:
            return
        number = (pushed.bit_length() - 1) // 2
        require(added == pushed, "push {} of chunk {} changed it by {:x}", number, message.key, added)
        require(not chunk.applied & pushed, "push {} of chunk {} was applied twice", number, message.key)
        newest = self._newest[place].get(message.worker)
        require(
            newest is None or message.incarnation >= newest,
            "push {} of chunk {} is of incarnation {} of worker {}, and was applied after {} was let in",
            number,
            message.key,
            message.incarnation,
            message.worker,
            newest,
        )
        record = chunk.pushes[number]
        require(not record.is_refused, "push {} of chunk {} was refused, and applied later", number, message.key)
        require(
            record.rank == message.worker, "push {} of chunk {} is not worker {}'s", number, message.key, record.rank
        )
        chunk.applied = found
        chunk.states[len(chunk.states)] = found

    def _check_updated(self, server: ServerProcess, shard: Shard, message: Message) -> None:
        chunk = self.chunks[message.key]
        found = chunk.applied
        if self._told.are_differences:
            self._told.updated(server.epoch, message, self.marks.weights(found), chunk.version)
        else:
            found = self._found_in(message)
        require(not found & _TWOS, "chunk {} has an update twice: {:x}", message.key, found)
        require(
            self._told.are_differences or (message.version, found) == (chunk.version, chunk.applied),
            "chunk {} was answered as version {} with {:x}, expected version {} with {:x}",
            message.key,
            message.version,
            found,
            chunk.version,
            chunk.applied,
        )
        self._check_lead(server, shard, message)

    def _found_in(self, message: Message) -> int:
        """The updates in an answer."""
        values = message.payload
        assert isinstance(values, torch.Tensor)
        if values.dtype is not self.marks.dtype:
            values = torch.from_numpy(decoded(self.scenario.codec, values, self.marks.numel))
        return self.marks.updates(values)

    def _check_lead(self, server: ServerProcess, shard: Shard, message: Message) -> None:
        """No worker is answered while it is too far ahead of one that can go on without that; others count as level."""
        chunk, rank = self.chunks[message.key], message.worker
        stuck = self._stuck(server, shard)
        self._unanswered[server.epoch, message.key].pop(rank, None)
        bound = self.scenario.max_staleness
        if bound is None:
            return
        place = server.index, shard.index
        live, clocks = self._live[place], chunk.clocks
        own = clocks.get(rank, 0)
        slower = {other for other in live if own - clocks.get(other, 0) > bound}
        are_all_here = own <= bound or len(self._came[place]) >= self.scenario.workers
        # A process that is replaced is gone before the next one is here.
        awaited = slower - self._changed
        is_stuck = not awaited or (live.keys() <= stuck and self._are_waiting(awaited, server.clock.now_s))
        where = "worker {} is {} steps ahead of workers {} in chunk {} (bound {})"
        lead = own - min((clocks.get(other, 0) for other in live), default=0)
        require(are_all_here and is_stuck, where, rank, lead, sorted(slower), message.key, bound)
        clocks.update(dict.fromkeys(slower - self._changed, own))

    # ---- who is stuck ------------------------------------------------------------------------------------------

    def _note_waits(
        self,
        server: ServerProcess,
        shard: Shard,
        gone: set[int],
        message: Message | None,
        outgoing: list[Outgoing],
    ) -> None:
        """A message came; workers ``gone`` are replaced, or came, or went."""
        waits = self._waits[server.epoch, shard.index]
        for rank in gone:
            waits.pop(rank, None)
            for key in self.epochs:
                self._unanswered[server.epoch, key].pop(rank, None)
        for one in outgoing:
            if one.message.type is MessageType.WELCOME:
                waits.pop(one.message.worker, None)
            elif one.message.type is MessageType.HEARTBEAT_ACK:
                assert message is not None
                _, last = waits.get(message.worker, (None, None))
                waits[message.worker] = last, message.body.get("waits")
            elif one.message.type is MessageType.PENDING:  # a push that a former life of the server took in
                self._unanswered[server.epoch, one.message.key][one.message.worker] = one.message.sequence

    def _stuck(self, server: ServerProcess, shard: Shard) -> set[int]:
        """Who waits for answers of other shards, or for ones of this shard that are held.

        A worker may have got what it waits for from another shard, which this one hears with its next message.
        """
        keys = [key for job in shard.jobs.by_number.values() for key in job.chunks.rules]
        waits = self._waits[server.epoch, shard.index]
        sums = {rank: self._sum_of_open(server.epoch, keys, rank) for rank in waits}
        return {rank for rank, said in waits.items() if said == (sums[rank], sums[rank])}

    def _are_waiting(self, ranks: Collection[int], now_s: float) -> bool:
        """Whether workers bring nothing to any shard of any server, by their own state: dead, or without an answer yet.

        Shards do not know of each other. Where workers all wait for each other, or for one that is gone, two shards may
        answer two of them, the second shard before it hears that the first worker goes on.
        """
        heard_within_s = 2 * (self.scenario.heartbeat_s + self.scenario.latency_s[1])
        is_after_another = now_s <= self._let_go_s + heard_within_s
        entered = [self._entered[rank] for rank in ranks if rank in self._entered]
        are_waiting = all(one.is_dead or one.session.telemetry.is_blocked for one in entered)
        if are_waiting:
            self._let_go_s = now_s
        return are_waiting or is_after_another

    def _sum_of_open(self, epoch: int, keys: list[int], rank: int) -> int:
        return sum(self._unanswered[epoch, key].get(rank, 0) for key in keys)


def is_taken(outgoing: list[Outgoing]) -> bool:
    """Whether a request was answered by OK."""
    return bool(outgoing) and outgoing[0].message.type is MessageType.OK
