"""A job whose servers merge, and its oracle: each merge again, in the order of ranks, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import release_of, view_of
from simulation import inspection
from simulation.applying import ApplyingJob, Version
from simulation.reference import State, Values, average, is_near, numbers
from simulation.violation import require

WEIGHTS = (1.0, 1.0, 2.0, 8.0)  # powers of two: products with them are exact
ABSTAINS = 0.1
Updates = frozenset[tuple[int, int]]


class MergingJob(ApplyingJob):
    """See the module's text; the program is that of ``ApplyingJob``."""

    def __init__(self, world) -> None:
        super().__init__(world)
        self.optimizer, self._tolerance = "merge", 0.0
        self.rule = {"name": "merge", "quorum": self.scenario.quorum, "grace": self.scenario.grace}
        # By its number, the contributions that a decision names: (process, step) of each.
        self._decided: dict[int, Updates] = {}
        # By decision and chunk, the contributions that were merged.
        self._updates: dict[int, dict[int, Updates]] = defaultdict(dict)
        self._told: set[int] = set()  # decisions that a shard has heard of
        # (life of a server, chunk) -> the last decision that it has merged, and those that are due there.
        self._stood: dict[tuple[int, int], tuple[int, frozenset[int]]] = {}
        self._made: dict[int, list[int]] = {}  # by chunk of the shard at work, the decisions that it has just merged
        # (key, process, step) that a merge names that was made while this process was out.
        self._missed: set[tuple[int, int, int]] = set()
        # The same, where the process has the answer of a life that has ended, and says that nothing comes again.
        self._renounced: set[tuple[int, int, int]] = set()
        self._weights: dict[tuple[int, int], float] = {}
        # By worker, the last step that it committed, and who abstained in that.
        self._committed: dict[tuple[int, int], int] = {}
        self._idle: set[tuple[int, int]] = set()

    def _gradient(self, process, key: int) -> tuple[torch.Tensor | None, float | None]:
        step = self.steps_done[process.rank]
        draw = numbers(2, self.scenario.seed, process.number, step) + 0.5
        if draw[0] < ABSTAINS:
            return None, 0.0
        values, _ = super()._gradient(process, key)
        return values, WEIGHTS[int(4 * draw[1])]

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def coordinated(self, server, message: Message | None, outgoing: list[Any]) -> None:
        """note what it decides."""
        super().coordinated(server, message, outgoing)
        if message is not None and message.type is MessageType.COMMIT and message.body["what"] == "step":
            worker, step = (message.worker, message.incarnation), message.body["step"]
            if step > self._committed.get(worker, 0):
                self._committed[worker] = step
                (self._idle.add if message.body["abstained"] else self._idle.discard)(worker)
        for one in outgoing:
            for release in _releases_in(one.message):
                self._note_decision(release)

    def _note_decision(self, release: Any) -> None:
        processes = [(self._process(rank, step), step) for rank, step in release.contributors]
        updates = frozenset((process.number, step) for process, step in processes if process is not None)
        known = self._decided.get(release.number)
        is_again = any(updates <= one for one in self._decided.values())  # a restart lost that merge
        # A coordinator that restarted may use a number again that nobody was told of.
        if known is None or release.number not in self._told:
            self._decided[release.number] = updates
        if known is not None:
            is_same = {step for _, step in updates} <= {step for _, step in known}
            require(
                is_same or release.number not in self._told,
                "merge {} is decided twice: {} and {}",
                release.number,
                known,
                updates,
            )
            return
        ranks = [rank for rank, _ in release.contributors]
        idle = [rank for rank, step in release.contributors if self._has_abstained(rank, step)]
        require(not idle, "merge {} names workers {}, who abstained", release.number, idle)
        require(len(ranks) == len(set(ranks)), "merge {} has a worker twice: {}", release.number, ranks)
        members = self.world.views.members.items()
        able = {rank for rank, (incarnation, _) in members if (rank, incarnation) not in self._idle} | set(ranks)
        is_quorum = is_again or len(ranks) >= min(self.scenario.quorum, len(able))
        require(is_quorum, "merge {} has workers {} of {}", release.number, ranks, sorted(able))

    def _process(self, rank: int, step: int) -> Any:
        """Who brought a step: a process that is gone where the rank's next one begins with a later step."""
        incarnation, first_step = self.world.views.members.get(rank, (0, 0))
        if step >= first_step or self._committed.get((rank, incarnation), 0) >= step:
            return self.world.views.member(rank)
        former = [one for (its, one), last in self._committed.items() if its == rank and last >= step]
        return self.world.process_of(rank, max((one for one in former if one != incarnation), default=incarnation))

    def _has_abstained(self, rank: int, step: int) -> bool:
        worker = rank, self.world.views.members.get(rank, (0, 0))[0]
        return worker in self._idle and self._committed[worker] == step

    # ---- the shards --------------------------------------------------------------------------------------------

    def _note_push(self, process, push: Message) -> None:
        if push.payload is None and push.sequence <= self._answered.get((process.number, push.key), 0):
            self._renounced.add((push.key, process.number, push.sequence))
            return
        super()._note_push(process, push)
        self._weights[process.number, push.sequence] = push.body.get("weight", 1.0)
        if not self.scenario.keeps_updates:  # a shard that went back to a snapshot has the later one of a worker's
            merged = self.chunks[push.key].versions[self.chunks[push.key].version].updates
            for update in self.taken.keys() - merged:
                if update[0] == process.number and update[1] < push.sequence:
                    self.taken[update].discard(push.key)

    def _may_lack(self, key: int, update: tuple[int, int]) -> bool:
        """A restart without a log lost it, and the merge that names it was made while its worker was out, or had it."""
        return (key, *update) in self._lost & (self._missed | self._renounced) and not self.scenario.keeps_updates

    def applied(self, server, shard: Any, message: Message, outgoing: list[Any]) -> None:
        said = {release.number for release in _releases_in(message)}
        self._told.update(said)
        self._note_made(server, shard, said)
        super().applied(server, shard, message, outgoing)
        members = inspection.members(shard, self.world.number)
        for key, made in self._made.items():
            for update in set().union(*(self._decided.get(one, ()) for one in made)):
                process = self.world.all_processes[update[0]]
                if (process.rank, process.incarnation) not in members:
                    self._missed.add((key, *update))

    def server_started(self, server) -> None:
        super().server_started(server)
        for shard in server.shards:
            self._note_made(server, shard, set())

    def _note_made(self, server, shard: Any, said: set[int]) -> None:
        """Which decisions each chunk has merged: those that were due there, or that it hears of now.

        Values do not tell: a shard skips what it hears of after a later decision, and others name the same pushes.
        Where updates last, nothing may be skipped that any shard was told of.
        """
        self._made.clear()
        if self.scenario.keeps_updates:
            said = self._told
        for key in inspection.versions(shard, self.world.number):
            last, due = inspection.merges(shard, self.world.number, key)
            first, former = self._stood.get((server.epoch, key), (0, frozenset()))
            self._made[key] = sorted(number for number in former | said if first < number <= last)
            self._stood[server.epoch, key] = last, due

    def _begin(self, server, key: int, version: int, values: Values) -> None:
        super()._begin(server, key, version, values)
        for known in (self._decided, self._updates, self._told, self._missed):
            known.clear()

    def _take(self, server, shard: Any, key: int, version: int, values: Values, push: Message | None) -> None:
        """A chunk has a new version: that of one merge, or of several that waited for each other."""
        chunk = self.chunks[key]
        where = f"version {version} of chunk {key}, after {chunk.version}, is not what decisions {self._made[key]} make"
        found = self._follow(key, [number for number in self._made[key] if number in self._decided])
        require(len(found) == version - chunk.version, where)
        waiting = inspection.waiting(shard, self.world.number, key)
        to_come = {(self.world.process_of(rank, its).number, step) for rank, its, step in waiting}
        is_so = to_come.isdisjoint(found[-1][1].updates) and self._is_near(found[-1][1].values, values)
        require(is_so, where)
        found[-1][1].values = values
        for number, after in found:
            before = chunk.versions[chunk.version]
            chunk.versions[chunk.version + 1] = after
            self._check_same(number, key, after.updates - before.updates)

    def _follow(self, key: int, numbers: list[int]) -> list[tuple[int, Version]]:
        """The states after each of these decisions that changes the chunk."""
        chunk, found = self.chunks[key], []
        before = chunk.versions[chunk.version]
        for number in numbers:
            after = self._merge(key, before, number)
            if after is not before:
                found.append((number, after))
                before = after
        return found

    def _merge(self, key: int, before: Version, number: int) -> Version:
        """The state after a decision; the same where nothing of it is there."""
        chunk = self.chunks[key]
        ranks = {process.number: process.rank for process in self.world.all_processes}
        updates = sorted(self._decided[number], key=lambda update: ranks[update[0]])
        # A coordinator that restarted may name again what some chunks have merged.
        updates = [one for one in updates if key in self.taken[one] and one not in before.updates]
        updates = [one for one in updates if chunk.pushed.get(one) is not None]
        pushed = [values for update in updates if (values := chunk.pushed[update]) is not None]
        if not updates:
            return before
        after = self._merged(before.values, updates, pushed)
        return Version(after, State(after), before.updates | set(updates))

    def _merged(self, before: Values, updates: Sequence[tuple[int, int]], pushed: Sequence[Values]) -> Values:
        """The values after a merge of what was ``pushed``."""
        dtype = before.dtype
        weights = [dtype.type(self._weights[update]) for update in updates]
        return before - average([(values.astype(dtype), one) for values, one in zip(pushed, weights, strict=True)])

    def _is_near(self, expected: Values, values: Values) -> bool:
        return is_near(expected, values, self._tolerance, self._tolerance)

    def _check_same(self, number: int, key: int, updates: Updates) -> None:
        """The same contributions in every chunk, where no server has gone back to a snapshot, and lost some."""
        merged = self._updates[number]
        merged[key] = updates
        if self.scenario.keeps_updates or not self._restored:
            is_same = len(set(merged.values())) == 1
            require(is_same, "merge {} has other contributors in other chunks: {}", number, merged)


def _releases_in(message: Message) -> Iterable[Any]:
    """What a message says of decisions."""
    if message.type is MessageType.RELEASE:
        return [release_of(message.body)]
    return view_of(message.body).releases if message.type is MessageType.VIEW else ()
