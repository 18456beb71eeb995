"""A job's chunks at one shard: registered, configured, listed, read, overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import RuleContext
from psengine.parameter_server.server.rules.payloads import received_values
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.protocol import bodies
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import DTYPE_NUMBERS, ErrorCode, Message, MessageType

PAGE_BYTES = 48 * 1024
# Of optimizers that may be attached: how many chunk-sized slots, at most.
MAX_SLOTS = 3

Values = tuple[int, torch.Tensor | None, dict[str, Any]]


class ChunkStore:
    """The chunks of one job at one shard, by key.

    Args:
        rule: of the job.
        context: what the chunks' rules share.
        take_memory: told of bytes about to be taken; raises ProtocolError where there are not enough.
    """

    def __init__(self, rule: JobRule, context: RuleContext, take_memory: Any) -> None:
        self._rule = rule
        self._context = context
        self._take_memory = take_memory
        self.rules: dict[int, ChunkRule] = {}
        self.blobs: dict[tuple[str, int], torch.Tensor] = {}
        self._blob_pieces: dict[str, int] = {}
        # (worker, key, slot) -> (incarnation, id) of the last STORE: its repetition must not undo what came after it.
        self._last_stores: dict[tuple[int, int, str | None], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.rules)

    def clear(self) -> None:
        """Forget everything."""
        self.rules.clear()
        self.blobs.clear()
        self._blob_pieces.clear()
        self._last_stores.clear()

    def find(self, key: int) -> ChunkRule:
        """The chunk's rule.

        Raises:
            ProtocolError: there is no such chunk here.
        """
        rule = self.rules.get(key)
        if rule is None:
            raise ProtocolError(
                f"chunk {key} is not on this shard (expected one of {len(self.rules)} keys: {_shown(self.rules)})",
                ErrorCode.UNKNOWN_KEY,
            )
        return rule

    def make_rule(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext | None = None) -> ChunkRule:
        """A chunk under the job's rule; ``context``: another than the job's."""
        return self._rule.make(spec, values, context or self._context)

    def register(self, message: Message) -> None:
        """REGISTER: take a chunk with its initial values; a repetition replaces it."""
        body = message.body
        spec = _spec_of(message)
        values = None if message.payload is None else received_values(message, spec)
        if body["kind"] == ChunkKind.USAGE.value and spec.dtype is not torch.int32:
            raise ProtocolError(f"{spec.describe()}: a usage map is int32 (got {spec.dtype})")
        if spec.kind is ChunkKind.PARAMETER and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            raise ProtocolError(f"{spec.describe()}: only floating and complex values are trained (got {spec.dtype})")
        known = self.rules.get(message.key)
        more_bytes = spec.size_bytes - (known.spec.size_bytes if known is not None else 0)
        if _entry_bytes(spec.to_body()) > PAGE_BYTES:
            self._check_listable(spec)
        if more_bytes > 0:
            self._take_memory(more_bytes, f"registering {spec.describe()}")
        self.rules[message.key] = self.make_rule(spec, None if values is None else values.clone())

    def _check_listable(self, spec: ChunkSpec) -> None:
        try:
            bodies.pack(MessageType.CHUNKS, {"chunks": [spec.to_body()], "more": False, "total": len(self.rules) + 1})
        except ProtocolError as error:
            raise ProtocolError(f"{spec.describe()} cannot be listed: {error}. Cut it into more chunks.") from None

    def configure(self, message: Message) -> list[str]:
        """CONFIGURE: attach the server-side optimizer; returns the names of its slots so far."""
        rule = self.find(message.key)
        spec = OptimizerSpec.from_body(message.body, rule.spec.numel)
        if rule.outcome.optimizer is None:
            self._take_memory(MAX_SLOTS * rule.spec.size_bytes, f"the optimizer of {rule.spec.describe()}")
        rule.outcome.configure(spec)
        assert rule.outcome.optimizer is not None
        return sorted(rule.outcome.optimizer.slots())

    def page(self, after: int) -> dict[str, Any]:
        """LIST: the specs of as many chunks after key ``after`` as fit a page."""
        keys = sorted(key for key in self.rules if key > after)
        entries: list[dict[str, Any]] = []
        size = 0
        for key in keys:
            entry = self.rules[key].spec.to_body()
            size += _entry_bytes(entry)
            if entries and size > PAGE_BYTES:
                break
            entries.append(entry)
        return {"chunks": entries, "more": len(entries) < len(keys), "total": len(self.rules)}

    def read(self, message: Message) -> Values:
        """PULL: (version, payload, body) of a chunk, a slot of its optimizer, or a piece of a blob."""
        body = message.body
        if body.get("blob") is not None:
            name = body["blob"]
            piece = self.blobs.get((name, message.key))
            if piece is None:
                raise ProtocolError(f"there is no piece {message.key} of {name!r} here", ErrorCode.UNKNOWN_KEY)
            return 0, piece, {"pieces": self._blob_pieces[name]}
        rule = self.find(message.key)
        if body.get("slot") is not None:
            return self._read_slot(rule, body["slot"])
        return *rule.outcome.read(), {}

    def _optimizer_of(self, rule: ChunkRule) -> ChunkOptimizer:
        if rule.outcome.optimizer is None:
            raise ProtocolError(f"{rule.spec.describe()} has no optimizer here", ErrorCode.NOT_READY)
        return rule.outcome.optimizer

    def _read_slot(self, rule: ChunkRule, slot: str) -> Values:
        optimizer = self._optimizer_of(rule)
        optimizer.check_slot(slot)
        # Without payload where the slot holds nothing yet.
        return rule.version, optimizer.slots().get(slot), {"slot": slot, "steps": optimizer.steps()}

    def store(self, message: Message) -> None:
        """STORE: overwrite what ``read`` reads."""
        body = message.body
        if body.get("blob") is not None:
            self._store_piece(message, body["blob"], body.get("pieces") or message.key + 1)
            return
        rule = self.find(message.key)
        spec = rule.spec
        values = received_values(message, spec)
        place, request = (message.worker, message.key, body.get("slot")), (message.incarnation, message.sequence)
        if self._last_stores.get(place) == request:
            return  # its OK was lost
        if body.get("slot") is not None:
            self._optimizer_of(rule).load_slot(body["slot"], values, body.get("steps", []))
        else:
            if rule.outcome.values is None:
                self._take_memory(spec.size_bytes, f"values of {spec.describe()}")
            rule.store(values, message.version)
        self._last_stores[place] = request

    def _store_piece(self, message: Message, name: str, pieces: int) -> None:
        if message.payload is None or message.dtype is not torch.uint8 or message.key >= pieces:
            raise ProtocolError(
                f"piece {message.key} of {name!r}: expected bytes (torch.uint8) and a number below its {pieces} pieces,"
                f" got {message.dtype}"
            )
        known = self.blobs.get((name, message.key))
        more_bytes = message.numel - (known.numel() if known is not None else 0)
        if more_bytes > 0:
            self._take_memory(more_bytes, f"piece {message.key} of {name!r}")
        self.blobs[name, message.key] = payload_tensor(message).clone()
        if self._blob_pieces.get(name, pieces) > pieces:
            for place in [place for place in self.blobs if place[0] == name and place[1] >= pieces]:
                del self.blobs[place]
        self._blob_pieces[name] = pieces

    def size_bytes(self) -> int:
        """Memory of all chunks and blobs."""
        return sum(rule.size_bytes() for rule in self.rules.values()) + sum(map(torch.numel, self.blobs.values()))


def _entry_bytes(entry: dict[str, Any]) -> int:
    """At most how large a chunk's entry of CHUNKS is in msgpack."""
    return 64 + sum(len(s[0].encode()) + 24 + 9 * (len(s[1]) + len(s[2])) for s in entry["segments"])


def absent_ranges(segments: tuple[Segment, ...], absent: list[int]) -> list[tuple[int, int]]:
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
    body = message.body
    dtype = body.get("dtype") if message.dtype is None else DTYPE_NUMBERS[message.dtype]
    if dtype is None:
        raise ProtocolError(f"REGISTER of chunk {message.key} without payload needs dtype and numel in its body")
    numel = body.get("numel", 0) if message.dtype is None else message.numel
    description = {
        "key": message.key,
        "dtype": dtype,
        "numel": numel,
        "kind": body["kind"],
        "segments": body["segments"],
    }
    try:
        spec = ChunkSpec.from_body(description)
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"REGISTER of chunk {message.key} has an unknown kind or dtype: {error}") from None
    if spec.numel != sum(segment.numel for segment in spec.segments) or spec.numel == 0:
        raise ProtocolError(
            f"{spec.describe()}: expected segments that add up to its {spec.numel} > 0 elements, got"
            f" {sum(segment.numel for segment in spec.segments)}"
        )
    return spec


def _shown(keys: Mapping[int, Any]) -> str:
    ordered = sorted(keys)
    return f"{ordered[0]} to {ordered[-1]}" if ordered else "none"
