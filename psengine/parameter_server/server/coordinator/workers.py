"""The workers of one job: which process has which rank, who is alive, who claims a rank that another holds. Pure.

A rank belongs to one process at a time. The incarnation tells the processes of a rank apart: a process keeps its own
for life, also where it was evicted and comes back, and a later process of the rank has a larger one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from psengine.errors import RAISE_LEASE, ProtocolError
from psengine.parameter_server.server.coordinator.states import WORKER, WorkerState, after
from psengine.parameter_server.server.interfaces import Sender
from psengine.protocol.messages import MAX_WORKERS, ErrorCode, Message
from psengine.protocol.views import ViewMember
from psengine.status_port.status_model import NOT_FINITE, WorkerTimes

# Messages that a process sent before it died may still arrive after its successor's first one.
CLAIM_GRACE_S = 0.5
# Those of later processes still fit where they are sent and kept.
MAX_INCARNATION = 2**62
# Rates of steps are taken over the last so long, or over two steps where these are longer.
WINDOW_S = 10.0


class WorkerTelemetry:
    """What a worker's steps are made of, as its heartbeats report them.

        worker   ├─ compute ─────┤├─ blocked: it waits for servers ─────────┤      step_s, blocked_s

    Attributes:
        times: what is known now; its seconds are means of a step.
    """

    def __init__(self) -> None:
        self.times = WorkerTimes()
        # Heartbeats that told of a new step, and when; a step's seconds are counted from the end of the first step on.
        self._heard: deque[tuple[float, Mapping[str, Any]]] = deque()

    def hear(self, body: Mapping[str, Any], now_s: float) -> None:
        """A heartbeat came; one without ``steps`` says nothing of them."""
        if "steps" not in body:
            return
        # A heartbeat says None of a loss that is not finite.
        loss = NOT_FINITE if "loss" in body and body["loss"] is None else body.get("loss")
        self.times = replace(self.times, steps=body["steps"], loss=loss)
        heard = self._heard
        if body["steps"] > (heard[-1][1]["steps"] if heard else 0):
            heard.append((now_s, body))
        while len(heard) > 2 and now_s - heard[1][0] >= WINDOW_S:
            heard.popleft()
        if len(heard) < 2 or now_s <= heard[0][0]:
            return
        (first_s, first), (_, last) = heard[0], heard[-1]
        gained = {name: last.get(name, 0) - first.get(name, 0) for name in ("steps", "samples", "step_s", "blocked_s")}
        found = {"steps_per_s": gained["steps"] / (now_s - first_s)}
        if last.get("samples"):
            found["samples_per_s"] = gained["samples"] / (now_s - first_s)
        for name in ("step_s", "blocked_s"):
            found[name] = gained[name] / gained["steps"]
        found["compute_s"] = found["step_s"] - found["blocked_s"]
        self.times = replace(self.times, **{name: round(value, 6) for name, value in found.items()})


@dataclass(slots=True, eq=False)
class Worker:
    """One worker, as the coordinator knows it."""

    rank: int
    incarnation: int
    nonce: int | None  # of its process; None where only a view names it
    user_id: str  # its CURVE key; "" without CURVE
    state: WorkerState = WorkerState.WAITING
    route: bytes = b""  # its newest control connection; b"" while it is expected and has not come back
    last_heard_s: float = 0.0
    came_s: float = 0.0  # when it said HELLO last
    host: str = "unknown host"
    pid: int = 0
    run: str = ""
    world_size: int = 1  # of its run
    continues: bool = False  # it goes on from what another run has trained
    warning: str = ""  # for its next WELCOME
    process_id: int = 0  # where the kernel says which process of this host it is
    hello: int = 0  # the id of its newest HELLO
    claims: dict[int, float] = field(default_factory=dict)  # by nonce, since when another process wants its rank
    welcomed: tuple[str, int] = ("", 0)  # since then: the last WELCOME's state and registration
    told: int = 0  # and the last VIEW, RELEASE, MEET or PREPARE: see ``Coordinator._tell``
    has_rule: bool = False  # it wants to take part, not only to have a rank
    first_step: int = 1
    admitted: int = 0  # number of the view that it came in with; 0 before
    completed: int = 0  # the last step of which it has all answers, and of all before
    committed: int = 0  # the last step that all shards have from it
    prepared: int = 0  # the view for which it is frozen
    has_state: bool = False  # in an elastic job, what it said last, as the next
    checkpoint: int = 0
    processes: str = ""
    is_of_next: bool = False  # it came when the training was over, and waits for the next one
    has_read: bool = False  # it has the state with which it was admitted
    ended_s: float | None = None  # since when its connection has ended
    is_blocked: bool = False  # it waits for answers for more than a heartbeat
    is_elsewhere: bool = False  # it waits for other workers, and contributes nothing before they come
    unreachable: frozenset[int] = frozenset()  # shards that it could not reach for a lease
    cut_s: float = 0.0  # since when there are such that others reach
    leaving: Message | None = None  # its LEAVE; where it is gone, the next view answers that
    why_gone: str = ""  # "left", "evicted" or "fenced"
    gone_because: str = ""  # for people
    gone_unix_s: float = 0.0
    telemetry: WorkerTelemetry = field(default_factory=WorkerTelemetry)

    @property
    def has_begun(self) -> bool:
        """Whether it has read what it began with: it has done a step since it was admitted."""
        return max(self.completed, self.committed) >= self.first_step

    @property
    def has_failed(self) -> bool:
        """Whether it wants to leave because its training broke off."""
        return self.leaving is not None and self.leaving.body.get("failed", False)

    def advance(self, event: str) -> None:
        """Something happens to it."""
        self.state = after(WORKER, self.state, event)

    def is_process(self, message: Message, user_id: str) -> bool:
        """Whether a HELLO comes from its process."""
        if self.user_id != user_id:
            return False
        return self.nonce == message.body["nonce"] or (self.nonce is None and self.incarnation == message.incarnation)

    def to_view(self) -> ViewMember:
        """Its entry in a view."""
        return ViewMember(self.rank, self.incarnation, self.user_id, self.first_step)


_RANK = attrgetter("rank")


class Workers:
    """All that are known of one job, by rank; see the module's text."""

    def __init__(self) -> None:
        self.by_rank: dict[int, Worker] = {}

    def of(self, *states: WorkerState) -> list[Worker]:
        """Those in one of these states, by rank."""
        return sorted([one for one in self.by_rank.values() if one.state in states], key=_RANK)

    @property
    def members(self) -> list[Worker]:
        """The members, by rank."""
        return self.of(WorkerState.MEMBER)

    @property
    def waiting(self) -> list[Worker]:
        """Those who are here to take part and do not yet."""
        return [one for one in self.of(WorkerState.WAITING, WorkerState.JOINING) if one.route and one.has_rule]

    @property
    def departing(self) -> list[Worker]:
        """Those whose LEAVE the next view answers."""
        return [one for one in self.of(WorkerState.GONE) if one.leaving is not None]

    @property
    def present(self) -> list[Worker]:
        """All who are not gone, by rank."""
        return self.of(WorkerState.WAITING, WorkerState.JOINING, WorkerState.MEMBER)

    def rank_for(self, message: Message, user_id: str) -> int:
        """The rank of a process that says HELLO: the one that it names or had, else the lowest free one."""
        rank = message.body.get("rank")
        if rank is None:
            mine = (one.rank for one in self.by_rank.values() if one.is_process(message, user_id))
            taken = {one.rank for one in self.present}
            rank = next(mine, next(rank for rank in range(len(taken) + 1) if rank not in taken))
        if rank >= MAX_WORKERS:
            raise ProtocolError(f"ranks lie below {MAX_WORKERS} (got {rank})", ErrorCode.BAD_VALUE)
        if message.incarnation > MAX_INCARNATION:
            raise ProtocolError(f"no process has such a number (got incarnation {message.incarnation})")
        return int(rank)

    def new(self, rank: int, message: Message, user_id: str, number: int) -> Worker:
        """Another process has the rank from here on; one that was known to a former coordinator brings its number."""
        newest = max((one.incarnation for one in self.by_rank.values()), default=0)
        incarnation = message.incarnation or max(newest + 1, number)
        worker = self.by_rank[rank] = Worker(rank, incarnation, message.body["nonce"], user_id)
        return worker

    def find(self, message: Message, sender: Sender, job: str) -> Worker:
        """The worker that a message other than HELLO comes from.

        Raises:
            ProtocolError: it is none of this job, or not any more.
        """
        worker = self.by_rank.get(message.worker)
        if worker is None or (not worker.route and worker.state is not WorkerState.GONE):
            raise ProtocolError(f"worker {message.worker} of job {job!r} has not said HELLO", ErrorCode.NOT_MEMBER)
        is_it = (worker.incarnation, worker.user_id) == (message.incarnation, sender.user_id)
        # What a worker said before it heard that it has left is answered, else it would say HELLO again.
        if not is_it or (worker.state is WorkerState.GONE and worker.why_gone != "left"):
            raise ProtocolError(
                f"worker {message.worker} of job {job!r} was fenced: silent for more than its lease, cut off from a"
                " server, evicted by an operator, or replaced by a newer process. It has to say HELLO again; where that"
                f" happens often, {RAISE_LEASE}.",
                ErrorCode.FENCED,
            )
        if worker.route != sender.route:  # rank and incarnation are no secret
            raise ProtocolError(f"worker {worker.rank} said HELLO on another connection", ErrorCode.NOT_MEMBER)
        return worker
