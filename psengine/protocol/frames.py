"""Messages to frames and back: checked, without copying payloads. No sockets, no clock.

    frames:  | header, 96 bytes | body (msgpack), if any | payload (raw bytes of one tensor), if any |

A large payload of a table's rows is cut into several frames.

A payload may lie in memory that its sender shares (``place``): then the header describes it, and no frame has it.
Such messages travel together, as a group in one frame; see ``split``.

    group:   | header | body, if any | header | body, if any | ...

``docs/protocol.md`` describes the header field by field. For any bytes, ``decode`` returns a message with
consistent fields or raises ``ProtocolError``; a declared size allocates nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol import bodies, messages
from psengine.protocol.layout import TableSpec, job_number
from psengine.protocol.messages import DTYPE_NUMBERS, DTYPES, ErrorCode, Message, MessageType

# magic, protocol version, type, flags, job, epoch, view, worker, key, incarnation, sequence, version, numel,
# payload_bytes, body_bytes, dtype, a zero byte, term, place
_HEADER = struct.Struct("<4sHBBQQQIIQQQQQIBBHQ")
HEADER_BYTES = _HEADER.size
TYPE_AT = 6  # offset of the type; magic, protocol version and type lie alike in every version
_BODY_BYTES_AT = 80
MAX_GROUP = 64  # messages

FLAG_BODY = 2
FLAG_PAYLOAD = 4
FLAG_IN_SEGMENT = 8

_TYPES = {int(kind): kind for kind in MessageType}


def encode(message: Message) -> list[Any]:
    """The frames of a message: bytes-like objects. Whoever receives them checks them.

    Args:
        message: its payload is a contiguous CPU tensor (whose dtype and numel are then taken) or a bytes-like object
            (``message.dtype`` and ``message.numel`` say of what). It is not copied, so it must not change until the
            frames are sent; the frames keep it alive. With a ``place`` only its size travels.

    Raises:
        ConfigurationError: the protocol has no number for the dtype.
    """
    dtype, numel, payload = message.dtype, message.numel, message.payload
    flags = payload_bytes = dtype_number = body_bytes = 0
    frames: list[Any] = [b""]
    if message.body:
        body = msgspec.msgpack.encode(message.body)
        frames.append(body)
        flags, body_bytes = FLAG_BODY, len(body)
    if payload is not None:
        if isinstance(payload, torch.Tensor):
            dtype, numel = payload.dtype, payload.numel()
            payload = buffer_of(payload)
        else:
            payload = memoryview(payload).cast("B")
        payload_bytes = payload.nbytes
        if message.place is not None:
            flags |= FLAG_IN_SEGMENT
        else:
            flags |= FLAG_PAYLOAD
            starts = range(0, payload_bytes, messages.MAX_PAYLOAD_BYTES) if payload_bytes else (0,)
            frames += [payload[start : start + messages.MAX_PAYLOAD_BYTES] for start in starts]
    if dtype is not None and not (dtype_number := DTYPE_NUMBERS.get(dtype, 0)):
        raise ConfigurationError(f"{dtype} has no number on the wire")
    frames[0] = _HEADER.pack(
        messages.MAGIC, messages.PROTOCOL_VERSION, message.type, flags, message.job, message.epoch, message.view,
        message.worker, message.key, message.incarnation, message.sequence, message.version, numel, payload_bytes,
        body_bytes, dtype_number, 0, message.term, message.place or 0,
    )  # fmt: skip
    return frames


def decode(frames: Sequence[Any]) -> Message:
    """The message in a list of frames (without a routing id).

    Args:
        frames: bytes-like objects. The payload stays a view of its frame. Bodies of PUSH and UPDATED may be shared
            between messages: do not change them.

    Raises:
        ProtocolError: the frames break the protocol; ``code`` says how to answer.
    """
    if not frames or len(frames[0]) != HEADER_BYTES:
        raise _not_a_header(frames)
    (
        magic, peer_version, number, flags, job, epoch, view, worker, key, incarnation, sequence, chunk_version, numel,
        payload_bytes, body_bytes, dtype_number, zero, term, place,
    ) = _HEADER.unpack(frames[0])  # fmt: skip
    kind = _TYPES.get(number)
    # An ERROR is readable in every version, so that each side learns of the other's.
    if magic != messages.MAGIC or (peer_version != messages.PROTOCOL_VERSION and kind is not MessageType.ERROR):
        raise _not_a_header(frames)
    if kind is None:
        raise ProtocolError(f"unknown message type (expected 1 to {max(_TYPES)}, got {number})")
    unused = place if not flags & FLAG_IN_SEGMENT else 0
    _check_equal(kind, "has reserved bits set", 0, flags >> 4 | flags & 1 | zero | unused)
    has_body, has_payload = flags >> 1 & 1, flags >> 2 & 1
    pieces = frames[1 + has_body :]
    # A log has the pieces of a payload as one, and none of an empty one.
    is_cut = has_payload and len(pieces) == -(-payload_bytes // messages.MAX_PAYLOAD_BYTES)
    wanted = len(pieces) if is_cut else has_payload
    _check_equal(kind, "has a wrong number of frames for its flags", 1 + has_body + wanted, len(frames))
    _check(kind, flags, key, sequence, numel, payload_bytes, dtype_number)
    raw = bytes(frames[1]) if has_body else bodies.EMPTY
    _check_equal(kind, "body does not have the header's number of bytes", body_bytes, has_body * len(raw))
    body = bodies.unpack(kind, raw)
    _check_body(kind, job, numel, payload_bytes, body)
    payload = memoryview(pieces[0] if len(pieces) == 1 else bytearray().join(pieces)) if has_payload else None
    if payload is not None:
        _check_equal(kind, "payload does not have the header's number of bytes", payload_bytes, payload.nbytes)
    return Message(
        kind, job, epoch, worker, incarnation, key, sequence, chunk_version, DTYPES.get(dtype_number), numel, body,
        payload, place if flags & FLAG_IN_SEGMENT else None, view, term,
    )  # fmt: skip


def split(frames: list[Any]) -> list[list[Any]]:
    """The frames of each message of a group; what is no group is returned as it came, for ``decode`` to refuse."""
    if len(frames) != 1 or len(frames[0]) <= HEADER_BYTES or bytes(frames[0][: len(messages.MAGIC)]) != messages.MAGIC:
        return [frames]
    data, end = bytes(frames[0]), 0
    parts: list[list[Any]] = []
    while end < len(data) and len(parts) < MAX_GROUP:
        begin, end = end, end + HEADER_BYTES
        part = [data[begin:end]]
        if body_bytes := int.from_bytes(part[0][_BODY_BYTES_AT : _BODY_BYTES_AT + 4], "little"):
            part.append(data[end : end + body_bytes])
            end += body_bytes
        parts.append(part)
    return parts if end == len(data) else [frames]


def refusal(frames: Sequence[Any], error: ProtocolError) -> Message | None:
    """The ERROR that answers frames which ``decode`` refused; None where they are an ERROR themselves.

    It has the request's job, worker, key and sequence where the header can be read.
    """
    answer = Message(MessageType.ERROR, body={"code": error.code, "text": str(error)[: bodies.MAX_TEXT_CHARS]})
    if frames and len(frames[0]) == HEADER_BYTES:
        magic, _, number, _, job, _, _, *addresses = _HEADER.unpack(frames[0])
        if magic == messages.MAGIC and number == MessageType.ERROR:
            return None
        if magic == messages.MAGIC:
            answer.job, (answer.worker, answer.key, answer.incarnation, answer.sequence) = job, addresses[:4]
    return answer


def payload_tensor(message: Message) -> torch.Tensor:
    """The payload as a 1-D tensor of the message's dtype and numel; must not be written to.

    The tensor is a view of the frame and keeps it alive; of read-only or unaligned memory it is a copy.
    """
    payload, dtype = message.payload, message.dtype
    if payload is None or dtype is None:
        raise ConfigurationError(f"{message.type.name} has no payload")
    if isinstance(payload, torch.Tensor):
        return payload.detach().view(-1)
    view = payload if type(payload) is memoryview else memoryview(payload)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)
    # torch warns of read-only memory, as bytes are; pyzmq's frames are writable.
    tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype, count=message.numel)
    if tensor.data_ptr() % dtype.itemsize:
        # libzmq packs small frames behind each other; kernels count on aligned elements, even that of clone().
        tensor = torch.frombuffer(bytearray(view), dtype=dtype, count=message.numel)
    return tensor


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy; the view keeps the tensor alive.

    Raises:
        ConfigurationError: the tensor is elsewhere, has gaps, or is a lazy conjugate or negative.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ConfigurationError(
            f"a payload must be a contiguous CPU tensor (got shape {tuple(tensor.shape)}, strides {tensor.stride()} on "
            f"{tensor.device}); use tensor.contiguous().cpu()"
        )
    array = _array_type(tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


@lru_cache(maxsize=256)
def _array_type(size_bytes: int) -> Any:
    """An array class per size: multiplying makes a new one each time, which takes longer than the rest."""
    return ctypes.c_ubyte * size_bytes


def _check(
    kind: MessageType, flags: int, key: int, sequence: int, numel: int, payload_bytes: int, dtype_number: int
) -> None:
    """Raise ProtocolError unless a header's fields agree with each other and the message's type."""
    is_chunk = kind is MessageType.REGISTER and dtype_number in DTYPES  # described also without its values
    if flags & FLAG_IN_SEGMENT and (kind not in messages.MAY_BE_IN_SEGMENT or flags & FLAG_PAYLOAD):
        raise ProtocolError(f"{kind.name} cannot have its payload in shared memory, or twice (got flags {flags})")
    if flags & (FLAG_PAYLOAD | FLAG_IN_SEGMENT):
        if kind not in messages.PAYLOAD_REQUIRED and kind not in messages.PAYLOAD_OPTIONAL:
            raise ProtocolError(f"{kind.name} has a payload (expected none)")
        if dtype_number not in DTYPES:
            raise ProtocolError(f"{kind.name} has an unknown dtype (expected 1 to {max(DTYPES)}, got {dtype_number})")
        wanted_bytes = numel * DTYPES[dtype_number].itemsize
        _check_equal(kind, "payload does not match its numel and dtype, in bytes", wanted_bytes, payload_bytes)
    elif kind in messages.PAYLOAD_REQUIRED:
        raise ProtocolError(f"{kind.name} lacks its payload")
    elif payload_bytes or ((numel or dtype_number) and not is_chunk):
        raise ProtocolError(f"{kind.name} describes a payload and has none (got {payload_bytes} bytes, numel {numel})")
    if kind in messages.KEYED and key == messages.NO_KEY:
        raise ProtocolError(f"{kind.name} names no chunk (expected a key below {messages.NO_KEY})")
    if kind in messages.EXCHANGES and sequence == 0:
        raise ProtocolError(f"{kind.name} has no step (expected a sequence of 1 or more, got 0)")


def _check_body(kind: MessageType, job: int, numel: int, payload_bytes: int, body: dict[str, Any]) -> None:
    """Raise ProtocolError where header and body say the same thing differently, or the payload is too large for it."""
    has_rows = kind in messages.HAVE_ROWS and "rows" in body and "blob" not in body
    most_bytes = messages.MAX_ROWS_BYTES if has_rows else messages.MAX_PAYLOAD_BYTES
    if payload_bytes > most_bytes:
        raise ProtocolError(f"{kind.name} payload is too large (expected at most {most_bytes}, got {payload_bytes})")
    if kind is MessageType.REGISTER:
        table, segments = body.get("table"), body["segments"]
        total = sum(one[4] for one in segments) if table is None else msgspec.convert(table, TableSpec).dim
        _check_equal(kind, "has another numel than the sum of the segments, or than a row", total, numel)
    elif kind in (MessageType.HELLO, MessageType.RESUME) and "job" in body:
        _check_equal(kind, "header has the number of another job than its body", job_number(body["job"]), job)


def _check_equal(kind: MessageType, what: str, expected: int, got: int) -> None:
    if expected != got:
        raise ProtocolError(f"{kind.name} {what} (expected {expected}, got {got})")


def _not_a_header(frames: Sequence[Any]) -> ProtocolError:
    header = memoryview(frames[0]) if frames else memoryview(b"")
    magic, version = bytes(header[:4]), int.from_bytes(header[4:TYPE_AT], "little")
    if len(header) > TYPE_AT and magic != messages.MAGIC:
        return ProtocolError(f"this is no psengine message (expected {messages.MAGIC!r} first, got {magic!r})")
    if len(header) > TYPE_AT and version != messages.PROTOCOL_VERSION:
        return ProtocolError(
            f"both sides must speak one protocol (expected version {messages.PROTOCOL_VERSION}, got version {version});"
            " install the same version of psengine on both",
            ErrorCode.VERSION,
        )
    return ProtocolError(f"the header has a wrong size (expected {HEADER_BYTES} bytes, got {len(header)})")
