"""A job whose servers step, and its oracle, which takes each update that a shard applied after it, in float64.

An update is (process, step, chunk). Each is in the history of its chunk once at most, and from the moment on at which
its worker was told of it. A restart cuts the history where its tier may: under "log" after all that any worker knows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from oracles.payloads import decoded

from psengine.errors import PSEngineError
from psengine.parameter_server.client.flow import Flow
from psengine.protocol.messages import Message, MessageType
from simulation import inspection
from simulation.job import Job
from simulation.reference import OPTIMIZERS, State, Values, compensated, is_near, layout, numbers, step
from simulation.violation import require

TOLERANCE = 1e-9
# They send blocks, or a part, of a chunk.
LOSSY = ("int8", "fp4", "onebit", "topk")


@dataclass(eq=False)
class Version:
    """A state that a chunk was in.

    Attributes:
        values: its bits at the server.
        state: by the oracle's own steps.
        updates: what it consists of, in order: (process, step) each.
    """

    values: Values
    state: State
    updates: frozenset[tuple[int, int]] = frozenset()


@dataclass(eq=False)
class Chunk:
    """One chunk.

    Attributes:
        versions: those it had.
        epoch: the life of the server that has it.
        place: that server's index, and the shard there; others may have kept it from another registration.
        pushed: to it.
    """

    versions: dict[int, Version] = field(default_factory=dict)
    epoch: int = 0
    place: tuple[int, int] = (0, 0)
    pushed: dict[tuple[int, int], Values | None] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The newest."""
        return next(reversed(self.versions), 0)


class ApplyingJob(Job):
    """See the module's text."""

    def __init__(self, world) -> None:
        super().__init__(world)
        scenario = self.scenario
        coded = scenario.codec.partition(":")[0]
        self._dtype = torch.float64 if coded in ("", "fp32") else torch.float32
        self._tolerance = TOLERANCE if self._dtype is torch.float64 else 1e-4
        self._has_differences = coded in LOSSY and scenario.rule == "apply"
        self._is_whole = not coded or scenario.rule == "merge"  # answers bring the weights as they are
        self.specs = layout(scenario.chunks, 256 if coded in LOSSY else 6, self._dtype)
        self.optimizer = scenario.optimizer
        self.rule: dict[str, Any] = {
            "name": "apply",
            "max_staleness": scenario.max_staleness,
            "staleness_scaling": "inverse" if scenario.scales else None,
            "delay_compensation": scenario.compensation,
        }
        self.chunks = [Chunk() for _ in self.specs]
        self.steps_done: dict[int, int] = defaultdict(int)
        self._started, self._restarts = set[int](), 0  # servers
        self._runs: set[str] = set()  # that have taken part since it was registered
        # By server, the versions that its disk has at least.
        self._promised: dict[int, dict[int, int]] = defaultdict(dict)
        # (process, step) -> chunks of which a shard has taken it in its present life.
        self.taken: dict[tuple[int, int], set[int]] = defaultdict(set)
        # (key, process, step) that a restart lost, and that did not come again.
        self._lost: set[tuple[int, int, int]] = set()
        self._brought: dict[tuple[int, int], set[int]] = defaultdict(set)  # the same, in any life
        # (epoch, chunk, process, step) -> what a shard says that this worker holds then.
        self._held: dict[tuple[int, int, int, int], Values] = {}
        # (process, chunk) -> the version that it was told last, and in answer to which step; later less what it lost.
        self._seen: dict[tuple[int, int], int] = {}
        self._answered: dict[tuple[int, int], int] = {}
        self._life_of: dict[tuple[int, int], int] = {}  # (process, shard) -> the life that greeted it last
        self._restored: dict[tuple[int, int], int] = {}  # (life of a server, chunk) -> its version at the start
        self._differences: dict[tuple[int, int, int], int] = {}  # (process, shard, its life) -> updates that it lost
        self._lives: set[tuple[int, int]] = set()  # (shard, its life) that a worker has told the coordinator
        self._residuals: dict[tuple[int, int], Values] = {}
        self._former: dict[tuple[int, int], Values] = {}  # those before the last pushes
        # (chunk, process) -> the version that it was sent last, and under which view.
        self._sent: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}

    def begin_anew(self) -> None:
        self.steps_done.clear()

    def failed(self, process, error: PSEngineError) -> None:
        """For all that the coordinator knows, who was a member has trained, and may be there for a lease."""
        if process.receiver.last_view:
            self._runs.add(process.options.run)
            self.world.has_failed = True

    @property
    def is_trained(self) -> bool:
        return any(chunk.pushed for chunk in self.chunks)

    # ---- a worker ----------------------------------------------------------------------------------------------

    def program(self, process) -> Flow[None]:
        """Train."""
        rank = process.rank
        weights = yield from self._enter(process)
        while self.steps_done[rank] < self.scenario.steps_of(rank):
            yield self.think_s()
            pushes = [self._push(process, spec.key, weights[spec.key]) for spec in self.specs]
            process.session.end_step()
            yield pushes
            for push in pushes:
                self._check_answer(process, push, weights[push.key])
            self.steps_done[rank] += 1

    def _enter(self, process) -> Flow[list[torch.Tensor]]:
        weights = [torch.from_numpy(self._initial(spec.key)) for spec in self.specs]
        yield from process.enter(self.specs, lambda spec: weights[spec.key])
        process.has_state = True
        name, group = OPTIMIZERS[self.optimizer]
        body = {"optimizer": name, "groups": [group], "runs": [[0, self.specs[0].numel, 0]]}
        yield [process.session.configure(spec.key, body) for spec in self.specs]
        pulls = [process.session.pull(spec.key, [weights[spec.key]]) for spec in self.specs]
        yield pulls
        for spec, pull in zip(self.specs, pulls, strict=True):
            self._check_whole(process, spec.key, weights[spec.key], pull.wait())
            self._check_run(process, spec.key)
        self._runs.add(process.options.run)
        return weights

    def _check_run(self, process, key: int) -> None:
        """Nobody goes on unasked from what another run has trained, unless there may be members of that."""
        chunk, options = self.chunks[key], process.options
        runs = {self.world.all_processes[one].options.run for one, _ in chunk.versions[chunk.version].updates}
        is_asked = not runs or options.continues or options.run in self._runs or "" in (*self._runs, options.run)
        require(is_asked or self.world.joins, "worker {} goes on unasked from what runs {} trained", process.rank, runs)

    def _initial(self, key: int) -> Values:
        values = numbers(self.specs[key].numel, self.scenario.seed, "initial", key)
        return values.astype(str(self._dtype).removeprefix("torch."))

    def _gradient(self, process, key: int) -> tuple[torch.Tensor | None, float | None]:
        """A push's values and weight."""
        values = numbers(self.specs[key].numel, self.scenario.seed, process.number, self.steps_done[process.rank], key)
        return torch.from_numpy(values).to(self._dtype), None

    def _push(self, process, key: int, landing: torch.Tensor) -> Any:
        process.check_lent(key)
        values, weight = self._gradient(process, key)
        values = None if values is None else process.packed(key, values)
        group = OPTIMIZERS[self.optimizer][1]
        push = process.session.push(
            key, values, [landing], [group], weight=weight, reads_in_place=self._rng.random() < 0.7
        )
        self._check_residual(process, push, values)
        return push

    def _check_residual(self, process, push: Any, values: torch.Tensor | None) -> None:
        """What a payload leaves out is in the next one."""
        residual = process.session.residual(push.key)
        if residual is None or values is None:
            return
        place = process.number, push.key
        self._former[place] = self._residuals.get(place, np.zeros_like(values.numpy()))
        expected = self._former[place] + values.numpy() - self._decoded(push.message)
        is_same = is_near(residual.numpy(), expected, 1e-3, 1e-4)
        require(is_same, "worker {} has another residual of chunk {} than it left out", process.rank, push.key)
        self._residuals[place] = residual.numpy().copy()

    def _check_answer(self, process, push: Any, landing: torch.Tensor) -> None:
        refused = push.wait().body.get("refused")
        process.land(push, landing)
        self.answered += 1
        key, answer, chunk = push.key, push.answer, self.chunks[push.key]
        may_be = (None, "abstained", "overflow", "stale")[: 3 + (self.scenario.max_staleness is not None)]
        require(refused in may_be, "a push of chunk {} was refused: {}", key, refused)
        if refused == "stale" and (process.number, key) in self._residuals:
            self._residuals[process.number, key] = self._former[process.number, key]
        if answer.epoch != chunk.epoch:
            return  # of a life of the server that has ended
        update = process.number, push.message.sequence
        if refused is None:
            is_there = update in chunk.versions[chunk.version].updates or self._may_lack(key, update)
            require(is_there, "push {} of chunk {} was acknowledged, and is not there", update, key)
        if self._has_differences:
            held = self._held.get((answer.epoch, key, *update))
            is_same = held is not None and np.array_equal(held, landing.numpy())
            require(is_same, "worker {} holds other weights of chunk {} than its shard thinks", process.rank, key)
        elif self._is_whole:
            self._check_whole(process, key, landing, answer)

    def _check_whole(self, process, key: int, landing: torch.Tensor, answer: Message) -> None:
        """A worker got a state that existed."""
        process.check_term(answer)
        chunk = self.chunks[key]
        if answer.epoch != chunk.epoch:
            return
        version = chunk.versions.get(answer.version)
        is_whole = version is not None and np.array_equal(landing.numpy(), version.values)
        require(is_whole, "worker {} got other weights as version {} of chunk {}", process.rank, answer.version, key)

    def read(self, process, key: int, landing: torch.Tensor, answer: Message) -> None:
        self._check_whole(process, key, landing, answer)

    # ---- the shards --------------------------------------------------------------------------------------------

    def applied(self, server, shard: Any, message: Message, outgoing: list[Any]) -> None:
        kind = message.type
        process = self.world.process_of(message.worker, message.incarnation)
        is_refused = any(one.message.type is MessageType.ERROR for one in outgoing)
        if kind is MessageType.PUSH and process is not None and not is_refused:
            self._note_push(process, message)
        found, place = inspection.versions(shard, self.world.number), (server.index, shard.index)
        for key, chunk in enumerate(self.chunks):
            is_elsewhere = (chunk.epoch, chunk.place) != (server.epoch, place)
            is_there = is_elsewhere or (key in found and found[key] >= chunk.version)
            may_go = not chunk.version or self.excused or (self._restarts and self.scenario.durability == "memory")
            require(is_there or may_go, "version {} of chunk {} was dropped", chunk.version, key)
        for key, version in found.items():
            chunk = self.chunks[key]
            is_registered = kind is MessageType.REGISTER and message.key == key and not is_refused
            is_registered = is_registered and not inspection.view_number(shard, self.world.number)[1]
            may_differ = place == chunk.place and (version != chunk.version or kind is MessageType.PUSH)
            if not (is_registered or may_differ):
                continue
            values = inspection.values(shard, self.world.number, key)
            if is_registered:
                self._begin(server, key, version, values)
                chunk.place = place
            elif version != chunk.version:
                self._take(server, shard, key, version, values, message if kind is MessageType.PUSH else None)
            else:
                is_same = np.array_equal(values, chunk.versions[version].values)
                require(is_same, "chunk {} changed, and its version did not", key)
        for one in outgoing:
            process = self.world.process_of(one.message.worker, one.message.incarnation)
            if one.message.type in (MessageType.UPDATED, MessageType.VALUES) and process is not None:
                sent = one.message.version, inspection.view_number(shard, self.world.number)
                self._sent[one.message.key, process.number] = sent
            if one.message.type is MessageType.UPDATED:
                self._check_updated(server, shard, one.message)

    def _begin(self, server, key: int, version: int, values: Values) -> None:
        """A job's chunk has its first values."""
        is_initial = version == 0 and np.array_equal(values, self._initial(key))
        require(is_initial, "chunk {} begins with version {} and other values", key, version)
        self.world.home = self.world.run.servers
        self._runs.clear()
        chunk = self.chunks[key]
        chunk.epoch = server.epoch
        chunk.versions = {0: Version(values, State(values))}
        for promised in self._promised.values():
            promised.pop(key, None)
        for taken in self.taken.values():
            taken.discard(key)

    def _note_push(self, process, push: Message) -> None:
        """A shard has taken a push: the same bytes each time."""
        chunk, update = self.chunks[push.key], (process.number, push.sequence)
        values = None if push.payload is None else self._decoded(push)
        known = chunk.pushed.setdefault(update, values)
        is_same = (known is None) == (values is None) and (known is None or np.array_equal(known, values))
        require(is_same, "push {} of chunk {} came with other values than before", update, push.key)
        self.taken[update].add(push.key)
        self._lost.discard((push.key, *update))
        self._brought[update].add(push.key)

    def _decoded(self, push: Message) -> Values:
        codec = self.scenario.codec.partition(":")[0]
        return decoded(codec, push.payload, self.specs[push.key].numel).numpy()

    def _take(self, server, shard: Any, key: int, version: int, values: Values, push: Message | None) -> None:
        """A chunk has a new version: that of this push."""
        chunk = self.chunks[key]
        is_next = push is not None and push.key == key and push.payload is not None and version == chunk.version + 1
        require(is_next, "chunk {} went from version {} to {}", key, chunk.version, version)
        assert push is not None
        process = self.world.process_of(push.worker, push.incarnation)
        require(process is not None, "a push of nobody's was applied: {}", push)
        assert process is not None
        before, update = chunk.versions[chunk.version], (process.number, push.sequence)
        require(update not in before.updates, "push {} of chunk {} was applied twice", update, key)
        gradient = self._decoded(push)
        base = chunk.versions.get(push.version)
        expected = self._step(before, gradient, version - 1 - push.version, None)
        is_same = is_near(values, expected.values, self._tolerance, self._tolerance)
        if self.scenario.compensation and push.version < version - 1 and base is not None:
            other = self._step(before, gradient, version - 1 - push.version, base.values)
            # A worker that was out, and a shard that restarted, begin without a backup; another answer replaces it.
            sent = push.version, inspection.view_number(shard, self.world.number)
            may_lack = self._sent.get((key, process.number)) != sent
            if not (is_same and may_lack):
                expected, is_same = other, is_near(values, other.values, self._tolerance, 1e-8)
        require(is_same, "push {} of chunk {} made {} of {}", update, key, values, expected.values)
        chunk.versions[version] = Version(values, expected._replace(values=values), before.updates | {update})

    def _step(self, before: Version, gradient: Values, staleness: int, backup: Values | None) -> State:
        if backup is not None:
            gradient = compensated(gradient, self.scenario.compensation, before.values, backup)
        rate = 1.0 / (max(0, staleness) + 1) if self.scenario.scales else 1.0
        return step(self.optimizer, before.state, gradient, rate)

    def _check_updated(self, server, shard: Any, message: Message) -> None:
        key, chunk = message.key, self.chunks[message.key]
        process = self.world.process_of(message.worker, message.incarnation)
        if process is None:
            return
        update = process.number, message.sequence
        if update not in chunk.pushed:
            return  # it answers the process before this one, and nobody waits for it
        if self._has_differences:
            held = inspection.held_weights(shard, self.world.number, key, message.worker)
            if held is not None:
                self._held[(server.epoch, key, *update)] = held
        is_there = key in self.taken[update] or self._may_lack(key, update)
        require(is_there, "push {} of chunk {} is answered, and did not come", update, key)
        require(message.version <= chunk.version, "an answer of chunk {} is of the future", key)
        bound = self.scenario.max_staleness
        if bound is None or self.scenario.rule == "merge":
            return
        for rank, (incarnation, first_step) in self.world.views.members.items():
            committed = self._committed(rank, incarnation, first_step)
            where = "worker {} is answered in step {} while worker {} has done {}, with a bound of {}"
            is_within = message.sequence - bound <= committed
            require(is_within, where, message.worker, message.sequence, rank, committed, bound)
        are_here = len(self.world.views.came) >= self.scenario.workers or self.world.counts["later runs"]
        where = "worker {} is answered in step {} before all have come, with a bound of {}"
        require(are_here or message.sequence <= bound, where, message.worker, message.sequence, bound)

    def _may_lack(self, key: int, update: tuple[int, int]) -> bool:
        """Whether a shard that has lost this push may answer it."""
        return False

    def _committed(self, rank: int, incarnation: int, first_step: int) -> float:
        """The last step of this member that all shards have."""
        process = self.world.process_of(rank, incarnation)
        if process is None:
            return math.inf
        done = first_step - 1
        while len(self._brought[process.number, done + 1]) == len(self.specs):
            done += 1
        return done

    # ---- restarts ----------------------------------------------------------------------------------------------

    def heard(self, process, shard: int, message: Message) -> None:
        """note which version it was told; what a restart took from that is lost once."""
        kind, place = message.type, (process.number, message.key)
        if kind is MessageType.UPDATED and message.sequence > self._answered.get(place, 0):
            self._answered[place] = message.sequence  # a repeated answer is nobody's
            self._seen[place] = message.version
        elif kind is MessageType.VALUES and not message.body:
            self._seen[place] = message.version
        elif kind is MessageType.RESUMED:
            former = self._life_of.get((process.number, shard), message.epoch)
            self._life_of[process.number, shard] = message.epoch
            places = [(process.number, key) for key in inspection.keys_at(process.session, shard)]
            seen, version = [self._seen.get(place, 0) for place in places], message.body["version"]
            if former != message.epoch and seen:
                self._differences[process.number, shard, message.epoch] = max(0, min(seen) - version)
                if version < min(seen):
                    self._seen.update((place, min(self._seen[place], version)) for place in places)

    def coordinated(self, server, message: Message | None, outgoing: list[Any]) -> None:
        """the first worker that tells of a shard's new life says what is lost."""
        if message is None or message.type is not MessageType.COMMIT or message.body["what"] != "life":
            return
        process = self.world.process_of(message.worker, message.incarnation)
        shard, epoch = message.body["shard"], message.body["epoch"]
        if process is None or (shard, epoch) in self._lives:
            return
        self._lives.add((shard, epoch))
        keys = inspection.keys_at(process.session, shard)
        versions = [self._restored[epoch, key] for key in keys if (epoch, key) in self._restored]
        # Else a view has named the shard's life by now, and others have gone on.
        is_as_it_came = versions and message.body["version"] == min(versions)
        if is_as_it_came and len(versions) == len(keys):
            lost = self._differences.get((process.number, shard, epoch), 0)
            where = "worker {} says that {} updates are lost, and {} are"
            require(message.body.get("lost", 0) == lost, where, process.rank, message.body.get("lost", 0), lost)

    def server_started(self, server) -> None:
        """A life begins: what it lost is allowed by its tier."""
        self._restarts += server.index in self._started
        self._started.add(server.index)
        restored: dict[int, int] = {}
        for shard in server.shards:
            for key, version in inspection.versions(shard, self.world.number).items():
                chunk = self.chunks[key]
                if (server.index, shard.index) != chunk.place:
                    continue
                values = inspection.values(shard, self.world.number, key)
                known = chunk.versions.get(version)
                is_known = known is not None and np.array_equal(known.values, values)
                require(is_known, "chunk {} came back as version {} with values that it never had", key, version)
                chunk.versions = {number: one for number, one in chunk.versions.items() if number <= version}
                chunk.epoch = server.epoch
                restored[key] = self._restored[server.epoch, key] = version
                for (number, step_), taken in self.taken.items():
                    process = self.world.all_processes[number]
                    is_known = inspection.knows(shard, self.world.number, key, process.rank, process.incarnation, step_)
                    if key in taken and not is_known:
                        taken.discard(key)
                        self._lost.add((key, number, step_))
        for key, version in self._promised[server.index].items():
            is_there = restored.get(key, -1) >= version
            require(is_there, "version {} of chunk {} was durable, and is gone after a restart", version, key)

    def told(self, server, message: Message) -> None:
        chunk = self.chunks[message.key]
        if self.scenario.keeps_updates and message.epoch == chunk.epoch:
            promised = self._promised[server.index]
            promised[message.key] = max(promised.get(message.key, 0), message.version)
        elif self.scenario.has_followers and server.index not in self.excused and not message.body.get("refused"):
            # Of a life that another follows: that was told of it before.
            process = self.world.process_of(message.worker, message.incarnation)
            is_there = process is None or (process.number, message.sequence) in chunk.versions[chunk.version].updates
            require(is_there, "who led before acknowledges what the leader of {} lacks", message.key)

    def captured(self, server, shard: Any) -> dict[int, int]:
        versions = inspection.versions(shard, self.world.number)
        return {key: one for key, one in versions.items() if (server.index, shard.index) == self.chunks[key].place}

    def durable(self, server, note: dict[int, int]) -> None:
        if not self.scenario.keeps_updates:
            self._promised[server.index] = dict(note)

    def damaged(self, server: int, note: dict[int, int] | None) -> None:
        super().damaged(server, note)
        self._promised[server] = dict(note or {})
