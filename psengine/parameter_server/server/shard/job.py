"""One job at one shard: its view, its chunks, and what members' messages do to them. Pure.

registrar   RESUME {key} ─ REGISTER, CONFIGURE, STORE ...         until a view names this life of the server
member      VIEW ─ RESUME {open} ─ PUSH ... ─ RELEASE ...         each may come again: nothing is taken twice
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from psengine.errors import ProtocolError
from psengine.parameter_server.server.rules.chunk_store import ChunkStore, absent_ranges, chunk_state
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.parameter_server.server.shard.worker import Worker
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.parameter_server.status_model import ShardJob, ShardWorker
from psengine.protocol.layout import ChunkKind, ChunkSpec, job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View


class Job:
    """See the module's text.

    Args:
        name: as workers say it.
        rule: of all its chunks.
        take_memory: see ``ChunkStore``.
        note: told of refused gradients, for people: see ``EventLog.note``.
        measure_s: measures what work costs.

    Attributes:
        registration: which attempt to register the chunks these are of; grows.
        key: what views and releases are signed with.
        view: the newest that came; None before the chunks are registered.
        taken: the number of the last release that was taken.
        floor: the step that every worker has committed (a bound on staleness).
        workers: by rank, of the view.
        registrars: connections that may register chunks.
    """

    def __init__(
        self,
        name: str,
        rule: JobRule,
        take_memory: Callable[[int, str], None],
        note: Callable[..., None],
        measure_s: Callable[[], float],
    ) -> None:
        self.name = name
        self.number = job_number(name)
        self.rule = rule
        self.registration, self.key = 0, b""
        self.view: View | None = None
        self.taken = self.floor = 0
        self.workers: dict[int, Worker] = {}
        self._members: dict[int, tuple[int, str]] = {}  # by rank: incarnation, user id
        self.registrars: set[bytes] = set()
        self.statistics = JobStatistics()
        self._note = note
        self._measure_s = measure_s
        context = RuleContext(
            view=lambda: self.view,
            floor=lambda: self.floor,
            statistics=self.statistics,
            discarded=self._discarded,
        )
        self.chunks = ChunkStore(rule, context, take_memory)

    @property
    def version(self) -> int:
        """The least of all chunks."""
        return min((rule.version for rule in self.chunks.rules.values()), default=0)

    @property
    def expected_workers(self) -> int:
        """How many workers the job was begun with."""
        return 1 if self.view is None else self.view.world_size

    def is_member(self, rank: int, incarnation: int, user_id: str | None = None) -> bool:
        """Whether the view has this worker; ``user_id``: and with this key."""
        member = self._members.get(rank)
        return member is not None and member[0] == incarnation and user_id in (None, member[1])

    # ---- views and releases ------------------------------------------------------------------------------------

    def adopt(self, view: View) -> list[Reply]:
        """A higher view came."""
        if not self.rule.holds_weights:
            self.taken = 0  # steps that are dropped are decided again
        self._set_view(view)
        self.registrars.clear()
        replies = [reply for rule in self.chunks.rules.values() for reply in rule.adopt(view)]
        return [*replies, *(reply for release in view.releases for reply in self.release(release))]

    def _set_view(self, view: View) -> None:
        former, self.view = self.workers, view
        self._members = {member.rank: (member.incarnation, member.user_id) for member in view.members}
        self.workers = {member.rank: Worker(member.incarnation) for member in view.members}
        for rank, worker in former.items():
            if self.is_member(rank, worker.incarnation):
                self.workers[rank] = worker

    def release(self, release: Release) -> list[Reply]:
        """The coordinator has decided."""
        if release.number <= self.taken:
            return []
        self.taken = release.number
        self.floor = max(self.floor, release.floor or 0)
        return [reply for rule in self.chunks.rules.values() for reply in rule.release(release)]

    # ---- members' messages -------------------------------------------------------------------------------------

    def resume(self, rank: int, pushes: Sequence[tuple[int, int]]) -> tuple[list[int], list[Reply]]:
        """A worker has a new connection, and these open pushes: (keys to send again, answers that were lost)."""
        missing, replies = [], list[Reply]()
        for key, step in pushes:
            rule = self.chunks.rules.get(key)
            if rule is None or not rule.has(rank, step):
                missing.append(key)
            elif (answer := rule.answer_again(rank, step)) is not None:
                replies.append(answer)
        return missing, replies

    def push(self, message: Message) -> tuple[bool, list[Reply]]:
        """PUSH: whether it was taken, and not known or out of date; and what leaves because of it.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """
        rule = self.chunks.find(message.key)
        rank, step, spec = message.worker, message.sequence, rule.spec
        assert self.view is not None
        if message.view > self.view.number:
            raise ProtocolError(
                f"{spec.describe()}: a worker forwards a view before it pushes under it (expected view"
                f" {self.view.number}, got {message.view})"
            )
        if message.view < self.view.number and not self.rule.holds_weights:
            return False, []  # it pushes again under this view
        if spec.kind not in rule.pushed_kinds:
            raise ProtocolError(f"{spec.describe()} is a {spec.kind.value}, which is not pushed in this job")
        if rule.has(rank, step):
            self.statistics.duplicates += 1
            again = rule.answer_again(rank, step)
            return False, [] if again is None else [again]
        if message.in_segment and message.payload is None:
            raise ProtocolError(f"{spec.describe()}: worker {rank} shares no memory with it", ErrorCode.SEGMENT)
        body = message.body
        contribution = Contribution(
            rank,
            message.incarnation,
            step,
            message.version,
            None if message.payload is None else rule.payloads.decode(message),
            body.get("groups"),
            absent_ranges(spec.segments, body["absent"]) if body.get("absent") else (),
            body.get("weight"),
            message.in_segment,
            body.get("held"),
        )
        began_s = self._measure_s()
        replies = rule.push(contribution)
        self._measure(contribution, spec, replies, began_s)
        return True, replies

    def _measure(self, push: Contribution, spec: ChunkSpec, replies: Sequence[Reply], began_s: float) -> None:
        """Add the time to that of the worker, and of all whose step this push ended."""
        now_s, worker = self._measure_s(), self.workers[push.rank]
        worker.pushes += 1
        if spec.kind is ChunkKind.PARAMETER:
            worker.pushed(spec.key, push.step, began_s)
        for rank in {push.rank, *(reply.rank for reply in replies if reply.type is MessageType.UPDATED)}:
            if rank in self.workers:
                self.workers[rank].worked(now_s - began_s)

    def left(self, reply: Reply) -> None:
        """An answer leaves."""
        if reply.type is MessageType.UPDATED and (worker := self.workers.get(reply.rank)) is not None:
            worker.answered(reply.key, reply.sequence, self._measure_s())

    def supply_result(self, message: Message) -> list[Reply]:
        """RESULT: the donor returns the last average to a shard that restarted."""
        rule, view = self.chunks.find(message.key), self.view
        assert view is not None
        if message.view != view.number or message.sequence != view.from_step - 1:
            return []
        payload = rule.payloads.answered(message)
        return rule.supply_result(message.worker, message.sequence, payload, message.body.get("contributors"))

    def register(self, message: Message) -> None:
        """REGISTER: a chunk of a new job; of a job with a view every member may say it again."""
        known = self.chunks.rules.get(message.key)
        if known is None or self.view is None:
            self.chunks.register(message)
        elif (known.spec.numel, known.spec.dtype) != (message.numel, message.dtype):
            raise ProtocolError(
                f"{known.spec.describe()} is registered already (expected {known.spec.numel} of {known.spec.dtype}, got"
                f" {message.numel} of {message.dtype}). Every worker needs the same model.",
                ErrorCode.LAYOUT_MISMATCH,
            )

    def _discarded(self, push: Contribution, spec: ChunkSpec, why: str) -> None:
        worker = self.workers.get(push.rank)
        kind = "late" if why == "late" else "refused"
        if worker is not None:
            setattr(worker, kind, getattr(worker, kind) + 1)
        text = f"of step {push.step} came after the others' average"
        if kind == "refused":
            text = f"of {spec.describe()} was refused ({why})"
        self._note(kind, f"worker {push.rank}: its gradient {text}", job=self.name, worker=push.rank)

    # ---- for people --------------------------------------------------------------------------------------------

    def status(self) -> ShardJob:
        """The job as it is now."""
        rules, waiting = list(self.chunks.rules.values()), self._waiting()
        return ShardJob(
            rule=self.rule.body,
            sealed=self.view is not None,
            chunks=len(rules),
            values_bytes=sum(rule.spec.size_bytes for rule in rules),
            memory_bytes=self.chunks.size_bytes(),
            version_min=self.version,
            version_max=max((rule.version for rule in rules), default=0),
            members=len(self.workers),
            workers=tuple(
                self._worker_status(rank, worker, frozenset(waiting.get(rank, ())))
                for rank, worker in sorted(self.workers.items())
            ),
            **self.statistics.to_status(),
        )

    def _worker_status(self, rank: int, worker: Worker, waiting: frozenset[int]) -> ShardWorker:
        apply_s, held_s = worker.costs_s()
        return ShardWorker(
            rank=rank,
            incarnation=worker.incarnation,
            pushes=worker.pushes,
            refused=worker.refused,
            late=worker.late,
            clock=worker.step if worker.pushes else None,
            waiting_for=tuple(sorted(waiting)),
            staleness=self.statistics.staleness_of(rank),
            apply_s=apply_s,
            held_s=held_s,
        )

    def _waiting(self) -> dict[int, set[int]]:
        """Per rank whose answers are held, the ranks it waits for, over all chunks."""
        waiting: dict[int, set[int]] = {}
        for rule in self.chunks.rules.values():
            for rank, step in rule.open_steps().items():
                waiting.setdefault(rank, set()).update(rule.waiting_for(rank, step))
        return waiting

    # ---- for snapshots -----------------------------------------------------------------------------------------

    def capture(self) -> JobState:
        """Copies of everything: a log goes on from exactly here."""
        meta = {
            "rule": self.rule.body,
            "registration": self.registration,
            "key": self.key.hex(),
            "view": None if self.view is None else msgspec.to_builtins(self.view),
            "taken": self.taken,
            "floor": self.floor,
            "last_stores": self.chunks.last_stores() if self.rule.holds_weights else [],
        }
        return JobState(self.name, meta, [chunk_state(rule, copies=True) for rule in self.chunks.rules.values()])

    def restore(self, state: JobState) -> None:
        """Take over a captured state, tensors included."""
        meta = state.meta
        self.registration, self.key = meta["registration"], bytes.fromhex(meta["key"])
        self.taken, self.floor = meta["taken"], meta["floor"]
        if meta["view"] is not None:
            self._set_view(msgspec.convert(meta["view"], View))
        self.chunks.note_stores(meta["last_stores"])
        self.chunks.restore(state.chunks)


def merge_job_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One job's meta from those of several shards of a server: it may be restored by another number of shards."""
    newest = max(metas, key=lambda meta: (meta["registration"], (meta["view"] or [0])[0]))
    stores = [store for meta in metas for store in meta["last_stores"]]
    # What only some shards had taken is taken again where it was not.
    return {**newest, "taken": min(meta["taken"] for meta in metas), "last_stores": stores}
