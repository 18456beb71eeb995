"""Orders to a server whose shards are busy."""

from __future__ import annotations

from support.shard_world import World, spec, team

from psengine.parameter_server.server import shard_group
from psengine.parameter_server.server.admin import Orders
from psengine.parameter_server.server.daemon import Server
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.shard_group import ShardGroup
from psengine.parameter_server.server.transport.shard_thread import ShardThread


def orders(evict=lambda *_: False, drain=lambda: 0):
    return Orders(snapshot=None, evict=evict, forget=lambda job: None, drain=drain)


def test_a_busy_shard_ends_the_lease_later(monkeypatch):
    """The deadline is one for all shards; who missed it still does what it was asked."""
    monkeypatch.setattr(shard_group, "ANSWER_DEADLINE_S", 0.05)
    shards = ShardGroup()
    worlds = [World(), World()]
    shards.threads = [ShardThread(world.shard, None, None, None) for world in worlds]  # not started: busy
    for world in worlds:
        team(world, 1, [spec(0, 4)])
    assert "busy" in orders(shards.evict).perform({"action": "evict", "job": "demo", "worker": 0})
    for thread in shards.threads:
        monkeypatch.setattr(thread, "_send", lambda outgoing: None)
        thread._answer_asked()
    assert [world.shard.jobs.member_count for world in worlds] == [0, 0]


def test_a_drain_is_no_question_that_a_busy_shard_leaves_open(monkeypatch):
    monkeypatch.setattr(shard_group, "ANSWER_DEADLINE_S", 0.05)
    server = Server(ServerSettings())
    server._shards.threads = [ShardThread(World().shard, None, None, None)]  # not started: busy
    for _ in range(2):
        assert "busy" in orders(drain=server._drain).perform({"action": "drain"})
        assert server._is_draining
    (thread,) = server._shards.threads
    thread._answer_asked()
    assert thread.shard.is_closed
    assert [event.kind for event in server._events.events()] == ["draining"]
