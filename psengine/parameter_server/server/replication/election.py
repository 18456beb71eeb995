"""What decides which of two servers leads: a record that both read, which changes by compare-and-swap. Pure.

The record has the term and who is in sync; the first member leads. Beside it stands the leader's lease, which ends some
time after the leader has. Safety comes from the record alone; the lease says when a takeover is worth a try.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ElectorError(Exception):
    """The elector did not answer, or not clearly. What it was asked may have been done, and may still be done later."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One life of a server: what it holds began with this epoch, as a copy or from its disk.

    Attributes:
        epoch: never used before by any server.
        addresses: of its shards, in order.
        previous: the epoch of the life whose log it went on from; 0 without one.
    """

    epoch: int
    addresses: tuple[str, ...]
    previous: int = 0


class Leadership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded.

    Attributes:
        term: counts leaders, from 1.
        members: the first leads; the others have every acknowledged update.
        number: grows with each change, so that no record comes twice. A change that was asked for and is performed
            late finds another record than it expects.
    """

    term: int
    members: tuple[Member, ...]
    number: int = 1

    def encode(self) -> bytes:
        """As electors keep it: JSON, the same bytes for the same record."""
        return msgspec.json.encode(self)


def decode_leadership(text: bytes, where: str) -> Leadership:
    """The record that somebody kept.

    Raises:
        ElectorError: it is none; ``where`` says which.
    """
    try:
        record = msgspec.json.decode(text, type=Leadership)
        if not (record.term and record.members and all(one.addresses for one in record.members)):
            raise ValueError("terms count from 1, and every member has addresses")
    except ValueError as error:
        raise ElectorError(
            f"{where} does not say who leads (expected a record of this version of psengine, got {text[:80]!r}:"
            f" {error}). Fix: end the servers, delete it, and start the one with the newest state first"
        ) from error
    return record


class Elector(Protocol):
    """Keeps the record and the lease. Every call blocks, until a deadline.

    Raises:
        ElectorError: by every method.
    """

    def read(self) -> tuple[Leadership | None, bool]:
        """What is recorded, None for nothing; and whether the leader's lease stands."""

    def replace(self, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        """One transaction: if ``old`` is recorded, and with ``takes_over`` no lease stands, record ``new``.

        With ``takes_over`` the caller has the lease then. False: nothing was changed.
        """

    def renew(self) -> bool:
        """Prolong the caller's lease; False where it has ended."""

    def ask_to_end(self, leadership: Leadership) -> None:
        """Have the leader of this record ended, if somebody can: it has been silent for a lease."""

    def close(self) -> None:
        """Give the lease back, if the caller has it: the follower leads at once. Raises nothing."""


class Read(msgspec.Struct, frozen=True):
    """See ``Elector.read``."""

    def ask(self, elector: Elector) -> tuple[Leadership | None, bool]:
        """The answer."""
        return elector.read()


class Replace(msgspec.Struct, frozen=True):
    """See ``Elector.replace``."""

    old: Leadership | None
    new: Leadership
    takes_over: bool

    def ask(self, elector: Elector) -> bool:
        """The answer."""
        return elector.replace(self.old, self.new, takes_over=self.takes_over)


class Renew(msgspec.Struct, frozen=True):
    """See ``Elector.renew``."""

    def ask(self, elector: Elector) -> bool:
        """The answer."""
        return elector.renew()


class AskToEnd(msgspec.Struct, frozen=True):
    """See ``Elector.ask_to_end``."""

    leadership: Leadership

    def ask(self, elector: Elector) -> None:
        """No answer."""
        elector.ask_to_end(self.leadership)


Question = Read | Replace | Renew | AskToEnd
Answer = tuple[Leadership | None, bool] | bool | None | ElectorError


def ask(elector: Elector, question: Question) -> Answer:
    """Put a question to the elector; what it answers, or the error."""
    try:
        return question.ask(elector)
    except ElectorError as error:
        return error
