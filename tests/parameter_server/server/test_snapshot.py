"""Snapshots: what was saved comes back bit by bit, or an older one does, or an error says why none can."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import xxhash
from support.processes import forkserver

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.restoring import distribute
from psengine.parameter_server.server.snapshots.files import ChunkState, JobState
from psengine.parameter_server.server.snapshots.store import SnapshotStore
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


def assert_is_state(shards: list[list[JobState]], number: int, **options: int) -> None:
    assert_same(shards, state(number, **options))


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "lock")


def names(*numbers: int) -> list[str]:
    return [f"generation-{number:012d}" for number in numbers]


@pytest.fixture
def store(tmp_path: Path):
    with SnapshotStore(tmp_path / "snapshots") as opened:
        yield opened


# ---- what is saved comes back ---------------------------------------------------------------------------------------


def test_every_dtype_and_shape_comes_back_bit_by_bit(store):
    tensors = {
        f"{dtype} {name}": random_tensor(shape, dtype) for dtype in DTYPES.values() for name, shape in SHAPES.items()
    }
    meta = {"none": None, "pi": 3.25, "largest": 2**64 - 1, "é\ud800": [True, {"a": []}], "infinite": float("inf")}
    saved = [[JobState("a", meta, [ChunkState(0, meta, tensors)])], [JobState("a", {}, [])], []]
    assert store.save(saved) == 1
    loaded = store.load()
    assert (loaded.generation, loaded.notes) == (1, [])
    assert_same(loaded.shards, saved)


# ---- generations ----------------------------------------------------------------------------------------------------


def test_two_generations_are_kept_and_numbers_go_on(tmp_path):
    for first in (1, 4):
        with SnapshotStore(tmp_path / "s") as store:
            assert [store.save(state(number)) for number in range(first, first + 3)] == [first, first + 1, first + 2]
            assert generations(store.directory) == names(first + 1, first + 2)
            assert store.newest == first + 2
            assert_is_state(store.load().shards, first + 2)


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def reseal(directory: Path, **changes: object) -> None:
    """Change the manifest and give it a valid hash again."""
    path = directory / "manifest.json"
    manifest = json.dumps(json.loads(path.read_bytes().partition(b"\n")[2]) | changes).encode()
    first_line = json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(manifest)})
    path.write_bytes(first_line.encode() + b"\n" + manifest)


MANIFEST, SHARD = "manifest.json", "shard-001.tensors"
DAMAGES = {
    "one byte less": (lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 1), SHARD, "size"),
    "one byte more": (lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size + 1), SHARD, "size"),
    "missing tensor file": (lambda d: (d / SHARD).unlink(), SHARD, "No such file"),
    "swapped shards": (lambda d: shutil.copy(d / "shard-000.tensors", d / SHARD), SHARD, "xxh3-64"),
    "truncated manifest": (lambda d: os.truncate(d / MANIFEST, 400), MANIFEST, "cut off"),
    "only the first line": (lambda d: os.truncate(d / MANIFEST, 32), MANIFEST, "cut off"),
    "empty manifest": (lambda d: os.truncate(d / MANIFEST, 0), MANIFEST, "cut off"),
    "missing manifest": (lambda d: (d / MANIFEST).unlink(), MANIFEST, "No such file"),
    "a file instead": (lambda d: (shutil.rmtree(d), d.touch()), MANIFEST, "Not a directory"),
    "other format": (lambda d: reseal(d, format=1), MANIFEST, r"got 1, 2\)"),
    "other generation": (lambda d: reseal(d, generation=9), MANIFEST, r"got 2, 9\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_skipped_with_a_note(tmp_path, damage):
    inflict, file, words = DAMAGES[damage]
    with SnapshotStore(tmp_path / "s") as store:
        for number in (1, 2):
            store.save(state(number))
    inflict(tmp_path / "s" / names(2)[0])
    with SnapshotStore(tmp_path / "s") as store:
        loaded = store.load()
        assert_is_state(loaded.shards, 1)
        assert loaded.generation == 1
        (note,) = loaded.notes
        assert note.startswith("generation 2 is skipped: ")
        assert names(2)[0] in note
        assert file in note
        assert re.search(words, note), note


@pytest.mark.parametrize("file", ["manifest.json", "shard-000.tensors"])
def test_a_flipped_bit_anywhere_is_found(store, file):
    store.save([[JobState("a", {"b": 1}, [ChunkState(0, {}, {"t": torch.arange(9), "u": torch.ones(3)})])]])
    path = store.directory / names(1)[0] / file
    for place in range(path.stat().st_size):
        flip(path, place)
        with pytest.raises(SnapshotError, match=file):
            store.load()
        flip(path, place)
    assert store.load() is not None


def test_no_readable_generation_is_an_error_that_names_all(store):
    for number in (1, 2):
        store.save(state(number))
        (store.directory / names(number)[0] / "manifest.json").unlink()
    with pytest.raises(
        SnapshotError, match=r"(?s)can be read.*generation 2 is skipped.*generation 1 is skipped.*put a"
    ):
        store.load()
    assert store.newest is None
    assert store.save(state(3)) == 3
    assert_is_state(store.load().shards, 3)


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
    store.save(state(1))
    unfinished = "unfinished-000000000001"
    assert events == [
        "shard-000.tensors",
        "shard-001.tensors",
        "manifest.json",
        unfinished,
        f"{unfinished} -> {names(1)[0]}",
        "snapshots",
    ]


@pytest.mark.parametrize("failing", range(5))
def test_a_failed_fsync_keeps_the_older_generation(store, monkeypatch, failing):
    calls = []

    def failing_once(sync):
        def one(descriptor):
            calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            if len(calls) == failing + 1:
                raise OSError(errno.EIO, "Input/output error")
            sync(descriptor)

        return one

    store.save(state(1))
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, failing_once(getattr(os, name)))
    with pytest.raises(SnapshotError) as caught:
        store.save(state(2))
    text = str(caught.value)
    assert "generation 2 was not written: Input/output error" in text
    assert str(calls[failing]) in text
    assert "generation 1 stays durable" in text
    assert generations(store.directory) == names(1)
    assert_is_state(store.load().shards, 1)
    # From scratch: another number, hence other files.
    assert store.save(state(3)) == 3
    assert_is_state(store.load().shards, 3)


@pytest.fixture
def mounted(tmp_path: Path):
    """A directory on a file system of 1 MB of its own; mounting needs privileges."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    if not shutil.which("mount") or _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)) != 0:
        pytest.skip("mounting is not permitted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True, timeout=10)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False, timeout=10).returncode


# ---- killed writers -------------------------------------------------------------------------------------------------


def _save_for_ever(directory: Path, number: int, sender) -> None:
    with SnapshotStore(directory) as store:
        while True:
            number += 1
            store.save(state(number, numel=60_000))
            sender.send(number)


@pytest.mark.timeout(120)
def test_after_a_kill_at_any_moment_a_complete_generation_loads(tmp_path):
    directory = tmp_path / "s"
    chance = random.Random(1234)
    leftovers = 0
    number = 0
    for attempt in range(60):
        if attempt >= 8 and leftovers:
            break  # eight kills, and one of them during a save
        receiver, sender = forkserver.Pipe(duplex=False)
        process = forkserver.Process(target=_save_for_ever, args=(directory, number, sender), daemon=True)
        process.start()
        sender.close()
        acknowledged = number
        try:
            assert receiver.poll(60)  # it runs
            time.sleep(chance.uniform(0, 0.15))
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            assert process.exitcode == -signal.SIGKILL
            while receiver.poll():
                try:
                    acknowledged = receiver.recv()
                except EOFError:
                    break
        finally:
            process.kill()
            process.join(10)
            receiver.close()
        leftovers += sum(not name.startswith("generation-") for name in generations(directory))
        with SnapshotStore(directory) as store:
            assert all(name.startswith("generation-") for name in generations(directory))
            loaded = store.load()
            assert loaded.notes == []  # what has a generation's name is complete
            number = int(loaded.shards[0][0].meta["version"])
            assert number in (acknowledged, acknowledged + 1)
            assert_is_state(loaded.shards, number, numel=60_000)
    assert leftovers > 0, "no kill came during a save"


# ---- the directory --------------------------------------------------------------------------------------------------


def _hold(directory: Path, sender) -> None:
    with SnapshotStore(directory):
        sender.send(os.getpid())
        time.sleep(60)


def test_a_directory_belongs_to_one_process_until_it_dies(tmp_path):
    receiver, sender = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=_hold, args=(tmp_path / "s", sender), daemon=True)
    process.start()
    try:
        assert receiver.poll(60)
        with pytest.raises(SnapshotError, match=f"lock held by process {receiver.recv()}\\)"):
            SnapshotStore(tmp_path / "s").open()
    finally:
        process.kill()
        process.join(10)
        sender.close()
        receiver.close()
    with SnapshotStore(tmp_path / "s") as store:
        assert (store.directory / "lock").read_text() == f"{os.getpid()}\n"


# ---- other numbers of shards ----------------------------------------------------------------------------------------


def chunk_places(shards: list[list[JobState]], name: str) -> dict[int, int]:
    places = [
        (chunk.key, i) for i, jobs in enumerate(shards) for job in jobs if job.name == name for chunk in job.chunks
    ]
    assert len(dict(places)) == len(places)
    return dict(places)


def test_chunks_survive_other_numbers_of_shards_once_each(store):
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
        store.save(shards)
        loaded = store.load().shards
        shards = distribute(
            loaded, count, lambda metas: {"shard": sum(meta["shard"] for meta in metas), "n": len(metas)}
        )
        for name in ("a", "b"):
            assert sorted(chunk_places(shards, name)) == list(range(12))
        assert len(shards) == count
        for jobs in shards:
            assert [job.name for job in jobs] == ["a", "b"]
            for job in jobs:
                assert job.meta["n"] == len(loaded)
                for chunk in job.chunks:
                    assert torch.equal(chunk.tensors["v"], torch.full((10 + chunk.key,), chunk.key))
        sizes = [sum(chunk.size_bytes for job in jobs for chunk in job.chunks) for jobs in shards]
        assert max(sizes) - min(sizes) <= 2 * 8 * 21
