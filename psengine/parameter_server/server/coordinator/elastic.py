"""The coordinator of a job whose workers exchange among themselves (``sync`` with virtual workers). Pure.

    worker ──HELLO──► WAITING ── there is a place ─► PREPARE to members ─► all: COMMIT prepared ─► VIEW
    member ── COMMIT failed; silent for a lease; its process or its connection is gone ──┘

There are no chunks, so nothing is registered and nobody deposits a state: a view says how far each member is, and
members give each other what they lack. As many workers as there are virtual ones take part; others wait for a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.coordinator.coordinator import Coordinator, Interfaces, may_leave
from psengine.parameter_server.server.coordinator.states import JobState, WorkerState
from psengine.parameter_server.server.coordinator.workers import Worker
from psengine.parameter_server.server.interfaces import Outgoing, Sender
from psengine.protocol.bounds import MAX_VIEW_NUMBER
from psengine.protocol.facts import difference
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import MemberState, View

# How long a job that has no checkpoint is not begun without worker 0.
FIRST_WORKER_LEASES = 12
# Keys that members may set to form a group; they set 3 each.
MEETS_OF_A_MEMBER = 4


class ElasticCoordinator(Coordinator):
    """See the module's text."""

    hears = frozenset({"heartbeat", "leave", "prepared", "failed", "meet"})

    def __init__(self, name: str, interfaces: Interfaces) -> None:
        super().__init__(name, interfaces)
        self._waiting_since_s: float | None = None  # while nobody has a state: since when somebody waits for a view
        self._met: dict[str, Message] = {}  # what members of the view have said to form their group

    @override
    def tick(self, now_s: float) -> list[Outgoing]:
        self._now_s = now_s
        self._put_out_dead()
        return super().tick(now_s)

    @override
    def _settled(self) -> list[Outgoing]:
        if self.state is JobState.OPEN and self.view is None and not self.workers.present:
            self._begin_anew()
        if self.state is JobState.NEW and self.workers.waiting:
            self._advance("begun")
            self._advance("registered")
            self.key, self.registration = self._interfaces.draw_key(), self._next_registration()
        return super()._settled()

    # ---- who comes ---------------------------------------------------------------------------------------------

    @override
    def _check(self, body: Mapping[str, Any]) -> None:
        rule = body.get("rule")
        if rule is not None and self.rule is not None and rule["name"] == self.rule["name"]:
            _check_alike(self.name, self.rule, rule)
        super()._check(body)

    @override
    def _greet(self, rank: int, message: Message, sender: Sender) -> None:
        former = self.workers.by_rank.get(rank)
        super()._greet(rank, message, sender)
        worker = self.workers.by_rank[rank]
        worker.checkpoint, worker.processes = message.body.get("checkpoint", 0), message.body.get("processes", "")
        worker.ended_s = None
        # A worker that comes as a new one still takes only views that are newer than its last.
        self.last_number = max(self.last_number, min(message.view, MAX_VIEW_NUMBER // 2))
        if worker is not former:
            worker.is_of_next = any(self.came.values())

    @override
    def _welcome_state(self, worker: Worker) -> str:
        if not worker.has_rule:
            return "reserved"
        return "ready" if self.state is JobState.OPEN and worker.state is WorkerState.MEMBER else "wait"

    @override
    def _newcomers(self) -> list[tuple[Worker, int]]:
        waiting, members = self.workers.waiting, self.workers.members
        if not waiting and self.view is None:
            self._waiting_since_s = None
        if not waiting or self.rule is None:
            return []
        places = self.rule["virtual_workers"] - len(members)
        if self.view is None:
            # The server may have restarted: members with a state are coming back, and spare workers may be quicker.
            is_young = self._now_s - self._interfaces.started_s < self._lease_s
            expected = max(places, self.world_size) if is_young else min(places, self.world_size)
            are_enough = len(waiting) >= expected or self._waited_s() >= self._lease_s
            may_come = are_enough and self._have_values(waiting)
        else:  # not where it begins anew, or the training is over
            may_come = bool(members) and not any(one.leaving for one in members) and not any(self.came.values())
        return [(one, 1) for one in waiting[: max(0, places)]] if may_come else []

    def _have_values(self, workers: list[Worker]) -> bool:
        """Whether workers of whom none has a state may begin: without a checkpoint with worker 0's initial values."""
        is_late = self._waited_s() >= FIRST_WORKER_LEASES * self._lease_s
        return is_late or any(one.rank == 0 or one.checkpoint for one in workers)

    def _waited_s(self) -> float:
        self._waiting_since_s = self._now_s if self._waiting_since_s is None else self._waiting_since_s
        return self._now_s - self._waiting_since_s

    @override
    def _publish(self, newcomers: list[tuple[Worker, int]]) -> None:
        members = self.workers.members  # they are frozen, and have said what they have
        has_state = not members or any(one.has_state for one in members)
        if has_state or self._have_values([*members, *(one for one, _ in newcomers)]):
            super()._publish(newcomers)
            self._waiting_since_s = None

    @override
    def _complete_view(self, members: list[Worker]) -> None:
        assert self.view is not None, "it was just made"
        states = [
            MemberState(one.completed if one.has_state else None, one.checkpoint, one.host, one.pid, one.processes)
            for one in members
        ]
        self.view = replace(self.view, states=tuple(states))
        self._met = {}

    # ---- what members say --------------------------------------------------------------------------------------

    @override
    def _hear_prepared(self, worker: Worker, message: Message) -> None:
        super()._hear_prepared(worker, message)
        if worker.prepared == message.body["view"]:
            worker.has_state = message.body.get("has_state", True)

    def _hear_failed(self, worker: Worker, message: Message) -> None:
        """The members of a view cannot exchange any more."""
        if self.view is None or message.body["view"] != self.view.number or worker.state is not WorkerState.MEMBER:
            return
        for rank in message.body["lost"]:
            lost = self.workers.by_rank.get(rank)
            if lost is not None and lost is not worker and self.view.member(rank) == lost.to_view():
                self._put_out(lost, "evicted", f"worker {worker.rank} saw that its process is gone")
        self._want_view()

    def _hear_meet(self, worker: Worker, message: Message) -> None:
        """A member says what all need to form the view's group; under another view, or as it ends, it is ignored."""
        view = self._meeting()
        if worker.state is not WorkerState.MEMBER or view is None or message.view != view.number:
            return
        key, most = message.body["key"], MEETS_OF_A_MEMBER * len(view.members)
        if key not in self._met and len(self._met) >= most:
            raise ProtocolError(f"a group has too many keys (expected at most {most}, got {key!r} too)")
        said = self._met.setdefault(key, Message(MessageType.MEET, self.number, body=message.body))
        if said.body != message.body:
            raise ProtocolError(f"key {key!r} of a group is set already (expected the same value again)")

    def _meeting(self) -> View | None:
        """The view whose members may form a group; None while another one is to come."""
        is_ending = self.state is not JobState.OPEN or self._preparing is not None
        view = None if is_ending else self.view
        return None if view is None or view.epoch != self._interfaces.epoch else view

    @override
    def _tell(self, worker: Worker) -> None:
        super()._tell(worker)
        if self._met and worker.state is WorkerState.MEMBER and (view := self._meeting()) is not None:
            view_told = view.number << 32
            for message in islice(self._met.values(), worker.told - view_told, None):
                self._send(worker, message)
            worker.told = view_told + len(self._met)

    @override
    def _hear_leave(self, worker: Worker, message: Message) -> bool:
        is_later = super()._hear_leave(worker, message)
        if self._preparing is not None:
            worker.leaving = None  # it hears PREPARE, gives the others what they lack, and says LEAVE again
        return is_later

    # ---- who goes ----------------------------------------------------------------------------------------------

    def _put_out_dead(self) -> None:
        """Put out a worker whose process has ended, or whose connection has ended without another one."""
        for worker in self.workers.present:
            if not worker.route:
                continue  # it has a lease to come back
            if worker.process_id and self._interfaces.is_gone(worker.process_id):
                self._put_out(worker, "evicted", "its process has ended")
            elif self._interfaces.is_connected(worker.route):
                worker.ended_s = None
            elif worker.ended_s is None:
                worker.ended_s = self._now_s
            elif self._now_s - worker.ended_s < self._interfaces.settings.heartbeat_s:
                continue
            elif self._heard_s > worker.ended_s and self._now_s - self._leases_begin_s >= self._lease_s:
                self._put_out(worker, "evicted", "its connection has ended, and it made no other one")

    @override
    def _note_end(self, worker: Worker, reason: str) -> None:
        if worker.state is WorkerState.MEMBER:
            super()._note_end(worker, reason)

    @override
    def _want_view(self) -> None:
        super()._want_view()
        for worker in self.workers.members:
            worker.leaving = None  # see ``_hear_leave``

    @override
    def _let_leave(self) -> None:
        """Whoever may leave goes at once: the view without it takes as long as the others' steps."""
        members = self.workers.members
        for worker, message in [(one, one.leaving) for one in members if one.leaving and may_leave(one, members)]:
            self._put_out(worker, "left", "it is done")
            self._send(worker, Message(MessageType.OK, self.number, sequence=message.sequence))
            worker.leaving = None

    @override
    def _end(self, *, has_failed: bool) -> None:
        """A job of which a worker has come to its end is over, however the others went."""
        super()._end(has_failed=has_failed and not any(self.came.values()))


def _check_alike(job: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Raise ProtocolError where a worker differs from those that came before in what all must have alike."""
    there, here = ({"virtual_workers": rule["virtual_workers"], **rule["facts"]} for rule in (expected, got))
    if differs := difference(there, here):
        raise ProtocolError(
            f"this worker differs from those of job {job!r} that came before {differs}. Fix: start all workers with the"
            " same program, arguments and machine settings; or give another training another job (PSENGINE_JOB).",
            ErrorCode.RULE_MISMATCH,
        )
