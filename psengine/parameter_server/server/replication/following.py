"""The follower's side: a copy of every shard of a leader, as its records come. No socket, no clock.

    own                            leader's shard 0              its other shards
     ├─ RESUME, as a reader ──────────►│
     │◄───── RESUMED: shards, epoch, term
     ├─ FOLLOW ───────────────────────►├─────────────────────────────►│
     │◄────────── RECORD: snapshot, then what changes it ─────────────┤
     ├─ KEPT ─────────────────────────►├─────────────────────────────►│
     └─ shards' threads: take the copy, apply records

A record is kept once it was checked and is applied, and is in this server's own log, where it has one. Where records
come faster than that, KEPT waits, and so does the leader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.server.log.records import Record, RecordKind, decode
from psengine.parameter_server.server.replication.election import Member
from psengine.parameter_server.server.snapshots.files import ServerState, fill, state_of
from psengine.protocol.frames import TYPE_AT, encode
from psengine.protocol.frames import decode as decode_message
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.version import __version__


@dataclass
class _Copy:
    """Of one shard."""

    heard_s: float
    next: int | None = None  # number of the next record
    state: ServerState | None = None  # while its tensors come
    tensors: Iterator[torch.Tensor] = field(default_factory=lambda: iter(()))
    tensor: torch.Tensor | None = None  # the next one
    is_complete: bool = False
    told: int | None = None  # by KEPT
    told_s: float = 0.0


class Following:
    """One attempt to follow the server at ``address``.

    Args:
        address: of its first shard.
        shards: the threads of this server's: see ``ShardThread.take_copy``.
        transport: open(shard, address), send(shard, frames), close(): its connections are this attempt's. See
            ``Replication``.
        begin: called before anything is thrown away: given epoch and term of the leader, it returns this copy's life,
            or None if that must not be.
        lease_s: a leader that is silent for so long is lost.

    Attributes:
        address: as given.
        copies_anything: what was here is gone, or will be.
        why_ended: the attempt is over; "" while it goes on.
        term: the leader's; 0 before it answers.
        is_prepared: what was copied is to stay: the shards' own logs have begun, if they have any.
    """

    def __init__(
        self,
        address: str,
        shards: Sequence[Any],
        transport: Any,
        begin: Callable[[int, int], Member | None],
        *,
        now_s: float,
        lease_s: float,
    ) -> None:
        self.why_ended = ""
        self.copies_anything = False
        self.term = 0
        self.is_prepared = False
        self.address, self._shards, self._transport, self._begin = address, shards, transport, begin
        self._lease_s = lease_s
        self._own: Member | None = None
        self._leader = 0  # its epoch
        self._copies = [_Copy(now_s) for _ in shards]
        self._asked: deque[Future[Any]] = deque()
        transport.open(0, address)
        self._say(0, Message(MessageType.RESUME))

    @property
    def is_complete(self) -> bool:
        """Whether all shards have the snapshot."""
        return all(copy.is_complete for copy in self._copies)

    @property
    def heard_s(self) -> float:
        """When the leader was heard last, at the shard where that is longest ago."""
        return min(copy.heard_s for copy in self._copies)

    # ---- what comes --------------------------------------------------------------------------------------------

    def received(self, shard: int, frames: Sequence[Any], now_s: float) -> None:
        """A message came from the leader's shard."""
        try:
            is_record = len(frames[0]) > TYPE_AT and frames[0][TYPE_AT] == MessageType.RECORD
            message = decode_message(frames[:1] if is_record else frames)
            self._copies[shard].heard_s = now_s
            if message.type is MessageType.ERROR and message.body["code"] == ErrorCode.NOT_LEADING:
                self.end(f"{self.address} does not lead either. Fix, if this lasts: start the server that led last")
            elif message.type is MessageType.ERROR:
                self.end(f"{self.address} refuses: {message.body['text']}")
            elif message.type is MessageType.RESUMED and self._own is None:
                self._meet(message)
            elif is_record and self._own is not None:
                self._take(shard, message, frames[1:])
            else:
                self.end(f"{self.address} sent {message.type.name} (expected RECORD)")
        except Exception as error:
            self.end(f"what {self.address} sent cannot be taken: {error!r}")

    def _meet(self, resumed: Message) -> None:
        """The leader has answered."""
        host = self.address.rpartition(":")[0]
        found = [f"{host}:{one.rpartition(':')[2]}" if "//*:" in one else one for one in resumed.body["shards"]]
        if len(found) != len(self._shards):
            self.end(
                f"a follower has as many shards as its leader. Fix: --shards {len(found)}, not {len(self._shards)}"
            )
            return
        self._leader, self.term = resumed.epoch, resumed.term
        self._own = self._begin(resumed.epoch, resumed.term)
        if self._own is None:
            self.end(f"{self.address} leads; what is here is kept until that is certain")
            return
        body = {"software": __version__, "shards": len(found), "addresses": list(self._own.addresses)}
        body |= self._shards[0].shard.settings.likeness
        for shard, address in enumerate(found):
            if shard:
                self._transport.open(shard, address)
            index = {**body, "index": shard}
            self._say(shard, Message(MessageType.FOLLOW, epoch=self._own.epoch, term=self.term, body=index))

    def _take(self, shard: int, message: Message, pieces: Sequence[Any]) -> None:
        copy = self._copies[shard]
        if (message.epoch, message.term) != (self._leader, self.term):
            raise ProtocolError(f"another life speaks (expected epoch {self._leader}, got {message.epoch})")
        records: list[Record] = []
        for record in decode(pieces):
            if copy.next not in (None, record.number):
                raise ProtocolError(f"a record is missing (expected number {copy.next}, got {record.number})")
            copy.next = record.number + 1
            if copy.is_complete:
                records.append(record)
            else:
                self._fill(shard, copy, record)
        if records:
            self._asked.append(self._shards[shard].ask(partial(self._shards[shard].take_records, records)))

    def _fill(self, shard: int, copy: _Copy, record: Record) -> None:
        """A record of the snapshot."""
        wanted = RecordKind.GENERATION if copy.state is None else RecordKind.TENSOR
        if record.kind is not wanted:
            raise ProtocolError(f"this is no snapshot (expected a record {wanted.name}, got {record.kind.name})")
        if copy.tensor is None:
            copy.state, self.copies_anything = state_of(record), True
            copy.tensors = copy.state.tensors()
        else:
            fill(copy.tensor, record)
        copy.tensor = next(copy.tensors, None)
        if copy.tensor is None:
            assert copy.state is not None
            take = partial(self._shards[shard].take_copy, copy.state, record.number + 1)
            self._asked.append(self._shards[shard].ask(take))
            copy.is_complete, copy.state = True, None

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Some time has passed, or messages were received: say what is kept."""
        while self._asked and self._asked[0].done():
            if (error := self._asked.popleft().exception()) is not None:
                self.end(f"a record of {self.address} cannot be applied: {error!r}")
        for shard, copy in enumerate(self._copies):
            if now_s > copy.heard_s + self._lease_s:
                self.end(f"{self.address} was silent for {self._lease_s:g} s, at shard {shard}")
            kept = self._kept(copy, self._shards[shard].kept)
            if kept is None or (kept == copy.told and now_s < copy.told_s + self._lease_s / 5):
                continue
            copy.told, copy.told_s = kept, now_s
            assert self._own is not None
            self._say(shard, Message(MessageType.KEPT, epoch=self._own.epoch, term=self.term, sequence=kept))

    def _kept(self, copy: _Copy, kept: int) -> int | None:
        """All records below are here; None before the first."""
        if not copy.is_complete:
            return copy.next
        return max(kept, copy.told or 0) if self.is_prepared else copy.told or 0

    def end(self, why: str) -> None:
        """Nothing more is kept."""
        if not self.why_ended:
            self.why_ended = why
            self._transport.close()

    def _say(self, shard: int, message: Message) -> None:
        if not self.why_ended:
            self._transport.send(shard, encode(message))
