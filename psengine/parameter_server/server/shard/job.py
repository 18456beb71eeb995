"""One job at one shard: its view, its chunks, and what members' messages do to them. Pure.

registrar   RESUME {key} ─ REGISTER, CONFIGURE, STORE ...         until a view names this life of the server
member      VIEW ─ RESUME {open} ─ PUSH ... ─ RELEASE ...         each may come again: nothing is taken twice
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from msgspec import convert, to_builtins
from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.server.interfaces import Sender
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.payloads import codec_of, received_values
from psengine.parameter_server.server.rules.rows import MergedRows, Rows
from psengine.parameter_server.server.snapshots.files import JobState
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment, job_number
from psengine.protocol.messages import DTYPE_NUMBERS, MAX_CHUNKS, ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View, other_servers
from psengine.status_port.status_model import JobCounts, ShardJob, ShardWorker, added

PAGE_BYTES = 48 * 1024
# Chunk-sized slots of an optimizer that may be attached.
MAX_SLOTS = 3
# By the name in HELLO.
RULES: dict[str, type[ChunkRule]] = {"average": Average, "apply": Apply, "merge": Merge}
TABLE_RULES: dict[str, type[Rows]] = {"apply": Rows, "merge": MergedRows}


@dataclass(slots=True)
class Worker:
    """One worker of the view, as a shard knows it."""

    incarnation: int
    user_id: str = ""  # its CURVE key; "" without CURVE
    proven: bytes = b""  # the connection over which it said RESUME last, with the job's key
    route: bytes = b""  # where its answers go: there, or b"" where it does not take part
    resumed: int = 0  # id of the last RESUME: messages of older connections may still be read after it
    pushes: int = 0  # chunks that it sent
    refused: int = 0  # of them
    step: int = 0  # the last that it pushed


class Job(RuleContext):
    """See the module's text.

    Args:
        name: as workers say it.
        rule: of all its chunks, as in HELLO: name, codec, options.
        take_memory: told of bytes about to be taken, and for what; raises ProtocolError where there are not enough.
        note: told of refused gradients, for people: see ``EventLog.note``.

    Attributes:
        registration: which attempt to register the chunks these are of; grows.
        key: what views and releases are signed with.
        place: which of the job's shards this is.
        taken: the number of the last release that was taken.
        workers: by rank, of the view.
        registrars: connections that may register chunks.
        claim: the RESUME by which it is to take another's place; None once it has.
        rules: its chunks, by key.
        blobs: by name, pieces by number.

    Raises:
        ProtocolError: this server knows no such codec.
    """

    def __init__(
        self,
        name: str,
        rule: Mapping[str, Any],
        take_memory: Callable[[int, str], None],
        note: Callable[..., None],
    ) -> None:
        self.name = name
        self.number = job_number(name)
        self._kind, codec = RULES[rule["name"]], codec_of(rule)
        super().__init__(rule, codec if self._kind.encodes_answers else only_gradients(codec))
        self.registration, self.key, self.place = 0, b"", 0
        self.taken = 0
        self.workers: dict[int, Worker] = {}
        self.registrars: set[bytes] = set()
        self.claim: Message | None = None
        self.rules: dict[int, ChunkRule] = {}
        self.blobs: dict[str, dict[int, torch.Tensor]] = {}
        self._pieces: dict[str, int] = {}  # of each blob, with those at other shards
        self.take_memory = take_memory
        self._note = note

    @property
    def holds_weights(self) -> bool:
        """See ``ChunkRule.holds_weights``."""
        return self._kind.holds_weights

    @property
    def is_registering(self) -> bool:
        """Whether its weights come here, and nobody trains them yet."""
        return self.holds_weights and self.view is None and bool(self.rules)

    @property
    def is_trained(self) -> bool:
        """Whether there are values here that nobody else has; a view without chunks is the end of them."""
        is_at_work = self.holds_weights and self.view is not None and bool(self.view.chunks)
        return is_at_work and any(rule.version for rule in self.rules.values())

    def check_place(self, body: Mapping[str, Any]) -> None:
        """Raise ProtocolError where a worker names other servers than those that have the values, or another order."""
        shard, shards, servers = body["place"]
        has_none = self.holds_weights and not self.rules  # here: whether others have, only their shards know
        # An older registration is that of a worker which was away while another one registered the job: it is told so.
        is_later = body["registration"] > self.registration
        if "open" in body and body["key"] != self.key and not is_later and shard != self.place:
            # Its lead has published a view and knows of no other; this shard will never take it.
            raise ProtocolError(
                f"job {self.name!r} was registered later by a run that names the servers in another order. Fix: name"
                f" them in that order, or drop the job by psengine admin forget --job {self.name} at each of them.",
                ErrorCode.OTHER_SERVERS,
            )
        if self.view is None or not (self.is_trained or (has_none and any(self.view.chunks))):
            return
        differs = other_servers(self.name, self.view, servers, shards)
        if not differs and shard != self.place:
            differs = other_servers(self.name, self.view)
        if not differs and not has_none and is_later and body["key"] != self.key:
            differs = other_servers(self.name, self.view, why="as before, and the first of them has lost the job")
        if differs:
            raise ProtocolError(differs, ErrorCode.OTHER_SERVERS)

    @property
    def version(self) -> int:
        """The least of all chunks."""
        return min((rule.version for rule in self.rules.values()), default=0)

    def is_member(self, rank: int, incarnation: int) -> bool:
        """Whether the view has this worker."""
        worker = self.workers.get(rank)
        return worker is not None and worker.incarnation == incarnation

    def is_from_member(self, message: Message, sender: Sender) -> bool:
        """Whether a member of the view says this. Rank and incarnation are no secret: its RESUME has the job's key.

        Who has lost its place says RESUME without one, over the same connection: it is not at work any more.
        """
        if not self.is_member(message.worker, message.incarnation):
            return False
        worker = self.workers[message.worker]
        has_key = message.type is MessageType.RESUME and message.body.get("key") == self.key
        return worker.proven == sender.route or (has_key and worker.user_id == sender.user_id)

    def find(self, key: int) -> ChunkRule:
        """The chunk's rule; ProtocolError where there is no such chunk here."""
        rule = self.rules.get(key)
        if rule is None:
            text = f"chunk {key} is not on this shard (expected one of its {len(self.rules)})"
            raise ProtocolError(text, ErrorCode.UNKNOWN_KEY)
        return rule

    # ---- views and releases ------------------------------------------------------------------------------------

    def adopt(self, view: View) -> list[Reply]:
        """A higher view came."""
        if not self.holds_weights:
            self.taken = 0  # steps that are dropped are decided again
        # Not the greatest so far: once all have gone and a coordinator forgot them, the next run counts from 1 again.
        self.floor = max((one.step for one in view.releases if one.contributors is None), default=0)
        self._set_view(view)
        self.registrars.clear()
        replies = [reply for rule in self.rules.values() for reply in rule.adopt(view)]
        return [*replies, *(reply for release in view.releases for reply in self.release(release))]

    def _set_view(self, view: View) -> None:
        former, self.workers, self.view = self.workers, {}, view
        for member in view.members:
            worker = former.get(member.rank)
            if worker is None or worker.incarnation != member.incarnation:
                worker = Worker(member.incarnation)
            worker.user_id = member.user_id
            self.workers[member.rank] = worker

    def release(self, release: Release) -> list[Reply]:
        """The coordinator has decided."""
        if release.number <= self.taken:
            return []
        self.taken = release.number
        if release.contributors is None:
            self.floor = max(self.floor, release.step)
        return [reply for rule in self.rules.values() for reply in rule.release(release)]

    # ---- members' messages -------------------------------------------------------------------------------------

    def resume(self, rank: int, pushes: Sequence[tuple[int, int]]) -> tuple[list[int], list[Reply]]:
        """A worker has a new connection, and these open pushes: (keys to send again, answers that were lost)."""
        missing, replies = [], list[Reply]()
        for key, step in pushes:
            rule = self.rules.get(key)
            if rule is None or not rule.has(rank, step):
                missing.append(key)
            elif (answer := rule.answer_again(rank, step)) is not None:
                replies.append(answer)
        return missing, replies

    def push(self, message: Message) -> list[Reply]:
        """PUSH: what leaves because of it.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """
        rule = self.find(message.key)
        rank, step, spec = message.worker, message.sequence, rule.spec
        assert self.view is not None
        if message.view != self.view.number and not self.holds_weights:
            return []  # it pushes again under this view
        if rule.holds_weights and spec.kind is ChunkKind.PARAMETER and rule.optimizer is None:
            text = f"{spec.describe()} has no optimizer yet; the worker has to send CONFIGURE first"
            raise ProtocolError(text, ErrorCode.NOT_READY)
        if rule.has(rank, step):
            self.statistics.duplicates += 1
            again = rule.answer_again(rank, step)
            return [] if again is None else [again]
        body = message.body
        contribution = Contribution(
            rank,
            message.incarnation,
            step,
            message.version,
            None,
            body.get("groups"),
            _absent_ranges(spec.segments, body["absent"]) if body.get("absent") else (),
            body.get("weight") if spec.kind is ChunkKind.PARAMETER else None,
            message.place is not None,
            body.get("held"),
            ahead=body.get("ahead", 0),
        )
        if message.payload is not None:
            contribution = rule.received(message, contribution)
        if contribution.weight == 0:
            contribution = contribution._replace(values=None)
        replies = rule.push(contribution)
        worker = self.workers[rank]
        worker.pushes += 1
        if spec.kind.is_trained:
            worker.step = max(worker.step, step)
        return replies

    def supply_result(self, message: Message) -> list[Reply]:
        """RESULT: the donor returns the last average to a shard that restarted."""
        rule, view = self.find(message.key), self.view
        assert view is not None
        if message.worker != view.donor or message.view != view.number or message.sequence != view.from_step - 1:
            return []
        contributors = message.body.get("contributors")
        is_empty = message.payload is None and contributors == 0
        payload = None if is_empty else rule.payloads.answered(message)
        return rule.supply_result(message.sequence, payload, contributors)

    @override
    def discarded(self, push: Contribution, spec: ChunkSpec, why: str) -> None:
        self.statistics.refused[why] += 1
        if why == "abstained":
            return  # a worker that only asks for weights
        if self.is_member(push.rank, push.incarnation):  # who left may have a part in a merge that was decided
            self.workers[push.rank].refused += 1
        text = f"worker {push.rank}: its gradient of {spec.describe()} was refused ({why})"
        self._note("refused", text, job=self.name, worker=push.rank)

    # ---- chunks ------------------------------------------------------------------------------------------------

    def register(self, message: Message) -> int:
        """REGISTER: take a chunk, with its initial values where they are kept here; a repetition replaces it.

        Of a job with a view every member may say it again, which changes nothing.
        """
        spec, known = _spec_of(message), self.rules.get(message.key)
        if known is not None and self.view is not None:
            return 0
        if known is None and len(self.rules) >= MAX_CHUNKS:
            text = f"a shard has at most {MAX_CHUNKS} chunks of a job. Fix: name more servers, or start more shards"
            raise ProtocolError(text, ErrorCode.MEMORY)
        values = None if message.payload is None else received_values(message, spec).clone()
        more_bytes = (0 if values is None else spec.size_bytes) - (0 if known is None else known.size_bytes())
        self.take_memory(more_bytes, f"registering {spec.describe()}")
        self.rules[message.key] = made = self._make(spec, values)
        if self.view is not None:
            made.adopt(self.view)
        return 0

    def _make(self, spec: ChunkSpec, values: torch.Tensor | None) -> ChunkRule:
        kind = self._kind if spec.table is None else TABLE_RULES.get(self.rule["name"])
        if kind is None:
            raise ProtocolError(
                f"{spec.describe()}: tables need servers that step (expected rule apply or merge, got average)",
                ErrorCode.RULE_MISMATCH,
            )
        return kind(spec, values, self)

    def configure(self, message: Message) -> int:
        """CONFIGURE: attach the server-side optimizer."""
        rule = self.find(message.key)
        spec = OptimizerSpec.from_body(message.body, rule.spec.numel)
        if rule.optimizer is None:
            self.take_memory(MAX_SLOTS * rule.spec.size_bytes, f"the optimizer of {rule.spec.describe()}")
        rule.configure(spec)
        return 0

    def page(self, after: int) -> dict[str, Any]:
        """LIST: the specs of as many chunks after key ``after`` as fit a page."""
        keys = sorted(key for key in self.rules if key > after)
        entries: list[dict[str, Any]] = []
        size_bytes = 0
        for key in keys:
            entry = self.rules[key].spec.to_body()
            # At most how large the entry is in msgpack.
            size_bytes += 64 + sum(len(s[0].encode()) + 24 + 9 * (len(s[1]) + len(s[2])) for s in entry["segments"])
            size_bytes += len(entry["table"][0].encode()) + 120 if "table" in entry else 0
            if entries and size_bytes > PAGE_BYTES:
                break
            entries.append(entry)
        return {"chunks": entries, "more": len(entries) < len(keys)}

    def read(self, message: Message) -> tuple[int, torch.Tensor | None, dict[str, Any]]:
        """PULL: (version, payload, body) of a chunk, a slot of its optimizer, or a piece of a blob."""
        name, slot = message.body.get("blob"), message.body.get("slot")
        if name is not None:
            pieces = self.blobs.get(name, {})
            if message.key not in pieces:
                raise ProtocolError(f"there is no piece {message.key} of {name!r} here", ErrorCode.UNKNOWN_KEY)
            return 0, pieces[message.key], {"pieces": self._pieces[name]}
        rule = self.find(message.key)
        if isinstance(rule, Rows):
            return rule.read_rows(message)
        if message.payload is not None or "scan" in message.body:
            raise ProtocolError(f"{rule.spec.describe()} is no table: it has no rows")
        if slot is None:
            return *rule.read(), {}
        optimizer = _optimizer_of(rule)
        optimizer.check_slot(slot)
        # Without payload where the slot holds nothing yet.
        return rule.version, optimizer.slots().get(slot), {"slot": slot, "steps": optimizer.steps()}

    def store(self, message: Message) -> int:
        """STORE: overwrite what ``read`` reads. The version, where the worker computes its next gradient from it."""
        body = message.body
        if body.get("blob") is not None:
            self._store_piece(message, body["blob"], body.get("pieces") or message.key + 1)
            return 0
        rule, slot = self.find(message.key), body.get("slot")
        request = message.incarnation, message.sequence
        if request > rule.stores.get(message.worker, (0, 0)):  # else its OK was lost
            if isinstance(rule, Rows):
                rule.store_rows(message)
            elif slot is not None:
                values = received_values(message, rule.spec)
                _optimizer_of(rule).load_slot(slot, values, body.get("steps", []))
            else:
                values = received_values(message, rule.spec)
                if rule.values is None:
                    self.take_memory(rule.spec.size_bytes, f"values of {rule.spec.describe()}")
                rule.store(values, message.version)
            rule.stores[message.worker] = request
        if body or not self.is_member(message.worker, message.incarnation):
            return 0
        rule.note_base(message.worker)
        return rule.version

    def _store_piece(self, message: Message, name: str, pieces: int) -> None:
        here, piece = self.blobs.get(name, {}), payload_tensor(message)
        known_bytes = here[message.key].nbytes if message.key in here else 0
        self.take_memory(piece.nbytes - known_bytes, f"piece {message.key} of {name!r}")
        here[message.key] = piece.clone()
        self.blobs[name] = {number: piece for number, piece in here.items() if number < pieces}
        self._pieces[name] = pieces

    def size_bytes(self) -> int:
        """Memory of all chunks and blobs."""
        pieces_bytes = sum(piece.nbytes for blob in self.blobs.values() for piece in blob.values())
        return sum(rule.size_bytes() for rule in self.rules.values()) + pieces_bytes

    # ---- for people --------------------------------------------------------------------------------------------

    def status(self) -> ShardJob:
        """The job as it is now."""
        rules, waiting = list(self.rules.values()), self._waiting()
        tables = [rule for rule in rules if isinstance(rule, Rows)]
        return ShardJob(
            rule=self.rule,
            chunks=len(rules),
            values_bytes=sum(rule.spec.size_bytes for rule in rules) + sum(rule.table.size_bytes for rule in tables),
            version_min=self.version,
            version_max=max((rule.version for rule in rules), default=0),
            members=len(self.workers),
            table_rows=added({rule.of.name: rule.table.rows} for rule in tables),
            table_bytes=added({rule.of.name: rule.table.size_bytes} for rule in tables),
            table_evicted=added({rule.of.name: rule.evicted_rows} for rule in tables),
            workers=tuple(
                ShardWorker(
                    rank=rank,
                    pushes=worker.pushes,
                    refused=worker.refused,
                    step=worker.step if worker.pushes else None,
                    waiting_for=tuple(sorted(waiting.get(rank, ()))),
                    staleness=Counter(self.statistics.recent_staleness.get(rank, ())),
                )
                for rank, worker in sorted(self.workers.items())
            ),
            **{one.name: copy(getattr(self.statistics, one.name)) for one in fields(JobCounts)},
        )

    def _waiting(self) -> dict[int, set[int]]:
        """Per rank whose answers are held, the ranks it waits for, over all chunks."""
        waiting: dict[int, set[int]] = {}
        for rule in self.rules.values():
            for rank, ranks in rule.waits().items():
                waiting.setdefault(rank, set()).update(ranks)
        return waiting

    # ---- for snapshots -----------------------------------------------------------------------------------------

    def capture(self, generation: int = 0, kept: Collection[int] = ()) -> JobState:
        """Copies of everything: a log goes on from exactly here; see ``ChunkRule.capture``."""
        meta = {"rule": self.rule, **to_builtins({name: getattr(self, name) for name in _KEPT})}
        return JobState(self.name, meta, [rule.capture(generation, kept) for rule in self.rules.values()])

    def restore(self, state: JobState) -> None:
        """Take over a captured state, tensors included."""
        for name, kind in _KEPT.items():
            setattr(self, name, convert(state.meta[name], kind))
        if self.view is not None:
            self._set_view(self.view)
        for chunk in state.chunks:
            made = self._make(ChunkSpec.from_body(chunk.meta["spec"]), chunk.tensors.get("values"))
            made.restore(chunk)
            self.rules[chunk.key] = made


# What a snapshot has of a job beside its rule and its chunks: attributes, and their types.
_KEPT: dict[str, Any] = {
    "registration": int,
    "key": bytes,
    "place": int,
    "view": View | None,
    "taken": int,
    "floor": int,
}


def _optimizer_of(rule: ChunkRule) -> ChunkOptimizer:
    if rule.optimizer is None:
        raise ProtocolError(f"{rule.spec.describe()} has no optimizer here", ErrorCode.NOT_READY)
    return rule.optimizer


def _absent_ranges(segments: Sequence[Segment], absent: list[int]) -> list[tuple[int, int]]:
    """[start, end) element ranges of the segments with these indices, in a chunk.

    Raises:
        ProtocolError: there is no such segment.
    """
    if max(absent) >= len(segments):
        raise ProtocolError(f"no such segments (expected indices below {len(segments)}, got {max(absent)})")
    starts = [0, *accumulate(segment.numel for segment in segments)]
    return [(starts[index], starts[index + 1]) for index in sorted(set(absent))]


def _spec_of(message: Message) -> ChunkSpec:
    assert message.dtype is not None
    spec = ChunkSpec.from_body({**message.body, "key": message.key, "dtype": DTYPE_NUMBERS[message.dtype]})
    if not spec.numel:
        raise ProtocolError(f"{spec.describe()}: expected elements, got none")
    if spec.table is not None and spec.dtype is not torch.float32:
        raise ProtocolError(f"{spec.describe()}: rows are float32 (got {spec.dtype})")
    if spec.kind is ChunkKind.PARAMETER and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        raise ProtocolError(f"{spec.describe()}: only floating and complex values are trained (got {spec.dtype})")
    return spec
