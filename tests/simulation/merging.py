"""A job whose servers merge, and its oracle, which shares no code with the shard.

Push n has -1 in element n, so a merge leaves in that element the share that push n has in it; without a codec it has
numbers of very different sizes in other elements too, whose sum depends on the order of addition. So each change of the
weights names the pushes that it is made of; the oracle merges those again, in the order of ranks, and compares bits.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.server.interfaces import Outgoing
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.messages import Message, MessageType
from simulation.applying import SGD, ApplyingJob, PushRecord, is_taken, layout
from simulation.marks import MOST
from simulation.payloads import Values, decoded
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.server import ServerProcess
    from simulation.worker import WorkerProcess

SIZES = (1e-8, 1.0, 1e8, 1e16)
WEIGHTS = (1.0, 1.0, 2.0, 8.0)  # powers of two: products with them are exact
ABSTAINS = 0.1
# Sums of times differ in their last bits.
SOON_S = 1e-9


class Shares:
    """See ``Marks``: an element for each push, and ``rest`` others."""

    def __init__(self, dtype: torch.dtype, rest: int) -> None:
        self.dtype, self.numel = dtype, MOST + rest

    def mark(self, number: int) -> torch.Tensor:
        values = torch.zeros(self.numel, dtype=self.dtype)
        values[number] = 1.0
        return values

    def updates(self, values: torch.Tensor) -> int:
        found = 0
        for number in np.flatnonzero(values[:MOST].numpy()).tolist():
            found |= 1 << (2 * number)
        return found

    def weights(self, updates: int) -> Values:
        raise NotImplementedError


@dataclass
class Made:
    """A push: what was pushed, with which weight; the incarnation that it came from last."""

    values: Values
    weight: float
    incarnation: int = 0


@dataclass
class Window:
    """The grace window of one chunk in one life of a server, by the rule's own words.

    Attributes:
        here: who waits for a merge, with the number of the push.
        exchanges: by rank, the exchange that its push was.
        idle: who abstained last.
        last_s, interval_s: by rank, its last arrival, and the time between two.
        end_s: when the window that is open ends; None where there is none.
        awaited: for whom it is open.
    """

    here: dict[int, int] = field(default_factory=dict)
    exchanges: dict[int, int] = field(default_factory=dict)
    idle: set[int] = field(default_factory=set)
    last_s: dict[int, float] = field(default_factory=dict)
    interval_s: dict[int, float] = field(default_factory=dict)
    end_s: float | None = None
    awaited: set[int] = field(default_factory=set)

    def arrived(self, rank: int, now_s: float) -> None:
        """A push is here."""
        if rank in self.last_s:
            passed_s = now_s - self.last_s[rank]
            self.interval_s[rank] = 0.5 * passed_s + 0.5 * self.interval_s.get(rank, passed_s)
        self.last_s[rank] = now_s
        self.idle.discard(rank)

    def forget(self, rank: int) -> None:
        """A worker came, or is gone."""
        self.last_s.pop(rank, None)
        self.interval_s.pop(rank, None)
        self.idle.discard(rank)
        self.awaited.discard(rank)  # who is replaced was gone in between

    def open(self, absent: set[int], share: float, now_s: float) -> None:
        """The quorum is here."""
        own = [self.interval_s[rank] for rank in self.here if rank in self.interval_s]
        self.end_s = now_s + (share * sum(own) / len(own) if own else 0.0)
        due_s = {rank: self.last_s[rank] + one for rank, one in self.interval_s.items()}
        self.awaited = {rank for rank in absent if due_s.get(rank, np.inf) <= self.end_s}


class MergingJob(ApplyingJob):
    """The program of every worker, and the oracle."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        assert scenario.quorum is not None
        self._rng = random.Random(f"values {scenario.seed}")
        has_order = scenario.codec == ""
        rest, dtype = (len(SIZES), torch.float64) if has_order else (0, self.marks.dtype)
        self.marks = Shares(dtype, rest)
        self.specs = layout(scenario.chunks, self.marks.numel, dtype)
        self.rule = {"name": "merge", "quorum": scenario.quorum, "grace": scenario.grace}
        self._made: list[list[Made]] = [[] for _ in self.specs]
        zeros = np.zeros(self.marks.numel, str(dtype).removeprefix("torch."))
        self._zeros = zeros
        # By chunk, version -> the weights.
        self._weights: list[dict[int, Values]] = [{0: zeros} for _ in self.specs]
        # By (life of a server, chunk).
        self._windows: dict[tuple[int, int], Window] = defaultdict(Window)
        # Of the event under way: messages, and ranks whose process went, came or was replaced.
        self._outgoing: list[Outgoing] = []
        self._changed: set[int] = set()

    # ---- a worker; follows strategies/local/diloco_server.py -------------------------------------------------------

    def program(self, process: WorkerProcess, think_s: Callable[[], float]) -> Flow[None]:
        """Train."""
        weights = yield from self._enter(process)
        while not self.is_done(process.rank):
            yield think_s()
            step = self.steps_done[process.rank]
            weight = 0.0 if self._rng.random() < ABSTAINS else self._rng.choice(WEIGHTS)
            pushes = [self._push_weighed(process, spec.key, step, weights[spec.key], weight) for spec in self.specs]
            with process.session.telemetry.blocked():
                yield [push for _, push in pushes]
            for number, push in pushes:
                self._check_answer(process, number, push, weights[push.key])
            self.steps_done[process.rank] = step + 1

    def _push_weighed(
        self, process: WorkerProcess, key: int, step: int, landing: torch.Tensor, weight: float
    ) -> tuple[int, Push]:
        records = self.chunks[key].pushes
        number = len(records)
        require(number < MOST, "the simulation has too few elements")
        values = -self.marks.mark(number)
        if self.marks.numel > MOST:
            values[MOST:] = torch.tensor([(self._rng.random() - 0.5) * size for size in SIZES])
        self._check_lent(process, key, landing)
        push = process.session.push(
            key, values if weight else None, [landing], [SGD], weight=weight, reads_in_place=number % 3 > 0
        )
        records.append(PushRecord(process.rank, process.number, step, push.sequence))
        self._made[key].append(Made(values.numpy(), weight))
        return number, push

    def _check_landed(
        self, process: WorkerProcess, key: int, landing: torch.Tensor, version: int, answer: Message
    ) -> None:
        super()._check_landed(process, key, landing, version, answer)
        if answer.epoch == self.epochs.get(key):
            is_whole = np.array_equal(landing.numpy(), self._weights[key][version])
            require(is_whole, "worker {} got other weights as version {} of chunk {}", process.rank, version, key)

    # ---- the servers -------------------------------------------------------------------------------------------

    def _take_restored(self, key: int, epoch: int, rule: Any) -> None:
        super()._take_restored(key, epoch, rule)
        known = self._weights[key]
        is_whole = np.array_equal(rule.outcome.values.numpy(), known[rule.version])
        require(is_whole, "chunk {} came back as version {} with other weights", key, rule.version)
        self._weights[key] = {version: values for version, values in known.items() if version <= rule.version}

    def after(self, server: ServerProcess, shard: Shard, message: Message | None, outgoing: list[Outgoing]) -> None:
        """See ``ServerWitness``."""
        self._outgoing = outgoing
        for job in shard.jobs.by_number.values():
            known = self._live[server.index, shard.index]
            members = {rank: job.membership.members[rank].nonce for rank in job.membership.live_ranks}
            changed = {rank for rank in known.keys() | members.keys() if known.get(rank) != members.get(rank)}
            self._changed = changed
            for window in (self._windows[server.epoch, key] for key in job.chunks.rules):
                for rank in changed:
                    window.forget(rank)
                    window.here.pop(rank, None)
        super().after(server, shard, message, outgoing)
        if message is not None and message.type is MessageType.REGISTER and is_taken(outgoing):
            self._weights[message.key] = {0: self._zeros}

    def _sum_of_open(self, epoch: int, keys: list[int], rank: int) -> int:
        windows = [self._windows[epoch, key] for key in keys]
        return sum(window.exchanges[rank] for window in windows if rank in window.here)

    def _check_changes(self, server: ServerProcess, shard: Shard, message: Message | None, job: Any) -> None:
        push = message if message is not None and message.type is MessageType.PUSH else None
        for key, rule in job.chunks.rules.items():
            if self.epochs.get(key) != server.epoch:
                continue  # about to be noted
            window, gathered = self._windows[server.epoch, key], rule.waiting()
            waits = self._waits[server.epoch, shard.index]
            number = self._number_of(push, window, waits) if push is not None and push.key == key else None
            merged = self._merged(server, shard, key, rule) if rule.version != self.chunks[key].version else []
            if push is not None and number is not None and (number in merged or push.worker in gathered):
                window.arrived(push.worker, server.clock.now_s)
                window.here[push.worker] = number
                window.exchanges[push.worker] = push.sequence
                waits.pop(push.worker, None)
            self._check_window(server, shard, key, merged, is_tick=message is None)
            if merged and push is None:  # its window was over; while it was open all may have been stuck
                self._let_go_s = server.clock.now_s
            for rank in [rank for rank in window.here if rank not in gathered]:
                del window.here[rank]

    def _number_of(self, push: Message, window: Window, waits: dict[int, tuple[int | None, int | None]]) -> int | None:
        """The number of a push that has arrived as its worker made it; None where it abstains, or is a repeat."""
        rank, made = push.worker, self._made[push.key]
        if push.payload is None:
            is_answered = any(
                (one.message.worker, one.message.key, one.message.sequence) == (rank, push.key, push.sequence)
                for one in self._outgoing
                if one.message.type is MessageType.UPDATED
            )
            if is_answered:
                window.idle.add(rank)
                waits.pop(rank, None)
            return None
        values = decoded(self.scenario.codec, push.payload, self.marks.numel)
        number = int(np.flatnonzero(values)[0])
        is_whole = np.array_equal(values, made[number].values) and push.body["weight"] == made[number].weight
        require(is_whole, "push {} of chunk {} came with other values or another weight", number, push.key)
        if rank in window.here:
            return None
        made[number].incarnation = push.incarnation
        return number

    def _merged(self, server: ServerProcess, shard: Shard, key: int, rule: Any) -> list[int]:
        """The pushes of the merge that has just been: the oracle's own result has its bits."""
        chunk, known, made = self.chunks[key], self._weights[key], self._made[key]
        is_next = rule.version == chunk.version + 1
        require(is_next, "chunk {} went from version {} to {}", key, chunk.version, rule.version)
        before, values = known[chunk.version], rule.outcome.values.numpy().copy()
        found = self.marks.updates(rule.outcome.values)
        numbers = [number for number in range(len(chunk.pushes)) if (found & ~chunk.applied) >> (2 * number) & 1]
        numbers.sort(key=lambda number: chunk.pushes[number].rank)
        ranks = [chunk.pushes[number].rank for number in numbers]
        where = f"merge {rule.version} of chunk {key}"
        require(numbers, "{} has no new push", where)
        require(len(ranks) == len(set(ranks)), "{} has a worker twice: {}", where, ranks)
        newest, here = self._newest[server.index, shard.index], self._windows[server.epoch, key].here
        for number, rank in zip(numbers, ranks, strict=True):
            # A process that says HELLO again has a new incarnation, and its push waits as before.
            is_newest = here.get(rank) == number or made[number].incarnation >= newest.get(rank, 0)
            require(is_newest, "{} has push {} of a former process of worker {}", where, number, rank)
            require(not chunk.pushes[number].is_refused, "push {} of chunk {} was refused, and merged", number, key)
        total = np.zeros_like(before)
        for number in numbers:
            total = total + made[number].values * before.dtype.type(made[number].weight)
        expected = before - total / before.dtype.type(sum(made[number].weight for number in numbers))
        is_same = np.array_equal(values, expected)
        require(is_same, "{} is not the average of pushes {} in the order of ranks", where, numbers)
        known[rule.version] = values
        chunk.applied = found
        chunk.states[rule.version] = found
        return numbers

    def _check_window(self, server: ServerProcess, shard: Shard, key: int, merged: list[int], *, is_tick: bool) -> None:
        """A merge has its quorum, and its window is over; and no later. It has all who can come if these are fewer."""
        window, now_s, place = self._windows[server.epoch, key], server.clock.now_s, (server.index, shard.index)
        live, came = set(self._live[place]), self._came[place]
        missing = set(range(self.scenario.workers)) - came if len(came) < self.scenario.workers else set()
        absent = (live | missing) - window.here.keys() - window.idle
        if is_tick and absent | window.here.keys() <= self._stuck(server, shard):
            are_waiting = not merged or self._are_waiting(absent, now_s)
            require(are_waiting, "chunk {} was merged without workers {}, which are under way", key, absent)
            absent = set()
        assert self.scenario.quorum is not None
        # A process that is replaced is gone before the next one is here: a merge in between has not got to wait for it.
        may_come = absent - self._changed if merged else absent
        if len(window.here) < min(self.scenario.quorum, len(window.here) + len(may_come)) or not window.here:
            require(not merged, "chunk {} was merged with {} pushes, without a quorum", key, len(merged))
            window.end_s = None
            return
        if window.end_s is None:
            window.open(absent, self.scenario.grace, now_s)
        assert window.end_s is not None
        waits_for = window.awaited & may_come
        is_over = not waits_for or now_s >= window.end_s - SOON_S
        if merged:
            left_out = window.here.keys() - {self.chunks[key].pushes[number].rank for number in merged}
            require(is_over, "chunk {} was merged before its window was over, without workers {}", key, waits_for)
            require(not left_out, "a merge of chunk {} left out workers {}", key, left_out)
            window.end_s = None
        elif is_tick:
            is_late = not waits_for or now_s > window.end_s + SOON_S
            require(not is_late, "chunk {} has its quorum, and is not merged", key)
