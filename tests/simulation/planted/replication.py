"""Bugs of servers that have followers: what a stream says, what a copy has, who may lead, whom clients believe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.replication import succession
from psengine.parameter_server.server.replication.election import ElectorError, Replace
from psengine.parameter_server.server.replication.following import Following
from psengine.parameter_server.server.replication.stream import Stream
from psengine.parameter_server.server.replication.succession import Role, Succession
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from simulation.planted import registry
from simulation.planted.registry import OF_FOLLOWERS, constant, then


def plant(name: str, *arguments: Any, **options: Any) -> Any:
    """As ``registry.plant``: it may be found where servers have followers."""
    OF_FOLLOWERS.add(name)
    return registry.plant(name, *arguments, **options)


# ---- what a stream says ----------------------------------------------------------------------------------------------

plant("an update is acknowledged before the follower has it", Stream, "durable", value=property(lambda self: self.end))
plant("nobody waits for a follower that is lost and still recorded", Stream, "lose", then(Stream.release))


@plant("a follower is said to have what was sent", Stream, "kept")
def _have_all_sent(kept, self, route, number, now_s):
    kept(self, route, number if number < self._begin else self.end, now_s)


@plant("some records do not go to the follower", Stream, "append")
def _leave_out(append, self, record):
    if record.kind is not RecordKind.MESSAGE or self.end % 4:
        append(self, record)


# ---- what a copy has -------------------------------------------------------------------------------------------------


@plant("a copy lacks what coordinators knew", ShardThread, "take_copy")
def _know_nothing(take, self, *given):
    take(self, *given)
    self.known = {}


@plant("a follower ignores what coordinators decide", Shard, "replay")
def _ignore_decisions(replay, self, record, *arguments):
    if record.kind is not RecordKind.COORDINATOR:
        replay(self, record, *arguments)


@plant("the coordinator of a takeover begins with nothing", ShardThread, "lead")
def _lead_without(lead, self, *arguments):
    self.known = {}
    lead(self, *arguments)


EARLY = "a follower says that it has what it cannot apply"


@plant(EARLY, ShardThread, "_follow")
def _follow_with_any_limits(follow, self, received, message):
    message.body |= self.shard.settings.likeness
    follow(self, received, message)


def _take_in_replay(self, *arguments):
    self._is_replaying, is_replaying = False, self._is_replaying
    try:
        take_memory(self, *arguments)
    finally:
        self._is_replaying = is_replaying


take_memory = Shard._take_memory
registry.BESIDE[EARLY] = [
    (Shard, "_take_memory", _take_in_replay),
    (Following, "_kept", lambda self, copy, kept: copy.next),
]


@plant("a log is replayed only under the tier of its server", Shard, "_begin")
def _check_tier_again(begin, self, message, sender):
    if self._is_replaying:
        replace(self.settings, durability="log").check_tier(message.body["job"], message.body["rule"])
    begin(self, message, sender)


# ---- who may lead ----------------------------------------------------------------------------------------------------

plant("whoever has a copy takes over", Succession, "_may_take_over", constant(True))


@plant("a server leads with any log", Succession, "_may_take_over")
def _lead_with_any(may, self):
    return may(self) or bool(self.own.previous and not self._is_copy)


@plant("a takeover keeps the term", Succession, "_as_candidate")
def _keep_term(ask, self, **facts):
    question = ask(self, **facts)
    if not isinstance(question, Replace) or question.old is None:
        return question
    return Replace(question.old, msgspec.structs.replace(question.new, term=question.old.term), question.takes_over)


@plant("a change without an answer is taken for one that was made", Succession, "heard")
def _believe_open(heard, self, question, answer, now_s):
    is_open = isinstance(answer, ElectorError) and isinstance(question, Replace)
    heard(self, question, True if is_open else answer, now_s)


@plant("a leader goes on when another is recorded", Succession, "_learn")
def _stay(learn, self, recorded):
    role = self.role
    learn(self, recorded)
    self.role = role if role is Role.LEADING else self.role


plant("a leader's next life is by its clock alone", succession, "later_epoch", lambda later, drawn, *former: drawn)

# ---- whom clients believe --------------------------------------------------------------------------------------------

plant("a client does not look for the other one", KnownServer, "next_to", lambda next_to, self, address, shard: address)
