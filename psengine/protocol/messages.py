"""The messages of the wire protocol: types, header, error codes, limits. No sockets, no clock.

A message is a header of fixed layout, for some types a body (a small msgpack map), for some a payload (the raw bytes of
one tensor). ``docs/protocol.md`` describes every field; ``frames.py`` turns messages into frames and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

PROTOCOL_VERSION = 8
MAGIC = b"PSEN"

# ``tests/protocol/test_sizes.py`` computes that the largest of every message that names workers, shards or chunks fits.
MAX_BODY_BYTES = 256 * 1024
MAX_VIEW_BYTES = 1024 * 1024  # a VIEW's body
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
# Of rows of a table, in a PUSH or STORE: they travel as several frames.
MAX_ROWS_BYTES = 1024 * 1024 * 1024
MAX_NAME_CHARS = 512
MAX_SEGMENTS = 512
# Of a job; ranks lie below this. It bounds what a coordinator counts through, and remembers of workers that are gone.
MAX_WORKERS = 4096
MAX_SHARDS = 256  # of a job, or a server
MAX_CHUNKS = 16_384  # of a job at one shard
MAX_WEIGHT = 1e12
# A value of MEET. gloo's has 154 bytes, and 8 for each rank (torch 2.13).
MAX_MEET_BYTES = 40 * 1024
HELLO_AGAIN_S = 0.5  # whose HELLO is refused for now says it again after so long
# A worker's counters stay exact as floats.
MAX_COUNTED = 2**53
# Why a server did not use a push that it answered.
PUSH_REFUSALS = ("non_finite", "stale", "abstained", "overflow")

# What ADMIN asks for.
ADMIN_ACTIONS = ("snapshot", "evict", "forget", "drain", "shutdown")
# What a server keeps: nothing, snapshots, all acknowledged updates on its disk, at its follower, or both.
# Behind each tier those that it offers to jobs, which are as much or less.
DURABILITY_TIERS = {
    "memory": ("memory",),
    "snapshot": ("memory", "snapshot"),
    "log": ("memory", "snapshot", "log"),
    "replica": ("memory", "replica"),
    "log+replica": ("memory", "snapshot", "log", "replica", "log+replica"),
}

# In the header's worker and key fields.
NOBODY = 0xFFFFFFFF
NO_KEY = 0xFFFFFFFF


class MessageType(IntEnum):
    """What a message is: its number on the wire; ``server/shard/shard.py`` says who may send which to a shard.

    A request carries an id in ``sequence``, and its answer the same id; an exchange's messages carry the step.
    """

    # worker and coordinator
    HELLO = 1  # let me in; or only: reserve a rank for me
    WELCOME = 2  # answers HELLO: who you are, and what to do next
    HEARTBEAT = 3  # I live; answered by OK
    COMMIT = 4  # something is done at every shard; answered by OK
    LEAVE = 5  # may I leave? answered by OK
    PREPARE = 6  # from the coordinator: a view will come: complete no step; answered by COMMIT
    STATE_WANTED = 7  # from the coordinator to one worker: deposit your state for a joiner
    # from the coordinator, and forwarded by each worker to every shard
    VIEW = 8  # who takes part, from which step on, and which shards
    RELEASE = 9  # a decision about a step, the same at all shards
    # worker and shard
    RESUME = 10  # the first message of a connection: these pushes are open
    RESUMED = 11  # answers RESUME: send these pushes again; what I hold
    PUSH = 12  # a gradient, or values; without payload it abstains
    UPDATED = 13  # answers PUSH: the chunk's weights, or the average; nothing of a table
    WAITS = 14  # my push has no answer yet: whom do you wait for?
    PENDING = 15  # answers WAITS
    RESULT = 16  # an average for a shard that restarted
    REGISTER = 17  # a chunk, with its first values where servers keep them; answered by OK
    CONFIGURE = 18  # the server-side optimizer of a chunk; answered by OK
    STORE = 19  # overwrite what PULL reads; answered by OK
    # anybody and shard
    LIST = 20  # which chunks are there?
    CHUNKS = 21  # answers LIST, in pages
    PULL = 22  # a chunk's values, a slot of its optimizer, or a piece of a blob; of a table rows, by their ids
    VALUES = 23  # answers PULL; without payload the slot is empty
    STATUS = 24
    STATUS_REPORT = 25  # answers STATUS: JSON, as payload
    ADMIN = 26  # an operator's order to the whole server; answered by OK
    OK = 27  # answers a request
    ERROR = 28  # refuses a message: body has the code and the words; the same number in every version
    ECHO = 29  # send this back
    ECHOED = 30  # answers ECHO, with the same payload; to a worker once all before it on this connection is durable
    # a server's follower and each of its shards
    FOLLOW = 31  # send me a copy, and what changes it; answered by RECORDs
    RECORD = 32  # a record of the log, in frames behind the header's; without any: I live
    KEPT = 33  # the records below this number are here; I live
    # worker and coordinator, and from there all members of the view
    MEET = 34  # this is known to those who form a group; answered by OK


_T = MessageType
TO_COORDINATOR = frozenset({_T.HELLO, _T.HEARTBEAT, _T.COMMIT, _T.LEAVE, _T.MEET})
# Of a chunk in a step; and of a chunk.
EXCHANGES = frozenset({_T.PUSH, _T.UPDATED, _T.WAITS, _T.PENDING, _T.RESULT})
KEYED = EXCHANGES | {_T.REGISTER, _T.CONFIGURE, _T.STORE, _T.PULL, _T.VALUES}
PAYLOAD_REQUIRED = frozenset({_T.STORE, _T.STATUS_REPORT, _T.ECHO, _T.ECHOED})
PAYLOAD_OPTIONAL = frozenset({_T.PUSH, _T.UPDATED, _T.RESULT, _T.REGISTER, _T.PULL, _T.VALUES})
HAVE_ROWS = frozenset({_T.PUSH, _T.STORE})
MAY_BE_IN_SEGMENT = frozenset({_T.PUSH, _T.UPDATED})


class ErrorCode:
    """Values of an ERROR body's ``code``."""

    BAD_MESSAGE = "bad_message"  # malformed, or not legal now
    VERSION = "version"  # another protocol version
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_KEY = "unknown_key"
    OTHER_SERVERS = "other_servers"  # than those that have the job's values, or in another order
    RULE_MISMATCH = "rule_mismatch"  # another update rule, or optimizer, than the job's
    DUPLICATE_RANK = "duplicate_rank"
    FENCED = "fenced"  # not in the view: a newer incarnation of this worker exists, or its lease ran out
    NOT_MEMBER = "not_member"  # the coordinator does not know this worker (it restarted): HELLO again
    STALE = "stale"  # another life's epoch, or an older view than the header's; begin again
    ENDED = "ended"  # the job has ended
    OTHER_RUN = "other_run"  # another run has trained the job's values, and HELLO does not say that this one goes on
    NOT_READY = "not_ready"  # no values yet; HELLO: the rank is held; STORE: a joiner reads what it would overwrite
    BAD_VALUE = "bad_value"  # a number out of its bounds
    MEMORY = "memory"  # the server's --max-memory-bytes
    STATE_LOST = "state_lost"  # the server lost the job's weights
    SHUTTING_DOWN = "shutting_down"
    VIEW_WANTED = "view_wanted"  # the coordinator lacks the view that HELLO names: say VIEW, its RELEASEs, and HELLO
    SNAPSHOT_FAILED = "snapshot_failed"
    NOT_ALLOWED = "not_allowed"  # ADMIN from somebody who is no operator of this server, FOLLOW from a stranger
    NOT_LEADING = "not_leading"  # this server follows another, or waits for its elector: ask at its other address
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
        place: where the payload begins in memory that its sender shares (``parameter_server/segment.py``): dtype and
            numel travel, and its bytes do not. A decoded message has no payload until a transport finds it. A received
            gradient is the worker's memory then, and changes once the worker has its answer. None: the payload travels.
        term: how often the lead of this server has passed on, at its sender; 0 without followers, and of clients.
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
    place: int | None = None
    view: int = 0
    term: int = 0
