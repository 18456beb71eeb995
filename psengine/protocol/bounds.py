"""Numbers and texts with bounds, as msgspec checks them in bodies and views."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from psengine.protocol import messages

INT64_MAX = 2**63 - 1
LARGEST_FLOAT = 1.7976931348623157e308
# Without control characters, and those that are not seen or turn the direction of the text.
PRINTABLE = r"\A[^\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]*\Z"
KEY_BYTES = 32
DIGEST_BYTES = 16
MAX_VIEW_NUMBER = 2**30


def one_of(*words: str) -> Meta:
    """A text that is one of these words."""
    return Meta(pattern=rf"\A({'|'.join(map(re.escape, words))})\Z")


# msgpack's integers have at most 64 bits.
Unsigned64 = Annotated[int, Meta(ge=0)]
Unsigned = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Finite = Annotated[float, Meta(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
# Numbers that are counted on from still fit where they are sent and kept.
ViewNumber = Annotated[int, Meta(ge=0, le=MAX_VIEW_NUMBER)]
# What a worker says of a view leaves room for later ones.
ClaimedView = Annotated[int, Meta(ge=0, le=MAX_VIEW_NUMBER - 2**20)]
Counted = Annotated[int, Meta(ge=0, le=messages.MAX_COUNTED)]
Seconds = Annotated[float, Meta(ge=0.0, le=messages.MAX_COUNTED)]
Rank = Annotated[int, Meta(ge=0, le=messages.MAX_WORKERS - 1)]
Workers = Annotated[int, Meta(ge=1, le=messages.MAX_WORKERS)]
SegmentIndex = Annotated[int, Meta(ge=0, le=messages.MAX_SEGMENTS - 1)]
Key = Annotated[int, Meta(ge=0, le=messages.NO_KEY - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=messages.MAX_NAME_CHARS)]
Printable = Annotated[str, Meta(min_length=1, max_length=messages.MAX_NAME_CHARS, pattern=PRINTABLE)]
JobName = Annotated[str, Meta(min_length=1, max_length=200, pattern=PRINTABLE)]
Label = Annotated[str, Meta(max_length=255, pattern=PRINTABLE)]
# What is repeated for each worker or shard is ASCII, and short.
Host = Annotated[str, Meta(max_length=64, pattern=r"\A[ -~]*\Z")]
UserId = Annotated[str, Meta(max_length=40, pattern=r"\A[!-~]*\Z")]
Address = Annotated[str, Meta(min_length=1, max_length=280, pattern=r"\A[!-~]*\Z")]
ServerName = Annotated[str, Meta(min_length=1, max_length=561, pattern=r"\A[!-~]*\Z")]  # with its follower
JobKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
