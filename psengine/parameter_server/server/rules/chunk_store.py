"""A job's chunks at one shard: registered, configured, listed, read, overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import RuleContext
from psengine.parameter_server.server.rules.payloads import received_values
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.snapshots.files import ChunkState
from psengine.protocol import bodies
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import DTYPE_NUMBERS, ErrorCode, Message, MessageType

PAGE_BYTES = 48 * 1024
# Chunk-sized slots of an optimizer that may be attached.
MAX_SLOTS = 3

Values = tuple[int, torch.Tensor | None, dict[str, Any]]


class ChunkStore:
    """The chunks of one job at one shard, by key.

    Args:
        take_memory: told of bytes about to be taken, and for what; raises ProtocolError where there are not enough.
    """

    def __init__(self, rule: JobRule, context: RuleContext, take_memory: Callable[[int, str], None]) -> None:
        self._rule = rule
        self._context = context
        self.take_memory = take_memory
        self.rules: dict[int, ChunkRule] = {}
        self.blobs: dict[tuple[str, int], torch.Tensor] = {}
        self._blob_pieces: dict[str, int] = {}
        # (worker, key, slot) -> (incarnation, id) of the last STORE: its repetition must not undo what came after it.
        self._last_stores: dict[tuple[int, int, str | None], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.rules)

    def find(self, key: int) -> ChunkRule:
        """The chunk's rule; ProtocolError where there is no such chunk here."""
        rule = self.rules.get(key)
        if rule is None:
            keys = f"{min(self.rules)} to {max(self.rules)}" if self.rules else "none"
            raise ProtocolError(
                f"chunk {key} is not on this shard (expected one of {len(self.rules)} keys: {keys})",
                ErrorCode.UNKNOWN_KEY,
            )
        return rule

    def restore(self, chunks: Sequence[ChunkState]) -> None:
        """Take over what ``chunk_state`` gave; the tensors are owned here from now on."""
        for chunk in chunks:
            self.rules[chunk.key] = self._rule.make(
                ChunkSpec.from_body(chunk.meta["spec"]), chunk.tensors.get("values"), self._context
            )
            self.rules[chunk.key].restore(chunk.meta, chunk.tensors)

    def register(self, message: Message) -> None:
        """REGISTER: take a chunk, with its initial values where they are kept here; a repetition replaces it."""
        spec = _spec_of(message)
        values = None if message.payload is None else received_values(message, spec).clone()
        known = self.rules.get(message.key)
        more_bytes = (0 if values is None else spec.size_bytes) - (0 if known is None else known.size_bytes())
        try:
            bodies.pack(MessageType.CHUNKS, {"chunks": [spec.to_body()], "more": False})
        except ProtocolError as error:
            raise ProtocolError(f"{spec.describe()} cannot be listed: {error}. Cut it into more chunks.") from None
        if more_bytes > 0:
            self.take_memory(more_bytes, f"registering {spec.describe()}")
        self.rules[message.key] = self._rule.make(spec, values, self._context)

    def configure(self, message: Message) -> None:
        """CONFIGURE: attach the server-side optimizer."""
        rule = self.find(message.key)
        spec = OptimizerSpec.from_body(message.body, rule.spec.numel)
        if rule.optimizer is None:
            self.take_memory(MAX_SLOTS * rule.spec.size_bytes, f"the optimizer of {rule.spec.describe()}")
        rule.configure(spec)

    def page(self, after: int) -> dict[str, Any]:
        """LIST: the specs of as many chunks after key ``after`` as fit a page."""
        keys = sorted(key for key in self.rules if key > after)
        entries: list[dict[str, Any]] = []
        size_bytes = 0
        for key in keys:
            entry = self.rules[key].spec.to_body()
            # At most how large the entry is in msgpack.
            size_bytes += 64 + sum(len(s[0].encode()) + 24 + 9 * (len(s[1]) + len(s[2])) for s in entry["segments"])
            if entries and size_bytes > PAGE_BYTES:
                break
            entries.append(entry)
        return {"chunks": entries, "more": len(entries) < len(keys)}

    def read(self, message: Message) -> Values:
        """PULL: (version, payload, body) of a chunk, a slot of its optimizer, or a piece of a blob."""
        name, slot = message.body.get("blob"), message.body.get("slot")
        if name is not None:
            piece = self.blobs.get((name, message.key))
            if piece is None:
                raise ProtocolError(f"there is no piece {message.key} of {name!r} here", ErrorCode.UNKNOWN_KEY)
            return 0, piece, {"pieces": self._blob_pieces[name]}
        rule = self.find(message.key)
        if slot is None:
            return *rule.read(), {}
        optimizer = _optimizer_of(rule)
        optimizer.check_slot(slot)
        # Without payload where the slot holds nothing yet.
        return rule.version, optimizer.slots().get(slot), {"slot": slot, "steps": optimizer.steps()}

    def store(self, message: Message) -> None:
        """STORE: overwrite what ``read`` reads."""
        body = message.body
        if body.get("blob") is not None:
            self._store_piece(message, body["blob"], body.get("pieces") or message.key + 1)
            return
        rule, slot = self.find(message.key), body.get("slot")
        values = received_values(message, rule.spec)
        place, request = (message.worker, message.key, slot), (message.incarnation, message.sequence)
        if self._last_stores.get(place) == request:
            return  # its OK was lost
        if slot is not None:
            _optimizer_of(rule).load_slot(slot, values, body.get("steps", []))
        else:
            if rule.values is None:
                self.take_memory(rule.spec.size_bytes, f"values of {rule.spec.describe()}")
            rule.store(values, message.version)
        self._last_stores[place] = request

    def last_stores(self) -> list[list[Any]]:
        """The last STORE of each worker and place, for a server that restarts; JSON-able."""
        return [[*place, *request] for place, request in self._last_stores.items()]

    def note_stores(self, stores: Sequence[Sequence[Any]]) -> None:
        """Inverse of ``last_stores``."""
        for worker, key, slot, incarnation, request in stores:
            self._last_stores[worker, key, slot] = incarnation, request

    def _store_piece(self, message: Message, name: str, pieces: int) -> None:
        if message.payload is None or message.dtype is not torch.uint8 or message.key >= pieces:
            raise ProtocolError(
                f"piece {message.key} of {name!r}: expected bytes (torch.uint8) and a number below its {pieces} pieces,"
                f" got {message.dtype}"
            )
        known = self.blobs.get((name, message.key))
        more_bytes = message.numel - (known.numel() if known is not None else 0)
        if more_bytes > 0:
            self.take_memory(more_bytes, f"piece {message.key} of {name!r}")
        self.blobs[name, message.key] = payload_tensor(message).clone()
        for place in [place for place in self.blobs if place[0] == name and place[1] >= pieces]:
            del self.blobs[place]
        self._blob_pieces[name] = pieces

    def size_bytes(self) -> int:
        """Memory of all chunks and blobs."""
        return sum(rule.size_bytes() for rule in self.rules.values()) + sum(map(torch.numel, self.blobs.values()))


def _optimizer_of(rule: ChunkRule) -> ChunkOptimizer:
    if rule.optimizer is None:
        raise ProtocolError(f"{rule.spec.describe()} has no optimizer here", ErrorCode.NOT_READY)
    return rule.optimizer


def absent_ranges(segments: Sequence[Segment], absent: list[int]) -> list[tuple[int, int]]:
    """[start, end) element ranges of the segments with these indices, in a chunk.

    Raises:
        ProtocolError: there is no such segment.
    """
    wanted = set(absent)
    ranges, start = [], 0
    for index, segment in enumerate(segments):
        if index in wanted:
            ranges.append((start, start + segment.numel))
            wanted.discard(index)
        start += segment.numel
    if wanted:
        raise ProtocolError(f"no such segments (expected indices below {len(segments)}, got {sorted(wanted)})")
    return ranges


def _spec_of(message: Message) -> ChunkSpec:
    assert message.dtype is not None
    spec = ChunkSpec.from_body({**message.body, "key": message.key, "dtype": DTYPE_NUMBERS[message.dtype]})
    segments_numel = sum(segment.numel for segment in spec.segments)
    if spec.numel != segments_numel or spec.numel == 0:
        raise ProtocolError(
            f"{spec.describe()}: expected segments that add up to its {spec.numel} > 0 elements, got {segments_numel}"
        )
    if spec.kind is ChunkKind.USAGE and spec.dtype is not torch.int32:
        raise ProtocolError(f"{spec.describe()}: a usage map is int32 (got {spec.dtype})")
    if spec.kind is ChunkKind.PARAMETER and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        raise ProtocolError(f"{spec.describe()}: only floating and complex values are trained (got {spec.dtype})")
    return spec


def chunk_state(rule: ChunkRule, *, copies: bool = False) -> ChunkState:
    """All of a chunk; its own tensors, unless ``copies``."""
    meta = {"spec": rule.spec.to_body(), **rule.to_meta()}
    tensors = {name: tensor.clone() if copies else tensor for name, tensor in rule.tensors().items()}
    return ChunkState(rule.spec.key, meta, tensors)
