"""What becomes of jobs that nobody works on any more: their place, their memory, their snapshot, their events."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch
from support.server_process import Peer, running_server
from support.shard_world import APPLY, ErrorCode, Worker, World, codes, spec, team, world_of
from support.waiting import eventually

from psengine.parameter_server.server.core.events import MAX_EVENTS, SNAPSHOT_FAILED_REPEAT_S, EventLog
from psengine.parameter_server.server.core.shard_jobs import MAX_JOBS
from psengine.parameter_server.server.core.surroundings import Clocks
from psengine.parameter_server.server.status.actions import Actions
from psengine.protocol.messages import MessageType

TOKEN = "correct-horse-battery-staple"
LEASE_S = 5.0


def finished(world, job, *, numel=16, rule=None):
    """A job whose only worker has said goodbye."""
    more = {} if rule is None else {"rule": rule}
    worker = Worker(world, 0, job=job, **more)
    assert worker.hello() == "initialise"
    answer = worker.register(spec(0, numel))
    if answer.type is not MessageType.OK:
        return codes([answer])
    worker.seal([spec(0, numel)])
    worker.push(0, 1, torch.ones(numel))
    worker.send(MessageType.BYE)
    return []


# ---- memory of jobs that are over ------------------------------------------------------------------------------


def test_jobs_that_average_one_after_another_need_no_more_memory_than_one():
    world = World(max_memory_bytes=200)
    for number in range(10):
        assert finished(world, f"job{number}") == []


def test_values_of_others_are_not_given_up_for_memory():
    world = World(max_memory_bytes=200, lease_s=LEASE_S)
    (living,) = team(world, 1, [spec(0, 16)], job="living")
    living.push(0, 1, torch.ones(16))
    assert finished(world, "applied", rule=APPLY) == []
    newcomer = Worker(world, 0, job="new")
    newcomer.hello()
    # A lease after its worker went silent the averaging job is over; the other one's values are somebody's still.
    assert codes([newcomer.register(spec(0, 32))]) == [ErrorCode.MEMORY]
    world.advance(LEASE_S + 0.5, newcomer)
    assert codes([newcomer.register(spec(0, 32))]) == [ErrorCode.MEMORY]
    world.advance(LEASE_S + 0.5, newcomer)
    assert newcomer.register(spec(0, 32)).type is MessageType.OK
    assert set(world.shard.status(world.now_s).jobs) == {"applied", "new"}


# ---- jobs that are forgotten by hand ---------------------------------------------------------------------------


def test_one_job_too_many_is_told_how_to_make_room():
    world = World(codec=False)
    for number in range(MAX_JOBS):
        finished(world, f"job{number}", numel=1, rule=APPLY)
    late = Worker(world, 0, job="late", rule=APPLY)
    assert late.hello() == ErrorCode.MEMORY
    (refused,) = late.take()
    assert f"expected at most {MAX_JOBS}, got one more, 'late'" in refused.body["text"]
    assert "psengine admin forget --job NAME" in refused.body["text"]
    world.shard.forget("job7")
    assert late.hello() == "initialise"


def test_of_a_forgotten_job_nothing_is_left():
    world, (worker,) = world_of(1, [spec(0, 4)], rule=APPLY)
    worker.push(0, 1, torch.ones(4))
    world.shard.durable.capture()
    world.shard.durable.note(3)
    assert (world.shard.worker_count("demo"), world.shard.worker_count("other")) == (1, None)
    worker.send(MessageType.BYE)
    assert world.shard.worker_count("demo") == 0
    world.shard.forget("demo")
    world.shard.forget("demo")
    assert world.shard.worker_count("demo") is None
    assert world.shard.durable.has_changed()
    assert (world.shard.durable.capture(), world.shard.jobs.memory_bytes()) == ([], 0)
    successor = Worker(world, 0, rule=APPLY)
    assert successor.hello() == "initialise"
    (welcome,) = successor.take()
    assert welcome.body["durable_version"] is None


def busy(job):
    raise FutureTimeoutError


@pytest.mark.parametrize(
    ("forget", "code", "text"),
    [
        (lambda job: 0, 200, "'a b' is forgotten"),
        (lambda job: 2, 409, r"'a b' is in use (expected no workers, got 2)"),
        (lambda job: None, 404, "There is no job 'a b'"),
        (busy, 503, "ask again"),
    ],
)
def test_the_action_says_what_became_of_the_job(forget, code, text):
    actions = Actions(
        True, snapshot=None, evict=lambda *_: False, forget=forget, drain=lambda: 0, shut_down=lambda: None
    )
    assert actions.refusal("forget", {"job": "a b"}, may_act=True) is None
    answered, content = actions.perform("forget", {"job": "a b"})
    assert answered == code
    assert text in (content.get("text") or content["error"])
    assert actions.refusal("forget", {"job": "a b"}, may_act=False)[0] == 401
    assert actions.refusal("forget", {}, may_act=True)[0] == 400


def act(url, path):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", f"/actions/{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


def test_a_forgotten_job_is_gone_from_every_shard_and_does_not_come_back(tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    options = {"shards": 2, "snapshot_dir": tmp_path / "s", "snapshot_interval_s": 0.0}
    with running_server(status_token=token, **options) as server:
        peers = [Peer(address) for address in server.addresses]
        for peer in peers:
            peer.make_job(torch.zeros(10))
        assert act(server.status_url, "snapshot")[0] == 200
        code, answer = act(server.status_url, "forget?job=job")
        assert code == 409
        assert "expected no workers, got 1" in answer["error"]
        for peer in peers:
            assert peer.request("BYE").type.name == "OK"
        assert act(server.status_url, "forget?job=other")[0] == 404
        assert len(server.job("job")) == 2
        assert act(server.status_url, "forget?job=job")[0] == 200
        assert server.status()["jobs"] == {}
        eventually(lambda: server.status()["snapshot"]["generation"] == 2)
        server.kill()
        for peer in peers:
            peer.__exit__()
    with running_server(**options) as server:
        assert server.status()["jobs"] == {}


# ---- what people are told --------------------------------------------------------------------------------------


def test_a_disk_that_is_full_for_days_leaves_room_for_other_events():
    now_s = [0.0]
    log = EventLog(Clocks(wall_s=lambda: now_s[0], measure_s=lambda: now_s[0]))
    log.note("evicted", "silent for 6.0 s, longer than its lease", job="a", worker=1)
    for generation in range(2, 2 + 3 * MAX_EVENTS):
        now_s[0] += 60.0
        log.note("snapshot_failed", f"a snapshot was not written: generation-{generation:08d}: disk full")
        log.note("snapshot_failed", "a snapshot was not written: no answer")
    events = log.events()
    assert events[0].kind == "evicted"
    full = [event.text for event in events if "disk full" in event.text]
    assert len(full) == 3 * MAX_EVENTS * 60 / SNAPSHOT_FAILED_REPEAT_S
    assert full[0].endswith("generation-00000002: disk full")
    assert full[1].endswith("generation-00000062: disk full; 59 like it before")
