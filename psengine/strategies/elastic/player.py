"""Plays this worker's virtual workers, step by step, through deaths and arrivals.

A step with a death, four virtual workers, two workers::

    worker 0   batch 0   batch 1   exchange ✗   view: 0 plays all   batch 2   batch 3   exchange ── averages
    worker 1   batch 2   dies

A worker goes on in another group only in psengine's hands: where a step begins, and where its batches have ended.
Until then its contributions stay as they are, so the same virtual workers' gradients are exchanged again.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from psengine.collectives.base import Collective
from psengine.environment.processes import share_of_cores
from psengine.environment.variables import has_chosen_threads
from psengine.errors import CollectiveError, ConfigurationError, FencedError, ReductionError
from psengine.parameter_server.client.addresses import parse_addresses
from psengine.protocol.messages import ErrorCode
from psengine.strategies.elastic.checkpoints import Checkpoints
from psengine.strategies.elastic.coordinated import CoordinatedMembership
from psengine.strategies.elastic.dealing import deal
from psengine.strategies.elastic.membership import FixedMembership, Group, Membership
from psengine.strategies.elastic.state import StateRegistry
from psengine.strategies.exchange import Driver
from psengine.tensors.bucket import Bucket
from psengine.tensors.objects import from_bytes, to_bytes

if TYPE_CHECKING:
    from psengine.strategies.elastic.sync import SyncVirtualWorkers

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """With what a step of one model ends; plain values, because it also travels to a worker that lacks it.

    Attributes:
        averages: by bucket, in memory that stays as it is until the next ones are written.
        used: by parameter, how many workers used it; None where all count as used.
        order: in which gradients arrive, if buckets are to be laid out so from now on.
        buffers: by name, those of virtual worker 0.
    """

    averages: list[torch.Tensor]
    used: list[int] | None
    order: list[int] | None
    buffers: dict[str, torch.Tensor]


class Player:
    """One worker's share of V virtual workers.

    Args:
        virtual_workers: V.
        membership: who else takes part.

    Attributes:
        parts: the models, in the order in which they were wrapped.
        state: what belongs to this worker's state.
        completed: the last step of which this worker has the averages; None: it has no state.
        recorded: by virtual worker, what was recorded in the last step; NaN where nothing was.
        playing: the virtual worker whose batch is played; None outside of batches.
    """

    def __init__(self, virtual_workers: int, membership: Membership) -> None:
        self.virtual_workers = virtual_workers
        self.parts: list[SyncVirtualWorkers] = []
        self.completed: int | None = None
        self.recorded: list[float] = []
        self.playing: int | None = None
        self.state = StateRegistry(self.parts)
        self._checkpoints: Checkpoints | None = None
        self._membership = membership
        self._group: Group | None = None
        self._owners: dict[int, int] = {}
        self._slots: dict[int, int] = {}  # by virtual worker that is played here, the slot of its contribution
        # Of the step.
        self._step: int | None = None
        self._done: dict[int, float] = {}  # by virtual worker whose contribution is there, what was recorded
        self._value = math.nan
        self._has_begun = False
        # How an exchange failed; the worker regroups when it comes back into psengine's hands.
        self._error: CollectiveError | None = None

    # ---- who takes part ----------------------------------------------------------------------------------------

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and its averages are not in ``.grad`` yet."""
        return self._step is not None

    @property
    def has_entered(self) -> bool:
        """Whether training has begun."""
        return self._group is not None

    def enter(self, facts: Mapping[str, str]) -> int:
        """Join the training; return the step with which this worker begins, the first one being 1.

        Args:
            facts: what all workers must have alike, by name.

        Raises:
            ConfigurationError: another worker's differ.
        """
        if self.has_entered:
            raise ConfigurationError(
                "the training has begun (expected one call of loader.epochs(...) for each wrapped model, got a second)."
                " Fix: loop over all epochs in one call; wrap the model again for another training."
            )
        parameters = [id(one) for part in self.parts for one in part.replica.parameters.values()]
        if len(set(parameters)) < len(parameters):
            raise ConfigurationError(
                "virtual workers train each parameter in one wrapped model (got one that is in two). Fix: wrap each"
                " model once; give up a wrapped model that is not trained."
            )
        self.state.check_complete()
        checkpoint, written = (0, {}) if self._checkpoints is None else self._checkpoints.newest()
        if not has_chosen_threads():
            # Sums depend on it, so it depends on no number of workers; a job goes on with the number that it had.
            torch.set_num_threads(int(written.get("threads", share_of_cores(self.virtual_workers))))
        alike = {"virtual workers": str(self.virtual_workers)} | self.state.facts() | dict(facts)
        if self._checkpoints is not None:
            self._checkpoints.facts = alike
        self._adopt(self._membership.enter({**alike, **self.parts[0].replica.options}, checkpoint))
        assert self.completed is not None, "who is in a group has its state"
        return self.completed + 1

    def drop(self, part: SyncVirtualWorkers) -> None:
        """A model is no longer trained here."""
        if part in self.parts:  # else its wrapper could not be made
            self.parts.remove(part)
        if not self.parts:
            self._membership.close()
            if self._checkpoints is not None:
                self._checkpoints.close()

    def statistics(self) -> dict[str, Any]:
        """The fields of ``Statistics`` that are known here."""
        workers = () if self._group is None else tuple(member.worker for member in self._group.members)
        return {"live_workers": workers, "steps": self.completed or 0}

    def checkpoint_every(self, steps: int, directory: str | os.PathLike[str]) -> None:
        """See ``DistributedDataParallel.checkpoint_every``."""
        self._checkpoints = Checkpoints(steps, directory)

    def upcoming(self) -> Sequence[int]:
        """The virtual workers that are played here in each later step, in order, if nobody dies or comes."""
        return sorted(self._slots)

    def leave(self) -> None:
        """The training is over."""
        if self._error is not None:
            self._regroup(self._error)
        while self.completed is not None and not self._membership.leave(self.completed):
            self._regroup(None)  # others lack what this worker has
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _regroup(self, error: CollectiveError | None) -> None:
        self._adopt(self._membership.regroup(self.completed, error))

    def _adopt(self, group: Group) -> None:
        """Go on in ``group``: all its members come to the same state, and know who plays whom."""
        self._error = None
        while True:
            try:
                self._meet(group)
                return
            except CollectiveError as error:
                if self._step is not None and self.completed == self._step:
                    # It got the averages and has not stepped: its parameters are no state to give away yet.
                    self._error = error
                    return
                group = self._membership.regroup(self.completed, error)

    def _meet(self, group: Group) -> None:
        collective, members = group.collective, group.members
        steps = [member.completed for member in members]
        if any(step is not None for step in steps):
            newest = max(step for step in steps if step is not None)
            source = steps.index(newest)
        else:
            # Nobody has a state: the newest checkpoint counts, else the initial values of the first one.
            checkpoints = [member.checkpoint for member in members]
            newest = max(checkpoints)
            source = checkpoints.index(newest)
            if collective.rank == source and self._checkpoints is not None and newest > 0:
                self.state.install(self._checkpoints.load(newest), str(self._checkpoints.path(newest)))
        self._check_in_time(newest, steps[collective.rank])
        mine = to_bytes(self._owners) if collective.rank == source else b""
        owners = from_bytes(collective.broadcast_bytes(mine, source, CPU, what=f"owners after step {newest}"))
        if newest - 1 in steps:
            self._take_averages(collective, source, newest)
        if None in steps:
            self.state.transfer(collective, source, newest, has_state=self.completed is not None)
        self._deal(group, owners)
        self.completed = newest
        for part in self.parts:
            part.watch.begin(newest)
        self._membership.reached(newest)

    def _check_in_time(self, newest: int, known: int | None) -> None:
        """Raise FencedError where the others are so far that this worker cannot catch up inside its step."""
        # The others give averages only where the view says that a member lacks them.
        if self.completed == known and (known in (None, newest) or known + 1 == newest == self._step):
            return
        raise FencedError(
            f"the other workers went on without this one (expected the averages of step {newest}, got those of step"
            f" {self.completed}; their view says {known}). Fix: start it again; it takes over their state.",
            ErrorCode.FENCED,
        )

    def _take_averages(self, collective: Collective, source: int, newest: int) -> None:
        """Who is in step ``newest`` ends it with the averages of ``source``."""
        mine = b""
        if collective.rank == source:
            mine = to_bytes([self.recorded, *[vars(part.outcome) for part in self.parts]])
        told = collective.broadcast_bytes(mine, source, CPU, what=f"averages of step {newest}")
        if self.completed == newest - 1:
            recorded, *outcomes = from_bytes(told)
            self._complete(newest, recorded, [Outcome(**outcome) for outcome in outcomes])

    def _deal(self, group: Group, former: Mapping[int, int]) -> None:
        """Who plays whom in the group; contributions that were made already stay with who has them."""
        workers = [member.worker for member in group.members]
        if len(workers) > self.virtual_workers:
            raise ConfigurationError(
                f"strategy 'sync:virtual_workers={self.virtual_workers}' has one virtual worker or more for each worker"
                f" (expected at most {self.virtual_workers} workers, got {len(workers)}). Fix: start fewer, or psengine"
                " run --independent, where the others are spares."
            )
        self._owners = deal(self.virtual_workers, workers, former)
        played = {worker: [v for v in self._owners if self._owners[v] == worker] for worker in workers}
        slots = {v: slot for mine in played.values() for slot, v in enumerate(mine)}
        owners = [(workers.index(self._owners[v]), slots[v]) for v in range(self.virtual_workers)]
        former_slots, self._slots = self._slots, {v: slots[v] for v in played[workers[group.collective.rank]]}
        self._done = {v: value for v, value in self._done.items() if v in self._slots}
        kept = {former_slots[v]: self._slots[v] for v in self._done}
        for part in self.parts:
            part.move(group.collective, owners, kept)
        self._group, self._has_begun = group, False

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A step begins, ``completed`` + 1; the step before has ended."""
        if self._error is not None or self._membership.has_news:
            self._regroup(self._error)
        assert self.completed == step - 1, f"step {step} follows step {self.completed}"
        try:
            for part in self.parts:
                part.compare(self.completed)
        except CollectiveError as error:
            self._regroup(error)
        is_first = self._group is not None and self._group.collective.rank == 0
        if is_first and self._checkpoints is not None and self._checkpoints.is_due(self.completed):
            self._checkpoints.write(self.state.snapshot(self.completed))
        self._step, self._done = step, {}

    def next_virtual_worker(self) -> int | None:
        """End the batch before, if there was one; return whose batch follows in this step.

        None: the step is over. Averages are in ``.grad``, buffers are virtual worker 0's.
        """
        if self.playing is not None:
            self._end_batch(self.playing)
        while self._step is not None:
            left = [v for v in self._slots if v not in self._done]
            if left:
                self._begin_batch(left[0], is_last=len(left) == 1)
                return left[0]
            self._end_step(self._step)
        return None

    def record(self, value: float) -> None:
        """Note a number of the batch that is played; see ``recorded``."""
        self._value = value

    def packed(self, driver: Driver, bucket: Bucket) -> None:
        """A bucket of the batch that is played is packed, of the part whose exchanges ``driver`` runs."""
        if self._has_begun and self._error is None:
            try:
                driver.begin(bucket)
            except CollectiveError as error:
                self._error = error

    def _begin_batch(self, virtual_worker: int, *, is_last: bool) -> None:
        # Which of several models has its backward first may depend on the batch, so their buckets wait for its end.
        self._has_begun = is_last and len(self.parts) == 1
        for part in self.parts:
            part.begin_batch(self._slots[virtual_worker])
        self.playing, self._value = virtual_worker, math.nan

    def _end_batch(self, virtual_worker: int) -> None:
        self.playing = None
        for part in self.parts:
            if not part.end_batch(is_first=virtual_worker == 0):
                self._step = None
                raise ReductionError(
                    f"the batch of virtual worker {virtual_worker} had no backward (expected one for each wrapped model"
                    " in each turn of the loop over step.batches). Fix: backward in every turn, outside of no_sync."
                )
        self._done[virtual_worker] = self._value

    def _end_step(self, step: int) -> None:
        """Exchange contributions. ``_step`` is None afterwards, unless the group changed: there may be more to do."""
        try:
            if self._error is not None:
                raise self._error
            if self._membership.has_news:
                self._regroup(None)
            else:
                self._exchange(step)
        except CollectiveError as error:
            self._regroup(error)
        if self.completed == step:
            self._step = None

    def _exchange(self, step: int) -> None:
        """Take part in the exchanges that end a step, in an order that all members have."""
        assert self._group is not None, "a step is inside a training"
        collective = self._group.collective
        if not self._has_begun:
            for part in self.parts:
                part.begin_exchanges()
            self._has_begun = True
        outcomes = [part.finish_exchanges() for part in self.parts]
        recorded = self._share_recorded(collective)
        # From here on nothing waits for others.
        self._complete(step, recorded, outcomes)

    def _share_recorded(self, collective: Collective) -> list[float]:
        """By virtual worker, what was recorded."""
        recorded = torch.zeros(2, self.virtual_workers, dtype=torch.float64)
        for virtual_worker, value in self._done.items():
            if not math.isnan(value):
                recorded[0, virtual_worker], recorded[1, virtual_worker] = value, 1
        collective.sum(recorded.view(-1), what="numbers of a step")
        return [value if is_there else math.nan for value, is_there in recorded.T.tolist()]

    def _complete(self, step: int, recorded: list[float], outcomes: Sequence[Outcome]) -> None:
        for part, outcome in zip(self.parts, outcomes, strict=True):
            part.end_step(outcome)
        self.completed, self.recorded, self._done = step, recorded, {}


# The player of the models that were wrapped last; they are trained together until training begins.
_latest: weakref.ref[Player] | None = None


def player_for(virtual_workers: int, collective: Collective) -> Player:
    """The player of a model that is being wrapped: that of models wrapped before, or a new one.

    Raises:
        ConfigurationError: PSENGINE_SERVERS is malformed.
    """
    global _latest
    player = current_player()
    if player is None or player.has_entered or not player.parts or player.virtual_workers != virtual_workers:
        # An independent worker is a world of its own, and meets the others by the coordinator's word.
        is_coordinated = collective.world_size == 1 and bool(parse_addresses(None))
        membership = CoordinatedMembership(virtual_workers) if is_coordinated else FixedMembership(collective)
        player = Player(virtual_workers, membership)
        _latest = weakref.ref(player)
    return player


def current_player(model: Any = None) -> Player | None:
    """The player of ``model``, which ``psengine.DistributedDataParallel`` wrapped; of None, that of the model that was
    wrapped last with virtual workers. None where there is none.
    """
    if model is None:
        return None if _latest is None else _latest()
    strategy = getattr(model, "strategy", None)  # native DDP has none
    return strategy.player if strategy is not None and strategy.capabilities.has_virtual_workers else None
