"""The messages of the wire protocol: types, header, error codes, limits. No sockets, no clock.

A message is a header of fixed layout, for some types a body (a small msgpack map), for some a payload (the raw bytes of
one tensor). ``docs/protocol.md`` describes every field; ``frames.py`` turns messages into frames and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, IntEnum, auto
from typing import Any

import torch

PROTOCOL_VERSION = 5
MAGIC = b"PSEN"

MAX_BODY_BYTES = 64 * 1024
MAX_BODY_DEPTH = 6
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
MAX_NAME_CHARS = 512
MAX_SEGMENTS = 512
MAX_WEIGHT = 1e12
# A worker's counters stay exact as floats.
MAX_COUNTED = 2**53
# Why a server did not use a push that it answered.
PUSH_REFUSALS = ("non_finite", "stale", "abstained")

# What ADMIN asks for.
ADMIN_ACTIONS = ("snapshot", "evict", "forget", "drain", "shutdown")
# What a server keeps through its end, from the least: nothing, snapshots, every acknowledged update.
DURABILITY_TIERS = ("memory", "snapshot", "log")

# In the header's worker and key fields.
NOBODY = 0xFFFFFFFF
NO_KEY = 0xFFFFFFFF


class Trait(Flag):
    """What is true of every message of a type."""

    SERVER = auto()  # a server may send it, at any time: an answer may arrive late
    CONTROL = auto()  # has a connection of its own, so that it never waits behind payloads
    KEYED = auto()  # names a chunk
    EXCHANGE = auto()  # numbers a chunk's exchanges, so it is keyed too
    PAYLOAD = auto()
    MAY_HAVE_PAYLOAD = auto()  # a PUSH without payload abstains; VALUES without payload: the slot is empty
    IN_SEGMENT = auto()  # the payload may lie in shared memory


class MessageType(IntEnum):
    """What a message is: its number on the wire, and its traits; ``core/permissions.py`` says who may send which.

    A request carries an id in ``sequence``, and its answer the same id; only types with ``Trait.EXCHANGE`` number a
    chunk's exchanges.
    """

    traits: Trait

    def __new__(cls, number: int, traits: Trait) -> MessageType:
        """Keep the number as the value."""
        kind = int.__new__(cls, number)
        kind._value_, kind.traits = number, traits
        return kind

    HELLO = 1, Trait.CONTROL  # let me in
    WELCOME = 2, Trait.SERVER | Trait.CONTROL  # answers HELLO: who you are, what to do next, where the shards are
    REGISTER = 3, Trait.KEYED | Trait.PAYLOAD  # a chunk, with its initial values; answered by OK
    SEAL = 4, Trait(0)  # every chunk of this shard is registered; answered by OK
    CONFIGURE = 5, Trait.KEYED  # the server-side optimizer of a chunk; answered by OK
    LIST = 6, Trait(0)  # which chunks are there?
    CHUNKS = 7, Trait.SERVER  # answers LIST, in pages
    PUSH = 8, Trait.EXCHANGE | Trait.MAY_HAVE_PAYLOAD | Trait.IN_SEGMENT  # a chunk's gradient (or a buffer's values)
    # answers PUSH: the chunk's weights, or the average
    UPDATED = 9, Trait.SERVER | Trait.EXCHANGE | Trait.PAYLOAD | Trait.IN_SEGMENT
    PROBE = 10, Trait.EXCHANGE  # what became of my push?
    PENDING = 11, Trait.SERVER | Trait.EXCHANGE  # answers PROBE: it is here, the answer will follow
    MISSING = 12, Trait.SERVER | Trait.EXCHANGE  # answers PROBE: it never came, send it again
    PULL = 13, Trait.KEYED  # a chunk's values, a slot of its optimizer, or a piece of a blob
    VALUES = 14, Trait.SERVER | Trait.KEYED | Trait.MAY_HAVE_PAYLOAD  # answers PULL
    STORE = 15, Trait.KEYED | Trait.PAYLOAD  # overwrite what PULL reads; answered by OK
    HEARTBEAT = 16, Trait.CONTROL  # I live
    HEARTBEAT_ACK = 17, Trait.SERVER | Trait.CONTROL  # so do I; and these workers
    # a worker that comes late to an averaging job asks for state; answered by OK once it was admitted
    JOIN = 18, Trait(0)
    STATE_WANTED = 19, Trait.SERVER | Trait.CONTROL  # to one live worker: deposit your state for a joiner
    ADMIT = 20, Trait(0)  # that worker: the state is deposited, the joiner takes part from here on; answered by OK
    RESULT_WANTED = 21, Trait.SERVER | Trait.EXCHANGE  # a restarted server asks for an average it sent before
    RESULT = 22, Trait.EXCHANGE | Trait.PAYLOAD  # that average
    STATUS = 23, Trait(0)
    STATUS_REPORT = 24, Trait.SERVER | Trait.PAYLOAD  # answers STATUS: JSON, as payload
    SNAPSHOT = 25, Trait(0)  # write a snapshot now; answered by OK once it is durable
    BYE = 26, Trait(0)  # I leave; answered by OK
    OK = 27, Trait.SERVER  # answers a request
    ERROR = 28, Trait.SERVER  # refuses a message: body has the code and the words
    ECHO = 29, Trait.PAYLOAD  # send this back
    ECHOED = 30, Trait.SERVER | Trait.PAYLOAD  # answers ECHO: the same payload
    # answers PROBE: the push was answered, and the answer was sent before this
    SENT = 31, Trait.SERVER | Trait.EXCHANGE
    REPEAT = 32, Trait.EXCHANGE  # send the answer to my push again, it was lost
    PROGRESS = 33, Trait(0)  # how far I am, by chunk, for a server that restarted; answered by OK
    PROGRESS_WANTED = 34, Trait.SERVER  # to one worker: send PROGRESS
    LEAVE = 35, Trait(0)  # may I leave? OK once every live worker has the averages that I have
    ADMIN = 36, Trait(0)  # an operator's order to the whole server; answered by OK with a text


def types_with(traits: Trait) -> frozenset[MessageType]:
    """The types that have one of these traits."""
    return frozenset(kind for kind in MessageType if kind.traits & traits)


CONTROL = types_with(Trait.CONTROL)
SENT_BY_SERVERS = types_with(Trait.SERVER)


class ErrorCode:
    """Values of an ERROR body's ``code``."""

    BAD_MESSAGE = "bad_message"  # malformed, or not legal now
    VERSION = "version"  # another protocol version
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_KEY = "unknown_key"
    LAYOUT_MISMATCH = "layout_mismatch"  # another model than the job's
    RULE_MISMATCH = "rule_mismatch"  # another update rule, or optimizer, than the job's
    DUPLICATE_RANK = "duplicate_rank"
    FENCED = "fenced"  # a newer incarnation of this worker exists, or its lease ran out
    NOT_MEMBER = "not_member"  # the server does not know this worker (it restarted): HELLO again
    NOT_READY = "not_ready"  # the job has no values yet; for STORE: a joiner reads what would be overwritten
    BAD_VALUE = "bad_value"  # a number out of its bounds
    MEMORY = "memory"  # the server's --max-memory-bytes
    CREDIT = "credit"  # more bytes in flight than granted
    SEGMENT = "segment"  # the memory that a payload lies in is not shared with this shard (any more)
    STATE_LOST = "state_lost"  # the server lost the job's weights
    SHUTTING_DOWN = "shutting_down"
    SNAPSHOT_FAILED = "snapshot_failed"
    NOT_ALLOWED = "not_allowed"  # ADMIN from somebody who is no operator of this server
    INTERNAL = "internal"  # the server failed; its log has the traceback


# Number on the wire -> dtype. Never renumber; add at the end.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.float64,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.int64,
    6: torch.int32,
    7: torch.int16,
    8: torch.int8,
    9: torch.uint8,
    10: torch.bool,
    11: torch.complex64,
    12: torch.complex128,
}
DTYPE_NUMBERS: dict[torch.dtype, int] = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(slots=True)
class Message:
    """One message, decoded; what a type does not use keeps its default.

    Attributes:
        type: what it is.
        job: xxh3-64 of the job's name (``job_number``).
        epoch: which life of the server process sent this, or is addressed; 0 where the client knows none yet.
        worker: rank of the worker it comes from or goes to; NOBODY for readers and before WELCOME.
        incarnation: which life of that worker, given by the server in WELCOME; 0 before.
        key: number of the chunk (or of the piece of a blob); NO_KEY without one.
        sequence: request id, or the number of a chunk's exchange by this worker, 1 first.
        version: how many updates the chunk has seen: at its sender in PUSH, at the server in answers.
        dtype: of the payload's elements; None without payload.
        numel: elements in the payload.
        body: see ``bodies.py``; {} without one.
        payload: contiguous bytes of ``numel`` elements; None without payload.
        in_segment: the payload lies in memory that the worker shares with the server (``parameter_server/segments/``):
            dtype and numel travel, and its bytes do not. A decoded message has no payload until a transport finds it.
            A received gradient is the worker's memory then, and changes once the worker has its answer.
    """

    type: MessageType
    job: int = 0
    epoch: int = 0
    worker: int = NOBODY
    incarnation: int = 0
    key: int = NO_KEY
    sequence: int = 0
    version: int = 0
    dtype: torch.dtype | None = None
    numel: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    payload: Any = None
    in_segment: bool = False
