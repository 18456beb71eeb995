"""What a shard takes and gives where a job has a codec, message by message."""

from __future__ import annotations

import pytest
import torch
from support import trial_codecs
from support.int8_codec import Int8
from support.shard_world import APPLY, AVERAGE, ErrorCode, Worker, World, codes, spec, team, world_of
from support.top_one_codec import TopOne

from psengine.codecs.base import Codec
from psengine.codecs.cast import Bfloat16, Float16
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import MessageType

trial_codecs.register()


def encode(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    form = codec.payload_spec(values.numel(), values.dtype)
    payload = torch.empty(form.numel, dtype=form.dtype)
    codec.encode(values, payload)
    return payload


def decode(codec: Codec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    values = torch.empty(numel)
    codec.decode(payload, values)
    return values


def averaging(codec: str, **more: object) -> dict[str, object]:
    return {**AVERAGE, "compress": codec, **more}


@pytest.mark.parametrize("codec", [Bfloat16(), Float16(), Int8()], ids=repr)
def test_an_average_is_that_of_decoded_values_and_everybody_gets_the_same_payload(codec):
    workers = team(World(), 2, [spec(0, 6)], rule=averaging(codec.name))
    gradients = [torch.randn(6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for worker, gradient in zip(workers, gradients, strict=True):
        worker.push(0, 1, encode(codec, gradient))
    answers = [worker.updates()[1] for worker in workers]
    decoded = [decode(codec, encode(codec, gradient), 6) for gradient in gradients]
    expected = encode(codec, (decoded[0] + decoded[1]) / 2)
    assert all(torch.equal(answer, expected) for answer in answers)
    assert answers[0].dtype is expected.dtype


def test_gradients_alone_are_encoded():
    """A codec that does not cover a dtype, buffers, usage maps: values."""
    kinds = [spec(0, 4, torch.complex64), spec(1, 4, kind=ChunkKind.BUFFER), spec(2, 4, torch.int32, ChunkKind.USAGE)]
    (worker,) = team(World(), 1, kinds, rule=averaging("int8"))
    for one in kinds:
        values = torch.arange(4).to(one.dtype)
        worker.push(one.key, 1, values)
        assert torch.equal(worker.updates()[1], values)


def test_a_codec_with_a_residual_gets_values_as_answers():
    workers = team(World(), 2, [spec(0, 4)], rule=averaging("top1"))
    for worker in workers:
        worker.push(0, 1, encode(TopOne(), torch.tensor([1.0, 0.0, -5.0, 2.0])))
    assert [worker.updates()[1].tolist() for worker in workers] == [[0, 0, -5, 0]] * 2


def test_weights_are_encoded_and_what_is_pulled_is_not():
    (worker,) = team(World(), 1, [spec(0, 4)], rule={**APPLY, "compress": "bf16"})
    worker.configure(0, 4)
    worker.push(0, 1, encode(Bfloat16(), torch.tensor([1.01, 2.02, 3.03, 4.04])))
    weights = worker.updates()[1]
    pulled = worker.pull(0)
    assert weights.dtype is torch.bfloat16
    assert pulled.dtype is torch.float32
    assert torch.equal(torch.frombuffer(bytearray(pulled.payload), dtype=torch.float32).bfloat16(), weights)


@pytest.mark.parametrize(
    ("payload", "got"),
    [
        (torch.zeros(4), "got 4 of torch.float32"),
        (torch.zeros(5, dtype=torch.bfloat16), "got 5 of torch.bfloat16"),
        (torch.zeros(8, dtype=torch.uint8), "got 8 of torch.uint8"),
    ],
)
def test_a_payload_of_another_form_is_refused_and_changes_nothing(payload, got):
    world, (worker,) = world_of(1, [spec(0, 4)], rule=averaging("bf16"))
    before = world.state_hash()
    for kind in (MessageType.PUSH, MessageType.RESULT):
        (answer,) = worker.send(kind, key=0, sequence=1, payload=payload)
        assert answer.body["code"] == ErrorCode.BAD_MESSAGE
        assert "expected 4 elements" in answer.body["text"]
        assert got in answer.body["text"]
    assert world.state_hash() == before


def test_bytes_that_the_codec_does_not_make_are_refused_and_change_nothing():
    world, (worker,) = world_of(1, [spec(0, 4)], rule=averaging("top1"))
    before = world.state_hash()
    assert codes(worker.push(0, 1, torch.tensor([17.0, 1.0], dtype=torch.float64))) == [ErrorCode.BAD_MESSAGE]
    assert world.state_hash() == before


def test_who_is_late_is_told_so_again():
    first, second, third = team(World(), 3, [spec(0, 4)], rule=averaging("bf16", quorum=2))
    payload = encode(Bfloat16(), torch.ones(4))
    for worker in (first, second, third):
        worker.push(0, 1, payload)
    bodies = [worker.take(MessageType.UPDATED)[0].body for worker in (first, second, third)]
    assert bodies == [{"contributors": 2}, {"contributors": 2}, {"contributors": 2, "late": True}]
    assert third.repeat(0, 1)[0].body == {"contributors": 2, "late": True}
    assert first.repeat(0, 1)[0].body == {"contributors": 2}


def test_an_average_that_a_worker_returns_after_a_restart_travels_as_it_was():
    """Decoded and encoded again it might be another payload, and the replicas would differ."""
    world, codec = World(), Int8()
    workers = team(world, 2, [spec(0, 5)], rule=averaging("int8"))
    for worker in workers:
        worker.push(0, 1, encode(codec, torch.randn(5, generator=torch.Generator().manual_seed(worker.rank))))
    told = workers[0].updates()[1]
    world.restart(workers, [spec(0, 5)])
    payload = encode(codec, torch.ones(5))
    workers[0].push(0, 2, payload)
    workers[1].push(0, 1, payload)
    (wanted,) = workers[0].take(MessageType.RESULT_WANTED)
    workers[0].send(MessageType.RESULT, key=0, sequence=wanted.sequence, payload=told, body={"contributors": 2})
    assert torch.equal(workers[1].updates()[1], told)


def test_a_snapshot_keeps_the_codec():
    world = World()
    rule = {**APPLY, "compress": "bf16"}
    (worker,) = team(world, 1, [spec(0, 4)], rule=rule)
    worker.configure(0, 4)
    world.start(8, world.shard.durable.capture())
    plain = Worker(world, 0, rule=APPLY)
    assert plain.hello() == ErrorCode.RULE_MISMATCH
    assert worker.hello(worker.incarnation) == "ready"
    worker.push(0, 1, encode(Bfloat16(), torch.ones(4)))
    assert worker.updates()[1].dtype is torch.bfloat16


@pytest.mark.parametrize("compress", ["int9", "bf16:ratio=1", "bf16,ratio=1", ":"])
def test_a_codec_that_the_server_lacks_is_refused_and_makes_no_job(compress):
    world = World()
    worker = Worker(world, 0, rule={**AVERAGE, "compress": compress})
    assert worker.hello() == ErrorCode.RULE_MISMATCH
    assert "--plugins MODULE" in worker.take(MessageType.ERROR)[0].body["text"]
    assert world.shard.status(0.0).jobs == {}
