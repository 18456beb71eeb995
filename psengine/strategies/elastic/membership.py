"""Who takes part in a training with virtual workers, and how they reach each other."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError
from psengine.protocol.facts import difference


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker that takes part, as a view describes it.

    Attributes:
        worker: its number in the job.
        completed: the last step of which it has the averages; None: it has no state.
        checkpoint: the step of the newest whole checkpoint that it can load; 0 none.
    """

    worker: int
    completed: int | None
    checkpoint: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Those who exchange with each other, until one of them dies or another comes.

    Attributes:
        members: in the order of ranks in ``collective``.
        collective: of exactly these, new for each group. Its waits end with CollectiveError where another view is to
            come.
    """

    members: tuple[Member, ...]
    collective: Collective


class Membership(ABC):
    """One worker's place among the others. Called by the thread that trains."""

    @abstractmethod
    def enter(self, facts: Mapping[str, str], checkpoint: int) -> Group:
        """Come in, without state; return the first group with this worker.

        Args:
            facts: what all workers must have alike, by name.
            checkpoint: see ``Member``.

        Raises:
            ConfigurationError: another worker's facts differ; the message has both values.
        """

    @property
    def has_news(self) -> bool:
        """Whether another view is to come, so that the group should not go on: call ``regroup``."""
        return False

    def reached(self, completed: int) -> None:  # noqa: B027 - a process group does not ask
        """Say that this worker has the state of its group, after step ``completed``."""

    @abstractmethod
    def regroup(self, completed: int | None, error: BaseException | None) -> Group:
        """Say how far this worker is; wait for the next view, and return its group.

        Args:
            completed: see ``Member``.
            error: how an exchange of the former group failed; None: it did not.

        Raises:
            FencedError: the others went on without this worker.
        """

    def leave(self, completed: int) -> bool:
        """The training is over after step ``completed``.

        Returns:
            True: this worker is gone. False: another view is to come before, perhaps because others lack averages of
            that step: call ``regroup``, then this again.
        """
        return True

    def close(self) -> None:  # noqa: B027 - ranks of a process group hold nothing
        """Go without telling the others: training broke off. Safe to call twice, and after ``leave``."""


class FixedMembership(Membership):
    """The ranks of ``collective``, for as long as all of them live."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def enter(self, facts: Mapping[str, str], checkpoint: int) -> Group:
        mine = json.dumps([facts, checkpoint]).encode()
        rows = self._collective.gather_bytes(mine, torch.device("cpu"), what="what workers must have alike")
        ranks = [json.loads(row) for row in rows]
        for rank, (theirs, _) in enumerate(ranks):
            if differs := difference(ranks[0][0], theirs):
                raise ConfigurationError(
                    f"rank {rank} differs from the workers that are there {differs}. Fix: start all workers with the"
                    " same program, arguments and machine settings."
                )
        members = [Member(worker=rank, completed=None, checkpoint=found) for rank, (_, found) in enumerate(ranks)]
        return Group(members=tuple(members), collective=self._collective)

    @override
    def regroup(self, completed: int | None, error: BaseException | None) -> Group:
        assert error is not None, "there is no news of a process group"
        raise error
