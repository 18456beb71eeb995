"""Snapshots: what was saved comes back bit by bit, or an older one does, or an error says why none can."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
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
from psengine.parameter_server.server.snapshots.files import read_manifest, write_manifest
from psengine.parameter_server.server.snapshots.store import ChunkState, JobState, SnapshotStore, distribute
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
    saved = [[JobState("a", {}, [ChunkState(0, {}, tensors)])], [JobState("a", {}, [])], []]
    assert store.save(saved) == 1
    loaded = store.load()
    assert (loaded.generation, loaded.notes) == (1, [])
    assert_same(loaded.shards, saved)


def test_tensors_of_any_layout_come_back_by_value(store):
    base = torch.randn(4, 6, 5, 5)
    tensors = {
        "transposed": base.transpose(0, 3),
        "strided": base[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 1000),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
        "negated": torch.randn(5, dtype=torch.complex128).conj().imag,
        "lazily negated": torch._neg_view(torch.randn(5)),
        "trained": torch.nn.Parameter(torch.randn(3)),
        "alias": base,
        "alias again": base[1:],
    }
    saved = [[JobState("a", {}, [ChunkState(0, {}, tensors)])]]
    store.save(saved)
    assert_same(store.load().shards, saved)


def test_loaded_tensors_own_their_memory(store, tmp_path):
    store.save(state(1))
    chunk = store.load().shards[0][0].chunks[0]
    shutil.rmtree(store.directory)
    chunk.tensors["values"].add_(1).resize_(5000)
    assert chunk.tensors["slot/step"].item() == 1


def test_meta_comes_back(store):
    meta = {"none": None, "pi": 3.25, "largest": 2**64 - 1, "é\ud800": [True, {"a": []}], "infinite": float("inf")}
    store.save([[JobState("job", meta, [ChunkState(7, meta, {})])]])
    (job,) = store.load().shards[0]
    assert job.meta == meta
    assert job.chunks[0].meta == meta


def test_tensor_files_are_safetensors(store):
    load_file = pytest.importorskip("safetensors.torch").load_file
    real = [dtype for dtype in DTYPES.values() if not dtype.is_complex]
    tensors = {str(dtype): random_tensor((3, 5), dtype) for dtype in real}
    pair = torch.randn(4, dtype=torch.complex128)
    store.save([[JobState("a", {}, [ChunkState(0, {}, {**tensors, "complex": pair})])]])
    read = load_file(store.directory / names(1)[0] / "shard-000.safetensors")
    for index, tensor in enumerate(tensors.values()):
        assert read[str(index)].dtype == tensor.dtype
        assert torch.equal(bits(read[str(index)]), bits(tensor))
    assert torch.equal(read[str(len(tensors))], torch.view_as_real(pair))


def test_manifest_is_json_that_people_can_read(store):
    store.save(state(1))
    outer = json.loads((store.directory / names(1)[0] / "manifest.json").read_text())
    shard = outer["manifest"]["shards"][0]
    content = (store.directory / names(1)[0] / "shard-000.safetensors").read_bytes()
    assert shard["size_bytes"] == len(content)
    assert shard["xxh3_64"] == xxhash.xxh3_64_hexdigest(content)
    assert outer["manifest"]["written_at"].endswith("+00:00")
    assert [job["name"] for job in shard["jobs"]] == ["main", "probe é"]


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"last_sequence": {0: 1}}, "keys are strings"),
        ({"a": [torch.zeros(1)]}, "values are JSON's"),
        ({"a": b"bytes"}, "values are JSON's"),
        (json.loads('{"a":' * 40 + "1" + "}" * 40), "nested too deeply"),
    ],
)
def test_meta_that_would_not_come_back_is_refused_before_writing(store, meta, words):
    store.save(state(1))
    for broken in (JobState("b", meta, []), JobState("b", {}, [ChunkState(3, meta, {})])):
        with pytest.raises(SnapshotError, match=rf"job 'b'.* cannot be kept.*{words}"):
            store.save([[broken]])
    assert generations(store.directory) == names(1)


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.uint16)])
def test_tensors_that_would_not_come_back_are_refused(store, tensor):
    with pytest.raises(SnapshotError, match="job 'b', chunk 3 cannot be kept"):
        store.save([[JobState("b", {}, [ChunkState(3, {}, {"t": tensor})])]])


# ---- generations ----------------------------------------------------------------------------------------------------


def test_nothing_to_load_is_no_error(store):
    assert store.load() is None
    assert store.newest is None


def test_two_generations_are_kept_and_numbers_go_on(tmp_path):
    for first in (1, 4):
        with SnapshotStore(tmp_path / "s") as store:
            assert [store.save(state(number)) for number in range(first, first + 3)] == [first, first + 1, first + 2]
            assert generations(store.directory) == names(first + 1, first + 2)
            assert store.newest == first + 2
            assert_is_state(store.load().shards, first + 2)


@pytest.mark.parametrize("keep", [1, 3])
def test_keep_says_how_many(tmp_path, keep):
    with SnapshotStore(tmp_path / "s", keep) as store:
        for number in range(1, 6):
            store.save(state(number))
        assert generations(store.directory) == names(*range(6 - keep, 6))


def test_a_damaged_generation_does_not_push_out_the_intact_one(store):
    for number in (1, 2):
        store.save(state(number))
    (store.directory / names(2)[0] / "shard-000.safetensors").unlink()
    assert_is_state(store.load().shards, 1)
    store.save(state(3))
    assert generations(store.directory) == names(1, 2, 3)
    store.save(state(4))
    assert generations(store.directory) == names(3, 4)


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def reseal(directory: Path, change) -> None:
    """Change the manifest and give it a valid hash again, as a bug or an attacker would."""
    content = read_manifest(directory / "manifest.json")
    (directory / "manifest.json").unlink()
    write_manifest(directory / "manifest.json", change(content) or content)


def seal_text(directory: Path, text: bytes) -> None:
    digest = xxhash.xxh3_64_hexdigest(text)
    (directory / "manifest.json").write_bytes(f'{{"xxh3_64": "{digest}", "manifest":\n'.encode() + text + b"}\n")


def first_tensor(content, value):
    content["shards"][0]["jobs"][0]["chunks"][0]["tensors"]["values"] = value


def first_job(content, **fields):
    content["shards"][0]["jobs"][0].update(fields)


SHARD = "shard-001.safetensors"
DAMAGES = {
    "first byte of a tensor file": (lambda d: flip(d / SHARD, 0), SHARD, "header"),
    "header of a tensor file": (lambda d: flip(d / SHARD, 100), SHARD, "header"),
    "a tensor": (lambda d: flip(d / SHARD, -1), SHARD, "xxh3-64"),
    "middle of a tensor": (lambda d: flip(d / SHARD, -5000), SHARD, "xxh3-64"),
    "truncated tensors": (lambda d: os.truncate(d / SHARD, 10_000), SHARD, "size"),
    "one byte more": (lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size + 1), SHARD, "size"),
    "empty tensor file": (lambda d: os.truncate(d / SHARD, 0), SHARD, "size"),
    "missing tensor file": (lambda d: (d / SHARD).unlink(), SHARD, "No such file"),
    "swapped shards": (lambda d: shutil.copy(d / "shard-000.safetensors", d / SHARD), SHARD, "xxh3-64"),
    "manifest's hash": (lambda d: flip(d / "manifest.json", 15), "manifest.json", "xxh3-64"),
    "manifest's start": (lambda d: flip(d / "manifest.json", 0), "manifest.json", "xxh3-64"),
    "manifest's middle": (lambda d: flip(d / "manifest.json", 300), "manifest.json", "xxh3-64"),
    "manifest's end": (lambda d: flip(d / "manifest.json", -2), "manifest.json", "cut-off"),
    "truncated manifest": (lambda d: os.truncate(d / "manifest.json", 400), "manifest.json", "cut-off"),
    "empty manifest": (lambda d: os.truncate(d / "manifest.json", 0), "manifest.json", "cut-off"),
    "missing manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json", "No such file"),
    "manifest is a directory": (
        lambda d: ((d / "manifest.json").unlink(), (d / "manifest.json").mkdir()),
        "manifest.json",
        "Is a directory",
    ),
    "empty directory": (lambda d: (shutil.rmtree(d), d.mkdir()), "manifest.json", "No such file"),
    "a file instead": (lambda d: (shutil.rmtree(d), d.touch()), "manifest.json", "Not a directory"),
    "newer format": (
        lambda d: reseal(d, lambda c: c.update(format=2)),
        "manifest.json",
        r"unknown format \(expected 1, got 2",
    ),
    "no format": (lambda d: reseal(d, lambda c: c.pop("format") and None), "manifest.json", "unknown format"),
    "other generation": (lambda d: reseal(d, lambda c: c.update(generation=9)), "manifest.json", "another generation"),
    "not an object": (lambda d: seal_text(d, b"[1]"), "manifest.json", "JSON object"),
    "not JSON": (lambda d: seal_text(d, b"{"), "manifest.json", "not JSON"),
    "bottomless": (lambda d: seal_text(d, b"[" * 1_000_000), "manifest.json", "not JSON"),
    "shards missing": (lambda d: reseal(d, lambda c: c.pop("shards") and None), "manifest.json", "'shards'"),
    "shards of another type": (lambda d: reseal(d, lambda c: c.update(shards=[3])), "manifest.json", "'size_bytes'"),
    "job without name": (lambda d: reseal(d, lambda c: first_job(c, name=None)), "manifest.json", "'name'"),
    "chunks of another type": (lambda d: reseal(d, lambda c: first_job(c, chunks={})), "manifest.json", "'chunks'"),
    "key of another type": (
        lambda d: reseal(d, lambda c: first_job(c, chunks=[{"key": True, "meta": {}, "tensors": {}}])),
        "manifest.json",
        "'key'",
    ),
    "deep meta": (
        lambda d: reseal(d, lambda c: first_job(c, meta=json.loads('{"a":' * 90 + "1" + "}" * 90))),
        "manifest.json",
        "too deeply",
    ),
    "unknown dtype": (
        lambda d: reseal(d, lambda c: first_tensor(c, ["object", [1]])),
        "manifest.json",
        "unknown dtype",
    ),
    "other dtype": (lambda d: reseal(d, lambda c: first_tensor(c, ["int32", [1000]])), "shard-000", "header"),
    "other shape": (lambda d: reseal(d, lambda c: first_tensor(c, ["float32", [10, 100]])), "shard-000", "header"),
    "larger shape": (lambda d: reseal(d, lambda c: first_tensor(c, ["float32", [2**55]])), "shard-000", "size"),
    "overflowing shape": (
        lambda d: reseal(d, lambda c: first_tensor(c, ["float32", [0, 2**62, 2**62]])),
        "manifest.json",
        "no tensor is this large",
    ),
    "negative shape": (lambda d: reseal(d, lambda c: first_tensor(c, ["float32", [-4]])), "manifest.json", "shape"),
    "shape of words": (lambda d: reseal(d, lambda c: first_tensor(c, ["float32", ["4"]])), "manifest.json", "shape"),
    "many dimensions": (
        lambda d: reseal(d, lambda c: first_tensor(c, ["float32", [1] * 99])),
        "manifest.json",
        "shape",
    ),
    "other size": (
        lambda d: reseal(d, lambda c: c["shards"][0].update(size_bytes=c["shards"][0]["size_bytes"] + 1)),
        "shard-000",
        "size",
    ),
    "no tensor": (lambda d: reseal(d, lambda c: first_tensor(c, 5)), "manifest.json", r"\[dtype, shape\]"),
    "a shard more": (
        lambda d: reseal(d, lambda c: c["shards"].append(c["shards"][0])),
        "shard-002.safetensors",
        "No such file",
    ),
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


@pytest.mark.parametrize("file", ["manifest.json", "shard-000.safetensors"])
def test_a_flipped_bit_anywhere_is_found(store, file):
    store.save([[JobState("a", {"b": 1}, [ChunkState(0, {}, {"t": torch.arange(9), "u": torch.ones(3)})])]])
    path = store.directory / names(1)[0] / file
    for place in range(path.stat().st_size):
        flip(path, place)
        with pytest.raises(SnapshotError, match=file):
            store.load()
        flip(path, place)
    assert store.load() is not None


@pytest.mark.parametrize("file", ["manifest.json", "shard-000.safetensors"])
def test_a_file_cut_off_anywhere_is_found(store, file):
    store.save([[JobState("a", {"b": 1}, [ChunkState(0, {}, {"t": torch.arange(9)})])]])
    path = store.directory / names(1)[0] / file
    for size_bytes in reversed(range(path.stat().st_size)):
        os.truncate(path, size_bytes)
        with pytest.raises(SnapshotError, match=file):
            store.load()


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


def test_large_claims_ask_for_no_memory(store):
    store.save(state(1))
    reseal(store.directory / names(1)[0], lambda c: first_tensor(c, ["float32", [2**50]]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError, match="size"):
        store.load()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


# ---- writing fails --------------------------------------------------------------------------------------------------


def test_the_rename_comes_after_every_fsync_and_before_the_last(store, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recording_rename(old, new):
        events.append(f"{Path(old).name} -> {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    store.save(state(1))
    unfinished = "unfinished-000000000001"
    assert events == [
        "shard-000.safetensors",
        "shard-001.safetensors",
        "manifest.json",
        unfinished,
        f"{unfinished} -> {names(1)[0]}",
        "snapshots",
    ]


@pytest.mark.parametrize("failing", range(5))
def test_a_failed_fsync_keeps_the_older_generation(store, monkeypatch, failing):
    fsync = os.fsync
    calls = []

    def failing_fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if len(calls) == failing + 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    store.save(state(1))
    monkeypatch.setattr(os, "fsync", failing_fsync)
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


def test_an_interrupted_save_leaves_nothing(store, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(state(1))
    assert generations(store.directory) == []


def test_the_first_failure_says_that_there_is_nothing_older(store, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(SnapshotError, match="there is no older one"):
        store.save(state(1))


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


def test_a_full_disk_keeps_the_older_generation(mounted):
    with SnapshotStore(mounted / "s") as store:
        store.save(state(1))
        for _ in range(3):
            with pytest.raises(SnapshotError) as caught:
                store.save(state(2, numel=100_000))
            text = str(caught.value)
            assert "No space left on device" in text
            assert "shard-000.safetensors" in text
            assert "expected room for 4800096 bytes" in text
            assert "generation 1 stays durable" in text
            assert generations(store.directory) == names(1)
        assert_is_state(store.load().shards, 1)
        store.save(state(5))
        assert_is_state(store.load().shards, 5)


def test_a_read_only_disk_is_refused_at_the_start_and_survived_later(mounted):
    with SnapshotStore(mounted / "s") as store:
        store.save(state(1))
        assert _mount("--bind", str(mounted), str(mounted)) == 0
        try:
            assert _mount("-o", "remount,bind,ro", str(mounted)) == 0
            with pytest.raises(SnapshotError, match=r"Read-only file system \(.*generation 1 stays durable"):
                store.save(state(2))
            assert_is_state(store.load().shards, 1)
            store.close()
            with pytest.raises(SnapshotError, match=r"must be writable.*Read-only file system.*mounted/s"):
                SnapshotStore(mounted / "s").open()
            with pytest.raises(SnapshotError, match=r"must be writable.*Read-only file system"):
                SnapshotStore(mounted / "other").open()
        finally:
            subprocess.run(["umount", "--lazy", mounted], check=True, timeout=10)
    with SnapshotStore(mounted / "s") as store:
        store.save(state(2))
        assert_is_state(store.load().shards, 2)


def test_a_failed_commit_leaves_what_has_its_name_alone(store):
    store.save(state(1))
    shutil.copytree(store.directory / names(1)[0], store.directory / names(2)[0])
    with pytest.raises(SnapshotError, match="generation 2 was not written"):
        store.save(state(2))
    assert generations(store.directory) == names(1, 2)
    store.save(state(3))
    assert_is_state(store.load().shards, 3)


def test_a_generation_that_cannot_be_pruned_fails_no_save(store, monkeypatch, caplog):
    def no_rename(*_):
        raise OSError(errno.EIO, "Input/output error")

    for number in (1, 2):
        store.save(state(number))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: no_rename() if "generation-" in str(a) else rename(a, b))
    assert store.save(state(3)) == 3
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("what", ["directory", "lock"])
def test_a_directory_made_anew_is_locked_anew(store, what):
    store.save(state(1))
    if what == "directory":
        shutil.rmtree(store.directory)
        store.directory.mkdir()
    else:
        (store.directory / "lock").unlink()
    for number in (2, 3):
        store.save(state(number))
    assert len(generations(store.directory)) == 2
    with pytest.raises(SnapshotError, match=f"lock held by process {os.getpid()}\\)"):
        SnapshotStore(store.directory).open()


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
    for _ in range(15):
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


def test_leftovers_are_removed_at_the_start_and_nothing_else(tmp_path):
    directory = tmp_path / "s"
    with SnapshotStore(directory) as store:
        store.save(state(1))
    for name in ("unfinished-000000000002", "discarded-000000000000"):
        shutil.copytree(directory / names(1)[0], directory / name)
    (directory / "notes.txt").write_text("mine")
    with SnapshotStore(directory) as store:
        assert generations(directory) == [*names(1), "notes.txt"]
        assert store.save(state(3)) == 3
        assert_is_state(store.load().shards, 3)


# ---- the directory --------------------------------------------------------------------------------------------------


def test_the_directory_is_created_private_but_its_parent_is_not(tmp_path):
    with SnapshotStore(tmp_path / "s"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    with pytest.raises(SnapshotError, match=r"parent must exist \(got No such file"):
        SnapshotStore(tmp_path / "absent" / "s").open()
    assert not (tmp_path / "absent").exists()


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="File exists"):
        SnapshotStore(tmp_path / "file").open()
    with pytest.raises(SnapshotError, match="Not a directory"):
        SnapshotStore(tmp_path / "file" / "s").open()


def test_a_directory_that_takes_no_new_names_is_refused(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    (tmp_path / "s").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)  # chmod does not bind root
    store = SnapshotStore(tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"must be writable.*Permission denied"):
        store.open()
    monkeypatch.undo()
    with store:  # it let go of the lock
        assert store.load() is None


def test_a_directory_belongs_to_one_store(store):
    with pytest.raises(SnapshotError, match=f"lock held by process {os.getpid()}\\)"):
        SnapshotStore(store.directory).open()
    store.save(state(1))
    store.close()
    with SnapshotStore(store.directory) as other:
        assert_is_state(other.load().shards, 1)


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


def merged(metas):
    return {"of": [meta["shard"] for meta in metas], "list": []}


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


def test_with_the_same_number_of_shards_everything_stays(store):
    saved = state(4, shards=3)
    assert_same(distribute(saved, 3, lambda _: pytest.fail("nothing to merge")), saved)


def test_metas_are_merged_in_order_and_not_shared():
    shards = [[JobState("a", {"shard": 0}, [])], [JobState("b", {"shard": 1}, [])], [JobState("a", {"shard": 2}, [])]]
    first, second = distribute(shards, 2, merged)
    assert [(job.name, job.meta["of"]) for job in first] == [("a", [0, 2]), ("b", [1])]
    assert [(job.name, job.meta["of"]) for job in second] == [("a", [0, 2]), ("b", [1])]
    first[0].meta["list"].append(1)
    assert second[0].meta["list"] == []


def test_chunks_without_values_are_spread_by_number():
    shards = [[JobState("a", {"shard": 0}, [ChunkState(key, {}, {}) for key in range(6)])]]
    assert [len(jobs[0].chunks) for jobs in distribute(shards, 3, merged)] == [2, 2, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_chunk_at_two_shards_is_refused(count):
    shard = [JobState("a", {"shard": 0}, [ChunkState(5, {}, {})])]
    with pytest.raises(SnapshotError, match=r"job 'a', got several of keys \[5\]"):
        distribute([shard, shard], count, merged)
