"""docs/recipes and examples/recipes: each script beside its native twin, or beside one process."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks

import psengine

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"
SHARED = {"native_world", "small_problem", "step_memory"}

Run = tuple[str, ...]  # a script's name and its arguments

PAIRS: list[Run] = [
    ("initial_weights",),
    ("initial_weights", "--outputs", "3"),
    ("sum_and_mean",),
    ("gloo",),
    ("samplers_and_epochs",),
    ("evaluation",),
    ("unused_parameters",),
    ("several_devices",),
    ("several_devices", "--inside", "replicas"),
]
SYNC_BATCH_NORM: list[Run] = [("sync_batch_norm",), ("sync_batch_norm", "--frozen")]
UNEVEN: list[Run] = [("uneven_devices",), ("uneven_devices", "--native")]
BALANCED: Run = ("balanced_memory", "--gpu0-bsz", "64", "--batch-size", "256")
SERVER: list[Run] = [("cpu_parameters",), ("cpu_parameters", "--native")]
has_server = all(map(importlib.util.find_spec, ("zmq", "msgpack", "safetensors", "xxhash")))


def native(run: Run) -> Run:
    return (*run, "--native")


def play(rank: int, world_size: int, runs: list[tuple[Run, int]], on_gpu: bool) -> dict[Run, Any]:
    """Run scripts one after the other, each as torchrun would start it: an agent's store, and these variables."""
    gc.freeze()  # what the ranks were forked with; a collection before each group's end need not look at it
    sys.path.insert(0, str(SCRIPTS))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results: dict[Run, Any] = {}
    for run, port in runs:
        os.environ["MASTER_PORT"] = str(port)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                results[run] = importlib.import_module(run[0]).main(list(run[1:]))
            assert output.getvalue(), "a recipe says what it did"
        except Exception:
            results[run] = traceback.format_exc()
        psengine.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


def play_together(world_size: int, runs: list[Run], on_gpu: bool = False) -> list[dict[Run, Any]]:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    ports = [store.port for store in stores]
    return run_ranks(play, world_size, list(zip(runs, ports, strict=True)), on_gpu, init_group=False)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Run, Any]]:
    return play_together(2, [*PAIRS, *map(native, PAIRS), *SYNC_BATCH_NORM, *UNEVEN, BALANCED, native(BALANCED)])


@pytest.fixture(scope="module")
def one_process() -> dict[Run, Any]:
    servers = SERVER if has_server else []
    uneven = [(*run, "--shares", "1") for run in UNEVEN]
    return play_together(1, [*SYNC_BATCH_NORM, *uneven, ("several_devices",), *servers])[0]


def is_close(values: Any, expected: Any, tolerance: float) -> bool:
    """float32 sums associate otherwise in one process, and each step adds a little to that."""
    pair = (torch.tensor(numbers, dtype=torch.float64) for numbers in (values, expected))
    return torch.allclose(*pair, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("run", PAIRS, ids=" ".join)
def test_a_recipe_and_its_native_twin_agree(two_ranks, run):
    for result in two_ranks:
        assert not isinstance(result[run], str), result[run]
        assert result[run] == result[native(run)], "to the last bit, between two ranks"


def test_only_pretrained_weights_that_fit_are_loaded(two_ranks):
    whole, other_head = (two_ranks[0][run] for run in PAIRS[:2])
    for result in two_ranks:
        assert result[PAIRS[1]] == other_head, "rank 0's, also where the file had nothing"
    assert list(other_head) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert other_head["0.weight"] == whole["0.weight"]
    assert torch.tensor(other_head["2.weight"]).shape == (3, 32)


def test_a_weight_of_another_shape_is_left_out_though_it_has_as_many_elements(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    load_what_fits = importlib.import_module("initial_weights").load_what_fits
    network, path = torch.nn.Linear(4, 2), tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(4, 2), "bias": torch.ones(2), "scale": torch.ones(1)}, path)
    load_what_fits(network, path)
    assert capsys.readouterr().out.splitlines() == [
        "left out: weight (expected shape (2, 4), got (4, 2))",
        "left out: scale, which this network does not have",
        "loaded 1 of 2 tensors",
    ]
    assert network.bias.tolist() == [1.0, 1.0]
    torch.save({"model.bias": torch.ones(2)}, path)
    with pytest.raises(SystemExit, match=r"no weight fits \(expected \['weight', 'bias'\], got \['model.bias'\]\)"):
        load_what_fits(network, path)


def test_sums_within_two_ranks_average_to_fourteen(two_ranks):
    for run in (("sum_and_mean",), ("sum_and_mean", "--native")):
        for result in two_ranks:
            assert list(result[run].values()) == [1.5, 3.0, 3.0, 14.0]


def test_evaluation_counts_every_sample_once(two_ranks):
    assert [result[("evaluation",)]["count"] for result in two_ranks] == [203, 203]


@pytest.mark.parametrize("run", SYNC_BATCH_NORM, ids=" ".join)
def test_synchronised_batch_norm_is_one_process_s(two_ranks, one_process, run):
    for result in two_ranks:
        assert not isinstance(result[run], str), result[run]
        assert is_close(result[run], one_process[run], 1e-9)
    assert one_process[SYNC_BATCH_NORM[0]] != one_process[SYNC_BATCH_NORM[1]]


def test_uneven_shares_train_like_one_process(two_ranks, one_process):
    expected = one_process[(*UNEVEN[0], "--shares", "1")]
    for run in UNEVEN:
        for result in two_ranks:
            assert not isinstance(result[run], str), result[run]
            assert is_close(result[run], expected, 1e-4)


def test_gpu0_bsz_is_a_share_that_saves_memory(two_ranks):
    small, large = (result[BALANCED] for result in two_ranks)
    assert not isinstance(small, str), small
    assert (small["batch"], large["batch"]) == (64, 192)
    # Each of 16 layers keeps its input and GELU's, of 256 floats a sample.
    assert small["activations"] >= 16 * 2 * 64 * 1024
    assert large["activations"] == 3 * small["activations"]
    assert is_close(small["gradients"], two_ranks[0][native(BALANCED)]["gradients"], 1e-5)
    assert small["activations"] == two_ranks[0][native(BALANCED)]["activations"]


def test_split_models_train_like_one_process(two_ranks, one_process):
    assert is_close(two_ranks[0][("several_devices",)], one_process[("several_devices",)], 1e-5)


PARALLELISM: Run = ("compare_parallelism", "--width", "16", "--hidden", "64", "--layers", "2", "--batch-size", "16")


def test_data_model_and_hybrid_parallelism_compute_the_same():
    results = play_together(4, [PARALLELISM, native(PARALLELISM)])[0]
    ours, native_ones = results[PARALLELISM], results[native(PARALLELISM)]
    assert not isinstance(ours, str), ours
    assert list(ours) == ["data", "model", "hybrid"]
    for way in ours.values():
        assert way["loss"] == pytest.approx(ours["data"]["loss"], rel=1e-5)
    for way, row in native_ones.items():
        assert row["loss"] == pytest.approx(ours[way]["loss"], rel=1e-6)
        assert row["state"] == ours[way]["state"]
        assert row["activations"] == ours[way]["activations"]
    # Weights and biases inside are split, and the outer biases are not. Weights, gradients and Adam's two moments.
    outer, inner = 2 * 16, 2 * (16 * 64 + 64 + 64 * 16)
    assert [ours[way]["state"] for way in ours] == [4 * 4 * (outer + inner // parts) for parts in (1, 4, 2)]


def test_a_hybrid_of_four_ranks_trains_like_one_process(one_process):
    results = play_together(4, [("hybrid",), ("hybrid", "--native")])
    for result in results:
        assert not isinstance(result[("hybrid",)], str), result[("hybrid",)]
        assert result[("hybrid",)] == result[("hybrid", "--native")], "to the last bit: two replicas"
    assert results[0] == results[2], "replicas are equal"
    assert results[1] == results[3]
    parts = [{name: torch.tensor(value) for name, value in results[part][("hybrid",)].items()} for part in (0, 1)]
    together = [
        torch.cat([part["weight_in"] for part in parts]),
        torch.cat([part["bias_in"] for part in parts]),
        torch.cat([part["weight_out"] for part in parts], dim=1),
        parts[0]["bias_out"],
    ]
    values = torch.cat([tensor.flatten() for tensor in together]).tolist()
    assert is_close(values, one_process[("several_devices",)], 1e-5)


@pytest.mark.skipif(not has_server, reason="the packages of the extra server are missing")
def test_weights_in_the_server_are_master_weights_by_hand(one_process):
    ours, by_hand = (one_process[run] for run in SERVER)
    assert not isinstance(ours, str), ours
    assert is_close(ours, by_hand, 1e-5)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU to compute on, beside the CPU that keeps weights"
)
def test_weights_in_the_server_and_compute_on_the_gpu():
    ours, by_hand = (play_together(1, SERVER, on_gpu=True)[0][run] for run in SERVER)
    assert not isinstance(ours, str), ours
    assert is_close(ours, by_hand, 1e-4)


def blocks() -> list[Any]:
    found = []
    for page in sorted(PAGES.glob("*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            found.append(pytest.param(block, id=f"{page.stem}-{len(found)}"))
    return found


@pytest.mark.parametrize("block", blocks())
def test_the_pages_python_is_python(block):
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "psengine":
            assert hasattr(psengine, node.attr), f"psengine.{node.attr}"


def test_pages_and_scripts_name_each_other():
    pages = {page.stem: page.read_text() for page in PAGES.glob("*.md")}
    for script in SCRIPTS.glob("*.py"):
        if script.stem not in SHARED:
            page = re.search(r"docs/recipes/(\w+)\.md", script.read_text())
            assert page, f"{script.name} names no page"
            assert f"examples/recipes/{script.name}" in pages[page[1]]
    for name, text in pages.items():
        assert len(text.splitlines()) <= 120, name
        if name != "index":
            assert f"({name}.md)" in pages["index"], f"{name}.md is missing in index.md"
        for path in re.findall(r"examples/recipes/\w+\.py", text):
            assert (ROOT / path).exists(), f"{name}.md names {path}"


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(p.name for p in SCRIPTS.glob("*.py") if p.stem not in SHARED))
def test_a_script_runs_as_its_first_lines_say(script):
    ranks = 4 if script in ("hybrid.py", "compare_parallelism.py") else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(SCRIPTS / script)], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
