"""The messages of the wire protocol: types, header, error codes, limits. No sockets, no clock.

A message is a header of fixed layout, for some types a body (a small msgpack map), for some a payload (the raw bytes of
one tensor). ``docs/protocol.md`` describes every field; ``frames.py`` turns messages into frames and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, IntEnum, auto
from typing import Any

import torch

PROTOCOL_VERSION = 6
MAGIC = b"PSEN"

# A VIEW names every worker, and a RESUME every open push: thousands.
MAX_BODY_BYTES = 256 * 1024
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

    CLIENT = auto()  # a client may send it
    SERVER = auto()  # a server may send it, at any time: an answer may arrive late
    CONTROL = auto()  # only between a worker and its job's coordinator, on a connection of its own
    KEYED = auto()  # names a chunk
    EXCHANGE = auto()  # of a chunk in a step, so it is keyed too
    PAYLOAD = auto()
    MAY_HAVE_PAYLOAD = auto()  # a PUSH without payload abstains; VALUES without payload: the slot is empty
    IN_SEGMENT = auto()  # the payload may lie in shared memory


class MessageType(IntEnum):
    """What a message is: its number on the wire, and its traits; ``shard/shard.py`` says who may send which.

    A request carries an id in ``sequence``, and its answer the same id; types with ``Trait.EXCHANGE`` carry the step.
    """

    traits: Trait

    def __new__(cls, number: int, traits: Trait) -> MessageType:
        """Keep the number as the value."""
        kind = int.__new__(cls, number)
        kind._value_, kind.traits = number, traits
        return kind

    # worker and coordinator
    HELLO = 1, Trait.CLIENT | Trait.CONTROL  # let me in; or only: reserve a rank for me
    WELCOME = 2, Trait.SERVER | Trait.CONTROL  # answers HELLO: who you are, and what to do next
    HEARTBEAT = 3, Trait.CLIENT | Trait.CONTROL  # I live; answered by OK
    COMMIT = 4, Trait.CLIENT | Trait.CONTROL  # something is done at every shard; answered by OK
    LEAVE = 5, Trait.CLIENT | Trait.CONTROL  # may I leave? answered by OK
    PREPARE = 6, Trait.SERVER | Trait.CONTROL  # a view will come: complete no step; answered by COMMIT
    STATE_WANTED = 7, Trait.SERVER | Trait.CONTROL  # to one worker: deposit your state for a joiner
    # from the coordinator, and forwarded by each worker to every shard
    VIEW = 8, Trait.SERVER | Trait.CLIENT  # who takes part, from which step on, and which shards
    RELEASE = 9, Trait.SERVER | Trait.CLIENT  # a decision about a step, the same at all shards
    # worker and shard
    RESUME = 10, Trait.CLIENT  # the first message of a connection: these pushes are open
    RESUMED = 11, Trait.SERVER  # answers RESUME: send these pushes again; what I hold
    PUSH = 12, Trait.CLIENT | Trait.EXCHANGE | Trait.MAY_HAVE_PAYLOAD | Trait.IN_SEGMENT  # a gradient, or values
    # answers PUSH: the chunk's weights, or the average
    UPDATED = 13, Trait.SERVER | Trait.EXCHANGE | Trait.PAYLOAD | Trait.IN_SEGMENT
    WAITS = 14, Trait.CLIENT | Trait.EXCHANGE  # my push has no answer yet: whom do you wait for?
    PENDING = 15, Trait.SERVER | Trait.EXCHANGE  # answers WAITS
    RESULT = 16, Trait.CLIENT | Trait.EXCHANGE | Trait.PAYLOAD  # an average for a shard that restarted
    REGISTER = 17, Trait.CLIENT | Trait.KEYED | Trait.MAY_HAVE_PAYLOAD  # a chunk, with its first values; answered by OK
    CONFIGURE = 18, Trait.CLIENT | Trait.KEYED  # the server-side optimizer of a chunk; answered by OK
    STORE = 19, Trait.CLIENT | Trait.KEYED | Trait.PAYLOAD  # overwrite what PULL reads; answered by OK
    # anybody and shard
    LIST = 20, Trait.CLIENT  # which chunks are there?
    CHUNKS = 21, Trait.SERVER  # answers LIST, in pages
    PULL = 22, Trait.CLIENT | Trait.KEYED  # a chunk's values, a slot of its optimizer, or a piece of a blob
    VALUES = 23, Trait.SERVER | Trait.KEYED | Trait.MAY_HAVE_PAYLOAD  # answers PULL
    STATUS = 24, Trait.CLIENT
    STATUS_REPORT = 25, Trait.SERVER | Trait.PAYLOAD  # answers STATUS: JSON, as payload
    ADMIN = 26, Trait.CLIENT  # an operator's order to the whole server; answered by OK
    OK = 27, Trait.SERVER  # answers a request
    ERROR = 28, Trait.SERVER  # refuses a message: body has the code and the words; the same number in every version
    ECHO = 29, Trait.CLIENT | Trait.PAYLOAD  # send this back
    # answers ECHO, with the same payload, after all that came before it on this connection was taken
    ECHOED = 30, Trait.SERVER | Trait.PAYLOAD


def types_with(traits: Trait) -> frozenset[MessageType]:
    """The types that have one of these traits."""
    return frozenset(kind for kind in MessageType if kind.traits & traits)


CONTROL = types_with(Trait.CONTROL)
SENT_BY_CLIENTS = types_with(Trait.CLIENT)
SENT_BY_SERVERS = types_with(Trait.SERVER)
TO_COORDINATOR = CONTROL & SENT_BY_CLIENTS


class ErrorCode:
    """Values of an ERROR body's ``code``."""

    BAD_MESSAGE = "bad_message"  # malformed, or not legal now
    VERSION = "version"  # another protocol version
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_KEY = "unknown_key"
    LAYOUT_MISMATCH = "layout_mismatch"  # another model than the job's
    RULE_MISMATCH = "rule_mismatch"  # another update rule, or optimizer, than the job's
    DUPLICATE_RANK = "duplicate_rank"
    FENCED = "fenced"  # not in the view: a newer incarnation of this worker exists, or its lease ran out
    NOT_MEMBER = "not_member"  # the coordinator does not know this worker (it restarted): HELLO again
    STALE = "stale"  # another life's epoch, or an older view than the header's; begin again
    ENDED = "ended"  # the job has ended
    NOT_READY = "not_ready"  # the job has no values yet; for STORE: a joiner reads what would be overwritten
    BAD_VALUE = "bad_value"  # a number out of its bounds
    MEMORY = "memory"  # the server's --max-memory-bytes
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
        view: number of the view that the sender holds; in PREPARE the number to come; 0 without one.
        worker: rank of the worker it comes from or goes to; NOBODY for readers and before WELCOME.
        incarnation: which life of that worker, given by the coordinator in WELCOME; 0 before.
        key: number of the chunk (or of the piece of a blob); NO_KEY without one.
        sequence: request id, or the step, 1 first.
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
    view: int = 0
