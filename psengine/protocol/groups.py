"""Messages without a payload frame that travel together: a group is one frame.

frame:   | header | body, if any | header | body, if any | ...
"""

from __future__ import annotations

import struct
from typing import Any

from psengine.protocol.frames import HEADER_BYTES
from psengine.protocol.messages import MAGIC

_BODY_BYTES = struct.Struct("<I")
_BODY_BYTES_AT = 80
MAX_GROUP = 64


def split(frames: list[Any]) -> list[list[Any]]:
    """The frames of each message of a group; what is no group is returned as it came, for ``decode`` to refuse."""
    if len(frames) != 1 or len(frames[0]) <= HEADER_BYTES or bytes(frames[0][: len(MAGIC)]) != MAGIC:
        return [frames]
    data, end = bytes(frames[0]), 0
    parts: list[list[Any]] = []
    while end < len(data) and len(parts) < MAX_GROUP:
        begin, end = end, end + HEADER_BYTES
        if end > len(data):
            return [frames]
        part = [data[begin:end]]
        (body_bytes,) = _BODY_BYTES.unpack_from(data, begin + _BODY_BYTES_AT)
        if body_bytes:
            part.append(data[end : end + body_bytes])
            end += body_bytes
        parts.append(part)
    return parts if end == len(data) else [frames]
