"""A server and its other: what follows from who leads. No socket, no clock.

=========  ===========================================================================================================
role       what happens here
=========  ===========================================================================================================
looking    nothing, until the elector names a leader
following  a copy is taken from the leader (``following.py``). If it is lost, the copy stays as it is: this server may
           have to lead. Only where it certainly does not, a new life begins, with a new copy
leading    the shards go on with what is here, as after a restart; a stream of each goes to a follower (``stream.py``)
fenced     another server leads: a new life begins, which follows it
=========  ===========================================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.log.log import later_epoch
from psengine.parameter_server.server.replication.election import Member
from psengine.parameter_server.server.replication.following import Following
from psengine.parameter_server.server.replication.succession import Role, Succession
from psengine.protocol.messages import ErrorCode
from psengine.status_port.status_model import ReplicaStatus

RETRY_S = 0.5


class Pair:
    """Of one life of a server; one thread calls ``tick``, and what the transport calls.

    Args:
        succession: decides.
        threads: of the shards; all are there at the first ``tick``.
        transport: to a leader.
        lease_s: silence that ends a connection between leader and follower.
        prepare: called again and again until it is true, once a copy is complete and before the shards lead: what is
            here gets its log and snapshots.
        lead: the shards of this life go on by themselves, from now (monotonic).
        begin_anew: this life has to end, and to be followed by another; says why.
        note: takes an event's kind and text.

    Attributes:
        is_leading: the shards were told to lead.
        has_copy: what is here is another server's.
    """

    def __init__(
        self,
        succession: Succession,
        transport: Any,
        threads: Sequence[Any],
        *,
        lease_s: float,
        prepare: Callable[[int, bool], bool],
        lead: Callable[[int, float], None],
        begin_anew: Callable[[str], None],
        note: Callable[[str, str], None],
    ) -> None:
        self.succession = succession
        self.is_leading = False
        self._threads = threads
        self._transport, self._lease_s = transport, lease_s
        self._prepare, self._lead, self._begin_anew, self._note = prepare, lead, begin_anew, note
        # As follower.
        self._following: Following | None = None
        self.has_copy = False  # of another server, whole or not
        self._retry_s = 0.0
        self.why, self._noted_why, self._note_s = "", "", 0.0
        # As leader.
        self._told: deque[tuple[int, int, str]] = deque()
        self._followers: dict[int, Member] = {}  # one at most; several threads may claim it at once
        self._caught_up: set[int] = set()  # shards
        self._is_released = True
        self._lost_s = 0.0
        # For half a lease it could neither reach its follower nor have it dropped.
        self._is_cut_off = False

    # ---- for shards' threads -----------------------------------------------------------------------------------

    @property
    def _follower(self) -> Member | None:
        return self._followers.get(0)

    @property
    def replicas(self) -> list[str]:
        """Where workers find this server's follower."""
        return [] if self._follower is None else list(self._follower.addresses)

    def claim(self, epoch: int, addresses: Sequence[str]) -> bool:
        """Whether this follower may have copies of shards: who has one gets the others'."""
        if self._is_released and not self.succession.needs_follower:
            return self._followers.setdefault(0, Member(epoch, tuple(addresses))).epoch == epoch
        return self._follower is not None and self._follower.epoch == epoch

    def tell(self, shard: int, epoch: int, why_lost: str) -> None:
        """What a stream says of a follower; see ``Stream``."""
        self._told.append((shard, epoch, why_lost))

    @property
    def leads(self) -> bool:
        """Whether clients are answered, and leases run: once another server may lead, nobody is told anything."""
        return self.is_leading and not (self.succession.may_be_fenced or self._is_cut_off)

    def check_leads(self) -> None:
        """Raise ProtocolError where this server answers no client: workers look at the other one."""
        if self.leads:
            return
        leader = self.succession.leader
        whom = "no other server that leads" if leader is None else f"the server at {' '.join(leader.addresses)}"
        text = f"this server does not lead: it knows {whom}. {self.succession.why}"
        raise ProtocolError(text, ErrorCode.NOT_LEADING)

    @property
    def _missing(self) -> str:
        """What this server waits for; "" where nothing is missing."""
        return self.succession.why if self.is_leading else "; ".join(filter(None, (self.succession.why, self.why)))

    def status(self, election: str) -> ReplicaStatus:
        """For people; any thread."""
        succession, leader = self.succession, self.succession.leader
        named = () if succession.recorded is None else succession.recorded.members[1:]
        expected = self._follower if self.is_leading else succession.own
        return ReplicaStatus(
            role=succession.role.value,
            term=succession.term or (0 if succession.recorded is None else succession.recorded.term),
            peers=tuple(self.replicas) if leader is None else leader.addresses,
            is_in_sync=any(expected is not None and one.epoch == expected.epoch for one in named),
            lag_records=max(thread.stream.lag for thread in self._threads) if self._follower else None,
            election=election,
            why=self._missing,
        )

    # ---- for the transport -------------------------------------------------------------------------------------

    def received(self, shard: int, frames: Sequence[Any], now_s: float) -> None:
        """A message from the leader."""
        if self._following is not None:
            self._following.received(shard, frames, now_s)

    def disconnected(self, shard: int) -> None:
        """A connection to the leader has ended, or cannot be made."""
        if self._following is not None:
            ended, address = f"the connection to the leader's shard {shard} has ended", self._following.address
            nobody = f"no server answers at {address} with these keys. Fix: start it, or correct --follow"
            self._following.end(ended if self._following.term else nobody)

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Some time has passed, or something has come."""
        if (why := self._missing) != self._noted_why:
            self._noted_why, self._note_s = why, now_s + RETRY_S
        elif why and now_s >= self._note_s:  # what passes at once is no news
            self._note_s = float("inf")
            self._note("waits", why)
        role = self.succession.role
        if role is Role.FENCED:
            self._begin_anew("another server leads")
        elif role is Role.LEADING:
            self._tick_as_leader(now_s)
        elif self._following is not None:
            self._tick_as_follower(self._following, now_s)
        elif role is Role.FOLLOWING and now_s >= self._retry_s and self.succession.leader is not None:
            address = self.succession.leader.addresses[0]
            self._following = Following(
                address, self._threads, self._transport, self._begin_copy, now_s=now_s, lease_s=self._lease_s
            )

    def _begin_copy(self, leader: int, term: int) -> Member | None:
        """A leader is there: whether what is here may go, as ``Following`` asks."""
        own = self.succession.own
        if leader == own.epoch:
            raise ProtocolError("it is this server itself. Fix: --follow names the other one")
        copy = Member(later_epoch(own.epoch, own.epoch, leader), own.addresses)
        if not self.succession.begin_copy(copy, term):
            return None
        if self.has_copy:
            self._begin_anew("its copy is not the leader's any more")
            return None
        return copy

    def _tick_as_follower(self, following: Following, now_s: float) -> None:
        following.tick(now_s)
        self.has_copy |= following.copies_anything
        if following.why_ended:
            self._following, self._retry_s, self.why = None, now_s + RETRY_S, following.why_ended
            self.succession.leader_lost(now_s)
        elif following.copies_anything:
            self.why = ""
            self.succession.leader_heard(following.term, following.heard_s)
            if following.is_complete:
                following.is_prepared = self._prepare(self.succession.own.epoch, True)

    def _tick_as_leader(self, now_s: float) -> None:
        if not self.is_leading:
            if self._following is not None:
                self._following.end("this server leads")
                self._following = None
            if self._prepare(self.succession.own.epoch, self.has_copy):
                self.is_leading = True
                self._lead(self.succession.own.epoch, now_s)
        while self._told:
            shard, epoch, why_lost = self._told.popleft()
            if self._follower is None or epoch != self._follower.epoch:
                continue
            if why_lost:
                self._note("follower_lost", f"the follower at {self._follower.addresses[0]} is lost: {why_lost}")
                self._lose(now_s)
                continue
            self._caught_up.add(shard)
            if len(self._caught_up) == len(self._threads):
                self._note("follower", f"the follower at {self._follower.addresses[0]} has all that is here")
                self.succession.follower_caught_up(self._follower, now_s)
        if not self._is_released and not self.succession.needs_follower:
            self._is_released = True
            self._ask_streams("release")
        self._is_cut_off = not self._is_released and now_s > self._lost_s + self._lease_s / 2

    def _lose(self, now_s: float) -> None:
        """A stream to the follower has ended: so do the others, and answers wait until it is recorded no more."""
        was_in_sync = len(self._caught_up) == len(self._threads)
        self._is_released, self._lost_s = False, now_s
        self._followers.clear()
        self._caught_up.clear()
        self._ask_streams("lose", "it is lost at another shard")
        if was_in_sync:
            self.succession.follower_lost(now_s)

    def _ask_streams(self, name: str, *arguments: object) -> None:
        for thread in self._threads:
            thread.ask(partial(getattr(thread.stream, name), *arguments))
