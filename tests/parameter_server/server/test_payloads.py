"""What a shard takes and gives where a job has a codec, message by message."""

import pytest
import torch
from support.shard_world import APPLY, AVERAGE, Worker, World, codes, push_all, spec, team, whole, world_of

from psengine.codecs.fp4 import Fp4
from psengine.codecs.int8 import Int8
from psengine.codecs.onebit import OneBit
from psengine.codecs.topk import TopK
from psengine.protocol.messages import ErrorCode, MessageType


def encode(codec, values, state=None):
    form = codec.payload_spec(values.numel(), values.dtype)
    payload = torch.empty(form.numel, dtype=form.dtype)
    codec.encode(values, payload, state)
    return payload


def decode(codec, payload, numel):
    values = torch.empty(numel)
    codec.decode(payload, values)
    return values


def averaging(codec):
    return {**AVERAGE, "compress": codec}


def stepping(codec: str, numel: int = 600) -> tuple[World, Worker]:
    world = World()
    (worker,) = team(world, 1, [spec(0, numel)], rule={**APPLY, "compress": codec})
    return world, worker


def weights_at(worker: Worker, numel: int = 600) -> torch.Tensor:
    return torch.frombuffer(bytearray(worker.pull(0).payload), dtype=torch.float32)[:numel].clone()


@pytest.mark.parametrize("held", [None, 1, 7])
def test_a_worker_that_holds_something_else_gets_whole_weights(held):
    _, worker = stepping("int8")
    gradient = encode(Int8(), torch.ones(600))
    for step, body in enumerate(({}, {"held": 1}, {} if held is None else {"held": held}), 1):
        worker.push(0, step, gradient, body=body)
    assert torch.equal(worker.updates()[3], weights_at(worker))


@pytest.mark.parametrize(
    ("payload", "got"),
    [
        (torch.zeros(4), "got 4 of torch.float32"),
        (torch.zeros(5, dtype=torch.bfloat16), "got 5 of torch.bfloat16"),
        (torch.zeros(8, dtype=torch.uint8), "got 8 of torch.uint8"),
    ],
)
def test_a_payload_of_another_form_is_refused_and_changes_nothing(payload, got):
    world, (worker,) = world_of(1, [spec(0, 4)], rule=averaging("bf16"), from_step=2, donor=0)
    before = whole(world)
    for kind in (MessageType.PUSH, MessageType.RESULT):
        (answer,) = worker.send(kind, key=0, sequence=1, payload=payload)
        assert answer.body["code"] == ErrorCode.BAD_MESSAGE
        assert "expected 4 elements" in answer.body["text"]
        assert got in answer.body["text"]
    assert whole(world) == before


def topk_payload(places: list[int], found: list[float]) -> torch.Tensor:
    parts = torch.tensor(places, dtype=torch.int32), torch.tensor(found)
    return torch.cat([part.view(torch.uint8) for part in parts])


@pytest.mark.parametrize(
    "places", [[-1, 3], [0, 600], [3, 3], [4, 3], [0, 2**31 - 1]], ids=["below", "above", "twice", "back", "far"]
)
def test_places_that_topk_does_not_write_are_refused_and_change_nothing(places):
    payload = topk_payload(places, [1.0, 2.0])
    world, worker = stepping("topk:ratio=0.003")
    before = whole(world)
    assert codes(worker.push(0, 1, payload)) == [ErrorCode.BAD_MESSAGE]
    assert whole(world) == before
    # Nor do they reach others as an average that a donor returns.
    world = World()
    workers = team(world, 2, [spec(0, 600)], rule=averaging("topk:ratio=0.003"))
    world.publish(workers, from_step=2, donor=0)
    workers[1].push(0, 1, topk_payload([0, 1], [1.0, 1.0]))
    before = whole(world)
    assert codes(workers[0].send(MessageType.RESULT, key=0, sequence=1, payload=payload)) == [ErrorCode.BAD_MESSAGE]
    assert whole(world) == before


def with_scale(numel: int, *scale: int) -> torch.Tensor:
    payload = torch.zeros(numel, dtype=torch.uint8)
    payload[: len(scale)] = torch.tensor(scale, dtype=torch.uint8)
    payload[len(scale)] = 0x77
    return payload


NAN, INFINITY = (0, 0, 0xC0, 0x7F), (0, 0, 0x80, 0x7F)


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        ("bf16", torch.full((600,), torch.nan, dtype=torch.bfloat16)),
        ("fp16", torch.full((600,), torch.inf, dtype=torch.float16)),
        ("int8", with_scale(780, *NAN)),
        ("int8", torch.full((780,), 0x7F, dtype=torch.uint8)),  # a scale that is a NaN of another kind
        ("fp4", with_scale(323, 255)),
        ("onebit", with_scale(136, *INFINITY)),
        ("topk:ratio=0.003", topk_payload([0, 599], [1.0, torch.inf])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_payload_that_is_not_finite_when_decoded_is_not_applied(codec, payload):
    _, worker = stepping(codec)
    before = weights_at(worker)
    (answer,) = worker.push(0, 1, payload)
    assert (answer.type, answer.body["refused"]) == (MessageType.UPDATED, "non_finite")
    assert torch.equal(weights_at(worker), before)


def test_a_view_without_members_takes_back_no_average_and_no_residual():
    gradients = [encode(OneBit(), torch.arange(600.0) + step) for step in range(2)]
    averages = []
    for are_out in (False, True):
        world, workers = world_of(2, [spec(0, 600)], rule=averaging("onebit"))
        for step, gradient in enumerate(gradients, 1):
            push_all(workers, step, gradient)
            if step == 1 and are_out:
                workers[1].take()
                world.publish([], forwarded_by=workers)
                world.publish(workers, from_step=2, donor=0)
                for worker in workers:
                    worker.resume()
                workers[1].push(0, 1, gradient)  # its answer was lost
        averages.append([*workers[1].updates().values()])
    (first, second), others = averages[0], averages[1]
    assert torch.equal(others[0], first)
    assert torch.equal(others[1], second)


@pytest.mark.parametrize("codec", [Int8(), Fp4(), OneBit(), TopK(ratio=0.1)], ids=repr)
def test_an_average_that_is_not_finite_leaves_the_servers_residual_as_it_was(codec):
    (worker,) = team(World(), 1, [spec(0, 600)], rule=averaging(repr(codec)))
    generator, state = torch.Generator().manual_seed(3), codec.make_state(600, torch.float32, torch.device("cpu"))
    for step in range(1, 6):
        values = torch.randn(600, generator=generator)
        if step == 3:
            values[17] = torch.inf
        payload = encode(codec, values)
        worker.push(0, step, payload)
        answer = worker.updates()[step]
        if step == 3:
            assert not decode(codec, answer, 600).isfinite().all()
        else:
            assert torch.equal(answer, encode(codec, decode(codec, payload, 600), state))


@pytest.mark.parametrize("compress", ["int9", "bf16:ratio=1", "bf16,ratio=1", ":"])
def test_a_codec_that_the_server_lacks_is_refused_and_makes_no_job(compress):
    world = World()
    worker = Worker(world, 0, rule={**AVERAGE, "compress": compress})
    assert worker.begin() == ErrorCode.RULE_MISMATCH
    assert "--plugins MODULE" in worker.take(MessageType.ERROR)[0].body["text"]
    assert world.shard.status().jobs == {}
