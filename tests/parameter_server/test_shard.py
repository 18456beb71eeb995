"""Shards: who may say what, views, answers that go to the newest connection, and the log's replay."""

import pytest
import torch
from support.shard_world import (
    APPLY,
    AVERAGE,
    KEY,
    SGD,
    Worker,
    World,
    codes,
    rule_of,
    spec,
    team,
    world_of,
)

from psengine.parameter_server.server.shard.shard import LEAST_ROLE, MAX_JOBS, Role
from psengine.protocol.frames import decode
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import View, message_of

ONES = torch.ones(4)


@pytest.mark.parametrize(
    "kind", [kind for kind, role in LEAST_ROLE.items() if role > Role.READER], ids=lambda kind: kind.name
)
def test_who_is_in_no_view_changes_nothing(kind):
    world, (member,) = world_of(1, [spec()], rule=APPLY, values={0: ONES})
    before = world.shard.changes
    bodies = {
        MessageType.REGISTER: {"kind": "parameter", "segments": spec().to_body()["segments"]},
        MessageType.CONFIGURE: {"optimizer": "SGD", "groups": [SGD], "runs": [[0, 4, 0]]},
    }
    message = Message(kind, job_number("demo"), sequence=1, key=0, body=bodies.get(kind, {}), view=1)
    if kind not in (MessageType.WAITS, MessageType.CONFIGURE):
        message.dtype, message.numel, message.payload = torch.float32, 4, ONES
    for worker, incarnation, code in (
        (0xFFFFFFFF, 0, ErrorCode.BAD_MESSAGE),
        (0, member.incarnation + 1, ErrorCode.FENCED),
        (5, 55, ErrorCode.FENCED),
    ):
        message.worker, message.incarnation = worker, incarnation
        ((_, answer),) = world.deliver(b"stranger", message)
        assert codes([answer]) == [code]
    assert world.shard.changes == before


def test_who_was_put_out_may_write_no_more_with_the_key():
    world, workers = world_of(2, [spec()], rule=APPLY, values={0: ONES})
    world.publish(workers[:1])
    assert workers[1].begin()["chunks"] == 1
    assert codes(workers[1].send(MessageType.STORE, key=0, payload=5 * ONES)) == [ErrorCode.FENCED]
    assert torch.equal(rule_of(world).read()[1], ONES)


def test_a_worker_is_known_by_its_key_too():
    rule = {**APPLY, "delay_compensation": 1.0}
    world, (member,) = world_of(1, [spec()], rule=rule)
    before = world.shard.changes
    member.user_id = "somebody"
    member.connect()
    member.resume()
    assert codes(member.push(0, 1, ONES)) == [ErrorCode.FENCED]
    assert member.pull(0).type is MessageType.VALUES  # but not as this worker's base
    assert world.shard.changes == before


@pytest.mark.parametrize(
    "kind", sorted({*MessageType} - LEAST_ROLE.keys() - {MessageType.RESUME}), ids=lambda kind: kind.name
)
def test_nobody_speaks_for_the_server(kind):
    _, (member,) = world_of(1, [spec()], rule=APPLY)
    answers = member.send(kind, key=0, sequence=1, codec=False)
    assert codes(answers) == [ErrorCode.BAD_MESSAGE]


def test_nobody_reads_or_pushes_before_the_first_view():
    world = World()
    registrar = Worker(world, 0, rule=APPLY)
    assert registrar.begin()["chunks"] == 0
    registrar.register(spec(), ONES)
    registrar.configure(0, 4)
    assert codes([Worker(world).pull(0)]) == [ErrorCode.NOT_READY]
    assert codes(registrar.push(0, 1, ONES)) == [ErrorCode.NOT_MEMBER]
    assert registrar.begin()["chunks"] == 1  # on another connection, say
    world.publish([registrar])
    registrar.resume()
    assert registrar.push(0, 1, ONES)[0].type is MessageType.UPDATED


def test_a_later_registration_takes_the_place_of_one_that_nobody_is_at_work_with():
    world, (member,) = world_of(1, [spec()], rule=APPLY)
    other, key = Worker(world, 0, incarnation=99, rule=APPLY), bytes(32)
    answer = other.send(
        MessageType.RESUME, body={"job": "demo", "rule": APPLY, "registration": 2, "key": key, "place": [0, 0, 1]}
    )[0]
    assert answer.body["code"] == ErrorCode.FENCED
    assert "psengine admin forget --job demo" in answer.body["text"]
    member.connect()
    assert other.begin(1, key=key)["registration"] == 2  # another lead has drawn the same number
    assert other.register(spec(), ONES).body["code"] == ErrorCode.FENCED
    assert other.begin(2)["chunks"] == 1  # who has the key goes on
    assert other.begin(3, key=key)["chunks"] == 0
    assert Worker(world).pull(0).type is MessageType.VALUES  # another shard may refuse it yet
    assert codes(other.push(0, 1, ONES)) == [ErrorCode.NOT_MEMBER]
    other.register(spec(), ONES)
    assert world.shard.jobs[job_number("demo")].view is None
    assert member.resume()["registration"] == 4  # its lead may be the same, and has lost the job
    body = {"job": "demo", "rule": APPLY, "registration": 1, "key": KEY, "place": [1, 2, 2], "open": []}
    assert codes(member.send(MessageType.RESUME, body=body)) == [ErrorCode.OTHER_SERVERS]


def test_a_job_may_not_ask_for_more_than_the_server_keeps():
    worker = Worker(World(), 0, rule={**APPLY, "durability": "log"})
    assert worker.begin() == ErrorCode.RULE_MISMATCH


def test_a_view_is_signed():
    world, (member,) = world_of(1, [spec()])
    forged = message_of(View(9, 1, (), (7,)), bytes(32), job_number("demo"))
    assert codes(member.send(MessageType.VIEW, body=forged.body)) == [ErrorCode.BAD_MESSAGE]
    assert world.shard.jobs[job_number("demo")].view.number == 1


def test_an_ending_server_takes_no_connections():
    world, (member,) = world_of(1, [spec()])
    world.shard.is_draining = True
    assert member.resume() == ErrorCode.SHUTTING_DOWN


def test_of_averages_a_log_has_who_takes_part_and_no_gradients():
    world, records = World(), []
    world.shard.append = records.append
    workers = team(world, 2, [spec()])
    for worker in workers:
        worker.push(0, 1, ONES)
    kinds = [decode([bytes(frame) for frame in record.frames]).type for record in records]
    assert kinds == [MessageType.RESUME, MessageType.REGISTER, MessageType.VIEW]


def finished(world, name, rule=AVERAGE, numel=16):
    """A job whose only worker has left; the code of what was refused."""
    worker = Worker(world, 0, job=name, rule=rule)
    worker.begin()
    answer = worker.register(spec(0, numel))
    if answer.type is MessageType.OK:
        world.publish([worker])
        world.publish([], forwarded_by=[worker])
    worker.connect()
    return codes([answer])


def test_averages_that_are_over_give_their_memory_back_and_weights_do_not():
    world = World(max_memory_bytes=200)
    for number in range(10):
        assert finished(world, f"job{number}") == []
    assert finished(world, "weights", APPLY) == []
    assert finished(world, "much", numel=32) == []
    assert finished(world, "too much", numel=40) == [ErrorCode.MEMORY]
    assert "weights" in world.shard.status().jobs
    assert [kind for kind, *_ in world.events] == ["memory"]


def test_one_job_too_many_is_told_how_to_make_room():
    world = World()
    for number in range(MAX_JOBS):
        finished(world, f"job{number}", APPLY)
    worker = Worker(world, 0, job="one more")
    assert worker.begin() == ErrorCode.MEMORY
    assert "psengine admin forget" in worker.take()[-1].body["text"]
    assert world.shard.drop(job_number("job7"))
    assert not world.shard.drop(job_number("job7"))
    assert worker.begin()["chunks"] == 0
