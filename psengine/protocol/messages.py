"""The messages of the wire protocol: types, header, error codes, limits. No sockets, no clock.

A message is a header of fixed layout, for some types a body (a small msgpack map), for some a payload (the raw bytes of
one tensor). ``docs/protocol.md`` describes every field; ``frames.py`` turns messages into frames and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
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


class MessageType(IntEnum):
    """What a message is; a server's ``core/permissions.py`` says who may send which.

    C: client to server, S: server to client. A request carries an id in ``sequence``, and its answer the same id; only
    PUSH and what concerns a push (UPDATED, PROBE, PENDING, MISSING, SENT, REPEAT, RESULT_WANTED, RESULT) number a
    chunk's exchanges.
    """

    HELLO = 1  # C  let me in
    WELCOME = 2  # S  answers HELLO: who you are, what to do next, where the shards are
    REGISTER = 3  # C  a chunk, with its initial values; answered by OK
    SEAL = 4  # C  every chunk of this shard is registered; answered by OK
    CONFIGURE = 5  # C  the server-side optimizer of a chunk; answered by OK
    LIST = 6  # C  which chunks are there?
    CHUNKS = 7  # S  answers LIST, in pages
    PUSH = 8  # C  a chunk's gradient (or a buffer's values)
    UPDATED = 9  # S  answers PUSH: the chunk's weights, or the average
    PROBE = 10  # C  what became of my push?
    PENDING = 11  # S  answers PROBE: it is here, the answer will follow
    MISSING = 12  # S  answers PROBE: it never came, send it again
    PULL = 13  # C  a chunk's values, a slot of its optimizer, or a piece of a blob
    VALUES = 14  # S  answers PULL
    STORE = 15  # C  overwrite what PULL reads; answered by OK
    HEARTBEAT = 16  # C  I live
    HEARTBEAT_ACK = 17  # S  so do I; and these workers
    JOIN = 18  # C  a worker that comes late to an averaging job asks for state; answered by OK once it was admitted
    STATE_WANTED = 19  # S  to one live worker: deposit your state for a joiner
    ADMIT = 20  # C  that worker: the state is deposited, the joiner takes part from here on; answered by OK
    RESULT_WANTED = 21  # S  a restarted server asks for an average it sent before
    RESULT = 22  # C  that average
    STATUS = 23  # C
    STATUS_REPORT = 24  # S  answers STATUS: JSON, as payload
    SNAPSHOT = 25  # C  write a snapshot now; answered by OK once it is durable
    BYE = 26  # C  I leave; answered by OK
    OK = 27  # S  answers a request
    ERROR = 28  # S  refuses a message: body has the code and the words
    ECHO = 29  # C  send this back
    ECHOED = 30  # S  answers ECHO: the same payload
    SENT = 31  # S  answers PROBE: the push was answered, and the answer was sent before this
    REPEAT = 32  # C  send the answer to my push again, it was lost
    PROGRESS = 33  # C  how far I am, by chunk, for a server that restarted; answered by OK
    PROGRESS_WANTED = 34  # S  to one worker: send PROGRESS
    LEAVE = 35  # C  may I leave? OK once every live worker has the averages that I have
    ADMIN = 36  # C  an operator's order to the whole server; answered by OK with a text


# These have a connection of their own, so that they never wait behind payloads.
CONTROL = frozenset(
    {
        MessageType.HELLO,
        MessageType.WELCOME,
        MessageType.HEARTBEAT,
        MessageType.HEARTBEAT_ACK,
        MessageType.STATE_WANTED,
    }
)

# The types that a server may send, at any time: an answer may arrive late.
SENT_BY_SERVERS = frozenset(
    {
        MessageType.WELCOME,
        MessageType.CHUNKS,
        MessageType.UPDATED,
        MessageType.PENDING,
        MessageType.MISSING,
        MessageType.SENT,
        MessageType.VALUES,
        MessageType.HEARTBEAT_ACK,
        MessageType.STATE_WANTED,
        MessageType.RESULT_WANTED,
        MessageType.PROGRESS_WANTED,
        MessageType.STATUS_REPORT,
        MessageType.OK,
        MessageType.ERROR,
        MessageType.ECHOED,
    }
)


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
