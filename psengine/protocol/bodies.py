"""Message bodies: one type per message, checked by msgspec; and strict msgpack.

A body stays the map that it was; the types only check it. Bounds of a float need care: msgspec 0.22 mixes them up in a
union with a tuple, so ``hyperparameters.check_groups`` checks those of hyperparameters.
"""

from __future__ import annotations

import re
import reprlib
from functools import cache, lru_cache
from typing import Annotated, Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from psengine.errors import ProtocolError
from psengine.protocol import messages
from psengine.protocol.layout import INT64_MAX, ChunkKind, Name, Segment, Unsigned
from psengine.protocol.messages import ErrorCode, MessageType

_Struct = TypeVar("_Struct", bound=Struct)

MAX_TEXT_CHARS = 4000
# The first bytes of msgpack's arrays and maps.
_ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_MAX_COMPLAINT_CHARS = 300
_LARGEST_FLOAT = 1.7976931348623157e308
# Without control characters, and those that are not seen or turn the direction of the text.
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]*\Z"


def _one_of(*words: str) -> Meta:
    return Meta(pattern=rf"\A({'|'.join(words)})\Z")


# msgpack's integers have at most 64 bits.
Unsigned64 = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Finite = Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
Seconds = Annotated[float, Meta(ge=0.0, le=_LARGEST_FLOAT)]
Rank = Annotated[int, Meta(ge=0, le=messages.NOBODY - 1)]
Workers = Annotated[int, Meta(ge=1, le=messages.NOBODY)]
SegmentIndex = Annotated[int, Meta(ge=0, le=messages.MAX_SEGMENTS - 1)]
Key = Annotated[int, Meta(ge=0, le=messages.NO_KEY - 1)]
Printable = Annotated[str, Meta(min_length=1, max_length=messages.MAX_NAME_CHARS, pattern=_PRINTABLE)]
JobName = Annotated[str, Meta(min_length=1, max_length=200, pattern=_PRINTABLE)]
Label = Annotated[str, Meta(max_length=255, pattern=_PRINTABLE)]
Kind = Annotated[str, _one_of(*(kind.value for kind in ChunkKind))]
Tier = Annotated[str, _one_of(*messages.DURABILITY_TIERS)]
# An optimizer's hyperparameters; ``hyperparameters.py`` has their names and bounds.
Group = Annotated[
    dict[Annotated[str, Meta(pattern=r"\A[^\W\d]\w*\Z", max_length=64)], bool | float | tuple[float, float] | None],
    Meta(max_length=64),
]
Groups = Annotated[list[Group], Meta(max_length=1024)]


class Body(Struct, forbid_unknown_fields=True):
    """A body with these fields and no others. Raises ValueError where the fields do not fit each other."""


class Register(Body, kw_only=True):
    """REGISTER's body; key, dtype and numel stand in its header."""

    kind: Kind
    segments: Annotated[list[Segment], Meta(max_length=messages.MAX_SEGMENTS)]


class Chunk(Register, kw_only=True):
    """An entry of CHUNKS."""

    key: Key
    dtype: Annotated[int, Meta(ge=1, le=max(messages.DTYPES))]
    numel: Unsigned

    def __post_init__(self) -> None:
        """Check the number of elements."""
        total = sum(segment.numel for segment in self.segments)
        if total != self.numel:
            raise ValueError(f"segments must add up to the chunk (expected {self.numel} elements, got {total})")


class Rule(Body, tag_field="name"):
    """An update rule. ``durability``: the least that the job's servers are to offer."""

    compress: Annotated[str, Meta(min_length=1, max_length=255, pattern=_PRINTABLE)] | UnsetType = UNSET
    durability: Tier | UnsetType = UNSET


class Average(Rule, tag="average", kw_only=True):
    """Each average of gradients waits for all live workers, or for a quorum."""

    quorum: Workers | None


class Merge(Rule, tag="merge", kw_only=True):
    """Each merge of parameters waits for a quorum."""

    quorum: Workers
    grace: Annotated[float, Meta(ge=0.0, le=100.0)]


class Apply(Rule, tag="apply", kw_only=True):
    """Each gradient is applied as it comes."""

    max_staleness: Unsigned | None
    staleness_scaling: Annotated[str, _one_of("inverse")] | None
    delay_compensation: Seconds
    compensation_decay: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET


class Hello(Body):
    """HELLO."""

    job: JobName
    role: Annotated[str, _one_of("worker", "reader")]
    nonce: Unsigned64
    rule: Average | Merge | Apply
    host: Label
    pid: Unsigned
    software: Label
    rank: Rank | UnsetType | None = UNSET
    world_size: Workers | UnsetType = UNSET
    fingerprint: Unsigned64 | UnsetType | None = UNSET
    members: list[Rank] | UnsetType = UNSET
    version: Unsigned | UnsetType = UNSET
    lead: Annotated[str, _one_of("initialise", "alone")] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a worker says how many there are."""
        if self.role == "worker" and self.world_size is UNSET:
            raise ValueError("lacks the field `world_size`")


class Welcome(Body):
    """WELCOME."""

    state: Annotated[str, _one_of("initialise", "wait", "ready", "join")]
    shards: list[Printable]
    shard_index: Unsigned
    lease_s: Seconds
    heartbeat_s: Seconds
    credit_bytes: Unsigned
    members: list[Rank]
    fingerprint: Unsigned64 | None
    chunks: Unsigned
    started: bool
    durable_version: Unsigned | None
    rule: Average | Merge | Apply | None
    software: Label
    local: Printable | UnsetType = UNSET
    durability: Tier | UnsetType = UNSET


class Seal(Body):
    """SEAL."""

    chunks: Unsigned
    fingerprint: Unsigned64


class Configure(Body):
    """CONFIGURE; ``OptimizerSpec.from_body`` checks that the values fit each other."""

    optimizer: Annotated[str, _one_of("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")]
    groups: Groups
    runs: list[tuple[Unsigned, Unsigned, Annotated[int, Meta(ge=-1, le=INT64_MAX)]]]


class List(Body):
    """LIST."""

    after: Annotated[int, Meta(ge=-1, le=messages.NO_KEY - 1)]


class Chunks(Body):
    """CHUNKS."""

    chunks: list[Chunk]
    more: bool
    total: Unsigned


class Push(Body):
    """PUSH."""

    groups: Groups | UnsetType = UNSET
    absent: Annotated[list[SegmentIndex], Meta(max_length=messages.MAX_SEGMENTS)] | UnsetType = UNSET
    weight: Annotated[float, Meta(ge=0.0, le=messages.MAX_WEIGHT)] | UnsetType = UNSET
    held: Unsigned | UnsetType = UNSET


class Updated(Body):
    """UPDATED and RESULT."""

    contributors: Unsigned | UnsetType = UNSET
    refused: Annotated[str, _one_of(*messages.PUSH_REFUSALS)] | UnsetType = UNSET
    late: bool | UnsetType = UNSET
    place: Annotated[int, Meta(ge=0, le=255)] | UnsetType = UNSET


class Probed(Body):
    """PROBE, MISSING, SENT and REPEAT."""

    round: Positive | UnsetType = UNSET


class Pending(Probed):
    """PENDING."""

    waiting_for: list[Rank] | UnsetType = UNSET
    arrived_bytes: Unsigned | UnsetType = UNSET


class Pull(Body):
    """PULL."""

    slot: Name | UnsetType = UNSET
    blob: Name | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that one thing is named."""
        if self.slot is not UNSET and self.blob is not UNSET:
            raise ValueError("names both a slot and a blob (expected one of them)")


class Store(Pull):
    """VALUES and STORE."""

    steps: list[Finite] | UnsetType = UNSET
    pieces: Unsigned | UnsetType = UNSET


class Heartbeat(Body):
    """HEARTBEAT."""

    steps: Annotated[int, Meta(ge=0, le=messages.MAX_COUNTED)] | UnsetType = UNSET
    step_s: Annotated[float, Meta(ge=0.0, le=messages.MAX_COUNTED)] | UnsetType = UNSET
    blocked_s: Annotated[float, Meta(ge=0.0, le=messages.MAX_COUNTED)] | UnsetType = UNSET
    samples: Annotated[int, Meta(ge=0, le=messages.MAX_COUNTED)] | UnsetType = UNSET
    loss: Finite | UnsetType | None = UNSET
    waits: Unsigned | UnsetType = UNSET


class HeartbeatAck(Body):
    """HEARTBEAT_ACK."""

    members: list[Rank]
    durable_version: Unsigned | None


class WorkerLife(Body):
    """STATE_WANTED and ADMIT."""

    rank: Rank
    incarnation: Unsigned64


class Ok(Body):
    """OK."""

    generation: Unsigned | UnsetType = UNSET
    slots: list[Name] | UnsetType = UNSET
    lost: tuple[Unsigned, Unsigned] | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=_PRINTABLE)] | UnsetType = UNSET


class Admin(Body):
    """ADMIN."""

    action: Annotated[str, _one_of(*messages.ADMIN_ACTIONS)]
    job: JobName | UnsetType = UNSET
    worker: Rank | UnsetType = UNSET


class Error(Body):
    """ERROR."""

    code: Annotated[str, Meta(min_length=1, max_length=64, pattern=_PRINTABLE)]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]


class Progress(Body):
    """PROGRESS. A chunk: key, version, sequence."""

    chunks: list[tuple[Unsigned, Unsigned, Unsigned]]
    more: bool
    durability: Tier | UnsetType = UNSET
    durable_version: Unsigned | UnsetType = UNSET


TYPES: dict[MessageType, type[Body]] = {
    **dict.fromkeys(MessageType, Body),  # every other type has an empty body
    **dict.fromkeys((MessageType.PROBE, MessageType.MISSING, MessageType.SENT, MessageType.REPEAT), Probed),
    **dict.fromkeys((MessageType.UPDATED, MessageType.RESULT), Updated),
    **dict.fromkeys((MessageType.VALUES, MessageType.STORE), Store),
    **dict.fromkeys((MessageType.STATE_WANTED, MessageType.ADMIT), WorkerLife),
    MessageType.HELLO: Hello,
    MessageType.WELCOME: Welcome,
    MessageType.REGISTER: Register,
    MessageType.SEAL: Seal,
    MessageType.CONFIGURE: Configure,
    MessageType.LIST: List,
    MessageType.CHUNKS: Chunks,
    MessageType.PUSH: Push,
    MessageType.PENDING: Pending,
    MessageType.PULL: Pull,
    MessageType.HEARTBEAT: Heartbeat,
    MessageType.HEARTBEAT_ACK: HeartbeatAck,
    MessageType.OK: Ok,
    MessageType.ADMIN: Admin,
    MessageType.ERROR: Error,
    MessageType.PROGRESS: Progress,
}


def unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    """Decode and check a body. Bodies of PUSH and UPDATED may be shared between messages: do not change them.

    Raises:
        ProtocolError: the bytes are no msgpack that we allow, or no body of this type.
    """
    return _remembered(kind, raw) if kind in _REPEATING else _unpack(kind, raw)


def pack(kind: MessageType, body: dict[str, Any]) -> bytes:
    """Inverse of ``unpack``, with the same checks.

    Raises:
        ProtocolError: the body is none of this type.
        TypeError, ValueError, OverflowError: msgpack has no form for a value.
    """
    raw: bytes = msgpack.packb(body)
    unpack(kind, raw)
    return raw


@cache
def check_empty(kind: MessageType) -> None:
    """Raise ProtocolError where a message of this type needs a body."""
    convert({}, TYPES[kind], f"{kind.name} body")


def convert(value: Any, wanted: type[_Struct], what: str, code: str = ErrorCode.BAD_MESSAGE) -> _Struct:
    """``value`` as this type.

    Raises:
        ProtocolError: it is none; the text begins with ``what`` and names the field, what is expected and what is got.
    """
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        text, path = str(error), ""
    if located := re.fullmatch(r"(.*) - at (`key` in )?`\$(.*)`", text, re.DOTALL):
        text, path = located[1], located[3]
    if "unknown field" in text and not path:
        text += f" (expected {', '.join(wanted.__struct_fields__) or 'none'})"
    elif "(expected" not in text:
        text = re.sub(", got `?[^`]*`?$", "", text).replace(f"matching regex {_PRINTABLE!r}", "without controls")
        text = re.sub(r"matching regex '\\+A(\(.*\))\\+Z'", r"\1", text)  # a list of words
        text = re.sub("^Invalid value .*", "Expected `str` (average|merge|apply)", text)
        text += f", got {reprlib.repr(_value_at(path, value))}"
    text = f"{what}{path}: {text[:_MAX_COMPLAINT_CHARS]}"
    raise ProtocolError(text if text.isprintable() else ascii(text), code)


def _value_at(path: str, body: Any) -> Any:
    """The value at ``.rule.quorum`` or ``.members[1]``; what holds it, where a part is "[...]"."""
    value = body
    for name, index, _ in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", path):
        if not name and not index:
            break
        value = value[name or int(index)]
    return value


_REPEATING = frozenset({MessageType.PUSH, MessageType.UPDATED})


def _unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    if len(raw) > messages.MAX_BODY_BYTES:
        raise ProtocolError(
            f"{kind.name} body is too large (expected at most {messages.MAX_BODY_BYTES} bytes, got {len(raw)})"
        )
    try:
        _check_depth(raw)
        body: dict[str, Any] = msgpack.unpackb(raw, object_pairs_hook=_plain_map)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{kind.name} body is no valid msgpack: {error}") from error
    convert(body, TYPES[kind], f"{kind.name} body")
    return body


@lru_cache(maxsize=64)  # most messages repeat a body
def _remembered(kind: MessageType, raw: bytes) -> dict[str, Any]:
    return _unpack(kind, raw)


def _check_depth(raw: bytes) -> None:
    """Raise ValueError where containers are nested too deeply, before any is allocated.

    msgpack allocates an array by its declared length, bounded by the body's size, at each of up to 1,024 levels.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=messages.MAX_BODY_BYTES)
    unpacker.feed(raw)
    open_items = [1]  # per level: the values that are still to come
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        open_items[-1] -= 1
        at = unpacker.tell()
        first = raw[at] if at < len(raw) else None
        if first in _ARRAYS:
            open_items.append(unpacker.read_array_header())
        elif first in _MAPS:
            open_items.append(2 * unpacker.read_map_header())
        else:
            unpacker.skip()
        if len(open_items) > messages.MAX_BODY_DEPTH + 1:
            raise ValueError(f"nested too deeply (expected at most {messages.MAX_BODY_DEPTH} levels)")


def _plain_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if type(key) is not str or key in found:
            problem = "stands twice in a map" if key in found else "is no string"
            raise ValueError(f"the key {reprlib.repr(key)} {problem}")
        found[key] = value
    return found
