"""A chunk's rule through a whole shard: what counts, what is refused, and what nothing may change."""

from dataclasses import dataclass

import pytest
import torch
from support.shard_world import APPLY, MERGE, Worker, World, codes, push_all, spec, whole, world_of

from psengine.parameter_server.server.interfaces import Sender
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.protocol.frames import encode, payload_tensor
from psengine.protocol.layout import ChunkKind, job_number
from psengine.protocol.messages import ErrorCode, Message, MessageType


def test_non_finite_values_are_passed_on_and_counted():
    world, workers = world_of(2, [spec(0, 2)])
    workers[0].push(0, 1, torch.tensor([1.0, float("nan")]))
    workers[1].push(0, 1, torch.tensor([1.0, 1.0]))
    answer = workers[0].updates()[1]
    assert answer[0] == 1
    assert answer[1].isnan()
    assert world.shard.status().jobs["demo"].non_finite == 1


def test_who_lacks_more_than_the_last_step_has_to_take_state():
    world, workers = world_of(2, [spec()])
    world.publish(workers, from_step=5)
    assert codes(workers[0].push(0, 3, torch.ones(4))) == [ErrorCode.FENCED]
    assert workers[0].push(0, 4, torch.ones(4)) == []


def test_a_server_that_restarted_hears_from_a_worker_that_a_step_had_no_average():
    world, (donor, worker) = world_of(2, [spec()])
    world.publish([donor, worker], from_step=2, donor=0)
    worker.push(0, 1, None, body={"weight": 0.0})
    for contributors, expected in ((1, [ErrorCode.BAD_MESSAGE]), (0, [])):
        body = {"contributors": contributors}
        assert codes(donor.send(MessageType.RESULT, key=0, sequence=1, body=body)) == expected
    (answer,) = worker.take(MessageType.UPDATED)
    assert (answer.payload, answer.body["contributors"]) == (None, 0)


def test_deposited_values_do_not_come_back():
    world, (worker,) = world_of(1, [spec()])
    worker.ask(MessageType.STORE, key=0, payload=torch.full((4,), 3.0), version=6)
    world.start(8, world.shard.capture())
    world.publish([worker])
    assert worker.pull(0).body["code"] == ErrorCode.NOT_READY  # other shards may have newer ones


def fleet(size, kind=ChunkKind.PARAMETER, **options):
    """Workers of a job with one chunk of zeros."""
    return world_of(size, [spec(0, 6, kind=kind)], rule=APPLY | options)


def test_parameters_need_configure_first():
    world = World()
    worker = Worker(world, 0, rule=APPLY)
    worker.begin()
    worker.register(spec())
    world.publish([worker])
    worker.resume()
    before = whole(world)
    assert codes(worker.push(0, 1, torch.ones(4))) == [ErrorCode.NOT_READY]
    assert whole(world) == before


def test_a_floor_is_forgotten_with_the_run_that_reached_it():
    world, workers = fleet(2, max_staleness=0)
    push_all(workers, 1, torch.ones(6))
    world.release(workers, 1)
    world.publish(later := [Worker(world, rank, rule=workers[0].rule, incarnation=60 + rank) for rank in range(2)])
    for worker in later:
        worker.resume()
    assert later[0].push(0, 1, torch.ones(6), 2) == []


def test_what_was_computed_before_an_eviction_is_stale_under_a_bound():
    world, workers = fleet(2, max_staleness=1)
    push_all(workers, 1, torch.ones(6))
    world.publish(workers[:1])
    workers[0].push(0, 2, torch.ones(6), 2)
    world.publish(workers)
    workers[1].resume()
    world.release(workers, 2)
    (answer,) = workers[1].push(0, 2, torch.ones(6), 2)
    assert answer.body == {"refused": "stale"}
    assert answer.version == 3
    (answer,) = workers[1].push(0, 3, torch.ones(6), 3)
    assert answer.body == {}


def test_a_gradient_that_the_optimizer_refuses_leaves_the_compensation_as_it_was():
    world, (worker,) = fleet(1, delay_compensation=1.0, compensation_decay=0.9)
    worker.push(0, 1, torch.ones(6))
    before = whole(world)
    wrong = {"groups": [{"lr": -1.0}]}
    assert codes(worker.push(0, 2, torch.ones(6), 1, body=wrong)) != []
    assert whole(world) == before


def lend(world, worker):
    """An answer that a socket still reads."""
    fields = {"job": job_number(worker.job), "worker": worker.worker, "incarnation": worker.incarnation}
    values = {"dtype": torch.float32, "numel": 6, "payload": torch.ones(6)}
    message = Message(MessageType.PUSH, key=0, sequence=1, view=worker.view, **fields, **values)
    (answer,) = world.shard.apply(message, Sender(worker.route, ""))
    lent = encode(answer.message)[-1]
    answer.place.hold(lent)
    return lent


@pytest.mark.parametrize("how", ["push", "store", "buffer"])
def test_lent_weights_stay_as_they_are(how):
    kind = ChunkKind.BUFFER if how == "buffer" else ChunkKind.PARAMETER
    world, (first, second) = fleet(2, kind=kind)
    lent = lend(world, first)
    before = bytes(lent)
    if how == "store":
        second.ask(MessageType.STORE, key=0, payload=torch.full((6,), 9.0))
    else:
        second.push(0, 1, torch.full((6,), 9.0))
    assert bytes(lent) == before
    assert bytes(encode(second.ask(MessageType.PULL, key=0))[-1]) != before


def test_what_does_not_count_is_answered_at_once_and_not_waited_for():
    world, workers = world_of(2, [spec()], rule=MERGE)
    (refused,) = workers[0].push(0, 1, torch.full((4,), torch.nan), body={"weight": 8.0})
    assert refused.body["refused"] == "non_finite"
    assert payload_tensor(refused).tolist() == [0.0] * 4
    (idle,) = workers[0].push(0, 2, None)
    assert idle.body["refused"] == "abstained"
    workers[1].push(0, 1, torch.ones(4), body={"weight": 8.0})
    world.release(workers, 1, contributors=((0, 1), (1, 1)))
    assert list(workers[1].updates()) == [1]


def test_a_decided_merge_takes_nothing_of_who_gets_a_rank_later():
    """A coordinator that restarted has forgotten step 1, and gives it to the newcomer once more."""
    world, workers = world_of(2, [spec()], rule=MERGE)
    workers[1].push(0, 1, torch.ones(4))
    world.release(workers, 1, contributors=((0, 1), (1, 1)))
    newcomer = Worker(world, 0, rule=workers[0].rule, incarnation=60)
    world.publish([newcomer, workers[1]])
    assert list(workers[1].updates()) == [1]
    newcomer.resume()
    assert newcomer.push(0, 1, torch.full((4,), 9.0)) == []


def test_msgspec_learns_what_a_rule_keeps_before_several_shards_restore_it():
    """Two threads that meet a type first at the same moment crash it."""

    @dataclass
    class Kept:
        number: int

    class Rule(ChunkRule):
        kept = {"known": dict[int, Kept]}

    assert hasattr(Kept, "__msgspec_cache__")
