"""Message bodies: one schema per message type, built from small checks; and strict msgpack.

A check returns in words what is wrong with a value, or "". The words begin with the place inside the value, so that a
container only puts its own name in front: ``.rule`` + ``.quorum must be ...``.

The file has more than 400 lines: the table of schemas is read beside the checks that it is built from.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgpack  # type: ignore[import-untyped]

from psengine.errors import ProtocolError
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import (
    ADMIN_ACTIONS,
    DTYPES,
    DURABILITY_TIERS,
    MAX_BODY_BYTES,
    MAX_BODY_DEPTH,
    MAX_COUNTED,
    MAX_NAME_BYTES,
    MAX_SEGMENTS,
    MAX_WEIGHT,
    NO_KEY,
    NOBODY,
    PUSH_REFUSALS,
    MessageType,
)

# What is wrong with a value, or "".
Check = Callable[[Any], str]

MAX_TEXT_CHARS = 4000
_INT64_MAX = 2**63 - 1
# The first bytes of msgpack's arrays and maps.
_ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_UINT64_MAX = 2**64 - 1
_MAX_DIMENSIONS = 64
# Of bodies of at most this size the last ones that were checked are remembered: most messages repeat one.
_REMEMBERED_BYTES = 4096
_REMEMBERED_BODIES = 256


def integer(least: int = 0, most: int = _INT64_MAX) -> Check:
    """An int within bounds; a bool is none."""

    def check(value: Any) -> str:
        if type(value) is int and least <= value <= most:
            return ""
        return f" must be an integer (expected {least} to {most}, got {_shown(value)})"

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite int or float within bounds, no bool."""

    def check(value: Any) -> str:
        if type(value) in (int, float) and math.isfinite(value) and least <= value <= most:
            return ""
        bound = "" if least == -math.inf else f", at least {least}"
        bound += "" if most == math.inf else f", at most {most:g}"
        return f" must be a finite number (expected an int or float{bound}, got {_shown(value)})"

    return check


def text(most_bytes: int, *, printable: bool = False) -> Check:
    """A str that is not empty, its size counted in UTF-8 bytes; ``printable``: without control characters."""

    def check(value: Any) -> str:
        if type(value) is not str:
            return f" must be a string (got {_shown(value)})"
        if not 1 <= len(value.encode()) <= most_bytes:
            return f" has a bad length (expected 1 to {most_bytes} bytes in UTF-8, got {len(value.encode())})"
        return _unprintable(value) if printable else ""

    return check


def short_text(most_chars: int, *, least_chars: int = 1, printable: bool = True) -> Check:
    """A str, its size counted in characters."""

    def check(value: Any) -> str:
        if type(value) is not str:
            return f" must be a string (got {_shown(value)})"
        if not least_chars <= len(value) <= most_chars:
            return f" has a bad length (expected {least_chars} to {most_chars} characters, got {len(value)})"
        return _unprintable(value) if printable else ""

    return check


def _unprintable(value: str) -> str:
    return "" if value.isprintable() else f" must have printable characters only (got {_shown(value)})"


def one_of(*words: str | None) -> Check:
    """One of these words."""

    def check(value: Any) -> str:
        if (value is None or type(value) is str) and value in words:
            return ""
        return f" is unknown (expected one of {', '.join(repr(word) for word in words)}, got {_shown(value)})"

    return check


def boolean(value: Any) -> str:
    """True or False."""
    return "" if type(value) is bool else f" must be true or false (got {_shown(value)})"


def nullable(check: Check) -> Check:
    """None, or what ``check`` wants."""
    return lambda value: "" if value is None else check(value)


def listing(check: Check, most: int = MAX_BODY_BYTES) -> Check:
    """A list of at most ``most`` items that all pass ``check``."""

    def check_list(value: Any) -> str:
        if type(value) is not list:
            return f" must be a list (got {_shown(value)})"
        if len(value) > most:
            return f" is too long (expected at most {most} items, got {len(value)})"
        for index, item in enumerate(value):
            if complaint := check(item):
                return f"[{index}]{complaint}"
        return ""

    return check_list


def row(*checks: Check) -> Check:
    """A list of fixed length; each place has its own check."""

    def check_row(value: Any) -> str:
        if type(value) is not list or len(value) != len(checks):
            return f" must be a list of {len(checks)} items (got {_shown(value)})"
        for index, (check, item) in enumerate(zip(checks, value, strict=True)):
            if complaint := check(item):
                return f"[{index}]{complaint}"
        return ""

    return check_row


def record(required: dict[str, Check], optional: dict[str, Check] | None = None) -> Check:
    """A map with these fields and no others."""
    known = {**required, **(optional or {})}

    def check_record(value: Any) -> str:
        if type(value) is not dict:
            return f" must be a map (got {_shown(value)})"
        for name in required:
            if name not in value:
                return f" lacks the field {name!r}"
        for name in value:
            check = known.get(name)
            if check is None:
                return f" has the unknown field {_shown(name)} (expected {', '.join(known) or 'none'})"
            if complaint := check(value[name]):
                return f".{name}{complaint}"
        return ""

    return check_record


def also(check: Check, rule: Callable[[Any], str]) -> Check:
    """``check``, then ``rule`` over the value as a whole."""
    return lambda value: check(value) or rule(value)


def dictionary(check: Check, most: int) -> Check:
    """A map from short names to values that all pass ``check``."""

    def check_dictionary(value: Any) -> str:
        if type(value) is not dict or len(value) > most:
            return f" must be a map of at most {most} fields (got {_shown(value)})"
        for name, item in value.items():
            if not name.isidentifier() or len(name) > 64:
                return f" has a bad name (expected an identifier of at most 64 characters, got {_shown(name)})"
            if complaint := check(item):
                return f".{name}{complaint}"
        return ""

    return check_dictionary


def _hyperparameter(value: Any) -> str:
    if value is None or type(value) is bool:
        return ""
    return _two_numbers(value) if type(value) is list else _finite(value)


def _rule(value: Any) -> str:
    name = value.get("name") if type(value) is dict else None
    schema = _RULES.get(name) if type(name) is str else None
    if schema is None:
        return f" must be an update rule (expected a map whose name is one of {', '.join(_RULES)}, got {_shown(value)})"
    return schema(value)


def _dense_segment(value: list[Any]) -> str:
    _, shape, strides, start, numel = value
    if len(shape) != len(strides):
        return f" needs a stride per dimension (expected {len(shape)}, got {len(strides)})"
    total = math.prod(shape)
    if start + numel > total:
        return f" reaches past its tensor's end (expected at most {total} elements, got {start} + {numel})"
    if total and 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) != total:
        return f" must fill its memory without gaps (got shape {_shown(shape)}, strides {_shown(strides)})"
    return ""


def _sums_up(chunk: dict[str, Any]) -> str:
    total = sum(segment[4] for segment in chunk["segments"])
    if "numel" not in chunk or total == chunk["numel"]:
        return ""
    return f".segments must add up to the chunk (expected {chunk['numel']} elements, got {total})"


def _tiles(body: dict[str, Any]) -> str:
    reached = 0
    for index, (start, end, group) in enumerate(body["runs"]):
        if start != reached or end <= start:
            return f".runs[{index}] must begin where the last one ended (expected {reached}, got {start} to {end})"
        if group >= len(body["groups"]):
            return f".runs[{index}] names a group that is not there (expected below {len(body['groups'])}, got {group})"
        reached = end
    return ""


def _progress(entry: list[int]) -> str:
    if len(entry) < 4 or len(entry) % 2:
        return f" must be a key, a version, a sequence, what is under way, and pairs (got {len(entry)} numbers)"
    runs = entry[4:]
    if runs == sorted(runs) and (not runs or runs[-1] <= entry[2]):
        return ""
    return f" must have runs in order, up to its sequence (expected at most {entry[2]}, got {_shown(runs)})"


def _worker_counts(body: dict[str, Any]) -> str:
    return " lacks the field 'world_size'" if body["role"] == "worker" and "world_size" not in body else ""


def _slot_or_blob(body: dict[str, Any]) -> str:
    return " names both a slot and a blob (expected one of them)" if "slot" in body and "blob" in body else ""


_unsigned = integer(0)
_any_64_bits = integer(0, _UINT64_MAX)
_finite = number()
_rank = integer(0, NOBODY - 1)
_ranks = listing(_rank)
_two_numbers = row(_finite, _finite)
_name = text(MAX_NAME_BYTES)
_label = short_text(255, least_chars=0)
_groups = listing(dictionary(_hyperparameter, most=64), most=1024)
_sizes = listing(_unsigned, _MAX_DIMENSIONS)
_segments = listing(also(row(_name, _sizes, _sizes, _unsigned, _unsigned), _dense_segment), MAX_SEGMENTS)
_chunk_key = integer(0, NO_KEY - 1)
_kind = one_of(*(kind.value for kind in ChunkKind))
_place = {"key": _chunk_key, "dtype": integer(1, max(DTYPES)), "numel": _unsigned}
_worker_life = record({"rank": _rank, "incarnation": _any_64_bits})
_answer = record(
    {}, {"contributors": _unsigned, "refused": one_of(*PUSH_REFUSALS), "late": boolean, "place": integer(0, 255)}
)
_round = integer(1)
_probed = record({}, {"round": _round})

# "durability": the least that the job's servers are to offer.
_any_rule: dict[str, Check] = {"compress": short_text(255), "durability": one_of(*DURABILITY_TIERS)}
_RULES: dict[str, Check] = {
    "average": record({"name": one_of("average"), "quorum": nullable(integer(1, NOBODY))}, _any_rule),
    "merge": record({"name": one_of("merge"), "quorum": integer(1, NOBODY), "grace": number(0.0, 100.0)}, _any_rule),
    "apply": record(
        {
            "name": one_of("apply"),
            "max_staleness": nullable(_unsigned),
            "staleness_scaling": one_of(None, "inverse"),
            "delay_compensation": number(0.0),
        },
        {**_any_rule, "compensation_decay": number(0.0, 1.0)},
    ),
}

# Every other type has an empty body.
SCHEMAS: dict[MessageType, Check] = {
    **dict.fromkeys(MessageType, record({})),
    **dict.fromkeys((MessageType.PROBE, MessageType.MISSING, MessageType.SENT, MessageType.REPEAT), _probed),
    MessageType.HELLO: also(
        record(
            {
                "job": short_text(200),
                "role": one_of("worker", "reader"),
                "nonce": _any_64_bits,
                "rule": _rule,
                "host": _label,
                "pid": _unsigned,
                "software": _label,
            },
            {
                "rank": nullable(_rank),
                "world_size": integer(1, NOBODY),
                "fingerprint": nullable(_any_64_bits),
                "members": _ranks,
                "version": _unsigned,
                "lead": one_of("initialise", "alone"),
            },
        ),
        _worker_counts,
    ),
    MessageType.WELCOME: record(
        {
            "state": one_of("initialise", "wait", "ready", "join"),
            "shards": listing(text(MAX_NAME_BYTES, printable=True)),
            "shard_index": _unsigned,
            "lease_s": number(0.0),
            "heartbeat_s": number(0.0),
            "credit_bytes": _unsigned,
            "members": _ranks,
            "fingerprint": nullable(_any_64_bits),
            "chunks": _unsigned,
            "started": boolean,
            "durable_version": nullable(_unsigned),
            "rule": nullable(_rule),
            "software": _label,
        },
        {"local": text(MAX_NAME_BYTES, printable=True), "durability": one_of(*DURABILITY_TIERS)},
    ),
    # key, dtype and numel stand in the header; in the body they may be repeated.
    MessageType.REGISTER: also(record({"kind": _kind, "segments": _segments}, _place), _sums_up),
    MessageType.SEAL: record({"chunks": _unsigned, "fingerprint": _any_64_bits}),
    MessageType.CONFIGURE: also(
        record(
            {
                "optimizer": one_of("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"),
                "groups": _groups,
                "runs": listing(row(_unsigned, _unsigned, integer(-1))),
            }
        ),
        _tiles,
    ),
    MessageType.LIST: record({"after": integer(-1, NO_KEY - 1)}),
    MessageType.CHUNKS: record(
        {
            "chunks": listing(also(record({**_place, "kind": _kind, "segments": _segments}), _sums_up)),
            "more": boolean,
            "total": _unsigned,
        }
    ),
    MessageType.PUSH: record(
        {},
        {
            "groups": _groups,
            "absent": listing(integer(0, MAX_SEGMENTS - 1), MAX_SEGMENTS),
            "weight": number(0.0, MAX_WEIGHT),
            "held": _unsigned,
            "step": row(_unsigned, integer(1), boolean),
        },
    ),
    MessageType.UPDATED: _answer,
    MessageType.PENDING: record({}, {"waiting_for": _ranks, "round": _round, "arrived_bytes": _unsigned}),
    MessageType.PULL: also(record({}, {"slot": _name, "blob": _name}), _slot_or_blob),
    MessageType.VALUES: record({}, {"slot": _name, "steps": listing(_finite), "pieces": _unsigned}),
    MessageType.STORE: also(
        record({}, {"slot": _name, "steps": listing(_finite), "blob": _name, "pieces": _unsigned}),
        _slot_or_blob,
    ),
    MessageType.HEARTBEAT: record(
        {},
        {
            "steps": integer(0, MAX_COUNTED),
            "step_s": number(0.0, MAX_COUNTED),
            "blocked_s": number(0.0, MAX_COUNTED),
            "samples": integer(0, MAX_COUNTED),
            "loss": nullable(_finite),
            "waits": _unsigned,
        },
    ),
    MessageType.HEARTBEAT_ACK: record({"members": _ranks, "durable_version": nullable(_unsigned)}),
    MessageType.STATE_WANTED: _worker_life,
    MessageType.ADMIT: _worker_life,
    MessageType.RESULT: _answer,
    MessageType.OK: record(
        {},
        {
            "generation": _unsigned,
            "slots": listing(_name),
            "lost": row(_unsigned, _unsigned, _unsigned),
            "text": short_text(MAX_TEXT_CHARS),
        },
    ),
    MessageType.ADMIN: record({"action": one_of(*ADMIN_ACTIONS)}, {"job": short_text(200), "worker": _rank}),
    MessageType.ERROR: record({"code": short_text(64), "text": short_text(MAX_TEXT_CHARS, printable=False)}),
    MessageType.PROGRESS: record(
        {"chunks": listing(also(listing(_unsigned), _progress)), "more": boolean},
        {"durability": one_of(*DURABILITY_TIERS), "durable_version": _unsigned},
    ),
}


def unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    """Decode and check a body. Bodies of PUSH and UPDATED may be shared between messages: do not change them.

    Args:
        kind: the message's type.
        raw: the body's bytes.

    Raises:
        ProtocolError: the bytes are no msgpack that we allow, or break the type's schema.
    """
    if len(raw) > _REMEMBERED_BYTES:
        return _unpack(kind, raw)
    if kind in _REPEATING:
        return _remembered(kind, raw)
    _check(kind, raw)
    found: dict[str, Any] = msgpack.unpackb(raw)
    return found


def pack(kind: MessageType, body: dict[str, Any]) -> bytes:
    """Inverse of ``unpack``, with the same checks.

    Raises:
        ProtocolError: the body breaks the type's schema.
        TypeError, ValueError, OverflowError: msgpack has no form for a value.
    """
    raw: bytes = msgpack.packb(body)
    if len(raw) > _REMEMBERED_BYTES:
        _unpack(kind, raw)
    else:
        _check(kind, raw)
    return raw


def check_empty(kind: MessageType) -> str:
    """What is wrong with a message of this type that has no body; "" if nothing."""
    return _WITHOUT_BODY[kind]


_REPEATING = frozenset({MessageType.PUSH, MessageType.UPDATED})
_WITHOUT_BODY = {kind: schema({}) for kind, schema in SCHEMAS.items()}


def _unpack(kind: MessageType, raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_BODY_BYTES:
        complaint = f" is too large (expected at most {MAX_BODY_BYTES} bytes, got {len(raw)})"
    else:
        try:
            _check_depth(raw)
            body: dict[str, Any] = msgpack.unpackb(raw, object_pairs_hook=_plain_map)
        except (ValueError, msgpack.UnpackException) as error:
            complaint = f" is no valid msgpack: {error}"
        else:
            complaint = SCHEMAS[kind](body)
            if not complaint:
                return body
    raise ProtocolError(f"{kind.name} body{complaint}")


@lru_cache(maxsize=_REMEMBERED_BODIES)
def _check(kind: MessageType, raw: bytes) -> None:
    _unpack(kind, raw)


@lru_cache(maxsize=64)
def _remembered(kind: MessageType, raw: bytes) -> dict[str, Any]:
    return _unpack(kind, raw)


def _check_depth(raw: bytes) -> None:
    """Raise ValueError where containers are nested too deeply, before any is allocated.

    msgpack allocates an array by its declared length, bounded by the body's size, at each of up to 1,024 levels.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_BODY_BYTES)
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
        if len(open_items) > MAX_BODY_DEPTH + 1:
            raise ValueError(f"nested too deeply (expected at most {MAX_BODY_DEPTH} levels)")


def _plain_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if type(key) is not str or key in found:
            problem = "stands twice in a map" if key in found else "is no string"
            raise ValueError(f"the key {_shown(key)} {problem}")
        found[key] = value
    return found


def _shown(value: Any) -> str:
    return reprlib.repr(value)
