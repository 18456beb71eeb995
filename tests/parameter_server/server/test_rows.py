"""Tables at servers: rows step, are refused, go and come back; the twin is one table in this process."""

import math

import pytest
import torch
from support.shard_world import APPLY, AVERAGE, MERGE, Worker, World, codes, spec, table, team, world_of

from psengine.errors import SnapshotError
from psengine.kernels.row_table import part_of
from psengine.parameter_server.server.durability.restoring import place_into, recover
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.snapshots.files import ServerState
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.frames import decode, encode
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment, first_difference
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, ErrorCode, Message, MessageType
from psengine.protocol.rows import pack_rows, unpack_rows
from psengine.protocol.views import Release


def ids_of(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def kept(shard):
    """All rows that exist, by chunk: (version, id -> (row, state, stamp))."""
    found = {}
    for job in shard.capture():
        for chunk in job.chunks:
            names = ("ids", "values", "states", "stamps")
            ids, values, states, stamps = (chunk.tensors[f"rows/{name}"].tolist() for name in names)
            rows = zip(values, states, stamps, strict=True)
            found[chunk.key] = chunk.meta["version"], dict(zip(ids, rows, strict=True))
    return found


def test_a_row_that_is_not_finite_is_named_and_refused_or_passed_on():
    rows = torch.ones(3, 4)
    rows[1, 2] = math.nan
    world, (worker,) = world_of(1, [table()], rule=APPLY)
    before = kept(world.shard)
    (answer,) = worker.push_rows(0, 1, ids_of(3, 8, 9), rows)
    assert answer.body == {"refused": "non_finite", "row": 8}
    assert kept(world.shard) == before
    worker.connect()
    worker.resume([(0, 1)])
    assert worker.take(MessageType.UPDATED)[0].body == {"refused": "non_finite", "row": 8}

    world, (worker,) = world_of(1, [table()], rule=MERGE | {"quorum": 1})
    worker.push_rows(0, 1, ids_of(3, 8, 9), rows)
    world.release([worker], 1, contributors=((0, 1),))
    assert worker.take(MessageType.UPDATED)[0].body == {}
    assert worker.pull_rows(0, ids_of(3, 8, 9)).isnan().sum() == 1


def test_a_merge_that_overflows_may_name_who_has_left():
    world, workers = world_of(2, [table()], rule=MERGE | {"quorum": 2})
    for worker in workers:
        worker.push_rows(0, 1, ids_of(), torch.ones(0, 4), overflow=True)
    world.publish(workers[:1], releases=(Release(1, 1, ((0, 1), (1, 1))),))
    assert workers[0].take(MessageType.UPDATED)[0].body == {"refused": "overflow"}


def test_who_brings_nothing_to_a_merge_needs_no_learning_rate():
    _, workers = world_of(2, [table()], rule=MERGE | {"quorum": 2})
    workers[0].push_rows(0, 1, ids_of(3), torch.ones(1, 4))
    assert workers[1].push(0, 1, None)[0].body == {"refused": "abstained"}


def test_rows_asked_for_ahead_are_held_one_step_earlier():
    world, workers = world_of(2, [table()], rule=APPLY | {"max_staleness": 1})
    row = torch.ones(1, 4)
    assert len(workers[0].push_rows(0, 1, ids_of(3), row)) == 1
    assert workers[1].push_rows(0, 1, ids_of(3), row, ahead=1) == []
    world.release(workers, 1)
    assert len(workers[1].take(MessageType.UPDATED)) == 1
    _tight, (worker,) = world_of(1, [table()], rule=APPLY | {"max_staleness": 0})
    (answer,) = worker.push_rows(0, 1, ids_of(3), row, ahead=1)
    assert answer.body["code"] == ErrorCode.BAD_VALUE
    (answer,) = worker.push(0, 1, None, body={"ahead": 1})
    assert answer.body["code"] == ErrorCode.BAD_VALUE


def pushed(ids, dim=4, **body):
    ids = torch.tensor(ids, dtype=torch.int64)
    return {
        "payload": pack_rows(ids, torch.ones(len(ids), dim)),
        "body": {"rows": len(ids), "lr": 0.5, "divisor": 1, **body},
    }


def other_part():
    [*_, other] = [one for one in range(100) if part_of(ids_of(one), 2, 3) == 1]
    return other


PUSH, PULL, STORE = MessageType.PUSH, MessageType.PULL, MessageType.STORE


@pytest.mark.parametrize(
    ("kind", "key", "fields", "words"),
    [
        (PUSH, 0, pushed([8, 3]), "table 'users': ids must be ascending, each once"),
        (PUSH, 0, pushed([-1, 3]), "ids must be those of its rows (expected 0 to 999, got -1)"),
        (PUSH, 0, pushed([3, 1000]), "(expected 0 to 999, got 1000)"),
        (PUSH, 0, pushed([3], 3), "expected 24 bytes of 1 rows of 4, got 20 of torch.uint8"),
        (PUSH, 0, pushed([3], rows=2), "expected 48 bytes of 2 rows of 4"),
        (PUSH, 0, {"payload": torch.ones(4)}, "lacks `rows`"),
        (PUSH, 2, pushed([other_part()]), "table 'halves', part 0 of 2: ids are of another part"),
        (PUSH, 1, pushed([3]), "expected 4 values of torch.float32, got 24 of torch.uint8"),
        (PULL, 0, {"payload": torch.ones(3)}, "expected at most 1048576 of torch.int64, got 3 of torch.float32"),
        (PULL, 0, {"payload": torch.zeros(MAX_PAYLOAD_BYTES // 16 + 1, dtype=torch.int64)}, "expected at most 1048576"),
        (PULL, 0, {}, "PULL has ids (expected at most 1048576 of torch.int64, got 0 of None"),
        (PULL, 1, {"payload": ids_of(3)}, "chunk 1 (p1) is no table"),
        (PULL, 1, {"body": {"scan": 0, "most": 5}}, "chunk 1 (p1) is no table"),
        (PULL, 2, {"payload": ids_of(other_part())}, "ids are of another part"),
        (STORE, 0, {"payload": torch.ones(4)}, "STORE of a table lacks `rows`"),
        (STORE, 1, {**pushed([3]), "body": {"rows": 1}}, "expected 4 values of torch.float32, got 24 of torch.uint8"),
    ],
)  # fmt: skip
def test_what_a_peer_may_not_send_is_refused_and_changes_nothing(kind, key, fields, words):
    halves = table(2, name="halves", parts=2)
    world, (worker,) = world_of(1, [table(), spec(1), halves], rule=APPLY)
    worker.push_rows(0, 1, ids_of(3), torch.ones(1, 4))
    changes, size_bytes = world.shard.changes, world.shard.memory_bytes()
    (answer,) = worker.send(kind, key=key, sequence=2, **fields)
    assert answer.type is MessageType.ERROR
    assert words in answer.body["text"]
    assert (world.shard.changes, world.shard.memory_bytes()) == (changes, size_bytes)


def test_a_table_needs_servers_that_step_and_has_no_values():
    averaging = Worker(World(), 0, rule=AVERAGE)
    averaging.begin()
    assert averaging.register(table()).body["code"] == ErrorCode.RULE_MISMATCH
    stepping = Worker(World(), 0, rule=APPLY)
    stepping.begin()
    assert "expected no initial values" in stepping.register(table(), torch.zeros(4)).body["text"]


def test_layouts_that_differ_in_a_table_are_told_apart():
    assert first_difference([table()], [table()]) == ""
    text = first_difference([table()], [table(dim=8)])
    assert "'users': here table of rows=1000, dim=4, parts=1," in text
    assert "there table of rows=1000, dim=8" in text


def test_layouts_that_differ_in_the_order_of_names_are_told_apart():
    segments = [Segment(name, (2,), (1,), 0, 2) for name in "ab"]
    orders = (segments, segments[::-1])
    layouts = [[ChunkSpec(0, ChunkKind.PARAMETER, torch.float32, 4, tuple(order))] for order in orders]
    assert "'a' here stands in the place of 'b' there. Fix: register" in first_difference(*layouts)


@pytest.mark.parametrize(("dim", "optimizer"), [(64, "sgd"), (1, "rowwise_adagrad")])
def test_a_server_without_memory_refuses_new_rows_by_name(dim, optimizer):
    small = World(max_memory_bytes=2 << 20)
    (worker,) = team(small, 1, [table(rows=10**8, dim=dim, optimizer=optimizer)], rule=APPLY)
    count, step, answers = 0, 0, []
    while not codes(answers):
        before, step = kept(small.shard), step + 1
        answers = worker.push_rows(0, step, torch.arange(count, count + 500), torch.ones(500, dim))
        count += 500
    assert codes(answers) == [ErrorCode.MEMORY]
    assert f"500 new rows of table 'users', part 0 of 1, which has {count - 500} rows in" in answers[0].body["text"]
    assert "no max_rows= to bound it" in answers[0].body["text"]
    assert kept(small.shard) == before
    assert 1 << 20 < small.shard.memory_bytes() <= 2 << 20
    assert codes(worker.push_rows(0, step, torch.arange(500), torch.ones(500, dim))) == []


@pytest.mark.parametrize("rule", [APPLY, MERGE | {"quorum": 1}], ids=lambda rule: rule["name"])
def test_the_rows_that_were_pushed_longest_ago_go(rule):
    world, (worker,) = world_of(1, [table(max_rows=4)], rule=rule)

    def push(step, *ids):
        answers = worker.push_rows(0, step, ids_of(*ids), torch.ones(len(ids), 4))
        world.release([worker], step, contributors=((0, step),))
        return answers

    for step, ids in enumerate([(1, 5, 9), (5,), (20, 21)], 1):
        push(step, *ids)
    assert set(kept(world.shard)[0][1]) == {5, 9, 20, 21}
    (answer,) = push(4, 1, 2, 3, 4, 5)
    assert answer.body["code"] == ErrorCode.MEMORY
    assert "expected at most 4 of max_rows=4, got 5" in answer.body["text"]
    assert world.shard.status().jobs["demo"].table_evicted == {"users": 1}
    push(4, 1, 2, 3, 4)
    assert set(kept(world.shard)[0][1]) == {1, 2, 3, 4}


def test_scans_and_stores():
    world, (worker,) = world_of(1, [table(optimizer="adagrad")], rule=APPLY)
    worker.push_rows(0, 1, torch.arange(20), torch.ones(20, 4))
    assert worker.store_rows(0, ids_of(3, 50), torch.full((2, 4), 7.0)).type is MessageType.OK
    found, place = {}, 0
    while place is not None:
        answer = Worker(world).pull(0, scan=place, most=8)
        ids, rows = unpack_rows(answer, 4)
        found |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
        place = answer.body.get("next")
    assert set(found) == {*range(20), 50}
    assert found[3] == found[50] == [7.0] * 4
    assert kept(world.shard)[0][1][3][1] == [0.0] * 4


def test_large_payloads_travel_as_several_frames(tmp_path):
    ids, rows = torch.arange(150_000), torch.rand(150_000, 32)
    body = {"rows": len(ids), "lr": 0.5, "divisor": 1}
    message = Message(MessageType.PUSH, key=0, sequence=1, body=body, payload=pack_rows(ids, rows))
    frames = encode(message)
    assert [len(frame) for frame in frames[2:]] == [MAX_PAYLOAD_BYTES, message.payload.numel() - MAX_PAYLOAD_BYTES]
    for received in (frames, [*frames[:2], b"".join(frames[2:])]):  # as a log has it
        found = unpack_rows(decode(received), 32)
        assert torch.equal(found[0], ids)
        assert torch.equal(found[1], rows)
    message.body = {}
    with pytest.raises(Exception, match="payload is too large"):
        decode(encode(message))


def row_bytes(store):
    return {name: store.disk.size_bytes(name) for name in sorted(store.disk.list()) if name.startswith("rows-")}


def test_a_snapshot_writes_the_rows_that_changed(tmp_path):
    world, (worker,) = world_of(1, [table(rows=10**6, dim=64)], rule=APPLY)
    store = Generations(DirectoryDisk(tmp_path))
    store.begin()
    generator, steps = torch.Generator().manual_seed(0), iter(range(1, 100))

    def save(*ids):
        if ids:
            ids = ids_of(*ids)
            worker.push_rows(0, next(steps), ids, torch.randn(len(ids), 64, generator=generator))
        return store.save(ServerState([world.shard.capture(store.last + 1, store.kept_rows())]))

    save(*range(1000))
    save(3, 5000)
    save()  # nothing has changed: no file
    save(7)
    sizes = row_bytes(store)
    assert [int(name[-12:]) for name in sizes] == [1, 2, 4]
    assert sizes["rows-000000000002"] < sizes["rows-000000000001"] / 50
    again = World()
    place_into(recover(store), again.shards, "it")
    assert kept(again.shard) == kept(world.shard)

    save(*range(600))  # with these more than half of the rows
    assert [int(name[-12:]) for name in row_bytes(store)] == [1, 2, 4, 5]
    save(9)
    assert [int(name[-12:]) for name in row_bytes(store)] == [5, 6]  # neither kept generation needs the others
    store.disk.delete("rows-000000000005")
    with pytest.raises(SnapshotError, match="rows-000000000005"):
        recover(store)
    save(11)  # which is whole, because rows are gone
    assert [int(name[-12:]) for name in row_bytes(store)][-1] == 7
    again = World()
    place_into(recover(store), again.shards, "it")
    assert kept(again.shard) == kept(world.shard)


def test_rows_that_are_damaged_are_found_and_an_older_generation_is_taken(tmp_path):
    world, (worker,) = world_of(1, [table()], rule=APPLY)
    store = Generations(DirectoryDisk(tmp_path))
    store.begin()
    for step, count in ((1, 100), (2, 3)):
        worker.push_rows(0, step, torch.arange(count), torch.ones(count, 4))
        store.save(ServerState([world.shard.capture(store.last + 1, store.kept_rows())]))
    path = tmp_path / "rows-000000000002"
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    found = recover(store)
    assert found.generation == 1
    assert "rows-000000000002" in found.notes[0]
