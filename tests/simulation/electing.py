"""The elector of a server and its follower: what it remembers, and how its answers are late, or never come.

    process ── question ····· performed ····· answer      each way takes a while; either may be cut
                  └──────────── no answer by its deadline: ElectorError, whether it was performed or not

"etcd" has a lease that ends when it is not renewed, and performs what a process asked for that has died since.
"launcher" is a file: its lease is the process's life, and one that is silent is ended where the other asks for that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from psengine.parameter_server.server.replication.election import (
    Answer,
    ElectorError,
    Leadership,
    Member,
    Question,
    ask,
)
from simulation.scenario import Fault
from simulation.violation import require

DEADLINE_S = 1.0
LONGEST_END_S = 0.3  # how long a launcher takes to end a process
LATE_S = 3.0
ASKS, ANSWERS = 0, 1
CUTS = (ASKS,), (ANSWERS,), (ASKS, ANSWERS)


class SimulatedElector:
    """See the module's text.

    Attributes:
        recorded: who leads; None: nobody has yet.
        problems: faults that it has; of a process whose way to it is cut, the host is the fault's server.
    """

    def __init__(self, world, index: int) -> None:
        self.world, self._index = world, index
        self.kind, self.keeps_log = world.scenario.election, world.scenario.keeps_log
        self.recorded: Leadership | None = None
        self.problems: list[Fault] = []
        self._rng = random.Random(f"elector {index} {world.scenario.seed}")
        self._holder: Any = None  # of the lease
        self._until_s = 0.0
        self._leaders: dict[int, int] = {}  # by term, the life that leads
        self._processes: dict[int, Any] = {}  # by life, who had it when it was recorded

    @property
    def is_held(self) -> bool:
        """Whether the leader's lease stands."""
        if self.kind == "launcher":
            return self._holder is not None and self._holder.is_up
        return self.world.clock.now_s < self._until_s

    # ---- questions on their way --------------------------------------------------------------------------------

    def ask(self, server, question: Question) -> None:
        """A process asks; it hears an answer, or that there is none."""
        asked = _Asked(server, question)
        self.world.faults.noticed(type(question).__name__)
        self.world.clock.after(DEADLINE_S, asked.answer, ElectorError("the elector did not answer in time"))
        self._carry(server, ASKS, self._perform, asked)

    def _carry(self, server, direction: int, call: Callable[..., None], *arguments: Any) -> None:
        delay_s = self.world.scenario.elector_s * self._rng.random() ** 2
        for problem in self.problems:
            if problem.kind == "elector late":
                delay_s += LATE_S * problem.detail * self._rng.random()
            ways = CUTS[int(problem.detail * 100) % len(CUTS)]
            if problem.kind == "cut elector" and problem.server == server.host and direction in ways:
                return
        self.world.clock.after(delay_s, call, *arguments)

    def _perform(self, asked: _Asked) -> None:
        server = asked.server
        is_down = any(problem.kind == "elector down" for problem in self.problems)
        if is_down or (self.kind == "launcher" and (not server.is_up or server.is_paused)):
            return
        answer = ask(_End(self, server), asked.question)
        self.world.clock.note("elector", server.host, asked.question, answer)
        self._carry(server, ANSWERS, asked.answer, answer)

    # ---- what is asked -----------------------------------------------------------------------------------------

    def replace(self, server, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        """One transaction."""
        if self.recorded != old or (takes_over and self.is_held):
            return False
        term, leader = new.term, new.members[0].epoch
        require(old is None or term >= old.term, "term {} follows {}", new, old)
        known = self._leaders.setdefault(term, leader)
        require(known == leader, "term {} has two leaders: {} after {}", term, new, old)
        if takes_over and old is not None and leader not in {one.epoch for one in old.members}:
            self._lose(old)
        self.recorded = new
        self._processes |= {process.life: process for process in self.world.network.servers}
        if takes_over:
            self._holder, self._until_s = server, self.world.clock.now_s + self.world.scenario.lease_s
        return True

    def lives(self, member: Member) -> bool:
        """Whether the process that had this life when it was recorded has not been killed: it may have given it up."""
        process = self._processes.get(member.epoch)
        return process is not None and (process.is_up or process.following.gives_up)

    def _lose(self, old: Leadership) -> None:
        """Somebody else goes on: from its log, or with nothing because all who had the state are dead."""
        live = [one.epoch for one in old.members if self.lives(one)]
        require(self.keeps_log or not live, "{} live, and another begins with nothing", live)
        if not self.keeps_log:
            self.world.damaged(self._index, {})

    def renew(self, server) -> bool:
        """The leader lives."""
        if self._holder is not server or not self.is_held:
            return False
        self._until_s = self.world.clock.now_s + self.world.scenario.lease_s
        return True

    def end(self, leadership: Leadership) -> None:
        """Somebody asks that the silent leader is ended."""
        for server in self.world.network.servers:
            if server.epoch == leadership.members[0].epoch:
                delay_s = LONGEST_END_S * self._rng.random()
                self.world.clock.after(delay_s, self.world.end_server, server)


class _Asked:
    """A question; ``answer`` is heard once."""

    def __init__(self, server, question: Question) -> None:
        self.server, self.question = server, question
        self._is_answered = False

    def answer(self, answer: Answer) -> None:
        if not self._is_answered:
            self._is_answered = True
            self.server.happens(lambda: self.server.following.elected(self.question, answer))


class _End:
    """What one process has of it: ``Elector``."""

    def __init__(self, elector: SimulatedElector, server) -> None:
        self._elector, self._server = elector, server

    def read(self) -> tuple[Leadership | None, bool]:
        return self._elector.recorded, self._elector.is_held

    def replace(self, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        return self._elector.replace(self._server, old, new, takes_over=takes_over)

    def renew(self) -> bool:
        return self._elector.renew(self._server)

    def ask_to_end(self, leadership: Leadership) -> None:
        self._elector.end(leadership)

    def close(self) -> None:
        """Nobody ends in order here."""
