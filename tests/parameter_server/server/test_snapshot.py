"""Snapshots: what was saved comes back bit by bit, or an older one does, or an error says why none can."""

import errno
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.shard_world import assert_same_states

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import Place, segment_name
from psengine.parameter_server.server.snapshots import generations as generations_module
from psengine.parameter_server.server.snapshots.files import ChunkState, JobState, ServerState, read_places
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.messages import DTYPES

SHAPES = {
    "scalar": (),
    "empty": (0,),
    "empty matrix": (3, 0, 2),
    "vector": (7,),
    "matrix": (3, 5),
    "large": (3, 300_007),
}


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, so that NaNs of every kind and denormals are among them."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    tensor = torch.empty(shape, dtype=dtype)
    count = tensor.numel() * tensor.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape) if count else tensor


def state(number: int, shards: int = 2, numel: int = 1000) -> list[list[JobState]]:
    """Two jobs whose every value and version tells ``number`` and the shard: a mixture of generations shows."""

    def chunk(shard: int, index: int) -> ChunkState:
        tensors = {"values": torch.full((numel,), number + shard / 2), "slot/step": torch.tensor(number)}
        return ChunkState(shard + shards * index, {"version": number, "last_sequence": {"0": number}}, tensors)

    def job(shard: int, name: str) -> JobState:
        return JobState(name, {"version": number, "shard": shard}, [chunk(shard, index) for index in range(3)])

    return [[job(shard, name) for name in ("main", "probe é")] for shard in range(shards)]


def save(store: Generations, number: int, **options: int) -> int:
    return store.save(ServerState(state(number, **options)))


def assert_is_state(loaded, number: int, **options: int) -> None:
    assert_same_states(loaded[1].shards, state(number, **options))


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "lock")


def names(*numbers: int) -> list[str]:
    return [f"generation-{number:012d}" for number in numbers]


@contextmanager
def opened(directory: Path):
    disk = DirectoryDisk(directory)
    disk.make()
    store = Generations(disk)
    store.begin()
    yield store
    disk.unlock()


@pytest.fixture
def store(tmp_path: Path):
    with opened(tmp_path / "snapshots") as one:
        yield one


def test_every_dtype_and_shape_comes_back_bit_by_bit(store):
    tensors = {
        f"{dtype} {name}": random_tensor(shape, dtype) for dtype in DTYPES.values() for name, shape in SHAPES.items()
    }
    meta = {"none": None, "pi": 3.25, "largest": 2**64 - 1, "é": [True, {"a": []}], "infinite": float("inf")}
    saved = [[JobState("a", meta, [ChunkState(0, meta, tensors)])], [JobState("a", {}, [])], []]
    places, coordinators = {0: Place(3, 2**40, 2**63 - 1), 2: Place(1, 0, 1)}, {"jobs": [None, {"é": 2**64 - 1}]}
    assert store.save(ServerState(saved, places, coordinators)) == 1
    generation, loaded, notes = store.load()
    assert (generation, notes) == (1, [])
    assert_same_states(loaded.shards, saved)
    assert (loaded.places, loaded.coordinators) == (places, coordinators)
    assert read_places(store.disk, 1) == places


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


DAMAGES = {
    "one byte less": (lambda path: os.truncate(path, path.stat().st_size - 1), "tensor 24 at byte .* cut off"),
    "one byte more": (lambda path: path.write_bytes(path.read_bytes() + b"a"), "size"),
    "cut off in the description": (lambda path: os.truncate(path, 400), "cut off"),
    "something else": (lambda path: path.write_text("{}\n"), "another version's"),
    "a directory of an older version": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "another one": (
        lambda path: shutil.copyfile(path.with_name(names(1)[0]), path),
        "another version's or generation's",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_skipped_with_a_note(tmp_path, damage):
    inflict, words = DAMAGES[damage]
    with opened(tmp_path / "s") as store:
        for number in (1, 2):
            save(store, number)
    inflict(tmp_path / "s" / names(2)[0])
    with opened(tmp_path / "s") as store:
        loaded = store.load()
        assert_is_state(loaded, 1)
        generation, _, (note,) = loaded
        assert generation == 1
        assert note.startswith("generation 2 is skipped: ")
        assert names(2)[0] in note
        assert re.search(words, note), note


def test_a_flipped_bit_anywhere_is_found(store):
    jobs = [JobState("a", {"b": 1}, [ChunkState(0, {}, {"t": torch.arange(9), "u": torch.ones(3)})])]
    store.save(ServerState([jobs]))
    path = store.disk.directory / names(1)[0]
    for place in range(path.stat().st_size):
        flip(path, place)
        with pytest.raises(SnapshotError, match=names(1)[0]):
            store.load()
        flip(path, place)
    assert store.load()[0] == 1


def test_no_readable_generation_is_an_error_that_names_all(store):
    for number in (1, 2):
        save(store, number)
        (store.disk.directory / names(number)[0]).write_bytes(b"")
    with pytest.raises(
        SnapshotError, match=r"(?s)can be read.*generation 2 is skipped.*generation 1 is skipped.*put a"
    ):
        store.load()
    assert store.newest is None
    assert save(store, 3) == 3
    assert_is_state(store.load(), 3)


def log_files(store, *numbers):
    for number in numbers:
        (store.disk.directory / segment_name(0, number)).touch()


def logged(number):
    return ServerState(state(number), {0: Place(number, 0, 7)})


def test_where_there_is_little_room_one_generation_goes_before_the_next_is_there(store, monkeypatch):
    log_files(store, 1, 2, 3)
    for number in (1, 2):
        store.save(logged(number))
    monkeypatch.setattr(store.disk, "free_bytes", lambda: store.needed_bytes - 1)
    monkeypatch.setattr(store.disk, "create", lambda name: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(SnapshotError, match=rf"expected room for {store.needed_bytes} bytes, got .*2 stays durable"):
        store.save(logged(3))
    assert generations(store.disk.directory) == names(2) + [segment_name(0, number) for number in (2, 3)]


def test_with_a_log_only_the_newest_is_kept_where_there_is_little_room(store, monkeypatch):
    log_files(store, 1, 2)
    monkeypatch.setattr(store.disk, "free_bytes", lambda: generations_module.LOW_BYTES - 1)
    for number in (1, 2):
        store.save(logged(number))
    assert generations(store.disk.directory) == [*names(2), segment_name(0, 2)]
    for _ in range(2):
        save(store, 3)
    assert generations(store.disk.directory) == names(3, 4)
