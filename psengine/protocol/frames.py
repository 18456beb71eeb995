"""Messages to frames and back: checked, without copying payloads. No sockets, no clock.

    frames:  | header, 96 bytes | body (msgpack), if any | payload (raw bytes of one tensor), if any |

A payload may lie in memory that both sides share (``in_segment``): then the header describes it, and no frame has it.
Such messages travel in groups, see ``groups.py``.

``docs/protocol.md`` describes the header field by field. For any bytes, ``decode`` returns a message with
consistent fields or raises ``ProtocolError``; a declared size allocates nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import xxhash

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol import bodies
from psengine.protocol.layout import job_number
from psengine.protocol.messages import (
    DTYPE_NUMBERS,
    DTYPES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    NO_KEY,
    PROTOCOL_VERSION,
    ErrorCode,
    Message,
    MessageType,
    Trait,
    types_with,
)

# magic, protocol version, type, flags, job, epoch, view, worker, key, incarnation, sequence, version, numel,
# payload_bytes, body_bytes, dtype, three zero bytes, checksum
_HEADER = struct.Struct("<4sHBBQQQIIQQQQQIB3sQ")
HEADER_BYTES = _HEADER.size
TYPE_AT = 6  # offset of the type
_PREFIX = struct.Struct("<4sHB")  # the same in every version

FLAG_CHECKSUM = 1
FLAG_BODY = 2
FLAG_PAYLOAD = 4
FLAG_IN_SEGMENT = 8
_FLAGS = FLAG_CHECKSUM | FLAG_BODY | FLAG_PAYLOAD | FLAG_IN_SEGMENT
_ZEROS = b"\0\0\0"

_PAYLOAD_REQUIRED = types_with(Trait.PAYLOAD)
_PAYLOAD_OPTIONAL = types_with(Trait.MAY_HAVE_PAYLOAD)
_MAY_BE_IN_SEGMENT = types_with(Trait.IN_SEGMENT)
_EXCHANGES = types_with(Trait.EXCHANGE)
_KEYED = types_with(Trait.KEYED | Trait.EXCHANGE)
_TYPES = {int(kind): kind for kind in MessageType}
_NAMED_IN_BODY = frozenset({MessageType.HELLO, MessageType.RESUME, MessageType.REGISTER})
# dtype number -> (dtype, bytes per element)
_WIRE_DTYPES = {number: (dtype, dtype.itemsize) for number, dtype in DTYPES.items()}


def encode(message: Message, *, checksum: bool = False) -> list[Any]:
    """The frames of a message: bytes-like objects.

    Args:
        message: its payload is a contiguous CPU tensor (whose dtype and numel are then taken) or a bytes-like object
            (``message.dtype`` and ``message.numel`` say of what). It is not copied, so it must not change until the
            frames are sent; the frames keep it alive. With ``in_segment`` only its size travels.
        checksum: add the payload's xxh3-64.

    Raises:
        ConfigurationError: the message is not one that the protocol allows: a mistake on our side.
    """
    kind, dtype, numel, payload = message.type, message.dtype, message.numel, message.payload
    flags = payload_bytes = dtype_number = body_bytes = digest = 0
    frames: list[Any] = [b""]
    try:
        if message.body:
            body = bodies.pack(kind, message.body)
            frames.append(body)
            flags, body_bytes = FLAG_BODY, len(body)
        if payload is not None:
            if isinstance(payload, torch.Tensor):
                dtype, numel = payload.dtype, payload.numel()
                payload = buffer_of(payload)
            else:
                payload = memoryview(payload).cast("B")
            payload_bytes = payload.nbytes
            if message.in_segment:
                flags |= FLAG_IN_SEGMENT
            else:
                frames.append(payload)
                flags |= FLAG_PAYLOAD
            if checksum and not message.in_segment:
                flags |= FLAG_CHECKSUM
                digest = xxhash.xxh3_64_intdigest(payload)
        if dtype is not None:
            if dtype not in DTYPE_NUMBERS:
                raise ConfigurationError(f"{kind.name}: {dtype} has no number on the wire")
            dtype_number = DTYPE_NUMBERS[dtype]
        _check(kind, flags, message.key, message.sequence, numel, payload_bytes, dtype_number)
        if kind in _NAMED_IN_BODY:
            _check_body_agrees(replace(message, numel=numel))
        frames[0] = _HEADER.pack(
            MAGIC, PROTOCOL_VERSION, kind, flags, message.job, message.epoch, message.view, message.worker, message.key,
            message.incarnation, message.sequence, message.version, numel, payload_bytes, body_bytes, dtype_number,
            _ZEROS, digest,
        )  # fmt: skip
    except ConfigurationError:
        raise
    except (ProtocolError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise ConfigurationError(f"cannot encode {kind.name}: {error}") from error
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
        payload_bytes, body_bytes, dtype_number, zeros, digest,
    ) = _HEADER.unpack(frames[0])  # fmt: skip
    kind = _TYPES.get(number)
    # An ERROR is readable in every version, so that each side learns of the other's.
    if magic != MAGIC or (peer_version != PROTOCOL_VERSION and kind is not MessageType.ERROR):
        raise _not_a_header(frames)
    if kind is None:
        raise ProtocolError(f"unknown message type (expected 1 to {max(_TYPES)}, got {number})")
    if flags & ~_FLAGS or zeros != _ZEROS:
        raise ProtocolError(
            f"{kind.name} has reserved bits set (expected flags up to {_FLAGS} and zeros, got {flags} and {zeros!r})"
        )
    has_body, has_payload, in_segment = flags >> 1 & 1, flags >> 2 & 1, flags >> 3
    if len(frames) != 1 + has_body + has_payload:
        raise ProtocolError(
            f"{kind.name} has a wrong number of frames (expected {1 + has_body + has_payload} by its flags, "
            f"got {len(frames)})"
        )
    _check(kind, flags, key, sequence, numel, payload_bytes, dtype_number)

    body: dict[str, Any] = {}
    if has_body:
        raw = frames[1]
        if len(raw) != body_bytes:
            raise ProtocolError(
                f"{kind.name} body has a wrong size (expected {body_bytes} bytes by the header, got {len(raw)})"
            )
        body = bodies.unpack(kind, bytes(raw))
    elif body_bytes:
        raise ProtocolError(f"{kind.name} declares {body_bytes} bytes of body and has none")

    payload = dtype = None
    if has_payload:
        payload = memoryview(frames[-1])
        if payload.nbytes != payload_bytes:
            raise ProtocolError(
                f"{kind.name} payload has a wrong size (expected {payload_bytes} bytes by the header, "
                f"got {payload.nbytes})"
            )
        dtype = DTYPES[dtype_number]
        if flags & FLAG_CHECKSUM and (actual := xxhash.xxh3_64_intdigest(payload)) != digest:
            raise ProtocolError(
                f"{kind.name} payload of key {key} was corrupted (expected checksum {digest:016x}, got {actual:016x})"
            )
    elif in_segment or dtype_number:
        dtype = DTYPES[dtype_number]
    if digest and not flags & FLAG_CHECKSUM:
        raise ProtocolError(f"{kind.name} has a checksum without its flag (expected 0, got {digest:016x})")
    message = Message(
        kind, job, epoch, worker, incarnation, key, sequence, chunk_version, dtype, numel, body, payload,
        in_segment == 1, view,
    )  # fmt: skip
    if kind in _NAMED_IN_BODY:
        _check_body_agrees(message)
    return message


def refusal(frames: Sequence[Any], error: ProtocolError) -> Message | None:
    """The ERROR that answers frames which ``decode`` refused; None where they are an ERROR themselves.

    It has the request's job, worker, key and sequence where the header can be read.
    """
    answer = Message(MessageType.ERROR, body={"code": error.code, "text": str(error)[: bodies.MAX_TEXT_CHARS]})
    if frames and len(frames[0]) == HEADER_BYTES:
        (
            magic, _, number, _, job, _, _, worker, key, incarnation, sequence, *_,
        ) = _HEADER.unpack(frames[0])  # fmt: skip
        if magic == MAGIC and number == MessageType.ERROR:
            return None
        if magic == MAGIC:
            answer.job, answer.worker, answer.incarnation = job, worker, incarnation
            answer.key, answer.sequence = key, sequence
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
    # libzmq packs small frames behind each other; kernels may count on aligned elements.
    return tensor.clone() if tensor.data_ptr() % min(dtype.itemsize, 8) else tensor


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
    return _bytes_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _check(
    kind: MessageType, flags: int, key: int, sequence: int, numel: int, payload_bytes: int, dtype_number: int
) -> None:
    """Raise ProtocolError unless a header's fields agree with each other and the message's type."""
    if flags & FLAG_IN_SEGMENT and (kind not in _MAY_BE_IN_SEGMENT or flags & (FLAG_PAYLOAD | FLAG_CHECKSUM)):
        raise ProtocolError(
            f"{kind.name} cannot have its payload in shared memory (expected PUSH or UPDATED, without a payload"
            f" frame and without a checksum, got flags {flags})"
        )
    if flags & (FLAG_PAYLOAD | FLAG_IN_SEGMENT):
        if kind not in _PAYLOAD_REQUIRED and kind not in _PAYLOAD_OPTIONAL:
            raise ProtocolError(f"{kind.name} has a payload (expected none)")
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"{kind.name} payload is too large (expected at most {MAX_PAYLOAD_BYTES} bytes, got {payload_bytes})"
            )
        if dtype_number not in _WIRE_DTYPES:
            raise ProtocolError(f"{kind.name} has an unknown dtype (expected 1 to {max(DTYPES)}, got {dtype_number})")
        dtype, itemsize = _WIRE_DTYPES[dtype_number]
        if numel * itemsize != payload_bytes:
            raise ProtocolError(
                f"{kind.name} payload does not match its numel (expected {numel} elements of {dtype} in "
                f"{numel * itemsize} bytes, got {payload_bytes})"
            )
        if kind is MessageType.STATUS_REPORT and dtype is not torch.uint8:
            raise ProtocolError(f"STATUS_REPORT must carry bytes (expected torch.uint8, got {dtype})")
    else:
        if kind in _PAYLOAD_REQUIRED:
            raise ProtocolError(f"{kind.name} lacks its payload")
        describes = numel or dtype_number
        if kind is MessageType.REGISTER and dtype_number in _WIRE_DTYPES:
            describes = False  # a chunk without its values
        if describes or payload_bytes or flags & FLAG_CHECKSUM:
            raise ProtocolError(
                f"{kind.name} describes a payload and has none (expected zeros, got numel {numel}, {payload_bytes} "
                f"bytes, dtype {dtype_number}, flags {flags})"
            )
    if not flags & FLAG_BODY:
        bodies.check_empty(kind)
    if kind in _KEYED and key == NO_KEY:
        raise ProtocolError(f"{kind.name} names no chunk (expected a key below {NO_KEY})")
    if kind in _EXCHANGES and sequence == 0:
        raise ProtocolError(f"{kind.name} has no step (expected a sequence of 1 or more, got 0)")


def _check_body_agrees(message: Message) -> None:
    """Raise ProtocolError where header and body say the same thing differently."""
    body = message.body
    if message.type is not MessageType.REGISTER:
        name, in_header = "job", message.job
        in_body = job_number(body["job"]) if "job" in body else in_header
    else:
        name, in_body, in_header = "sum of the segments", sum(one[4] for one in body["segments"]), message.numel
    if in_body != in_header:
        raise ProtocolError(
            f"{message.type.name} contradicts itself: the body's {name} is not the header's (expected {in_header}, got"
            f" {in_body})"
        )


def _not_a_header(frames: Sequence[Any]) -> ProtocolError:
    if not frames:
        return ProtocolError("a message without frames (expected a header)")
    first = bytes(memoryview(frames[0])[: _PREFIX.size])
    if len(first) == _PREFIX.size:
        magic, peer_version, _ = _PREFIX.unpack(first)
        if magic != MAGIC:
            return ProtocolError(f"this is no psengine message (expected it to begin with {MAGIC!r}, got {magic!r})")
        if peer_version != PROTOCOL_VERSION:
            return ProtocolError(
                f"both sides must speak one protocol version (expected version {PROTOCOL_VERSION}, got version"
                f" {peer_version}); install the same version of psengine on both",
                ErrorCode.VERSION,
            )
    return ProtocolError(f"the header has a wrong size (expected {HEADER_BYTES} bytes, got {len(frames[0])})")


@lru_cache(maxsize=256)
def _array_type(size_bytes: int) -> Any:
    """An array class per size: multiplying makes a new one each time, which takes longer than the rest."""

    class Bytes(ctypes.c_ubyte * size_bytes):  # type: ignore[misc]
        owner: Any

    return Bytes


def _bytes_at(address: int, size_bytes: int, owner: Any) -> memoryview:
    if not size_bytes:
        return memoryview(b"")
    array = _array_type(size_bytes).from_address(address)
    array.owner = owner
    return memoryview(array).cast("B")
