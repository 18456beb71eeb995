"""Fuzz ``decode``: whatever the frames, it returns a message that can be sent again unchanged, or raises ProtocolError.

    python tests/fuzz/fuzz_frames.py --minutes 5           # seeded random mutations of the vectors
    python tests/fuzz/fuzz_frames.py --minutes 5 --seed 7  # others

A failure prints the frames in hex, to be added to tests/protocol/protocol_vectors.json or a test.
"""

import argparse
import json
import random
import struct
import sys
import time
import traceback
import warnings
from dataclasses import fields, replace
from pathlib import Path

from psengine.errors import ProtocolError
from psengine.protocol.frames import HEADER_BYTES, decode, encode, payload_tensor, refusal
from psengine.protocol.messages import Message

VECTORS = json.loads((Path(__file__).parents[1] / "protocol" / "protocol_vectors.json").read_text())
SEEDS = [[bytes.fromhex(frame) for frame in vector["frames"]] for vector in VECTORS]
# (offset, struct format) of the header's fields after the magic
FIELDS = [(4, "<H"), (6, "B"), (7, "B"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (32, "<I"), (36, "<I"), (40, "<Q")]
FIELDS += [(48, "<Q"), (56, "<Q"), (64, "<Q"), (72, "<Q"), (80, "<I"), (84, "B"), (85, "B"), (86, "<H"), (88, "<Q")]
INTERESTING = [0, 1, 2, 3, 4, 7, 8, 96, 127, 128, 255, 256, 65535, 65536, 2**24, 2**24 + 1, 2**32 - 1, 2**40, 2**63]
INTERESTING += [2**64 - 1]
MAX_SEGMENT_BYTES = 1 << 16
IN_HEADER = tuple(one.name for one in fields(Message) if one.name not in ("body", "payload"))
# msgpack's first bytes that begin something larger, or something we do not allow
TOKENS = [0x80, 0x81, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC3, 0xC4, 0xC7, 0xC9, 0xCA, 0xCB, 0xCF, 0xD3]
TOKENS += [0xD4, 0xD6, 0xD8, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF]


def check(frames):
    """The property. True if the frames were a message."""
    try:
        message = decode(frames)
    except ProtocolError as error:
        answer = refusal(frames, error)
        if answer is not None:
            decode(encode(answer))
        return False
    if message.place is not None:
        # Its payload is in memory that its sender shares, and not in a frame; some of these sizes fit no memory.
        assert message.payload is None
        size_bytes = message.numel * message.dtype.itemsize
        if size_bytes > MAX_SEGMENT_BYTES:
            return True
        again = decode(encode(replace(message, payload=bytes(size_bytes))))
    else:
        again = decode(encode(message))
    for name in IN_HEADER:
        assert getattr(again, name) == getattr(message, name), name
    assert again.body == message.body
    assert (again.payload is None) == (message.payload is None)
    if message.payload is not None:
        assert bytes(again.payload) == bytes(message.payload)
        tensor = payload_tensor(message)
        assert (tensor.numel(), tensor.dtype, tensor.dim()) == (message.numel, message.dtype, 1)
    return True


def fit(frames):
    """Header sizes and frame flags that agree with the frames, so that mutations get past the first checks."""
    if not frames or len(frames[0]) != HEADER_BYTES:
        return frames
    header = bytearray(frames[0])
    flags = header[7]
    if len(frames) == 1 + (flags >> 1 & 1) + (flags >> 2 & 1):
        if flags & 2:
            struct.pack_into("<I", header, 80, len(frames[1]))
        if flags & 4:
            struct.pack_into("<Q", header, 72, len(frames[-1]))
    return [bytes(header), *frames[1:]]


def mutate(rng, frames):
    frames = [bytearray(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not frames:
            break
        frame = frames[rng.randrange(len(frames))]
        place = rng.randrange(len(frame)) if frame else 0
        match rng.randrange(10):
            case 0 if frame:
                frame[place] ^= 1 << rng.randrange(8)
            case 1 if frame:
                frame[place] = rng.choice(TOKENS)
            case 2:
                del frame[place:]
            case 3:
                frame[place:place] = rng.randbytes(rng.randrange(1, 20))
            case 4:
                del frame[place : place + rng.randrange(1, 9)]
            case 5:
                frame[place:place] = bytes([rng.choice(TOKENS)]) * rng.choice((1, 5, 1000))
            case 6 | 7 if len(frames[0]) == HEADER_BYTES:
                offset, form = rng.choice(FIELDS)
                most = 2 ** (8 * struct.calcsize(form)) - 1
                struct.pack_into(form, frames[0], offset, rng.choice(INTERESTING) & most)
            case 8:
                frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.choice(rng.choice(SEEDS))))
            case 9:
                del frames[rng.randrange(len(frames))]
    frames = [bytes(frame) for frame in frames]
    return fit(frames) if rng.random() < 0.7 else frames


def run_seeded(minutes, seed):
    rng = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    tried = accepted = 0
    while time.monotonic() < deadline:
        frames = mutate(rng, rng.choice(SEEDS)) if rng.random() < 0.97 else [rng.randbytes(rng.randrange(200))]
        try:
            accepted += check(frames)
        except BaseException:
            traceback.print_exc()
            print(f"seed {seed}, input {tried}:", json.dumps([frame.hex() for frame in frames]))
            return 1
        tried += 1
    print(f"seed {seed}: {tried} inputs, {accepted} of them messages, nothing but ProtocolError came out")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    return run_seeded(arguments.minutes, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
