"""A job whose servers average, and its oracle, which shares no code with the shard.

A contribution has 4^rank in element 0, a number of its own in element 1, and numbers of very different sizes in the
others, whose sum depends on the order of addition. So an average names who took part, with which contribution; the
oracle adds those in the order of ranks and compares bits. Whoever takes part must hold the same model.

Under a codec a contribution has 12 in one element, which is its own: every codec keeps averages of 1 to 4 of them.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from psengine.errors import FencedError, ServerRefusedError
from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.server.interfaces import Outgoing
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.messages import ErrorCode, Message, MessageType
from simulation.answers import SentAnswers
from simulation.applying import is_taken, layout
from simulation.quorum import Quorum
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.server import ServerProcess
    from simulation.worker import WorkerProcess

NUMEL, CODED_NUMEL = 6, 256
CODED_VALUE = 12.0  # divisible by the numbers of workers
WEIGHTS = (1.0, 1.0, 2.0, 8.0)  # of batches; powers of two: products with them are exact
STATE_BLOB = "worker_state"
MAX_REJOINS = 8  # as in strategies/servers/sync.py


@dataclass(frozen=True)
class Contribution:
    """One push: who made it, from which model, and what its gradient counts."""

    rank: int
    values: tuple[float, ...]
    base: int  # digest of the replica
    weight: float = 1.0


@dataclass
class Replica:
    """A worker's model."""

    values: list[torch.Tensor]
    step: int = 0
    is_mixed: bool = False  # of its own state and another's

    def digest(self) -> int:
        """Equal for equal models; the same in every process."""
        return hash((self.step, *(number for value in self.values for number in value.tolist())))


class AveragingJob:
    """The program of every worker, and the oracle."""

    rule_name = "average"

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._numel = CODED_NUMEL if scenario.codec else NUMEL
        self._dtype = torch.float32 if scenario.codec not in ("", "fp32") else torch.float64
        self.specs = layout(scenario.chunks, self._numel, self._dtype)
        self.rule: dict[str, Any] = {"name": "average", "quorum": scenario.quorum}
        self.answered = 0
        self._rng = random.Random(f"values {scenario.seed}")
        self._tags = [itertools.count(1) for _ in self.specs]
        # (life of a server, shard) -> (chunk, exchange) -> its average, as it travels, and (rank, nonce) told of it.
        self._averages: dict[tuple[int, int], dict[tuple[int, int], tuple[bytes, set[tuple[int, int]]]]] = {}
        self._steps_done: dict[int, int] = defaultdict(int)
        # (chunk, exchange, rank) -> contributions that were made to it.
        # (life of a server, shard) -> rank and nonce of its live workers.
        self._members: dict[tuple[int, int], dict[int, int]] = {}
        # (life of a server, chunk, exchange) whose average a worker brought: the server does not know who took part.
        self._supplied: set[tuple[int, int, int]] = set()
        self._ended: set[tuple[int, int, int]] = set()
        # (life of a server, shard) -> (rank, nonce, chunk) of live workers -> the last exchange that they pushed.
        self._pushed: dict[tuple[int, int], dict[tuple[int, int, int], int]] = defaultdict(dict)
        self._quorum = None if scenario.quorum is None else Quorum(scenario.quorum)
        # By process and chunk, the average that it reads in the server's memory, and what that was.
        self._lent: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent = SentAnswers()
        self._excused: set[int] = set()
        self._made: dict[tuple[int, int, int], list[Contribution]] = defaultdict(list)

    def is_done(self, rank: int) -> bool:
        """Whether this worker has taken all its steps."""
        return self._steps_done[rank] >= self.scenario.steps

    # ---- a worker; follows strategies/servers/sync.py ---------------------------------------------------------------

    def program(self, process: WorkerProcess, think_s: Callable[[], float]) -> Flow[None]:
        """Train."""
        membership = process.membership
        replica = Replica([torch.zeros(self._numel, dtype=self._dtype) for _ in self.specs])
        welcome = yield from handshake.enter(membership)
        state = yield from join.take_part(
            membership, welcome.state, self.specs, lambda spec: replica.values[spec.key].clone()
        )
        if state != "initialised":
            yield from self._take_values(process, replica, whole=state == "joined")
        else:
            self._resume_sequences(process)
        while replica.step < self.scenario.steps:
            yield think_s()
            yield from self._step(process, replica)
            process.has_state = True  # before its first step it is one of those that need another's
            self._steps_done[process.rank] = replica.step

    def _take_values(self, process: WorkerProcess, replica: Replica, *, whole: bool) -> Flow[None]:
        session = process.session
        yield [session.pull(spec.key, [replica.values[spec.key]]) for spec in self.specs]
        self._resume_sequences(process)
        if whole:
            blob = session.pull(0, blob=STATE_BLOB)
            yield [blob]
            values = blob.wait().values
            assert values is not None
            replica.step = struct.unpack("<q", bytes(values.numpy()))[0]

    def _resume_sequences(self, process: WorkerProcess) -> None:
        for spec in self.specs:
            process.session.set_sequence(spec.key, process.session.version(spec.key))

    def _step(self, process: WorkerProcess, replica: Replica) -> Flow[None]:
        sits_out = is_out = False
        rejoins = 0
        try:
            yield from self._serve_joiner(process, replica)
        except FencedError:
            is_out = True
        landings = [torch.zeros(self._numel, dtype=self._dtype) for _ in self.specs]
        while True:
            try:
                if is_out:
                    sits_out = (yield from self._rejoin(process, replica)) or sits_out
                    is_out = False
                pushes = [self._push(process, replica, spec.key, landings[spec.key], sits_out) for spec in self.specs]
                yield [push for push, _ in pushes]
                break
            except FencedError:
                rejoins += 1
                if rejoins > MAX_REJOINS:
                    raise
                is_out = True
        for push, made in pushes:
            self._check_answer(process, push, landings[push.key], made)
            replica.values[push.key].sub_(landings[push.key])
        replica.step += 1

    def _serve_joiner(self, process: WorkerProcess, replica: Replica) -> Flow[None]:
        session, membership = process.session, process.membership
        request = membership.state_requests.take()
        if request is None:
            return
        try:
            blob = torch.frombuffer(bytearray(struct.pack("<q", replica.step)), dtype=torch.uint8)
            stores = [session.store(spec.key, replica.values[spec.key].clone()) for spec in self.specs]
            try:
                yield stores
            except BaseException:  # as ``WorkerSession.await_stores``
                for store in stores:
                    store.abandon()
                raise
            yield [session.store(0, blob, blob=STATE_BLOB, pieces=1)]
            yield from join.admit(membership, request)
        except ServerRefusedError as error:  # as ``WorkerSession.serve_joiner``
            if error.code != ErrorCode.NOT_READY:
                raise
        finally:
            membership.state_requests.forget(request)

    def _rejoin(self, process: WorkerProcess, replica: Replica) -> Flow[bool]:
        """Whether the worker has another's state now, and has to sit the step out."""
        state = yield from join.rejoin(process.membership)
        process.session.reset_codecs()  # as ``WorkerSession.rejoin``
        if state != "joined":
            if replica.is_mixed:
                raise ServerRefusedError("as in strategies/servers/sync.py", ErrorCode.STATE_LOST)
            return False
        replica.is_mixed = True
        yield from self._take_values(process, replica, whole=True)
        replica.is_mixed = process.membership.fenced is not None
        return True

    def _push(
        self, process: WorkerProcess, replica: Replica, key: int, landing: torch.Tensor, sits_out: bool
    ) -> tuple[Push, Contribution | None]:
        session = process.session
        lent, landed = self._lent.pop((process.number, key), (landing, landing))
        is_same = torch.equal(lent, landed)
        require(is_same, "the answer of chunk {} changed while worker {} read it", key, process.rank)
        session.keep_result(key)
        if sits_out:
            return session.push(key, None, [landing]), None
        weight = self._rng.choice(WEIGHTS) if self.scenario.weighs else None
        made = Contribution(process.rank, self._draw_values(process.rank, key), replica.digest(), weight or 1.0)
        push = session.push(
            key, torch.tensor(made.values, dtype=self._dtype), [landing], weight=weight, reads_in_place=True
        )
        self._made[key, push.sequence, process.rank].append(made)
        return push, made

    def _draw_values(self, rank: int, key: int) -> tuple[float, ...]:
        tag = next(self._tags[key])
        if self.scenario.codec:
            require(tag < CODED_NUMEL, "the simulation has too few elements")
            return (*[0.0] * tag, CODED_VALUE, *[0.0] * (CODED_NUMEL - tag - 1))
        draw = self._rng.random
        return (4.0**rank, float(tag), *((draw() - 0.5) * size for size in (1e-8, 1.0, 1e8, 1e16)))

    # ---- the oracle --------------------------------------------------------------------------------------------

    def server_started(self, server: ServerProcess, note: Any) -> None:
        """See ``ServerWitness``."""

    def told(self, server: ServerProcess, message: Message) -> None:
        """See ``ServerWitness``."""

    def is_excused(self, server: int) -> bool:
        """Whether bits of this server's disk have flipped."""
        return server in self._excused

    def captured(self, server: ServerProcess) -> None:
        """See ``SnapshotWitness``."""

    def durable(self, server: ServerProcess, note: Any) -> None:
        """See ``SnapshotWitness``."""

    def damaged(self, server: int, note: Any) -> None:
        """The newest snapshot that a server can restore is an older one, or none."""
        self._excused.add(server)

    def before(self, server: ServerProcess, shard: Shard, message: Message) -> None:
        """See ``ServerWitness``."""

    def after(self, server: ServerProcess, shard: Shard, message: Message | None, outgoing: list[Outgoing]) -> None:
        """See ``ServerWitness``."""
        self._sent.check(server.epoch, message, outgoing)
        if message is not None and message.type is MessageType.RESULT:
            self._supplied.add((server.epoch, message.key, message.sequence))
        for one in outgoing:
            if one.message.type is MessageType.UPDATED:
                self._check_same(server.epoch, shard, one.message)
        for job in shard.jobs.by_number.values():
            members = {rank: job.membership.members[rank].nonce for rank in job.membership.live_ranks}
            if members != self._members.get((server.epoch, shard.index)):
                self._members[server.epoch, shard.index] = members
                self._forget_averages((server.epoch, shard.index), members)
            pushed = self._pushed[server.epoch, shard.index]
            for rank, nonce, key in [known for known in pushed if members.get(known[0]) != known[1]]:
                del pushed[rank, nonce, key]
            is_refused = bool(outgoing) and outgoing[0].message.type is MessageType.ERROR
            is_push = message is not None and message.type is MessageType.PUSH and not is_refused
            sender = job.membership.members.get(message.worker) if message is not None and is_push else None
            if sender is not None and sender.rank in members and sender.incarnation == message.incarnation:
                place = sender.rank, sender.nonce, message.key
                pushed[place] = max(message.sequence, pushed.get(place, 0))
                if self._quorum is not None and message.payload is not None:
                    self._quorum.take((server.epoch, message.key, message.sequence), *place[:2])
            if self._quorum is None:
                self._check_complete(server, pushed, outgoing)
                continue
            if (
                message is not None
                and message.type is MessageType.REGISTER
                and is_taken(outgoing)
                and not any(known == message.key for _, _, known in pushed)  # else the request comes a second time
            ):
                self._quorum.begin(server.epoch, message.key)
            for one in outgoing:
                if one.message.type is MessageType.UPDATED:
                    self._quorum.end((server.epoch, one.message.key, one.message.sequence), members, pushed)
            if message is None:
                self._quorum.tick(server.epoch, members, pushed)

    def _forget_averages(self, place: tuple[int, int], members: Mapping[int, int]) -> None:
        """Where all who were told of an average have to join others, or are gone, these may end its exchange anew.

        Not where one of them has ended its training with it.
        """
        averages = self._averages.get(place, {})
        for known, (_, told) in list(averages.items()):
            is_kept = any(members.get(rank) == nonce or self.is_done(rank) for rank, nonce in told)
            if not is_kept or not members:
                del averages[known]

    def _check_same(self, epoch: int, shard: Shard, message: Message) -> None:
        """All workers get the same bytes."""
        assert isinstance(message.payload, torch.Tensor)
        data = message.payload.view(torch.uint8).numpy().tobytes()
        averages = self._averages.setdefault((epoch, shard.index), {})
        known, told = averages.setdefault((message.key, message.sequence), (data, set()))
        member = shard.jobs.by_number[message.job].membership.members.get(message.worker)
        told.update(() if member is None else {(member.rank, member.nonce)})
        where = f"the average of exchange {message.sequence} of chunk {message.key}"
        require(known == data, "{} has other bytes for worker {}", where, message.worker)

    def _check_complete(
        self, server: ServerProcess, pushed: dict[tuple[int, int, int], int], outgoing: list[Outgoing]
    ) -> None:
        """An exchange ends once all live workers have contributed; who has yet to push at all is joining."""
        for one in outgoing:
            key, sequence = one.message.key, one.message.sequence
            exchange = server.epoch, key, sequence
            if one.message.type is not MessageType.UPDATED or exchange in self._ended | self._supplied:
                continue
            self._ended.add(exchange)
            missing = [rank for (rank, _, known), last in pushed.items() if known == key and last < sequence]
            require(not missing, "exchange {} of chunk {} ended without workers {}", sequence, key, missing)

    def _check_answer(
        self, process: WorkerProcess, push: Push, landing: torch.Tensor, made: Contribution | None
    ) -> None:
        result = push.wait()
        self.answered += 1
        if push.lent is not None:
            landing.copy_(push.lent)
            self._lent[process.number, push.key] = push.lent, landing
        residual = process.session.residual(push.key)
        require(residual is None or not residual.any(), "chunk {} has a residual: {}", push.key, residual)
        assert push.answer is not None
        where = f"exchange {push.sequence} of chunk {push.key} at worker {process.rank}"
        parts = self._parts_of(push, landing.tolist(), where)
        # Without a quorum: see "Known" in README.md.
        is_supplied = (push.answer.epoch, push.key, push.sequence) in self._supplied and self.scenario.quorum is None
        if made is not None and not push.answer.body.get("late") and not is_supplied:
            require(made in parts, "{} was acknowledged, and its contribution is not in the average", where)
        bases = {part.base for part in parts}
        require(len(bases) <= 1, "{}: workers {} took part with different models", where, [p.rank for p in parts])
        require(result.refused is None, "{} was refused: {}", where, result.refused)

    def _parts_of(self, push: Push, average: list[float], where: str) -> list[Contribution]:
        """The contributions that this average consists of."""
        if not any(average):
            return []
        if self.scenario.codec:
            return self._marked_parts_of(push, average, where)
        if self.scenario.weighs:
            return self._weighed_parts_of(push, average, where)
        for count in range(1, self.scenario.workers + 1):
            found = average[0] * count
            ranks = [rank for rank in range(self.scenario.workers) if round(found) >> (2 * rank) & 1]
            if len(ranks) != count or abs(found - sum(4.0**rank for rank in ranks)) > 1e-6:
                continue
            candidates = [self._made[push.key, push.sequence, rank] for rank in ranks]
            for parts in itertools.product(*candidates):
                if _average(parts) == average:
                    return list(parts)
        require(False, "{} is no average of contributions to it in the order of ranks: {}", where, average)
        return []

    def _weighed_parts_of(self, push: Push, average: list[float], where: str) -> list[Contribution]:
        """The same, of contributions that weigh differently."""
        candidates = [[None, *self._made[push.key, push.sequence, rank]] for rank in range(self.scenario.workers)]
        for choice in itertools.product(*candidates):
            parts = tuple(one for one in choice if one is not None)
            if parts and _average(parts) == average:
                return list(parts)
        require(False, "{} is no weighted average of contributions to it: {}", where, average)
        return []

    def _marked_parts_of(self, push: Push, average: list[float], where: str) -> list[Contribution]:
        """The same, of contributions that have an element each."""
        tags = [place for place, value in enumerate(average) if value]
        candidates = [one for rank in range(self.scenario.workers) for one in self._made[push.key, push.sequence, rank]]
        parts = [one for one in candidates if any(one.values[tag] for tag in tags)]
        ranks = [one.rank for one in parts]
        is_average = len(parts) == len(tags) == len(set(ranks)) and _average(tuple(parts)) == average
        require(is_average, "{} is no average of contributions to it: {} at {}", where, ranks, tags)
        return parts


def _average(parts: tuple[Contribution, ...]) -> list[float]:
    """Of these, added one after the other."""
    totals = [value * parts[0].weight for value in parts[0].values]
    for part in parts[1:]:
        totals = [total + value * part.weight for total, value in zip(totals, part.values, strict=True)]
    weight = sum(part.weight for part in parts)
    return [total / weight for total in totals]
