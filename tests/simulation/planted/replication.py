"""Bugs of servers that have followers: what a stream says, what a copy has, who may lead, whom clients believe."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.replication.election import ElectorError, Replace
from psengine.parameter_server.server.replication.stream import Stream
from psengine.parameter_server.server.replication.succession import Role, Succession
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.transport.shard_thread import HeldAnswers, ShardThread
from simulation.planted import registry
from simulation.planted.registry import OF_FOLLOWERS, Bug, constant, then, with_patch


def plant(name: str, *arguments: Any, **options: Any) -> Any:
    """As ``registry.plant``: it may be found where servers have followers."""
    OF_FOLLOWERS.add(name)
    return registry.plant(name, *arguments, **options)


# ---- what a stream says ----------------------------------------------------------------------------------------------

plant("an update is acknowledged before the follower has it", Stream, "durable", value=property(lambda self: self.end))
plant("nobody waits for a follower that is lost and still recorded", Stream, "lose", then(Stream.release))
plant("a stream begins late", ShardThread, "_follow", with_patch(ShardThread, "_look_at_sinks"))
plant("an older WELCOME comes after a newer one", HeldAnswers, "holds", constant(False))


@plant("a follower is said to have one record more", Stream, "kept")
def _have_one_more(kept, self, route, number, now_s):
    kept(self, route, min(number + 1, self.end), now_s)


@plant("a follower has caught up before answers wait for it", Stream, "open")
def _catch_up_at_once(open_, self, follower, *arguments):
    open_(self, follower, *arguments)
    self._mark = math.inf
    self._tell(follower, "")


# ---- what a copy has -------------------------------------------------------------------------------------------------


@plant("a copy lacks what coordinators knew", ShardThread, "take_copy")
def _know_nothing(take, self, state):
    take(self, state)
    self.known = {}


def _ignoring(kind: RecordKind) -> Bug:
    return lambda replay, self, record, *arguments: None if record.kind is kind else replay(self, record, *arguments)


plant("a follower ignores what coordinators decide", Shard, "replay", _ignoring(RecordKind.COORDINATOR))
plant("the log has nothing of a takeover", Shard, "replay", _ignoring(RecordKind.LIFE))
plant("a takeover goes on as if nothing had been", Shard, "begin_life", constant(None))


@plant("the coordinator of a takeover begins with nothing", ShardThread, "lead")
def _lead_without(lead, self, *arguments):
    self.known = {}
    lead(self, *arguments)


# ---- who may lead ----------------------------------------------------------------------------------------------------

plant("whoever has a copy takes over", Succession, "_may_take_over", constant(True))
_MAY_NOT = with_patch(Succession, "_may_take_over", return_value=False)
plant("a copy is thrown away that may have to lead", Succession, "begin_copy", _MAY_NOT)


@plant("a server leads with any log", Succession, "_may_take_over")
def _lead_with_any(may, self):
    return may(self) or bool(self.own.previous and not self._is_copy)


@plant("a takeover keeps the term", Succession, "_as_candidate")
def _keep_term(ask, self, **facts):
    question = ask(self, **facts)
    if not isinstance(question, Replace) or question.old is None:
        return question
    return Replace(question.old, msgspec.structs.replace(question.new, term=question.old.term), question.takes_over)


@plant("a leader goes on in a term that has ended", Succession, "_learn")
def _go_on(learn, self, recorded):
    if self.role is not Role.LEADING or recorded.members[0] == self.own:
        learn(self, recorded)


@plant("a change without an answer is taken for one that was not made", Succession, "heard")
def _forget_open(heard, self, question, answer, now_s):
    heard(self, question, answer, now_s)
    if isinstance(answer, ElectorError):
        self._open.clear()


@plant("a change without an answer is taken for one that was made", Succession, "heard")
def _believe_open(heard, self, question, answer, now_s):
    is_open = isinstance(answer, ElectorError) and isinstance(question, Replace)
    heard(self, question, True if is_open else answer, now_s)


# ---- whom clients believe --------------------------------------------------------------------------------------------

plant("a client believes who leads no more", KnownServer, "objection", constant(""))
plant("a client does not look for the other one", KnownServer, "next_to", lambda next_to, self, address, shard: address)
