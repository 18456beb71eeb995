"""Snapshots: what was saved comes back bit by bit, or an older one does, or an error says why none can."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability import restoring
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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, so that NaNs of every kind and denormals are among them."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    tensor = torch.empty(shape, dtype=dtype)
    count = tensor.numel() * tensor.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape) if count else tensor


def assert_same(got: list[list[JobState]], wanted: list[list[JobState]]) -> None:
    assert [[(job.name, job.meta) for job in jobs] for jobs in got] == [
        [(job.name, job.meta) for job in jobs] for jobs in wanted
    ]
    for got_jobs, wanted_jobs in zip(got, wanted, strict=True):
        for got_job, wanted_job in zip(got_jobs, wanted_jobs, strict=True):
            assert len(got_job.chunks) == len(wanted_job.chunks)
            for a, b in zip(got_job.chunks, wanted_job.chunks, strict=True):
                assert (a.key, a.meta, list(a.tensors)) == (b.key, b.meta, list(b.tensors))
                for name, tensor in b.tensors.items():
                    assert (a.tensors[name].dtype, a.tensors[name].shape) == (tensor.dtype, tensor.shape)
                    assert torch.equal(bits(a.tensors[name]), bits(tensor)), name


def state(number: int, *, shards: int = 2, numel: int = 1000) -> list[list[JobState]]:
    """Two jobs whose every value and version tells ``number`` and the shard: a mixture of generations shows."""
    return [
        [
            JobState(
                name,
                {"version": number, "shard": shard},
                [
                    ChunkState(
                        shard + shards * index,
                        {"version": number, "last_sequence": {"0": number}},
                        {"values": torch.full((numel,), number + shard / 2), "slot/step": torch.tensor(number)},
                    )
                    for index in range(3)
                ],
            )
            for name in ("main", "probe é")
        ]
        for shard in range(shards)
    ]


def save(store: Generations, number: int, **options: int) -> int:
    return store.save(ServerState(state(number, **options)))


def assert_is_state(loaded, number: int, **options: int) -> None:
    assert_same(loaded[1].shards, state(number, **options))


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


# ---- what is saved comes back ---------------------------------------------------------------------------------------


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
    assert_same(loaded.shards, saved)
    assert (loaded.places, loaded.coordinators) == (places, coordinators)
    assert read_places(store.disk, 1) == places


# ---- generations ----------------------------------------------------------------------------------------------------


def test_two_generations_are_kept_and_numbers_go_on(tmp_path):
    for first in (1, 4):
        with opened(tmp_path / "s") as store:
            assert [save(store, number) for number in range(first, first + 3)] == [first, first + 1, first + 2]
            assert generations(store.disk.directory) == names(first + 1, first + 2)
            assert store.newest == first + 2
            assert_is_state(store.load(), first + 2)


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


DAMAGES = {
    "one byte less": (lambda path: os.truncate(path, path.stat().st_size - 1), "tensor 24 at byte .* cut off"),
    "one byte more": (lambda path: path.write_bytes(path.read_bytes() + b"a"), "size"),
    "cut off in the description": (lambda path: os.truncate(path, 400), "cut off"),
    "empty": (lambda path: os.truncate(path, 0), "cut off"),
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


# ---- writing fails --------------------------------------------------------------------------------------------------


def test_the_rename_comes_after_every_fsync_and_before_the_last(store, monkeypatch):
    events = []
    rename = os.rename

    def recording(sync):
        def one(descriptor):
            events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            sync(descriptor)

        return one

    def recording_rename(old, new):
        events.append(f"{Path(old).name} -> {Path(new).name}")
        rename(old, new)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, recording(getattr(os, name)))
    monkeypatch.setattr(os, "rename", recording_rename)
    save(store, 1)
    unfinished = f"unfinished-{names(1)[0]}"
    assert events == [unfinished, f"{unfinished} -> {names(1)[0]}", "snapshots"]


@pytest.mark.parametrize("failing", range(2))
def test_a_failed_fsync_keeps_the_older_generation(store, monkeypatch, failing):
    calls = []

    def failing_once(sync):
        def one(descriptor):
            calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            if len(calls) == failing + 1:
                raise OSError(errno.EIO, "Input/output error")
            sync(descriptor)

        return one

    save(store, 1)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, failing_once(getattr(os, name)))
    with pytest.raises(SnapshotError) as caught:
        save(store, 2)
    text = str(caught.value)
    assert "generation 2 was not written: it could not be made durable: Input/output error" in text
    assert str(calls[failing]) in text
    assert "generation 1 stays durable" in text
    assert generations(store.disk.directory) == names(1)
    assert_is_state(store.load(), 1)
    # From scratch: another number, hence other files.
    assert save(store, 3) == 3
    assert_is_state(store.load(), 3)


class Room:
    """How much there is on the disk."""

    def __init__(self, store, monkeypatch):
        self.free_bytes = 1 << 40
        monkeypatch.setattr(store.disk, "free_bytes", lambda: self.free_bytes, raising=True)


def log_files(store, *numbers):
    for number in numbers:
        (store.disk.directory / segment_name(0, number)).touch()


def files(store):
    return sorted(path.name for path in store.disk.directory.iterdir() if path.name != "lock")


def logged(number):
    return ServerState(state(number), {0: Place(number, 0, 7)})


def test_segments_stay_as_long_as_a_generation_goes_on_in_them(store):
    log_files(store, 1, 2, 3, 4)
    for number in (2, 3, 4):
        store.save(logged(number))
    assert files(store) == names(2, 3) + [segment_name(0, number) for number in (3, 4)]
    # A shard that has no log any more, and a server that keeps none.
    (store.disk.directory / segment_name(1, 1)).touch()
    store.save(logged(4))
    assert segment_name(1, 1) not in files(store)
    for _ in range(2):
        save(store, 5)
    assert files(store) == names(5, 6)


def test_where_there_is_little_room_one_generation_goes_before_the_next_is_there(store, monkeypatch):
    room = Room(store, monkeypatch)
    log_files(store, 1, 2, 3)
    for number in (1, 2):
        store.save(logged(number))
    room.free_bytes = store.needed_bytes - 1
    monkeypatch.setattr(store.disk, "create", lambda name: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(SnapshotError, match=rf"expected room for {store.needed_bytes} bytes, got .*2 stays durable"):
        store.save(logged(3))
    assert files(store) == names(2) + [segment_name(0, number) for number in (2, 3)]


def test_with_a_log_only_the_newest_is_kept_where_there_is_little_room(store, monkeypatch):
    room = Room(store, monkeypatch)
    log_files(store, 1, 2)
    room.free_bytes = generations_module.LOW_BYTES - 1
    for number in (1, 2):
        store.save(logged(number))
    assert files(store) == [*names(2), segment_name(0, 2)]
    for _ in range(2):
        save(store, 3)
    assert generations(store.disk.directory) == names(3, 4)


# ---- other numbers of shards ----------------------------------------------------------------------------------------


def chunk_places(shards: list[list[JobState]], name: str) -> dict[int, int]:
    places = [
        (chunk.key, i) for i, jobs in enumerate(shards) for job in jobs if job.name == name for chunk in job.chunks
    ]
    assert len(dict(places)) == len(places)
    return dict(places)


def test_chunks_survive_other_numbers_of_shards_once_each(store, monkeypatch):
    def merged(metas):
        return {"shard": sum(meta["shard"] for meta in metas), "n": len(metas)}

    monkeypatch.setattr(restoring, "merge_job_meta", merged)
    two = [
        [
            JobState(
                name,
                {"shard": shard},
                [ChunkState(key, {"k": key}, {"v": torch.full((10 + key,), key)}) for key in range(shard, 12, 2)],
            )
            for name in ("a", "b")
        ]
        for shard in range(2)
    ]
    shards = two
    for count in (3, 1, 2):
        store.save(ServerState(shards))
        loaded = store.load()[1].shards
        shards = restoring.distribute(loaded, count)
        for name in ("a", "b"):
            assert sorted(chunk_places(shards, name)) == list(range(12))
        assert len(shards) == count
        for jobs in shards:
            assert [job.name for job in jobs] == ["a", "b"]
            for job in jobs:
                assert job.meta["n"] == len(loaded)
                for chunk in job.chunks:
                    assert torch.equal(chunk.tensors["v"], torch.full((10 + chunk.key,), chunk.key))
        sizes = [sum(chunk.tensors["v"].nbytes for job in jobs for chunk in job.chunks) for jobs in shards]
        assert max(sizes) - min(sizes) <= 2 * 8 * 21
