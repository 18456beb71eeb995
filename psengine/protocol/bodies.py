"""Message bodies: one type per message, checked by msgspec.

A body stays the map that it was; the types only check it. Bounds of a float need care: msgspec 0.22 mixes them up in a
union with a tuple, so ``hyperparameters.check_groups`` checks those of hyperparameters.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from psengine.errors import ProtocolError
from psengine.protocol import bounds, messages
from psengine.protocol.layout import ChunkKind, Segment, TableSpec
from psengine.protocol.messages import ErrorCode, MessageType
from psengine.protocol.views import Release, View

MAX_TEXT_CHARS = 4000
EMPTY = b"\x80"
_MAX_COMPLAINT_CHARS = 300

Kind = Annotated[str, bounds.one_of(*(kind.value for kind in ChunkKind))]
Tier = Annotated[str, bounds.one_of(*messages.DURABILITY_TIERS)]
# An optimizer's hyperparameters; ``hyperparameters.py`` has their names and bounds.
Group = Annotated[
    dict[Annotated[str, Meta(pattern=r"\A[^\W\d]\w*\Z", max_length=64)], bool | float | tuple[float, float] | None],
    Meta(max_length=64),
]
# Of all shards of a server, in order.
Addresses = Annotated[list[bounds.Address], Meta(min_length=1, max_length=messages.MAX_SHARDS)]
Ranks = Annotated[list[bounds.Rank], Meta(max_length=messages.MAX_WORKERS)]
# Of each shard of a job, or numbers of some.
OfShards = Annotated[list[bounds.Unsigned], Meta(max_length=messages.MAX_SHARDS)]
EpochsOfShards = Annotated[list[bounds.Unsigned64], Meta(max_length=messages.MAX_SHARDS)]
Groups = Annotated[list[Group], Meta(min_length=1, max_length=1024)]


class Body(Struct, forbid_unknown_fields=True):
    """A body with these fields and no others. Raises ValueError where the fields do not fit each other."""


class Register(Body, kw_only=True):
    """REGISTER's body; key, dtype and numel stand in its header."""

    kind: Kind
    segments: Annotated[list[Segment], Meta(max_length=messages.MAX_SEGMENTS)]
    table: TableSpec | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a table is described, and nothing else as one."""
        is_table = self.kind == ChunkKind.TABLE.value
        if is_table != (self.table is not UNSET) or (is_table and self.segments):
            raise ValueError("has `table`, and no segments, if its kind is table; no other has it")


class Chunk(Register, kw_only=True):
    """An entry of CHUNKS."""

    key: bounds.Key
    dtype: Annotated[int, Meta(ge=1, le=max(messages.DTYPES))]


class Rule(Body, tag_field="name"):
    """An update rule. ``durability``: the least that the job's servers are to offer; ``tables``: of tables."""

    compress: Annotated[str, Meta(min_length=1, max_length=255, pattern=bounds.PRINTABLE)] | UnsetType = UNSET
    durability: Tier | UnsetType = UNSET
    tables: bool | UnsetType = UNSET


class Average(Rule, tag="average", kw_only=True):
    """Each average of gradients waits for all live workers."""


class Merge(Rule, tag="merge", kw_only=True):
    """Each merge of parameters waits for a quorum."""

    quorum: bounds.Workers
    grace: Annotated[float, Meta(ge=0.0, le=100.0)]


class Apply(Rule, tag="apply", kw_only=True):
    """Each gradient is applied as it comes."""

    max_staleness: bounds.Unsigned | None
    staleness_scaling: Annotated[str, bounds.one_of("inverse")] | None
    delay_compensation: Annotated[float, Meta(ge=0.0, lt=1e6)]
    compensation_decay: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None


class Elastic(Rule, tag="elastic", kw_only=True):
    """Workers exchange gradients among themselves, as ``virtual_workers``. ``facts``: what all must have alike."""

    virtual_workers: bounds.Workers
    facts: Annotated[dict[bounds.Label, bounds.Label], Meta(max_length=64)]


# Of jobs with chunks.
AnyRule = Average | Merge | Apply


class Hello(Body):
    """HELLO. Without ``rule`` it only reserves a rank.

    ``key``: of a process that was welcomed to the job. ``view`` and what follows: of one that is in a view; ``release``
    is the number of the last RELEASE that it has.

    ``checkpoint``: the step of the newest checkpoint that an "elastic" worker can load; ``processes``: a word for the
    processes among which ``pid`` is its number; ``continues``: this run goes on from what another one has trained.
    """

    job: bounds.JobName
    run: bounds.Label
    nonce: bounds.Unsigned64
    host: bounds.Host
    pid: bounds.Unsigned
    rank: bounds.Rank | UnsetType | None = UNSET
    world_size: bounds.Workers | UnsetType = UNSET
    rule: AnyRule | Elastic | UnsetType = UNSET
    checkpoint: bounds.Counted | UnsetType = UNSET
    processes: bounds.Host | UnsetType = UNSET
    continues: bool | UnsetType = UNSET
    key: bounds.JobKey | UnsetType = UNSET
    view: bounds.ClaimedView | UnsetType = UNSET
    digest: bounds.Digest | UnsetType = UNSET
    release: bounds.Unsigned | UnsetType = UNSET
    completed: bounds.Counted | UnsetType = UNSET
    unreachable: OfShards | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a worker that takes part says how many there are, and that a view comes with what proves it."""
        if self.rule is not UNSET and self.world_size is UNSET:
            raise ValueError("lacks the field `world_size`")
        if self.view is not UNSET and UNSET in (self.rule, self.key, self.digest, self.completed):
            raise ValueError("has a view without `rule`, `key`, `digest` and `completed`")


class Welcome(Body):
    """WELCOME. "reserved" answers a HELLO without rule. ``warning``: for this worker's log."""

    state: Annotated[str, bounds.one_of("reserved", "initialise", "wait", "ready", "join", "joined")]
    lease_s: bounds.Seconds
    heartbeat_s: bounds.Seconds
    registration: bounds.Unsigned64 | UnsetType = UNSET
    key: bounds.JobKey | UnsetType = UNSET
    replicas: Addresses | UnsetType = UNSET
    warning: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=bounds.PRINTABLE)] | UnsetType = UNSET


class Commit(Body, tag_field="what"):
    """COMMIT: what a worker has done."""


class Registered(Commit, tag="registered"):
    """Every shard has its chunks of a new job: its epoch as the registrar met it, and how many chunks, by shard.

    ``servers``: their names, in order. ``view``: nothing was registered, because shards have this view under the key,
    or 0: chunks, or a later registration.
    """

    registration: bounds.Unsigned64
    servers: Annotated[list[bounds.ServerName], Meta(max_length=messages.MAX_SHARDS)]
    epochs: EpochsOfShards
    chunks: OfShards
    view: bounds.ClaimedView | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that each shard is there twice."""
        if len(self.epochs) != len(self.chunks):
            raise ValueError("`epochs` and `chunks` are of the same shards")


class Prepared(Commit, tag="prepared"):
    """Answers PREPARE: no step completes before the view comes. ``has_state``: of an "elastic" worker."""

    view: bounds.ViewNumber
    completed: bounds.Counted
    has_state: bool | UnsetType = UNSET


class GroupFailed(Commit, tag="failed"):
    """The members of an "elastic" view cannot exchange; ``lost``: those whose processes this worker sees are gone."""

    view: bounds.ViewNumber
    lost: Ranks


class StepTaken(Commit, tag="step"):
    """Every shard has this worker's pushes of the step; ``abstained``: they have no values."""

    step: Annotated[int, Meta(ge=1, le=messages.MAX_COUNTED)]
    abstained: bool
    completed: bounds.Counted


class Joining(Commit, tag="join"):
    """The layout is the job's; this worker wants state."""


class Donated(Commit, tag="donated"):
    """The state after ``step`` lies at the shards, for the worker that STATE_WANTED named.

    ``refused``: why it does not: there is no room for it.
    """

    rank: bounds.Rank
    incarnation: bounds.Unsigned64
    step: bounds.Counted
    epochs: EpochsOfShards
    refused: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)] | UnsetType = UNSET


class ShardLife(Commit, tag="life"):
    """A shard has another epoch than the view names, or answered "stale"; ``lost``: updates of each chunk."""

    shard: bounds.Unsigned
    epoch: bounds.Unsigned64
    chunks: bounds.Unsigned
    version: bounds.Unsigned
    view: bounds.ClaimedView
    lost: bounds.Unsigned | UnsetType = UNSET


class ViewBody(Body):
    """VIEW."""

    view: View
    digest: bounds.Digest


class ReleaseBody(Body):
    """RELEASE."""

    release: Release
    digest: bounds.Digest


class WorkerLife(Body):
    """STATE_WANTED: the joiner."""

    rank: bounds.Rank
    incarnation: bounds.Unsigned64


class Leave(Body):
    """LEAVE. ``failed``: the training broke off, so the job may go on; a launcher may start this worker again.

    ``untouched``: this worker has sent nothing that changes values.
    """

    completed: bounds.Counted
    failed: bool | UnsetType = UNSET
    untouched: bool | UnsetType = UNSET


class Resume(Body):
    """RESUME. A reader says nothing, a registrar the last five, a member these and its open pushes (key, step).

    ``place``: which shard of the job this is, and how many shards and servers there are.
    """

    open: Annotated[list[tuple[bounds.Key, bounds.Positive]], Meta(max_length=messages.MAX_CHUNKS)] | UnsetType = UNSET
    memory: bounds.Unsigned | UnsetType = UNSET
    job: bounds.JobName | UnsetType = UNSET
    rule: AnyRule | UnsetType = UNSET
    registration: bounds.Unsigned | UnsetType = UNSET
    key: bounds.JobKey | UnsetType = UNSET
    place: tuple[bounds.Unsigned, bounds.Unsigned, bounds.Unsigned] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a registrar says all of it."""
        if len({value is UNSET for value in (self.job, self.rule, self.registration, self.key, self.place)}) > 1:
            raise ValueError("has some of `job`, `rule`, `registration`, `key`, `place` (expected all or none)")


class Resumed(Body):
    """RESUMED. ``version`` is the least of the job's chunks here; ``view_epoch`` that of the view's coordinator."""

    shards: Addresses
    registration: bounds.Unsigned64
    chunks: bounds.Unsigned
    version: bounds.Unsigned
    view: bounds.Unsigned
    view_epoch: bounds.Unsigned64
    missing: Annotated[list[bounds.Key], Meta(max_length=messages.MAX_CHUNKS)] | UnsetType = UNSET
    memory: tuple[bounds.Unsigned, bounds.Unsigned, bounds.Unsigned64] | UnsetType = UNSET
    replicas: Addresses | UnsetType = UNSET


class Configure(Body):
    """CONFIGURE; ``OptimizerSpec.from_body`` checks that the values fit each other."""

    optimizer: Annotated[str, bounds.one_of("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")]
    groups: Groups
    runs: Annotated[
        list[tuple[bounds.Unsigned, bounds.Unsigned, Annotated[int, Meta(ge=-1, le=bounds.INT64_MAX)]]],
        Meta(max_length=messages.MAX_SEGMENTS),
    ]


class List(Body):
    """LIST."""

    after: Annotated[int, Meta(ge=-1, le=messages.NO_KEY - 1)]


class Chunks(Body):
    """CHUNKS."""

    chunks: list[Chunk]
    more: bool


class Push(Body):
    """PUSH. Of a table's part: ``rows``, whose gradients were divided by ``divisor``; ``lr``, which steps them.

    ``ahead``: how many steps before its own the worker asked for the rows that it computed with. ``overflow``: a scaled
    gradient of the worker is not finite, so its step is to be left out on all workers.
    """

    groups: Groups | UnsetType = UNSET
    absent: Annotated[list[bounds.SegmentIndex], Meta(max_length=messages.MAX_SEGMENTS)] | UnsetType = UNSET
    weight: Annotated[float, Meta(ge=0.0, le=messages.MAX_WEIGHT)] | UnsetType = UNSET
    held: bounds.Unsigned | UnsetType = UNSET
    rows: bounds.Unsigned | UnsetType = UNSET
    lr: bounds.Finite | UnsetType = UNSET
    divisor: bounds.Workers | UnsetType = UNSET
    ahead: Annotated[int, Meta(ge=0, le=1)] | UnsetType = UNSET
    overflow: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that rows come with what steps them."""
        if self.rows is not UNSET and UNSET in (self.lr, self.divisor):
            raise ValueError("has `rows` without `lr` and `divisor`")


class Updated(Body):
    """UPDATED and RESULT. ``row``: of a table, the first that is refused."""

    contributors: bounds.Unsigned | UnsetType = UNSET
    refused: Annotated[str, bounds.one_of(*messages.PUSH_REFUSALS)] | UnsetType = UNSET
    row: bounds.Unsigned | UnsetType = UNSET


class Pending(Body):
    """PENDING."""

    waiting_for: Ranks
    log: bool | UnsetType = UNSET


class Read(Body):
    """What PULL, VALUES and STORE have in common."""

    slot: bounds.Name | UnsetType = UNSET
    blob: bounds.Name | UnsetType = UNSET


class Pull(Read):
    """PULL. ``scan``: the place in a table's part from which on it reads rows, at ``most`` so many."""

    scan: bounds.Unsigned | UnsetType = UNSET
    most: bounds.Positive | UnsetType = UNSET


class Store(Read):
    """VALUES and STORE. Of a table's part: ``rows``, and in VALUES where the scan goes on (``next``)."""

    steps: Annotated[list[bounds.Finite], Meta(max_length=messages.MAX_SEGMENTS)] | UnsetType = UNSET
    pieces: bounds.Unsigned | UnsetType = UNSET
    rows: bounds.Unsigned | UnsetType = UNSET
    next: bounds.Unsigned | UnsetType = UNSET


class Heartbeat(Body):
    """HEARTBEAT: telemetry; ``blocked``: a push is open longer than a heartbeat; ``unreachable``: for a lease.

    ``elsewhere``: this worker has waited as long for other workers, and contributes nothing before they come.
    """

    steps: bounds.Counted | UnsetType = UNSET
    step_s: bounds.Seconds | UnsetType = UNSET
    blocked_s: bounds.Seconds | UnsetType = UNSET
    samples: bounds.Counted | UnsetType = UNSET
    loss: bounds.Finite | UnsetType | None = UNSET
    completed: bounds.Counted | UnsetType = UNSET
    blocked: bool | UnsetType = UNSET
    elsewhere: bool | UnsetType = UNSET
    unreachable: OfShards | UnsetType = UNSET


class Ok(Body):
    """OK. To a HEARTBEAT also: the workers whom this one waits for at the coordinator, and why."""

    waiting_for: Ranks | UnsetType = UNSET
    why: bounds.Printable | UnsetType = UNSET
    replicas: Addresses | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=bounds.PRINTABLE)] | UnsetType = UNSET


class Admin(Body):
    """ADMIN."""

    action: Annotated[str, bounds.one_of(*messages.ADMIN_ACTIONS)]
    job: bounds.JobName | UnsetType = UNSET
    worker: bounds.Rank | UnsetType = UNSET


class Follow(Body):
    """FOLLOW. ``index``: of the shard; ``addresses``: of all ``shards`` of the follower; the rest: its settings."""

    software: bounds.Printable
    shards: bounds.Positive
    index: bounds.Unsigned
    addresses: Addresses
    durability: Annotated[str, bounds.one_of(*messages.DURABILITY_TIERS)]
    max_memory_bytes: bounds.Unsigned64
    keep_history: bool
    plugins: Annotated[list[bounds.Printable], Meta(max_length=64)]

    def __post_init__(self) -> None:
        """Check that each shard has an address."""
        if not self.index < self.shards == len(self.addresses):
            raise ValueError("`index` is below `shards`, and each shard has an address")


class Meet(Body):
    """MEET; its view is the header's."""

    key: bounds.Printable
    value: Annotated[bytes, Meta(max_length=messages.MAX_MEET_BYTES)]


class Error(Body):
    """ERROR."""

    code: Annotated[str, Meta(min_length=1, max_length=64, pattern=bounds.PRINTABLE)]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]


TYPES: dict[MessageType, Any] = {
    **dict.fromkeys(MessageType, Body),  # every other type has an empty body
    **dict.fromkeys((MessageType.UPDATED, MessageType.RESULT), Updated),
    **dict.fromkeys((MessageType.VALUES, MessageType.STORE), Store),
    MessageType.HELLO: Hello,
    MessageType.WELCOME: Welcome,
    MessageType.HEARTBEAT: Heartbeat,
    MessageType.COMMIT: Registered | Prepared | GroupFailed | StepTaken | Joining | Donated | ShardLife,
    MessageType.LEAVE: Leave,
    MessageType.STATE_WANTED: WorkerLife,
    MessageType.VIEW: ViewBody,
    MessageType.RELEASE: ReleaseBody,
    MessageType.RESUME: Resume,
    MessageType.RESUMED: Resumed,
    MessageType.PUSH: Push,
    MessageType.PENDING: Pending,
    MessageType.REGISTER: Register,
    MessageType.CONFIGURE: Configure,
    MessageType.LIST: List,
    MessageType.CHUNKS: Chunks,
    MessageType.PULL: Pull,
    MessageType.ADMIN: Admin,
    MessageType.OK: Ok,
    MessageType.ERROR: Error,
    MessageType.FOLLOW: Follow,
    MessageType.MEET: Meet,
}


def unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    """Decode and check a body. Bodies of PUSH and UPDATED may be shared between messages: do not change them.

    Raises:
        ProtocolError: the bytes are no msgpack that we allow, or no body of this type.
    """
    return (_unpack_once if kind in _REPEATING else _unpack)(kind, raw)


def _unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    most_bytes = messages.MAX_VIEW_BYTES if kind is MessageType.VIEW else messages.MAX_BODY_BYTES
    if len(raw) > most_bytes:
        raise ProtocolError(f"{kind.name} body is too large (expected at most {most_bytes} bytes, got {len(raw)})")
    try:
        body: dict[str, Any] = msgspec.msgpack.decode(raw)  # allocates by what is there, not by what is declared
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.name} body is no valid msgpack: {error}") from error
    convert(body, TYPES[kind], f"{kind.name} body")
    return body


_unpack_once = lru_cache(maxsize=64)(_unpack)  # most messages of a step repeat a body
_REPEATING = (MessageType.PUSH, MessageType.UPDATED)


def convert(value: Any, wanted: Any, what: str, code: str = ErrorCode.BAD_MESSAGE) -> Any:
    """``value`` as this type.

    Raises:
        ProtocolError: it is none; the text begins with ``what`` and names the field, what is expected and what is got.
    """
    try:
        return msgspec.convert(value, wanted, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        text, path, got = str(error), "", value
    if located := re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", text, re.DOTALL):
        text, path = located[1], located[3]
    with suppress(LookupError, TypeError):  # a peer may name a field like a path
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path.partition("[...]")[0]):
            got = got[name or int(index)]
    if "(expected" not in text:
        text = re.sub(", got `?[^`]*`?$", "", text).replace(f"matching regex {bounds.PRINTABLE!r}", "without controls")
        words = re.search(r"`str` matching regex '\\+A\((.*)\)\\+Z'", text)
        if words is not None:
            text = text.replace(words[0], f"one of {words[1]}".replace("\\", ""))
        text = f"{text}, got {reprlib.repr(got)}"
    if text.startswith("Expected"):
        text = f"(e{text[1:]})".replace("`", "")
    text = f"{what}{path}: {text[:_MAX_COMPLAINT_CHARS]}"
    raise ProtocolError(text if text.isprintable() else ascii(text), code)


def learn(types: Iterable[Any]) -> None:
    """Msgspec learns a type when it first meets it; two threads that do so at once crash it (msgspec 0.22)."""
    for one in types:
        msgspec.msgpack.Decoder(one)


learn(TYPES.values())
