"""Where a job's weights live, and what follows from it for workers that come, leave, or return. Pure.

weights_in_workers.py   a joiner needs another worker's state; a job without workers is lost
weights_here.py         a joiner reads the weights; a job without workers waits
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.core.team import Team
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import Message


class Weights(ABC):
    """Of one job at one shard.

    Args:
        team: the job's.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    @property
    def initialiser(self) -> int:
        """The rank that registers the chunks."""
        return 0

    @abstractmethod
    def told(self, members: Collection[int], now_s: float) -> None:
        """A worker that says HELLO names the ranks that it knew alive; none where it knew nobody."""

    @abstractmethod
    def place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        """Where a worker stands that is not live, in a job whose values are here: (state of WELCOME, answers)."""

    @abstractmethod
    def sealed(self, member: Member) -> None:
        """Worker ``member`` has brought the job's values."""

    @abstractmethod
    def restored(self) -> None:
        """The job is from a snapshot."""

    @abstractmethod
    def join(self, member: Member, request: int) -> list[Reply]:
        """JOIN: a worker that comes late wants the state of one that was there; OK is held until it is admitted."""

    @abstractmethod
    def admit(self, message: Message, donor: Member) -> list[Reply]:
        """ADMIT: the donor has deposited its state; the joiner takes part from the donor's next exchange on."""

    @abstractmethod
    def leave(self, message: Message, member: Member) -> list[Reply]:
        """LEAVE: OK is held until every live worker has the averages that this one has."""

    @abstractmethod
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        """PROGRESS: a worker says how far it was with a server that lived before this one."""

    def left(self, rank: int) -> list[Reply]:
        """Exchanges do not wait for this worker any more, or not for the process that had its rank."""
        return self._team.left(rank)

    @abstractmethod
    def pushed(self, rank: int) -> list[Reply]:
        """A worker has pushed; answers that may leave because of it, beside those of the exchange."""

    @abstractmethod
    def check_readable(self) -> None:
        """Raise ProtocolError unless this server holds the weights that are trained."""

    @abstractmethod
    def is_missed(self, now_s: float) -> bool:
        """Whether somebody may want this job yet that has no workers."""

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """Some time has passed."""

    @abstractmethod
    def stood_still(self, pause_s: float) -> None:
        """For ``pause_s`` until now nobody listened here."""

    def _refuse(self, what: str) -> ProtocolError:
        return ProtocolError(f"{what} is for averaging jobs (job {self._team.name!r} is none)")
